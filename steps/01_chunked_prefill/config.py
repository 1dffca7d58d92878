"""The options that this stage adds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from shared.config import EngineConfig, Positive


class Config(EngineConfig):
    """Sizes of prefills are clamped: to max_num_batched_tokens, and a chunk to what a step may
    prefill. The fields hold what is in effect."""

    max_prefill_tokens_per_step: Annotated[Positive, Field(validate_default=True)] = 8192
    """Most prompt tokens of a step. Smaller: shorter gaps between the tokens of what decodes
    meanwhile, and a later first token."""
    max_prefill_chunk_size: Annotated[Positive, Field(validate_default=True)] = 4096
    """Most tokens of one prompt in a step; the rest of the step is for the prompts behind it."""
    mixed_batch: Literal["unified", "separate"] = "unified"
    """unified: a step's decodes and chunks share one forward pass. separate: they run in two steps,
    decodes first, so that their tokens need not wait for the chunks."""

    @field_validator("max_prefill_tokens_per_step", "max_prefill_chunk_size")
    @classmethod
    def _clamp(cls, value: int, info: ValidationInfo) -> int:
        # Only fields above the one being validated are there, and only if they are valid.
        bounds = ("max_num_batched_tokens", "max_prefill_tokens_per_step")
        return min(value, *(info.data.get(bound, value) for bound in bounds))
