from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared.kernels import fused_decode_attention as module
from shared.kernels.fused_decode_attention import (
    fused_decode_attention,
    fused_decode_attention_reference,
    fused_decode_attention_triton,
)
from shared.kernels.paged_decode_attention import DecodeWorkspace, paged_decode_attention_triton
from shared.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write_triton
from tests.kernels.paged_batch import PagedBatch
from tests.kernels.place import Place
from tests.kernels.test_decode_attention import make_decodes

EPS = 1e-6


@dataclass
class Step:
    """A decode step of one layer, the newest token not yet in the cache."""

    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    cos_sin: torch.Tensor
    batch: PagedBatch
    newest: torch.Tensor  # [rows with a token]: slots in the pool

    def arguments(self) -> tuple[object, ...]:
        b = self.batch
        weights = (self.q_weight, self.k_weight, EPS, self.cos_sin)
        return (
            self.qkv,
            *weights,
            b.k_cache,
            b.v_cache,
            b.block_tables,
            b.slots,
            b.seq_lens,
            b.scale,
        )

    def run(self, num_sms: int = 2, workspace: DecodeWorkspace | None = None) -> torch.Tensor:
        num_rows, num_heads, head_dim = self.batch.q.shape
        workspace = workspace or DecodeWorkspace.allocate(
            num_rows, num_heads, self.batch.k_cache.shape[2], head_dim, self.qkv.device, num_sms
        )
        return fused_decode_attention_triton(*self.arguments(), workspace)  # type: ignore[arg-type]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(attention, newest keys, newest values) in float64."""
        b = self.batch
        caches = [x.double().cpu().nan_to_num() for x in (b.k_cache, b.v_cache)]
        out = fused_decode_attention_reference(
            self.qkv.double().cpu(),
            self.q_weight.double().cpu(),
            self.k_weight.double().cpu(),
            EPS,
            self.cos_sin.double().cpu(),
            *caches,
            b.block_tables.cpu(),
            b.slots.cpu(),
            b.seq_lens.cpu(),
            b.scale,
        )
        return out, *(cache.flatten(0, 1)[self.newest] for cache in caches)

    def check(self, out: torch.Tensor, place: Place) -> None:
        exact, keys, values = self.exact()
        place.assert_close(out, exact)
        place.assert_close(self.batch.k_cache.flatten(0, 1)[self.newest], keys)
        assert torch.equal(self.batch.v_cache.flatten(0, 1)[self.newest].double().cpu(), values)


