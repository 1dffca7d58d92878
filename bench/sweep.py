"""Named sweeps: one stage, or two, at several settings, in alternating order.

    python -m bench.sweep budget                                  # the bundled model on a CPU
    python -m bench.sweep regimes --model qwen3-0.6b --time-limit 900

budget           01: prompt tokens a step; what gaps cost in throughput
batched-tokens   01: the same for all tokens of a step
mixed-batch      01: decodes and chunks in one forward pass (unified), or in two (separate)
graphs           00, 01 and 02: CUDA graphs, or none
regimes          01 and 02, 02 without its deferral too, by attention backend and mix of decodes
                 and prompts
parallel         04: one device, two that share the model, two replicas; with four GPUs, four too

A point is a process in every round; it runs all workloads of the sweep. How long all of it takes at
most is printed first. Files are those of `bench.compare`, in a directory named after the sweep.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from bench.cli import flag_name
from bench.compare import flags_for, with_weights
from bench.rounds import Contender, RunOptions, run_comparison
from bench.workloads import WorkloadName
from shared.cli import run_main

SweepName = Literal["budget", "batched-tokens", "mixed-batch", "graphs", "regimes", "parallel"]

GPU_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
CPU_TOKENS = (32, 64, 128, 256, 512, 1024)  # the long prompts have 1,024


@dataclass(frozen=True)
class SweepOptions(RunOptions):
    name: tyro.conf.Positional[SweepName] = "budget"
    """Which one."""
    output: Path = Path("out/sweep")
    """The sweep's own directory is made in this one."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """For one process."""
    workload: tuple[WorkloadName, ...] = ()
    """Instead of the sweep's own workloads."""
    values: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """budget, batched-tokens: instead of the sweep's own numbers of tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values and self.name not in ("budget", "batched-tokens"):
            raise ValueError(f"--values are for budget and batched-tokens, not for {self.name}")


@dataclass(frozen=True)
class Place:
    """Where the sweep runs: what is worth measuring depends on it."""

    on_gpu: bool
    backends: tuple[str, ...]
    devices: int = 2
    """How many there may be in a point."""

    @classmethod
    def here(cls, flags: Sequence[str]) -> Place:
        """Of this machine, with the device that the flags name."""
        if not _on_gpu(flags):
            return cls(False, ("torch",))
        import torch  # here: --help does without

        backends = ("triton", "flash_attn")
        missing = importlib.util.find_spec("flash_attn") is None
        return cls(True, backends[:1] if missing else backends, torch.cuda.device_count())


def _on_gpu(flags: Sequence[str]) -> bool:
    import torch  # here: --help does without

    named = [a.partition("=")[2] or b for a, b in pairwise([*flags, ""]) if _is_device(a)]
    return named[-1] == "cuda" if named and named[-1] != "auto" else torch.cuda.is_available()


def _is_device(arg: str) -> bool:
    return flag_name(arg) == "device"


Points = tuple[list[Contender], list[WorkloadName]]


def budget(place: Place, values: Sequence[int]) -> Points:
    tokens = values or (GPU_TOKENS if place.on_gpu else CPU_TOKENS)
    return [_point("01", max_prefill_tokens_per_step=n) for n in tokens], [_busy(place)]


def batched_tokens(place: Place, values: Sequence[int]) -> Points:
    tokens = values or (GPU_TOKENS if place.on_gpu else CPU_TOKENS)
    # The workload's own limit on prompt tokens would otherwise stay where it is.
    points = [_point("01", max_num_batched_tokens=n, max_prefill_tokens_per_step=n) for n in tokens]
    return points, [_busy(place)]


def mixed_batch(place: Place, values: Sequence[int]) -> Points:
    points = [_point("01", mixed_batch=kind) for kind in ("unified", "separate")]
    return points, ["nano", _busy(place)]


def graphs(place: Place, values: Sequence[int]) -> Points:
    stages = ("00", "01", "02")
    points = [_point(stage, enforce_eager=eager) for stage in stages for eager in (False, True)]
    return points, ["batch1", "nano", _busy(place)]


def regimes(place: Place, values: Sequence[int]) -> Points:
    points = []
    for backend in place.backends:
        points += [
            _point("01", attention_backend=backend),
            _point("02", attention_backend=backend, max_prefill_defer=0),
            _point("02", attention_backend=backend),
        ]
    return points, ["decode_gap_many", _busy(place), "decode_gap_few", "decode_gap_long"]


def parallel(place: Place, values: Sequence[int]) -> Points:
    sizes = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]
    points = [
        _point("04", data_parallel_size=replicas, tensor_parallel_size=ranks)
        for replicas, ranks in sizes
        if replicas * ranks <= place.devices
    ]
    return points, ["batch1", "batch8", "nano", "nano_double"]


SWEEPS: dict[SweepName, Callable[[Place, Sequence[int]], Points]] = {
    "budget": budget,
    "batched-tokens": batched_tokens,
    "mixed-batch": mixed_batch,
    "graphs": graphs,
    "regimes": regimes,
    "parallel": parallel,
}
assert tuple(SWEEPS) == get_args(SweepName)

STAGES = {
    "00": "00_baseline",
    "01": "01_chunked_prefill",
    "02": "02_batch_reorder",
    "04": "04_dp_tp",
}


def _busy(place: Place) -> WorkloadName:
    """Where prompts come often enough for p99 of the gaps to see them."""
    return "decode_gap_busy" if place.on_gpu else "decode_gap"


def _point(stage: str, **settings: str | int | bool) -> Contender:
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return Contender(STAGES[stage], tuple(flags))


def main(args: Sequence[str] | None = None) -> int:
    """Exit status: 1 if something failed; its row says why."""
    options, flags = tyro.cli(
        SweepOptions,
        prog="python -m bench.sweep",
        description="Measure one option at several values. Further flags are the engines'.",
        args=args,
        return_unknown_args=True,
    )
    points, workloads = SWEEPS[options.name](Place.here(flags), options.values)
    flags = with_weights(flags)
    stages = list(dict.fromkeys(point.name for point in points))
    contenders = [replace(p, flags=(*p.flags, *flags_for(p.name, stages, flags))) for p in points]
    directory = options.output / options.name
    workloads = list(options.workload) or workloads
    return run_comparison(contenders, workloads, replace(options, output=directory))


if __name__ == "__main__":
    run_main(main)
