"""The front end's side of one engine: what is sent, what is expected back, and whether it lives.

It waits for nothing by itself, so that a loop that blocks (engine.py) and one that must not
(async_engine.py) can both use it.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.request import check_request, check_request_id
from shared.engine.stats import EngineStats
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

from .config import Build, OnlineConfig, build_engine
from .engine_process import serve
from .messages import (
    Abort,
    Add,
    Command,
    EngineInfo,
    Hello,
    Listen,
    Progress,
    Ready,
    Refused,
    Start,
    Stop,
    decode_event,
    decode_failure,
    encode,
    encode_commands,
)
from .transport import END_SECONDS, ProcessTransport, ThreadTransport, Transport

logger = logging.getLogger(__name__)

# Before commands that found no room are tried again: the engine is in a long step.
RETRY_SECONDS = 0.01
# Of a step, unless the config says it: a large part of a long prompt takes a CPU minutes.
STEP_SECONDS = 60.0
STEP_SECONDS_CPU = 600.0
# The longest wait that counts as silence of the engine's, and not of the one who waits: a process
# that has been stopped itself, or has not asked for an hour, must not blame the engine for it.
LOOK_SECONDS = 10.0


class EngineDeadError(RuntimeError):
    """The engine has ended, by a fault or by `close`; nothing more comes out of it."""


class EngineClosedError(EngineDeadError):
    """It was told to end."""


class EngineStartError(EngineDeadError, ChildProcessError):
    """It has ended before it was ready. An OSError, so that programs end with one line."""


@dataclass
class _Expected:
    """A request that has not finished."""

    frame: int
    """The frame that it travels in: what the engine says before it has taken this frame is about
    an earlier request of the same name."""
    num_prompt_tokens: int
    """That may still have to be computed; 0 once something has come of the request."""
    indices: dict[int, int]
    """Completions that have not ended, each with the most tokens that may still come."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + sum(self.indices.values())


def dead(error: Exception) -> EngineDeadError:
    """A new one each time: the same one would collect the tracebacks of all who ask."""
    kind = EngineClosedError if isinstance(error, EngineClosedError) else EngineDeadError
    return kind(str(error))


