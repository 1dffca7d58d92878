"""The physical floor: the least time a device needs for a workload, whoever writes the engine.

Assumed schedule. Requests start in order, as soon as a running place and room in the KV pool are
free. A prefill pass reads all weights once per `max_num_batched_tokens` tokens and writes the new
KV. A decode step reads all weights once, and the KV of every running sequence once, and gives
each one token. A pass or step takes the longer of (bytes / bandwidth) and (FLOPs / matrix rate);
between them no time passes. Shared prefixes are computed once when prefix caching is on, but read
by every sequence (no cascade attention). Activations, sampling and the host cost nothing.

Prefill passes and decode steps follow one another. An engine that mixes them could overlap one's
arithmetic with the other's memory traffic and gain at most the smaller of the two; the result's
`memory_seconds` and `compute_seconds` bound that from below.

    python -m bench.floor --model qwen3-0.6b --workload nano --bandwidth 4.3e12 --matmul-rate 790e12
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import tyro

from bench.result import Floor
from bench.workloads import Request, Scale, WorkloadName, build_workload
from shared.models.config import ModelConfig, real_model_config

ASSUMPTION = (
    "each decode step reads all weights once and the KV of all running sequences; prefill passes "
    "and decode steps alternate; each takes the longer of its bytes and its FLOPs"
)
MEASURE_SECONDS = 0.5
GPU_COPY_BYTES = 4 << 30
CPU_COPY_BYTES = (4 << 20, 1 << 30)  # smallest, largest


@dataclass(frozen=True)
class Rates:
    """What a device can do: bytes/s read plus written, and FLOP/s of a large matrix product."""

    bandwidth: float
    matmul: float


@dataclass(frozen=True)
class Limits:
    """What the engine may hold at a time."""

    sequences: int
    step_tokens: int
    pool_tokens: int
    max_model_length: int
    prefix_caching: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any], concurrency: int | None = None) -> Limits:
        """From an engine's own description. `concurrency`: most requests there at a time."""
        replicas = int(settings.get("data_parallel_size") or 1)
        sequences = replicas * settings["max_num_sequences"]
        return cls(
            sequences=sequences if concurrency is None else min(sequences, concurrency),
            step_tokens=replicas * settings["max_num_batched_tokens"],
            pool_tokens=replicas * settings["tokens_in_pool"],
            max_model_length=settings["max_model_length"],
            prefix_caching=settings["enable_prefix_caching"],
        )


def num_devices(settings: Mapping[str, Any]) -> int:
    """That an engine of this description computes on."""
    sizes = (settings.get(f"{kind}_parallel_size") or 1 for kind in ("data", "tensor"))
    return math.prod(int(size) for size in sizes)


@dataclass(frozen=True)
class ModelCost:
    """Bytes and FLOPs of a decoder-only transformer with gated MLP and grouped heads."""

    weight_bytes: int
    """Read by every step. The embedding counts once: a table that is only looked up is not read."""
    kv_bytes: int
    """Per token, all layers."""
    trunk_flops: int
    """Per token, attention scores excluded."""
    head_flops: int
    """Per sampled row."""
    attention_flops: int
    """Per pair of a query token and a token it attends to, all layers."""

    @classmethod
    def of(cls, model: ModelConfig, bytes_per_value: int) -> ModelCost:
        q_size = model.num_attention_heads * model.head_dim
        kv_size = model.num_key_value_heads * model.head_dim
        layer = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
        trunk = layer * model.num_hidden_layers
        head = model.vocab_size * model.hidden_size
        return cls(
            weight_bytes=(trunk + head) * bytes_per_value,
            kv_bytes=2 * kv_size * model.num_hidden_layers * bytes_per_value,
            trunk_flops=2 * trunk,
            head_flops=2 * head,
            attention_flops=4 * q_size * model.num_hidden_layers,
        )


@dataclass(frozen=True)
class _Job:
    prompt: int
    cached: int
    output: int
    arrival: float
    wave: int


