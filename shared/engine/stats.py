"""What an engine counts: cheap enough for every step, enough for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class StepCounters(msgspec.Struct, kw_only=True):
    """Since the engine started."""

    decode_steps: int = 0
    """Steps of decodes only."""
    prefill_steps: int = 0
    """Steps of prompts only."""
    mixed_steps: int = 0
    failed_steps: int = 0
    graph_steps: int = 0
    """Steps that replayed a CUDA graph."""
    eager_steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; those of a preempted sequence count again."""
    generation_tokens: int = 0
    schedule_seconds: float = 0.0
    forward_seconds: float = 0.0
    """Building and submitting batches; on cpu the forward pass itself."""
    wait_seconds: float = 0.0
    """Waiting for sampled ids."""


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot between two steps."""

    running: int = 0
    """Sequences, as are `waiting`."""
    waiting: int = 0
    num_blocks: int = 0
    block_size: int = 0
    free_blocks: int = 0
    """Held by no sequence; some of them may still be found by their content."""
    cached_blocks: int = 0
    """Findable by their content, held by a sequence or not."""
    preemptions: int = 0
    """Since the engine started, as is everything below."""
    prefix_queried_tokens: int = 0
    """Tokens of admitted sequences, each looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Of these, tokens whose KV was there."""
    step_seconds: float = 0.0
    """In `step`. Counted by whoever drives the engine for others, as is `serving_seconds`; 0 where
    nobody does."""
    serving_seconds: float = 0.0
    """Between steps while there was something to do: sending outputs, taking requests."""
    counters: StepCounters = msgspec.field(default_factory=StepCounters)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Of several engines together."""
    summed = _sum(EngineStats(), *stats)
    summed.counters = _sum(StepCounters(), *(one.counters for one in stats))
    summed.block_size = stats[0].block_size if stats else 0
    return summed


def _sum(start: T, *others: T) -> T:
    """Every number of `start` raised by those of the others."""
    for name in start.__struct_fields__:
        if name != "counters":
            setattr(start, name, sum((getattr(one, name) for one in others), getattr(start, name)))
    return start
