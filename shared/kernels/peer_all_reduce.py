"""Sums over the ranks of one machine, for messages too small for NCCL to be quick with.

A decode step of tensor-parallel ranks adds up a few kilobytes twice per layer, and the next kernel
waits for every one of these sums. What they cost is not bytes but the number of times that ranks
wait for each other:

    NCCL                            launches, and asks for permission before it sends
    reading from the others         their data is there -> read it -> I am done with it
    writing to the others (here)    write it -> it is there

Every rank writes its summand into memory of the others, which NVLink makes a plain store, and then
looks at its own memory until theirs have come. The data is its own signal: memory that waits for
data holds a value that no sum needs, minus zero, and a rank is done when none is left (the idea of
NCCL's LL protocol and of the Lamport-style all-reduce of TensorRT-LLM). Everyone adds in the order
of the ranks, in float32: the same sum on all of them, to the bit.

There are two sets of places, used in turn. Whoever writes to a place a second time has read the
others' data of the sum in between, and that was sent after they had emptied the place.

The kernel overlaps with its neighbours (see `overlaps`): the next product requests its weights
while the summands travel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from shared.kernels._triton import jit, overlaps, tl, triton

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What a rank sends to all others together. Up to here this is faster than NCCL on two H200s
# (bench/results/all_reduce_h200.json).
MOST_BYTES = 16 << 20
# Bytes of a program. Places belong to programs, so this is the same in every call, of any type.
_PROGRAM_BYTES = 2048
# -0.0 of both 16-bit formats; twice, a float32 next to zero.
_EMPTY = {2: -0x8000, 4: -0x7FFF8000}


def _place_bytes(size: int) -> int:
    """For a summand of one rank: whole programs."""
    return MOST_BYTES // (size - 1) // _PROGRAM_BYTES * _PROGRAM_BYTES


class PeerAllReduce:
    """One rank's side of it. All ranks call it in the same order, with the same shapes."""

    def __init__(self, rank: int, memory: torch.Tensor, addresses: Sequence[int]) -> None:
        """`memory` uint8 [`num_bytes(size)`], which all ranks can reach; `addresses`: where this
        process finds every rank's, in rank order."""
        self.rank = rank
        self.size = len(addresses)
        self._place = _place_bytes(self.size)
        self._memory = memory
        memory.view(torch.int16).fill_(_EMPTY[2])
        device = memory.device
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Of each program, how often it has run: which of its places is next.
        count = self._place // _PROGRAM_BYTES
        self._epochs = torch.zeros(count, dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(size: int) -> int:
        """Of a rank's memory, in a group of so many ranks."""
        return 2 * size * _place_bytes(size)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, device: torch.device) -> PeerAllReduce | None:
        """Of the ranks of a group, which all call this. None, on all of them, where a GPU cannot
        reach another's memory."""

        def on_all(step: Callable[[], T]) -> T | None:
            result = None
            try:
                result = step()
            except (ImportError, RuntimeError) as error:
                logger.warning("sums over ranks use NCCL: %s", error)
            works = torch.tensor(int(result is not None), device=device)
            dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
            return result if int(works) else None

        def allocate() -> torch.Tensor:
            if triton is None:
                raise ImportError("Triton is not installed")
            # Multicast sums within the switch. Nothing here needs it, and not every host has it.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            from torch.distributed._symmetric_memory import empty

            memory: torch.Tensor = empty(
                cls.num_bytes(group.size()), dtype=torch.uint8, device=device
            )
            return memory

        def exchange() -> PeerAllReduce:
            from torch.distributed._symmetric_memory import rendezvous

            assert memory is not None
            return cls(group.rank(), memory, rendezvous(memory, group).buffer_ptrs)

        # A rank alone in the second step would be waited for; after it, all places are empty.
        memory = on_all(allocate)
        return None if memory is None else on_all(exchange)

    def takes(self, x: torch.Tensor) -> bool:
        return (
            x.nbytes <= self._place
            and x.element_size() in _EMPTY
            and x.numel() % 8 == 0
            and x.is_contiguous()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        overlap = overlaps(x)
        _peer_all_reduce_kernel[(-(-x.nbytes // _PROGRAM_BYTES),)](
            x,
            self._addresses,
            self._epochs,
            x.numel() // 8,
            self.rank,
            self.size,
            self._place // x.element_size(),
            _EMPTY[x.element_size()],
            tl.int16 if x.element_size() == 2 else tl.int32,
            _PROGRAM_BYTES // x.element_size(),
            overlap,
            num_warps=4,
            launch_pdl=overlap,
            enable_fp_fusion=True,
        )
        return x


@jit(integers=("num_eights",))
def _peer_all_reduce_kernel(
    x_ptr,
    addresses_ptr,
    epochs_ptr,
    num_eights,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    EMPTY: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_eights * 8
    dtype = x_ptr.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    epoch = tl.load(epochs_ptr + program)
    places = (epoch & 1) * (SIZE * CAPACITY) + offsets
    mine = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    bits = mine.to(WORD, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    mine = bits.to(dtype, bitcast=True)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(addresses_ptr + peer).to(tl.pointer_type(WORD))
            theirs = tl.multiple_of(theirs, 16)
            tl.store(theirs + RANK * CAPACITY + places, bits, mask=inside)
    here = tl.load(addresses_ptr + RANK).to(tl.pointer_type(WORD))
    here = tl.multiple_of(here, 16)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += mine.to(tl.float32)  # as it was sent
        else:
            place = here + peer * CAPACITY + places
            # Volatile: past every cache that another GPU's stores do not reach.
            bits = tl.load(place, mask=inside, other=0, volatile=True)
            while tl.max((bits == EMPTY).to(tl.int32), axis=0) > 0:
                bits = tl.load(place, mask=inside, other=0, volatile=True)
            total += bits.to(dtype, bitcast=True).to(tl.float32)
            tl.store(place, tl.full([BLOCK], EMPTY, WORD), mask=inside)
    tl.store(x_ptr + offsets, total.to(dtype), mask=inside)
    tl.store(epochs_ptr + program, epoch + 1)
