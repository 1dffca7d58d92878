from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels import paged_prefill_attention as module
from shared.kernels.paged_prefill_attention import (
    choose_tile,
    paged_prefill_attention,
    paged_prefill_attention_reference,
    paged_prefill_attention_triton,
    prefers_wide_tile,
)
from tests.kernels.paged_batch import PagedBatch, make_batch
from tests.kernels.place import Place


def run(batch: PagedBatch, **changes: object) -> torch.Tensor:
    arguments = {
        "q": batch.q,
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "block_tables": batch.block_tables,
        "slots": batch.slots,
        "cu_seqlens_q": batch.cu_seqlens,
        "seq_lens": batch.seq_lens,
        "max_query_len": batch.max_query_len,
        "scale": batch.scale,
    }
    return paged_prefill_attention_triton(**{**arguments, **changes})


def test_reference_matches_exact_attention() -> None:
    torch.manual_seed(0)
    batch = make_batch(
        [1, 5, 40, 1],
        [30, 0, 21, 0],
        device=torch.device("cpu"),
        dtype=torch.float32,
        padding_rows=2,
        padding_tokens=3,
    )
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.slots)
    out = paged_prefill_attention_reference(
        *arguments, batch.cu_seqlens.tolist(), batch.seq_lens.tolist(), batch.scale
    )
    torch.testing.assert_close(out.double(), batch.exact, atol=1e-5, rtol=1e-5)
    public = paged_prefill_attention(
        *arguments, batch.cu_seqlens, batch.seq_lens, batch.max_query_len, batch.scale
    )
    assert torch.equal(public, out)


@pytest.mark.parametrize(
    "block_size, num_kv_heads, group, head_dim",
    [
        (16, 2, 1, 16),
        (16, 2, 2, 64),
        (16, 1, 3, 128),
        (16, 2, 4, 128),
        (32, 1, 5, 32),
        (64, 2, 4, 64),
        (64, 1, 8, 128),
        (256, 2, 4, 128),
        (256, 3, 2, 64),
        (16, 1, 2, 256),
    ],
)
def test_mixed_lengths(
    place: Place,
    poison_empty: None,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
) -> None:
    batch = make_batch(
        [1, 33, 1, 70, 7],
        [70, 0, 0, 40, 90],
        device=place.device,
        dtype=place.dtype,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
    )
    place.assert_close(run(batch), batch.exact)


def test_padding_rows_and_tokens_are_zeros(place: Place, poison_empty: None) -> None:
    batch = make_batch(
        [3, 20, 1],
        [10, 0, 40],
        device=place.device,
        dtype=place.dtype,
        padding_rows=5,
        padding_tokens=150,
    )
    batch.q[24:] = float("nan")
    out = run(batch)
    place.assert_close(out, batch.exact)
    assert not out[24:].any()


def test_only_padding(place: Place, poison_empty: None) -> None:
    batch = make_batch(
        [], [], device=place.device, dtype=place.dtype, padding_rows=2, padding_tokens=40
    )
    assert not run(batch).any()


def test_rows_without_queries_between_others(place: Place, poison_empty: None) -> None:
    batch = make_batch(
        [0, 4, 0, 0, 9, 0], [12, 3, 0, 50, 0, 7], device=place.device, dtype=place.dtype
    )
    place.assert_close(run(batch), batch.exact)


