"""Sends every request of a plan when it is due.

Open loop: nothing that happens to a request delays the arrival of the next. A limit on clients
makes requests queue in front of them, in order of arrival, and their latency from scheduled arrival
says so; it does not thin out the arrivals.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from bench.online.observe import Observation
from bench.online.plan import Job, Plan
from bench.online.sender import Sender


class ProcessUse(msgspec.Struct, frozen=True):
    """CPU time of one process between loading a plan and handing over what it saw."""

    cpu_seconds: float
    seconds: float

    @property
    def percent(self) -> float:
        return 100 * self.cpu_seconds / self.seconds if self.seconds > 0 else 0.0


class UseMeter:
    """Measures this process from now on."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def so_far(self) -> ProcessUse:
        return ProcessUse(time.process_time() - self._cpu, time.monotonic() - self._wall)


class Client(Protocol):
    """What sends requests: in this process, or in several others."""

    async def load(self, jobs: Sequence[Job]) -> None: ...

    async def send(self, index: int) -> bool:
        """Sends a job now; returns when it has ended, and whether well."""
        ...

    async def collect(self) -> tuple[list[Observation], list[ProcessUse]]:
        """Once all have ended: their observations in order, and of each process its use."""
        ...


class LocalClient:
    """Sends from this process."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._jobs: Sequence[Job] = ()
        self._seen: dict[int, Observation] = {}
        self._use = UseMeter()

    async def load(self, jobs: Sequence[Job]) -> None:
        self._jobs, self._seen = jobs, {}
        self._use = UseMeter()

    async def send(self, index: int) -> bool:
        seen = self._seen[index] = await self.sender.send(self._jobs[index])
        return seen.failure is None

    async def collect(self) -> tuple[list[Observation], list[ProcessUse]]:
        return [self._seen[i] for i in range(len(self._jobs))], [self._use.so_far()]


class Progress(Protocol):
    """Is told what happens, as it happens."""

    def due(self) -> None: ...
    def sent(self) -> None: ...
    def ended(self, ok: bool) -> None: ...


class Silent:
    def due(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def ended(self, ok: bool) -> None:
        pass


class Driven(msgspec.Struct):
    start: float
    """When the window opened, on the clock of the observations."""
    scheduled: list[float]
    """When each request was due; in a closed loop, when a client was free for it."""
    seen: list[Observation]
    use: list[ProcessUse]


async def drive(
    client: Client, plan: Plan, concurrency: int | None = None, progress: Progress | None = None
) -> Driven:
    """Runs a plan to its end. At most `concurrency` requests are under way at a time."""
    progress = progress or Silent()
    clock = asyncio.get_running_loop().time
    limit: contextlib.AbstractAsyncContextManager[None] = (
        contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    )
    await client.load(plan.jobs)
    start = clock()
    scheduled = [start + (job.arrival or 0.0) for job in plan.jobs]

    async def run(index: int) -> None:
        progress.due()
        async with limit:
            if plan.jobs[index].arrival is None:
                scheduled[index] = clock()
            progress.sent()
            progress.ended(await client.send(index))

    try:
        async with asyncio.TaskGroup() as tasks:
            for index, due in enumerate(scheduled):
                # By the clock and not one after the other: being late once must not add up.
                if (delay := due - clock()) > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(run(index))
    except ExceptionGroup as group:  # failed requests raise nothing: the client itself has failed
        raise group.exceptions[0] from group
    seen, use = await client.collect()
    return Driven(start, scheduled, seen, use)
