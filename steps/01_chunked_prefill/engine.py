"""The engine of stage 01: that of stage 00, without its limit on the length of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

import numpy as np

from shared.engine.banner import log_banner
from shared.engine.batch import build_batch
from shared.engine.block_manager import BlockManager
from shared.engine.commit import abandon, commit
from shared.engine.model_runner import ModelRunner
from shared.engine.queues import Queues
from shared.engine.request import check_request, make_sequences
from shared.engine.result import Runner
from shared.engine.slots import SlotTable
from shared.engine.trace import StepClock, TraceWriter
from shared.models.files import ModelFiles
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

from .config import Config
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

IGNORED_OPTIONS = ("tensor_parallel_size", "data_parallel_size")


class Engine:
    """Knows token ids only; text is the business of whoever drives it (LLM, a server)."""

    def __init__(self, config: Config, runner: Runner | None = None) -> None:
        """`runner`: something else than the real model, for tests. Raises ValueError or OSError
        naming the option or file that is wrong."""
        self.config = config
        files = ModelFiles.find(config.model, config.load_format)
        self.tokenizer = files.tokenizer()
        self.eos_token_ids = files.config.eos_token_ids
        self.runner = runner or ModelRunner(config, files.config, files.weights)
        self.limits = self.runner.limits
        self.table = SlotTable(self.limits)
        self.block_manager = BlockManager(self.table, config.enable_prefix_caching)
        self.queues = Queues(self.table, self.block_manager)
        self.scheduler = Scheduler(config, self.queues, self.block_manager)
        self.seeds = np.random.default_rng(config.seed)
        self.trace: TraceWriter | None = None
        if config.trace is not None:
            self.trace = TraceWriter(config.trace, self.queues, self.block_manager)
        log_banner(__package__, self.describe(), config, IGNORED_OPTIONS)

    def step(self) -> list[StepOutput]:
        """Schedule, build, submit, wait, commit. A failing forward pass ends its own requests, with
        `error` set in their outputs. Raises RuntimeError if nothing can advance."""
        if not self.queues.has_unfinished:
            return []
        clock = StepClock()
        schedule = self.scheduler.schedule()
        if not schedule.sequences:
            raise RuntimeError(f"no progress is possible for {self.queues.waiting[0]}")
        clock.lap()
        batch = build_batch(schedule, self.table)
        try:
            handle = self.runner.submit(batch)
            clock.lap()
            result = handle.result()
        except Exception as error:
            logger.exception("a step failed; its requests end")
            return abandon(schedule, error, self.queues)
        clock.lap()
        outputs = commit(schedule, batch, result, self.table, self.block_manager, self.queues)
        if self.trace:
            self.trace.write(schedule, batch, clock, handle.used_graph)
        return outputs

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams
    ) -> None:
        """Queue a request. Raises ValueError, with nothing enqueued, if it can never run."""
        if request_id in self.queues:
            raise ValueError(f"request_id {request_id!r} is already running")
        tokens = self.check_request(prompt_token_ids, params)
        seed = params.seed if params.seed is not None else int(self.seeds.integers(2**63))
        self.queues.add(
            make_sequences(request_id, tokens, params, self.limits, self.eos_token_ids, seed)
        )

    def check_request(
        self, prompt_token_ids: SequenceOf[int], params: SamplingParams
    ) -> np.ndarray:
        """The prompt as an array. Raises the ValueError that `add_request` would raise."""
        return check_request(prompt_token_ids, params, self.limits)

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

    def close(self) -> None:
        """Release memory and files. Idempotent."""
        self.runner.close()
        if self.trace:
            self.trace.close()
