"""From pieces of text to what goes over the wire: one body, or server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.engine.output import CompletionDelta

from .api_types import StreamOptions
from .errors import as_api_error
from .generation import Generation, Piece

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499  # nginx's number; nobody is there to read it

encode = msgspec.json.Encoder().encode


class Format(Protocol):
    """How an endpoint writes the choices of its answers."""

    object_name: str
    chunk_name: str

    def chunk(self, piece: Piece) -> Any:
        """For a stream: what is new of a choice."""
        ...

    def choice(self, piece: Piece) -> Any:
        """For a body: all of a choice."""
        ...


async def body(generation: Generation, format: Format, head: dict[str, Any]) -> Response:
    """`head`: id, created, model."""
    parts: list[list[Piece]] = [[] for _ in generation.choices]
    async with contextlib.aclosing(generation.pieces()) as batches:
        async for pieces in batches:
            for piece in pieces:
                parts[piece.choice.index].append(piece)
    answer = {
        "object": format.object_name,
        **head,
        "choices": [format.choice(_joined(pieces)) for pieces in parts],
        "usage": generation.usage(),
        "metrics": generation.times(),
    }
    return Response(encode(answer), media_type="application/json")


def _joined(pieces: list[Piece]) -> Piece:
    deltas = [piece.delta for piece in pieces]
    logprobs = [row for delta in deltas for row in delta.logprobs or []]
    whole = CompletionDelta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        logprobs or None,
        deltas[-1].finish_reason,
    )
    return Piece(pieces[0].choice, whole, True, pieces[0].prompt_logprobs)


async def events(
    generation: Generation, format: Format, head: dict[str, Any], options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, those of one moment together. A failure before the first is raised; a
    later one is an event of its own, since the status has been sent."""
    head = {"object": format.chunk_name, **head}
    is_started = False
    try:
        async with contextlib.aclosing(generation.pieces()) as batches:
            async for pieces in batches:
                yield _chunks(pieces, generation, format, head, options)
                is_started = True
        yield _last(generation, head, options)
    except Exception as error:
        if not is_started:
            raise
        yield _event(as_api_error(error).body) + DONE


def _chunks(
    pieces: list[Piece],
    generation: Generation,
    format: Format,
    head: dict[str, Any],
    options: StreamOptions,
) -> bytes:
    chunks = [{**head, "choices": [format.chunk(piece)]} for piece in pieces]
    if options.continuous_usage_stats:
        for chunk in chunks:
            chunk["usage"] = generation.usage()
    elif options.include_usage:
        for chunk in chunks:
            chunk["usage"] = None
    if not generation.num_unfinished and not options.include_usage:
        chunks[-1]["metrics"] = generation.times()
    return b"".join(map(_event, chunks))


def _last(generation: Generation, head: dict[str, Any], options: StreamOptions) -> bytes:
    if not options.include_usage:
        return DONE
    usage, times = generation.usage(), generation.times()
    return _event({**head, "choices": [], "usage": usage, "metrics": times}) + DONE


def _event(content: object) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, as fast as the client reads. Whatever ends it, they are closed."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        """`first` is there already: the status depended on it."""
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # or nginx collects a stream before passing it on
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._rest):
            with contextlib.suppress(ClientGone):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientGone(Exception):
    """Nobody is there to read the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the client is; the work is cancelled then.

    The request's body must have been read: what `receive` says next is that the client has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
