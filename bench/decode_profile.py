"""Where every microsecond of a decode step goes, kernel by kernel, beside the floor of each.

    python -m bench.decode_profile --model qwen3-0.6b --json bench/results/decode_profile_06b.json
    python -m bench.decode_profile --model qwen3-8b --tensor-parallel-size 2

Times are what torch's profiler saw on the GPU over some steady steps. A kernel may start while the
one before it still runs, to wait for it: a moment belongs to the kernel that started first. What is
left of the step is the host and the gaps between kernels. Of several ranks, the first is shown; a
sum lasts until the slowest has sent its part.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import tyro
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.floor import measure_rates
from bench.gpu import hardware
from bench.result import (
    Hardware,
    git_state,
    library_versions,
    now,
    prepare_output,
    write_json,
)
from shared import SamplingParams
from shared.models.config import ModelConfig
from shared.models.files import ModelFiles
from steps import load

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MICROSECONDS = 1e6

# Part of the step -> words in the names of its kernels; the first that fits takes a kernel.
PARTS = {
    "attention": ("_decode_attention", "flash_fwd", "flash::"),
    "q/k norm, rotary, KV write": ("qk_norm",),
    "norm": ("rms_norm",),
    "activation": ("silu",),
    "sampling": ("_split_kernel", "_combine_kernel"),
    "inputs and gathers": ("_gather_rows", "_resolve_step"),
    "sums over ranks": ("peer_all_reduce", "nccl"),
    "linear": ("nvjet", "gemm", "splitK", "splitk", "_row_kernel", "_rows_kernel", "cublas"),
}
OTHER = "copies and the rest"


class PartTime(msgspec.Struct):
    """One part of a step, all layers together, microseconds."""

    part: str
    launches: float
    microseconds: float
    floor: float
    """The bytes it cannot do without, at the device's copy bandwidth."""
    kernels: dict[str, float]
    """Microseconds by kernel."""


class StepProfile(msgspec.Struct):
    """One decode step with `rows` sequences of about `context` tokens, microseconds."""

    rows: int
    context: float
    step: float
    """Wall time, unprofiled."""
    busy: float
    parts: list[PartTime]


class ProfileReport(msgspec.Struct):
    schema_version: int
    time: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: dict[str, str]
    config: dict[str, Any]
    copy_gb_per_second: float
    steps: list[StepProfile]


def part_of(kernel: str) -> str:
    for part, words in PARTS.items():
        if any(word in kernel for word in words):
            return part
    return OTHER


def floor_bytes(model: ModelConfig, rows: int, context: float, ranks: int = 1) -> dict[str, float]:
    """Part -> bytes per step that it must read and write on each of so many ranks, in bf16.

    Weights once; keys and values of every sequence once. Activations go from one part to the next
    and are counted where both write or read them: fusing parts can beat these, but not by much.
    Sums over ranks count as nothing: one rank has none.
    """
    h, i, layers = model.hidden_size, model.intermediate_size // ranks, model.num_hidden_layers
    heads = model.num_attention_heads // ranks, max(1, model.num_key_value_heads // ranks)
    q, kv = (n * model.head_dim for n in heads)
    vocabulary = model.vocab_size / ranks
    weights = h * (2 * q + 2 * kv + 3 * i) * layers + vocabulary * h
    between = rows * layers
    values = {
        "linear": weights + between * (h + q + 2 * kv + q + h + h + 2 * i + i + h),
        "attention": 2 * kv * context * between + between * 2 * q,
        "q/k norm, rotary, KV write": between * 2 * (q + 2 * kv),
        "norm": rows * (2 * layers + 1) * 4 * h,
        "activation": between * 3 * i,
        "sampling": rows * vocabulary,
        "inputs and gathers": rows * 4 * h,
        "sums over ranks": 0,
        OTHER: 0,
    }
    return {part: 2.0 * count for part, count in values.items()}


