"""The engine of stage 05: that of stage 02, with a step in flight while the next is prepared."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from shared.engine.banner import log_banner
from shared.engine.batch import Batch, Schedule, build_batch
from shared.engine.block_manager import BlockManager
from shared.engine.commit import abandon, commit
from shared.engine.model_runner import ModelRunner
from shared.engine.queues import Queues
from shared.engine.requests import RequestSide
from shared.engine.result import Handle, Runner, RunnerLost
from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable
from shared.engine.trace import StepClock, StepRecorder
from shared.models.files import ModelFiles
from shared.outputs import StepOutput

from .config import Config
from .scheduler import ResultsNeeded, Scheduler

logger = logging.getLogger(__name__)

IGNORED_OPTIONS = ("tensor_parallel_size", "data_parallel_size")


@dataclass
class Flight:
    """A step that has been submitted and not committed."""

    schedule: Schedule
    batch: Batch
    handle: Handle
    clock: StepClock

    @property
    def prompts(self) -> list[Sequence]:
        rows = zip(self.schedule.sequences, self.batch.decoding.tolist(), strict=True)
        return [sequence for sequence, decoding in rows if not decoding]


class Engine(RequestSide):
    """Knows token ids only; text is the business of whoever drives it (LLM, a server)."""

    cuts_prompts = True
    decodes_in_front = True

    def __init__(self, config: Config, runner: Runner | None = None) -> None:
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
        self.flight: Flight | None = None
        log_banner(__package__, self.describe(), config, IGNORED_OPTIONS)

    def step(self) -> list[StepOutput]:
        """Submit the step after the one in flight, then wait for that one and commit it. A failing
        forward pass ends its own requests, with `error` set in their outputs. Raises RuntimeError
        if nothing can advance."""
        self.check_open()
        outputs: list[StepOutput] = []
        if self.flight is None:
            self.flight = self._launch(outputs)
        ahead = None if self.flight is None else self._launch(outputs)
        outputs += self._land()
        self.flight = ahead
        return outputs

    def _launch(self, outputs: list[StepOutput]) -> Flight | None:
        """Schedule, build, submit. None: there is nothing to do, or nothing without the results of
        the step in flight; or it failed, and `outputs` says whose end that is."""
        if not self.queues.has_unfinished:
            return None
        clock = StepClock()
        in_flight = None if self.flight is None else self.flight.prompts
        try:
            schedule = self.scheduler.schedule_ahead(in_flight)
        except ResultsNeeded:
            return None
        if not schedule.sequences:
            if self.flight is None:
                raise RuntimeError(f"no progress is possible for {self.queues.waiting[0]}")
            return None
        clock.lap()
        batch = build_batch(schedule, self.table)
        try:
            handle = self.runner.submit(batch)
        except RunnerLost:
            raise  # who knows how long the step in flight would take
        except Exception as error:
            # What is in flight is sound, and may be the end of some of them.
            outputs += self._land()
            outputs += self._failed(schedule, error)
            return None
        clock.lap()
        return Flight(schedule, batch, handle, clock)

    def _land(self) -> list[StepOutput]:
        """Wait for the step in flight, if there is one, and commit it. Rows whose sequence has
        ended since it was submitted come to nothing: what they computed was in vain."""
        flight, self.flight = self.flight, None
        if flight is None:
            return []
        flight.clock.resume()
        try:
            result = flight.handle.result()
        except Exception as error:
            return self._failed(flight.schedule, error)
        flight.clock.lap()
        schedule, batch, clock = flight.schedule, flight.batch, flight.clock
        outputs = commit(schedule, batch, result, self.table, self.block_manager, self.queues)
        graph = flight.handle.used_graph
        self.recorder.step(schedule, batch, outputs, clock, graph, self.queues, self.block_manager)
        return outputs

    def _failed(self, schedule: Schedule, error: Exception) -> list[StepOutput]:
        logger.exception("a step failed; its requests end", exc_info=error)
        self.recorder.failed_step()
        return abandon(schedule, error, self.queues)

    def close(self) -> None:
        """Drop all requests and release memory and files. Idempotent."""
        self.flight = None
        super().close()
