"""Linear layers for a handful of rows: what a decode step of a small batch spends its time on.

A product of one row with a weight reads the weight once and does next to no arithmetic, so memory
bandwidth is its floor. A decode step of a small model misses that floor for other reasons: each
product moves a few megabytes, one or two microseconds of work, behind a launch, a wait for the
first bytes, and a norm or activation that does almost nothing and pays the same. Hence here:

    norm_linear     stream -> norm(stream) @ weight^T
    norm_gate_up    stream -> silu(gate) * up of norm(stream)
    linear_add      x, residual -> stream: x @ weight^T + residual
    linear          x -> x @ weight^T

one kernel each, for 2 to 16 rows in bfloat16 and on one rank: with float16, and where ranks must
add up first, rms_norm's kernel stays between them. A norm is a factor per row, known when all of
the row's squares are summed up, and it can as well multiply the product. One row's squares every
program sums up itself. With more rows that would be too much to read: there the product before adds
the residual, since it has the sum in registers, and leaves the sum of squares of each of its tiles.

Consecutive kernels overlap: a kernel starts while the one before it still runs, requests its first
weights, which depend on nothing, and only then waits for its input (programmatic dependent launch,
Hopper and later).

            qkv |#####|
              o    |..##|            . weights on their way, waiting for the input
        gate_up       |..######|     # input there

One layer's four products with their norms, activation and sums, microseconds on an H200, bf16,
weights never in the cache; floor: the weights' bytes at the bandwidth of a copy
(bench/results/small_batch_h200.json; python -m bench.small_batch measures it again):

                       Qwen3-0.6B                    Qwen3-8B
              floor   library   here        floor   library   here
     1 row      7.4      32.7   12.4         90.9     108.3   96.3
     2 rows              30.1   17.8                  109.8   97.8
     4 rows              28.8   18.1                  109.3   97.6
     8 rows              26.2   18.6                  115.0   98.5
    16 rows              27.1   22.9                  110.3  104.1

Every product is faster here, the LM head too, or as fast (o of 8B, 16 rows, with the sum: 13.1
against 12.8). So up to 16 rows of 16-bit types come here, and one row of any type; everything else
goes to the library's product and the separate kernels.

What decided the kernel for several rows (8 rows unless said):
- Programs of 16 outputs read as many bytes of x as of the weight. With 64 outputs x is an eighth.
- All programs in step want the same 2 KB of x at a time from one place in the L2 cache. Starting
  at different steps of K: gate_up of 8B 48.9 instead of 50.3.
- Loading x only when its weights are there, not a step ahead: gate_up of 8B 53.8.
- A small weight is one step of every program, all of it requested before the wait: o and down of
  0.6B 3.2 and 3.9, in several steps 3.7 and 4.0. Norm and product in one kernel: gate_up of 0.6B
  6.2 instead of 5.5, if it adds the residual and sums up the squares, too.
- For one row, asking for a program's whole tile ahead of time in the L2 cache gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl
from shared.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_triton,
)
from shared.kernels.silu_and_mul import silu_and_mul

MAX_ROWS = 16


class ResidualStream(NamedTuple):
    """What the layers add to, between two halves of a block."""

    x: torch.Tensor
    """[T, H]"""
    residual: torch.Tensor | None = None
    """[T, H], still to be added to x."""
    squares: torch.Tensor | None = None
    """[tiles, rows] float32, with nothing left to add: sums of the squares of x's rows, tile by
    tile."""

    def sum(self) -> torch.Tensor:
        return self.x if self.residual is None else self.x + self.residual


# Several rows. Elements of a weight up to which each program takes all its weights in one step
# (gate_up of 0.6B: 6.3 M), unless the sums to be added, shares x rows, are too many: adding is one
# program's work.
_SMALL_WEIGHT = 8 << 20
_ONE_STEP_SUMS = 128
_MAX_SPLITS = 16
# Programs to aim for otherwise: three fit each multiprocessor of an H200. Twice as many or half as
# many cost up to 20%.
_PROGRAMS = 396

# K up to -> (outputs of a program, steps of 512 bytes along K held in registers, warps), for one
# row. A program needs tens of kilobytes on their way, and its K should be few steps; where N is
# small (o and down of 0.6B: 1024) the outputs of a program must be few to occupy the GPU.
_ONE_ROW_CONFIGS = (
    (1024, (16, 4, 4)),  # qkv of 0.6B: 3.3 us; 8 outputs 3.5
    (4095, (8, 8, 8)),  # o and down of 0.6B: 2.0 and 2.8; 4 steps: 2.4 and 3.2
    (8192, (4, 16, 4)),  # qkv, o, gate_up of 8B: 15.1, 10.4, 46.6; 8 steps: 16.0, 10.3, 52.3
)
_ONE_ROW_LONG = (1, 16, 1)  # down of 8B: 24.9; 2 outputs in 2 warps 26.0


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    if takes_kernel(x, weight):
        return linear_triton(x, weight)
    return F.linear(x, weight)


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> ResidualStream:
    """x [T, K], weight [N, K], residual [T, N] -> the stream x @ weight^T + residual."""
    # Not in float16: the next product's input is then the sum times the norm's weight, before the
    # factor of its row, and must not overflow.
    if x.shape[0] > 1 and x.dtype == torch.bfloat16 and takes_kernel(x, weight):
        return linear_add_triton(x, weight, residual)
    return ResidualStream(linear(x, weight), residual)


def norm_linear(
    stream: ResidualStream, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(sum) @ weight^T, sum) of a stream of [T, K].

    norm_weight [K]; weight [N, K] -> [T, N], [T, K]. May overwrite the stream.
    """
    if takes_kernel(stream.x, weight):
        return norm_linear_triton(stream, norm_weight, eps, weight)
    x, added = _add_norm(stream, norm_weight, eps)
    return F.linear(x, weight), added


