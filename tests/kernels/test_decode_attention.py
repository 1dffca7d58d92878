from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels import paged_decode_attention as module
from shared.kernels._triton import jit, tl
from shared.kernels.paged_decode_attention import (
    DecodeWorkspace,
    choose_splits,
    choose_tile,
    paged_decode_attention,
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)
from tests.kernels.paged_batch import PagedBatch, make_batch
from tests.kernels.place import Place


def make_decodes(place: Place, lengths: list[int], **shapes: int) -> PagedBatch:
    """One query per sequence; length 0 is a padding row."""
    padding = lengths.count(0)
    real = [length for length in lengths if length]
    return make_batch(
        [1] * len(real),
        [length - 1 for length in real],
        device=place.device,
        dtype=place.dtype,
        padding_rows=padding,
        padding_tokens=padding,
        **shapes,
    )


def run(batch: PagedBatch, num_sms: int = 2, **options: object) -> torch.Tensor:
    num_rows, num_heads, head_dim = batch.q.shape
    workspace = DecodeWorkspace.allocate(
        num_rows, num_heads, batch.k_cache.shape[2], head_dim, batch.q.device, num_sms
    )
    return paged_decode_attention_triton(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.slots,
        batch.seq_lens,
        batch.scale,
        **{"workspace": workspace, **options},
    )


def test_reference_matches_exact_attention() -> None:
    torch.manual_seed(0)
    place = Place(torch.device("cpu"), torch.float32)
    batch = make_decodes(place, [1, 16, 33, 5, 0, 0])
    batch.k_cache.nan_to_num_()
    batch.v_cache.nan_to_num_()
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.slots)
    out = paged_decode_attention_reference(*arguments, batch.seq_lens.tolist(), batch.scale)
    torch.testing.assert_close(out.double(), batch.exact, atol=1e-5, rtol=1e-5)
    public = paged_decode_attention(*arguments, batch.seq_lens, batch.scale)
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
        (16, 1, 32, 64),
        (16, 1, 2, 256),
    ],
)
@pytest.mark.parametrize("num_sms", [1, 16])
def test_lengths_and_splits(
    place: Place,
    poison_empty: None,
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_sms: int,
) -> None:
    batch = make_decodes(
        place,
        [1, 17, 128, 300],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
    )
    place.assert_close(run(batch, num_sms), batch.exact)


def test_padding_rows_are_zeros(place: Place, poison_empty: None) -> None:
    batch = make_decodes(place, [40, 200, 0, 0, 0])
    batch.q[2:] = float("nan")
    out = run(batch, 16)
    place.assert_close(out, batch.exact)
    assert not out[2:].any()
    assert not run(make_decodes(place, [0, 0])).any()


def test_more_splits_than_one_combining_step(place: Place, poison_empty: None) -> None:
    batch = make_decodes(place, [2500, 900], num_kv_heads=1, group=8, head_dim=128)
    place.assert_close(run(batch, 5), batch.exact)


def test_workspace_is_clean_after_every_call(place: Place) -> None:
    workspace = DecodeWorkspace.allocate(6, 4, 2, 64, place.device, 12)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    for lengths in ([300, 1, 0, 520, 130, 129], [700, 20], [4]):
        batch = make_decodes(place, lengths)
        out = torch.full_like(batch.q, float("nan"))
        assert run(batch, workspace=workspace, out=out) is out
        place.assert_close(out, batch.exact)
        assert not workspace.arrivals.any()


def test_too_many_rows_for_the_workspace_is_an_error(place: Place) -> None:
    batch = make_decodes(place, [4, 5, 6])
    with pytest.raises(ValueError, match="workspace"):
        run(batch, workspace=DecodeWorkspace.allocate(2, 4, 2, 64, place.device, 1))


