"""Causal attention of several new tokens per sequence over its pages: prompts, chunks of prompts,
and, as the general case, any mix of them with decodes.

The kernel is FlashAttention-2's loop (arXiv:2307.08691) over pages (arXiv:2309.06180). One program
computes one tile of queries for one KV head: the query heads that share the KV head are packed
into the tile's rows, so a key is read once for the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.kernels._triton import jit, next_power_of_2, runs_on_triton, tl

# Offsets of rows that a program reads at once while it looks for its tile.
ROWS_AT_ONCE = 128


def paged_prefill_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """One sequence at a time: gather its pages, then torch's scaled dot-product attention.

    q [T, num_heads, D] -> [T, num_heads, D]. The last query of row r stands at position
    seq_lens[r] - 1 and sees every key up to its own position; lengths are on the host, so that
    nothing waits for a device. Tokens past cu_seqlens_q[-1] are padding: zeros.
    """
    block_size = k_cache.shape[1]
    out = torch.empty_like(q)
    out[cu_seqlens_q[-1] :] = 0
    for row, seq_len in enumerate(seq_lens):
        begin, end = cu_seqlens_q[row], cu_seqlens_q[row + 1]
        num_new = end - begin
        if num_new == 0:
            continue
        num_blocks = -(-seq_len // block_size)
        blocks = block_tables[slots[row], :num_blocks]
        k = k_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)  # [num_kv_heads, seq_len, D]
        v = v_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)
        mask = None
        if num_new < seq_len:
            mask = torch.ones(num_new, seq_len, dtype=torch.bool, device=q.device)
            mask = mask.tril(diagonal=seq_len - num_new)
        out[begin:end] = (
            F.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1).unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            .squeeze(0)
            .transpose(0, 1)
        )
    return out


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, num_heads, D] -> [T, num_heads, D], into `out` where given.

    k_cache, v_cache [num_blocks, block_size, num_kv_heads, D], block_size a power of two >= 16;
    block_tables [S, max_blocks] int32, one row per slot; slots [R] int32: the table row of each
    sequence; cu_seqlens_q [R + 1] int32: row r owns the queries cu[r] .. cu[r + 1] of q (queries
    before cu[0] are left alone, so the tail of a batch can be passed with its own offsets);
    seq_lens [R] int32: keys of each row, its own new tokens included; max_query_len: host bound
    on the queries of a row (with T and R it picks the tile, of which a model has two).

    All of these but the bound stay on the device, and the grid follows from T and R alone: a
    captured graph serves every batch of its size. Padding rows repeat the last offset; tokens past
    cu[R] come back as zeros.
    """
    if runs_on_triton(q):
        return paged_prefill_attention_triton(
            q,
            k_cache,
            v_cache,
            block_tables,
            slots,
            cu_seqlens_q,
            seq_lens,
            max_query_len,
            scale,
            out,
        )
    result = paged_prefill_attention_reference(
        q, k_cache, v_cache, block_tables, slots, cu_seqlens_q.tolist(), seq_lens.tolist(), scale
    )
    if out is None:
        return result
    begin = int(cu_seqlens_q[0])
    out[begin:] = result[begin:]
    return out


