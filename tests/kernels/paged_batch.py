"""Random batches over a poisoned pool, and what attention over them must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class PagedBatch:
    q: torch.Tensor  # [T, num_heads, D]
    k_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, D]
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [S, max_blocks] int32
    slots: torch.Tensor  # [R] int32
    cu_seqlens: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    max_query_len: int
    scale: float
    exact: torch.Tensor  # [T, num_heads, D] float64; zeros in padding


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    num_blocks: int | None = None,
    first_block: int = 1,
) -> PagedBatch:
    """Row r has query_lens[r] new tokens after context_lens[r] cached ones.

    Every page and every slot the kernel has no business reading is NaN, table entries past a
    sequence's end point to such a page (block 0), and rows own random table rows.
    """
    num_heads = num_kv_heads * group
    lengths = [new + old for new, old in zip(query_lens, context_lens, strict=True)]
    blocks_per_row = [-(-length // block_size) for length in lengths]
    used_blocks = sum(blocks_per_row)
    num_blocks = num_blocks or first_block + used_blocks
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    if num_blocks > first_block + used_blocks:  # a huge pool: poison only its beginning
        k_cache = torch.empty(shape, dtype=dtype, device=device)
        v_cache = torch.empty(shape, dtype=dtype, device=device)
        k_cache[0] = v_cache[0] = float("nan")
    else:
        k_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        v_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)

    num_rows = len(lengths)
    num_slots = num_rows + padding_rows + 3
    slots = torch.randperm(num_slots)[: num_rows + padding_rows]
    tables = torch.zeros(num_slots, max(blocks_per_row, default=0) + 2, dtype=torch.int32)
    order = first_block + torch.randperm(used_blocks)
    num_tokens = sum(query_lens) + padding_tokens
    q = torch.randn(num_tokens, num_heads, head_dim).to(device, dtype)
    exact = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    scale = head_dim**-0.5
    used, begin = 0, 0
    for row, length in enumerate(lengths):
        blocks = order[used : used + blocks_per_row[row]]
        used += blocks_per_row[row]
        tables[slots[row], : len(blocks)] = blocks.int()
        k = torch.randn(length, num_kv_heads, head_dim).to(device, dtype)
        v = torch.randn(length, num_kv_heads, head_dim).to(device, dtype)
        for index, block in enumerate(blocks.tolist()):
            page = slice(index * block_size, min(length, (index + 1) * block_size))
            k_cache[block, : page.stop - page.start] = k[page]
            v_cache[block, : page.stop - page.start] = v[page]
        end = begin + query_lens[row]
        exact[begin:end] = exact_attention(q[begin:end], k, v, scale)
        begin = end

    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist() + [begin] * padding_rows
    return PagedBatch(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables.to(device),
        slots=slots.int().to(device),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths + [0] * padding_rows, dtype=torch.int32, device=device),
        max_query_len=max(query_lens, default=1),
        scale=scale,
        exact=exact,
    )


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [n, num_heads, D], the last n positions of k, v [length, num_kv_heads, D]."""
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    num_new, length = q.shape[0], k.shape[0]
    hidden = torch.ones(num_new, length, dtype=torch.bool).triu(length - num_new + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
