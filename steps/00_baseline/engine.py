"""The engine of stage 00: every part in sight, one step after the other."""

from __future__ import annotations

import logging

import numpy as np

from shared.config import EngineConfig
from shared.engine.banner import log_banner
from shared.engine.batch import build_batch
from shared.engine.block_manager import BlockManager
from shared.engine.commit import abandon, commit
from shared.engine.model_runner import ModelRunner
from shared.engine.queues import Queues
from shared.engine.requests import RequestSide
from shared.engine.result import Runner
from shared.engine.slots import SlotTable
from shared.engine.trace import StepClock, StepRecorder
from shared.models.files import ModelFiles
from shared.outputs import StepOutput

from .scheduler import Scheduler

logger = logging.getLogger(__name__)

IGNORED_OPTIONS = ("tensor_parallel_size", "data_parallel_size")


class Engine(RequestSide):
    """Knows token ids only; text is the business of whoever drives it (LLM, a server)."""

    cuts_prompts = False
    decodes_in_front = False

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        """`runner`: something else than the real model, for tests. Raises ValueError or OSError
        naming the option or file that is wrong."""
        self.config = config
        self.recorder = StepRecorder(config.trace)
        files = ModelFiles.find(config.model, config.load_format)
        self.tokenizer = files.tokenizer()
        self.eos_token_ids = files.config.eos_token_ids
        self.runner = runner or ModelRunner(
            config, files.config, files.weights, self.decodes_in_front
        )
        self.limits = self.runner.limits
        self.table = SlotTable(self.limits)
        self.block_manager = BlockManager(
            self.table, config.enable_prefix_caching, self.recorder.is_recording
        )
        self.queues = Queues(self.table, self.block_manager)
        self.scheduler = Scheduler(config, self.queues, self.block_manager)
        self.seeds = np.random.default_rng(config.seed)
        log_banner(__package__, self.describe(), config, IGNORED_OPTIONS)

    def step(self) -> list[StepOutput]:
        """Schedule, build, submit, wait, commit. A failing forward pass ends its own requests, with
        `error` set in their outputs. Raises RuntimeError if nothing can advance."""
        self.check_open()
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
            self.recorder.failed_step()
            return abandon(schedule, error, self.queues)
        clock.lap()
        outputs = commit(schedule, batch, result, self.table, self.block_manager, self.queues)
        self.recorder.step(
            schedule, batch, outputs, clock, handle.used_graph, self.queues, self.block_manager
        )
        return outputs
