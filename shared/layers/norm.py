"""RMSNorm as a module; the arithmetic is in `shared.kernels.rms_norm`."""

from __future__ import annotations

import torch
from torch import nn

from shared.kernels.rms_norm import add_rms_norm, rms_norm
from shared.layers.linear import WeightTarget, empty_weight, whole


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: whole(self.weight)}

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, size], residual [T, size] or None -> (norm(x + residual), x + residual)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
