"""What every stage's engine offers; servers, benchmarks and tests rely on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shared.config import EngineConfig
from shared.engine.slots import Limits
from shared.engine.stats import EngineStats
from shared.engine.trace import StepRecord
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer


class Engine(Protocol):
    config: EngineConfig
    tokenizer: Tokenizer | None
    """None for dummy weights of a real size: there are no files to read one from."""

    eos_token_ids: tuple[int, ...]

    limits: Limits
    """What it can hold."""

    @property
    def cuts_prompts(self) -> bool:
        """Can it compute a prompt in several steps? If not, a prompt must fit the budget of one."""
        ...

    @property
    def max_model_length(self) -> int:
        """The effective maximum of prompt and output tokens of a sequence."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        """The prompt as an array. Raises the ValueError that `add_request` would raise; enqueues
        nothing."""
        ...

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> None:
        """Queue a request. Raises ValueError, with nothing enqueued, if it can never run."""
        ...

    def abort_request(self, request_id: str) -> None:
        """Drop a request between steps; nothing more comes out of it. Idempotent."""
        ...

    def abort_sequence(self, request_id: str, index: int) -> None:
        """Drop one of a request's completions."""
        ...

    def step(self) -> list[StepOutput]:
        """Advance. An empty list is legal: a step may only have computed a part of a prompt."""
        ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> EngineStats:
        """Where things stand between two steps."""
        ...

    def listen(self, on: bool) -> None:
        """Keep a record of every step for `take_step_records`, from the next step on."""
        ...

    def take_step_records(self) -> list[StepRecord]:
        """What has been recorded since the last look; only the newest if that is long ago."""
        ...

    def describe(self) -> dict[str, object]:
        """Effective settings."""
        ...

    def close(self) -> None:
        """Release memory and files. Idempotent."""
        ...