class _Schedule:
    """Plays the assumed schedule and adds up bytes, FLOPs and time."""

    def __init__(self, cost: ModelCost, rates: Rates, limits: Limits) -> None:
        self.cost, self.rates, self.limits = cost, rates, limits
        self.context = np.zeros(0, dtype=np.int64)  # tokens with KV, per running sequence
        self.left = np.zeros(0, dtype=np.int64)  # output tokens still to come
        self.reset()

    def reset(self) -> None:
        """Starts counting anew; what is running goes on."""
        self.time = self.decode_time = self.moved = self.flops = 0.0
        self.tokens = self.decode_steps = 0

    def play(self, jobs: Sequence[_Job], until: float = math.inf) -> None:
        """Runs jobs (in order of arrival) to their end, or to the given time."""
        waiting = list(reversed(jobs))
        while (waiting or len(self.left)) and self.time < until:
            admitted = self._admit(waiting)
            if admitted:
                self._prefill(admitted)
            elif len(self.left):
                self._decode()
            else:
                self.time = max(self.time, waiting[-1].arrival)

    def _admit(self, waiting: list[_Job]) -> list[_Job]:
        admitted: list[_Job] = []
        used = int(self.context.sum())
        while waiting and waiting[-1].arrival <= self.time:
            running = len(self.left) + len(admitted)
            full = running >= self.limits.sequences
            if full or (running and used + waiting[-1].prompt > self.limits.pool_tokens):
                break
            admitted.append(waiting.pop())
            used += admitted[-1].prompt
        return admitted

    def _prefill(self, jobs: list[_Job]) -> None:
        cost = self.cost
        new = sum(job.prompt - job.cached for job in jobs)
        pairs = sum(_triangle(job.prompt) - _triangle(job.cached) for job in jobs)
        passes = math.ceil(new / self.limits.step_tokens)
        flops = new * cost.trunk_flops + len(jobs) * cost.head_flops + pairs * cost.attention_flops
        self._spend(passes * cost.weight_bytes + new * cost.kv_bytes, flops)
        self.tokens += len(jobs)
        context = np.array([job.prompt for job in jobs], dtype=np.int64)
        left = np.array([job.output - 1 for job in jobs], dtype=np.int64)
        self._keep(np.concatenate([self.context, context]), np.concatenate([self.left, left]))

    def _decode(self) -> None:
        cost, rows = self.cost, len(self.left)
        # The token sampled last step is computed now: it attends to itself as well.
        context = self.context + 1
        attended = int(context.sum())
        flops = rows * (cost.trunk_flops + cost.head_flops) + attended * cost.attention_flops
        self.decode_time += self._spend(cost.weight_bytes + attended * cost.kv_bytes, flops)
        self.decode_steps += 1
        self.tokens += rows
        self._keep(context, self.left - 1)

    def _keep(self, context: np.ndarray, left: np.ndarray) -> None:
        alive = left > 0
        self.context, self.left = context[alive], left[alive]

    def _spend(self, moved: float, flops: float) -> float:
        self.moved += moved
        self.flops += flops
        seconds = max(moved / self.rates.bandwidth, flops / self.rates.matmul)
        self.time += seconds
        return seconds


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


class Work(Protocol):
    """A `Workload`, as far as its floor is concerned."""

    @property
    def requests(self) -> Sequence[Request]: ...
    @property
    def window(self) -> float | None: ...


