"""Between the QKV projection and attention, in one pass over the data: RMSNorm of every query and
key head, rotary position embedding (arXiv:2104.09864), and the write of keys and values into the
paged cache. Apart, the same work reads and writes the data four times."""

from __future__ import annotations

import torch

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl
from shared.kernels.rms_norm import rms_norm_reference


def apply_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate halves (x [T, heads, D]; cos, sin [T, 1, D / 2] in x's dtype)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def qk_norm_rope_kv_write_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    num_tokens = qkv.shape[0]
    _, _, num_kv_heads, head_dim = k_cache.shape
    heads = qkv.view(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = cos_sin[positions].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    q = apply_rope_reference(rms_norm_reference(q, q_weight, eps), cos, sin)
    k = apply_rope_reference(rms_norm_reference(k, k_weight, eps), cos, sin)
    real = slot_mapping >= 0
    slots = slot_mapping[real].long()
    k_cache.view(-1, num_kv_heads, head_dim)[slots] = k[real]
    v_cache.view(-1, num_kv_heads, head_dim)[slots] = v[real]
    return q


def qk_norm_rope_kv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Returns the finished queries and writes keys and values.

    qkv [T, (num_heads + 2 * num_kv_heads) * D]; q_weight, k_weight [D];
    cos_sin [max_position, D] float32, cosines then sines; positions [T] int32, in range for padding
    rows too; slot_mapping [T] int32: token slot in the pool (block * block_size + offset), -1
    writes nothing; k_cache, v_cache [num_blocks, block_size, num_kv_heads, D], contiguous.
    Returns [T, num_heads, D].
    """
    # A tile of half a head has a side that is a power of two.
    fits = next_power_of_2(k_cache.shape[3]) == k_cache.shape[3]
    use_triton = fits and runs_on_triton(qkv)
    operation = qk_norm_rope_kv_write_triton if use_triton else qk_norm_rope_kv_write_reference
    return operation(
        qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, k_cache, v_cache
    )


@jit()
def _norm_and_rotate(
    head_ptr,
    inside,
    weight_ptr,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
):
    # The halves of a head are two tiles [heads, D / 2]: rotation pairs element i with i + D / 2,
    # so each pair is in one thread and nothing is exchanged. Float32 from load to store.
    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, HALF)
    first = tl.load(head_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    square_sum = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    inverse = tl.rsqrt(square_sum / HEAD_DIM + eps)[:, None]
    first = first * inverse * tl.load(weight_ptr + half).to(tl.float32)[None, :]
    second = second * inverse * tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@jit(metadata=("positions_ptr", "slot_mapping_ptr"))
def _qk_norm_rope_kv_write_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Two programs per token, one for its queries, one for its keys and values: a decode step has
    # few tokens, and what counts then is the length of the longest program.
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + half)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + half)[None, :]
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    token_ptr = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if tl.program_id(1) == 0:
        heads = tl.arange(0, HEADS_BLOCK)[:, None]
        inside = heads < NUM_HEADS
        offsets = heads * HEAD_DIM + half[None, :]
        first, second = _norm_and_rotate(
            token_ptr + offsets, inside, q_weight_ptr, cos, sin, eps, HEAD_DIM
        )
        q_ptr = q_out_ptr + token * (NUM_HEADS * HEAD_DIM) + offsets
        tl.store(q_ptr, first, mask=inside)
        tl.store(q_ptr + HALF, second, mask=inside)
    else:
        kv_heads = tl.arange(0, KV_HEADS_BLOCK)[:, None]
        kv_inside = kv_heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        kv_offsets = kv_heads * HEAD_DIM + half[None, :]
        k_ptr = token_ptr + NUM_HEADS * HEAD_DIM + kv_offsets
        v_ptr = k_ptr + NUM_KV_HEADS * HEAD_DIM
        v_first = tl.load(v_ptr, mask=kv_inside)
        v_second = tl.load(v_ptr + HALF, mask=kv_inside)
        k_first, k_second = _norm_and_rotate(
            k_ptr, kv_inside, k_weight_ptr, cos, sin, eps, HEAD_DIM
        )
        target = slot * (NUM_KV_HEADS * HEAD_DIM) + kv_offsets
        tl.store(k_cache_ptr + target, k_first, mask=kv_inside)
        tl.store(k_cache_ptr + target + HALF, k_second, mask=kv_inside)
        tl.store(v_cache_ptr + target, v_first, mask=kv_inside)
        tl.store(v_cache_ptr + target + HALF, v_second, mask=kv_inside)


def qk_norm_rope_kv_write_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.is_contiguous()):
        raise ValueError("k_cache, v_cache and cos_sin must be contiguous")
    qkv = qkv.contiguous()
    num_tokens = qkv.shape[0]
    _, _, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads_block = next_power_of_2(num_heads)
    overlap = overlaps(qkv)
    _qk_norm_rope_kv_write_kernel[(num_tokens, 2)](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        heads_block,
        next_power_of_2(num_kv_heads),
        overlap,
        # A tile of all query heads lives in registers: at most 32 values a thread.
        num_warps=min(16, max(1, heads_block * head_dim // 1024)),
        launch_pdl=overlap,
        enable_fp_fusion=True,
    )
    return q
