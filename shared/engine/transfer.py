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
