"""Record a step's kernels once, replay them with one launch.

A decode step of a small model is hundreds of kernels of a few microseconds: launched one by one
from Python, the GPU waits most of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch


def graph_sizes(largest: int) -> list[int]:
    """Sizes to capture: dense where padding would cost most, and always covering `largest`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, largest, 16)]
    return [size for size in sizes if size < largest] + [largest]


class GraphedFunction:
    """`function(size)` captured for several sizes. It must read its inputs from, and write its
    outputs to, the same addresses every time, and never wait for the device.

    `clear_inputs` makes the inputs harmless before `function` runs on whatever is there.
    """

    def __init__(
        self, function: Callable[[int], None], clear_inputs: Callable[[], None], sizes: list[int]
    ) -> None:
        self.sizes = sizes
        self._clear_inputs = clear_inputs
        self._function = function
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, pool: Any, sizes: list[int]) -> None:
        """Largest first, so that the others fit into the memory it leaves in the pool. The graphs
        of one pool must not run at the same time; steps never do."""
        for size in sorted(sizes, reverse=True):
            self._clear_inputs()
            self._function(size)  # compiles kernels and creates handles, which capture may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._function(size)
            self._graphs[size] = graph

    def size_for(self, count: int) -> int | None:
        """The smallest captured size that holds `count`; None: too many."""
        index = bisect_left(self.sizes, count)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()

    def clear(self) -> None:
        self._graphs.clear()

    def describe(self) -> str:
        return f"{len(self.sizes)} sizes from {self.sizes[0]} to {self.sizes[-1]} rows"


def capture_all(functions: list[GraphedFunction]) -> int:
    """Capture every size of every function in one memory pool; returns the bytes it took."""
    before = _memory_in_use()
    pool = torch.cuda.graph_pool_handle()
    for function in functions:
        function.capture(pool, function.sizes)
    return _memory_in_use() - before


def estimate_bytes(functions: list[GraphedFunction]) -> int:
    """What `capture_all` will take, from the two largest sizes of each: the first pays for the
    memory that all share, the second for what each graph adds. Captures are dropped again."""
    total = 0
    for function in functions:
        pool = torch.cuda.graph_pool_handle()
        used = [_memory_in_use()]
        for size in function.sizes[-1:-3:-1]:
            function.capture(pool, [size])
            used.append(_memory_in_use())
        first = used[1] - used[0]
        each = used[-1] - used[1]
        total += first + each * (len(function.sizes) - 1)
        function.clear()
    torch.cuda.empty_cache()
    return total


def _memory_in_use() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
