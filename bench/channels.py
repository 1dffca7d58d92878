"""How rank 0's message of a step reaches the workers of a tensor-parallel group: shared memory with
a frame over a socket (what stage 04 uses), the whole message over the socket, or ZeroMQ.

    python -m bench.channels [--json bench/results/cpu/channels.json]

Messages of a decode step and of one of 16,384 tokens, both as with the default config, to 1, 3 and
7 workers, which are processes; one at a time, as steps are, and a millisecond apart. Microseconds
from the call of `send` until the last worker has the words in memory of its own, and until rank 0
has its hands free again. A worker waits asleep, or spinning: looking again and again.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import tyro
import zmq

from bench.gpu import hardware
from bench.result import (
    Hardware,
    git_state,
    library_versions,
    now,
    prepare_output,
    write_json,
)

channel: Any = importlib.import_module("steps.04_dp_tp.channel")

SCHEMA_VERSION = 1
# Words of a packed step with the default config: room for 512 rows, and 3 words a token.
MESSAGES = {"decode step": 9_012, "16k-token step": 57_972}
HEADER = np.arange(10, dtype=np.int32)  # a plan
WORKERS = (1, 3, 7)
ROUNDS = 1000
WARM_UP = 50
PAUSE_SECONDS = 1e-3
SPIN_SECONDS = 1.0


class Measurement(msgspec.Struct, frozen=True):
    channel: str
    workers: int
    message: str
    arrival_us: float  # median
    arrival_p99_us: float
    sending_us: float  # median


class Report(msgspec.Struct, frozen=True):
    schema_version: int
    time: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: dict[str, str]
    rows: list[Measurement]


class Kind(Protocol):
    """A way to send. Made before the workers are forked."""

    def __init__(self, num_workers: int) -> None: ...

    def sender(self) -> Callable[[np.ndarray], object]:
        """Rank 0: send HEADER and these words to all."""
        ...

    def receiver(self, index: int, out: np.ndarray) -> Callable[[], object]:
        """A worker: wait for the next message, and copy its words into `out`."""
        ...


class SharedMemory(Kind):
    spin_seconds = 0.0

    def __init__(self, num_workers: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(num_workers)]
        self._memory = channel.open_memory()

    def sender(self) -> Callable[[np.ndarray], object]:
        sender = channel.Sender([ours for ours, _ in self._pairs], self._memory)
        return lambda words: sender.send(HEADER, words)

    def receiver(self, index: int, out: np.ndarray) -> Callable[[], object]:
        receiver = channel.Receiver(self._pairs[index][1], self._memory, self.spin_seconds)

        def receive() -> None:
            _, words = receiver.receive()
            out[: len(words)] = words

        return receive


class SpinningSharedMemory(SharedMemory):
    spin_seconds = SPIN_SECONDS


class Stream(Kind):
    def __init__(self, num_workers: int) -> None:
        self._pairs = [socket.socketpair() for _ in range(num_workers)]

    def sender(self) -> Callable[[np.ndarray], object]:
        def send(words: np.ndarray) -> None:
            frame = struct.pack("i", len(words)) + HEADER.tobytes()
            for ours, _ in self._pairs:
                ours.sendall(frame)
                ours.sendall(words.data)

        return send

    def receiver(self, index: int, out: np.ndarray) -> Callable[[], object]:
        theirs, frame = self._pairs[index][1], np.empty(1 + len(HEADER), np.int32)

        def read(view: memoryview) -> None:
            while view:
                view = view[theirs.recv_into(view) :]

        def receive() -> None:
            read(frame.data.cast("B"))
            read(out[: int(frame[0])].data.cast("B"))

        return receive


class ZeroMQ(Kind):
    def __init__(self, num_workers: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._addresses = [f"ipc://{self._directory.name}/{i}" for i in range(num_workers)]

    def sender(self) -> Callable[[np.ndarray], object]:
        context: Any = zmq.Context()
        sockets = [context.socket(zmq.PAIR) for _ in self._addresses]
        for sock, address in zip(sockets, self._addresses, strict=True):
            sock.bind(address)

        def send(words: np.ndarray) -> None:
            for sock in sockets:
                sock.send_multipart([HEADER.data, words.data])

        return send

    def receiver(self, index: int, out: np.ndarray) -> Callable[[], object]:
        sock: Any = zmq.Context().socket(zmq.PAIR)
        sock.connect(self._addresses[index])

        def receive() -> None:
            _, words = sock.recv_multipart(copy=False)
            got = np.frombuffer(words.buffer, np.int32)
            out[: len(got)] = got

        return receive


KINDS: dict[str, type[Kind]] = {
    "shared memory": SharedMemory,
    "shared memory, spinning": SpinningSharedMemory,
    "socket": Stream,
    "ZeroMQ": ZeroMQ,
}


def measure(name: str, num_workers: int, message: str) -> Measurement:
    words = np.arange(MESSAGES[message], dtype=np.int32)
    kind = KINDS[name](num_workers)
    times = [os.pipe() for _ in range(num_workers)]
    workers = [
        start_worker(kind, index, len(words), times[index][1]) for index in range(num_workers)
    ]
    send = kind.sender()
    arrival, sending = [], []
    try:
        for number in range(WARM_UP + ROUNDS):
            begin = time.perf_counter_ns()
            send(words)
            sent = time.perf_counter_ns()
            arrived = max(struct.unpack("q", os.read(read, 8))[0] for read, _ in times)
            if number >= WARM_UP:
                arrival.append((arrived - begin) / 1e3)
                sending.append((sent - begin) / 1e3)
            time.sleep(PAUSE_SECONDS)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pair in times:
            for descriptor in pair:
                os.close(descriptor)
    gc.collect()  # sockets
    p99 = statistics.quantiles(arrival, n=100)[-1]
    medians = [statistics.median(values) for values in (arrival, sending)]
    return Measurement(name, num_workers, message, medians[0], p99, medians[1])


def start_worker(kind: Kind, index: int, num_words: int, times: int) -> int:
    """Process id. For every message it writes to `times` when it had it."""
    pid = os.fork()
    if pid:
        return pid
    receive = kind.receiver(index, np.empty(num_words, np.int32))
    while True:
        receive()
        os.write(times, struct.pack("q", time.perf_counter_ns()))


def main(json: Path | None = None) -> None:
    """How a step's message reaches the workers, three ways. --json: where the full report goes."""
    prepare_output(json, "--json")
    rows = []
    for workers in WORKERS:
        for message in MESSAGES:
            for name in KINDS:
                row = measure(name, workers, message)
                rows.append(row)
                print(
                    f"{row.workers} workers  {row.message:15} {row.channel:24} "
                    f"arrival {row.arrival_us:7.1f} us  p99 {row.arrival_p99_us:8.1f}  "
                    f"sending {row.sending_us:7.1f}"
                )
    if json is None:
        return
    commit, dirty = git_state()
    report = Report(SCHEMA_VERSION, now(), commit, dirty, hardware("cpu"), library_versions(), rows)
    write_json(json, report)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m bench.channels")
