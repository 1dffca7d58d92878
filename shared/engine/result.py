"""What comes back from a step, and the protocol between an engine and whatever runs its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shared.engine.batch import Batch
from shared.engine.slots import Limits
from shared.outputs import TokenLogprobs


@dataclass
class StepResult:
    token_ids: np.ndarray  # [K] int32, in the order of the batch's SampleRows
    logprobs: list[TokenLogprobs | None] | None = None  # [K]; None where not asked for
    # Batch row -> log probabilities of the prompt tokens that follow this step's tokens.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class RunnerLost(RuntimeError):
    """What runs the model has ended or is out of step: no later step can be right."""


class Handle(Protocol):
    """A step in flight."""

    used_graph: bool

    def result(self) -> StepResult:
        """Wait for the sampled ids. The only synchronisation of a step."""
        ...


class Runner(Protocol):
    limits: Limits

    def submit(self, batch: Batch) -> Handle:
        """Start a step and return at once; steps run in the order of submission. The next batch
        may be submitted before this one's result is read: decode inputs stay on the device."""
        ...

    def describe(self) -> dict[str, object]:
        """Effective settings, for the banner and for benchmark results."""
        ...

    def close(self) -> None: ...
