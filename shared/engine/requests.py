"""The side of an engine that faces requests: the same in every stage, whatever its steps do."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.request import check_request, check_request_id, make_sequences
from shared.engine.result import Runner
from shared.engine.seeds import request_seed
from shared.engine.slots import Limits
from shared.engine.stats import EngineStats
from shared.engine.trace import StepRecord, StepRecorder
from shared.sampling_params import SamplingParams


class RequestSide:
    """Methods over what a stage's Engine builds in its `__init__`."""

    limits: Limits
    queues: Queues
    runner: Runner
    block_manager: BlockManager
    recorder: StepRecorder
    eos_token_ids: tuple[int, ...]
    seeds: np.random.Generator
    cuts_prompts: bool
    """Can it compute a prompt in several steps? If not, a prompt must fit the budget of one."""
    decodes_in_front: bool
    """Do its mixed batches have the decodes before the chunks?"""

    closed = False

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int] | np.ndarray,
        params: SamplingParams,
    ) -> None:
        """Queue a request. Raises ValueError, with nothing enqueued, if it can never run, and
        RuntimeError after `close`."""
        check_request_id(request_id)
        if request_id in self.queues:
            raise ValueError(f"request_id {request_id!r} is already running")
        tokens = self.check_request(prompt_token_ids, params)
        seed = request_seed(params, self.seeds)
        self.queues.add(
            make_sequences(request_id, tokens, params, self.limits, self.eos_token_ids, seed)
        )

    def check_request(
        self, prompt_token_ids: SequenceOf[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        """The prompt as an array. Raises what `add_request` would raise; enqueues nothing."""
        self.check_open()
        return check_request(prompt_token_ids, params, self.limits, self.cuts_prompts)

    def abort_request(self, request_id: str) -> None:
        """Drop a request; nothing more comes out of it. Idempotent."""
        self.queues.abort(request_id)

    def abort_sequence(self, request_id: str, index: int) -> None:
        """Drop one completion of a request. Idempotent."""
        self.queues.abort(request_id, index)

    def has_unfinished_requests(self) -> bool:
        return self.queues.has_unfinished

    @property
    def max_model_length(self) -> int:
        return self.limits.max_model_length

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    def describe(self) -> dict[str, object]:
        """Effective settings, for the banner and for benchmark results."""
        return self.runner.describe()

    def stats(self) -> EngineStats:
        """Where things stand between two steps."""
        queues, manager = self.queues, self.block_manager
        return EngineStats(
            running=len(queues.running),
            waiting=len(queues.waiting),
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            free_blocks=manager.num_free_blocks,
            cached_blocks=manager.num_cached_blocks,
            preemptions=queues.num_preemptions,
            prefix_queried_tokens=queues.num_queried_tokens,
            prefix_hit_tokens=queues.num_hit_tokens,
            counters=self.recorder.counters,
        )

    def listen(self, on: bool) -> None:
        """Keep a record of every step for `take_step_records`, from the next step on."""
        self.recorder.listen(on)

    def take_step_records(self) -> list[StepRecord]:
        """What has been recorded since the last look; only the newest if that is long ago."""
        return self.recorder.take()

    def check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the engine is closed")

    def close(self) -> None:
        """Drop all requests and release memory and files. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.queues.clear()
        self.runner.close()
        self.recorder.close()
