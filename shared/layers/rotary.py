"""Rotary position embedding tables (RoFormer, arXiv:2104.09864), with YaRN (arXiv:2309.00071)."""

from __future__ import annotations

import math

import torch

from shared.models.config import ModelConfig, YarnScaling


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, head_dim] float32: cosines of the head_dim / 2 angles, then sines.

    Computed on the CPU so that every device holds the same bits.
    """
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    magnitude = 1.0
    if config.rope_scaling is not None:
        frequencies, magnitude = _yarn(config.rope_theta, dim, frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1).to(device)


def _yarn(
    theta: float, dim: int, frequencies: torch.Tensor, scaling: YarnScaling
) -> tuple[torch.Tensor, float]:
    """Interpolate the slow dimensions, keep the fast ones, blend between (paper, section 3.2)."""

    def dimension_with(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_with(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_with(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    blended = frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return blended, magnitude
