"""Rank 0's side of a tensor-parallel group: starts the other ranks, speaks to them, and notices
when one ends."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from shared.config import EngineConfig
from shared.engine.result import RunnerLost
from shared.engine.step_plan import StepPlan
from shared.models.config import ModelConfig

from .channel import Sender, open_memory
from .group import DROP, MAKE, PATIENCE, STEP, Make, join, open_store
from .online import online

logger = logging.getLogger(__name__)

# Until a worker that has been told to end, or has ended its lifeline, is gone.
END_SECONDS = 5.0
# From an error in rank 0's part of a step until a worker's end, its likely cause, has been noticed.
NOTICE_SECONDS = 1.0
NOTHING = np.empty(0, np.int32)


class WorkerGroup:
    """Ranks 1 .. size - 1 of a group whose rank 0 is this process, one process each.

    It outlives runners: each `make` has the workers make one, dropping the last. As rank 0 itself,
    a process has one group at a time.

        rank 0   --- channel --->   worker      what to do (channel.py)
                 <-- lifeline ---   worker      its last words; closed by the kernel when one dies
                 <== collectives ==> worker     gloo or NCCL
    """

    def __init__(self, size: int, device_type: str, end: Callable[[Exception], None]) -> None:
        """`device_type`: "cpu" or "cuda". `end` is called once, when the group cannot go on, with
        the reason: in a thread of its own if a worker has ended, or by `fail`. Raises ValueError if
        there are not GPUs enough, and what a worker's start raises."""
        if device_type == "cuda" and size > (there := torch.cuda.device_count()):
            raise ValueError(f"tensor_parallel_size={size}, but {there} GPUs can be seen")
        self._end = end
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._is_closing = False
        self._making = threading.Timer(0.0, lambda: None)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []
        self._channels: list[socket.socket] = []
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        store = open_store()
        self._memory = open_memory()
        self._sender = Sender(self._channels, self._memory)
        try:
            for rank in range(1, size):
                self._start((rank, size, store.port, device_type))
            self._watcher.start()
            self._wait_for_all()
            self.tp = join(0, size, store.port, device_type, store)
            self._wait_for_all()
        except BaseException as error:
            try:
                if isinstance(error, Exception):
                    self.fail(error)
                raise
            finally:
                self.close()

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._is_closing

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def make(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path | None,
        decodes_in_front: bool,
    ) -> None:
        """Have every worker make a ModelRunner, while rank 0 makes its own; then
        `wait_until_made`."""
        make = Make(
            config.model_dump(include=EngineConfig.model_fields.keys() - {"trace"}),
            asdict(model_config),
            None if directory is None else str(directory),
            decodes_in_front,
        )
        # Rank 0 may be the one that waits, in a collective for a rank that hangs.
        late = TimeoutError(f"a rank has made no runner within {PATIENCE}")
        self._making = threading.Timer(PATIENCE.total_seconds(), self._end_by, (late,))
        self._making.daemon = True
        self._making.start()
        self._send(MAKE, make.to_words())

    def wait_until_made(self) -> None:
        self._wait_for_all()
        self._making.cancel()

    def publish(self, plan: StepPlan, words: np.ndarray) -> None:
        self._send(STEP, plan.to_words(), words)

    def drop(self) -> None:
        """Have the workers drop their runner."""
        self._send(DROP)

    def check(self) -> None:
        """Raises RunnerLost if the group has ended."""
        if self._failure is not None:
            raise lost(self._failure)

    def lose(self, error: Exception) -> NoReturn:
        """As `fail`, by an error in a step. Raises RunnerLost: no later step can be right."""
        raise lost(self._give_up(error)) from error

    def fail(self, error: Exception) -> NoReturn:
        """Rank 0 cannot go on, by `error`: the group ends. Raises what has ended a worker, if one
        has, for `error` is what that led to."""
        cause = self._give_up(error)
        if cause is error:
            raise error
        raise cause from error

    def close(self) -> None:
        """End the workers, by force if they do not end by themselves. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._making.cancel()
        for channel in self._channels:
            channel.close()
        os.close(self._memory)
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in self._processes:
            _reap(process)
        if self._watcher.ident is not None:
            self._watcher.join()
        for lifeline in self._lifelines:
            lifeline.close()

    def _give_up(self, error: Exception) -> Exception:
        self._making.cancel()
        self._noticed.wait(NOTICE_SECONDS)
        cause = self._end_by(error)
        for process in self._processes:
            process.kill()
        return cause

    def _end_by(self, error: Exception) -> Exception:
        """The first reason counts; returns it."""
        with self._lock:
            is_first = self._failure is None
            cause = self._failure = self._failure or error
        if is_first:
            self._end(cause)
        return cause

    def _start(self, arguments: tuple[object, ...]) -> None:
        lifeline, their_lifeline = socket.socketpair()
        channel, their_channel = socket.socketpair()
        self._lifelines.append(lifeline)
        self._channels.append(channel)
        descriptors = (their_channel.fileno(), self._memory)
        path = (str(online("transport").ROOT), os.environ.get("PYTHONPATH"))
        with their_lifeline, their_channel:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", f"{__package__}.worker"),
                    *(str(argument) for argument in (*arguments, *descriptors)),
                ],
                stdin=their_lifeline.fileno(),
                pass_fds=descriptors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            )
        self._processes.append(process)

    def _send(self, kind: int, header: np.ndarray = NOTHING, words: np.ndarray = NOTHING) -> None:
        self._sender.send(np.concatenate((np.array([kind], np.int32), header)), words)

    def _wait_for_all(self) -> None:
        """Until every worker has said that it is ready for what comes next. Raises
        ConnectionResetError if one has ended, and TimeoutError if one takes too long."""
        for rank, channel in enumerate(self._channels, 1):
            channel.settimeout(PATIENCE.total_seconds())
            try:
                is_ready = channel.recv(1)
            except TimeoutError:
                raise TimeoutError(f"tensor-parallel rank {rank} has not become ready") from None
            channel.settimeout(None)
            if not is_ready:
                raise ConnectionResetError("a worker has ended")

    def _watch(self) -> None:
        """Notice the first worker that ends, and say why."""
        words = [b""] * len(self._lifelines)
        with selectors.DefaultSelector() as selector:
            for index, lifeline in enumerate(self._lifelines):
                selector.register(lifeline, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    index, lifeline = key.data, self._lifelines[key.data]
                    try:
                        data = lifeline.recv(4096)
                    except OSError:  # reset by its end
                        data = b""
                    words[index] += data
                    if not data:
                        selector.unregister(lifeline)
                        self._has_ended(index, words[index])

    def _has_ended(self, index: int, words: bytes) -> None:
        status = _reap(self._processes[index])
        if self._is_closing or self._failure is not None:
            return
        name = f"tensor-parallel rank {index + 1}"
        error: Exception
        if words:
            said = online("messages").decode_failure(words)
            kind = {"ValueError": ValueError, "OSError": OSError}.get(said.kind, RunnerLost)
            error = kind(f"{name}: {said.message}")
        else:
            error = RunnerLost(online("transport").how_it_ended(status, name))
        self._end_by(error)
        self._noticed.set()


def lost(cause: Exception) -> RunnerLost:
    """A new one each time: the same one would collect the tracebacks of all who meet it."""
    kind = "" if isinstance(cause, RunnerLost) else f"{type(cause).__name__}: "
    return RunnerLost(f"{kind}{cause}")


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
