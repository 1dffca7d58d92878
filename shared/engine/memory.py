"""How many KV blocks fit: arithmetic over what the rest of the engine has already taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.models.config import ModelConfig

GIB = 1 << 30
# A laptop runs the bundled model; a larger pool there only costs start-up time and swap.
CPU_POOL_BYTES = GIB


@dataclass(frozen=True)
class MemoryReport:
    """Bytes, for the start-up banner."""

    weights: int
    activations: int
    graphs: int
    pool: int


def bytes_per_block(
    config: ModelConfig, num_kv_heads: int, block_size: int, dtype: torch.dtype
) -> int:
    """Keys and values of all layers for one block; `num_kv_heads` on this rank."""
    per_token = 2 * config.num_hidden_layers * num_kv_heads * config.head_dim * dtype.itemsize
    return per_token * block_size


def fitting_blocks(
    block_bytes: int,
    device: torch.device,
    gpu_memory_utilization: float,
    reserved: int,
) -> int:
    """Blocks for which there is memory.

    `reserved`: bytes that activations and graphs will need besides what is in use now, by this
    process or another. Raises ValueError if not even one block fits.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = int(total * gpu_memory_utilization) - (total - free) - reserved
    else:
        available = CPU_POOL_BYTES
    blocks = available // block_bytes
    if blocks < 1:
        raise ValueError(
            f"no memory is left for the KV pool: one block takes {block_bytes / GIB:.3f} GiB of "
            f"{max(available, 0) / GIB:.3f} GiB. Lower kvcache_block_size, max_num_batched_tokens "
            f"or max_num_sequences, or raise gpu_memory_utilization"
        )
    return blocks
