"""Which requests are sent, and when: drawn from a seed, the same everywhere.

Every request takes the same draws in the same order, so that a shorter plan is the beginning of a
longer one, and a higher rate has the same requests closer together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from random import Random
from typing import Literal

import msgspec

from bench.online.options import Load, Work
from bench.workloads import ID_LIMIT, TokenIds, content_hash

RequestType = Literal["short", "long"]

WARMUP_OUTPUT = 64
# Standard deviations of a lognormal prompt length between its median and the long (short) one.
LOGNORMAL_DEVIATIONS = 1.0


class Job(msgspec.Struct, frozen=True, gc=False):
    """One request. Lengths in tokens; it ends after exactly `max_tokens`."""

    type: RequestType
    prompt: list[int]
    max_tokens: int
    temperature: float
    arrival: float | None
    """Seconds after the window opens; None: when a client is free."""


class Plan(msgspec.Struct, frozen=True, dict=True):
    jobs: list[Job]
    id_limit: int

    @cached_property
    def sha256(self) -> str:
        return content_hash(
            ["online"],
            ((j.prompt, [j.max_tokens, j.temperature, j.arrival]) for j in self.jobs),
        )

    @property
    def arrival_seconds(self) -> float | None:
        """When the last request is due. None: they come at once, or whenever a client is free."""
        return self.jobs[-1].arrival or None


def build_plan(
    work: Work, load: Load, rate: float | None, vocab_size: int | None, repeat: int
) -> Plan:
    """The requests of one run. Repeats differ in their prompts' ids and in nothing else, and so do
    the prompts of different rates."""
    id_limit = min(ID_LIMIT, vocab_size or ID_LIMIT)
    ids = TokenIds(Random(f"online {work.seed} ids {rate} {repeat}"), id_limit)
    count = load.count(rate)
    arrivals = _arrivals(load, rate, Random(f"online {work.seed} arrivals"))
    lengths = _lengths(work, Random(f"online {work.seed} lengths"))
    jobs = [
        Job(kind, list(ids.draw(prompt)), output, work.temperature, arrival)
        for (kind, prompt, output), arrival in zip(
            islice(lengths, count), islice(arrivals, count), strict=True
        )
    ]
    return Plan(jobs, id_limit)


def warmup_plan(work: Work, count: int, vocab_size: int | None) -> Plan:
    """The same kind of requests, all at once, with short outputs and prompts of their own."""
    id_limit = min(ID_LIMIT, vocab_size or ID_LIMIT)
    ids = TokenIds(Random(f"online {work.seed} warm-up ids"), id_limit)
    lengths = islice(_lengths(work, Random(f"online {work.seed} lengths")), count)
    return Plan(
        [
            Job(kind, list(ids.draw(prompt)), min(output, WARMUP_OUTPUT), work.temperature, 0.0)
            for kind, prompt, output in lengths
        ],
        id_limit,
    )


def _lengths(work: Work, random: Random) -> Iterator[tuple[RequestType, int, int]]:
    """(type, prompt length, output length) without end."""
    while True:
        draws = random.random(), random.random(), random.random()
        if work.workload == "random":
            prompt = _between(work.min_input_len, work.max_input_len, draws[0])
            output = _between(work.min_output_len, work.max_output_len, draws[1])
            is_long = 2 * prompt > work.min_input_len + work.max_input_len
        else:
            prompt, is_long = _mixed_prompt(work, draws)
            output = work.long_output_len if is_long else work.short_output_len
        yield ("long" if is_long else "short"), prompt, output


def _mixed_prompt(work: Work, draws: tuple[float, float, float]) -> tuple[int, bool]:
    """(length, whether it counts as long)."""
    short, long = work.short_input_len, work.long_input_len
    if work.prompt_len_distribution == "bimodal":
        is_long = draws[0] < work.long_prompt_ratio
        return (long if is_long else short), is_long
    if work.prompt_len_distribution == "uniform":
        length = _between(short, long, draws[0])
        return length, 2 * length > short + long
    # Box and Muller: two uniform draws make a normal one. 1 - u: the logarithm of 0 is none.
    normal = math.sqrt(-2 * math.log(1 - draws[0])) * math.cos(2 * math.pi * draws[1])
    median = math.sqrt(short * long)
    sigma = math.log(long / short) / (2 * LOGNORMAL_DEVIATIONS)
    length = round(median * math.exp(sigma * normal))
    return min(max(length, short // 2, 1), 2 * long), length > median


def _between(low: int, high: int, draw: float) -> int:
    return low + int(draw * (high - low + 1))


def _arrivals(load: Load, rate: float | None, random: Random) -> Iterator[float | None]:
    """Seconds after the window opens, without end. The first request opens it."""
    index, now = 0, 0.0
    while True:
        match load.arrival_pattern:
            case "burst":
                yield 0.0
            case "stagger":
                yield round(index * load.stagger_interval_ms / 1e3, 6)
            case "batch":
                yield round(index // load.batch_size * load.batch_interval, 6)
            case "continuous":
                yield None
            case "poisson":
                assert rate is not None
                # Rounded, so that the last bit of a platform's logarithm changes no hash.
                yield round(now / rate, 6)
                now -= math.log(1 - random.random())
        index += 1
