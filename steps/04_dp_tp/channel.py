"""How rank 0 tells the workers what to do.

    rank 0  --- frame: what to do, and where its words are --->  worker 1     a socket pair each
               (SLOTS places for a step's packed inputs)         worker 2     shared memory

The inputs are written once, whatever the number of workers. A frame is small; it says that they are
there (a system call orders memory on every processor), and the end of its stream that rank 0 is
gone. Everything is passed on as an open file: there are no names, so nothing can be left behind.

Measured (bench/results/cpu/channels.json; python -m bench.channels measures it again), in
microseconds until the last worker has the words, of a decode step and of one of 16,384 tokens:

                                      1 worker      3 workers     7 workers
    shared memory (here)              49    69      94   148     138   227
    the whole message by socket       44    83      81   257     180   423
    ZeroMQ                           107   139     249   457     434   793

Sockets are as good for few words and few workers, but every worker costs a copy, which rank 0 waits
for: 58 here against 410 for the last. ZeroMQ hands each message to a thread, on both sides.

No message is acknowledged. Its words stay until SLOTS more have been sent, and rank 0 sends a step
only after the one three before it has ended, in which all workers took part.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

SLOTS = 4
# Words of a frame. Headers are rarely longer; what does not fit follows.
_FRAME = 64
_PREFIX = 3  # length of the header; where the words begin; how many they are
_ROOM = _FRAME - _PREFIX


def open_memory() -> int:
    """Shared memory without a name, of no size yet; a file descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("baby-vllm")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Sender:
    """Rank 0's side."""

    def __init__(self, sockets: Sequence[socket.socket], memory: int) -> None:
        self._sockets = sockets
        self._memory = memory
        self._words = np.empty(0, np.int32)
        self._first = 0
        self._room = 0
        self._turn = 0

    def send(self, header: np.ndarray, words: np.ndarray) -> None:
        """header, words [n] int32. Raises OSError if a worker is gone."""
        begin = self._next_place(len(words))
        self._words[begin : begin + len(words)] = words
        frame = np.zeros(_FRAME, np.int32)
        frame[:_PREFIX] = len(header), begin, len(words)
        frame[_PREFIX : _PREFIX + len(header)] = header[:_ROOM]
        data = frame.tobytes() + header[_ROOM:].tobytes()
        for each in self._sockets:
            each.sendall(data)

    def _next_place(self, num_words: int) -> int:
        """Larger slots lie behind the old ones, where words may still have to be read."""
        if num_words > self._room:
            self._first += SLOTS * self._room
            self._room = max(num_words, 2 * self._room)
            os.ftruncate(self._memory, 4 * (self._first + SLOTS * self._room))
            self._words = _map(self._memory)
        self._turn = (self._turn + 1) % SLOTS
        return self._first + self._turn * self._room


class Receiver:
    """A worker's side. For `spin_seconds` it looks for the next message without sleeping, which
    finds it sooner and costs a processor; then it sleeps until there is one."""

    def __init__(self, sock: socket.socket, memory: int, spin_seconds: float) -> None:
        self._socket = sock
        self._memory = memory
        self._spin_seconds = spin_seconds
        self._words = np.empty(0, np.int32)
        self._frame = np.zeros(_FRAME, np.int32)

    def receive(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Header and words of the next message, to be read before the next call. None: rank 0 has
        ended, or closed the channel."""
        self._spin()
        if not _read(self._socket, self._frame):
            return None
        num_header, begin, num_words = self._frame[:_PREFIX].tolist()
        header = self._frame[_PREFIX : _PREFIX + num_header]
        if num_header > _ROOM:
            rest = np.empty(num_header - _ROOM, np.int32)
            if not _read(self._socket, rest):
                return None
            header = np.concatenate((header, rest))
        if begin + num_words > len(self._words):
            self._words = _map(self._memory)
        return header, self._words[begin : begin + num_words]

    def _spin(self) -> None:
        deadline = time.perf_counter() + self._spin_seconds
        while time.perf_counter() < deadline:
            try:
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                time.sleep(0)  # whoever else wants the processor
            except OSError:  # reset by rank 0's end
                return


def _map(memory: int) -> np.ndarray:
    """All of the file; it stays mapped as long as the array is there."""
    return np.frombuffer(mmap.mmap(memory, 0), np.int32)


def _read(sock: socket.socket, out: np.ndarray) -> bool:
    """False at the end of the stream."""
    view = out.data.cast("B")
    while view:
        try:
            count = sock.recv_into(view)
        except ConnectionError:
            count = 0
        if not count:
            return False
        view = view[count:]
    return True
