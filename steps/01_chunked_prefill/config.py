"""The options that this stage adds."""

from __future__ import annotations

from typing import Literal

from shared.config import ChunkedPrefillConfig


class Config(ChunkedPrefillConfig):
    """Sizes of prefills, and how they share a step with decodes."""

    mixed_batch: Literal["unified", "separate"] = "unified"
    """unified: a step's decodes and chunks share one forward pass. separate: they run in two steps,
    decodes first, so that their tokens need not wait for the chunks."""
