"""Triton where it is installed. Without it (CPU-only installs, macOS) the kernels below their
references stay plain functions that nobody calls, and every module still imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


def jit(*, integers: Sequence[str] = (), metadata: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Decorator for a kernel whose compiled form depends on constexprs and dtypes only.

    Triton compiles a new variant when an integer becomes 1 or divisible by 16, and when a pointer
    gains or loses 16-byte alignment: a pause in the middle of service. `integers` names every
    run-time integer; `metadata` every pointer whose address moves by single elements (slices of a
    packed block, `seq_lens[n:]`). The pointers left out are rows of tensors whose row size is a
    multiple of 16 bytes: their alignment never changes, and knowing it makes loads 16 bytes wide.

    Launches say `enable_fp_fusion=True` (a * b + c in one instruction): Triton 3.9 warns that the
    default will change.
    """

    def decorate(function: Any) -> Any:
        if triton is None:
            return function
        return triton.jit(
            do_not_specialize=list(integers), do_not_specialize_on_alignment=list(metadata)
        )(function)

    return decorate


def runs_on_triton(x: torch.Tensor) -> bool:
    """Public functions use Triton on CUDA tensors and the reference everywhere else."""
    return x.is_cuda and triton is not None


def overlaps(x: torch.Tensor) -> bool:
    """Whether kernels on x's device overlap (programmatic dependent launch: Hopper and later).

    A kernel launched with `launch_pdl=True` may start as soon as every program of the kernel
    before it has called `gdc_launch_dependents` or ended. It reads weights and tables, which no
    kernel near it writes, and then calls `gdc_wait`, which returns when the kernel before has
    ended and its writes can be seen. The rules that keep a chain of such kernels in order:

    - inputs are read, and anything at all is written, only after `gdc_wait`;
    - in every kernel some program waits, whatever the batch: that a kernel has ended then means
      that all before it have. Kernels launched without the option always wait.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
