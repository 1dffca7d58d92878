"""The kernels against the hardware, and against flash-attn and torch where they have the operation.

    python -m bench.kernels [--json out.json] [--only decode prefill]

First the two ceilings are measured: bytes a large copy moves, operations a large matrix product
does. Then every kernel on shapes of a 4B to 8B model, bf16: the median time of one call, the rate
it moved or computed at, and the share of its ceiling. Calls are captured in a CUDA graph and
rotate over input sets that together exceed the L2 cache several times, so neither launches nor
the cache are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
import tyro

from bench.floor import Rates, measure_rates
from bench.gpu import hardware
from bench.result import (
    Hardware,
    git_state,
    library_versions,
    now,
    prepare_output,
    write_json,
)
from shared.kernels.paged_decode_attention import DecodeWorkspace, paged_decode_attention
from shared.kernels.paged_mixed_attention import attend_apart, paged_mixed_attention
from shared.kernels.paged_prefill_attention import paged_prefill_attention
from shared.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from shared.kernels.rms_norm import add_rms_norm, rms_norm
from shared.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except ImportError:
    flash_attn_varlen_func = flash_attn_with_kvcache = None

SCHEMA_VERSION = 1
DTYPE = torch.bfloat16
ROTATED_BYTES = 400 * 2**20
MIN_GRAPH_SECONDS = 2e-3
REPLAYS = 15
FLASH_ATTN_BLOCK_SIZE = 256

Group = Literal["norm", "activation", "rotary", "decode", "prefill", "mixed"]


class Measurement(msgspec.Struct, frozen=True):
    operation: str
    shape: str
    implementation: str
    microseconds: float
    """Median of one call."""
    spread: float
    """(slowest - fastest) / median over the replays."""
    rate: float
    unit: Literal["GB/s", "TFLOP/s"]
    percent_of_ceiling: float


class KernelReport(msgspec.Struct, frozen=True):
    schema_version: int
    time: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    versions: dict[str, str]
    copy_gb_per_second: float
    matmul_tflop_per_second: float
    rows: list[Measurement]


@dataclass
class Case:
    """`make` builds one input set and returns the calls of all implementations on it."""

    group: Group
    operation: str
    shape: str
    bytes_moved: int
    flops: int
    make: Callable[[], dict[str, Callable[[], object]]]


def measure_call(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """(median seconds of one call, spread) over graph replays of all calls in turn."""
    for call in calls[:3]:
        call()  # compiles, and creates library handles, outside the capture
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    calls[0]()
    end.record()
    torch.cuda.synchronize()
    seconds = max(start.elapsed_time(end) / 1e3, 2e-6)
    rounds = max(1, round(MIN_GRAPH_SECONDS / seconds / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def measure_case(case: Case, rates: Rates) -> list[Measurement]:
    torch.manual_seed(0)
    sets = max(1, -(-ROTATED_BYTES // max(1, case.bytes_moved)))
    inputs = [case.make() for _ in range(min(sets, 64))]
    rows = []
    for implementation in inputs[0]:
        try:
            seconds, spread = measure_call([calls[implementation] for calls in inputs])
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"{case.operation} {case.shape} {implementation}: {error}")
            continue
        memory_share = case.bytes_moved / rates.bandwidth / seconds
        compute_share = case.flops / rates.matmul / seconds
        bound_by_compute = compute_share > memory_share
        rows.append(
            Measurement(
                case.operation,
                case.shape,
                implementation,
                seconds * 1e6,
                spread,
                case.flops / seconds / 1e12
                if bound_by_compute
                else case.bytes_moved / seconds / 1e9,
                "TFLOP/s" if bound_by_compute else "GB/s",
                100 * max(memory_share, compute_share),
            )
        )
    return rows


# --- rows of the residual stream ------------------------------------------------------------------


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def norm_cases(tokens: int, hidden: int = 4096) -> Iterator[Case]:
    row = tokens * hidden * DTYPE.itemsize
    weight = randn(hidden)

    def plain() -> dict[str, Callable[[], object]]:
        x = randn(tokens, hidden)
        return {
            "triton": lambda: rms_norm(x, weight, 1e-6),
            "torch": lambda: F.rms_norm(x, (hidden,), weight, 1e-6),
        }

    def added() -> dict[str, Callable[[], object]]:
        # In place: values shrink from call to call and stay finite, as a norm's output does.
        x, residual = randn(tokens, hidden), randn(tokens, hidden)
        y, other = x.clone(), residual.clone()
        return {
            "triton": lambda: add_rms_norm(x, residual, weight, 1e-6),
            "torch": lambda: F.rms_norm(y + other, (hidden,), weight, 1e-6),
        }

    yield Case("norm", "rms_norm", f"{tokens} x {hidden}", 2 * row, 0, plain)
    yield Case("norm", "add_rms_norm", f"{tokens} x {hidden}", 4 * row, 0, added)


def activation_case(tokens: int, width: int = 12288) -> Case:
    def make() -> dict[str, Callable[[], object]]:
        x = randn(tokens, 2 * width)
        return {"triton": lambda: silu_and_mul(x), "torch": lambda: silu_and_mul_reference(x)}

    moved = 3 * tokens * width * DTYPE.itemsize
    return Case("activation", "silu_and_mul", f"{tokens} x {width}", moved, 0, make)


def rotary_case(tokens: int, num_heads: int = 32, num_kv_heads: int = 8, dim: int = 128) -> Case:
    block_size = 16
    width = (num_heads + 2 * num_kv_heads) * dim
    angles = torch.rand(40960, dim // 2, device="cuda") * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weight = randn(dim)

    def make() -> dict[str, Callable[[], object]]:
        qkv = randn(tokens, width)
        positions = torch.randint(0, 40960, (tokens,), device="cuda", dtype=torch.int32)
        num_blocks = -(-tokens // block_size)
        slots = torch.randperm(num_blocks * block_size, device="cuda").int()[:tokens]
        k_cache = torch.empty(num_blocks, block_size, num_kv_heads, dim, device="cuda", dtype=DTYPE)
        v_cache = torch.empty_like(k_cache)
        return {
            "triton": lambda: qk_norm_rope_kv_write(
                qkv, weight, weight, 1e-6, cos_sin, positions, slots, k_cache, v_cache
            )
        }

    # cos and sin once per token; everything else in and out.
    moved = tokens * (2 * width * DTYPE.itemsize + dim * 4)
    shape = f"{tokens} x {num_heads}/{num_kv_heads} heads"
    return Case("rotary", "qk_norm_rope_kv_write", shape, moved, 0, make)


# --- attention ------------------------------------------------------------------------------------


@dataclass
class Pages:
    """Where the keys and values of a batch lie: blocks in random order. One for all input sets of
    a case, since the layers of a model share it; each set has a pool of its own."""

    num_blocks: int
    block_size: int
    block_tables: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def build(cls, lengths: Sequence[int], block_size: int) -> Pages:
        columns = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(columns)).int()
        tables = torch.zeros(len(lengths), max(columns), dtype=torch.int32)
        begin = 0
        for row, count in enumerate(columns):
            tables[row, :count] = order[begin : begin + count]
            begin += count
        slots = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return cls(sum(columns), block_size, tables.cuda(), slots, seq_lens)

    def pool(self, num_kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_blocks, self.block_size, num_kv_heads, dim)
        return randn(*shape), randn(*shape)


def decode_case(
    name: str,
    lengths: Sequence[int],
    num_heads: int,
    block_size: int,
    num_kv_heads: int = 8,
    dim: int = 128,
) -> Case:
    rows = len(lengths)
    scale = dim**-0.5
    workspace = DecodeWorkspace.allocate(rows, num_heads, num_kv_heads, dim, torch.device("cuda"))
    pages = Pages.build(lengths, block_size)

    def make() -> dict[str, Callable[[], object]]:
        q = randn(rows, num_heads, dim)
        cache = pages.pool(num_kv_heads, dim)
        calls: dict[str, Callable[[], object]] = {
            "triton": lambda: paged_decode_attention(
                q, *cache, pages.block_tables, pages.slots, pages.seq_lens, scale, workspace
            )
        }
        if flash_attn_with_kvcache and block_size % FLASH_ATTN_BLOCK_SIZE == 0:
            calls["flash_attn"] = lambda: flash_attn_with_kvcache(
                q.unsqueeze(1),
                *cache,
                cache_seqlens=pages.seq_lens,
                block_table=pages.block_tables,
                softmax_scale=scale,
                causal=True,
            )
        return calls

    moved = (2 * sum(lengths) * num_kv_heads + 2 * rows * num_heads) * dim * DTYPE.itemsize
    flops = 4 * sum(lengths) * num_heads * dim
    shape = f"{name}, {num_heads}/{num_kv_heads} heads, block {block_size}"
    return Case("decode", "paged_decode_attention", shape, moved, flops, make)


def prefill_case(
    name: str,
    new_and_context: Sequence[tuple[int, int]],
    block_size: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    dim: int = 128,
    captured: tuple[int, int] | None = None,
) -> Case:
    """captured: tokens and rows of a CUDA graph that the batch is padded to."""
    new_lens = [new for new, _ in new_and_context]
    lengths = [new + old for new, old in new_and_context]
    scale = dim**-0.5
    pages = Pages.build(lengths, block_size)
    tokens, rows = captured or (sum(new_lens), len(lengths))
    padding = (0, rows - len(lengths))
    offsets = torch.tensor([0, *new_lens]).cumsum(0).int().cuda()
    offsets = F.pad(offsets, padding, value=sum(new_lens))
    slots, seq_lens = F.pad(pages.slots, padding), F.pad(pages.seq_lens, padding)
    longest = tokens if captured else max(new_lens)
    key_offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    def make() -> dict[str, Callable[[], object]]:
        q = randn(tokens, num_heads, dim)
        cache = pages.pool(num_kv_heads, dim)
        calls: dict[str, Callable[[], object]] = {
            "triton": lambda: paged_prefill_attention(
                q, *cache, pages.block_tables, slots, offsets, seq_lens, longest, scale
            )
        }
        if flash_attn_varlen_func and not captured and block_size % FLASH_ATTN_BLOCK_SIZE == 0:
            calls["flash_attn"] = lambda: flash_attn_varlen_func(
                q,
                *cache,
                offsets,
                key_offsets,
                max(new_lens),
                max(lengths),
                softmax_scale=scale,
                causal=True,
                block_table=pages.block_tables,
            )
        if len(lengths) == 1 and new_lens == lengths:  # torch has no pages: the same, contiguous
            k, v = (x.flatten(0, 1)[: lengths[0]].transpose(0, 1).unsqueeze(0) for x in cache)
            rows = q.transpose(0, 1).unsqueeze(0)
            calls["torch, no pages"] = lambda: F.scaled_dot_product_attention(
                rows, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        return calls

    moved, flops = attention_work(new_and_context, num_heads, num_kv_heads, dim)
    shape = f"{name}, {num_heads}/{num_kv_heads} heads, block {block_size}"
    return Case("prefill", "paged_prefill_attention", shape, moved, flops, make)


def attention_work(
    new_and_context: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, dim: int
) -> tuple[int, int]:
    """(bytes to move, operations)."""
    tokens = sum(new for new, _ in new_and_context)
    keys = sum(new + old for new, old in new_and_context)
    # Query i of n new ones over c cached sees c + i + 1 keys.
    visible = sum(new * old + new * (new + 1) // 2 for new, old in new_and_context)
    moved = 2 * (keys * num_kv_heads + tokens * num_heads) * dim * DTYPE.itemsize
    return moved, 4 * visible * num_heads * dim


def mixed_case(
    name: str,
    contexts: Sequence[int],
    chunk: tuple[int, int],
    num_heads: int,
    num_kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 16,
) -> Case:
    """Decodes after so many tokens, and behind them a chunk of (new tokens, tokens before)."""
    split, scale = len(contexts), dim**-0.5
    rows = [*((1, context) for context in contexts), chunk]
    tokens = split + chunk[0]
    pages = Pages.build([new + old for new, old in rows], block_size)
    offsets = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int().cuda()
    workspace = DecodeWorkspace.allocate(split, num_heads, num_kv_heads, dim, torch.device("cuda"))

    def make() -> dict[str, Callable[[], object]]:
        q, cache = randn(tokens, num_heads, dim), pages.pool(num_kv_heads, dim)
        tables, slots, seq_lens = pages.block_tables, pages.slots, pages.seq_lens
        args = (q, *cache, tables, slots, offsets, seq_lens, split)
        return {
            "triton": lambda: paged_mixed_attention(*args, chunk[0], scale, workspace),
            "two kernels": lambda: attend_apart(*args, chunk[0], scale, workspace),
            "one kernel for all": lambda: paged_prefill_attention(
                q, *cache, tables, slots, offsets, seq_lens, chunk[0], scale
            ),
        }

    moved, flops = attention_work(rows, num_heads, num_kv_heads, dim)
    shape = f"{name}, {num_heads}/{num_kv_heads} heads, block {block_size}"
    return Case("mixed", "paged_mixed_attention", shape, moved, flops, make)


def spread_lengths(rows: int, low: int, high: int) -> list[int]:
    """Evenly spaced lengths in a scrambled order."""
    return [low + (high - low) * (row * 97 % rows) // rows for row in range(rows)]


def all_cases() -> Iterator[Case]:
    for tokens in (8192, 256, 1):
        yield from norm_cases(tokens)
        yield activation_case(tokens)
        yield rotary_case(tokens)
    for block_size in (16, 64, 256):
        for num_heads in (32, 16):
            yield decode_case("64 x 4096", [4096] * 64, num_heads, block_size)
            yield decode_case("256 x 800", [800] * 256, num_heads, block_size)
    for block_size in (16, 256):
        yield decode_case("1 x 4096", [4096], 32, block_size)
        yield decode_case("8 x 1024", [1024] * 8, 32, block_size)
        yield decode_case("8 x 1000..5000", spread_lengths(8, 1000, 5000), 32, block_size)
        yield decode_case("8 x 32768", [32768] * 8, 32, block_size)
        yield decode_case("256 x 100..2000", spread_lengths(256, 100, 2000), 16, block_size)
    for block_size in (16, 64, 256):
        yield prefill_case("8192", [(8192, 0)], block_size)
    for block_size in (16, 256):
        yield prefill_case("4 x 2048", [(2048, 0)] * 4, block_size)
        yield prefill_case("16 x 512", [(512, 0)] * 16, block_size)
        yield prefill_case("512 after 16384", [(512, 16384)], block_size)
        yield prefill_case("64 decodes at 2000 + 2048", [(1, 1999)] * 64 + [(2048, 0)], block_size)
        few = [(1, 599)] * 32 + [(512, 3584)]
        yield prefill_case("32 decodes at 600 + 512 after 3584", few, block_size, 16)
        name = "the same, padded to 640 tokens, 128 rows"
        yield prefill_case(name, few, block_size, 16, captured=(640, 128))
    for num_heads in (16, 32):
        for decodes, context, chunk in (
            (32, 3000, (512, 3584)),
            (32, 3000, (512, 0)),
            (128, 1800, (512, 512)),
            (4, 1500, (512, 3584)),
            (4, 16384, (512, 512)),
            (64, 2000, (2048, 0)),
        ):
            name = f"{decodes} at {context} + {chunk[0]} after {chunk[1]}"
            yield mixed_case(name, [context] * decodes, chunk, num_heads)


def show(rows: Sequence[Measurement], rates: Rates) -> None:
    copy, matmul = rates.bandwidth / 1e9, rates.matmul / 1e12
    print(f"ceilings: copy {copy:,.0f} GB/s, matrix product {matmul:,.0f} TFLOP/s ({DTYPE})")
    for row in rows:
        print(
            f"{row.operation:24} {row.shape:46} {row.implementation:16}"
            f"{row.microseconds:10.1f} us {row.rate:8,.0f} {row.unit:8}"
            f"{row.percent_of_ceiling:5.0f}%"
        )


def main(json: Path | None = None, only: tuple[Group, ...] = ()) -> None:
    """Measure the kernels on the first GPU; `json` is where the full report goes."""
    prepare_output(json, "--json")
    rates = measure_rates("cuda", DTYPE, 0)
    rows: list[Measurement] = []
    for case in all_cases():
        if not only or case.group in only:
            rows += measure_case(case, rates)
            torch.cuda.empty_cache()
    show(rows, rates)
    if json is not None:
        commit, dirty = git_state()
        report: Any = KernelReport(
            SCHEMA_VERSION,
            now(),
            commit,
            dirty,
            hardware("cuda"),
            library_versions(),
            rates.bandwidth / 1e9,
            rates.matmul / 1e12,
            rows,
        )
        write_json(json, report)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m bench.kernels")
