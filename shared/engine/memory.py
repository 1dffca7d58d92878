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


def blocks_for_cpu(block_bytes: int, most_useful_blocks: int) -> int:
    """Raises ValueError if not even one block fits."""
    return _at_least_one(min(CPU_POOL_BYTES // block_bytes, most_useful_blocks), block_bytes)


def blocks_for_gpu(
    block_bytes: int, most_useful_blocks: int, budget: int, peak_without_pool: int
) -> int:
    """`budget`: bytes the engine may use in all; `peak_without_pool`: what it needs besides the
    pool, other processes' memory included. Raises ValueError if not even one block fits."""
    fit = (budget - peak_without_pool) // block_bytes
    return _at_least_one(min(fit, most_useful_blocks), block_bytes)


def _at_least_one(blocks: int, block_bytes: int) -> int:
    if blocks < 1:
        raise ValueError(
            f"no memory is left for the KV pool: one block takes {block_bytes / GIB:.3f} GiB. "
            f"Raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_sequences"
        )
    return blocks
