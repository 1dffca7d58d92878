"""Frozen workloads: the same requests on every machine, for every stage, in every version.

Only `random.Random.random()` draws numbers: Python promises that it keeps its sequence for a given
seed, numpy and torch promise no such thing for theirs. (The lengths of `nano` are the exception:
they replay another project's script.) What came out is hashed; the hash goes into every result, so
that two rows can be told to have measured the same work.

Repeats of a workload have the same lengths and arrival times (equal work) but other token ids.
With equal ids the second repeat would find its prompts in the prefix cache and measure that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from shared import SamplingParams
from shared.models.config import ModelConfig

WorkloadName = Literal[
    "nano",
    "nano_double",
    "decode_gap",
    "decode_gap_busy",
    "decode_gap_many",
    "decode_gap_few",
    "decode_gap_long",
    "shared_prefix",
    "batch1",
    "batch8",
]
Scale = Literal["cpu", "full", "full_large"]

WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)
SCALES: tuple[Scale, ...] = get_args(Scale)

# Every id is below this, so that any vocabulary of at least this size sees the same prompts.
ID_LIMIT = 10_000
# The repeat that is run first and not measured.
WARMUP = -1
# It runs this share, of what can be shortened.
WARMUP_SHARE = 0.2
# Above this, a long prompt every 0.4 s is more than one GPU can prefill beside its decodes.
LARGE_MODEL_PARAMETERS = 3e9


@dataclass(frozen=True)
class Request:
    """One request of a workload; ends after exactly `max_tokens` tokens, whatever they are."""

    prompt: tuple[int, ...]
    max_tokens: int | None
    """None: a steady decode, which runs until the measured window closes."""
    temperature: float = 0.6
    arrival: float | None = None
    """Seconds after the window opens. None: together with the rest of its wave."""
    wave: int = 0
    """Waves start when the one before has finished."""
    shared_tokens: int = 0
    """Leading prompt tokens that an earlier request of the workload has as well."""

    def sampling_params(self, max_model_length: int) -> SamplingParams:
        """`max_model_length` (tokens) bounds a steady decode."""
        limit = self.max_tokens or max(1, max_model_length - len(self.prompt))
        return SamplingParams(temperature=self.temperature, max_tokens=limit, ignore_eos=True)


@dataclass(frozen=True)
class Workload:
    name: WorkloadName
    scale: Scale
    id_limit: int
    repeat: int
    requests: tuple[Request, ...]
    window: float | None = None
    """Seconds that are measured while requests arrive by the clock. None: until all is done."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the content: prompts, output lengths, sampling, arrival times, window."""
        return content_hash(
            [self.name, self.window],
            ((r.prompt, [r.max_tokens, r.temperature, r.arrival, r.wave]) for r in self.requests),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def shortened(self, share: float) -> Workload:
        """For a warm-up: the first `share` of the window. Without a window, a CPU's work is cut to
        its first requests, because nothing is compiled there; a GPU's is kept, with all sizes."""
        if self.window is not None:
            window = self.window * share
            kept = tuple(r for r in self.requests if r.arrival is None or r.arrival < window)
            return replace(self, requests=kept, window=window)
        if self.scale == "cpu":
            return replace(self, requests=self.requests[: math.ceil(share * len(self.requests))])
        return self


def content_hash(
    head: Sequence[Any], requests: Iterable[tuple[Sequence[int], Sequence[Any]]]
) -> str:
    """SHA-256 of what a workload consists of; each request is (prompt, whatever else it has)."""
    digest = hashlib.sha256(json.dumps(head).encode())
    for prompt, values in requests:
        digest.update(json.dumps([len(prompt), *values]).encode())
        digest.update(np.asarray(prompt, dtype="<u4").tobytes())
    return digest.hexdigest()


def build_workload(name: WorkloadName, scale: Scale, vocab_size: int, repeat: int = 0) -> Workload:
    """The workload's requests. Raises ValueError for an unknown name or scale.

    `vocab_size` caps the token ids when it is below 10,000: the hash then differs, and says so.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    if scale not in SCALES:
        raise ValueError(f"no scale {scale!r}; there are: {', '.join(SCALES)}")
    id_limit = min(ID_LIMIT, vocab_size)
    # A string seed is hashed by Random itself, the same way everywhere.
    ids = TokenIds(Random(f"{name} ids {repeat}"), id_limit)
    requests, window = _BUILDERS[name](scale, ids)
    return Workload(name, scale, id_limit, repeat, tuple(requests), window)


def auto_scale(device: str, model: ModelConfig) -> Scale:
    """`cpu` on a CPU; on a GPU `full`, or `full_large` when long prompts must come less often."""
    if device == "cpu":
        return "cpu"
    layer = model.hidden_size * (
        2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        + 3 * model.intermediate_size
    )
    return "full_large" if layer * model.num_hidden_layers > LARGE_MODEL_PARAMETERS else "full"


def engine_options(name: WorkloadName, scale: Scale) -> dict[str, Any]:
    """Options that somebody with this work would set, by field name, for the stages that have them:
    the defaults are for throughput on a GPU."""
    if name not in _GAPS:
        return {}
    return {"max_prefill_tokens_per_step": 128 if scale == "cpu" else 512}


@dataclass
class TokenIds:
    """Draws prompts of ids below a limit."""

    random: Random
    limit: int

    def draw(self, count: int) -> tuple[int, ...]:
        return tuple(int(self.random.random() * self.limit) for _ in range(count))


def _uniform(random: Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + int(random.random() * (high - low + 1))


Built = tuple[Sequence[Request], float | None]


def _nano_lengths() -> list[tuple[int, int]]:
    """(prompt, output) lengths of nano-vllm's own benchmark: uniform 100-1024, 133,966 out.

    Its script draws everything from one generator seeded with 0, each prompt's length just before
    its ids, so the ids have to be drawn as well to arrive at its lengths.
    """
    random = Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(random.randint(100, 1024))
        for _ in range(prompts[-1]):
            random.randint(0, 10_000)
    return [(prompt, random.randint(100, 1024)) for prompt in prompts]


def _nano(times: int) -> Callable[[Scale, TokenIds], Built]:
    def build(scale: Scale, ids: TokenIds) -> Built:
        lengths = _nano_lengths()
        if scale == "cpu":  # a quarter of the requests, an eighth of their lengths: 12-128
            lengths = [(prompt // 8, output // 8) for prompt, output in lengths[:64]]
        return [Request(ids.draw(prompt), output) for prompt, output in times * lengths], None

    return build


@dataclass(frozen=True)
class _Gaps:
    """Steady decodes, and prompts that get in their way."""

    interval: float
    """Seconds from one prompt to the next."""
    window: float
    steady: int
    steady_prompt: int
    prompt: int
    output: int


_GAPS: dict[WorkloadName, dict[Scale, _Gaps]] = {
    "decode_gap": {
        "cpu": _Gaps(1.0, 8.0, 4, 64, 1024, 8),
        "full": _Gaps(0.4, 30.0, 32, 512, 4096, 16),
        "full_large": _Gaps(1.0, 30.0, 32, 512, 4096, 16),
    },
    # Prompts come often enough for one gap in a hundred to be one of theirs: a fast GPU makes more
    # than a hundred steps between two prompts of `decode_gap`.
    "decode_gap_busy": {
        "cpu": _Gaps(0.5, 8.0, 4, 64, 1024, 8),
        "full": _Gaps(0.08, 10.0, 32, 512, 4096, 16),
        "full_large": _Gaps(0.4, 10.0, 32, 512, 4096, 16),
    },
    # Steps that are mostly decodes.
    "decode_gap_many": {
        "cpu": _Gaps(0.5, 8.0, 16, 128, 128, 8),
        "full": _Gaps(0.1, 10.0, 128, 1024, 1024, 16),
        "full_large": _Gaps(0.25, 10.0, 128, 1024, 1024, 16),
    },
    # Steps that are mostly prompt tokens.
    "decode_gap_few": {
        "cpu": _Gaps(1.0, 8.0, 1, 64, 1024, 8),
        "full": _Gaps(0.05, 10.0, 4, 512, 4096, 16),
        "full_large": _Gaps(0.25, 10.0, 4, 512, 4096, 16),
    },
    # A few decodes with long contexts, of which attention in a mixed step has most to read.
    "decode_gap_long": {
        "cpu": _Gaps(0.5, 8.0, 2, 1024, 256, 8),
        "full": _Gaps(0.05, 10.0, 4, 16384, 2048, 16),
        "full_large": _Gaps(0.25, 10.0, 4, 16384, 2048, 16),
    },
}


def _gaps(sizes: dict[Scale, _Gaps]) -> Callable[[Scale, TokenIds], Built]:
    def build(scale: Scale, ids: TokenIds) -> Built:
        size = sizes[scale]
        requests = [Request(ids.draw(size.steady_prompt), None) for _ in range(size.steady)]
        for i in range(round(size.window / size.interval)):
            arrival = round(i * size.interval, 6)
            requests.append(Request(ids.draw(size.prompt), size.output, arrival=arrival))
        return requests, size.window

    return build


def _shared_prefix(scale: Scale, ids: TokenIds) -> Built:
    """Two waves over the same prefixes: in the second, every owner of a prefix has gone.

    Within a wave the prefixes take turns, so that neighbours in the queue do not share.
    """
    prefixes, prefix_length, users, suffix, output = {
        "cpu": (4, 128, 4, (8, 32), (8, 32)),
        "full": (16, 2048, 8, (64, 256), (64, 256)),
        "full_large": (16, 2048, 8, (64, 256), (64, 256)),
    }[scale]
    lengths = Random("shared_prefix lengths")
    common = [ids.draw(prefix_length) for _ in range(prefixes)]
    requests = []
    for wave in range(2):
        for user in range(users):
            for prefix in common:
                prompt = prefix + ids.draw(_uniform(lengths, *suffix))
                shared = 0 if wave == user == 0 else prefix_length
                max_tokens = _uniform(lengths, *output)
                requests.append(Request(prompt, max_tokens, wave=wave, shared_tokens=shared))
    return requests, None


def _batch(size: int, prompt: int) -> Callable[[Scale, TokenIds], Built]:
    def build(scale: Scale, ids: TokenIds) -> Built:
        length = prompt if scale != "cpu" else min(prompt, 64)
        output = 256 if scale != "cpu" else 64
        return [Request(ids.draw(length), output) for _ in range(size)], None

    return build


_BUILDERS: dict[WorkloadName, Callable[[Scale, TokenIds], Built]] = {
    "nano": _nano(1),
    "nano_double": _nano(2),  # for two replicas: each has as much to do as one has with `nano`
    **{name: _gaps(sizes) for name, sizes in _GAPS.items()},
    "shared_prefix": _shared_prefix,
    "batch1": _batch(1, 16),
    "batch8": _batch(8, 512),
}
