"""Small copies between host and device that nobody waits for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


def upload(device: torch.device, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
    """The arrays on the device, by one copy. On CUDA it is asynchronous; torch keeps the pinned
    block from being used again before the copy has ended."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    block = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, offset in zip(arrays, offsets, strict=False):
        block.numpy()[offset : offset + array.nbytes].view(array.dtype)[:] = array
    on_device = block.to(device, non_blocking=True)
    return [
        on_device[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for array, offset in zip(arrays, offsets, strict=False)
    ]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueues the copy; it may be read once the stream has been synchronised."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class HostCopy:
    """Token ids on their way to the host."""

    def __init__(self, source: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._source = source
        self._ready = ready
        self._ids: npt.NDArray[np.int32] | None = None

    def read(self) -> npt.NDArray[np.int32]:
        """[K] int32. Waits until everything enqueued before the copy is done as well."""
        if self._ids is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._ids = self._source.numpy().copy()
        return self._ids


class HostCopies:
    """Two pinned buffers for the ids of steps, used in turn: torch's allocator of pinned memory
    would cost a step more time than the copy."""

    def __init__(self, max_ids: int, device: torch.device) -> None:
        self._pinned = self._events = None
        if device.type == "cuda":
            self._pinned = [torch.zeros(max_ids, dtype=torch.int32, pin_memory=True) for _ in "ab"]
            self._events = [torch.cuda.Event() for _ in "ab"]
        self._last: list[HostCopy | None] = [None, None]
        self._turn = 0

    def start(self, ids: torch.Tensor | None) -> HostCopy:
        """`ids` [K] int32; None: nothing to copy, but the end of the step to wait for."""
        if ids is None:
            ids = torch.empty(0, dtype=torch.int32)
        if self._pinned is None or self._events is None:
            return HostCopy(ids.clone(), None)  # a replayed graph writes where the last one did
        self._turn ^= 1
        if (last := self._last[self._turn]) is not None:
            last.read()  # only waits if more than two steps are in flight
        target = self._pinned[self._turn][: len(ids)]
        target.copy_(ids, non_blocking=True)
        self._events[self._turn].record()
        copy = HostCopy(target, self._events[self._turn])
        self._last[self._turn] = copy
        return copy
