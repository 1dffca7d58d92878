from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels import paged_mixed_attention as module
from shared.kernels.paged_decode_attention import DecodeWorkspace, rows_block
from shared.kernels.paged_mixed_attention import (
    attend_apart,
    paged_mixed_attention,
    paged_mixed_attention_triton,
)
from shared.kernels.paged_prefill_attention import wants_wide_tile
from tests.kernels.paged_batch import PagedBatch, make_batch
from tests.kernels.place import Place


def make_workspace(batch: PagedBatch, num_sms: int) -> DecodeWorkspace:
    num_rows, (_, num_heads, head_dim) = batch.seq_lens.shape[0], batch.q.shape
    return DecodeWorkspace.allocate(
        num_rows, num_heads, batch.k_cache.shape[2], head_dim, batch.q.device, num_sms
    )


def run(batch: PagedBatch, num_decode_rows: int, **changes: object) -> torch.Tensor:
    arguments = {
        "q": batch.q,
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "block_tables": batch.block_tables,
        "slots": batch.slots,
        "cu_seqlens_q": batch.cu_seqlens,
        "seq_lens": batch.seq_lens,
        "num_decode_rows": num_decode_rows,
        "scale": batch.scale,
        "workspace": make_workspace(batch, 2),
    }
    return paged_mixed_attention_triton(**{**arguments, **changes})


@pytest.mark.parametrize("function", [paged_mixed_attention, attend_apart])
def test_in_one_call_and_in_two(function: Callable[..., torch.Tensor]) -> None:
    """Of the references without Triton; of the kernels in its interpreter."""
    torch.manual_seed(0)
    batch = make_batch(
        [1, 1, 5, 40],
        [30, 0, 21, 0],
        device=torch.device("cpu"),
        dtype=torch.float32,
        padding_tokens=3,
    )
    batch.k_cache.nan_to_num_()
    batch.v_cache.nan_to_num_()
    out = function(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.slots,
        batch.cu_seqlens,
        batch.seq_lens,
        2,
        batch.max_query_len,
        batch.scale,
    )
    torch.testing.assert_close(out.double(), batch.exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "block_size, num_kv_heads, group, head_dim",
    [
        (16, 2, 1, 16),
        (16, 2, 2, 64),
        (16, 1, 3, 128),
        (64, 1, 8, 128),
        (256, 2, 4, 128),
        (16, 1, 32, 64),
        (16, 1, 2, 256),
    ],
)
@pytest.mark.parametrize("num_sms", [1, 16])
def test_decodes_before_chunks(
    place: Place,
    poison_empty: None,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_sms: int,
) -> None:
    batch = make_batch(
        [1, 1, 1, 33, 70, 7],
        [70, 0, 300, 0, 40, 90],
        device=place.device,
        dtype=place.dtype,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
    )
    place.assert_close(run(batch, 3, workspace=make_workspace(batch, num_sms)), batch.exact)


def test_padding_on_either_side(place: Place, poison_empty: None) -> None:
    """Empty decode rows before the boundary, as a graph fills up; empty rows and tokens behind."""
    batch = make_batch(
        [1, 1, 1, 20],
        [0, 40, 90, 30],
        device=place.device,
        dtype=place.dtype,
        padding_rows=5,
        padding_tokens=150,
    )
    batch.seq_lens[0] = 0
    batch.exact[0] = 0
    batch.q[23:] = float("nan")
    out = run(batch, 3)
    place.assert_close(out, batch.exact)
    assert not out[0].any()
    assert not out[23:].any()


@pytest.mark.parametrize(
    "num_decodes, num_sms, group, rows_looked_at", [(9, 1, 3, 0), (9, 2, 5, 32), (40, 100, 1, 128)]
)
def test_every_way_to_find_a_split(
    place: Place,
    poison_empty: None,
    num_decodes: int,
    num_sms: int,
    group: int,
    rows_looked_at: int,
) -> None:
    assert rows_block(num_decodes, 1, num_sms) == rows_looked_at
    batch = make_batch(
        [1] * num_decodes + [20],
        [17 * i % 90 for i in range(num_decodes)] + [30],
        device=place.device,
        dtype=place.dtype,
        num_kv_heads=1,
        group=group,
        head_dim=16,
        padding_rows=2,
        padding_tokens=9,
    )
    workspace = make_workspace(batch, num_sms)
    place.assert_close(run(batch, num_decodes, workspace=workspace), batch.exact)
    assert not workspace.arrivals.any()


