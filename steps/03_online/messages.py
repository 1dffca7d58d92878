"""What the front end and the engine say to each other: msgpack of the structs below, never pickle.

    front end                                              engine
        Commands([Start])            ------------------>   loads the model
                                     <------------------   Hello, then Ready(info)
        Commands([Add, Add, Abort])  ------------------>   taken between two steps, all of them
                                     <------------------   Progress: all outputs of a step
        Commands([Stop])             ------------------>   closes

`Progress.taken` says how many frames the engine had taken before its step. So the front end can
tell what a request that was aborted left behind from what a new one of the same name produces.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from shared.engine.slots import Limits
from shared.engine.stats import EngineStats
from shared.engine.trace import StepRecord
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

# To the engine


class Start(msgspec.Struct, tag=True):
    """Once, first: which engine to build."""

    stage: str
    """The engine's own."""
    options: dict[str, Any]
    """Given fields of the front end's Config."""
    log_level: int


class Add(msgspec.Struct, tag=True):
    request_id: str
    prompt: bytes
    """int32 token ids, as they lie in memory: both ends are on one machine."""
    params: dict[str, Any]
    """Fields of SamplingParams that are not at their defaults; no stop strings, for the engine
    knows ids only."""

    @classmethod
    def of(cls, request_id: str, tokens: np.ndarray, params: SamplingParams) -> Add:
        fields = params.model_dump(exclude_defaults=True, exclude={"stop"})
        return cls(request_id, tokens.astype(np.int32).tobytes(), fields)

    def tokens(self) -> np.ndarray:
        """[n] int32. Raises ValueError for bytes that are not."""
        return np.frombuffer(self.prompt, np.int32)


class Abort(msgspec.Struct, tag=True):
    """Unknown and finished requests are no error: it may have crossed their last output."""

    request_id: str
    index: int | None = None
    """One completion; None: all of them."""


class Listen(msgspec.Struct, tag=True):
    """Send step records, or stop it."""

    on: bool


class Stop(msgspec.Struct, tag=True):
    """Drop everything and end."""


Command = Start | Add | Abort | Listen | Stop


# From the engine


class Hello(msgspec.Struct, tag=True):
    """Connected. The engine itself may take minutes to start."""


class EngineInfo(msgspec.Struct):
    stage: str
    """The engine's own."""
    description: dict[str, Any]
    """engine.describe()."""
    limits: Limits
    cuts_prompts: bool
    eos_token_ids: tuple[int, ...]
    pid: int

    @property
    def max_model_length(self) -> int:
        return self.limits.max_model_length

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo
    stats: EngineStats


class Refused(msgspec.Struct):
    """The engine's own `add_request` raised ValueError."""

    request_id: str
    message: str


class Progress(msgspec.Struct, tag=True, omit_defaults=True):
    """What has happened since the last Progress: as a rule one step; several, merged, while the
    front end is behind."""

    taken: int
    """Frames taken before the newest of these steps."""
    outputs: list[StepOutput] = []
    refused: list[Refused] = []
    stats: EngineStats | None = None
    """Now and then, and always when the engine falls idle."""
    records: list[StepRecord] = []
    """With the stats, while somebody listens."""


Event = Hello | Ready | Progress


class Failure(msgspec.Struct):
    """The engine's last words. They go over the lifeline, for they must not be lost when everything
    else is."""

    kind: str
    """ValueError, OSError, or the name of another exception."""
    message: str


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_event = msgspec.msgpack.Decoder(Event)
_failure = msgspec.msgpack.Decoder(Failure)


def encode(message: Command | Event | Failure) -> bytes:
    """Raises ValueError for text that is not valid Unicode."""
    return _encoder.encode(message)


def encode_commands(encoded: list[bytes]) -> bytes:
    """One frame. Commands come encoded, so that one that cannot be harms no other."""
    return _encoder.encode([msgspec.Raw(command) for command in encoded])


def decode_commands(frame: bytes) -> list[Command]:
    """Raises msgspec.DecodeError."""
    return _commands.decode(frame)


def decode_event(frame: bytes) -> Event:
    """Raises msgspec.DecodeError."""
    return _event.decode(frame)


def decode_failure(data: bytes) -> Failure:
    """Raises msgspec.DecodeError."""
    return _failure.decode(data)


def merge(older: StepOutput, newer: StepOutput) -> None:
    """Two outputs of one sequence become one: `older`, as if one step had produced both."""
    older.new_token_ids += newer.new_token_ids
    if newer.logprobs is not None:
        older.logprobs = (older.logprobs or []) + newer.logprobs
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs = newer.prompt_logprobs
    older.finish_reason = newer.finish_reason
    older.error = newer.error
    older.num_cached_tokens = older.num_cached_tokens or newer.num_cached_tokens


class Merged:
    """Outputs that nobody has taken yet, one per sequence: bounded by what the sequences may
    generate, however long nobody comes."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], StepOutput] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def add(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            if (older := self._outputs.get(key)) is None:
                self._outputs[key] = output
            else:
                merge(older, output)

    def discard(self, request_id: str, index: int | None = None) -> None:
        """Nobody wants a request's outputs any more, or those of one completion."""
        for key in [k for k in self._outputs if k[0] == request_id and index in (None, k[1])]:
            del self._outputs[key]

    def take(self) -> list[StepOutput]:
        outputs = list(self._outputs.values())
        self._outputs.clear()
        return outputs