@jit(integers=("num_rows", "min_split"))
def _list_splits(
    seq_lens_ptr,
    out_ptr,
    num_rows,
    min_split,
    NEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS_TRIED: tl.constexpr,
) -> None:
    unit, num_units = tl.program_id(0), tl.num_programs(0)
    row, first, count, split_len = module.find_split(
        seq_lens_ptr, unit, num_rows, num_units, min_split, NEW, BLOCK_N, ROWS, LENGTHS_TRIED
    )
    tl.store(out_ptr + 4 * unit, row)
    tl.store(out_ptr + 4 * unit + 1, first)
    tl.store(out_ptr + 4 * unit + 2, count)
    tl.store(out_ptr + 4 * unit + 3, split_len)


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(
    "lengths",
    [
        [3000] * 8,
        [5000, 1, 1, 1, 0, 0],
        [0],
        [40960],
        [64, 65, 1024, 17, 1, 4097],
        [100 * i for i in range(33)],
    ],
    ids=str,
)
def test_splits_cover_every_key_once_and_are_even(
    place: Place, lengths: list[int], splits: int, new: int
) -> None:
    rows, units, fewest = len(lengths), len(lengths) * splits, 32
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=place.device)
    out = torch.full((units, 4), -1, dtype=torch.int32, device=place.device)
    block, tried = module.rows_block(rows, 1, 132), module.LENGTHS_TRIED
    _list_splits[(units,)](seq_lens, out, rows, fewest, new, 16, block, tried)
    (split_len,) = set(out[:, 3].tolist())
    assert split_len % 16 == 0
    assert split_len >= fewest
    keys = [max(0, length - new) for length in lengths]
    # One for what every row leaves over, and one step of rounding.
    assert split_len <= max(fewest, sum(keys) / max(units - rows, 1) + 17)
    expected = []
    for row, count in enumerate(max(1, -(-n // split_len)) for n in keys):
        expected += [(row, len(expected), count)] * count
    assert len(expected) <= units
    assert [tuple(line[:3]) for line in out[: len(expected)].tolist()] == expected
    assert (out[len(expected) :, 0] >= rows).all()


def test_no_number_of_rows_meets_a_kernel_that_is_not_warmed_up() -> None:
    for num_sms in (78, 108, 132, 148):
        for num_kv_heads in (1, 2, 3, 4, 8):

            def variant(rows: int, heads: int = num_kv_heads, sms: int = num_sms) -> tuple:
                tile = choose_tile(128, 2, rows * heads / sms)
                return module.rows_block(rows, heads, sms), tile

            for most in (1, 16, 131, 140, 264, 512, 1024, 2000):
                warm = module.rows_to_warm_up(most, num_kv_heads, 128, num_sms)
                assert max(warm) == most
                known = {variant(rows) for rows in warm}
                assert known == {variant(rows) for rows in range(1, most + 1)}


def test_splits_fit_the_workspace_for_every_size() -> None:
    for num_sms in (1, 78, 132):
        for num_kv_heads in (1, 2, 3, 8):
            for rows in range(1, 600):
                device = torch.device("meta")
                workspace = DecodeWorkspace.allocate(
                    rows, num_kv_heads, num_kv_heads, 64, device, num_sms
                )
                for size in (2, 4):
                    tile = choose_tile(64, size, rows * num_kv_heads / num_sms)
                    splits, _ = choose_splits(
                        rows, num_kv_heads, 40960, num_sms, tile.programs_per_sm
                    )
                    assert rows * num_kv_heads * splits <= workspace.partial_out.shape[0]


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    num_sms=st.integers(1, 16),
    group=st.integers(1, 6),
)
def test_any_batch(place: Place, lengths: list[int], num_sms: int, group: int) -> None:
    batch = make_decodes(place, [*lengths, 0], num_kv_heads=1, group=group, head_dim=16)
    out = torch.full_like(batch.q, float("nan"))
    place.assert_close(run(batch, num_sms, out=out), batch.exact)


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class TestOnGpu:
    pytestmark = needs_gpu
    device = torch.device("cuda")

    def place(self) -> Place:
        torch.manual_seed(0)
        return Place(self.device, torch.bfloat16)

    def test_pool_offsets_beyond_int32(self) -> None:
        place = self.place()
        num_blocks = 2**31 // (16 * 2 * 128) + 4096
        batch = make_decodes(
            place,
            [90, 300],
            group=4,
            head_dim=128,
            num_blocks=num_blocks,
            first_block=num_blocks - 64,
        )
        assert batch.k_cache.numel() > 2**31
        place.assert_close(run(batch), batch.exact)

    def test_last_arriver_never_reads_stale_partials(self) -> None:
        """A race would show as a result that changes between runs."""
        place = self.place()
        batch = make_decodes(
            place, [4000, 3000, 129, 2049, 600, 50], num_kv_heads=8, group=4, head_dim=128
        )
        workspace = DecodeWorkspace.allocate(6, 32, 8, 128, self.device)
        first = run(batch, workspace=workspace)
        place.assert_close(first, batch.exact)
        outs = []
        for _ in range(300):
            workspace.partial_out.fill_(float("nan"))
            outs.append(run(batch, workspace=workspace))
        assert all(torch.equal(out, first) for out in outs)

    def test_graph_replays_other_lengths_without_compiling(self) -> None:
        place = self.place()
        kernel = module._paged_decode_attention_kernel
        workspace = DecodeWorkspace.allocate(32, 4, 2, 128, self.device)
        batch = make_decodes(place, [700, 300, 900], head_dim=128)
        run(batch, workspace=workspace)
        compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
        lengths = batch.seq_lens.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(batch, workspace=workspace)
        graph.replay()
        place.assert_close(out, batch.exact)
        batch.seq_lens.zero_()
        graph.replay()
        assert not out.any()
        batch.seq_lens.copy_(lengths)
        graph.replay()
        place.assert_close(out, batch.exact)
        for rows in (1, 2, 5, 16, 31):
            other = make_decodes(place, [200 + rows] * rows, head_dim=128)
            other.slots = torch.cat([other.slots[:1], other.slots])[1:]  # an odd address
            place.assert_close(run(other, workspace=workspace), other.exact)
        assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled
