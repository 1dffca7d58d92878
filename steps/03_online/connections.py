"""Connections as uvicorn keeps them, with an end: a client that does not send, does not read, or
is one too many may not hold a descriptor for ever.

    waiting for a request, or for its rest   request_timeout     408, or just closed if nothing came
    not taking what has been written         STALL_SECONDS       dropped
    more than max_connections                at once             503
    sending what nobody wants any more       LINGER_SECONDS      dropped

Closing a socket with unread input resets it, and the client may lose the answer to what it is
still sending. So such a connection is closed on this side only, and the rest of the input thrown
away for a while.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answers import encode
from .errors import ApiError

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0
LINGER_SECONDS = 2.0
# Of a body that has been answered before it was read.
MAX_DISCARDED_BYTES = 64 * 2**20
# Connections over the limit that are told so at a time; others are dropped.
MAX_REFUSALS = 64
# Between two lines in the log about connections that are one too many.
WARNING_SECONDS = 60.0


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 2048
    request_timeout: float = 30.0
    """Seconds for a request to arrive, head and body, from when the server waits for it."""


class Connections:
    """Those of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.num_open = 0
        self._next_warning = 0.0

    def protocol(self) -> type[asyncio.Protocol]:
        """For uvicorn.Config's `http`."""
        # All that uvicorn does with a class is to call it.
        return cast(type[asyncio.Protocol], partial(LimitedProtocol, self))

    def warn(self) -> None:
        """That there are too many; now and then."""
        now = asyncio.get_running_loop().time()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            most = self.limits.max_connections
            logger.warning("connections are refused: %d are open, as many as may be", most)


class LimitedProtocol(H11Protocol):
    def __init__(self, among: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._among = among
        self._limits = among.limits
        self._request_deadline: asyncio.TimerHandle | None = None
        self._reading_deadline: asyncio.TimerHandle | None = None
        self._is_lingering = False
        self._num_discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _Transport(transport, self))
        # asyncio does this for sockets of a named protocol only, and listening ones have none.
        # Without it an answer's second piece waits for the client's acknowledgement: 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._among.num_open += 1
        num_surplus = self._among.num_open - self._limits.max_connections
        if num_surplus > MAX_REFUSALS:
            transport.abort()
        elif num_surplus > 0:
            self._among.warn()
            self._refuse(ApiError(503, "too many connections", code="too_many_connections"))
        else:
            self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._among.num_open -= 1
        self._unset_keepalive_if_required()  # uvicorn forgets it after an error
        for deadline in (self._request_deadline, self._reading_deadline):
            if deadline is not None:
                deadline.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        super().data_received(data)
        if self.cycle is not None and self.cycle.response_complete:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_discarded = 0
        self._watch_request()

    def eof_received(self) -> None:
        # asyncio closes, as `close` does: once all has been written.
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_deadline is not None and not self._transport.is_closing():
            self._reading_deadline.cancel()
            self._reading_deadline = None

    def shutdown(self) -> None:
        if self._is_lingering:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1", code="invalid_http"))

    def close(self) -> None:
        """Of this side at least, and once all has been written."""
        if self.is_closing:
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._linger()
        else:
            self._transport.close()
            self._watch_reading()

    @property
    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    @property
    def _transport(self) -> asyncio.Transport:
        """asyncio's own."""
        return cast(_Transport, self.transport).wrapped

    @property
    def _is_receiving(self) -> bool:
        """A request has begun and not ended, or the first one has not begun."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY

    def _watch_request(self) -> None:
        is_watched = self._request_deadline is not None
        if self._is_receiving and not is_watched:
            self._request_deadline = self.loop.call_later(
                self._limits.request_timeout, self._request_is_late
            )
        elif self._request_deadline is not None and not self._is_receiving:
            self._request_deadline.cancel()
            self._request_deadline = None

    def _request_is_late(self) -> None:
        has_begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if not has_begun or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        seconds = self._limits.request_timeout
        message = f"the request has not arrived within {seconds:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _watch_reading(self) -> None:
        if self._reading_deadline is None:
            self._reading_deadline = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        """Answer instead of the application, and no further request."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of another answer
            return
        content = encode(error.body)
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
            ("Connection", "close"),
        ]
        for event in (
            h11.Response(
                status_code=error.status_code,
                headers=headers,
                reason=HTTPStatus(error.status_code).phrase,
            ),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # it waits for the rest of the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        self._is_lingering = True
        transport = self._transport
        transport.resume_reading()
        transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, transport.abort)


class _Transport:
    """asyncio's, but for how it is closed."""

    def __init__(self, wrapped: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self.wrapped = wrapped
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol.is_closing
