"""Sampling as an argmax: the Gumbel-max trick with noise that is computed, not drawn.

`argmax(logits + T * gumbel)` is distributed like softmax(logits / T) (Gumbel 1954; Maddison et al.,
arXiv:1411.0030). The noise is a hash of (seed, position, token id) in the manner of counter-based
generators (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): no state to carry
between steps, nothing to replay inside a CUDA graph, and a row's token does not depend on what else
is in the batch. Temperature 0 multiplies the noise away: greedy, exactly.

The hash is 32-bit integer arithmetic, the same bits in torch and in Triton. The
logarithms above it are rounded differently by each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from shared.kernels._triton import jit, next_power_of_2, runs_on_triton, tl

# Odd multipliers and shifts of "lowbias32" (C. Wellons, hash-prospector), found by search.
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
# Tell the two halves of a row's key apart.
_SALT_1 = 0x3C6EF372
_SALT_2 = 0x1B873593
# Where -log(1 - v) changes from its series to the logarithm: both are good to 2**-20 there.
_SERIES_BELOW = 1 / 32

# Elements of [K, V] the reference looks at together: its temporaries then stay small.
_REFERENCE_ELEMENTS = 1 << 18

_BLOCK = 1024
_NUM_WARPS = 4
# Programs wanted in flight, and most parts a row is cut into. A GPU of 132 processors holds 16
# programs of 4 warps on each; a single row of 151936 tokens makes 149 programs of one block.
_TARGET_PROGRAMS = 2048
_MAX_SPLITS = 256


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >> 31 else constant


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^ (x >> bits), int32 read as unsigned: torch's own shift would drag the sign along."""
    return x ^ ((x >> bits) & ((1 << (32 - bits)) - 1))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _xor_shift(x, 16) * _signed(_MULTIPLIER_1)
    x = _xor_shift(x, 15) * _signed(_MULTIPLIER_2)
    return _xor_shift(x, 16)


def hash_reference(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """seeds [K] int64, positions [K] int32, token_ids [V] int32 -> [K, V] int32, all 32 bits used.

    A row's key has 64 bits (`first`, `second`): with 32, two of some 2**16 rows would be likely to
    draw the same noise.
    """
    low = (seeds << 32 >> 32).to(torch.int32)
    high = (seeds >> 32).to(torch.int32)
    positions = positions.to(torch.int32)
    first = _mix(_mix(_mix(low ^ _SALT_1) ^ high) ^ positions).unsqueeze(1)
    second = _mix(_mix(_mix(high ^ _SALT_2) ^ positions) ^ low).unsqueeze(1)
    x = _xor_shift(token_ids + first, 16) * _signed(_MULTIPLIER_1)
    x = (_xor_shift(x, 15) + second) * _signed(_MULTIPLIER_2)
    return _xor_shift(x, 16)


def gumbel_reference(hashed: torch.Tensor) -> torch.Tensor:
    """int32 hashes -> float32 Gumbel noise in [-3.2, 22.9], of the same shape.

    With v = (hash + 0.5) / 2**32 in (0, 1) the noise is -log(-log(1 - v)). Large noise, which
    decides who wins, is small v, where floats are dense: 2**32 steps, not the 2**24 of floats
    near 1. Neither logarithm meets a 0: see where the two branches take over from each other.
    """
    v = (hashed.view(torch.uint32).float() + 0.5) * 2.0**-32
    complement = ((~hashed).view(torch.uint32).float() + 0.5) * 2.0**-32
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -torch.where(v < _SERIES_BELOW, series, -complement.log()).log()


def _scores_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time: which, and their logits with noise [rows, V] float32."""
    num_rows = len(logits) if len(token_ids) else 0
    group = max(1, _REFERENCE_ELEMENTS // max(1, len(token_ids)))
    for begin in range(0, num_rows, group):
        rows = slice(begin, begin + group)
        scores = logits[rows].float()
        if temperature[rows].any():
            noise = gumbel_reference(hash_reference(seeds[rows], positions[rows], token_ids))
            scores = scores + temperature[rows].unsqueeze(1) * noise
        yield rows, scores.masked_fill(scores.isnan(), -math.inf)


def gumbel_argmax_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """As `gumbel_argmax`, in plain torch."""
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for rows, scores in _scores_reference(logits, temperature, seeds, positions, token_ids):
        out[rows] = scores.argmax(-1)
    return out


def gumbel_candidates_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int,
    vocab_size: int,
) -> torch.Tensor:
    """As `gumbel_candidates`, in plain torch: one candidate a row."""
    end = max(first_token, min(first_token + logits.shape[1], vocab_size))
    token_ids = torch.arange(first_token, end, dtype=torch.int32, device=logits.device)
    # A part with no token of the vocabulary names what never wins: the token after the last.
    ids = torch.full((len(logits),), vocab_size, dtype=torch.int32, device=logits.device)
    best = torch.full((len(logits),), -math.inf, device=logits.device)
    logits = logits[:, : end - first_token]
    for rows, scores in _scores_reference(logits, temperature, seeds, positions, token_ids):
        winners = scores.argmax(-1)
        best[rows] = scores.gather(1, winners.unsqueeze(1)).squeeze(1)
        ids[rows] = token_ids[winners]
    return torch.stack((best.view(torch.int32), ids)).unsqueeze(-1)


def gumbel_choice_reference(candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """As `gumbel_choice`, in plain torch."""
    scores, ids = candidates[:, 0].view(torch.float32), candidates[:, 1]
    best = scores.amax((0, 2), keepdim=True)
    return ids.masked_fill(scores != best, vocab_size).amin((0, 2))


@jit()
def _mix_kernel(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def _log_kernel(x, ON_GPU: tl.constexpr):
    # The GPU's own instruction is good to 2**-22, which is enough for noise (relative to the
    # result 5e-6 at the worst, x = 31/32); the exact logarithm would be half of all the work here.
    if ON_GPU:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(x)
    return log2 * 0.6931471805599453


@jit()
def _gumbel_kernel(token_ids, first, second, ON_GPU: tl.constexpr):
    """`hash_reference` of one row's tokens (uint32), then `gumbel_reference`."""
    x = token_ids + first
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + second) * 0x846CA68B
    x = x ^ (x >> 16)
    v = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # Not ~x: some versions of Triton's interpreter cannot invert an unsigned integer.
    complement = ((x ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * (1.0 / 4 + v * (1.0 / 5)))))
    exponential = tl.where(v < 1.0 / 32, series, -_log_kernel(complement, ON_GPU))
    return -_log_kernel(exponential, ON_GPU)


