"""Engines behind a front end, for tests: over a fake model, or with their pool in reach.

The fake ones import no torch, so that a process with one is there in half a second.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np

import steps
from shared.engine.batch import build_batch
from shared.engine.block_manager import BlockManager
from shared.engine.commit import abandon, commit
from shared.engine.queues import Queues
from shared.engine.requests import RequestSide
from shared.engine.slots import Limits, SlotTable
from shared.engine.trace import StepClock, StepRecorder
from tests.fakes import VOCABULARY, FakeRunner

SECONDS = 10.0
LIMITS = Limits(
    vocab_size=VOCABULARY,
    block_size=16,
    num_blocks=1000,
    max_model_length=8192,
    max_num_sequences=64,
    max_num_batched_tokens=2000,
)


def online(module: str) -> Any:
    """A module of stage 03."""
    return importlib.import_module(f"steps.03_online.{module}")


def config(**options: Any) -> Any:
    """Of a model without files; the fake engines look at nothing in it."""
    return online("config").Config(model="qwen3-0.6b", load_format="dummy", **options)


class FakeEngine(RequestSide):
    """Stage 01's scheduler over a FakeRunner, checking its pool after every step."""

    cuts_prompts = True
    eos_token_ids = ()

    def __init__(self, options: dict[str, Any], end: Any = None) -> None:
        self.config = online("config").Config(**options)
        self.recorder = StepRecorder(None)
        self.runner = FakeRunner(LIMITS)
        self.limits = LIMITS
        self.table = SlotTable(LIMITS)
        self.block_manager = BlockManager(self.table, True)
        self.queues = Queues(self.table, self.block_manager)
        stage = steps.load("01_chunked_prefill")
        # The engine that the front end would run may be another stage's, with other options.
        its_own = self.config.wrapped.model_dump(include=set(stage.Config.model_fields))
        self.scheduler = stage.Scheduler(stage.Config(**its_own), self.queues, self.block_manager)
        self.seeds = np.random.default_rng(0)
        self.num_steps = 0

    def step(self) -> Any:
        self.num_steps += 1
        self.before_step()
        clock = StepClock()
        schedule = self.scheduler.schedule()
        clock.lap()
        batch = build_batch(schedule, self.table)
        try:
            self.before_forward()
            handle = self.runner.submit(batch)
        except MemoryError as error:
            return abandon(schedule, error, self.queues)
        self.runner.batches.clear()
        clock.lap()
        clock.lap()
        outputs = commit(
            schedule, batch, handle.result(), self.table, self.block_manager, self.queues
        )
        self.recorder.step(schedule, batch, outputs, clock, False, self.queues, self.block_manager)
        if self.num_steps % 16 == 0 or not self.has_unfinished_requests():
            self.block_manager.check()
        return outputs

    def before_step(self) -> None:
        pass

    def before_forward(self) -> None:
        pass


class Slow(FakeEngine):
    """5 ms a step."""

    def before_step(self) -> None:
        time.sleep(0.005)


class Dying(FakeEngine):
    """By an error of its own, in its third step."""

    def before_step(self) -> None:
        if self.num_steps == 3:
            raise RuntimeError("no progress is possible")


class Entangled(Dying):
    """And leaves a thread that does not end."""

    def __init__(self, options: dict[str, Any], end: Any = None) -> None:
        super().__init__(options)
        threading.Thread(target=time.sleep, args=(60,)).start()


class Failing(FakeEngine):
    """Its third step fails and ends the requests in it."""

    def before_forward(self) -> None:
        if self.num_steps == 3:
            raise MemoryError("no room")


class Stuck(FakeEngine):
    """Its third step takes a minute."""

    def before_step(self) -> None:
        if self.num_steps == 3:
            time.sleep(60)


class Busy(FakeEngine):
    """Its second step takes a while."""

    def before_step(self) -> None:
        if self.num_steps == 2:
            time.sleep(0.3)


class Fussy(FakeEngine):
    """Refuses what every other engine would take."""

    def add_request(self, request_id: str, *arguments: Any) -> None:
        if request_id.startswith("bad"):
            raise ValueError("prompt_token_ids displease me")
        super().add_request(request_id, *arguments)


def unusable(options: dict[str, Any], end: Any) -> Any:
    raise ValueError("num_kvcache_blocks=7 does not please me")


def unreadable(options: dict[str, Any], end: Any) -> Any:
    return open("/nonexistent/model")


def broken(options: dict[str, Any], end: Any) -> Any:
    raise ZeroDivisionError("out of luck")


def vanishing(options: dict[str, Any], end: Any) -> Any:
    os._exit(7)


class CheckedEngine:
    """An engine that checks its pool after every step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        outputs = self._engine.step()
        self._engine.block_manager.check()
        return outputs


class DistantPool:
    """What the contract looks at, of engines in threads: the fullest. They check themselves."""

    def __init__(self, behind: list[Any]) -> None:
        self._behind = behind

    def check(self) -> None:
        pass

    @property
    def num_free_blocks(self) -> int:
        """Once everything that was sent has been taken."""
        self._wait()
        return min(int(engine.block_manager.num_free_blocks) for engine in self._behind)

    @property
    def num_free(self) -> int:
        self._wait()
        return min(int(engine.table.num_free) for engine in self._behind)

    def _wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        while any(engine.has_unfinished_requests() for engine in self._behind):
            assert time.monotonic() < deadline, "the engine does not fall idle"
            time.sleep(0.001)


def engine_in_thread(module: ModuleType, config: Any) -> Any:
    """A wrapping stage's Engine; each engine behind it in a thread."""
    is_parallel = hasattr(config, "of_replica")
    builder = "replica" if is_parallel else "config"
    build_engine = importlib.import_module(f"{module.__name__}.{builder}").build_engine
    behind: list[Any] = []

    def build(options: dict[str, Any], end: Any) -> Any:
        engine = build_engine(options, end)
        behind.append(engine)
        return CheckedEngine(engine)

    EngineClient = online("client").EngineClient
    if is_parallel:
        configs = [config.of_replica(number) for number in range(config.data_parallel_size)]
        clients = [EngineClient(one, build, in_process=True) for one in configs]
        engine = module.Engine(config, clients)
    else:
        engine = module.Engine(config, EngineClient(config, build, in_process=True))
    engine.block_manager = engine.table = DistantPool(behind)
    return engine
