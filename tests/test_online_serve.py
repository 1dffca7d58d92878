"""`python -m steps.03_online.serve` as a process: it starts, answers, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.online_server import TIMEOUT, wait_until

pytestmark = pytest.mark.slow

RUNNING = {"prompt": "ROMEO:\n", "max_tokens": 400, "stream": True, "ignore_eos": True}
FLAGS = ("--device", "cpu", "--num-kvcache-blocks", "200", "--port", "0")


class ServeProcess:
    """A process group of its own, as a shell makes one."""

    def __init__(self, *flags: str, stage: str) -> None:
        command = [sys.executable, "-m", f"steps.{stage}.serve", *flags]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        pattern = re.compile(r" at (http://\S+)")
        wait_until(lambda: pattern.search(self.log) is not None or not self.is_running, self.log)
        found = pattern.search(self.log)
        assert found is not None, self.log
        return found[1]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        status = self.process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)  # the pipe is closed: no child holds it open
        assert not self._reader.is_alive()
        return status

    def interrupt(self) -> None:
        """Ctrl-C reaches the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def serving(*flags: str, stage: str = "03_online") -> Iterator[ServeProcess]:
    server = ServeProcess(*(flags or FLAGS), stage=stage)
    try:
        yield server
    finally:
        if server.is_running:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.wait()


def is_alive(pid: int) -> bool:
    """Running, not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def stream(url: str, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a running stream, past the first."""
    with (
        httpx.Client(timeout=TIMEOUT) as http,
        http.stream("POST", f"{url}/v1/completions", json={**RUNNING, **fields}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def engine_pid(url: str) -> int:
    pid: int = httpx.get(f"{url}/debug/stats", timeout=TIMEOUT).json()["pid"]
    return pid


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_it_serves_and_drains(how: str) -> None:
    """Ctrl-C reaches the engine as well, and must not end it before the drain."""
    with serving() as server:
        url = server.url()
        assert url.startswith("http://127.0.0.1:")  # nobody else can reach it
        engine = engine_pid(url)
        assert is_alive(engine)
        with stream(url) as lines:
            if how == "SIGTERM":
                server.process.terminate()
            else:
                server.interrupt()
            *_, last, done = lines
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert not is_alive(engine)
        port = int(url.rsplit(":", 1)[1])
        socket.create_server(("127.0.0.1", port)).close()  # free again


def test_a_second_signal_stops() -> None:
    with serving() as server:
        url = server.url()
        with stream(url, max_tokens=3000) as lines:
            server.process.terminate()
            server.process.terminate()
            wait_until(lambda: "stopping" in server.log, server.log)
            server.process.terminate()
            *_, error, done = lines
        assert "error" in json.loads(error.removeprefix("data: "))
        assert done == "data: [DONE]"
        assert server.wait() == 0


def test_a_dead_engine_is_told_at_once() -> None:
    with serving() as server:
        url = server.url()
        with stream(url, max_tokens=3000) as lines:
            os.kill(engine_pid(url), signal.SIGKILL)
            started = time.monotonic()
            *_, error, done = lines
            assert time.monotonic() - started < 10
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert done == "data: [DONE]"
        assert httpx.get(f"{url}/health").status_code == 503
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert response.json()["error"]["code"] == "engine_dead"
        server.process.terminate()
        server.wait()
        assert "killed by SIGKILL" in server.log


def test_a_dead_server_leaves_no_engine() -> None:
    with serving() as server:
        engine = engine_pid(server.url())
        server.process.kill()
        wait_until(lambda: not is_alive(engine), "the engine lives on")


def test_a_signal_while_the_engine_starts() -> None:
    with serving() as server:
        wait_until(lambda: bool(server.log) or not server.is_running)  # the engine has begun
        server.interrupt()
        server.wait()
        assert "Traceback" not in server.log, server.log


def test_a_port_in_use_is_one_line_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving("--port", port) as server:
            assert server.wait() == 2
            (line,) = server.lines
            assert line.startswith(f"error: cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--engine", "99_none"), "engine"),
        (("--num-kvcache-blocks", "0"), "num_kvcache_blocks"),
        (("--model", "/no/such/directory"), "/no/such/directory"),
        (("--api-key", ""), "api_key"),
    ],
)
def test_what_cannot_start_says_why(flags: tuple[str, ...], words: str) -> None:
    with serving("--port", "0", "--device", "cpu", *flags) as server:
        assert server.wait() == 2
        assert words in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("engine", ["00_baseline", "02_batch_reorder"])
def test_every_engine_can_be_served(engine: str) -> None:
    with serving(*FLAGS, "--engine", engine) as server:
        url = server.url()
        assert httpx.get(f"{url}/debug/stats").json()["stage"] == engine
        body = {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT).json()
        assert answer["usage"]["completion_tokens"] == 8
        server.process.terminate()
        assert server.wait() == 0
