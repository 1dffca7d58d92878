"""Record a step's kernels once, replay them with one launch.

A step of a small model is hundreds of kernels of a few microseconds: launched one by one from
Python, the GPU waits most of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from shared.engine.batch import Batch

# Steps of more tokens are bound by arithmetic, behind which their launches hide: with a model of
# 0.6B from twice as many on (bench/results/sweep_budget_h200.json).
MAX_GRAPH_TOKENS = 2048

_MIXED_TOKENS = (
    *(32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, MAX_GRAPH_TOKENS),
)  # fmt: skip
# A boundary between decodes and chunks costs a set of graphs, an empty row next to nothing.
_ROWS = (8, 32, 128)
# Chunks behind the boundary: steps have few, since a chunk has many tokens.
CHUNK_ROWS = 16


@dataclass(frozen=True)
class StepShape:
    """What the kernels of a trunk are launched for, padding included."""

    tokens: int
    rows: int
    decode_rows: int
    """The first rows, one token each, which attention computes as decodes."""


def graph_sizes(largest: int) -> list[int]:
    """Sizes to capture: dense where padding would cost most, and always covering `largest`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest, 16)]
    return [size for size in sizes if size < largest] + [largest]


class StepShapes:
    """The shapes of trunk graphs, and the choice of one for a batch.

    Decodes alone have shapes by their number; anything else by tokens, decode rows and rows.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, with_prefills: bool, with_boundary: bool
    ) -> None:
        """`with_prefills`: also batches that are not decodes alone, up to MAX_GRAPH_TOKENS;
        `with_boundary`: also those with decode rows in front."""
        self._decodes = graph_sizes(max_rows)
        self._tokens: list[int] = []
        if with_prefills:
            most = min(max_tokens, MAX_GRAPH_TOKENS)
            self._tokens = [n for n in _MIXED_TOKENS if n < most] + [most]
        self._rows = [n for n in _ROWS if n < max_rows] + [max_rows]
        self._boundaries = [0, *(self._rows if with_boundary else ())]
        shapes = {StepShape(n, n, n) for n in self._decodes}
        for tokens in self._tokens:
            for boundary in self._boundaries:
                for rows in [boundary + CHUNK_ROWS] if boundary else self._rows:
                    if boundary < tokens:
                        shapes.add(StepShape(tokens, rows, boundary))
        self.all = sorted(shapes, key=lambda s: (s.tokens, s.rows, s.decode_rows))

    def fit(self, batch: Batch) -> StepShape | None:
        """The smallest shape that holds the batch, with as many decodes in front as one can have;
        None: no graph does."""
        decodes, rows = batch.num_decode_rows, batch.num_rows
        if decodes == rows:
            size = _at_least(self._decodes, rows)
            return None if size is None else StepShape(size, size, size)
        # Padding up to the next boundary keeps every decode in front of it. Where that takes too
        # many rows or tokens, some decodes go behind one: slower attention, but still one launch.
        above = bisect_left(self._boundaries, decodes)
        for boundary in (*self._boundaries[above : above + 1], *self._boundaries[:above][::-1]):
            empty = max(boundary - decodes, 0)
            tokens = _at_least(self._tokens, batch.num_tokens + empty)
            behind = [boundary + CHUNK_ROWS] if boundary else self._rows
            shape_rows = _at_least(behind, rows + empty)
            if tokens is not None and shape_rows is not None:
                return StepShape(tokens, shape_rows, boundary)
        return None

    def describe(self) -> str:
        text = f"decodes: {len(self._decodes)} sizes to {self._decodes[-1]} rows"
        if self._tokens:
            others = len(self.all) - len(self._decodes)
            text += f"; with prefills: {others} shapes to {self._tokens[-1]} tokens"
        return text


def _at_least(sizes: Sequence[int], count: int) -> int | None:
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


Shape = TypeVar("Shape")


class GraphedFunction(Generic[Shape]):
    """`function(shape)` captured for several shapes. It must read its inputs from, and write its
    outputs to, the same addresses every time, and never wait for the device.

    `shapes` from the smallest to the largest. `clear_inputs` makes the inputs harmless before
    `function` runs on whatever is there.
    """

    def __init__(
        self,
        function: Callable[[Shape], None],
        clear_inputs: Callable[[], None],
        shapes: Sequence[Shape],
    ) -> None:
        self.shapes = shapes
        self._clear_inputs = clear_inputs
        self._function = function
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, pool: Any, shapes: Sequence[Shape]) -> None:
        """Largest first, so that the others fit into the memory it leaves in the pool. The graphs
        of one pool must not run at the same time; steps never do."""
        for shape in reversed(shapes):
            self._clear_inputs()
            self._function(shape)  # compiles kernels and creates handles, which capture may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._function(shape)
            self._graphs[shape] = graph

    def replay(self, shape: Shape) -> None:
        self._graphs[shape].replay()

    def clear(self) -> None:
        self._graphs.clear()


def capture_all(functions: Sequence[GraphedFunction[Any]]) -> int:
    """Capture every shape of every function in one memory pool; returns the bytes it took."""
    before = _memory_in_use()
    pool = torch.cuda.graph_pool_handle()
    for function in functions:
        function.capture(pool, function.shapes)
    return _memory_in_use() - before


def estimate_bytes(functions: Sequence[GraphedFunction[Any]]) -> int:
    """What `capture_all` will take, from the two largest shapes of each: the first pays for the
    memory that all share, the second for what each graph adds. Captures are dropped again."""
    total = 0
    for function in functions:
        pool = torch.cuda.graph_pool_handle()
        used = [_memory_in_use()]
        for shape in function.shapes[-1:-3:-1]:
            function.capture(pool, [shape])
            used.append(_memory_in_use())
        first = used[1] - used[0]
        each = used[-1] - used[1]
        total += first + each * (len(function.shapes) - 1)
        function.clear()
    torch.cuda.empty_cache()
    return total


def _memory_in_use() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