def norm_gate_up(
    stream: ResidualStream, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_linear` with a weight [2 * I, K], gate then up, and silu(gate) * up [T, I] of it."""
    if takes_kernel(stream.x, weight):
        return norm_linear_triton(stream, norm_weight, eps, weight, gated=True)
    x, added = _add_norm(stream, norm_weight, eps)
    return silu_and_mul(F.linear(x, weight)), added


def takes_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    few = 1 < x.shape[0] <= MAX_ROWS and x.element_size() == 2
    return runs_on_triton(x) and (x.shape[0] == 1 or few)


def _add_norm(
    stream: ResidualStream, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if stream.residual is None:
        return rms_norm(stream.x, weight, eps), stream.x
    return add_rms_norm(stream.x, stream.residual, weight, eps)


@jit()
def _wait_for_input() -> None:
    # The next kernel may start now and wait at its own line here, until this one has ended.
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@jit()
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    # Rounded where the separate operations round.
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@jit()
def _one_row_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # A tile of weights is [BLOCK_N, STEPS, WIDTH] with a WIDTH of 16 bytes a lane: Triton gives
    # every output to one warp, so sums along K stay within threads until the last one.
    first = tl.program_id(0) * BLOCK_N
    dtype = x_ptr.dtype.element_ty
    n = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[:, None, None]
    k = tl.arange(0, STEPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    weight_ptr += n * K + k[None, :, :]
    # Others still read the old residual: the sum goes elsewhere, and the first program writes it.
    writes = tl.where(first == 0, K, 0)
    out = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    up_out = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    squares = tl.zeros([STEPS, WIDTH], tl.float32)
    for start in tl.static_range(0, K, STEPS * WIDTH):
        inside = start + k < K
        weight = tl.load(weight_ptr + start, mask=inside[None, :, :], other=0.0)
        if GATED:
            up = tl.load(weight_ptr + start + N * K, mask=inside[None, :, :], other=0.0)
        if OVERLAP and start == 0:
            _wait_for_input()
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0)
        if ADD:
            x += tl.load(residual_ptr + start + k, mask=inside, other=0.0)
            tl.store(sum_ptr + start + k, x, mask=start + k < writes)
        x = x.to(tl.float32)
        if NORM:
            # The row's factor is the same for all its elements: it multiplies the result.
            squares += x * x
            x *= tl.load(norm_weight_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        out += tl.sum(x[None, :, :] * weight.to(tl.float32), axis=1)
        if GATED:
            up_out += tl.sum(x[None, :, :] * up.to(tl.float32), axis=1)
    result = tl.sum(out, axis=1)
    inverse = tl.rsqrt(tl.sum(squares) / K + eps) if NORM else 1.0
    if NORM:
        result *= inverse
    if GATED:
        result = _silu_and_mul(result, tl.sum(up_out, axis=1) * inverse, dtype)
    column = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + column, result, mask=column < N)


@jit()
def _input_is_ready():
    # 0, known only once the kernel before has ended: an address that this is added to cannot be
    # read earlier, whatever the compiler overlaps.
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit(integers=("num_rows",))
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    norm_weight_ptr,
    x_squares_ptr,
    residual_ptr,
    squares_ptr,
    eps,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    X_TILES: tl.constexpr,  # of x's squares; 0: x has its norm already, or needs none
    X_TILES_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # On the matrix unit, out^T = weight @ x^T: a program takes BLOCK_N rows of the weight (half of
    # them gate and half up where GATED), so that x is a small part of what it reads, and a share of
    # K, so that all multiprocessors read. The last program of a tile to end adds the shares up, in
    # their order.
    NORM: tl.constexpr = X_TILES > 0
    split = tl.program_id(0)
    tile = tl.program_id(1)
    dtype = x_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    EVEN: tl.constexpr = K == SPLITS * STEPS * BLOCK_K
    PARTIAL: tl.constexpr = BLOCK_N * ROWS
    first = tile * COLUMNS
    i = tl.arange(0, BLOCK_N)
    n = tl.minimum(first + i % COLUMNS, N - 1).to(tl.int64) + (i // COLUMNS) * N
    k = split * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    weight_ptr += n[:, None] * K + k[None, :]
    x_ptr += row[None, :] * K + k[:, None]
    present = (row < num_rows)[None, :]
    out = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if STEPS == 1:
        if EVEN:
            weight = tl.load(weight_ptr)
        else:
            weight = tl.load(weight_ptr, mask=(k < K)[None, :], other=0.0)
        if NORM:
            norm_weight = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr, mask=present & (k < K)[:, None], other=0.0)
        if NORM:
            x = (x.to(tl.float32) * norm_weight[:, None]).to(dtype)
        out = tl.dot(weight, x, out, input_precision="ieee")
    else:
        # Weights come through shared memory, STAGES - 1 steps ahead, x through registers, one step
        # ahead: step s multiplies step s - 1 of K. So weights are on their way before the first
        # wait. Tiles start at different steps: all at once would want the same few lines of x from
        # the L2 cache.
        x = tl.zeros([BLOCK_K, ROWS], dtype)
        if NORM:
            norm = tl.zeros([BLOCK_K], norm_weight_ptr.dtype.element_ty)
        for step in tl.range(0, STEPS + 1, num_stages=STAGES):
            start = (step + tile + STEPS - 1) % STEPS * BLOCK_K
            mask = (n >= 0)[:, None] & (step > 0)
            if not EVEN:
                mask &= (start + k < K)[None, :]
            weight = tl.load(weight_ptr + start, mask=mask, other=0.0)
            start = (step + tile) % STEPS * BLOCK_K
            mask = present & (step < STEPS)
            if not EVEN:
                mask &= (start + k < K)[:, None]
            if NORM:
                next_norm = tl.load(norm_weight_ptr + start + k, mask=start + k < K, other=0.0)
                # Not as soon as x is there: it would become a part of what the pipeliner starts
                # early, and the wait with it.
                x = (x.to(tl.float32) * norm.to(tl.float32)[:, None]).to(dtype)
                norm = next_norm
            if OVERLAP:
                start += _input_is_ready() * BLOCK_K
            next_x = tl.load(x_ptr + start, mask=mask, other=0.0)
            out = tl.dot(weight, x, out, input_precision="ieee")
            x = next_x
    is_last = True
    if SPLITS > 1:
        tile_ptr = partial_ptr + tile * (SPLITS * PARTIAL) + i[:, None] * ROWS + row[None, :]
        tl.store(tile_ptr + split * PARTIAL, out)
        # Every thread's stores come before the count, and the count before the last one's loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        is_last = arrived == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.debug_barrier()
            out = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for share in tl.static_range(SPLITS):
                # Past the first-level cache: other multiprocessors wrote these a moment ago.
                out += tl.load(tile_ptr + share * PARTIAL, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
        ready = _input_is_ready() if OVERLAP else 0
        if NORM:
            # A row's factor is the same for all its elements: it multiplies the result.
            part = tl.arange(0, X_TILES_BLOCK)[:, None]
            squares_of = x_squares_ptr + ready + part * ROWS + row[None, :]
            squares = tl.sum(tl.load(squares_of, mask=part < X_TILES, other=0.0), axis=0)
            out *= tl.rsqrt(squares / K + eps)[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(out, [2, COLUMNS, ROWS]), [1, 2, 0]))
            result = _silu_and_mul(gate, up, dtype)
        else:
            result = out
        column = first + tl.arange(0, COLUMNS)[:, None]
        offsets = row[None, :] * N + column
        stored = present & (column < N)
        if ADD:
            # Rounded where the separate operations round.
            added = tl.load(residual_ptr + ready + offsets, mask=stored, other=0.0)
            result = tl.where(stored, (result.to(dtype) + added).to(tl.float32), 0.0)
            squares = tl.sum(result * result, axis=0)
            tl.store(squares_ptr + tile * ROWS + row, squares)
        tl.store(out_ptr + offsets, result, mask=stored)


def linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """At most 16 rows."""
    _check_rows(x)
    x = x.contiguous()
    if x.shape[0] == 1:
        return _launch_one_row(ResidualStream(x), None, 0.0, weight, gated=False)[0]
    return _launch_few_rows(ResidualStream(x), None, 0.0, weight).x


def linear_add_triton(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> ResidualStream:
    """2 to 16 rows."""
    _check_rows(x, 2)
    stream = ResidualStream(x.contiguous())
    return _launch_few_rows(stream, None, 0.0, weight, residual=residual.contiguous())


def norm_linear_triton(
    stream: ResidualStream,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most 16 rows. May overwrite the stream; without a residual the sum is its x."""
    _check_rows(stream.x)
    x, residual, squares = stream
    x = x.contiguous()
    if x.shape[0] == 1:
        return _launch_one_row(ResidualStream(x, residual), norm_weight, eps, weight, gated)
    added = x
    if squares is None:
        if residual is None:
            x = rms_norm_triton(x, norm_weight, eps)
        else:
            x, added = add_rms_norm_triton(x, residual.contiguous(), norm_weight, eps)
    normed = ResidualStream(x, squares=squares)
    return _launch_few_rows(normed, norm_weight, eps, weight, gated).x, added


def _check_rows(x: torch.Tensor, fewest: int = 1) -> None:
    if not fewest <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"{x.shape[0]} rows: these kernels take {fewest} to {MAX_ROWS}")


def _options(x: torch.Tensor) -> dict[str, Any]:
    overlap = overlaps(x)
    return {
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def _launch_one_row(
    stream: ResidualStream,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, _ = stream
    size = x.shape[1]
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    added = x if residual is None else torch.empty_like(x)
    block, steps, num_warps = _one_row_config(size)
    if gated and size <= 1024:
        block //= 2  # a tile of gate and one of up
    _one_row_kernel[(-(-num_outputs // block),)](
        x,
        x if residual is None else residual.contiguous(),
        x if norm_weight is None else norm_weight,
        weight,
        out,
        added,
        eps,
        num_outputs,
        size,
        block,
        steps,
        512 // x.element_size(),
        ADD=residual is not None,
        NORM=norm_weight is not None,
        GATED=gated,
        num_warps=num_warps,
        **_options(x),
    )
    return out, added


def _launch_few_rows(
    stream: ResidualStream,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> ResidualStream:
    """The product of the stream's x, with the norm whose squares the stream has. With a residual,
    of the product's size: their sum, and its squares."""
    x, _, x_squares = stream
    num_rows, size = x.shape
    tile = few_rows_tile(num_rows, weight.shape[0], size, x.element_size())
    num_outputs, columns = weight.shape[0], tile.block_n
    if gated:
        num_outputs, columns = num_outputs // 2, columns // 2
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_tiles = -(-num_outputs // columns)
    x_tiles = 0 if x_squares is None else x_squares.shape[0]
    squares = None
    if residual is not None:
        squares = torch.empty((num_tiles, tile.rows), dtype=torch.float32, device=x.device)
    partial = arrivals = out
    if tile.splits > 1:
        shape = (num_tiles, tile.splits, tile.block_n, tile.rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        arrivals = _arrivals_of(weight, num_tiles)
    _few_rows_kernel[(tile.splits, num_tiles)](
        x,
        weight,
        out,
        partial,
        arrivals,
        x if norm_weight is None else norm_weight,
        x if x_squares is None else x_squares,
        x if residual is None else residual,
        x if squares is None else squares,
        eps,
        num_rows,
        num_outputs,
        size,
        tile.rows,
        tile.block_n,
        tile.block_k,
        tile.splits,
        tile.steps,
        tile.stages,
        x_tiles,
        next_power_of_2(x_tiles),
        ADD=residual is not None,
        GATED=gated,
        num_warps=4,
        **_options(x),
    )
    return ResidualStream(out, squares=squares)


def _arrivals_of(weight: torch.Tensor, num_tiles: int) -> torch.Tensor:
    """[tiles] int32: zeros, and zeros again after every call. A weight has its own, so that two
    models on two streams do not count each other's programs."""
    counters = _arrivals.get(weight)
    if counters is None or counters.shape[0] < num_tiles:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the function once before it is captured in a CUDA graph")
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
        _arrivals[weight] = counters
    return counters


_arrivals = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class FewRowsTile:
    """A program multiplies `block_n` rows of the weight with `rows` rows of x, over 1 / `splits`
    of K, `block_k` at a time in `steps` steps."""

    rows: int
    block_n: int
    block_k: int
    splits: int
    steps: int
    stages: int


def few_rows_tile(num_rows: int, weight_rows: int, size: int, element_size: int) -> FewRowsTile:
    """From sizes alone, so that a captured graph fits every batch."""
    rows = 8 if num_rows <= 8 else 16
    block_k = 512 // element_size
    splits = -(-size // block_k)
    if weight_rows * size <= _SMALL_WEIGHT and splits * rows <= _ONE_STEP_SUMS:
        return FewRowsTile(rows, 64, block_k, splits, 1, 1)
    block_k //= 2
    steps = -(-size // block_k)
    most = min(_MAX_SPLITS, max(1, _PROGRAMS // -(-weight_rows // 64)))
    splits = max(n for n in range(1, most + 1) if steps % n == 0)
    # 64 KB of weights on their way. 16 rows take another matrix instruction, which leaves its
    # operands in shared memory a step longer.
    return FewRowsTile(rows, 64, block_k, splits, steps // splits, 5 if rows == 8 else 4)


def _one_row_config(size: int) -> tuple[int, int, int]:
    for largest, config in _ONE_ROW_CONFIGS:
        if size <= largest:
            return config
    return _ONE_ROW_LONG
