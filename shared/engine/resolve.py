"""What "auto" means on this machine for this model. Wrong combinations are refused by name."""

from __future__ import annotations

import importlib.util

import torch

from shared.config import FLASH_ATTN_BLOCK_SIZE, EngineConfig
from shared.models.config import ModelConfig

# Triton's tiles have sides that are powers of two, and its matrix products sides from 16 on.
SMALLEST_TRITON_TILE = 16
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


def resolve_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """auto is triton wherever it can run: in bench/results/kernels_h200.json it is level with or
    ahead of flash-attn 2 in every shape but one, by 3%. Where no kernel fits, auto is torch; a
    backend asked for by name is refused with the reason instead."""
    backend = config.attention_backend
    if backend == "auto":
        obstacle = _obstacle("triton", config, model_config, device, dtype)
        return "torch" if obstacle else "triton"
    obstacle = _obstacle(backend, config, model_config, device, dtype)
    if obstacle:
        raise ValueError(f"attention_backend={backend} {obstacle}")
    return backend


def _obstacle(
    backend: str,
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Why a backend cannot run here."""
    size, head_dim = config.kvcache_block_size, model_config.head_dim
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"needs a GPU, and device is {device.type}"
    if importlib.util.find_spec(backend) is None:
        return f"needs the package {backend}, which is not installed"
    if backend == "flash_attn":
        if dtype == torch.float32:
            return "computes in bfloat16 or float16, and dtype is float32"
        if size not in ("auto", FLASH_ATTN_BLOCK_SIZE):
            return f"needs kvcache_block_size={FLASH_ATTN_BLOCK_SIZE}, got {size}"
        return None
    if head_dim < SMALLEST_TRITON_TILE or head_dim & (head_dim - 1):
        return f"needs a head_dim that is a power of two from 16, and the model's is {head_dim}"
    if size != "auto" and (size < SMALLEST_TRITON_TILE or size & (size - 1)):
        return f"needs a kvcache_block_size that is a power of two from 16, got {size}"
    return None


def resolve_block_size(config: EngineConfig, backend: str) -> int:
    if config.kvcache_block_size != "auto":
        return config.kvcache_block_size
    return FLASH_ATTN_BLOCK_SIZE if backend == "flash_attn" else AUTO_BLOCK_SIZE


def resolve_max_length(config: EngineConfig, model_config: ModelConfig) -> int:
    """Before the pool is known. Positions past the model's own limit were never trained."""
    limit = model_config.max_position_embeddings
    if config.max_model_length is None:
        return limit
    if config.max_model_length > limit:
        raise ValueError(
            f"max_model_length={config.max_model_length} exceeds the model's own limit of {limit}"
        )
    return config.max_model_length
