"""What this client can receive: from a server in another process that only writes.

    python -m bench.online.ceiling --client-processes 2

Twice, over 64 streams. Paced: an event to each of them every 10 ms, as from an engine's steps. Each
event is a piece of its own, and the CPU time that a piece costs the client says how many it could
receive at most. Flat out: as fast as the writer can. A client that is behind finds many events at
each reading, and so gets more tokens per second than pieces, in bundles.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import msgspec
import tyro

from bench.online.driver import Client, LocalClient, drive
from bench.online.plan import Job, Plan
from bench.online.processes import process_pool
from bench.online.sender import HttpSender, HttpTarget, http_session

STREAMS = 64
SECONDS = 1.0
PACED_SECONDS = 0.01
START_SECONDS = 30.0
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"model","choices":[{"index":0,"text":" token","logprobs":null,'
    b'"finish_reason":null}],"usage":null}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


class Ceiling(msgspec.Struct, frozen=True):
    """Of the whole client, all its processes together."""

    processes: int
    pieces_per_second: float
    """One over the CPU time of a piece, requests included, times processes. A server that sends
    more of them, one token each, is not measured but the client."""
    tokens_per_second: float
    """In bundles. What was received; a faster writer might have got more through."""


async def measure_ceiling(processes: int, seconds: float = SECONDS) -> Ceiling:
    """Takes twice `seconds`, and the start of a process or more."""
    pieces_per_second = tokens_per_second = 0.0
    for interval in (PACED_SECONDS, 0.0):
        async with _writer(interval, seconds) as port:
            target = HttpTarget(f"http://127.0.0.1:{port}", "model", timeout=START_SECONDS)
            async with http_client(target, processes) as client:
                job = Job("short", [0], 1 << 30, 0.0, 0.0)
                driven = await drive(client, Plan([job] * STREAMS, 1))
        if interval:
            cpu = sum(use.cpu_seconds for use in driven.use)
            pieces_per_second = processes * sum(len(o.arrivals) for o in driven.seen) / cpu
        else:
            begin = min(o.arrivals[0] for o in driven.seen if o.arrivals)
            end = max(o.arrivals[-1] for o in driven.seen if o.arrivals)
            tokens_per_second = sum(sum(o.counts) for o in driven.seen) / (end - begin)
    return Ceiling(processes, pieces_per_second, tokens_per_second)


@contextlib.asynccontextmanager
async def http_client(target: HttpTarget, processes: int) -> AsyncIterator[Client]:
    """In this process, or in so many others."""
    if processes > 1:
        async with process_pool(target, processes) as pool:
            yield pool
    else:
        async with http_session(target.api_key) as session:
            yield LocalClient(HttpSender(session, target))


@contextlib.asynccontextmanager
async def _writer(interval: float, seconds: float) -> AsyncIterator[int]:
    """The port of a writer in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_write, args=(theirs, interval, seconds), daemon=True)
    process.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, START_SECONDS):
            raise RuntimeError("the process that measures the client did not start")
        yield int(ours.recv_bytes())
    finally:
        ours.close()
        process.kill()
        await asyncio.to_thread(process.join)


def _write(connection: Connection, interval: float, seconds: float) -> None:
    """Rounds of an event for each stream, `interval` seconds apart."""
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        listener.settimeout(START_SECONDS)
        connection.send_bytes(str(listener.getsockname()[1]).encode())
        streams = [_accept(listener) for _ in range(STREAMS)]
    unsent = [b""] * STREAMS
    due = time.monotonic()
    deadline = due + seconds
    while due < deadline:
        due = max(due + interval, time.monotonic())
        if interval:
            time.sleep(max(0.0, due - time.monotonic()))
        for index, stream in enumerate(streams):
            content = unsent[index] or CHUNK
            try:
                unsent[index] = content[stream.send(content) :]
            except BlockingIOError:
                continue
    for stream in streams:
        stream.close()


def _accept(listener: socket.socket) -> socket.socket:
    stream, _ = listener.accept()
    request = b""
    while b"\r\n\r\n" not in request:
        request += stream.recv(1 << 16)
    stream.sendall(HEAD)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setblocking(False)
    return stream


def describe(ceiling: Ceiling) -> str:
    """One line."""
    return (
        f"the client's own ceiling ({ceiling.processes} process"
        f"{'es' if ceiling.processes > 1 else ''}): {ceiling.pieces_per_second:,.0f} pieces/s; "
        f"{ceiling.tokens_per_second:,.0f} tokens/s in bundles"
    )


def main(client_processes: int = 1) -> None:
    """Print what this client can receive on this machine."""
    print(describe(asyncio.run(measure_ceiling(client_processes))))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m bench.online.ceiling")
