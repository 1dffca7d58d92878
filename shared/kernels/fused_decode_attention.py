"""Everything between the QKV projection and the output projection, in one kernel, for a few rows.

With a few rows neither `qk_norm_rope_kv_write` nor `paged_decode_attention` moves much data: their
time is the wait for the kernel before and for the first bytes. Here a program has its keys and
values in registers before its queries exist. That is possible because the newest token, the only
one this step writes, is not read from the cache: it comes from the projection, and split 0 starts
its softmax with it.

            qkv |#####|
    attention     |..###|          . keys of earlier tokens on their way, waiting for q, k, v
            o          |..##|

Its keys are registers, half as many as `paged_decode_attention` has on their way in shared memory:
with more rows, and with longer ones, the separate kernels are faster. H200, bf16, microseconds of a
layer in a decode step (bench.decode_profile), with the separate kernels (2 and 4 rows: before they
had a tile for few rows) and here:

                             2 rows        4 rows        8 rows
    Qwen3-0.6B,   567 tokens  29.1  28.7   32.9  31.1   35.1  32.6
                3,055 tokens  36.3  35.0   41.5  42.4   53.6  59.0
    Qwen3-8B,     567 tokens 143.2 139.4  144.7 142.6  146.3 146.9
                3,055 tokens 148.7 147.0  154.0 154.7  164.1 171.5
"""

from __future__ import annotations

import math

import torch

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl
from shared.kernels.paged_decode_attention import (
    COMBINE_STEP,
    LENGTHS_TRIED,
    DecodeWorkspace,
    choose_splits,
    combine_splits,
    find_split,
    paged_decode_attention_reference,
    rows_block,
)
from shared.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write_reference

# Batches of at most this many rows come here.
FUSED_ROWS = 4
# A program's two tiles of keys and values are registers: two programs fit on a multiprocessor.
_PROGRAMS_PER_SM = 2


