"""What "auto" means on this machine for this model. Wrong combinations are refused by name."""

from __future__ import annotations

import importlib.util

import torch

from shared.config import FLASH_ATTN_BLOCK_SIZE, EngineConfig
from shared.models.config import ModelConfig

# Triton tiles a block in one load: powers of two from the smallest tile a matrix unit takes.
SMALLEST_TRITON_BLOCK = 16
AUTO_BLOCK_SIZE = 16


def resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no CUDA device")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> torch.dtype:
    """auto is float32 on the CPU, where narrower types are slower and less exact."""
    name: str = config.dtype
    if name == "auto":
        name = model_config.dtype if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    backend = config.attention_backend
    if backend == "auto":
        return "triton" if device.type == "cuda" and _is_installed("triton") else "torch"
    if backend == "torch":
        return backend
    if device.type != "cuda":
        raise ValueError(f"attention_backend={backend} needs a GPU; device is {device.type}")
    if not _is_installed(backend):
        raise ValueError(f"attention_backend={backend}, but {backend} is not installed")
    if backend == "flash_attn" and dtype == torch.float32:
        raise ValueError(
            "attention_backend=flash_attn computes in bfloat16 or float16, not dtype=float32"
        )
    return backend


def resolve_block_size(config: EngineConfig, backend: str) -> int:
    size = config.kvcache_block_size
    if size == "auto":
        return FLASH_ATTN_BLOCK_SIZE if backend == "flash_attn" else AUTO_BLOCK_SIZE
    if backend == "flash_attn" and size != FLASH_ATTN_BLOCK_SIZE:
        raise ValueError(
            f"attention_backend=flash_attn needs kvcache_block_size={FLASH_ATTN_BLOCK_SIZE}, "
            f"got kvcache_block_size={size}"
        )
    if backend == "triton" and (size < SMALLEST_TRITON_BLOCK or size & (size - 1)):
        raise ValueError(
            f"attention_backend=triton needs a kvcache_block_size that is a power of two and at "
            f"least {SMALLEST_TRITON_BLOCK}, got kvcache_block_size={size}"
        )
    return size


def resolve_max_length(config: EngineConfig, model_config: ModelConfig) -> int:
    """Before the pool is known. Positions past the model's own limit were never trained."""
    limit = model_config.max_position_embeddings
    if model_config.rope_scaling is not None:
        scaling = model_config.rope_scaling
        limit = max(limit, int(scaling.factor * scaling.original_max_position_embeddings))
    if config.max_model_length is None:
        return limit
    if config.max_model_length > limit:
        raise ValueError(
            f"max_model_length={config.max_model_length} exceeds the model's own limit of {limit}"
        )
    return config.max_model_length


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
