"""Sums over the ranks of a tensor-parallel group: shared.kernels.peer_all_reduce against NCCL and
torch's symmetric memory.

    python -m bench.all_reduce [--gpus 2] [--json bench/results/all_reduce_h200.json]

Messages of the rows of a step of the 8B model, bf16, and of one row of the 0.6B model. Microseconds
of one sum in a CUDA graph of many, of the slowest rank; the floor is the bytes that a rank must
receive at the measured bandwidth between two GPUs, both directions in use.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import tyro

from bench.gpu import hardware
from bench.result import (
    Hardware,
    git_state,
    library_versions,
    now,
    prepare_output,
    write_json,
)
from shared.cli import run_main
from shared.layers.tensor_parallel import TensorParallel

group: Any = importlib.import_module("steps.04_dp_tp.group")

SCHEMA_VERSION = 1
DTYPE = torch.bfloat16
KILOBYTES = (2, 8, 32, 64, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536)
CALLS, REPLAYS, WARM_UP = 50, 20, 5
COPY_BYTES = 256 << 20


class Measurement(msgspec.Struct, frozen=True):
    kilobytes: int
    floor_us: float
    nccl_us: float
    one_shot_us: float | None
    two_shot_us: float | None
    peers_us: float | None
    """Of ours; None: more than a place holds."""


class Report(msgspec.Struct, frozen=True):
    schema_version: int
    time: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: dict[str, str]
    ranks: int
    gb_per_second: float
    """From one GPU to another, while as much flows back."""
    rows: list[Measurement]


def measure(rank: int, ranks: int, port: int, json: Path | None) -> None:
    """What one rank does; the first one prints."""
    import torch.distributed._symmetric_memory as symmetric_memory

    tp: TensorParallel = group.join(rank, ranks, port, "cuda")
    device = torch.device("cuda", rank)
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    shared = symmetric_memory.empty(COPY_BYTES // 2, dtype=DTYPE, device=device)
    handle = symmetric_memory.rendezvous(shared, name)
    shared.normal_()
    theirs = handle.get_buffer((rank + 1) % ranks, (COPY_BYTES // 4,), DTYPE)
    copy = timed(lambda: theirs.copy_(shared[COPY_BYTES // 4 :]), calls=4)
    bandwidth = COPY_BYTES / 2 / (copy * 1e-6)
    rows = []
    for kilobytes in KILOBYTES:
        count = kilobytes * 512
        x, buffer = torch.zeros(count, dtype=DTYPE, device=device), shared[:count].zero_()
        ways: dict[str, Callable[[], object] | None] = {
            "nccl": partial(dist.all_reduce, x),
            "one_shot": partial(torch.ops.symm_mem.one_shot_all_reduce, buffer, "sum", name),
            "two_shot": partial(torch.ops.symm_mem.two_shot_all_reduce_, buffer, "sum", name),
            "peers": None,
        }
        if tp.peers is not None and tp.peers.takes(x):
            ways["peers"] = partial(tp.peers, x)
        times = {f"{way}_us": None if call is None else timed(call) for way, call in ways.items()}
        floor = 2 * (ranks - 1) / ranks * x.nbytes / bandwidth * 1e6
        rows.append(Measurement(kilobytes, floor, **times))  # type: ignore[arg-type]
        if rank == 0:
            cells = [f"{way} {'' if t is None else f'{t:.1f}':>7}" for way, t in times.items()]
            print(f"{kilobytes:6} KB  floor {floor:6.1f}  " + "  ".join(cells))
    if rank == 0:
        print(f"{bandwidth / 1e9:.0f} GB/s from one to the other")
        if json is not None:
            write(json, ranks, bandwidth, rows)
    dist.destroy_process_group()


def timed(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one call: the median of replays, of the slowest rank."""
    for _ in range(WARM_UP):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def write(json: Path, ranks: int, bandwidth: float, rows: list[Measurement]) -> None:
    commit, dirty = git_state()
    report = Report(
        SCHEMA_VERSION,
        now(),
        commit,
        dirty,
        hardware("cuda"),
        library_versions(),
        ranks,
        bandwidth / 1e9,
        rows,
    )
    write_json(json, report)


def main(gpus: int = 2, json: Path | None = None) -> int:
    """Measure on the first GPUs; `json` is where the full report goes. Raises ValueError for fewer
    than two."""
    if not 2 <= gpus <= torch.cuda.device_count():
        raise ValueError(f"--gpus {gpus}: at least 2, and {torch.cuda.device_count()} can be seen")
    prepare_output(json, "--json")
    store = group.open_store()
    torch.multiprocessing.spawn(measure, (gpus, store.port, json), nprocs=gpus)
    return 0


if __name__ == "__main__":
    run_main(lambda: tyro.cli(main, prog="python -m bench.all_reduce"))