def fused_decode_attention_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    block_size = k_cache.shape[1]
    positions = (seq_lens - 1).clamp(min=0)
    blocks = block_tables[slots].gather(1, (positions // block_size).long().unsqueeze(1))
    slot_mapping = blocks.squeeze(1) * block_size + positions % block_size
    slot_mapping = torch.where(seq_lens > 0, slot_mapping, -1)
    q = qk_norm_rope_kv_write_reference(
        qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache
    )
    return paged_decode_attention_reference(
        q, k_cache, v_cache, block_tables, slots, seq_lens.tolist(), scale
    )


def fused_decode_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """qkv [R, (num_heads + 2 * num_kv_heads) * D], one new token per row -> [R, num_heads, D].

    The other arguments are those of `qk_norm_rope_kv_write` and `paged_decode_attention`. A row's
    new token is the last of its seq_lens: its position and its place in the cache follow.

    The tables, slots, lengths and the keys and values of earlier tokens are read while the kernel
    before may still run: it must not be the one that writes them.
    """
    if runs_on_triton(qkv):
        return fused_decode_attention_triton(
            qkv,
            q_weight,
            k_weight,
            eps,
            cos_sin,
            k_cache,
            v_cache,
            block_tables,
            slots,
            seq_lens,
            scale,
            workspace,
        )
    return fused_decode_attention_reference(
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        k_cache,
        v_cache,
        block_tables,
        slots,
        seq_lens,
        scale,
    )


@jit()
def _load_pages(table_ptr, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    positions = start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + positions // PAGE_SIZE, mask=positions < end, other=0)


@jit()
def _load_tile(
    k_ptr, v_ptr, pages, start, end, STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr
):
    # Zeros past the end: zero weights must not meet a NaN.
    positions = start + tl.arange(0, N)
    slots = pages * PAGE_SIZE + (positions & (PAGE_SIZE - 1))
    offsets = (slots.to(tl.int64) * STRIDE)[:, None]
    inside = (positions < end)[:, None]
    k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
    v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
    return k, v


@jit(
    integers=("table_stride", "num_rows", "min_split"),
    metadata=("block_tables_ptr", "slots_ptr", "seq_lens_ptr"),
)
def _fused_decode_attention_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    slots_ptr,
    seq_lens_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    eps,
    scale_log2,
    table_stride,
    num_rows,
    min_split,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # more than GROUP
    BLOCK_N: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    num_units = tl.num_programs(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row, first, num_partials, split_len = find_split(
        seq_lens_ptr, unit, num_rows, num_units, min_split, 1, BLOCK_N, ROWS, LENGTHS_TRIED
    )
    if row >= num_rows:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    is_query = (m < GROUP)[:, None]
    pair = row * NUM_KV_HEADS + kv_head
    head_ptr = out_ptr + pair.to(tl.int64) * (GROUP * HEAD_DIM)
    out_offsets = m[:, None] * HEAD_DIM + d[None, :]
    if seq_len <= 0:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        zeros = tl.zeros([BLOCK_M, HEAD_DIM], dtype=out_ptr.dtype.element_ty)
        tl.store(head_ptr + out_offsets, zeros, mask=is_query)
        return

    # Earlier tokens are cut into splits; there may be none, and split 0 is there all the same.
    new = seq_len - 1
    split = unit - first
    begin = split * split_len
    end = tl.minimum(begin + split_len, new)

    # What no kernel of this step writes.
    table_ptr = block_tables_ptr + slot * table_stride
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM + d[None, :]
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM + d[None, :]
    pages = _load_pages(table_ptr, begin, end, PAGE_SIZE, BLOCK_N)
    k, v = _load_tile(k_ptr, v_ptr, pages, begin, end, STRIDE, PAGE_SIZE, BLOCK_N)
    pages = _load_pages(table_ptr, begin + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
    new_page = tl.load(table_ptr + new // PAGE_SIZE).to(tl.int64)
    # The rows of a tile: the query heads of the group, then their key head. Rotation pairs element
    # i with i + D / 2, so the tile is loaded twice, the second time with its halves swapped.
    swapped = (d + HALF) % HEAD_DIM
    is_key = (m == GROUP)[:, None]
    q_weight, q_swapped = tl.load(q_weight_ptr + d), tl.load(q_weight_ptr + swapped)
    k_weight, k_swapped = tl.load(k_weight_ptr + d), tl.load(k_weight_ptr + swapped)
    angle_ptr = cos_sin_ptr + new.to(tl.int64) * HEAD_DIM + d % HALF
    cos = tl.load(angle_ptr)
    sin = tl.where(d < HALF, -1.0, 1.0) * tl.load(angle_ptr + HALF)
    weight = tl.where(is_key, k_weight[None, :], q_weight[None, :]).to(tl.float32) * cos[None, :]
    other_weight = tl.where(is_key, k_swapped[None, :], q_swapped[None, :]).to(tl.float32)
    other_weight *= sin[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    token_ptr = qkv_ptr + row.to(tl.int64) * ((GROUP + 2) * STRIDE)
    heads = tl.where(is_key, GROUP * NUM_KV_HEADS + kv_head, kv_head * GROUP + m[:, None])
    inside = (m <= GROUP)[:, None]
    new_v = tl.load(token_ptr + (GROUP + 1) * STRIDE + kv_head * HEAD_DIM + d)
    x = tl.load(token_ptr + heads * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    other = tl.load(token_ptr + heads * HEAD_DIM + swapped[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
    rotated = (x * weight + other.to(tl.float32) * other_weight) * inverse
    q = rotated.to(k_cache_ptr.dtype.element_ty)

    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if split == 0:
        target = (new_page * PAGE_SIZE + (new & (PAGE_SIZE - 1))) * STRIDE
        tl.store(k_ptr + target + m[:, None] * 0, q, mask=is_key)
        tl.store(v_cache_ptr + target + kv_head * HEAD_DIM + d, new_v)
        new_k = tl.sum(tl.where(is_key, q.to(tl.float32), 0.0), axis=0)
        row_max = tl.sum(q.to(tl.float32) * new_k[None, :], axis=1) * scale_log2
        row_sum += 1.0
        accumulator += new_v.to(tl.float32)[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        next_k, next_v = _load_tile(
            k_ptr, v_ptr, pages, start + BLOCK_N, end, STRIDE, PAGE_SIZE, BLOCK_N
        )
        pages = _load_pages(table_ptr, start + 2 * BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = start + tl.arange(0, BLOCK_N) < end
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        accumulator *= decay[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        row_max = new_max
        k, v = next_k, next_v

    result = accumulator / row_sum[:, None]
    if num_partials == 1:
        tl.store(head_ptr + out_offsets, result, mask=is_query)
    else:
        combine_splits(
            result,
            row_max + tl.log2(row_sum),
            partial_out_ptr,
            partial_lse_ptr,
            arrivals_ptr,
            head_ptr,
            pair,
            kv_head * num_units + first,
            split,
            num_partials,
            GROUP,
            HEAD_DIM,
            BLOCK_M,
            GROUP_BLOCK,
            COMBINE_STEP,
        )


def fused_decode_attention_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Any number of rows, though it is made for FUSED_ROWS."""
    if not all(x.is_contiguous() for x in (k_cache, v_cache, cos_sin)):
        raise ValueError("k_cache, v_cache and cos_sin must be contiguous")
    qkv = qkv.contiguous()
    num_rows = qkv.shape[0]
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    out = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            num_rows, num_heads, num_kv_heads, head_dim, qkv.device
        )
    workspace.check(num_rows, num_kv_heads)
    splits, min_split = choose_splits(
        num_rows,
        num_kv_heads,
        block_tables.shape[1] * page_size,
        workspace.num_sms,
        _PROGRAMS_PER_SM,
    )
    overlap = overlaps(qkv)
    _fused_decode_attention_kernel[(num_kv_heads, num_rows * splits)](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        k_cache,
        v_cache,
        out,
        block_tables,
        slots,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        eps,
        scale * math.log2(math.e),
        block_tables.stride(0),
        num_rows,
        min_split,
        num_kv_heads,
        group,
        head_dim,
        page_size,
        max(16, next_power_of_2(group + 1)),
        # 32 KiB of keys and values in the registers of a program of 4 warps.
        max(16, min(64, 16384 // (head_dim * qkv.element_size()))),
        next_power_of_2(group),
        COMBINE_STEP,
        rows_block(num_rows, num_kv_heads, workspace.num_sms),
        LENGTHS_TRIED,
        overlap,
        num_warps=4,
        num_stages=1,
        launch_pdl=overlap,
        enable_fp_fusion=True,
    )
    return out
