"""The engine for an asyncio program: one stream of outputs per request.

Everything here runs in the event loop's thread. Nothing is queued per output: a stream that nobody
reads holds one merged output per completion, however long that lasts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol

import numpy as np

from shared.engine.stats import EngineStats
from shared.engine.trace import MAX_UNREAD, StepRecord
from shared.models.files import ModelFiles
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

from .client import RETRY_SECONDS, EngineClient, EngineClosedError, EngineDeadError, dead
from .config import Build, OnlineConfig
from .messages import EngineInfo, Merged, Progress

__all__ = [
    "AsyncEngine",
    "EngineClosedError",
    "EngineDeadError",
    "QueueFull",
    "RequestRefused",
    "Stream",
]


class QueueFull(RuntimeError):
    """As many requests are unfinished as may be."""


class RequestRefused(ValueError):
    """The engine itself refused a request that had passed every check on this side."""


class Replica(Protocol):
    """One engine, as whoever runs the server sees it."""

    tokenizer: Tokenizer | None
    num_restarts: int

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def outstanding_tokens(self) -> int: ...

    def step_records(self) -> AsyncGenerator[list[StepRecord], None]: ...


class Stream(AsyncIterator[list[StepOutput]]):
    """Outputs of one request: each time, all that has come since, merged to one per completion.

    Ends after the last completion's finish_reason. Raises EngineDeadError as soon as the engine has
    ended, and RequestRefused. Leaving early needs `abort` or `aclose`.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, num_completions: int) -> None:
        self.request_id = request_id
        self._engine = engine
        self._unfinished = set(range(num_completions))
        self._unread = Merged()
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def __anext__(self) -> list[StepOutput]:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.take()

    def abort_sequence(self, index: int) -> None:
        """Drop one completion, read or not; nothing more comes of it. Idempotent."""
        if index in self._unfinished:
            self._engine._abort(self.request_id, index)
            self._unread.discard(self.request_id, index)
            self._leave(index)

    def abort(self) -> None:
        """Drop what has not finished, between two steps of the engine; the iteration ends.
        Idempotent."""
        if self._unfinished:
            self._engine._abort(self.request_id)
            self._unfinished.clear()
        self._unread.take()
        self._changed.set()

    async def aclose(self) -> None:
        self.abort()

    def _put(self, output: StepOutput) -> None:
        self._unread.add([output])
        if output.finish_reason is not None:
            self._leave(output.index)
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._unfinished.clear()
        self._changed.set()

    def _leave(self, index: int) -> None:
        self._unfinished.discard(index)
        if not self._unfinished:
            self._engine._forget(self.request_id)
        self._changed.set()


