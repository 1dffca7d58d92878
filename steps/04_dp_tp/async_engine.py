"""Replicas for an asyncio program: one engine to whoever asks it, several to whoever runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from shared.engine.request import check_request
from shared.engine.seeds import request_seed
from shared.engine.stats import EngineStats, total
from shared.engine.trace import StepRecord
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

from .config import ParallelConfig
from .launch import Launcher, combined, ray_transport
from .online import online
from .router import Router

logger = logging.getLogger(__name__)

# From the end of an engine to the start of the next one: at first, and at most; doubled each time,
# unless it has lived for so long that what ended it is no fault of its start.
FIRST_DELAY = 1.0
MAX_DELAY = 60.0
STEADY_SECONDS = 60.0


class Replica:
    """A place for an engine, which is stage 03's AsyncEngine: when one has ended, the next one is
    started."""

    num_restarts = 0

    def __init__(
        self,
        number: int,
        launcher: Launcher,
        tokenizer: Tokenizer | None,
        max_queued_requests: int,
    ) -> None:
        self.number = number
        self.tokenizer = tokenizer
        self.engine: Any = None
        """The newest. It may have ended."""
        self._launcher = launcher
        self.max_queued_requests = max_queued_requests

    @property
    def info(self) -> Any:
        return self.engine.info

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self.engine.stats
        return stats

    @property
    def is_alive(self) -> bool:
        return bool(self.engine.is_alive)

    @property
    def num_unfinished(self) -> int:
        return int(self.engine.num_unfinished)

    @property
    def outstanding_tokens(self) -> int:
        return int(self.engine.outstanding_tokens)

    def step_records(self) -> AsyncGenerator[list[StepRecord], None]:
        """Ends with the engine that is there now."""
        records: AsyncGenerator[list[StepRecord], None] = self.engine.step_records()
        return records

    async def start(self) -> None:
        """Returns when an engine is ready. Raises what its start raised."""
        # In a thread: what starts it may have to look for a place first.
        starting = asyncio.ensure_future(asyncio.to_thread(self._launcher.start, self.number))
        try:
            client = await asyncio.shield(starting)
        except asyncio.CancelledError:
            while not starting.done():  # a second cancellation must not lose it either
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([starting])
            if starting.exception() is None:
                starting.result().close(0)
            raise
        self.engine = await online("async_engine").AsyncEngine.over(
            client, self.tokenizer, self.max_queued_requests
        )

    async def keep(self, on_end: Callable[[int], None]) -> None:
        """Start the next engine whenever one has ended, until this is cancelled. `on_end` is told
        the replica's number each time."""
        delay = 0.0
        while True:
            begun = time.monotonic()
            await self.engine.died.wait()
            on_end(self.number)
            is_steady = time.monotonic() - begun >= STEADY_SECONDS
            delay = FIRST_DELAY if is_steady or not delay else min(2 * delay, MAX_DELAY)
            logger.error(
                "replica %d is down: %s; the next start is in %g s",
                self.number, self.engine.error, delay,
            )  # fmt: skip
            await asyncio.sleep(delay)
            try:
                await self.start()
            except Exception as error:
                logger.error("replica %d has not started: %s", self.number, error)
            else:
                self.num_restarts += 1
                logger.info("replica %d is back", self.number)

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()


class AsyncEngine:
    """What stage 03's AsyncEngine offers a server, over replicas that it keeps running."""

    def __init__(
        self,
        config: ParallelConfig,
        replicas: Sequence[Replica],
        tokenizer: Tokenizer | None,
        max_queued_requests: int,
    ) -> None:
        """All replicas are ready."""
        self.replicas = replicas
        self.tokenizer = tokenizer
        self._config = config
        self.max_queued_requests = max_queued_requests
        limits = self.info.limits
        self._router = Router(len(replicas), config.routing, limits.block_size, limits.num_blocks)
        self._is_closed = False
        self._seeds = np.random.default_rng(config.seed)
        self._keepers = [
            asyncio.create_task(replica.keep(self._router.forget)) for replica in replicas
        ]

    @classmethod
    async def start(
        cls,
        config: ParallelConfig,
        *,
        in_process: bool = False,
        max_queued_requests: int = 1024,
        build: Any = None,
    ) -> AsyncEngine:
        """Returns when all replicas are ready. Raises what the start of one raised: ValueError or
        OSError naming the option or file that is wrong, or EngineStartError; the others have ended.

        `in_process` and `build` are those of EngineClient.
        """
        tokenizer = await asyncio.to_thread(online("async_engine").read_tokenizer, config)
        if config.distributed_backend == "ray":
            ray_transport().connect()  # not in a thread
        launcher = await asyncio.to_thread(Launcher, config, build, in_process)
        replicas = [
            Replica(number, launcher, tokenizer, max_queued_requests)
            for number in range(config.data_parallel_size)
        ]
        starts = [asyncio.create_task(replica.start()) for replica in replicas]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await _cancelled(starts)
            await asyncio.gather(*(replica.close() for replica in replicas))
            raise
        return cls(config, replicas, tokenizer, max_queued_requests)

    @property
    def info(self) -> Any:
        """Of all replicas together. A restarted one may have another number of blocks than before:
        what it shares a GPU with has changed."""
        return combined(self._config, [replica.info for replica in self.replicas])

    @property
    def stats(self) -> EngineStats:
        """Of all replicas that live."""
        return total([replica.stats for replica in self._live])

    @property
    def num_unfinished(self) -> int:
        """Requests."""
        return sum(replica.num_unfinished for replica in self.replicas)

    @property
    def error(self) -> Exception | None:
        """Why nothing is served; None while a replica lives."""
        if self._live:
            return None
        client = online("client")
        if self._is_closed:
            return client.EngineClosedError("the engine is closed")
        return client.EngineDeadError("no replica is running")

    @property
    def is_alive(self) -> bool:
        """Is there a replica that lives?"""
        return bool(self._live)

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        """The prompt as [n] int32. Raises the ValueError that `generate` would raise, and
        EngineDeadError."""
        self._check_alive()
        info = self.info
        return check_request(prompt_token_ids, params, info.limits, info.cuts_prompts)

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> Any:
        """Queue a request: its Stream, of stage 03. Raises ValueError if it can never run, and
        QueueFull, and EngineDeadError if no replica lives; none hears of it then."""
        tokens = self.check_request(prompt_token_ids, params)
        if self.num_unfinished >= self.max_queued_requests:
            raise online("async_engine").QueueFull(
                f"{self.num_unfinished} requests are unfinished, as many as may be"
            )
        if any(replica.engine.expects(request_id) for replica in self.replicas):
            raise ValueError(f"request_id {request_id!r} is already running")
        loads = {replica.number: replica.outstanding_tokens for replica in self._live}
        replica = self.replicas[self._router.choose(tokens, loads)]
        seed = request_seed(params, self._seeds)
        return replica.engine.generate(request_id, tokens, params.model_copy(update={"seed": seed}))

    async def close(self) -> None:
        """End all replicas; what is unfinished fails with EngineDeadError. Idempotent."""
        self._is_closed = True
        await _cancelled(self._keepers)
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    @property
    def _live(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_alive]

    def _check_alive(self) -> None:
        if (error := self.error) is not None:
            raise error


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
