"""The gated activation of the feed-forward block: silu(gate) * up (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shared.kernels._triton import jit, next_power_of_2, overlaps, runs_on_triton, tl

# 8 elements a thread of 4 warps: one 16-byte load of gate and one of up, many programs in flight.
_BLOCK = 1024


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I], gate then up -> [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I], gate then up -> [T, I]."""
    if runs_on_triton(x):
        return silu_and_mul_triton(x)
    return silu_and_mul_reference(x)


@jit()
def _silu_and_mul_kernel(
    x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
) -> None:
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate_ptr = x_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0)
    up = tl.load(gate_ptr + WIDTH, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before the product, like the reference.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, activated * up.to(tl.float32), mask=inside)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    block = min(_BLOCK, next_power_of_2(width))
    overlap = overlaps(x)
    _silu_and_mul_kernel[(num_tokens, -(-width // block))](
        x, out, width, block, overlap, num_warps=4, launch_pdl=overlap, enable_fp_fusion=True
    )
    return out
