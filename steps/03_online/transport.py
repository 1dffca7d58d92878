"""How frames travel between the front end and the engine, and how each notices the other's end.

    front end                                      engine (a process, or a thread for tests)
        Endpoint   <=== ZeroMQ PAIR, frames ===>   Endpoint      bounded; sending never blocks
        lifeline   <=== socket pair         ===>   lifeline      closed by the kernel when one dies

Over the lifeline comes nothing but the engine's last words. Whichever side ends, however it ends,
the other one sees the end of that stream at once, also in the middle of a step.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

# Frames that may be under way from the engine, on each side; beyond that its outputs are merged.
MAX_EVENTS_IN_FLIGHT = 32
# Frames of commands that may wait for the end of a step, on each side.
MAX_COMMANDS_IN_FLIGHT = 1000
# After it has been told to end, the engine finishes its step and writes its files.
END_SECONDS = 5.0
# From the end of its lifeline to the end of the process.
REAP_SECONDS = 2.0
# From kill -9 to the end of the process, which gives back a GPU's memory first.
KILLED_SECONDS = 60.0
# Of an engine that ends by itself: time to send what it has already produced.
LINGER_MS = 1000

ROOT = Path(__file__).parent.parent.parent


class Endpoint:
    """One end of a pair of ZeroMQ sockets. Used by one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], max_out: int, max_in: int) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, max_out)
        self._socket.setsockopt(zmq.RCVHWM, max_in)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)

    def bind(self, address: str) -> None:
        self._socket.bind(address)

    def connect(self, address: str) -> None:
        self._socket.connect(address)

    @property
    def can_send(self) -> bool:
        return self._can(zmq.POLLOUT)

    @property
    def can_receive(self) -> bool:
        return self._can(zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """False, with nothing sent, if too much is under way."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next frame, or None if there is none now."""
        if not self.can_receive:
            return None
        return self._socket.recv(zmq.NOBLOCK)

    def wait(
        self, lifeline: socket.socket, timeout: float | None = None, to_send: bool = False
    ) -> bool:
        """Until there is something to receive, the other side has ended, there is room `to_send`,
        or `timeout` seconds are over. Returns whether the lifeline has something to say."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if to_send else 0))
        poller.register(lifeline.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else math.ceil(timeout * 1e3)))
        return lifeline.fileno() in ready

    def _can(self, event: int) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & event)

    def fileno(self) -> int:
        """Becomes readable when something may have come. Read until there is nothing more, and
        look again after every send: ZeroMQ tells of changes, not of states."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self, lost: bool = False) -> None:
        """`lost`: nobody will read what has not been sent. Idempotent."""
        self._socket.close(linger=0 if lost else None)


class Transport(ABC):
    """The front end's side of an engine that has been started."""

    endpoint: Endpoint
    lifeline: socket.socket
    """Non-blocking."""

    _ended: str | None = None
    _reaped: str | None = None
    _is_stuck = False

    def _open(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = Endpoint(self._context, MAX_COMMANDS_IN_FLIGHT, MAX_EVENTS_IN_FLIGHT)
        self.endpoint.bind(address)
        self.lifeline, self._their_lifeline = socket.socketpair()
        self.lifeline.setblocking(False)
        self._closing = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """As `Endpoint.wait`."""
        return self.endpoint.wait(self.lifeline, timeout)

    @abstractmethod
    def connected(self) -> None:
        """Call when the engine has said hello: its address is needed no longer. Idempotent."""

    def close(self, timeout: float = END_SECONDS) -> str:
        """Wait for the engine, which has been told to end or has ended; by force after `timeout`
        seconds. Returns how it ended. Idempotent, also in several threads at once: whoever waits
        in one may give up and ask again."""
        with self._closing:
            if self._ended is None:
                self._ended = self._reaped or self._end(self._has_ended_within(timeout))
                self.connected()
                self.lifeline.close()
                self.endpoint.close(lost=True)
                if not self._is_stuck:
                    self._context.term()
            return self._ended

    def reap(self) -> None:
        """Wait for an engine that has ended until it is gone. In any thread; `close` then returns
        at once."""
        with self._closing:
            self._reaped = self._ended or self._end(in_time=True)

    def _has_ended_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            self.lifeline.settimeout(remaining)
            try:
                if not self.lifeline.recv(4096):
                    return True
            except TimeoutError:
                return False
            except OSError:  # reset by its end
                return True
        return False

    @abstractmethod
    def _end(self, in_time: bool) -> str:
        """By force if not `in_time`. Returns how it ended."""


class ProcessTransport(Transport):
    """An engine in a process of its own, connected through a socket file in a private directory.

    Started by its command line, not by forking and not by `multiprocessing`: nothing is pickled,
    nothing of the parent is imported a second time. Its process group is its own, so that Ctrl-C
    on a terminal reaches the front end alone, which knows what to do about it, and so that all that
    it has started ends with it, even what is stopped. The directory is removed as soon as both
    sides are connected, so that no way of dying leaves it behind.
    """

    def __init__(
        self, build: str, name: str = "engine", environment: Mapping[str, str] | None = None
    ) -> None:
        """`build`: "module:function", called in the process to make the engine. `name`: what it is
        called in its log. `environment`: variables that it has besides those of this process.
        Raises OSError, also if the directory's path is too long for a socket's."""
        self._directory = tempfile.mkdtemp(prefix="baby-vllm-")  # for this user alone (mode 0700)
        try:
            socket_path = f"{self._directory}/engine"
            if (length := len(os.fsencode(socket_path))) > zmq.IPC_PATH_MAX_LEN:
                raise OSError(
                    f"the path of a socket in {tempfile.gettempdir()} has {length} bytes, and at "
                    f"most {zmq.IPC_PATH_MAX_LEN} are allowed: set TMPDIR to a shorter directory"
                )
            address = f"ipc://{socket_path}"
            self._open(address)
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            with self._their_lifeline:
                program = (sys.executable, "-P", "-m", f"{__package__}.engine_process")
                self._process = subprocess.Popen(
                    [*program, address, build, name],
                    stdin=self._their_lifeline.fileno(),
                    env={**os.environ, **(environment or {}), "PYTHONPATH": path},
                    process_group=0,
                )
        except BaseException:
            self.connected()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def connected(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self, in_time: bool) -> str:
        # If in time, the kernel has closed its lifeline: how it ended is settled. But what it has
        # started, which is of its group, may be unable to notice anything. The group's number is
        # nobody else's until the process is reaped.
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            return how_it_ended(self._process.wait(KILLED_SECONDS))
        except subprocess.TimeoutExpired:
            return "the engine process was killed and has not ended: a driver may keep it"


class ThreadTransport(Transport):
    """An engine in a thread of this process, for tests: same frames, same bounds."""

    def __init__(self, run: Callable[[Endpoint, socket.socket], object]) -> None:
        """`run` is the thread, with its side of everything."""
        address = "inproc://engine"  # within a context of its own
        self._open(address)
        self._run = run
        self._thread = threading.Thread(
            target=self._main, args=(address,), name="engine", daemon=True
        )
        self._thread.start()

    def _main(self, address: str) -> None:
        endpoint = Endpoint(self._context, MAX_EVENTS_IN_FLIGHT, MAX_COMMANDS_IN_FLIGHT)
        try:
            endpoint.connect(address)
            self._run(endpoint, self._their_lifeline)
        finally:
            endpoint.close()
            self._their_lifeline.close()

    def connected(self) -> None:
        pass

    def _end(self, in_time: bool) -> str:
        self._thread.join(REAP_SECONDS if in_time else 0)
        self._is_stuck = self._thread.is_alive()  # a thread cannot be forced
        return "the engine's thread ended"


def how_it_ended(status: int, what: str = "the engine process") -> str:
    """In words, from a Popen.returncode."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return f"{what} was killed by {name}"
    return f"{what} ended with exit status {status}"