def test_workspace_is_clean_after_every_call(place: Place) -> None:
    workspace = DecodeWorkspace.allocate(6, 4, 2, 64, place.device, 12)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    for contexts in ([299, 0, 519, 130], [700, 20], [4]):
        batch = make_batch(
            [1] * len(contexts) + [9],
            [*contexts, 12],
            device=place.device,
            dtype=place.dtype,
        )
        place.assert_close(run(batch, len(contexts), workspace=workspace), batch.exact)
        assert not workspace.arrivals.any()


def test_too_many_decodes_for_the_workspace_is_an_error(place: Place) -> None:
    batch = make_batch([1, 1, 1, 4], [4, 5, 6, 0], device=place.device, dtype=place.dtype)
    with pytest.raises(ValueError, match="workspace"):
        run(batch, 3, workspace=DecodeWorkspace.allocate(2, 4, 2, 64, place.device, 1))


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    contexts=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 20)),
    group=st.integers(1, 6),
    num_sms=st.integers(1, 20),
)
def test_any_batch(
    place: Place,
    contexts: list[int],
    chunks: list[tuple[int, int]],
    padding: tuple[int, int],
    group: int,
    num_sms: int,
) -> None:
    batch = make_batch(
        [1] * len(contexts) + [new for new, _ in chunks],
        contexts + [old for _, old in chunks],
        device=place.device,
        dtype=place.dtype,
        num_kv_heads=1,
        group=group,
        head_dim=16,
        padding_rows=padding[0],
        padding_tokens=padding[1],
    )
    out = run(batch, len(contexts), workspace=make_workspace(batch, num_sms))
    place.assert_close(out, batch.exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    shapes: ClassVar = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "group": 4,
        "head_dim": 128,
    }

    @pytest.mark.parametrize("chunk", [513, 4000])
    def test_long_contexts_and_either_tile(self, chunk: int) -> None:
        torch.manual_seed(0)
        place = Place(self.shapes["device"], torch.bfloat16)
        batch = make_batch(
            [1] * 5 + [chunk], [16000, 17, 0, 3000, 255, 1500], num_kv_heads=8, **self.shapes
        )
        if torch.cuda.get_device_capability()[0] == 9:
            assert wants_wide_tile(batch.q[5:], batch.k_cache, 1, chunk) == (chunk == 4000)
        out = paged_mixed_attention(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.block_tables,
            batch.slots,
            batch.cu_seqlens,
            batch.seq_lens,
            5,
            chunk,
            batch.scale,
        )
        place.assert_close(out, batch.exact)

    def test_graph_replays_other_lengths_without_compiling(self) -> None:
        torch.manual_seed(0)
        place = Place(self.shapes["device"], torch.bfloat16)
        batches = [
            make_batch([1, 1, 40], contexts, num_blocks=300, **self.shapes)
            for contexts in ([3000, 20, 100], [7, 1500, 900])
        ]
        columns = max(batch.block_tables.shape[1] for batch in batches)
        for batch in batches:
            short = columns - batch.block_tables.shape[1]
            batch.block_tables = torch.nn.functional.pad(batch.block_tables, (0, short))
        static = make_batch([1, 1, 40], [0, 0, 0], num_blocks=300, **self.shapes)
        static.block_tables = torch.zeros_like(batches[0].block_tables)
        workspace = make_workspace(static, 132)
        run(static, 2, workspace=workspace)
        kernel = module._paged_mixed_attention_kernel
        compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(static, 2, workspace=workspace)
        for batch in batches:
            for name in ("q", "k_cache", "v_cache", "block_tables", "slots", "seq_lens"):
                getattr(static, name).copy_(getattr(batch, name))
            out.fill_(float("nan"))
            graph.replay()
            place.assert_close(out, batch.exact)
        for rows in (1, 2, 3, 16, 17):
            batch = make_batch([1] * rows + [16], [rows] * (rows + 1), **self.shapes)
            packed = torch.cat([batch.slots[:1], batch.slots, batch.seq_lens])  # odd addresses
            slots, seq_lens = packed[1 : 2 + rows], packed[2 + rows :]
            run(batch, rows, workspace=make_workspace(batch, 132), slots=slots, seq_lens=seq_lens)
        assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled
