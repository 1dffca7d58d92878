"""Attention of a batch with decodes in front and chunks of prompts behind, in one launch.

A decode waits for memory, a chunk for the matrix units. One kernel after the other adds their times
up; side by side they share the GPU (POD-Attention, Kamath et al. 2024, arXiv:2410.18038). So the
programs of one grid are of two kinds, those of the kernels for decodes and for chunks alone:

    0 ... tiles of the chunks ... | ... units of the decodes' keys ...

Chunks go first: their programs are the longest, and a long program that starts late is a long tail.
"""

from __future__ import annotations

import math

import torch

from shared.kernels._triton import jit, next_power_of_2, runs_on_triton, tl
from shared.kernels.paged_decode_attention import (
    COMBINE_STEP,
    LENGTHS_TRIED,
    DecodeWorkspace,
    attend_split,
    choose_splits,
    paged_decode_attention,
    rows_block,
)
from shared.kernels.paged_prefill_attention import (
    ROWS_AT_ONCE,
    attend_tile,
    choose_tile,
    paged_prefill_attention,
    wants_wide_tile,
)

# Of decodes, to aim for: as many as a multiprocessor holds, whose shared memory is laid out for
# chunks.
_PROGRAMS_PER_SM = 2


def paged_mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_decode_rows: int,
    max_query_len: int,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """q [T, num_heads, D] -> [T, num_heads, D]: `paged_decode_attention` of the first
    num_decode_rows rows, one query each, and `paged_prefill_attention` of the rows behind them,
    with the arguments of both for all rows. There must be rows of both kinds.

    Two launches where the chunks are long enough for a tile that leaves decodes no room beside it.
    """
    split = num_decode_rows
    if runs_on_triton(q) and not wants_wide_tile(
        q[split:], k_cache, seq_lens.shape[0] - split, max_query_len
    ):
        return paged_mixed_attention_triton(
            q,
            k_cache,
            v_cache,
            block_tables,
            slots,
            cu_seqlens_q,
            seq_lens,
            split,
            scale,
            workspace,
        )
    return attend_apart(
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        cu_seqlens_q,
        seq_lens,
        split,
        max_query_len,
        scale,
        workspace,
    )


def attend_apart(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_decode_rows: int,
    max_query_len: int,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """The same, in a call for each kind."""
    split, out = num_decode_rows, torch.empty_like(q)
    paged_decode_attention(
        q[:split],
        k_cache,
        v_cache,
        block_tables,
        slots[:split],
        seq_lens[:split],
        scale,
        workspace,
        out[:split],
    )
    return paged_prefill_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        slots[split:],
        cu_seqlens_q[split:],  # begins at split: queries before it are left alone
        seq_lens[split:],
        max_query_len,
        scale,
        out,
    )


@jit(
    integers=(
        "num_rows",
        "num_decode_rows",
        "num_tokens",
        "table_stride",
        "num_tiles",
        "min_split",
    ),
    metadata=("block_tables_ptr", "slots_ptr", "cu_seqlens_ptr", "seq_lens_ptr"),
)
def _paged_mixed_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    scale_log2,
    num_rows,
    num_decode_rows,
    num_tokens,
    table_stride,
    num_tiles,
    min_split,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    DECODE_BLOCK_M: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
) -> None:
    program = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if program < num_tiles:
        attend_tile(
            q_ptr,
            k_cache_ptr,
            v_cache_ptr,
            out_ptr,
            block_tables_ptr,
            slots_ptr + num_decode_rows,
            cu_seqlens_ptr + num_decode_rows,
            seq_lens_ptr + num_decode_rows,
            scale_log2,
            num_rows - num_decode_rows,
            num_tokens,
            table_stride,
            kv_head,
            program,
            NUM_KV_HEADS,
            GROUP,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            ROWS_AT_ONCE,
        )
    else:
        attend_split(
            q_ptr,
            k_cache_ptr,
            v_cache_ptr,
            out_ptr,
            block_tables_ptr,
            slots_ptr,
            seq_lens_ptr,
            partial_out_ptr,
            partial_lse_ptr,
            arrivals_ptr,
            scale_log2,
            table_stride,
            num_decode_rows,
            min_split,
            kv_head,
            program - num_tiles,
            tl.num_programs(0) // NUM_KV_HEADS - num_tiles,
            NUM_KV_HEADS,
            GROUP,
            HEAD_DIM,
            PAGE_SIZE,
            DECODE_BLOCK_M,
            BLOCK_N,
            GROUP_BLOCK,
            COMBINE_STEP,
            DECODE_ROWS,
            LENGTHS_TRIED,
            False,
        )


def paged_mixed_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_decode_rows: int,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    if not all(x.is_contiguous() for x in (q, k_cache, v_cache)):
        raise ValueError("q, k_cache and v_cache must be contiguous")
    out = torch.empty_like(q)
    num_tokens, num_heads, head_dim = q.shape
    num_rows = seq_lens.shape[0]
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            num_decode_rows, num_heads, num_kv_heads, head_dim, q.device
        )
    workspace.check(num_decode_rows, num_kv_heads)
    tile = choose_tile(group, head_dim, q.element_size(), wide=False)
    num_tiles = tile.most_tiles(num_tokens - num_decode_rows, num_rows - num_decode_rows, group)
    max_length = block_tables.shape[1] * page_size
    splits, min_split = choose_splits(
        num_decode_rows, num_kv_heads, max_length, workspace.num_sms, _PROGRAMS_PER_SM
    )
    group_block = next_power_of_2(group)
    _paged_mixed_attention_kernel[((num_tiles + num_decode_rows * splits) * num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        slots,
        cu_seqlens_q,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        scale * math.log2(math.e),
        num_rows,
        num_decode_rows,
        num_tokens,
        block_tables.stride(0),
        num_tiles,
        min_split,
        num_kv_heads,
        group,
        head_dim,
        page_size,
        tile.block_m,
        tile.block_n,
        ROWS_AT_ONCE,
        max(16, group_block),
        group_block,
        COMBINE_STEP,
        rows_block(num_decode_rows, num_kv_heads, workspace.num_sms),
        LENGTHS_TRIED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    return out
