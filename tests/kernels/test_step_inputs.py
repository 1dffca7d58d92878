"""The first and the last small steps around a forward pass: inputs made whole, rows gathered."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.gather_rows import gather_rows, gather_rows_reference, gather_rows_triton
from shared.kernels.step_inputs import (
    resolve_step_inputs,
    resolve_step_inputs_reference,
    resolve_step_inputs_triton,
)
from tests.kernels.place import Place


@pytest.mark.parametrize("width", [16, 100, 1024, 3000])
@pytest.mark.parametrize("first", [0, 7])
def test_gather_rows(place: Place, poison_empty: None, width: int, first: int) -> None:
    source = place.randn(9, width)
    index = torch.tensor([8, 0, 3, 15, 3], dtype=torch.int32, device=place.device)
    assert torch.equal(
        gather_rows_triton(source, index, first), gather_rows_reference(source, index, first)
    )


def test_rows_that_are_elsewhere_are_zero() -> None:
    source = torch.ones(3, 2)
    index = torch.tensor([4, 5, 7, 8], dtype=torch.int32)
    assert gather_rows(source, index, first=5).tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("num_tokens, num_updates", [(1, 1), (300, 2), (5, 300), (256, 256)])
def test_resolve_step_inputs(place: Place, num_tokens: int, num_updates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-20, 100, (num_tokens,), generator=generator, dtype=torch.int32)
    sampled = torch.arange(1000, 1020, dtype=torch.int32)
    tables = torch.zeros(20, 40, dtype=torch.int32)
    index = torch.randperm(800, generator=generator)[:num_updates].int()
    index[num_updates // 2 :] = -1
    blocks = torch.arange(num_updates, dtype=torch.int32)
    expected_tables = tables.clone()
    expected = resolve_step_inputs_reference(ids, sampled, expected_tables, index, blocks)
    on_device = [x.to(place.device) for x in (ids, sampled, tables, index, blocks)]
    got = resolve_step_inputs_triton(*on_device)
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(on_device[2].cpu(), expected_tables)


def test_ids_in_flight_come_from_their_slots() -> None:
    ids = torch.tensor([5, -1, -3], dtype=torch.int32)
    sampled = torch.tensor([70, 71, 72], dtype=torch.int32)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    index = torch.tensor([3, -1], dtype=torch.int32)
    blocks = torch.tensor([9, 0], dtype=torch.int32)
    assert resolve_step_inputs(ids, sampled, tables, index, blocks).tolist() == [5, 70, 72]
    assert tables.tolist() == [[0, 0], [0, 9]]
