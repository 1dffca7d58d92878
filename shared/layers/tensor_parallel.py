"""Which part of every layer this process holds (Megatron-LM, arXiv:1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of a tensor-parallel group; the default is a group of one."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def split(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises ValueError naming `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} does not divide {what}={total}")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] on every rank -> [..., n * size], in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
