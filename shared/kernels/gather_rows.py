"""Rows of a matrix by index: token embeddings, and the hidden states that get logits."""

from __future__ import annotations

import torch

from shared.kernels._triton import jit, next_power_of_2, runs_on_triton, tl

# Elements of a row that one program copies: a few programs for a decode step of one row.
_BLOCK = 1024


def gather_rows_reference(
    source: torch.Tensor, index: torch.Tensor, first: int = 0
) -> torch.Tensor:
    local = index - first
    inside = (local >= 0) & (local < source.shape[0])
    return source[local.where(inside, 0)].masked_fill(~inside.unsqueeze(-1), 0)


def gather_rows(source: torch.Tensor, index: torch.Tensor, first: int = 0) -> torch.Tensor:
    """source [N, H] holds the rows first .. first + N of a larger matrix; index [K] int32 counts
    from its beginning -> [K, H], zeros for rows that are not in the source."""
    if runs_on_triton(source):
        return gather_rows_triton(source, index, first)
    return gather_rows_reference(source, index, first)


@jit(integers=("first", "num_rows"), metadata=("index_ptr",))
def _gather_rows_kernel(
    source_ptr,
    index_ptr,
    out_ptr,
    first,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    k = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + k).to(tl.int64) - first
    width = tl.where((row >= 0) & (row < num_rows), WIDTH, 0)
    values = tl.load(source_ptr + row * WIDTH + columns, mask=columns < width, other=0.0)
    tl.store(out_ptr + k * WIDTH + columns, values, mask=columns < WIDTH)


def gather_rows_triton(source: torch.Tensor, index: torch.Tensor, first: int = 0) -> torch.Tensor:
    assert source.is_contiguous()
    num_rows, width = source.shape
    out = torch.empty((index.shape[0], width), dtype=source.dtype, device=source.device)
    block = min(_BLOCK, next_power_of_2(width))
    _gather_rows_kernel[(index.shape[0], -(-width // block))](
        source, index, out, first, num_rows, width, block, num_warps=4
    )
    return out
