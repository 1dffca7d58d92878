"""Where the microseconds of a decode step go, kernel by kernel.

    python -m bench.decode_profile --model qwen3-0.6b --load-format dummy --rows 1 8 64 256

Sums what torch's profiler saw on the GPU over some steady decode steps. Kernels run one after the
other, so what is left of the step's time between them is launch gaps and the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import tyro
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shared import SamplingParams
from steps import load

MICROSECONDS = 1e6


@dataclass
class KernelTime:
    launches: float = 0.0  # per step
    microseconds: float = 0.0  # per step


@dataclass
class StepProfile:
    """One decode step with `rows` sequences of about `context` tokens."""

    rows: int
    context: int
    step_us: float
    kernels: dict[str, KernelTime] = field(default_factory=dict)

    @property
    def kernel_us(self) -> float:
        return sum(kernel.microseconds for kernel in self.kernels.values())


def profile_decode(engine: Any, rows: int, context: int, steps: int) -> StepProfile:
    """Prefill `rows` prompts of `context` tokens, then time and profile decode steps."""
    generator = torch.Generator().manual_seed(rows)
    vocabulary = min(10_000, engine.vocab_size)
    params = SamplingParams(temperature=0.6, max_tokens=3 * steps + 16, ignore_eos=True)
    for row in range(rows):
        prompt = torch.randint(0, vocabulary, (context,), generator=generator).tolist()
        engine.add_request(f"{rows}.{row}", prompt, params)
    started = 0
    while started < rows:
        started += sum(len(output.new_token_ids) for output in engine.step())
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - begin) / steps * MICROSECONDS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    kernels: defaultdict[str, KernelTime] = defaultdict(KernelTime)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name].launches += 1 / steps
            kernels[event.name].microseconds += event.self_device_time_total / steps
    for row in range(rows):
        engine.abort_request(f"{rows}.{row}")
    return StepProfile(rows, context, step_us, dict(kernels))


def show(result: StepProfile, most: int) -> None:
    print(
        f"\n{result.rows} rows, {result.context} tokens each: {result.step_us:.0f} us a step, "
        f"{result.kernel_us:.0f} us in kernels"
    )
    ordered = sorted(result.kernels.items(), key=lambda item: -item[1].microseconds)
    for name, kernel in ordered[:most]:
        print(f"{kernel.microseconds:9.1f} us {kernel.launches:6.1f} x  {name[:90]}")


@dataclass
class Options:
    """What to profile."""

    model: str = "qwen3-0.6b"
    stage: str = "00_baseline"
    rows: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    steps: int = 20
    most: int = 16
    """Kernels to list."""
    attention_backend: str = "auto"


def main(options: Options) -> None:
    module = load(options.stage)
    config = module.Config(
        model=options.model,
        load_format="dummy",
        attention_backend=options.attention_backend,
    )
    engine = module.Engine(config)
    try:
        for rows in options.rows:
            show(profile_decode(engine, rows, options.context, options.steps), options.most)
    finally:
        engine.close()


if __name__ == "__main__":
    main(tyro.cli(Options))
