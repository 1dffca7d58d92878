"""RMSNorm, alone or fused with the residual addition before it (arXiv:1910.07467).

Bytes decide its speed: one program reads a whole row once, keeps it in registers between the
statistics and the scaling, and writes it once.
"""

from __future__ import annotations

import torch

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] -> [..., H]: statistics in float32, result in x's dtype (as transformers does)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual)."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] -> [..., H]; weight [H]."""
    if runs_on_triton(x):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] -> (norm(x + residual), x + residual); may overwrite both inputs.

    On the GPU it does (the first result is x's memory, the second residual's): two tensors of
    [T, H] less in every layer.
    """
    if runs_on_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


@jit()
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the storage type before the statistics, as it is when the two
        # operations run apart: the stream and its norm agree on the same numbers.
        x += tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        tl.store(residual_ptr + row + columns, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    # Rounded before the weight is applied, like the reference.
    normed = (wide * inverse).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row + columns, normed * weight, mask=inside)


def _num_warps(block: int) -> int:
    # 16 elements a thread: two 16-byte loads of bf16 in flight, and enough rows per multiprocessor
    # to cover the wait for the row's sum.
    return min(16, max(1, block // 512))


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    hidden = x.shape[-1]
    block = next_power_of_2(hidden)
    overlap = overlaps(x)
    _rms_norm_kernel[(x.numel() // hidden,)](
        x,
        x,
        weight,
        out,
        eps,
        hidden,
        block,
        False,
        overlap,
        num_warps=_num_warps(block),
        launch_pdl=overlap,
        enable_fp_fusion=True,
    )
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrites x with the norm and residual with the sum; both must be contiguous."""
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("add_rms_norm works in place: x and residual must be contiguous")
    hidden = x.shape[-1]
    block = next_power_of_2(hidden)
    overlap = overlaps(x)
    _rms_norm_kernel[(x.numel() // hidden,)](
        x,
        residual,
        weight,
        x,
        eps,
        hidden,
        block,
        True,
        overlap,
        num_warps=_num_warps(block),
        launch_pdl=overlap,
        enable_fp_fusion=True,
    )
    return x, residual
