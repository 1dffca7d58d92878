"""The options of this stage: those of stage 01."""

from __future__ import annotations

from steps import load


class Config(load("01_chunked_prefill").Config):  # type: ignore[misc]
    """Sizes of prefills, and how they share a step with decodes."""