def make_step(place: Place, lengths: list[int], **shapes: int) -> Step:
    batch = make_decodes(place, lengths, **shapes)
    num_rows, num_heads, head_dim = batch.q.shape
    _, block_size, num_kv_heads, _ = batch.k_cache.shape
    newest = []
    for slot, length in zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True):
        if length:
            block = int(batch.block_tables[slot, (length - 1) // block_size])
            newest.append(block * block_size + (length - 1) % block_size)
    for cache in (batch.k_cache, batch.v_cache):
        cache.flatten(0, 1)[newest] = float("nan")
    angles = torch.rand(max(lengths) + 1, head_dim // 2, device=place.device) * 6.28
    return Step(
        place.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, scale=2.0),
        place.randn(head_dim),
        place.randn(head_dim),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        batch,
        torch.tensor(newest, dtype=torch.long),
    )


@pytest.mark.parametrize(
    "block_size, num_kv_heads, group, head_dim",
    [
        (16, 2, 1, 16),
        (16, 1, 3, 128),
        (32, 1, 5, 32),
        (64, 2, 4, 64),
        (256, 2, 4, 128),
        (16, 3, 2, 128),
        (16, 1, 16, 64),  # the key head is the 17th row of a tile
        (16, 1, 2, 256),
    ],
)
@pytest.mark.parametrize("num_sms", [1, 32])
def test_lengths_and_splits(
    place: Place,
    poison_empty: None,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_sms: int,
) -> None:
    """Among them: no earlier token, earlier tokens that end with a page, with a split."""
    step = make_step(
        place,
        [1, 2, 17, 65, 129, 300],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
    )
    step.check(step.run(num_sms), place)


def test_padding_rows_are_zeros_and_write_nothing(place: Place, poison_empty: None) -> None:
    step = make_step(place, [40, 200, 0, 0])
    step.qkv[2:] = float("nan")
    before = step.batch.v_cache.clone()
    out = step.run(8)
    assert not out[2:].any()
    step.qkv[2:] = 0
    step.check(out, place)
    before.flatten(0, 1)[step.newest] = step.batch.v_cache.flatten(0, 1)[step.newest]
    assert torch.equal(before.nan_to_num(7.0), step.batch.v_cache.nan_to_num(7.0))
    nothing = make_step(place, [0, 0], num_kv_heads=1)
    assert not nothing.run().any()


def test_workspace_is_clean_after_every_call(place: Place) -> None:
    workspace = DecodeWorkspace.allocate(6, 4, 2, 64, place.device, 12)
    for lengths in ([300, 1, 0, 520, 130, 129], [700, 20], [4]):
        workspace.partial_out.fill_(float("nan"))
        workspace.partial_lse.fill_(float("nan"))
        step = make_step(place, lengths)
        step.check(step.run(workspace=workspace), place)
        assert not workspace.arrivals.any()
    with pytest.raises(ValueError, match="workspace"):
        make_step(place, [4] * 7).run(workspace=workspace)


def test_public_function_takes_the_reference_on_cpu() -> None:
    torch.manual_seed(0)
    step = make_step(Place(torch.device("cpu"), torch.float32), [1, 33, 0])
    step.batch.k_cache.nan_to_num_()
    step.batch.v_cache.nan_to_num_()
    exact, _, _ = step.exact()
    out = fused_decode_attention(*step.arguments())  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    device = torch.device("cuda")

    def place(self) -> Place:
        torch.manual_seed(0)
        return Place(self.device, torch.bfloat16)

    def test_pool_offsets_beyond_int32(self) -> None:
        place = self.place()
        num_blocks = 2**31 // (16 * 2 * 128) + 4096
        batch_shape = {"num_blocks": num_blocks, "first_block": num_blocks - 64}
        step = make_step(place, [90, 300], group=4, head_dim=128, **batch_shape)
        assert step.batch.k_cache.numel() > 2**31
        b, q = step.batch, step.batch.q
        out = step.run()
        used = slice(num_blocks - 64, num_blocks)
        keys = b.k_cache[used].clone(), b.v_cache[used].clone()
        positions = b.seq_lens - 1
        slots = step.newest.int().to(self.device)
        q = qk_norm_rope_kv_write_triton(
            step.qkv,
            step.q_weight,
            step.k_weight,
            EPS,
            step.cos_sin,
            positions,
            slots,
            b.k_cache,
            b.v_cache,
        )
        assert torch.equal(keys[1].nan_to_num(), b.v_cache[used].nan_to_num())
        place.assert_close(keys[0].nan_to_num(), b.k_cache[used].nan_to_num().double())
        apart = paged_decode_attention_triton(
            q, b.k_cache, b.v_cache, b.block_tables, b.slots, b.seq_lens, b.scale
        )
        place.assert_close(out, apart.double())

    def test_overlapping_layers_keep_their_order(self) -> None:
        """Layers of a step one behind the other, each fed by the one before: a kernel that read
        its input, or overwrote another's, too early would show as a changing result."""
        place = self.place()
        shapes = {"num_kv_heads": 8, "group": 2, "head_dim": 128}
        steps = [make_step(place, [600, 17, 333, 1030], **shapes) for _ in range(6)]
        weight = place.randn(4096, 2048, scale=2048**-0.5)
        workspace = DecodeWorkspace.allocate(4, 16, 8, 128, self.device)
        first = steps[0].qkv

        def layers() -> torch.Tensor:
            qkv = first + 0
            for step in steps:
                step.qkv = qkv
                qkv = step.run(workspace=workspace).flatten(1) @ weight.t()
            return qkv

        expected = layers()
        assert torch.isfinite(expected).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        graph.replay()
        place.assert_close(out, expected.double())
        replayed = out.clone()
        for _ in range(100):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, replayed)
            assert torch.equal(layers(), expected)

    def test_lengths_and_rows_share_one_compiled_kernel(self) -> None:
        place = self.place()
        kernel = module._fused_decode_attention_kernel
        make_step(place, [700, 300], head_dim=128).run()
        compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
        for rows in (1, 2, 5, 8):
            step = make_step(place, [200 + rows] * rows, head_dim=128)
            step.batch.slots = torch.cat([step.batch.slots[:1], step.batch.slots])[1:]
            torch.cuda.synchronize()
            step.check(step.run(), place)
        assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled
