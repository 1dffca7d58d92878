"""RMSNorm as a module; the arithmetic is in `shared.kernels.rms_norm`.

The norms inside a block are not called: the projections that follow them take them as arguments
(`shared.layers.linear`), so that one kernel can do both.
"""

from __future__ import annotations

import torch
from torch import nn

from shared.kernels.rms_norm import rms_norm
from shared.layers.linear import WeightTarget, empty_weight, whole


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: whole(self.weight)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, size]."""
        return rms_norm(x, self.weight, self.eps)
