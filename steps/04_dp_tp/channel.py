"""How rank 0 tells the workers what to do.

    rank 0  --- frame: what it is, and where its words are --->  worker 1     a socket pair each
               (SLOTS places for a step's packed inputs)         worker 2, ... shared memory

The inputs are written once, whatever the number of workers; a frame is small, says that they are
there (a socket orders memory on every processor), and its end of file says that rank 0 is gone.
Everything is passed on as an open file: there are no names, so nothing can be left behind.

No frame is ever acknowledged. A step's words lie untouched until three more have been sent, and
rank 0 sends a step only after the one three before it has ended, in which all workers took part.
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
_PREFIX = 3  # length of the header, slot, length of the words


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
        self._slots = np.empty((SLOTS, 0), np.int32)
        self._frame = np.zeros(_FRAME, np.int32)
        self._turn = 0

    def resize(self, num_words: int) -> None:
        """Room for that many words a message. No message with words may be under way."""
        os.ftruncate(self._memory, max(1, SLOTS * num_words * 4))
        self._slots = _map(self._memory, num_words)

    def send(self, header: np.ndarray, words: np.ndarray | None = None) -> None:
        """header, words [n] int32. Raises OSError if a worker is gone."""
        if words is not None:
            self._turn = (self._turn + 1) % SLOTS
            self._slots[self._turn, : len(words)] = words
        room, frame = _FRAME - _PREFIX, self._frame
        frame[:_PREFIX] = len(header), self._turn, 0 if words is None else len(words)
        inline = header[:room]
        frame[_PREFIX : _PREFIX + len(inline)] = inline
        data = frame.tobytes()
        if len(header) > room:
            data += header[room:].tobytes()
        for each in self._sockets:
            each.sendall(data)


class Receiver:
    """A worker's side. For `spin_seconds` after a message it looks for the next one without
    sleeping, which finds it sooner and costs a processor; then it sleeps until there is one."""

    def __init__(self, sock: socket.socket, memory: int, spin_seconds: float) -> None:
        self._socket = sock
        self._memory = memory
        self._spin_seconds = spin_seconds
        self._slots = np.empty((SLOTS, 0), np.int32)
        self._frame = np.zeros(_FRAME, np.int32)

    def resize(self, num_words: int) -> None:
        """Once rank 0 has done it."""
        self._slots = _map(self._memory, num_words)

    def receive(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Header and words of the next message; the words are to be read before the next call.
        None: rank 0 has ended."""
        self._spin()
        frame = self._frame
        if not _read(self._socket, frame):
            return None
        num_header, slot, num_words = frame[:_PREFIX].tolist()
        header = np.empty(num_header, np.int32)
        room = _FRAME - _PREFIX
        header[:room] = frame[_PREFIX : _PREFIX + num_header]
        if num_header > room and not _read(self._socket, header[room:]):
            return None
        return header, self._slots[slot, :num_words]

    def _spin(self) -> None:
        deadline = time.perf_counter() + self._spin_seconds
        while time.perf_counter() < deadline:
            try:
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                os.sched_yield()
            except OSError:  # reset by rank 0's end
                return


def _map(memory: int, num_words: int) -> np.ndarray:
    """The file as [SLOTS, num_words]; it stays mapped as long as the array is there."""
    mapped = mmap.mmap(memory, max(1, SLOTS * num_words * 4))
    return np.frombuffer(mapped, np.int32, SLOTS * num_words).reshape(SLOTS, num_words)


def _read(sock: socket.socket, out: np.ndarray) -> bool:
    """False at the end of the stream."""
    view = memoryview(out).cast("B")
    while view:
        try:
            count = sock.recv_into(view)
        except ConnectionError:
            count = 0
        if not count:
            return False
        view = view[count:]
    return True
