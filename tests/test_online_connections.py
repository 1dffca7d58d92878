"""Clients that do not send, do not read, or are too many."""

from __future__ import annotations

import importlib
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.online_server import TIMEOUT, ServerThread, fake_server, raw_request, wait_until

connections = importlib.import_module("steps.03_online.connections")
server_module = importlib.import_module("steps.03_online.server")

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MOST = 8


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """With little patience."""
    limits = {"request_timeout": 0.3, "max_connections": MOST}
    with fake_server(limits=limits) as server:
        yield server


@pytest.fixture(autouse=True)
def nobody_is_left(server: ServerThread) -> Iterator[None]:
    yield
    wait_until(lambda: not server.connections.num_open, "connections are open")
    server.wait_idle()


def connect(server: ServerThread, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
    connection.sendall(content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def ask_version(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")


def error_of(answer: bytes, status: int) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    return json.loads(body)["error"]


def test_a_client_that_says_nothing_is_left(server: ServerThread) -> None:
    assert read_all(connect(server)) == b""


@pytest.mark.parametrize(
    "content", [b"P", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{", b"GET /health HTTP/1.1\r\nA: "]
)
def test_half_a_request_is_not_waited_for(server: ServerThread, content: bytes) -> None:
    error = error_of(read_all(connect(server, content)), 408)
    assert error["code"] == "request_timeout"


def test_trickling_gains_no_time(server: ServerThread) -> None:
    connection = connect(server, HEAD + b"Content-Length: 1000\r\n\r\n")
    begin = time.monotonic()
    connection.setblocking(False)
    answer = b""
    while not answer:
        assert time.monotonic() - begin < TIMEOUT
        connection.send(b" ")
        time.sleep(0.02)
        try:
            answer = connection.recv(65536)
        except BlockingIOError:
            continue
    error_of(answer, 408)
    connection.close()


def test_a_second_request_has_the_same_time(server: ServerThread) -> None:
    connection = connect(server)
    for _ in range(2):
        ask_version(connection)
        time.sleep(0.35)  # between two requests another limit counts
    connection.sendall(b"GET /ver")
    error_of(read_all(connection), 408)


def test_an_answer_does_not_wait_to_be_acknowledged(server: ServerThread) -> None:
    """Its head and its body are sent apart. The best of many: others may need the processor."""
    seconds = []
    with httpx.Client(base_url=server.url) as http:
        for _ in range(30):
            begin = time.perf_counter()
            http.get("/version")
            seconds.append(time.perf_counter() - begin)
    assert min(seconds[5:]) < 0.03


def test_a_long_answer_has_no_deadline(server: ServerThread) -> None:
    server.engine_in_thread.step, step = slowed(server.engine_in_thread.step, 0.01)
    try:
        body = {"prompt": [1], "max_tokens": 60, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
    finally:
        server.engine_in_thread.step = step
    assert answer.json()["metrics"]["total_time"] > 0.5


def slowed(step: Any, seconds: float) -> tuple[Any, Any]:
    def slow() -> Any:
        time.sleep(seconds)
        return step()

    return slow, step


def test_one_connection_too_many_is_told(
    server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        for _ in range(MOST):
            stack.enter_context(connect(server, b"GET"))
        wait_until(lambda: server.connections.num_open == MOST)
        answers = [read_all(connect(server)) for _ in range(3)]
        answers.append(read_all(raw_request(server.port, "POST / HTTP/1.1", b"x" * 2**20)))
    for answer in answers:
        assert error_of(answer, 503)["code"] == "too_many_connections"
    refusals = [r for r in caplog.records if "connections are refused" in r.message]
    assert len(refusals) <= 1
    wait_until(lambda: not server.connections.num_open)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_flood_leaves_room_and_no_noise(
    server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(server))
        most = MOST + connections.MAX_REFUSALS
        wait_until(lambda: server.connections.num_open <= most)
    assert len(caplog.records) <= 1
    wait_until(lambda: not server.connections.num_open)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("head", ["POST /v1/completions HTTP/1.1", "POST /nowhere HTTP/1.1"])
@pytest.mark.parametrize("close", [True, False])
def test_who_still_sends_gets_the_answer(server: ServerThread, head: str, close: bool) -> None:
    """A reset would take it away."""
    if close:
        head += "\r\nConnection: close"
    body = b"x" * (16 * 2**20)
    connection = raw_request(server.port, head, body)
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    error = error_of(answer, 404 if "nowhere" in head else 413)
    assert error["type"] == "invalid_request_error"
    if not close:
        ask_version(connection)
    connection.close()


def test_a_body_without_end_is_not_read_for_ever(server: ServerThread) -> None:
    connection = connect(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"

    def send() -> None:
        for _ in range(1000):
            connection.sendall(chunk)

    with connection, pytest.raises(OSError, match=r"reset|pipe"):
        send()


def test_who_waits_to_be_asked_for_a_body_is_told_at_once(server: ServerThread) -> None:
    head = HEAD + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    answer = read_all(connect(server, head))
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n400000\r\n" + b"x" * 2**22 + b"zz\r\n",
    ],
)
def test_what_is_not_http_is_told(
    server: ServerThread, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = read_all(connect(server, content))
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert not caplog.records


def test_who_reads_nothing_is_left(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    body = {"prompt": [[9] * 7000] * 4, "max_tokens": 1, "n": 128, "return_token_ids": True}
    content = json.dumps(body).encode()
    connection = raw_request(server.port, "POST /v1/completions HTTP/1.1", content, 4096)
    wait_until(lambda: server.connections.num_open == 1)
    wait_until(lambda: not server.connections.num_open, "it is still there")
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not answer.endswith(b"}")


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_leaves_the_last_bytes_is_left(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Too few of them for the server to stop writing: it has written all, and closes."""
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    made: list[Any] = []
    connection_made = connections.LimitedProtocol.connection_made

    def remember(protocol: Any, transport: Any) -> None:
        made.append((protocol, transport))
        connection_made(protocol, transport)

    monkeypatch.setattr(connections.LimitedProtocol, "connection_made", remember)
    body = {"prompt": [[9] * 400], "max_tokens": 1, "n": 60, "return_token_ids": True}
    content = json.dumps(body).encode()
    with connect(server) as connection:
        wait_until(lambda: bool(made))
        ((protocol, transport),) = made
        unsent = 0
        while not unsent:
            begun = protocol.server_state.total_requests
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            wait_until(lambda before=begun: protocol.server_state.total_requests > before)
            unsent = transport.get_write_buffer_size()
        assert unsent < 2**16
        if ends:
            connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: not server.connections.num_open, "it is still there")


def test_more_connections_than_files_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    server_module.allow_open_files(connections.ConnectionLimits(2048))
    assert limits[-1][0] > 2048 + server_module.BACKLOG
    with pytest.raises(ValueError, match=r"max_connections=4000 needs .*ulimit"):
        server_module.allow_open_files(connections.ConnectionLimits(4000))
