"""Where a kernel test runs, in which type, and how close to exact its result must be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# ||out - exact|| / ||exact||. TF32 products would be near 3e-4.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Place:
    device: torch.device
    dtype: torch.dtype

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(self.device, self.dtype)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def assert_close(self, out: torch.Tensor, exact: torch.Tensor) -> None:
        assert out.dtype == self.dtype
        assert out.shape == exact.shape
        out, exact = out.double().cpu(), exact.double().cpu()
        assert torch.isfinite(out).all()
        error = (out - exact).norm() / exact.norm()
        assert error < TOLERANCE[self.dtype], f"relative error {error:.2e}"
        # A few wrong elements would drown in the norm.
        worst = (out - exact).abs().max() / exact.abs().max()
        assert worst < 10 * TOLERANCE[self.dtype], f"worst element {worst:.2e}"