def test_more_rows_than_a_program_reads_at_once(
    place: Place, poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    batch = make_batch(
        [1, 0, 40, 1, 0, 9, 1],
        [70, 3, 0, 0, 12, 8, 30],
        device=place.device,
        dtype=place.dtype,
        padding_rows=4,
        padding_tokens=70,
    )
    out = torch.full_like(batch.q, float("nan"))
    place.assert_close(run(batch, out=out), batch.exact)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decodes_in_either_tile(
    place: Place, poison_empty: None, head_dim: int, wide: bool
) -> None:
    batch = make_batch(
        [1] * 9 + [80],
        [0, 1, 15, 16, 17, 63, 64, 65, 200, 9],
        device=place.device,
        dtype=place.dtype,
        group=3,
        head_dim=head_dim,
    )
    tile = choose_tile(3, head_dim, batch.q.element_size(), wide)
    place.assert_close(run(batch, tile=tile), batch.exact)


def test_wide_tile_is_for_enough_long_prompts() -> None:
    assert prefers_wide_tile(8192, 32, 4, 8192)
    assert not prefers_wide_tile(8192, 32, 4, 16)  # short rows
    assert not prefers_wide_tile(512, 32, 4, 512)  # few tiles


def test_tail_of_a_batch_with_its_own_offsets(place: Place) -> None:
    """Offsets that do not start at 0: queries before the first one are left alone."""
    batch = make_batch([1, 1, 1, 50, 9], [5, 80, 0, 3, 40], device=place.device, dtype=place.dtype)
    out = torch.full_like(batch.q, float("nan"))
    result = run(
        batch,
        slots=batch.slots[3:],
        cu_seqlens_q=batch.cu_seqlens[3:],
        seq_lens=batch.seq_lens[3:],
        out=out,
    )
    assert result is out
    assert out[:3].isnan().all()
    place.assert_close(out[3:], batch.exact[3:])


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 20)),
    group=st.integers(1, 6),
)
def test_any_batch(
    place: Place, lengths: list[tuple[int, int]], padding: tuple[int, int], group: int
) -> None:
    batch = make_batch(
        [new for new, _ in lengths] + [1],
        [old for _, old in lengths] + [0],
        device=place.device,
        dtype=place.dtype,
        num_kv_heads=1,
        group=group,
        head_dim=16,
        padding_rows=padding[0],
        padding_tokens=padding[1],
    )
    out = torch.full_like(batch.q, float("nan"))
    place.assert_close(run(batch, out=out), batch.exact)


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class TestOnGpu:
    pytestmark = needs_gpu
    device = torch.device("cuda")

    def test_long_prompts_beside_decodes(self) -> None:
        torch.manual_seed(0)
        place = Place(self.device, torch.bfloat16)
        batch = make_batch(
            [1, 2000, 1, 1, 513],
            [3000, 0, 17, 0, 1500],
            device=self.device,
            dtype=torch.bfloat16,
            num_kv_heads=2,
            group=4,
            head_dim=128,
        )
        for wide in (False, True):
            place.assert_close(run(batch, tile=choose_tile(4, 128, 2, wide)), batch.exact)

    def test_pool_offsets_beyond_int32(self) -> None:
        torch.manual_seed(0)
        place = Place(self.device, torch.bfloat16)
        num_blocks = 2**31 // (16 * 2 * 128) + 4096
        batch = make_batch(
            [1, 60],
            [90, 100],
            device=self.device,
            dtype=torch.bfloat16,
            group=4,
            head_dim=128,
            num_blocks=num_blocks,
            first_block=num_blocks - 64,
        )
        assert batch.k_cache.numel() > 2**31
        place.assert_close(run(batch), batch.exact)

    def test_graph_replays_other_batches_without_compiling(self) -> None:
        torch.manual_seed(0)
        place = Place(self.device, torch.bfloat16)
        shapes = {"device": self.device, "dtype": torch.bfloat16, "head_dim": 128}
        first = make_batch([40, 1, 9], [0, 60, 30], **shapes)
        second = make_batch(
            [20, 15], [100, 0], padding_rows=1, padding_tokens=15, num_blocks=40, **shapes
        )
        assert first.q.shape == second.q.shape
        kernel = module._paged_prefill_attention_kernel
        out = run(first)
        compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
        static = {
            "q": first.q.clone(),
            "k_cache": torch.zeros(
                64, *first.k_cache.shape[1:], dtype=first.q.dtype, device="cuda"
            ),
            "v_cache": torch.zeros(
                64, *first.k_cache.shape[1:], dtype=first.q.dtype, device="cuda"
            ),
            "block_tables": torch.zeros(16, 64, dtype=torch.int32, device="cuda"),
            "slots": first.slots.clone(),
            "cu_seqlens_q": first.cu_seqlens.clone(),
            "seq_lens": first.seq_lens.clone(),
        }
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(first, **static)
        for batch in (second, first):
            static["q"].copy_(batch.q)
            static["k_cache"][: len(batch.k_cache)] = batch.k_cache
            static["v_cache"][: len(batch.v_cache)] = batch.v_cache
            rows, columns = batch.block_tables.shape
            static["block_tables"][:rows, :columns] = batch.block_tables
            static["slots"].copy_(batch.slots)
            static["cu_seqlens_q"].copy_(batch.cu_seqlens)
            static["seq_lens"].copy_(batch.seq_lens)
            out.fill_(float("nan"))
            graph.replay()
            place.assert_close(out, batch.exact)
        for rows in (1, 2, 3, 16, 17):
            batch = make_batch([16] * rows, [rows] * rows, **shapes)
            packed = torch.cat([batch.slots[:1], batch.slots, batch.seq_lens])  # odd addresses
            run(batch, max_query_len=40, slots=packed[1 : 1 + rows], seq_lens=packed[1 + rows :])
        assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled
