"""Linear layers that know which slice of a checkpoint's tensor they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shared.kernels.small_batch_linear import (
    ResidualStream,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
)
from shared.layers.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from shared.layers.norm import RMSNorm


@dataclass(frozen=True)
class WeightTarget:
    """Where one checkpoint tensor goes.

    `shape` is the whole tensor in the file. `load` takes anything that slices like a tensor (a
    torch tensor or a safetensors slice) and copies this rank's part, converting device and dtype.
    """

    shape: tuple[int, ...]
    load: Callable[[Any], object]


@dataclass(frozen=True)
class Rows:
    """The rows [start, start + size) of a checkpoint tensor with `total` rows."""

    total: int
    start: int
    size: int

    @classmethod
    def split(cls, total: int, tp: TensorParallel, what: str) -> Rows:
        size = tp.split(total, what)
        return cls(total, tp.rank * size, size)

    @classmethod
    def split_padded(cls, total: int, tp: TensorParallel) -> tuple[Rows, int]:
        """Equal shares of `total` rounded up to a multiple of the ranks: the rows that are there
        of this rank's share, at the last ranks fewer than the share's size, and that size."""
        share = -(-total // tp.size)
        start = min(tp.rank * share, total)
        return cls(total, start, min(share, total - start)), share


def empty_weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def whole(parameter: nn.Parameter) -> WeightTarget:
    """A tensor every rank holds whole."""
    return WeightTarget(tuple(parameter.shape), lambda source: parameter.copy_(source[:]))


def some_rows(view: torch.Tensor, rows: Rows) -> WeightTarget:
    """Some rows of a [total, columns] tensor, into `view` [size, columns] of a parameter."""
    end = rows.start + rows.size
    return WeightTarget(
        (rows.total, view.shape[1]), lambda source: view.copy_(source[rows.start : end])
    )


class ColumnParallelLinear(nn.Module):
    """Several projections of the same normed input in one matrix product; each is cut by output
    rows.

    forward: stream of [T, input_size] -> [T, sum of this rank's rows], the projections of its norm
    side by side, and its sum.
    """

    def __init__(self, input_size: int, parts: list[Rows], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = parts
        self.weight = empty_weight(sum(part.size for part in parts), input_size, dtype=dtype)

    def weight_targets(self, names: list[str]) -> dict[str, WeightTarget]:
        """One checkpoint tensor per projection."""
        views = self.weight.split([part.size for part in self.parts])
        return {
            name: some_rows(view, part)
            for name, view, part in zip(names, views, self.parts, strict=True)
        }

    def forward(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_linear(stream, norm.weight, norm.eps, self.weight)


class GateUpLinear(ColumnParallelLinear):
    """Two projections of one size, gate and up, and the activation that joins them.

    forward: stream of [T, input_size] -> silu(gate) * up of its norm [T, this rank's rows of one],
    and its sum.
    """

    def forward(self, stream: ResidualStream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_gate_up(stream, norm.weight, norm.eps, self.weight)


class RowParallelLinear(nn.Module):
    """Cut by input columns; the ranks' partial products are summed.

    forward: [T, input_size / size] and the residual [T, output_size] -> a stream of that size.
    """

    def __init__(
        self, input_size: int, output_size: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.columns = Rows.split(input_size, tp, "input_size")
        self.weight = empty_weight(output_size, self.columns.size, dtype=dtype)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        begin, end = self.columns.start, self.columns.start + self.columns.size
        shape = (self.weight.shape[0], self.columns.total)
        load = lambda source: self.weight.copy_(source[:, begin:end])  # noqa: E731
        return {name: WeightTarget(shape, load)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> ResidualStream:
        if self.tp.size == 1:
            return linear_add(x, self.weight, residual)
        return ResidualStream(self.tp.all_reduce(linear(x, self.weight)), residual)