@jit(
    integers=("first_token", "blocks_per_split", "num_splits"),
    metadata=("temperature_ptr", "seeds_ptr", "positions_ptr", "winner_ptr"),
)
def _split_kernel(
    logits_ptr,  # [K, NUM_COLUMNS], rows ROW_STRIDE apart
    temperature_ptr,  # [K] float32
    seeds_ptr,  # [K] int64
    positions_ptr,  # [K] int32
    best_ptr,  # [K, num_splits] float32: the largest score of each part of the row
    winner_ptr,  # [K, num_splits] int32: and the first token that has it
    first_token,
    blocks_per_split,
    num_splits,
    NUM_COLUMNS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,  # columns of tokens from here on are padding
    ROW_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,  # False in Triton's interpreter
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seeds_ptr + row)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    position = tl.load(positions_ptr + row).to(tl.uint32)
    first = _mix_kernel(_mix_kernel(_mix_kernel(low ^ 0x3C6EF372) ^ high) ^ position)
    second = _mix_kernel(_mix_kernel(_mix_kernel(high ^ 0x1B873593) ^ position) ^ low)

    logits_ptr += row.to(tl.int64) * ROW_STRIDE
    begin = split * blocks_per_split * BLOCK
    num_columns = tl.minimum(NUM_COLUMNS, VOCAB_SIZE - first_token)
    lanes = tl.arange(0, BLOCK)
    # Every lane starts from a token of its own, so that a row of nothing but -inf or NaN still
    # names a token. One of the vocabulary, unless the part is all padding, which never wins.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    winner = first_token + begin + lanes
    for block in range(blocks_per_split):
        columns = begin + block * BLOCK + lanes
        tokens = first_token + columns
        score = tl.load(logits_ptr + columns, mask=columns < num_columns, other=float("-inf"))
        score = score.to(tl.float32)
        if temperature != 0.0:
            noise = _gumbel_kernel(tokens.to(tl.uint32), first, second, ON_GPU)
            score += temperature * noise
        # False for NaN. Strict: a lane keeps the first of equals.
        better = score > best
        best = tl.where(better, score, best)
        winner = tl.where(better, tokens, winner)
    top = tl.max(best, axis=0)
    first_winner = tl.min(tl.where(best == top, winner, VOCAB_SIZE), axis=0)
    tl.store(best_ptr + row * num_splits + split, top)
    tl.store(winner_ptr + row * num_splits + split, first_winner)


@jit(integers=("num_splits",), metadata=("out_ptr", "slots_ptr"))
def _combine_kernel(
    best_ptr,  # [NUM_RANKS, 2, K, num_splits] float32
    winner_ptr,  # the same memory as int32: scores first, then ids
    out_ptr,  # [K] int32
    slots_ptr,  # [K] int32
    sampled_ptr,  # [S] int32
    num_splits,
    NUM_RANKS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    SCATTER: tl.constexpr,  # write the ids to sampled[slots] as well
):
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    lanes = tl.arange(0, MAX_CANDIDATES)
    there = lanes < NUM_RANKS * num_splits
    rank = lanes // num_splits
    places = (2 * rank * num_rows + row) * num_splits + lanes % num_splits
    best = tl.load(best_ptr + places, mask=there, other=float("-inf"))
    places += num_rows * num_splits
    winner = tl.load(winner_ptr + places, mask=there, other=VOCAB_SIZE)
    top = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == top, winner, VOCAB_SIZE), axis=0)
    tl.store(out_ptr + row, token_id)
    if SCATTER:
        tl.store(sampled_ptr + tl.load(slots_ptr + row), token_id)