class EngineClient:
    info: EngineInfo | None = None
    """None until the engine is ready."""
    stats: EngineStats
    """The newest that has come."""
    error: EngineDeadError | ValueError | OSError | None = None
    """Why the engine is gone; ValueError and OSError only for one that never was ready."""
    outstanding_tokens = 0
    """Work that is left: tokens of prompts of which nothing has come yet, and the most that
    unfinished requests may still generate."""
    cut_short: tuple[str, ...] = ()
    """Requests that had not finished when the engine ended."""

    def __init__(
        self,
        config: OnlineConfig,
        build: str | Build | None = None,
        in_process: bool = False,
        transport: Transport | None = None,
    ) -> None:
        """Starts the engine and does not wait for it.

        `build` makes another engine than the one that the config names, from the config's given
        fields: "module:function" or, for an engine `in_process` (in a thread), a function.
        `transport`: of an engine that has been started in another way.
        """
        self.stats = EngineStats()
        self._expected: dict[str, _Expected] = {}
        self._pending: list[bytes] = []
        self._num_sent = 0
        self._last_words = b""
        self._step_timeout = config.step_timeout
        self._silence = 0.0
        self._last_look = 0.0
        self._hang: str | None = None
        self.transport = transport or (_thread if in_process else _process)(build)
        options = config.model_dump(include=config.model_fields_set)
        level = logging.getLogger().getEffectiveLevel()
        self._command(Start(config.engine, options, level))

    @property
    def num_unfinished(self) -> int:
        return len(self._expected)

    @property
    def is_alive(self) -> bool:
        return self.error is None

    def expects(self, request_id: str) -> bool:
        """Is there such a request, unfinished?"""
        return request_id in self._expected

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        """The prompt as [n] int32. Raises the ValueError that the engine would raise."""
        self.check_alive()
        info = self.ready_info
        return check_request(prompt_token_ids, params, info.limits, info.cuts_prompts)

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> None:
        """To be sent by the next `flush`. Raises ValueError, with nothing sent, if it can never
        run, and EngineDeadError."""
        check_request_id(request_id)
        if request_id in self._expected:
            raise ValueError(f"request_id {request_id!r} is already running")
        tokens = self.check_request(prompt_token_ids, params)
        self._command(Add.of(request_id, tokens, params))
        most = min(params.max_tokens, self.ready_info.max_model_length - len(tokens))
        if not self._expected:
            self._end_silence()  # there was nothing to say
        expected = _Expected(self._num_sent + 1, len(tokens), dict.fromkeys(range(params.n), most))
        self._expected[request_id] = expected
        self.outstanding_tokens += expected.num_tokens

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one completion. To be sent by the next `flush`; nothing more comes
        of it from now on. Idempotent."""
        expected = self._expected.get(request_id)
        if expected is None or not (index is None or index in expected.indices):
            return
        self._command(Abort(request_id, index))
        if index is None:
            self._end_all(request_id)
        else:
            self._end(request_id, index)

    def listen(self, on: bool) -> None:
        """Have step records sent, or not. To be sent by the next `flush`."""
        self._command(Listen(on))

    def flush(self) -> bool:
        """Send what there is to send, in one frame. False if there is no room for it now."""
        if self._pending and self.is_alive:
            if not self.transport.endpoint.send(encode_commands(self._pending)):
                return False
            self._num_sent += 1
            self._pending.clear()
        return True

    def receive(self) -> Progress | None:
        """What has come, frame by frame, without what nobody expects; None: nothing is there."""
        while self.is_alive and (frame := self.transport.endpoint.receive()) is not None:
            self._end_silence()
            match decode_event(frame):
                case Hello():
                    self.transport.connected()
                    self.flush()  # Start: a socket without a peer takes nothing
                case Ready(info, stats):
                    self.info, self.stats = info, stats
                case Progress() as progress:
                    return self._expected_of(progress)
        return None

    def listen_for_end(self) -> None:
        """Call when the lifeline has something to say: sets `error` if the engine has ended, once
        its process is gone."""
        if self.hears_end():
            self._has_ended(self.transport.close(END_SECONDS if self._hang is None else 0))

    def hears_end(self) -> bool:
        """The part of `listen_for_end` that never waits: has the engine ended, or does it hang?"""
        while self.is_alive and self._hang is None:
            try:
                data = self.transport.lifeline.recv(4096)
            except BlockingIOError:
                return False
            except OSError:  # reset by its end
                return True
            if not data:
                return True
            self._last_words += data
        return self.is_alive

    @property
    def step_seconds(self) -> float:
        """Most that a step may take."""
        if self._step_timeout is not None:
            return self._step_timeout
        is_cpu = str(self.ready_info.description.get("device")).startswith("cpu")
        return STEP_SECONDS_CPU if is_cpu else STEP_SECONDS

    @property
    def look_seconds(self) -> float | None:
        """Until the next `notes_hang` at the latest; None while nothing can hang: an engine that
        starts takes its time."""
        return None if self.info is None else min(LOOK_SECONDS, self.step_seconds / 4)

    def notes_hang(self) -> bool:
        """Call after `receive` has found nothing: does the engine hang, which has work to do and
        has said nothing for longer than a step may take? Then `listen_for_end` ends it.

        It speaks after every step, or every 50 ms. Whatever its step waits for, a kernel, another
        rank that is stopped, a lock, shows in this way.
        """
        now = time.monotonic()
        waited, self._last_look = now - self._last_look, now
        oldest = next(iter(self._expected.values()), None)
        if oldest is None or oldest.frame > self._num_sent:  # it has nothing to do
            self._silence = 0.0
        elif self.is_alive and self.look_seconds is not None:
            self._silence += min(waited, self.look_seconds)
            if self._silence >= self.step_seconds:
                ranks = self.ready_info.description.get("tensor_parallel_size", 1)
                who = "the engine" if ranks == 1 else f"the engine, or one of its {ranks} ranks,"
                self._hang = (
                    f"{who} hangs: it has {len(self._expected)} requests and has said nothing "
                    f"for {self.step_seconds:g} s, longer than a step may take (step_timeout)"
                )
                logger.error("%s", self._hang)
        return self._hang is not None

    def _end_silence(self) -> None:
        self._silence, self._last_look = 0.0, time.monotonic()

    def wait(self, timeout: float | None = None) -> None:
        """Until there may be something to receive, or the engine has ended, or it is time to ask
        again; in seconds."""
        if not self.is_alive:
            return
        may_have_ended = self.transport.wait(_sooner(timeout, self.look_seconds))
        # What it has said before comes first.
        if not self.transport.endpoint.can_receive and (may_have_ended or self.notes_hang()):
            self.listen_for_end()

    def wait_until_ready(self) -> EngineInfo:
        """As the function of this name, for this engine alone."""
        wait_until_ready([self])
        return self.ready_info

    @property
    def ready_info(self) -> EngineInfo:
        assert self.info is not None, "the engine is not ready"
        return self.info

    def check_alive(self) -> None:
        """Raises EngineDeadError with what is known of the end."""
        if self.error is not None:
            raise dead(self.error)

    def stop(self) -> None:
        """Tell the engine to end, without waiting for it; `close` does. Idempotent."""
        if self.error is None:
            self._pending.clear()
            self._command(Stop())
            is_told = self.flush()
            self._has_ended(None)
            if not is_told:
                self.transport.close(0)

    def close(self, timeout: float = END_SECONDS) -> None:
        """Tell the engine to end and wait until it has; by force after `timeout` seconds.
        Idempotent."""
        self.stop()
        self.transport.close(timeout)

    def _command(self, command: Command) -> None:
        self._pending.append(encode(command))

    def _expected_of(self, progress: Progress) -> Progress:
        if progress.stats is not None:
            self.stats = progress.stats
        expected, taken = self._expected, progress.taken
        outputs: list[StepOutput] = []
        for output in progress.outputs:
            request = expected.get(output.request_id)
            if request is None or taken < request.frame or output.index not in request.indices:
                continue
            num_done = len(output.new_token_ids)
            request.indices[output.index] -= num_done
            self.outstanding_tokens -= num_done + request.num_prompt_tokens
            request.num_prompt_tokens = 0
            if output.finish_reason is not None:
                self._end(output.request_id, output.index)
            outputs.append(output)
        progress.outputs = outputs
        refused: list[Refused] = []
        for one in progress.refused:
            request = expected.get(one.request_id)
            if request is not None and taken >= request.frame:
                self._end_all(one.request_id)
                refused.append(one)
        progress.refused = refused
        return progress

    def _end(self, request_id: str, index: int) -> None:
        expected = self._expected[request_id]
        self.outstanding_tokens -= expected.indices.pop(index)
        if not expected.indices:
            self._end_all(request_id)

    def _end_all(self, request_id: str) -> None:
        self.outstanding_tokens -= self._expected.pop(request_id).num_tokens

    def _has_ended(self, how: str | None) -> None:
        """`how`: in words; None if it was told to."""
        self.error = self._reason(how)
        if how is not None and self.info is not None and not (self._last_words or self._hang):
            logger.error("%s", self.error)  # it could not say so itself
        self.cut_short = tuple(self._expected)
        self._expected.clear()
        self.outstanding_tokens = 0

    def _reason(self, how: str | None) -> EngineDeadError | ValueError | OSError:
        if how is None:
            return EngineClosedError("the engine is closed")
        kind = EngineDeadError if self.info is not None else EngineStartError
        if not self._last_words:
            return kind(self._hang or how)
        failure = decode_failure(self._last_words)
        if self.info is None and failure.kind in (ValueError.__name__, OSError.__name__):
            return (ValueError if failure.kind == ValueError.__name__ else OSError)(failure.message)
        return kind(f"the engine failed: {failure.kind}: {failure.message}")


def wait_until_ready(clients: Sequence[EngineClient]) -> None:
    """Raises what the start of one of them raised: ValueError or OSError, such as EngineStartError.
    Whatever is raised, Ctrl-C included, all of them are gone."""
    try:
        while True:
            for client in clients:
                client.receive()
                if client.error is not None:
                    raise client.error
            if all(client.info is not None for client in clients):
                return
            wait_for_any(clients)
    except BaseException:
        for client in clients:
            client.close(0)
        raise


def wait_for_any(clients: Sequence[EngineClient], timeout: float | None = None) -> None:
    """Until one of them may have something to receive, or has ended, or it is time to ask again; in
    seconds. Only after the last `receive` of each has found nothing: what has come is not told
    twice."""
    poll = select.poll()
    for client in clients:
        timeout = _sooner(timeout, client.look_seconds)
        poll.register(client.transport.endpoint.fileno(), select.POLLIN)
        poll.register(client.transport.lifeline.fileno(), select.POLLIN)
    ready = dict(poll.poll(None if timeout is None else math.ceil(timeout * 1e3)))
    for client in clients:
        may_have_ended = client.transport.lifeline.fileno() in ready
        # What it has said before comes first.
        if not client.transport.endpoint.can_receive and (may_have_ended or client.notes_hang()):
            client.listen_for_end()


def _sooner(first: float | None, second: float | None) -> float | None:
    """None: never."""
    return min((seconds for seconds in (first, second) if seconds is not None), default=None)


def _thread(build: str | Build | None) -> Transport:
    function = build_engine if build is None else build
    if not callable(function):
        raise TypeError("an engine in this process is built by a function")
    return ThreadTransport(
        lambda endpoint, lifeline: serve(
            endpoint, lifeline, lambda start, end: function(start.options, end), in_process=True
        )
    )


def _process(build: str | Build | None) -> Transport:
    name = f"{build_engine.__module__}:build_engine" if build is None else build
    if not isinstance(name, str):
        raise TypeError("an engine in another process is built by a function's name")
    return ProcessTransport(name)