class AsyncEngine:
    """`await AsyncEngine.start(config)`, then `generate` as often as you like, then `close`."""

    num_restarts = 0
    """Nothing starts it again."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, max_queued_requests: int
    ) -> None:
        self.tokenizer = tokenizer
        """None where the model has none. The engine itself knows ids only."""
        self.died = asyncio.Event()
        """Set when the engine has ended, by itself or by `close`."""
        self._client = client
        self.max_queued_requests = max_queued_requests
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        self._streams: dict[str, Stream] = {}
        self._listeners: set[_Listener] = set()
        self._flush_is_due = False
        self._watched: list[int] = []
        self._next_look: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watch()

    @classmethod
    async def start(
        cls,
        config: OnlineConfig,
        *,
        in_process: bool = False,
        max_queued_requests: int = 1024,
        build: str | Build | None = None,
    ) -> AsyncEngine:
        """Returns when the engine is ready. Raises what its start raised: ValueError or OSError
        naming the option or file that is wrong, or EngineStartError.

        `in_process` and `build` are those of EngineClient.
        """
        tokenizer = await asyncio.to_thread(read_tokenizer, config)
        client = EngineClient(config, build, in_process)
        return await cls.over(client, tokenizer, max_queued_requests)

    @classmethod
    async def over(
        cls, client: EngineClient, tokenizer: Tokenizer | None, max_queued_requests: int
    ) -> AsyncEngine:
        """As `start`, with a client whose engine is starting."""
        engine = cls(client, tokenizer, max_queued_requests)
        try:
            await engine._started.wait()
            if engine.error is not None:
                raise engine.error
            engine._look_for_hang()
        except BaseException:
            await engine._end(0)
            raise
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._client.ready_info

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines behind this front end: this one. A later stage has several."""
        return (self,)

    @property
    def stats(self) -> EngineStats:
        """The newest that has come: at most 50 ms old while the engine is busy."""
        return self._client.stats

    @property
    def num_unfinished(self) -> int:
        """Requests."""
        return len(self._streams)

    @property
    def error(self) -> Exception | None:
        """Why the engine has ended; None while it lives."""
        if self._ending is not None and not self.died.is_set():
            return EngineDeadError("the engine is ending")
        return self._client.error

    @property
    def is_alive(self) -> bool:
        return self.error is None

    @property
    def outstanding_tokens(self) -> int:
        """Work that is left, as EngineClient counts it."""
        return self._client.outstanding_tokens

    def expects(self, request_id: str) -> bool:
        """Is there such a request, unfinished?"""
        return self._client.expects(request_id)

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        """The prompt as [n] int32. Raises the ValueError that `generate` would raise, and
        EngineDeadError."""
        return self._client.check_request(prompt_token_ids, params)

    def generate(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> Stream:
        """Queue a request. Raises ValueError if it can never run, QueueFull, and EngineDeadError;
        the engine does not hear of it then."""
        self._client.check_alive()
        if self.num_unfinished >= self.max_queued_requests:
            raise QueueFull(f"{self.num_unfinished} requests are unfinished, as many as may be")
        self._client.add(request_id, prompt_token_ids, params)
        stream = self._streams[request_id] = Stream(self, request_id, params.n)
        self._flush_soon()
        return stream

    async def step_records(self) -> AsyncGenerator[list[StepRecord], None]:
        """What the engine does, step by step; recorded only while somebody listens. Who is slow
        misses the oldest records. Ends with the engine."""
        listener = _Listener()
        self._listeners.add(listener)
        self._listen()
        try:
            while self.is_alive:
                await listener.changed.wait()
                listener.changed.clear()
                if listener.records:
                    records = list(listener.records)
                    listener.records.clear()
                    yield records
        finally:
            self._listeners.discard(listener)
            self._listen()

    async def close(self) -> None:
        """End the engine; what is unfinished fails with EngineDeadError. Idempotent."""
        await self._end()

    async def _end(self, *timeout: float) -> None:
        self._unwatch()
        if self._ending is not None:
            await asyncio.wait([self._ending])  # not cancelled with whoever waits
        self._client.stop()
        # In a thread: it waits for the engine to finish its step.
        await asyncio.to_thread(self._client.close, *timeout)
        self._note_end()

    def _abort(self, request_id: str, index: int | None = None) -> None:
        self._client.abort(request_id, index)
        if index is None:
            self._forget(request_id)
        self._flush_soon()

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def _listen(self) -> None:
        if self.is_alive:
            self._client.listen(bool(self._listeners))
            self._flush_soon()

    def _flush_soon(self) -> None:
        """At the end of this turn of the loop: what comes together travels together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if not self._client.flush():
            self._flush_is_due = True
            self._loop.call_later(RETRY_SECONDS, self._flush)
        self._receive()  # a send may have swallowed the sign that something has come

    def _watch(self) -> None:
        transport = self._client.transport
        endpoint, lifeline = transport.endpoint.fileno(), transport.lifeline.fileno()
        self._loop.add_reader(endpoint, self._receive)
        self._loop.add_reader(lifeline, self._listen_for_end)
        self._watched = [endpoint, lifeline]

    def _unwatch(self) -> None:
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._watched.clear()
        if self._next_look is not None:
            self._next_look.cancel()

    def _receive(self) -> None:
        while (progress := self._client.receive()) is not None:
            self._dispatch(progress)
        if self._client.info is not None:
            self._started.set()

    def _listen_for_end(self) -> None:
        self._receive()  # what it has said before
        if self._client.hears_end():
            self._unwatch()  # the end closes what is watched
            self._ending = self._loop.create_task(self._follow_to_end())

    def _look_for_hang(self) -> None:
        self._receive()
        if self._client.notes_hang():
            self._listen_for_end()
        elif (seconds := self._client.look_seconds) is not None:
            self._next_look = self._loop.call_later(seconds, self._look_for_hang)

    async def _follow_to_end(self) -> None:
        # In a thread: a process takes a while to give back a GPU's memory, and streams of other
        # engines must not wait for it.
        await asyncio.to_thread(self._client.transport.reap)
        self._client.listen_for_end()
        self._note_end()

    def _dispatch(self, progress: Progress) -> None:
        for output in progress.outputs:
            self._streams[output.request_id]._put(output)
        for refused in progress.refused:
            self._streams.pop(refused.request_id)._fail(RequestRefused(refused.message))
        if progress.records:
            for listener in self._listeners:
                listener.records.extend(progress.records)
                listener.changed.set()

    def _note_end(self) -> None:
        self.died.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            assert self.error is not None, "it has ended"
            stream._fail(dead(self.error))
        for listener in self._listeners:
            listener.changed.set()
        self._started.set()


class _Listener:
    """Somebody who reads step records."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MAX_UNREAD)
        self.changed = asyncio.Event()


def read_tokenizer(config: OnlineConfig) -> Tokenizer | None:
    return ModelFiles.find(config.model, config.load_format).tokenizer()
