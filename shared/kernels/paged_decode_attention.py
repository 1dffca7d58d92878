"""Attention of one new token per sequence over its pages: reading the KV cache is all it does, so
its floor is bytes over bandwidth.

A sequence's keys are split over several programs (Flash-Decoding, Dao et al. 2023), so that a few
long sequences keep every multiprocessor reading; the program of a sequence that finishes last
combines the partial results. All splits of a batch are of one length, so that a long sequence has
more of them and no program is still busy when the others are done:

    programs of a fixed number a row    |#####|#####|   |#|#|   |##|##|
    of one length                       |###|###|###|#| |##|    |###|#|

The query heads that share a KV head are the rows of one tile: a key is read once for the whole
group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl

# Rows are gathered in groups so that the copies of their pages stay in the CPU's caches.
_GATHERED_TOKENS = 16384

# Splits whose partial results the last program reads at once.
COMBINE_STEP = 8
# On average a row is split over at most so many: the last one combines their results alone.
_MAX_SPLITS = 32
# Lengths of a split that a program tries before it knows which keys are its own.
LENGTHS_TRIED = 8
# Programs per multiprocessor to aim for, at most.
_PROGRAMS_PER_SM = 4
# Pairs of row and KV head per multiprocessor from which on programs come in many waves: rows of
# different lengths then even out by themselves, and a program may be larger.
_MANY_PAIRS_PER_SM = 8


def paged_decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """q [R, num_heads, D] -> [R, num_heads, D]; seq_lens counts the token being decoded; 0 marks a
    padding row, which comes back as zeros."""
    block_size = k_cache.shape[1]
    num_columns = max(1, -(-max(seq_lens, default=0) // block_size))
    padded_length = num_columns * block_size
    lengths = torch.as_tensor(seq_lens, device=q.device)
    visible = torch.arange(padded_length, device=q.device) < lengths.unsqueeze(1)
    group = max(1, _GATHERED_TOKENS // padded_length)
    out = torch.empty_like(q)
    for begin in range(0, len(seq_lens), group):
        rows = slice(begin, begin + group)
        blocks = block_tables[slots[rows], :num_columns]
        k = k_cache[blocks].flatten(1, 2).transpose(1, 2)  # [rows, num_kv_heads, length, D]
        v = v_cache[blocks].flatten(1, 2).transpose(1, 2)
        out[rows] = F.scaled_dot_product_attention(
            q[rows].unsqueeze(2),
            k,
            v,
            attn_mask=visible[rows, None, None, :],
            scale=scale,
            enable_gqa=True,
        ).squeeze(2)
    out[lengths == 0] = 0  # torch's softmax over nothing is NaN
    return out


@dataclass(frozen=True)
class DecodeWorkspace:
    """Memory between the programs of one call; calls that run one after the other can share it.

    partial_out [programs, group, D] float32, partial_lse [programs, group] float32;
    arrivals [rows * num_kv_heads] int32: zeros, and zeros again after every call.
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor
    num_sms: int

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_sms: int | None = None,
    ) -> DecodeWorkspace:
        """Enough for every call of at most max_rows rows; num_sms: the device's own if None."""
        group = num_heads // num_kv_heads
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # As choose_splits() has it: the programs aimed for, or two for every row and head.
        programs = max(_PROGRAMS_PER_SM * num_sms, 2 * max_rows * num_kv_heads)
        return cls(
            torch.empty((programs, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((programs, group), dtype=torch.float32, device=device),
            torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
            num_sms,
        )

    def check(self, num_rows: int, num_kv_heads: int) -> None:
        if num_rows * num_kv_heads > self.arrivals.shape[0]:
            raise ValueError(
                f"{num_rows} rows of {num_kv_heads} KV heads exceed the workspace's "
                f"{self.arrivals.shape[0]} row and head pairs"
            )


def rows_block(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """The rows that a program looks at to find its own keys; 0 if it has a row to itself. A few
    sizes, because each is compiled."""
    if num_rows * num_kv_heads > _MANY_PAIRS_PER_SM * num_sms:
        return 0
    block = 32
    while block < num_rows:
        block *= 4
    return block


def rows_to_warm_up(max_rows: int, num_kv_heads: int, head_dim: int, num_sms: int) -> list[int]:
    """Numbers of rows that meet every compiled form of the kernel that up to max_rows rows can
    meet. The largest of each: as a batch of its own, the fewest rows have another kernel."""
    last = {}
    for rows in range(1, max_rows + 1):
        # Two-byte types: others have fewer forms.
        tile = choose_tile(head_dim, 2, rows * num_kv_heads / num_sms)
        last[rows_block(rows, num_kv_heads, num_sms), tile] = rows
    return list(last.values())


def choose_splits(
    num_rows: int, num_kv_heads: int, max_length: int, num_sms: int, programs_per_sm: int
) -> tuple[int, int]:
    """(programs per row and KV head on average, fewest keys of a program), from sizes alone, so
    that a captured graph fits every batch."""
    if rows_block(num_rows, num_kv_heads, num_sms) == 0:
        return 1, 1
    pairs = num_rows * num_kv_heads
    # A few sequences: the shorter the program, the sooner it is done. With more, all of the GPU is
    # busy anyway and a split costs a second trip of its result through memory: then only rows that
    # would keep everybody waiting are cut in two.
    if 4 * pairs <= num_sms:
        min_split = 64
    elif 2 * pairs <= num_sms:
        min_split = 128
    elif pairs <= 2 * num_sms:
        min_split = 256
    else:
        min_split = 1024
    wanted = max(2, programs_per_sm * num_sms // pairs)
    return max(1, min(wanted, _MAX_SPLITS, -(-max_length // min_split))), min_split


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [R, num_heads, D] -> [R, num_heads, D], into `out` where given.

    k_cache, v_cache [num_blocks, block_size, num_kv_heads, D], block_size a power of two >= 16;
    block_tables [S, max_blocks] int32, one row per slot; slots [R] int32: the table row of each
    sequence; seq_lens [R] int32: keys of each row, the token being decoded included. A padding row
    has length 0 and comes back as zeros. Without a workspace each call allocates and clears one.

    The tables, slots and lengths are read while the kernel before may still run: it must not be
    the one that writes them.
    """
    if runs_on_triton(q):
        return paged_decode_attention_triton(
            q, k_cache, v_cache, block_tables, slots, seq_lens, scale, workspace, out
        )
    result = paged_decode_attention_reference(
        q, k_cache, v_cache, block_tables, slots, seq_lens.tolist(), scale
    )
    return result if out is None else out.copy_(result)


@dataclass(frozen=True)
class DecodeTile:
    """block_n keys at a time, num_stages - 1 times as many on their way."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """To aim for."""


@jit()
def _combine(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_partials,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
) -> None:
    """Weigh the splits of one row and KV head by their share of the softmax's sum."""
    # One thread owns the same few columns of every split: nothing is exchanged between threads,
    # and the loads of a step do not depend on each other.
    columns = tl.arange(0, GROUP_BLOCK * HEAD_DIM)
    heads = columns // HEAD_DIM
    total = tl.zeros([GROUP_BLOCK * HEAD_DIM], dtype=tl.float32)
    total_max = tl.full([GROUP_BLOCK * HEAD_DIM], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([GROUP_BLOCK * HEAD_DIM], dtype=tl.float32)
    for start in tl.range(0, num_partials, COMBINE_STEP):
        for i in tl.static_range(COMBINE_STEP):
            split = start + i
            inside = heads < tl.where(split < num_partials, GROUP, 0)
            # Past the first-level cache: other multiprocessors wrote these a moment ago. A split
            # that is not there weighs exp2(-inf) = 0; columns past GROUP come to NaN, unstored.
            lse = tl.load(
                partial_lse_ptr + split * GROUP + heads,
                mask=inside,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            partial = tl.load(
                partial_out_ptr + split * (GROUP * HEAD_DIM) + columns,
                mask=inside,
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(total_max, lse)
            decay = tl.exp2(total_max - new_max)
            weight = tl.exp2(lse - new_max)
            total = total * decay + partial * weight
            total_sum = total_sum * decay + weight
            total_max = new_max
    tl.store(out_ptr + columns, total / total_sum, mask=heads < GROUP)


@jit()
def find_split(
    seq_lens_ptr,
    unit,
    num_rows,
    num_units,
    min_split,
    NEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
):
    """(row, first unit of the row, number of its units, keys of a unit): what this program reads.

    The units of all rows stand in one line, row after row, as many as a row's keys fill and at
    least one. They are as short as they can be if there are to be at most num_units of them. The
    last NEW tokens of a row are not in the cache. Past the last unit row is num_rows or more.
    ROWS 0: a unit is a row.
    """
    if ROWS == 0:
        row, first, count = unit, unit, 1
        split_len = tl.load(seq_lens_ptr + unit)
    else:
        rows = tl.arange(0, ROWS)
        there = rows < num_rows
        lengths = tl.maximum(tl.load(seq_lens_ptr + rows, mask=there, other=0) - NEW, 0)
        total = tl.sum(lengths)
        # As if rows could share a unit; and with one to spare for what every row leaves over.
        shortest = tl.cdiv(total, num_units)
        longest = tl.cdiv(total, tl.maximum(num_units - num_rows, 1))
        tried = tl.arange(0, LENGTHS_TRIED)
        tried = shortest + (longest - shortest) * tried // (LENGTHS_TRIED - 1)
        tried = tl.maximum(tl.cdiv(tried, BLOCK_N) * BLOCK_N, min_split)
        counts = tl.maximum(tl.cdiv(lengths[None, :], tried[:, None]), 1)
        needed = tl.sum(tl.where(there[None, :], counts, 0), axis=1)
        split_len = tl.min(tl.where(needed <= num_units, tried, 1 << 30))
        counts = tl.where(there, tl.maximum(tl.cdiv(lengths, split_len), 1), 0)
        ends = tl.cumsum(counts)
        row = tl.sum((ends <= unit).to(tl.int32))
        first = tl.sum(tl.where(ends <= unit, counts, 0))
        count = tl.sum(tl.where(rows == row, counts, 0))
    return row, first, count, split_len


@jit()
def combine_splits(
    result,
    lse,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    head_ptr,
    pair,
    first,
    split,
    num_partials,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
) -> None:
    """Leave one split's result; the program that comes last for its row and KV head combines.

    first: where the results of this row and KV head begin among those of all."""
    m = tl.arange(0, BLOCK_M)
    offsets = m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    first = first.to(tl.int64)
    partial = (first + split) * GROUP
    tl.store(partial_out_ptr + partial * HEAD_DIM + offsets, result, mask=(m < GROUP)[:, None])
    tl.store(partial_lse_ptr + partial + m, lse, mask=m < GROUP)
    # Every thread's stores come before the count, and the count before the last one's loads.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel", scope="gpu")
    if arrived == num_partials - 1:
        tl.debug_barrier()
        _combine(
            partial_out_ptr + first * (GROUP * HEAD_DIM),
            partial_lse_ptr + first * GROUP,
            head_ptr,
            num_partials,
            GROUP,
            GROUP_BLOCK,
            HEAD_DIM,
            COMBINE_STEP,
        )
        tl.store(arrivals_ptr + pair, 0)


@jit()
def attend_split(
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
    num_rows,
    min_split,
    kv_head,
    unit,
    num_units,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """What one program does: attention of one row and KV head over the keys of one unit."""
    row, first, num_partials, split_len = find_split(
        seq_lens_ptr, unit, num_rows, num_units, min_split, 0, BLOCK_N, ROWS, LENGTHS_TRIED
    )
    if row < num_rows:
        seq_len = tl.load(seq_lens_ptr + row)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_DIM)
        used = (m < GROUP)[:, None]
        pair = row * NUM_KV_HEADS + kv_head
        head_ptr = out_ptr + pair.to(tl.int64) * (GROUP * HEAD_DIM)
        out_offsets = m[:, None] * HEAD_DIM + d[None, :]
        if seq_len <= 0:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            zeros = tl.zeros([BLOCK_M, HEAD_DIM], dtype=out_ptr.dtype.element_ty)
            tl.store(head_ptr + out_offsets, zeros, mask=used)
        else:
            begin = (unit - first) * split_len
            end = tl.minimum(begin + split_len, seq_len)

            table_ptr = block_tables_ptr + slot * table_stride
            readable = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
            pages = tl.load(table_ptr + readable // PAGE_SIZE)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            q = tl.load(
                q_ptr + pair.to(tl.int64) * (GROUP * HEAD_DIM) + out_offsets, mask=used, other=0.0
            )
            k_ptr = k_cache_ptr + kv_head * HEAD_DIM + d[None, :]
            v_ptr = v_cache_ptr + kv_head * HEAD_DIM + d[None, :]
            accumulator = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            for start in tl.range(begin, end, BLOCK_N):
                positions = start + tl.arange(0, BLOCK_N)
                # Keys past the end are read from the last valid one and masked as scores: every
                # address is valid and every value finite, so zero weights cannot meet a NaN.
                readable = tl.minimum(positions, end - 1)
                slots = pages * PAGE_SIZE + (readable & (PAGE_SIZE - 1))
                offsets = (slots.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM))[:, None]
                # Page numbers are fetched one step ahead: behind them keys and values wait in line.
                pages = tl.load(table_ptr + tl.minimum(positions + BLOCK_N, end - 1) // PAGE_SIZE)
                k = tl.load(k_ptr + offsets)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                scores = tl.where((positions < end)[None, :], scores, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, axis=1))
                weights = tl.exp2(scores - new_max[:, None])
                decay = tl.exp2(row_max - new_max)
                row_sum = row_sum * decay + tl.sum(weights, axis=1)
                accumulator *= decay[:, None]
                v = tl.load(v_ptr + offsets)
                accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
                row_max = new_max

            result = accumulator / row_sum[:, None]
            if num_partials == 1:
                tl.store(head_ptr + out_offsets, result, mask=used)
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
                    unit - first,
                    num_partials,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_M,
                    GROUP_BLOCK,
                    COMBINE_STEP,
                )


@jit(
    integers=("table_stride", "num_rows", "min_split"),
    metadata=("block_tables_ptr", "slots_ptr", "seq_lens_ptr"),
)
def _paged_decode_attention_kernel(
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
    num_rows,
    min_split,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COMBINE_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # The heads of a token lie next to each other in the pool: neighbouring programs read it.
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    num_units = tl.num_programs(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
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
        num_rows,
        min_split,
        kv_head,
        unit,
        num_units,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        GROUP_BLOCK,
        COMBINE_STEP,
        ROWS,
        LENGTHS_TRIED,
        OVERLAP,
    )


def choose_tile(head_dim: int, element_size: int, pairs_per_sm: float) -> DecodeTile:
    """Few pairs of row and KV head: three programs per multiprocessor with three stages. They leave
    fewer results to combine, and have 64 KiB each on their way. Microseconds that attention adds to
    a layer of 8B (H200, in a decode step, 567 and 3,055 tokens a row), and with four programs of
    two stages: 8 rows 13.8, 31.7 (14.5, 33.4), 16 rows 16.7, 53.3 (20.3, 57.8); 32 rows 32.2, 113.7
    (27.2, 100.3). Two programs of four stages are as fast, but do not fit the 99 KiB of shared
    memory that smaller GPUs have.

    More: four programs of two stages, so that 64 rows of 8 KV heads all run at once (512 tokens
    each: 45 us, with three stages 50). Many: three stages are better over many waves (256 rows of
    800: 201 us, 208)."""
    if element_size == 4:
        # Plain multiply-adds instead of matrix units: larger tiles spill registers.
        return DecodeTile(16, 4 if head_dim <= 128 else 8, 2, _PROGRAMS_PER_SM)
    if pairs_per_sm <= 1:
        stages, programs = 3, 3
    else:
        stages, programs = 3 if pairs_per_sm > _MANY_PAIRS_PER_SM else 2, _PROGRAMS_PER_SM
    return DecodeTile(64 if head_dim <= 128 else 32, 4, stages, programs)


def paged_decode_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q) if out is None else out
    if not all(x.is_contiguous() for x in (q, out, k_cache, v_cache)):
        raise ValueError("q, out, k_cache and v_cache must be contiguous")
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if workspace is None:
        workspace = DecodeWorkspace.allocate(num_rows, num_heads, num_kv_heads, head_dim, q.device)
    workspace.check(num_rows, num_kv_heads)
    pairs_per_sm = num_rows * num_kv_heads / workspace.num_sms
    tile = tile or choose_tile(head_dim, q.element_size(), pairs_per_sm)
    max_length = block_tables.shape[1] * page_size
    splits, min_split = choose_splits(
        num_rows, num_kv_heads, max_length, workspace.num_sms, tile.programs_per_sm
    )
    group_block = next_power_of_2(group)
    overlap = overlaps(q)
    _paged_decode_attention_kernel[(num_kv_heads, num_rows * splits)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        slots,
        seq_lens,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        scale * math.log2(math.e),
        block_tables.stride(0),
        num_rows,
        min_split,
        num_kv_heads,
        group,
        head_dim,
        page_size,
        max(16, group_block),
        tile.block_n,
        group_block,
        COMBINE_STEP,
        rows_block(num_rows, num_kv_heads, workspace.num_sms),
        LENGTHS_TRIED,
        overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=overlap,
        enable_fp_fusion=True,
    )
    return out