def gumbel_candidates_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int,
    vocab_size: int,
) -> torch.Tensor:
    """As `gumbel_candidates`: of several parts of a row, since few rows must fill a GPU too."""
    num_rows, num_columns = logits.shape
    assert logits.stride(1) == 1
    num_blocks = -(-num_columns // _BLOCK)
    wanted = min(num_blocks, _MAX_SPLITS, max(1, _TARGET_PROGRAMS // max(1, num_rows)))
    blocks_per_split = -(-num_blocks // wanted)
    num_splits = -(-num_blocks // blocks_per_split)
    out = torch.empty(2, num_rows, num_splits, dtype=torch.int32, device=logits.device)
    if num_rows:
        _split_kernel[(num_rows, num_splits)](
            logits,
            temperature,
            seeds,
            positions,
            out[0].view(torch.float32),
            out[1],
            first_token,
            blocks_per_split,
            num_splits,
            NUM_COLUMNS=num_columns,
            VOCAB_SIZE=vocab_size,
            ROW_STRIDE=logits.stride(0),
            BLOCK=_BLOCK,
            ON_GPU=logits.is_cuda,
            num_warps=_NUM_WARPS,
        )
    return out


def gumbel_choice_triton(
    candidates: torch.Tensor,
    vocab_size: int,
    slots: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `gumbel_choice`."""
    assert candidates.is_contiguous()
    num_ranks, _, num_rows, num_splits = candidates.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int32, device=candidates.device)
    # The most that there can be, whatever the number of rows: one compiled kernel.
    most_splits = min(_MAX_SPLITS, -(-vocab_size // (num_ranks * _BLOCK)))
    if num_rows:
        _combine_kernel[(num_rows,)](
            candidates.view(torch.float32),
            candidates,
            out,
            out if slots is None else slots,
            out if sampled is None else sampled,
            num_splits,
            NUM_RANKS=num_ranks,
            VOCAB_SIZE=vocab_size,
            MAX_CANDIDATES=next_power_of_2(num_ranks * most_splits),
            SCATTER=sampled is not None,
            num_warps=1,
        )
    return out


def gumbel_argmax_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `gumbel_argmax`."""
    vocab_size = logits.shape[1]
    candidates = gumbel_candidates_triton(logits, temperature, seeds, positions, 0, vocab_size)
    return gumbel_choice_triton(candidates.unsqueeze(0), vocab_size, slots, sampled, out)


def gumbel_candidates(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token: int,
    vocab_size: int,
) -> torch.Tensor:
    """The half of `gumbel_argmax` that a rank does with its part of the vocabulary: logits [K, n]
    of the tokens from `first_token` on, of which those beyond `vocab_size` are padding.

    -> [2, K, P] int32: the best scores of P parts of each row (float32 bits), and the ids that have
    them. P is the same on all ranks.
    """
    rows = (temperature, seeds, positions)
    if runs_on_triton(logits):
        return gumbel_candidates_triton(logits, *rows, first_token, vocab_size)
    return gumbel_candidates_reference(logits, *rows, first_token, vocab_size)


def gumbel_choice(
    candidates: torch.Tensor,
    vocab_size: int,
    slots: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The other half, which every rank does with the candidates of all, [ranks, 2, K, P], and with
    the same result: token ids [K] int32."""
    if runs_on_triton(candidates):
        return gumbel_choice_triton(candidates, vocab_size, slots, sampled, out)
    ids = gumbel_choice_reference(candidates, vocab_size)
    return _deliver(ids, slots, sampled, out)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token per row: argmax(logits + temperature * gumbel(seed, position, token id)).

    logits [K, V] of any float dtype, temperature [K] float32 (0: greedy), seeds [K] int64 (from
    `sequence_seed`), positions [K] int32 (tokens before the one sampled) -> token ids [K] int32.
    Of equal scores the lowest id wins. NaN counts as -inf, and a row with nothing else gives
    token 0. Allocates but never synchronises: it may be captured in a CUDA graph.

    The ids go to `out` [K] int32 where given, and with `sampled` [S] int32 and `slots` [K] int32
    to sampled[slots] besides.
    """
    if runs_on_triton(logits):
        return gumbel_argmax_triton(logits, temperature, seeds, positions, slots, sampled, out)
    ids = gumbel_argmax_reference(logits, temperature, seeds, positions)
    return _deliver(ids, slots, sampled, out)


def _deliver(
    ids: torch.Tensor,
    slots: torch.Tensor | None,
    sampled: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if sampled is not None:
        sampled[slots] = ids
    return ids if out is None else out.copy_(ids)
