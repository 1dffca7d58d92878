"""The options that this stage adds."""

from __future__ import annotations

from pydantic import NonNegativeInt

from shared.config import ChunkedPrefillConfig


class Config(ChunkedPrefillConfig):
    """Sizes of prefills, and how long they may let decodes have the step for themselves."""

    max_prefill_defer: NonNegativeInt = 3
    """Most steps in a row for which waiting prompts let the running decodes have the step for
    themselves."""
