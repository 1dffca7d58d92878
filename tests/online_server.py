"""The HTTP server in a thread of the test process, over an engine in another one.

with ServerThread() as server:
    httpx.get(f"{server.url}/health")
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import steps
from tests.fakes import fake_engine

app = importlib.import_module("steps.03_online.app")
connections = importlib.import_module("steps.03_online.connections")
server = importlib.import_module("steps.03_online.server")

TIMEOUT = 60
"""Seconds that anything a test waits for may take."""


class ServerThread:
    """Listens on a free loopback port until the `with` block ends."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        drain_timeout: float = TIMEOUT,
        start: dict[str, Any] | None = None,
        stage: str = "03_online",
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`config`: of the stage; `start`: of AsyncEngine.start; `limits`: ConnectionLimits;
        `options`: ApiOptions."""
        self.stage = stage
        self.start = {"in_process": True, **(start or {})}
        self.config = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 200}
        self.config |= config or {}
        self.options = app.ApiOptions(**{"model_name": "tiny", **options})
        self.connections = connections.Connections(connections.ConnectionLimits(**(limits or {})))
        self.drain_timeout = drain_timeout
        self.listener = server.listen("127.0.0.1", 0)
        self.url: str = server.url_of(self.listener)
        self.port: int = self.listener.getsockname()[1]
        self.api: Any = None
        self.engine_in_thread: Any = None  # of a fake server
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(TIMEOUT) or self.api is None:
            raise RuntimeError("the server did not start") from self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self.stop()
        self.join()

    @property
    def engine(self) -> Any:
        return self.api.engine

    def stop(self) -> None:
        """What a signal does."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.ask)

    def join(self) -> None:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the server does not stop"
        if self._error is not None:
            raise self._error

    def in_loop(self, function: Callable[[], Any]) -> None:
        """Run a function where the server runs."""
        self._loop.call_soon_threadsafe(function)

    def wait_idle(self) -> None:
        """Until nothing is unfinished, and the pool is whole again."""
        wait_until(lambda: self.api.is_idle, "requests are unfinished")
        wait_until(lambda: self.pool_is_whole, "blocks are in use")

    @property
    def pool_is_whole(self) -> bool:
        stats = self.engine.stats
        return stats.running == stats.waiting == stats.used_blocks == 0

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = server.Stop()
        stage = steps.load(self.stage)
        config = stage.Config(**self.config)
        await server.serve(
            lambda: stage.AsyncEngine.start(config, **self.start),
            self.options,
            self.listener,
            self._stop,
            self.drain_timeout,
            self._ready,
            self.connections,
        )

    def _ready(self, api: Any) -> None:
        self.api = api
        self._started.set()


def fake_server(
    drain_timeout: float = TIMEOUT, limits: dict[str, Any] | None = None, **engine: Any
) -> ServerThread:
    """A server over tests.fakes' engine: ids only, thousands of steps a second. `engine`:
    attributes to replace in the engine, as `step`."""

    def build(options: dict[str, Any], end: Any) -> Any:
        server.engine_in_thread = made = fake_engine("01_chunked_prefill", num_blocks=2000)
        for name, value in engine.items():
            setattr(made, name, value)
        return made

    config = {"model": "qwen3-0.6b", "load_format": "dummy"}
    server = ServerThread(config, drain_timeout, {"build": build}, limits=limits, model_name="fake")
    return server


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what or "waited in vain"
        time.sleep(0.005)


def raw_request(
    port: int, head: str, body: bytes = b"", receive_buffer: int | None = None
) -> socket.socket:
    """Send a request by hand; the caller reads the answer, or leaves."""
    connection = socket.socket()
    connection.settimeout(TIMEOUT)
    if receive_buffer is not None:  # before connecting, or it is not heeded
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    lines = [head, "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection
