"""The life of a server: a port, an engine, requests, and an end that cuts nobody off needlessly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import uvicorn

from .app import Api, ApiOptions, build_app
from .async_engine import AsyncEngine
from .connections import MAX_REFUSALS, ConnectionLimits, Connections

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Of connections that nobody has accepted yet. All of them may be accepted in one turn of the loop.
BACKLOG = 1024
# Files that are open whoever connects.
OTHER_FILES = 128

# For responses of requests that have ended to reach their readers, and between two looks at whether
# all have ended.
LAST_WRITES_SECONDS = 2
POLL_SECONDS = 0.02


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free. Raises OSError that says what to do.

    Made before the engine is, which may take minutes. Who connects meanwhile is answered then.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        flag = "--host" if isinstance(error, socket.gaierror) else "--port"
        raise OSError(f"cannot listen on {host}:{port}: {reason}. Try another {flag}") from error


def allow_open_files(limits: ConnectionLimits) -> None:
    """Raise this process's own limit to what so many connections need. Raises ValueError if it may
    not: accepting would fail, again and again, and end nobody's wait."""
    needed = limits.max_connections + MAX_REFUSALS + BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"max_connections={limits.max_connections} needs {needed} open files, and this process "
            f"may have {hard} (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Stop:
    """What has been asked for: to drain (once) or to stop now (twice)."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def ask(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask; main thread only."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def serve(
    start_engine: Callable[[], Awaitable[AsyncEngine]],
    options: ApiOptions,
    listener: socket.socket,
    stop: Stop,
    drain_timeout: float,
    on_ready: Callable[[Api], None] = lambda api: None,
    connections: Connections | None = None,
) -> None:
    """Serve until `stop` asks for an end. Raises what starting the engine raises.

    `drain_timeout`: seconds for requests to end. After them the engine ends, and whoever still
    waits is told so.
    """
    with listener:
        engine = await _unless(stop.drain, start_engine())
        if engine is None:
            return
        api = Api(engine, options)
        server = _HttpServer(
            uvicorn.Config(
                build_app(api),
                http=(connections or Connections(ConnectionLimits())).protocol(),
                ws="none",
                backlog=BACKLOG,
                log_config=None,
                log_level=logging.ERROR,  # its warnings are about what clients send
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=LAST_WRITES_SECONDS,
            )
        )
        try:
            serving = asyncio.create_task(server.serve([listener]))
            logger.info("serving %s at %s", options.model_name, url_of(listener))
            on_ready(api)
            await _unless(stop.drain, asyncio.shield(serving))
            api.is_draining = True
            await _drain(api, stop, drain_timeout)
            await engine.close()
            server.should_exit = True
            await serving
        finally:
            api.close()
            await engine.close()
        logger.info("stopped")


async def _drain(api: Api, stop: Stop, timeout: float) -> None:
    """Until no request is left, the time is over, or a second signal says so."""
    if not api.is_idle:
        logger.info("stopping: up to %g s for requests to end; again: at once", timeout)

    async def idle() -> None:
        while not api.is_idle:
            await asyncio.sleep(POLL_SECONDS)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await _unless(stop.now, idle())
    if not api.is_idle:
        logger.warning("%d requests are cut off", api.engine.num_unfinished)


async def _unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None once `event` is set; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `Stop`'s business."""
        yield
