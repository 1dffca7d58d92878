"""Sums over ranks: in the interpreter one rank, the others' summands there before it looks; on a
GPU several ranks on streams of their own, which really wait for each other."""

from __future__ import annotations

import pytest
import torch

from shared.kernels import peer_all_reduce
from shared.kernels.peer_all_reduce import PeerAllReduce
from tests.kernels.place import Place

SHAPES = [(1, 64), (3, 1024), (2, 96), (40, 64)]


@pytest.fixture(autouse=True)
def small_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_all_reduce, "MOST_BYTES", 32 << 10)


def ranks_of(size: int, device: torch.device) -> list[PeerAllReduce]:
    count = PeerAllReduce.num_bytes(size)
    memories = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(size)]
    addresses = [memory.data_ptr() for memory in memories]
    return [PeerAllReduce(rank, memory, addresses) for rank, memory in enumerate(memories)]


def places(rank: PeerAllReduce, dtype: torch.dtype) -> torch.Tensor:
    """[2, size, elements]"""
    return rank._memory.view(dtype).view(2, rank.size, -1)


def is_empty(places: torch.Tensor) -> bool:
    words = places.view(torch.int16 if places.element_size() == 2 else torch.int32)
    return bool((words == peer_all_reduce._EMPTY[places.element_size()]).all())


def summands(shape: tuple[int, int], size: int, place: Place) -> list[torch.Tensor]:
    values = [torch.randn(shape, device=place.device).to(place.dtype) for _ in range(size)]
    values[0][0, :3] = -0.0
    values[-1][0, 1:5] = -0.0
    return values


def expected(values: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(values[0], dtype=torch.float32)
    for value in values:
        total += value.float()
    return total.to(values[0].dtype)


def in_use(rank: PeerAllReduce, values: torch.Tensor, sender: int) -> list[torch.Tensor]:
    """Where the parts of a summand of `sender` arrive at this rank's next call."""
    sides = (rank._epochs & 1).tolist()
    block = peer_all_reduce._PROGRAM_BYTES // values.element_size()
    begins = range(0, values.numel(), block)
    of_sender = places(rank, values.dtype)[:, sender, : values.numel()]
    return [
        of_sender[side, begin : begin + block] for begin, side in zip(begins, sides, strict=False)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank(place: Place, size: int) -> None:
    """What it sends, what it makes of what was sent, and what it leaves."""
    ranks = ranks_of(size, place.device)
    me, others = ranks[1], [0, *range(2, size)]
    for shape in [*SHAPES, SHAPES[0], SHAPES[1]]:
        values = summands(shape, size, place)
        # Nobody sends -0.0, and no sum needs it.
        for rank in others:
            for part, sent in zip(in_use(me, values[rank], rank), split(values[rank]), strict=True):
                part[:] = sent + 0.0
        arrivals = {}
        for rank in others:
            ranks[rank]._epochs[:] = me._epochs
            arrivals[rank] = in_use(ranks[rank], values[1], 1)
        before, mine = me._epochs.clone(), values[1].clone()
        assert me.takes(mine)
        assert me(mine) is mine
        assert torch.equal(mine, expected(values))
        assert is_empty(places(me, place.dtype))
        ran = len(split(mine))
        assert (me._epochs - before).tolist() == [1] * ran + [0] * (len(before) - ran)
        for rank in others:
            for part, sent in zip(arrivals[rank], split(values[1]), strict=True):
                assert torch.equal(part, sent + 0.0)
                part.view(torch.int16)[:] = peer_all_reduce._EMPTY[2]
            assert is_empty(places(ranks[rank], place.dtype))


def split(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.flatten().split(peer_all_reduce._PROGRAM_BYTES // values.element_size()))


def test_what_it_takes(place: Place) -> None:
    rank = ranks_of(2, place.device)[0]
    x = torch.empty(8, 64, dtype=place.dtype, device=place.device)
    assert rank.takes(x)
    assert not rank.takes(x[:, :32])
    assert not rank.takes(x.double())
    assert not rank.takes(x[0, :7])
    assert not rank.takes(x.new_empty(65, 128).expand(2, 65, 128).reshape(-1, 128))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_wait_for_each_other(size: int) -> None:
    """Whatever types and shapes follow each other."""
    torch.manual_seed(0)
    ranks = ranks_of(size, torch.device("cuda"))
    streams = [torch.cuda.Stream() for _ in ranks]
    wanted, got = [], []
    for turn in range(60):
        dtype = torch.float32 if turn % 3 == 2 else torch.bfloat16
        place = Place(torch.device("cuda"), dtype)
        values = summands(SHAPES[turn % len(SHAPES)], size, place)
        wanted.append(expected(values))
        got.append(values)
    torch.cuda.synchronize()
    for values in got:
        for rank, stream, value in zip(ranks, streams, values, strict=True):
            with torch.cuda.stream(stream):
                rank(value)
    torch.cuda.synchronize()
    for values, right in zip(got, wanted, strict=True):
        for value in values:
            assert torch.equal(value, right)
