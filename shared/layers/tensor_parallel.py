"""Which part of every layer this process holds (Megatron-LM, arXiv:1909.08053), and what it
exchanges with the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.kernels.peer_all_reduce import PeerAllReduce

# torch 2.13 has renamed it and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of a tensor-parallel group; the default is a group of one.

    All ranks call the same methods in the same order. On a GPU nothing here waits for the device,
    and all of it may be captured in CUDA graphs.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    peers: PeerAllReduce | None = None
    """Between GPUs that can write to each other's memory."""

    def split(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises ValueError naming `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} does not divide {what}={total}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.peers is not None and self.peers.takes(x):
            return self.peers(x)
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] on every rank -> [size, ...], in rank order."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = torch.empty(self.size * len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
        _all_gather(out, x.contiguous(), group=self.group)
        return out.view(self.size, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(x, group_src=0, group=self.group)
        return x

    def smallest(self, number: int, device: torch.device) -> int:
        """Of all ranks. Waits for them."""
        if self.size == 1:
            return number
        on_device = torch.tensor(number, device=device)
        dist.all_reduce(on_device, dist.ReduceOp.MIN, group=self.group)
        return int(on_device)
