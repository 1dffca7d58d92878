"""The engine's own process: takes what has come between two steps, steps, sends what came out.

python -m steps.03_online.engine_process ADDRESS MODULE:FUNCTION NAME    (started by transport.py)
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from shared.engine.protocol import Engine
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

from .messages import (
    Abort,
    Add,
    EngineInfo,
    Failure,
    Hello,
    Listen,
    Merged,
    Progress,
    Ready,
    Refused,
    Start,
    Stop,
    decode_commands,
    encode,
)
from .transport import MAX_COMMANDS_IN_FLIGHT, MAX_EVENTS_IN_FLIGHT, Endpoint

if TYPE_CHECKING:
    from .config import End

logger = logging.getLogger(__name__)

# Between two snapshots while the engine is busy.
STATS_SECONDS = 0.05
# The last words must fit the lifeline's buffer, for nobody may be reading it.
MAX_LAST_WORDS = 8_000
EXIT_FAILED = 1
EXIT_ORPHANED = 3


class EngineLoop:
    """An engine and the front end that it serves. Only this loop touches the engine."""

    def __init__(self, engine: Engine, endpoint: Endpoint, lifeline: socket.socket) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._lifeline = lifeline
        self._taken = 1  # the frame with Start
        self._unsent = Merged()
        self._refused: list[Refused] = []
        self._next_stats = 0.0
        self._step_seconds = 0.0
        self._serving_seconds = 0.0

    def run(self) -> None:
        """Until the front end says stop or is gone. Raises what a step raises: then the engine
        cannot go on."""
        engine = self._engine
        last_end = time.perf_counter()
        while self._take_commands():
            outputs: list[StepOutput] = []
            if engine.has_unfinished_requests():
                begin = time.perf_counter()
                outputs = engine.step()
                end = time.perf_counter()
                self._step_seconds += end - begin
                self._serving_seconds += begin - last_end
                last_end = end
            self._send(outputs)
            if not engine.has_unfinished_requests():
                is_alone = self._endpoint.wait(self._lifeline, to_send=bool(self._unsent))
                if is_alone:
                    return
                last_end = time.perf_counter()

    def _take_commands(self) -> bool:
        """All that have come. False when there is nothing left to do."""
        while (frame := self._endpoint.receive()) is not None:
            self._taken += 1
            for command in decode_commands(frame):
                match command:
                    case Add():
                        self._add(command)
                    case Abort(request_id, index):
                        self._abort(request_id, index)
                    case Listen(on):
                        self._engine.listen(on)
                    case Stop():
                        return False
        return True

    def _add(self, command: Add) -> None:
        """Refusing is an event like any other: one bad request ends nothing but itself."""
        try:
            params = SamplingParams(**command.params)
            self._engine.add_request(command.request_id, command.tokens(), params)
        except ValueError as error:
            self._refused.append(Refused(command.request_id, str(error)))

    def _abort(self, request_id: str, index: int | None) -> None:
        self._unsent.discard(request_id, index)
        if index is None:
            self._engine.abort_request(request_id)
        else:
            self._engine.abort_sequence(request_id, index)

    def _send(self, outputs: list[StepOutput]) -> None:
        """What there is, if there is room; if not, it waits, merged, and so does the rest."""
        if self._unsent:
            self._unsent.add(outputs)
            if not self._endpoint.can_send:  # without encoding it all in vain, step after step
                return
            outputs = self._unsent.take()
        progress = Progress(self._taken, outputs, self._refused)
        now = time.perf_counter()
        if now >= self._next_stats or not self._engine.has_unfinished_requests():
            self._next_stats = now + STATS_SECONDS
            progress.stats = stats = self._engine.stats()
            stats.step_seconds, stats.serving_seconds = self._step_seconds, self._serving_seconds
            progress.records = self._engine.take_step_records()
        elif not (outputs or self._refused):
            return
        if self._endpoint.send(encode(progress)):
            self._refused = []
        else:
            self._unsent.add(outputs)


class LastWords:
    """Why the engine ends, said once, whichever thread finds out first."""

    def __init__(self, lifeline: socket.socket) -> None:
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._are_said = False

    def say(self, error: Exception) -> None:
        with self._lock:
            if not self._are_said:
                self._are_said = True
                self._send(error)

    def _send(self, error: Exception) -> None:
        kinds = [kind.__name__ for kind in (ValueError, OSError) if isinstance(error, kind)]
        kind = kinds[0] if kinds else type(error).__name__
        message = str(error).encode(errors="replace")[:MAX_LAST_WORDS].decode(errors="ignore")
        try:
            self._lifeline.sendall(encode(Failure(kind, message)))
        except OSError:
            logger.warning("nobody is there to be told of the end")


def serve(
    endpoint: Endpoint,
    lifeline: socket.socket,
    build: Callable[[Start, End], Engine],
    in_process: bool = False,
) -> bool:
    """A whole life of an engine, or as much of it as the front end waits for: so early nothing but
    its end can stop a message. False if it failed; its last words then went to the lifeline.
    `in_process`: this is a thread of a process that goes on whatever happens here."""
    last_words = LastWords(lifeline)

    def end(error: Exception) -> None:
        logger.error("the engine cannot go on: %s", error)
        last_words.say(error)
        if not in_process:
            os._exit(EXIT_FAILED)

    engine: Engine | None = None
    try:
        if not endpoint.send(encode(Hello())):
            return True
        start = _receive_start(endpoint, lifeline)
        if start is None:
            return True
        engine = build(start, end)
        if endpoint.send(encode(Ready(describe(engine, start.stage), engine.stats()))):
            EngineLoop(engine, endpoint, lifeline).run()
    except Exception as error:
        if engine is not None:
            logger.exception("the engine cannot go on")
        last_words.say(error)
        return False
    engine.close()
    return True


def describe(engine: Engine, stage: str) -> EngineInfo:
    return EngineInfo(
        stage=stage,
        description=engine.describe(),
        limits=engine.limits,
        cuts_prompts=engine.cuts_prompts,
        eos_token_ids=engine.eos_token_ids,
        pid=os.getpid(),
    )


def _receive_start(endpoint: Endpoint, lifeline: socket.socket) -> Start | None:
    """None if the front end has changed its mind."""
    while (frame := endpoint.receive()) is None:
        if endpoint.wait(lifeline):
            return None
    (command,) = decode_commands(frame)
    return command if isinstance(command, Start) else None


def take_lifeline(at_end: Callable[[], object] | None = None) -> socket.socket:
    """The parent's, which came as stdin: everything that this process starts would inherit it
    there, and keep it open.

    From now on this process ends when the parent has ended, whatever it is doing just then; first
    it calls `at_end`. What it would still compute is for nobody, and memory on a GPU is for whoever
    comes next.
    """
    lifeline = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        with contextlib.suppress(OSError):  # reset by its end
            while lifeline.recv(4096):
                pass
        if at_end is not None:
            at_end()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, daemon=True).start()
    return lifeline


def main() -> int:
    address, build_name, name = sys.argv[1:]
    # Whoever is asked to end is the front end; it lets requests finish and then says stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The directory is there only while the two are not connected yet.
    directory = Path(address.removeprefix("ipc://")).parent

    def end_with_all() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # also what it has started and cannot notice anything
            os.killpg(0, signal.SIGKILL)

    lifeline = take_lifeline(end_with_all)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s [{name}] %(message)s",
    )
    module, _, function = build_name.partition(":")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = Endpoint(context, MAX_EVENTS_IN_FLIGHT, MAX_COMMANDS_IN_FLIGHT)
    endpoint.connect(address)

    def build(start: Start, end: End) -> Engine:
        logging.getLogger().setLevel(start.log_level)
        engine: Engine = getattr(importlib.import_module(module), function)(start.options, end)
        return engine

    is_well = serve(endpoint, lifeline, build)
    endpoint.close()
    context.term()
    if not is_well:
        # At once: what a fault has left in the middle of something, threads or collectives with
        # other processes, would be waited for, and the front end with it.
        os._exit(EXIT_FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
