"""Client processes: each receives a share of the streams, one parent decides when to send.

The parent keeps the schedule and the limit on clients, so that both mean the same with any number
of processes. While a plan runs, only indices go back and forth; requests are handed over before
and observations after, or they would disturb what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection

import msgspec

from bench.online.driver import LocalClient, ProcessUse, UseMeter
from bench.online.observe import Observation
from bench.online.plan import Job
from bench.online.sender import HttpSender, HttpTarget, http_session

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0


class _Load(msgspec.Struct, tag=True):
    jobs: list[Job]


class _Send(msgspec.Struct, tag=True):
    index: int


class _Collect(msgspec.Struct, tag=True):
    indices: list[int]


class _Loaded(msgspec.Struct, tag=True):
    pass


class _Ended(msgspec.Struct, tag=True):
    index: int
    ok: bool


class _Collected(msgspec.Struct, tag=True):
    seen: list[Observation]
    use: ProcessUse


_Order = _Load | _Send | _Collect
_Report = _Loaded | _Ended | _Collected
_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(_Order).decode
_decode_report = msgspec.msgpack.Decoder(_Report).decode


def _on_message(
    connection: Connection, take: Callable[[bytes], None], gone: Callable[[], None]
) -> None:
    """The running loop hands over every message of a pipe, and says when the other end is gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while connection.poll():
                take(connection.recv_bytes())
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            gone()

    loop.add_reader(connection.fileno(), read)


# --- in a client process -------------------------------------------------------------------------


def _work(connection: Connection, target: HttpTarget) -> None:
    # Ctrl-C reaches every process of the terminal; the parent closes the pipe when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_obey(connection, target))


async def _obey(connection: Connection, target: HttpTarget) -> None:
    over = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()
    async with http_session(target.api_key) as session:
        client = _Worker(connection, HttpSender(session, target))

        def take(message: bytes) -> None:
            task = asyncio.ensure_future(client.obey(_decode_order(message)))
            tasks.add(task)
            task.add_done_callback(done)

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                # The parent waits for an answer; the end of this process is one.
                logger.error("a client process fails", exc_info=error)
                over.set()

        _on_message(connection, take, over.set)
        await over.wait()


class _Worker(LocalClient):
    def __init__(self, connection: Connection, sender: HttpSender) -> None:
        super().__init__(sender)
        self._connection = connection

    async def obey(self, order: _Order) -> None:
        match order:
            case _Load(jobs):
                await self.load(jobs)
                self._report(_Loaded())
            case _Send(index):
                self._report(_Ended(index, await self.send(index)))
            case _Collect(indices):
                self._report(_Collected([self._seen[i] for i in indices], self._use.so_far()))

    def _report(self, report: _Report) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and this process about to be
            self._connection.send_bytes(_encode(report))


# --- in the parent -------------------------------------------------------------------------------


class _Process:
    """One client process, seen from the parent."""

    def __init__(self, target: HttpTarget) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, target), daemon=True)
        self._process.start()
        theirs.close()
        self.indices: list[int] = []
        self.under_way: dict[int, asyncio.Future[bool]] = {}
        self.answer: asyncio.Future[_Loaded | _Collected] | None = None

    def watch(self) -> None:
        _on_message(self.connection, self._take, self._gone)

    def _take(self, message: bytes) -> None:
        report = _decode_report(message)
        if isinstance(report, _Ended):
            self.under_way.pop(report.index).set_result(report.ok)
        elif self.answer is not None:
            self.answer.set_result(report)

    def _gone(self) -> None:
        error = RuntimeError("a client process ended before its requests did")
        for future in [*self.under_way.values(), self.answer]:
            if future is not None and not future.done():
                future.set_exception(error)

    async def ask(self, order: _Load | _Collect) -> _Loaded | _Collected:
        self.answer = asyncio.get_running_loop().create_future()
        self.connection.send_bytes(_encode(order))
        return await self.answer

    async def send(self, index: int) -> bool:
        ended = self.under_way[index] = asyncio.get_running_loop().create_future()
        self.indices.append(index)
        self.connection.send_bytes(_encode(_Send(index)))
        return await ended

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self.connection.close()
        self._process.join(JOIN_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class ProcessPool:
    """A client of several processes. Each request goes to the one with the fewest under way."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self._use = UseMeter()

    async def load(self, jobs: Sequence[Job]) -> None:
        """Every process gets all jobs: which of them it sends depends on how long each takes."""
        for process in self._processes:
            process.indices = []
        await asyncio.gather(*(p.ask(_Load(list(jobs))) for p in self._processes))
        self._use = UseMeter()

    async def send(self, index: int) -> bool:
        return await min(self._processes, key=lambda p: len(p.under_way)).send(index)

    async def collect(self) -> tuple[list[Observation], list[ProcessUse]]:
        seen: dict[int, Observation] = {}
        uses = [self._use.so_far()]
        for process in self._processes:
            report = await process.ask(_Collect(process.indices))
            assert isinstance(report, _Collected)
            seen.update(zip(process.indices, report.seen, strict=True))
            uses.append(report.use)
        return [seen[index] for index in sorted(seen)], uses


@contextlib.asynccontextmanager
async def process_pool(target: HttpTarget, count: int) -> AsyncIterator[ProcessPool]:
    processes = [_Process(target) for _ in range(count)]
    try:
        for process in processes:
            process.watch()
        yield ProcessPool(processes)
    finally:
        for process in processes:
            process.close()