def physical_floor(
    workload: Work, cost: ModelCost, rates: Rates, limits: Limits, devices: int = 1
) -> Floor:
    """The floor of a workload on `devices` equal devices that share the work perfectly.

    With a window, the floor's tokens are those an ideal device generates in it; its decodes get
    further than a slower engine's, so their contexts are longer and the floor is not quite reached
    by an engine that merely matches it step for step.
    """
    schedule = _Schedule(cost, Rates(rates.bandwidth * devices, rates.matmul * devices), limits)
    jobs = [
        _Job(
            prompt=len(r.prompt),
            # One token has to be computed even when the whole prompt is in the cache.
            cached=min(r.shared_tokens, len(r.prompt) - 1) if limits.prefix_caching else 0,
            output=r.max_tokens or max(1, limits.max_model_length - len(r.prompt)),
            arrival=r.arrival or 0.0,
            wave=r.wave,
        )
        for r in workload.requests
    ]
    timed = [r.arrival is not None for r in workload.requests]
    if workload.window is not None:
        schedule._prefill([job for job, late in zip(jobs, timed, strict=True) if not late])
        schedule.reset()
        late_jobs = sorted((j for j, t in zip(jobs, timed, strict=True) if t), key=_arrival)
        schedule.play(late_jobs, until=workload.window)
        schedule.time = max(schedule.time, workload.window)
    else:
        for wave in sorted({job.wave for job in jobs}):
            schedule.play([job for job in jobs if job.wave == wave])
    steps = schedule.decode_steps
    return Floor(
        tokens_per_second=schedule.tokens / schedule.time,
        tpot_ms=1e3 * schedule.decode_time / steps if steps else None,
        seconds=schedule.time,
        bytes_moved=schedule.moved,
        flops=schedule.flops,
        memory_seconds=schedule.moved / schedule.rates.bandwidth,
        compute_seconds=schedule.flops / schedule.rates.matmul,
        bandwidth=rates.bandwidth,
        matmul_rate=rates.matmul,
        devices=devices,
        assumption=ASSUMPTION,
    )


def _arrival(job: _Job) -> float:
    return job.arrival


def best(a: Rates, b: Rates) -> Rates:
    return Rates(max(a.bandwidth, b.bandwidth), max(a.matmul, b.matmul))


def measure_rates(device: str, dtype: torch.dtype, working_set: int) -> Rates:
    """Measures a large copy and a large matrix product; about a second, best of several.

    `working_set` is the bytes a step reads. On a CPU the copy is of that size: the weights of a
    tiny model stay in the last-level cache, and main memory's bandwidth would be no floor for them.
    """
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        size, n = min(GPU_COPY_BYTES, free // 8), 8192
    else:
        size, n = min(max(working_set // 2, CPU_COPY_BYTES[0]), CPU_COPY_BYTES[1]), 1024
    bandwidth = _copy_rate(size, device)
    matmul = _matmul_rate(n, dtype, device)
    if device == "cuda":
        # The engine sizes its pool by what is free and by its own peak, not by this one.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Rates(bandwidth, matmul)


def _copy_rate(size: int, device: str) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(n: int, dtype: torch.dtype, device: str) -> float:
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.matmul(a, b, out=out), device)


def _best_seconds(work: Callable[[], object], device: str) -> float:
    """Seconds of one call: the best group of calls in about half a second."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
    work()
    sync()
    begin = time.perf_counter()
    work()
    sync()
    # A group is long enough for launches and the clock not to matter.
    calls = max(1, round(0.02 / max(time.perf_counter() - begin, 1e-6)))
    best, deadline = math.inf, begin + MEASURE_SECONDS
    while (start := time.perf_counter()) < deadline or math.isinf(best):
        for _ in range(calls):
            work()
        sync()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def _nothing() -> None:
    pass


def main(
    model: str = "qwen3-0.6b",
    workload: WorkloadName = "nano",
    scale: Scale = "full",
    bandwidth: float = 4.3e12,
    matmul_rate: float = 790e12,
    devices: int = 1,
) -> None:
    """Print the floor of a real model size in bf16 on a device of the given rates."""
    shape = real_model_config(model)
    built = build_workload(workload, scale, shape.vocab_size)
    limits = Limits(512, 16384, 10**9, shape.max_position_embeddings)
    rates = Rates(bandwidth, matmul_rate)
    floor = physical_floor(built, ModelCost.of(shape, 2), rates, limits, devices)
    print(
        f"{model} {workload}: {floor.tokens_per_second:,.0f} tokens/s, {floor.tpot_ms:.3f} ms/step"
    )
    print(f"  {floor.seconds:.3f} s: {floor.memory_seconds:.3f} s of memory traffic, "
          f"{floor.compute_seconds:.3f} s of arithmetic")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
