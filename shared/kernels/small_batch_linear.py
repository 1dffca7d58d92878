"""Linear layers for a handful of rows: what a decode step of a small batch spends its time on.

A product of one row with a weight reads the weight once and does next to no arithmetic, so memory
bandwidth is its floor. A decode step of a small model misses that floor for other reasons: each
product moves a few megabytes, one or two microseconds of work, behind a launch, a wait for the
first bytes, and a norm or activation that does almost nothing and pays the same. Hence here:

    norm_linear     (x, residual) -> norm(x + residual) @ weight^T
    norm_gate_up    (x, residual) -> silu(gate) * up of norm(x + residual)
    linear          x -> x @ weight^T

each one kernel, and consecutive kernels overlap: a kernel starts while the one before it still
runs, requests its first weights, which depend on nothing, and only then waits for its input
(programmatic dependent launch, Hopper and later).

            qkv |#####|
              o    |..##|            . weights on their way, waiting for the input
        gate_up       |..######|     # input there

Measured on an H200, bf16, microseconds of one layer's four products with their norms and
activation, weights never in the cache; floor: the weights' bytes at 4.3 TB/s:

                              floor   separate operations   here   here, not overlapped
    Qwen3-0.6B      1 row       7.3          32.8            12.4         17.1
                    8 rows      7.3          26.3            20.9         26.6
                   16 rows      7.3          27.1            27.5 (with 16 columns for rows)
    Qwen3-8B        1 row      89.7         110.4            97.1         99.3
                    8 rows     89.7         116.5           115.2        120.9

So one row always comes here (the LM head too: 71 us against 78 for 0.6B, 272 against 290 for 8B),
up to 8 rows when the weight is small, and everything else goes to the library's product and the
separate kernels. Asking for a program's whole tile ahead of time in the L2 cache gained nothing,
and cost 2% (1 row) to 20% (8 rows) with the weights of 8B.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shared.kernels._triton import jit, runs_on_triton, tl
from shared.kernels.rms_norm import add_rms_norm, rms_norm
from shared.kernels.silu_and_mul import silu_and_mul

_FEW_ROWS = 8
# Elements of a weight up to which 2 to 8 rows are faster here. gate_up of 0.6B (6.3 M): 6.2 us
# against 9.1 with its norm and activation; from 16.8 M on (8B) the library's product is as good.
_FEW_ROWS_WEIGHT = 8 << 20

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
    if _fuses(x, weight):
        return linear_triton(x, weight)
    return F.linear(x, weight)


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual) @ weight^T, x + residual); without a residual, x stands for the sum.

    x, residual [T, K]; norm_weight [K]; weight [N, K] -> [T, N], [T, K]. May overwrite x and
    residual.
    """
    if _fuses_norm(x, weight):
        return norm_linear_triton(x, residual, norm_weight, eps, weight)
    x, residual = _add_norm(x, residual, norm_weight, eps)
    return F.linear(x, weight), residual


