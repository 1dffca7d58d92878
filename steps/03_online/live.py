"""The live page at `/` and its feed: what the engine does, up to ten times a second.

Nothing here runs while nobody looks. While somebody does, one task reads the engine's step records
and sends every viewer the same encoded updates; who reads too slowly misses the oldest.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from shared.engine.stats import EngineStats
from shared.engine.trace import StepRecord

from .answers import EventStream, encode
from .async_engine import Replica
from .generation import Generation

# Between two updates, seconds.
PERIOD = 0.1
# Updates that a viewer may be behind.
MAX_UNREAD = 8
# In one update: steps, chunks of a step (the last stands for the rest), sequences of a queue.
MAX_STEPS = 128
MAX_CHUNKS = 32
MAX_SHOWN = 256
# Of the grid; a bigger pool shows several blocks in each.
MAX_CELLS = 2000
# Newest requests that the latencies speak of.
MAX_LATENCIES = 128

FREE = 0
CACHED = -1
"""Held by nobody; its content can still be found."""


class Hello(msgspec.Struct, tag="hello", tag_field="kind"):
    """First, once."""

    stage: str
    model: str
    talks: str | None
    """"chat"; "completions" without a chat template; None without a tokenizer."""
    blocks_per_cell: int
    num_blocks: int
    block_size: int
    max_num_sequences: int
    max_num_batched_tokens: int
    settings: dict[str, Any]
    engine: int
    """This one, of `num_engines`."""
    num_engines: int


class Bar(msgspec.Struct, array_like=True):
    """One step."""

    step: int
    time: float
    """Seconds, at the start of the step; of one that was submitted ahead, when its turn came."""
    milliseconds: float
    graph: bool
    decodes: int
    """Tokens, one a sequence."""
    chunks: list[tuple[int, int]]
    """(request, prompt tokens computed)."""
    preemptions: int
    hit_tokens: int


class Cells(msgspec.Struct):
    """The grid, each list as runs: length, value, length, value..."""

    owners: list[int]
    """The request that holds most of a cell; FREE or CACHED if none does."""
    used: list[int]
    """Blocks in use. Empty where a cell is one block, as is `cached`."""
    cached: list[int]


class Latency(msgspec.Struct):
    """Of the newest requests, milliseconds: (median, 90th percentile); None: of none yet."""

    ttft: tuple[float, float] | None
    """Of those whose first token has come."""
    tpot: tuple[float, float] | None
    """Of those that have ended."""


class Update(msgspec.Struct, tag="update", tag_field="kind"):
    stats: EngineStats
    unplaced: int
    """Blocks in use that no record has told of: they were taken before anybody looked."""
    cells: Cells
    running: list[int]
    """Requests, one entry a sequence, as `waiting`; the first MAX_SHOWN."""
    waiting: list[int]
    names: dict[int, str]
    """Requests that are new: their ids."""
    latency: Latency
    steps: list[Bar]
    """Those since the last update, the newest MAX_STEPS."""


class BlockMap:
    """Who holds which block, as far as step records tell.

    They do not say which blocks stay findable when they are let go. All that a sequence has filled
    do, so all but its last are taken for cached.
    """

    def __init__(self, num_blocks: int, has_cache: bool) -> None:
        self._owners = np.full(num_blocks, FREE, np.int32)
        self._per_cell = blocks_per_cell(num_blocks)
        self._has_cache = has_cache
        self._holders: dict[int, list[str]] = {}  # block -> sequences
        self._held: dict[str, list[int]] = {}  # sequence -> blocks, in the order of its tokens
        self._requests: dict[str, int] = {}  # sequence -> request, of those that hold blocks
        self._cells: Cells | None = None

    @property
    def num_held(self) -> int:
        return len(self._holders)

    def take(self, block: int, sequence: str, request: int, is_shared: bool) -> None:
        """`is_shared`: others may hold the block as well."""
        if not is_shared:
            self._holders[block] = []
        holders = self._holders.setdefault(block, [])
        if sequence not in holders:
            holders.append(sequence)
        self._held.setdefault(sequence, []).append(block)
        self._requests[sequence] = request
        self._set(block, request)

    def release(self, sequence: str) -> None:
        blocks = self._held.pop(sequence, [])
        self._requests.pop(sequence, None)
        for position, block in enumerate(blocks):
            holders = self._holders.get(block, [])
            if sequence not in holders:  # taken over, in a step whose record was missed
                continue
            holders.remove(sequence)
            if holders:
                self._set(block, self._requests[holders[-1]])
            else:
                del self._holders[block]
                is_full = position < len(blocks) - 1
                self._set(block, CACHED if self._has_cache and is_full else FREE)

    def release_others(self, sequences: Iterable[str]) -> None:
        """All but these have let go."""
        for sequence in self._held.keys() - set(sequences):
            self.release(sequence)

    def cells(self) -> Cells:
        if self._cells is None:
            self._cells = self._make_cells()
        return self._cells

    def _set(self, block: int, owner: int) -> None:
        self._owners[block] = owner
        self._cells = None

    def _make_cells(self) -> Cells:
        size = self._per_cell
        if size == 1:
            return Cells(_runs(self._owners), [], [])
        short = -len(self._owners) % size
        # Sorted, a cell's blocks are CACHED first, then FREE, then those of each request together.
        rows = np.sort(np.pad(self._owners, (0, short)).reshape(-1, size), axis=1)
        used, cached = (rows > FREE).sum(axis=1), (rows == CACHED).sum(axis=1)
        ends = np.ones(rows.shape, bool)
        ends[:, :-1] = rows[:, 1:] != rows[:, :-1]
        places = np.arange(size)
        starts = np.zeros(rows.shape, np.int64)
        starts[:, 1:] = np.where(ends[:, :-1], places[1:], 0)
        lengths = np.where(ends & (rows > FREE), places + 1 - np.maximum.accumulate(starts, 1), 0)
        largest = np.take_along_axis(rows, lengths.argmax(axis=1)[:, None], axis=1)[:, 0]
        owners = np.where(used > 0, largest, np.where(cached > 0, CACHED, FREE))
        return Cells(_runs(owners), _runs(used), _runs(cached))


class Scene:
    """What a viewer sees; from the first viewer's coming to the last one's leaving."""

    def __init__(self, num_blocks: int, has_cache: bool) -> None:
        self._blocks = BlockMap(num_blocks, has_cache)
        self._numbers: dict[str, int] = {}  # request id -> number, of requests in the queues
        self._last_number = 0
        self._running: list[int] = []
        self._waiting: list[int] = []
        self._names: dict[int, str] = {}
        self._steps: deque[Bar] = deque(maxlen=MAX_STEPS)
        self._end = 0.0  # of the last step, as its bar shows it
        self._ttfts: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._tpots: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._shown: EngineStats | None = None
        self._has_news = True

    def observe_ttft(self, seconds: float) -> None:
        self._ttfts.append(seconds)
        self._has_news = True

    def observe_tpot(self, seconds: float) -> None:
        self._tpots.append(seconds)
        self._has_news = True

    def take(self, records: list[StepRecord]) -> None:
        """In the order of their steps, at least one; some may be missing between two calls."""
        for record in records:
            for sequence in record.preemptions:
                self._blocks.release(sequence)
            for block, event, sequence in record.block_events:
                if event in ("alloc", "hit"):
                    self._blocks.take(block, sequence, self._number(sequence), event == "hit")
            self._steps.append(self._bar(record))
        last = records[-1]
        self._blocks.release_others(last.running)
        self._running = [self._number(s) for s in last.running[:MAX_SHOWN]]
        self._waiting = [self._number(s) for s in last.waiting[:MAX_SHOWN]]
        requests = set(map(_request_of, last.running + last.waiting))
        self._numbers = {name: n for name, n in self._numbers.items() if name in requests}
        self._has_news = True

    def update(self, stats: EngineStats) -> Update | None:
        """What is new since the last one; None: nothing."""
        if not self._has_news and stats == self._shown:
            return None
        if not stats.used_blocks:  # the last ones were aborted: no step tells of that
            self._blocks.release_others(())
        if not stats.running:
            self._running = []
        if not stats.waiting:
            self._waiting = []
        update = Update(
            stats,
            max(0, stats.used_blocks - self._blocks.num_held),
            self._blocks.cells(),
            self._running,
            self._waiting,
            self._names,
            self._latency(),
            list(self._steps),
        )
        self._steps.clear()
        self._names = {}
        self._shown, self._has_news = stats, False
        return update

    def _bar(self, record: StepRecord) -> Bar:
        chunks = [(self._number(name), length) for name, _, length in record.prefills]
        if len(chunks) > MAX_CHUNKS:
            rest = sum(length for _, length in chunks[MAX_CHUNKS - 1 :])
            chunks[MAX_CHUNKS - 1 :] = [(chunks[MAX_CHUNKS - 1][0], rest)]
        milliseconds = record.schedule_ms + record.forward_ms + record.wait_ms
        begin = max(record.time, self._end)
        self._end = begin + milliseconds / 1e3
        return Bar(
            record.step,
            round(begin, 6),
            round(milliseconds, 3),
            record.graph,
            len(record.decodes),
            chunks,
            len(record.preemptions),
            sum(tokens for _, tokens in record.prefix_hits),
        )

    def _number(self, sequence: str) -> int:
        """Of its request; counted as they appear, so that neighbours differ in colour."""
        request = _request_of(sequence)
        number = self._numbers.get(request)
        if number is None:
            self._last_number += 1
            number = self._numbers[request] = self._last_number
            if len(self._names) < MAX_SHOWN:
                self._names[number] = request
        return number

    def _latency(self) -> Latency:
        return Latency(_percentiles(self._ttfts), _percentiles(self._tpots))


class Live:
    """The feed of one of a server's engines. `observe_first` and `observe` every request that
    begins and ends on any of them; `feed` is the route."""

    def __init__(self, number: int, replicas: Sequence[Replica], model_name: str) -> None:
        self._number = number
        self._num_engines = len(replicas)
        self._engine = replicas[number]
        self._model_name = model_name
        self._viewers: set[_Viewer] = set()
        self._scene: Scene | None = None
        self._newest = b""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def observe_first(self, ttft: float) -> None:
        if self._scene is not None:
            self._scene.observe_ttft(ttft)

    def observe(self, generation: Generation) -> None:
        if self._scene is not None and not generation.num_unfinished:
            tpot = generation.times()["tpot"]
            if tpot is not None:
                self._scene.observe_tpot(tpot)

    async def feed(self) -> Response:
        """Server-sent events: Hello, then Updates, until the engine ends."""
        events = self.events()
        return EventStream(await anext(events), events)

    async def events(self) -> AsyncGenerator[bytes, None]:
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            if self.is_running:
                viewer.put(self._newest)
            else:
                self._newest = b""
                self._scene = self._new_scene()
                self._task = asyncio.create_task(self._run(self._scene))
            yield _event(self._hello())
            async for event in viewer:
                yield event
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._task is not None:
                task, self._task, self._scene = self._task, None, None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, scene: Scene) -> None:
        reading = asyncio.create_task(self._read(scene))
        try:
            while not reading.done():
                update = scene.update(self._engine.stats)
                if update is not None:
                    self._newest = _event(update)
                    for viewer in self._viewers:
                        viewer.put(self._newest)
                await asyncio.wait({reading}, timeout=PERIOD)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if self._scene in (scene, None):  # not of those who have come since
                for viewer in self._viewers:
                    viewer.end()

    async def _read(self, scene: Scene) -> None:
        async with contextlib.aclosing(self._engine.step_records()) as batches:
            async for records in batches:
                scene.take(records)

    def _new_scene(self) -> Scene:
        info = self._engine.info
        has_cache = bool(info.description.get("enable_prefix_caching", True))
        return Scene(info.limits.num_blocks, has_cache)

    def _hello(self) -> Hello:
        info, tokenizer = self._engine.info, self._engine.tokenizer
        limits = info.limits
        talks = None
        if tokenizer is not None:
            talks = "chat" if tokenizer.has_chat_template else "completions"
        return Hello(
            info.stage,
            self._model_name,
            talks,
            blocks_per_cell(limits.num_blocks),
            limits.num_blocks,
            limits.block_size,
            limits.max_num_sequences,
            limits.max_num_batched_tokens,
            info.description,
            self._number,
            self._num_engines,
        )


class _Viewer:
    """Somebody who looks."""

    def __init__(self) -> None:
        self._unread: deque[bytes] = deque(maxlen=MAX_UNREAD)
        self._changed = asyncio.Event()
        self._has_ended = False

    def put(self, event: bytes) -> None:
        if event:
            self._unread.append(event)
            self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    def __aiter__(self) -> _Viewer:
        return self

    async def __anext__(self) -> bytes:
        while not self._unread:
            if self._has_ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()


async def page() -> Response:
    """The page itself. Nothing of any request is in it, so it asks for no key."""
    content, headers = _page()
    return Response(content, headers=headers, media_type="text/html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    content = Path(__file__).with_name("page.html").read_bytes()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of(content, b'script')}",
            f"style-src {_hash_of(content, b'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return content, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash_of(content: bytes, tag: bytes) -> str:
    """Of the page's one such element: nothing else of its kind may run or apply."""
    (inside,) = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), content, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


def blocks_per_cell(num_blocks: int) -> int:
    return -(-num_blocks // MAX_CELLS)


def _request_of(sequence: str) -> str:
    return sequence.partition("#")[0]


def _percentiles(seconds: Iterable[float]) -> tuple[float, float] | None:
    """Median and 90th percentile, in ms."""
    values = list(seconds)
    if not values:
        return None
    median, high = np.percentile(values, (50, 90)).tolist()
    return round(median * 1e3, 3), round(high * 1e3, 3)


def _runs(values: np.ndarray) -> list[int]:
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    lengths = np.diff(starts, append=len(values))
    return np.stack((lengths, values[starts]), axis=1).ravel().tolist()


def _event(content: Hello | Update) -> bytes:
    return b"data: " + encode(content) + b"\n\n"
