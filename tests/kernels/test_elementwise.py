"""RMSNorm, the gated activation, and the pass between the QKV projection and attention."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.qk_norm_rope_kv_write import (
    qk_norm_rope_kv_write,
    qk_norm_rope_kv_write_reference,
    qk_norm_rope_kv_write_triton,
)
from shared.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)
from shared.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference, silu_and_mul_triton
from tests.kernels.place import Place

SHAPES = [(1, 16), (3, 64), (5, 100), (17, 1024), (2, 5120), (4, 4096)]


@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_rms_norm(place: Place, poison_empty: None, rows: int, hidden: int) -> None:
    x, weight = place.randn(rows, hidden, scale=3.0), place.randn(hidden)
    exact = rms_norm_reference(x.double().cpu(), weight.double().cpu(), 1e-6)
    place.assert_close(rms_norm_triton(x, weight, 1e-6), exact)


@pytest.mark.parametrize("rows, hidden", SHAPES)
def test_add_rms_norm_in_place(place: Place, rows: int, hidden: int) -> None:
    x, residual, weight = place.randn(rows, hidden), place.randn(rows, hidden), place.randn(hidden)
    # The sum is rounded to the storage type before it is normalised.
    exact_sum = x + residual
    exact = rms_norm_reference(exact_sum.double().cpu(), weight.double().cpu(), 1e-6)
    normed, added = add_rms_norm_triton(x, residual, weight, 1e-6)
    assert normed is x
    assert added is residual
    assert torch.equal(added, exact_sum)
    place.assert_close(normed, exact)


def test_add_rms_norm_refuses_views_it_cannot_overwrite(place: Place) -> None:
    x = place.randn(4, 64)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm_triton(x[:, :32], place.randn(4, 32), place.randn(32), 1e-6)


def test_norm_of_a_zero_row_is_zero(place: Place, poison_empty: None) -> None:
    x = torch.zeros(2, 64, dtype=place.dtype, device=place.device)
    assert not rms_norm_triton(x, place.randn(64), 1e-6).any()


@pytest.mark.parametrize("rows, width", [(1, 16), (3, 100), (5, 1024), (2, 3000), (1, 12288)])
def test_silu_and_mul(place: Place, poison_empty: None, rows: int, width: int) -> None:
    x = place.randn(rows, 2 * width, scale=4.0)
    x[0, 0] = -60000.0 if place.dtype == torch.float16 else -1e30  # exp overflows: silu is 0
    exact = silu_and_mul_reference(x.double().cpu())
    place.assert_close(silu_and_mul_triton(x), exact)


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, block_size",
    [
        (2, 1, 16, 16),
        (4, 2, 64, 16),
        (5, 1, 128, 64),
        (9, 3, 32, 256),
        (32, 8, 128, 16),
        (1, 1, 256, 16),
    ],
)
def test_qk_norm_rope_kv_write(
    place: Place,
    poison_empty: None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    num_tokens, num_blocks = 7, 3
    qkv = place.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, scale=2.0)
    q_weight, k_weight = place.randn(head_dim), place.randn(head_dim)
    angles = torch.rand(50, head_dim // 2, device=place.device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = place.int32([0, 3, 49, 7, 7, 0, 12])
    slot_list = torch.randperm(num_blocks * block_size)[:num_tokens].tolist()
    slot_list[2] = slot_list[5] = -1
    slots = place.int32(slot_list)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=place.dtype, device=place.device)
    v_cache = k_cache.clone()

    q = qk_norm_rope_kv_write_triton(
        qkv, q_weight, k_weight, 1e-6, cos_sin, positions, slots, k_cache, v_cache
    )

    exact_k = torch.full(shape, float("nan"), dtype=torch.float64)
    exact_v = exact_k.clone()
    exact_q = qk_norm_rope_kv_write_reference(
        qkv.double().cpu(),
        q_weight.double().cpu(),
        k_weight.double().cpu(),
        1e-6,
        cos_sin.double().cpu(),
        positions.cpu(),
        slots.cpu(),
        exact_k,
        exact_v,
    )
    place.assert_close(q, exact_q)
    written = [slot for slot in slot_list if slot >= 0]
    flat = (-1, num_kv_heads, head_dim)
    place.assert_close(k_cache.view(flat)[written], exact_k.view(flat)[written])
    # Values are copied, and nothing but the named slots is touched.
    assert torch.equal(v_cache.double().cpu().nan_to_num(7.0), exact_v.nan_to_num(7.0))
    assert torch.equal(k_cache.cpu().isnan(), exact_k.isnan())


def test_public_functions_take_the_reference_on_cpu() -> None:
    x, weight = torch.randn(3, 32), torch.randn(32)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    for out, expected in zip(
        add_rms_norm(x, x, weight, 1e-6), add_rms_norm_reference(x, x, weight, 1e-6), strict=True
    ):
        assert torch.equal(out, expected)
    assert torch.equal(silu_and_mul(x), silu_and_mul_reference(x))
    caches = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8)
    q = qk_norm_rope_kv_write(
        x,
        weight[:8],
        weight[:8],
        1e-6,
        torch.randn(4, 8),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([3, -1, 4], dtype=torch.int32),
        *caches,
    )
    assert q.shape == (3, 2, 8)
    assert caches[1][0, 3].any()
    assert not caches[1][0, 0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def test_kv_write_beyond_int32(self) -> None:
        torch.manual_seed(0)
        place = Place(torch.device("cuda"), torch.bfloat16)
        num_blocks = 2**31 // (16 * 8 * 128) + 10
        shape = (num_blocks, 16, 8, 128)
        k_cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        v_cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        assert k_cache.numel() > 2**31
        qkv = place.randn(2, 48 * 128)
        slots = place.int32([num_blocks * 16 - 1, num_blocks * 16 - 40])
        one = torch.ones(128, dtype=torch.bfloat16, device="cuda")
        cos_sin = torch.randn(8, 128, device="cuda")
        qk_norm_rope_kv_write_triton(
            qkv, one, one, 1e-6, cos_sin, place.int32([1, 2]), slots, k_cache, v_cache
        )
        values = qkv.view(2, 48, 128)[:, 40:]
        assert torch.equal(v_cache.view(-1, 8, 128)[slots.long()], values)

    def test_row_counts_share_one_compiled_kernel(self) -> None:
        from shared.kernels import rms_norm as norms

        place = Place(torch.device("cuda"), torch.bfloat16)
        weight = place.randn(1024)
        rms_norm(place.randn(3, 1024), weight, 1e-6)
        caches = norms._rms_norm_kernel.device_caches
        compiled = sum(len(cache[0]) for cache in caches.values())
        for rows in (1, 2, 16, 17, 256):
            rms_norm(place.randn(rows + 1, 1024)[1:], weight, 1e-6)
        assert sum(len(cache[0]) for cache in caches.values()) == compiled