def norm_gate_up(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_linear` with a weight [2 * I, K], gate then up, and silu(gate) * up [T, I] of it."""
    if _fuses_norm(x, weight):
        return norm_linear_triton(x, residual, norm_weight, eps, weight, gated=True)
    x, residual = _add_norm(x, residual, norm_weight, eps)
    return silu_and_mul(F.linear(x, weight)), residual


def _fuses(x: torch.Tensor, weight: torch.Tensor) -> bool:
    few = 1 < x.shape[0] <= _FEW_ROWS and weight.numel() <= _FEW_ROWS_WEIGHT
    return runs_on_triton(x) and (x.shape[0] == 1 or few)


def _fuses_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    # Several rows go through the matrix unit before they are divided by their norm, and float16
    # ends at 65504.
    return _fuses(x, weight) and (x.shape[0] == 1 or x.dtype != torch.float16)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return rms_norm(x, weight, eps), x
    return add_rms_norm(x, residual, weight, eps)


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


@jit(integers=("num_rows",))
def _few_rows_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # On the matrix unit, out^T = weight @ x^T: outputs fill its 16 rows, the batch its 8 columns.
    # K is cut into PARTS, one a warp: a chain of dependent products PARTS times shorter.
    first = tl.program_id(0) * BLOCK_N
    dtype = x_ptr.dtype.element_ty
    n = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[None, :, None]
    k = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    row = tl.arange(0, ROWS)[None, None, :]
    weight_ptr += n * K + k[:, None, :]
    offsets = row * K + k[:, :, None]
    writes = tl.where(first == 0, num_rows, 0)
    STEP: tl.constexpr = PARTS * BLOCK_K
    out = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    up_out = tl.zeros([PARTS, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([PARTS, BLOCK_K, ROWS], tl.float32)
    weight = tl.load(weight_ptr, mask=(k < K)[:, None, :], other=0.0)
    if GATED:
        up = tl.load(weight_ptr + N * K, mask=(k < K)[:, None, :], other=0.0)
    if OVERLAP:
        _wait_for_input()
    for start in range(0, K, STEP):
        inside = (start + k < K)[:, :, None]
        x = tl.load(x_ptr + offsets + start, mask=inside & (row < num_rows), other=0.0)
        if ADD:
            x += tl.load(residual_ptr + offsets + start, mask=inside & (row < num_rows), other=0.0)
            tl.store(sum_ptr + offsets + start, x, mask=inside & (row < writes))
        if STEP < K:  # the next weights, before this step's arithmetic
            later = (start + STEP + k < K)[:, None, :]
            next_weight = tl.load(weight_ptr + start + STEP, mask=later, other=0.0)
            if GATED:
                next_up = tl.load(weight_ptr + start + STEP + N * K, mask=later, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            norm_weight = tl.load(norm_weight_ptr + start + k, mask=start + k < K, other=0.0)
            x = (wide * norm_weight.to(tl.float32)[:, :, None]).to(dtype)
        out = tl.dot(weight, x, out, input_precision="ieee")
        if GATED:
            up_out = tl.dot(up, x, up_out, input_precision="ieee")
        if STEP < K:
            weight = next_weight
            if GATED:
                up = next_up
    result = tl.sum(out, axis=0)
    if NORM:
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)[None, :]
        result *= inverse
    if GATED:
        up_result = tl.sum(up_out, axis=0)
        if NORM:
            up_result *= inverse
        result = _silu_and_mul(result, up_result, dtype)
    column = first + tl.arange(0, BLOCK_N)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    tl.store(out_ptr + row * N + column, result, mask=(column < N) & (row < num_rows))


def linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """At most 8 rows."""
    return _launch(x, None, None, 0.0, weight, gated=False)[0]


def norm_linear_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most 8 rows. Leaves x and residual as they are; the sum is a new tensor, or x itself."""
    return _launch(x, residual, norm_weight, eps, weight, gated)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    num_rows, size = x.shape
    if not 1 <= num_rows <= _FEW_ROWS:
        raise ValueError(f"{num_rows} rows: these kernels take 1 to {_FEW_ROWS}")
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    added = x if residual is None else torch.empty_like(x)
    pointers = (
        x,
        x if residual is None else residual.contiguous(),
        x if norm_weight is None else norm_weight,
        weight,
        out,
        added,
    )
    overlap = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    options: dict[str, Any] = {
        "ADD": residual is not None,
        "NORM": norm_weight is not None,
        "GATED": gated,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    width = 512 // x.element_size()
    if num_rows == 1:
        block, steps, num_warps = _one_row_config(size)
        if gated and size <= 1024:
            block //= 2  # a tile of gate and one of up
        _one_row_kernel[(-(-num_outputs // block),)](
            *pointers, eps, num_outputs, size, block, steps, width, num_warps=num_warps, **options
        )
    else:
        # 16 outputs, K in 4 parts: 4 warps with 8 KB each on their way. 0.6B, 8 rows: qkv 4.9 us,
        # o 3.8, gate_up 6.2, down 5.7; half the bytes a warp: 5.1, 4.9, 8.8, 7.3.
        _few_rows_kernel[(-(-num_outputs // 16),)](
            *pointers,
            eps,
            num_rows,
            num_outputs,
            size,
            _FEW_ROWS,
            16,
            4,
            width,
            num_warps=4,
            **options,
        )
    return out, added


def _one_row_config(size: int) -> tuple[int, int, int]:
    for largest, config in _ONE_ROW_CONFIGS:
        if size <= largest:
            return config
    return _ONE_ROW_LONG