def shares(intervals: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """(begin, end, kernel) -> the time of each kernel, where a moment belongs to the kernel that
    started first. Their sum is how long any was running."""
    times: defaultdict[str, float] = defaultdict(float)
    reached = float("-inf")
    for begin, end, kernel in sorted(intervals):
        times[kernel] += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return times


def record(engine: Any, steps: int) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds and launches by kernel, of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    seen = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    times = shares((e.time_range.start, e.time_range.end, e.name) for e in seen)
    return {name: us / steps for name, us in times.items()}, Counter(e.name for e in seen)


def profile_decode(
    engine: Any, model: ModelConfig, rows: int, options: Options, bandwidth: float
) -> StepProfile:
    """Prefill `rows` prompts, then time and profile decode steps."""
    prompt, steps = options.prompt, options.steps
    generator = torch.Generator().manual_seed(rows)
    vocabulary = min(10_000, engine.vocab_size)
    warm_up = 10
    length = warm_up + 2 * steps + 2
    params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True)
    for row in range(rows):
        ids = torch.randint(0, vocabulary, (prompt,), generator=generator).tolist()
        engine.add_request(f"{rows}.{row}", ids, params)
    started = 0
    while started < rows:
        started += sum(len(output.new_token_ids) for output in engine.step())
    for _ in range(warm_up):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    step = (time.perf_counter() - begin) / steps * MICROSECONDS
    microseconds, launches = record(engine, steps)
    for row in range(rows):
        engine.abort_request(f"{rows}.{row}")
    context = prompt + warm_up + 1.5 * steps
    floors = floor_bytes(model, rows, context, options.tensor_parallel_size)
    parts = []
    for part in (*PARTS, OTHER):
        kernels = {name: us for name, us in microseconds.items() if part_of(name) == part}
        count = sum(launches[name] for name in kernels) / steps
        floor = floors[part] / bandwidth * MICROSECONDS
        parts.append(PartTime(part, count, sum(kernels.values()), floor, kernels))
    return StepProfile(rows, context, step, sum(microseconds.values()), parts)


def show(result: StepProfile) -> None:
    print(f"\n{result.rows} rows, {result.context:.0f} tokens each: {result.step:.0f} us a step, "
          f"the GPU is busy for {result.busy:.0f}")  # fmt: skip
    for part in sorted(result.parts, key=lambda part: -part.microseconds):
        print(f"{part.microseconds:9.1f} us, floor {part.floor:8.1f}, {part.launches:6.1f} launches"
              f"  {part.part}")  # fmt: skip


@dataclass
class Options:
    """What to profile."""

    model: str = "qwen3-0.6b"
    stage: str = "00_baseline"
    rows: tuple[int, ...] = (1, 8, 64, 256)
    prompt: int = 512
    """Tokens."""
    steps: int = 40
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    json: Path | None = None
    """File for the report."""


def main(options: Options) -> None:
    prepare_output(options.json, "--json")
    module = load(options.stage)
    config = module.Config(
        model=options.model,
        load_format="dummy",
        attention_backend=options.attention_backend,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    model = ModelFiles.find(config.model, config.load_format).config
    rates = measure_rates("cuda", torch.bfloat16, 0)
    runner = None
    if options.tensor_parallel_size > 1:
        start = importlib.import_module("steps.04_dp_tp.runner").start_group
        runner = start(config, module.Engine.decodes_in_front, logger.error)
    engine = module.Engine(config, runner)
    steps = []
    try:
        for rows in options.rows:
            steps.append(profile_decode(engine, model, rows, options, rates.bandwidth))
            show(steps[-1])
    finally:
        engine.close()
    if options.json is not None:
        commit, dirty = git_state()
        report = ProfileReport(
            schema_version=SCHEMA_VERSION,
            time=now(),
            commit=commit,
            dirty=dirty,
            hardware=hardware("cuda"),
            versions=library_versions(),
            config={"stage": options.stage, **engine.describe()},
            copy_gb_per_second=rates.bandwidth / 1e9,
            steps=steps,
        )
        write_json(options.json, report)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m bench.decode_profile"))