@dataclass(frozen=True)
class PrefillTile:
    """block_m rows of (query, head in group) against block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def most_tiles(self, num_tokens: int, num_rows: int, group: int) -> int:
        """Upper bound for any batch of this size (see _find_tile), padding included."""
        return num_tokens // (self.block_m // group) + num_rows + 1


@jit()
def _find_tile(cu_seqlens_ptr, program, num_rows, TILE_TOKENS: tl.constexpr, STEP: tl.constexpr):
    """(tile, row that owns it) of a program.

    Row r owns the tiles from (cu[r] - cu[0]) // TILE_TOKENS + r on: a formula in cu[r] alone, at
    most one tile per row too generous, so no table of tiles has to be built. The tokens behind
    the last row count as one more row.

    The last tile of the last row that has tokens goes first: chunks stand behind decodes and see
    the most keys, and a long program that starts late is a long tail. Tiles of padding, which have
    nothing to do, go last: before the others they would hold their places on the multiprocessors
    and scatter the long programs unevenly.
    """
    base = tl.load(cu_seqlens_ptr)
    total = tl.load(cu_seqlens_ptr + num_rows)
    used_rows = 0
    for start in tl.range(0, num_rows, STEP):
        rows = start + tl.arange(0, STEP)
        offsets = tl.load(cu_seqlens_ptr + tl.minimum(rows, num_rows))
        used_rows += tl.sum((offsets < total).to(tl.int32))
    used_tiles = (total - base) // TILE_TOKENS + used_rows
    tile = tl.where(program < used_tiles, used_tiles - 1 - program, program)
    count = 0
    for start in tl.range(0, num_rows + 1, STEP):
        rows = start + tl.arange(0, STEP)
        offsets = tl.load(cu_seqlens_ptr + tl.minimum(rows, num_rows)) - base
        count += tl.sum(((offsets // TILE_TOKENS + rows <= tile) & (rows <= num_rows)).to(tl.int32))
    return tile, count - 1


@jit()
def _attend(
    accumulator,
    row_max,
    row_sum,
    pages,
    q,
    query_positions,
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    num_keys,
    scale_log2,
    ROW_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: keys start .. start + BLOCK_N."""
    positions = start + tl.arange(0, BLOCK_N)
    # Keys past the end are read from the last valid one and masked as scores: every address is
    # valid and every value finite, so zero weights cannot meet a NaN.
    readable = tl.minimum(positions, num_keys - 1) if MASKED else positions
    slots = pages * PAGE_SIZE + (readable & (PAGE_SIZE - 1))
    offsets = (slots.to(tl.int64) * ROW_STRIDE)[:, None]
    # Page numbers are fetched one step ahead: behind them keys and values wait in line.
    next_positions = tl.minimum(positions + BLOCK_N, num_keys - 1)
    pages = tl.load(table_ptr + next_positions // PAGE_SIZE)
    k = tl.load(k_ptr + offsets)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(positions[None, :] <= query_positions[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    accumulator *= decay[:, None]
    v = tl.load(v_ptr + offsets)
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
    return accumulator, new_max, row_sum, pages


@jit()
def attend_tile(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    scale_log2,
    num_rows,
    num_tokens,
    table_stride,
    kv_head,
    program,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
) -> None:
    """What one program does: attention of one tile of queries for one KV head."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    ROW_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    tile, row = _find_tile(cu_seqlens_ptr, program, num_rows, TILE_TOKENS, ROWS_AT_ONCE)
    row_begin = tl.load(cu_seqlens_ptr + row)
    tile_begin = row_begin + TILE_TOKENS * (
        tile - (row_begin - tl.load(cu_seqlens_ptr)) // TILE_TOKENS - row
    )
    is_padding = row == num_rows
    row_end = tl.load(cu_seqlens_ptr + tl.minimum(row + 1, num_rows))
    row_end = tl.where(is_padding, num_tokens, row_end)
    if tile_begin < row_end:
        # Row m of the tile: query m // GROUP, head m % GROUP of the group. A group size that does
        # not divide BLOCK_M leaves the last few rows unused. 64 bits for where the tile begins, 32
        # within.
        m = tl.arange(0, BLOCK_M)
        tokens = tile_begin + m // GROUP
        used = ((m < TILE_TOKENS * GROUP) & (tokens < row_end))[:, None]
        tile_offset = (tile_begin.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
        offsets = (m // GROUP) * (ROW_STRIDE * GROUP) + (m % GROUP) * HEAD_DIM
        offsets = offsets[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        accumulator = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
        if is_padding:
            tl.store(out_ptr + tile_offset + offsets, accumulator, mask=used)
        else:
            seq_len = tl.load(seq_lens_ptr + row)
            row_position = seq_len - row_end  # position of token t of the batch: row_position + t
            first_position = row_position + tile_begin
            # Every query of the tile sees the keys before `shared_keys`; none sees `num_keys`.
            num_keys = row_position + tl.minimum(tile_begin + TILE_TOKENS, row_end)
            shared_keys = (first_position + 1) // BLOCK_N * BLOCK_N
            table_ptr = block_tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
            d = tl.arange(0, HEAD_DIM)[None, :]
            k_ptr = k_cache_ptr + kv_head * HEAD_DIM + d
            v_ptr = v_cache_ptr + kv_head * HEAD_DIM + d
            q = tl.load(q_ptr + tile_offset + offsets, mask=used, other=0.0)
            query_positions = row_position + tokens
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            positions = tl.minimum(tl.arange(0, BLOCK_N), num_keys - 1)
            pages = tl.load(table_ptr + positions // PAGE_SIZE)
            for start in tl.range(0, shared_keys, BLOCK_N):
                accumulator, row_max, row_sum, pages = _attend(
                    accumulator,
                    row_max,
                    row_sum,
                    pages,
                    q,
                    query_positions,
                    k_ptr,
                    v_ptr,
                    table_ptr,
                    start,
                    num_keys,
                    scale_log2,
                    ROW_STRIDE,
                    PAGE_SIZE,
                    BLOCK_N,
                    False,
                )
            positions = tl.minimum(shared_keys + tl.arange(0, BLOCK_N), num_keys - 1)
            pages = tl.load(table_ptr + positions // PAGE_SIZE)
            for start in tl.range(shared_keys, num_keys, BLOCK_N):
                accumulator, row_max, row_sum, pages = _attend(
                    accumulator,
                    row_max,
                    row_sum,
                    pages,
                    q,
                    query_positions,
                    k_ptr,
                    v_ptr,
                    table_ptr,
                    start,
                    num_keys,
                    scale_log2,
                    ROW_STRIDE,
                    PAGE_SIZE,
                    BLOCK_N,
                    True,
                )
            # A row without keys has the sum 0: zeros, not 0 / 0.
            row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
            tl.store(out_ptr + tile_offset + offsets, accumulator / row_sum[:, None], mask=used)


@jit(
    integers=("num_rows", "num_tokens", "table_stride"),
    metadata=("block_tables_ptr", "slots_ptr", "cu_seqlens_ptr", "seq_lens_ptr"),
)
def _paged_prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    scale_log2,
    num_rows,
    num_tokens,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
) -> None:
    # One axis: a second one would end at 65535 tiles.
    program = tl.program_id(0)
    attend_tile(
        q_ptr,
        k_cache_ptr,
        v_cache_ptr,
        out_ptr,
        block_tables_ptr,
        slots_ptr,
        cu_seqlens_ptr,
        seq_lens_ptr,
        scale_log2,
        num_rows,
        num_tokens,
        table_stride,
        program % NUM_KV_HEADS,
        program // NUM_KV_HEADS,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        ROWS_AT_ONCE,
    )


def choose_tile(group: int, head_dim: int, element_size: int, wide: bool) -> PrefillTile:
    """The tile for a model: one of two, so warm up both."""
    if element_size == 4:
        # Plain multiply-adds instead of matrix units: larger tiles spill registers.
        return PrefillTile(max(32, next_power_of_2(group)), 16, 8, 2)
    if wide and head_dim <= 128:
        # Four warp groups of 64 rows: while some wait for the softmax, others multiply. Each key
        # is read once for 256 rows, which keeps the second-level cache out of the way.
        return PrefillTile(256, 64 if head_dim > 64 else 128, 16, 3)
    # Two small programs on a multiprocessor hide each other's waiting, and a decode leaves less of
    # the tile empty. Fits the shared memory of every GPU since sm_80.
    block_m = max(64, next_power_of_2(group))
    return PrefillTile(block_m, 64, 4, 3) if head_dim <= 128 else PrefillTile(block_m, 32, 4, 2)


def prefers_wide_tile(num_tokens: int, num_heads: int, group: int, average_queries: int) -> bool:
    """Whether a batch on a Hopper GPU is made of long prompts, and of enough of them.

    On an H200 with 32 heads over 8, a prompt of 8192 runs at 61% of the matrix rate with the wide
    tile and at 53% with the narrow one. The other way round, 64 decodes beside a prompt of 2048
    take 1.6 times as long with the wide one, and so does a chunk of 512, which makes too few wide
    tiles for all multiprocessors; at 1536 new tokens (192 tiles) the wide one is ahead again.
    """
    return average_queries * group >= 512 and num_tokens * num_heads // 256 >= 192


def wants_wide_tile(
    q: torch.Tensor, k_cache: torch.Tensor, num_rows: int, max_query_len: int
) -> bool:
    """`prefers_wide_tile` for num_rows rows whose queries are q."""
    num_tokens, num_heads, _ = q.shape
    hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    average_queries = min(max_query_len, num_tokens // num_rows)
    return hopper and prefers_wide_tile(
        num_tokens, num_heads, num_heads // k_cache.shape[2], average_queries
    )


def paged_prefill_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q) if out is None else out
    if not all(x.is_contiguous() for x in (q, out, k_cache, v_cache)):
        raise ValueError("q, out, k_cache and v_cache must be contiguous")
    num_tokens, num_heads, head_dim = q.shape
    num_rows = seq_lens.shape[0]
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if tile is None:
        wide = wants_wide_tile(q, k_cache, num_rows, max_query_len)
        tile = choose_tile(group, head_dim, q.element_size(), wide)
    num_tiles = tile.most_tiles(num_tokens, num_rows, group)
    _paged_prefill_attention_kernel[(num_tiles * num_kv_heads,)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        slots,
        cu_seqlens_q,
        seq_lens,
        scale * math.log2(math.e),
        num_rows,
        num_tokens,
        block_tables.stride(0),
        num_kv_heads,
        group,
        head_dim,
        page_size,
        tile.block_m,
        tile.block_n,
        ROWS_AT_ONCE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    return out
