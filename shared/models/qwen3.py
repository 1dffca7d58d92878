"""Qwen3, dense: pre-norm blocks with grouped-query attention, per-head q/k norm and SwiGLU
(arXiv:2505.09388)."""

from __future__ import annotations

import torch
from torch import nn

from shared.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from shared.kernels.small_batch_linear import ResidualStream
from shared.layers.attention import AttentionBackend, AttentionMetadata
from shared.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from shared.layers.linear import (
    ColumnParallelLinear,
    GateUpLinear,
    RowParallelLinear,
    Rows,
    WeightTarget,
)
from shared.layers.norm import RMSNorm
from shared.layers.rotary import rotary_table
from shared.layers.tensor_parallel import TensorParallel
from shared.models.config import ModelConfig


class Qwen3Attention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        backend: AttentionBackend,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.num_heads = tp.split(config.num_attention_heads, "num_attention_heads")
        q_rows = Rows.split(
            config.num_attention_heads * config.head_dim, tp, "num_attention_heads * head_dim"
        )
        kv_rows = key_value_rows(config, tp)
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, [q_rows, kv_rows, kv_rows], dtype=dtype
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, dtype, tp
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        projections = [f"{prefix}.{name}_proj.weight" for name in ("q", "k", "v")]
        return {
            **self.qkv_proj.weight_targets(projections),
            **self.o_proj.weight_targets(f"{prefix}.o_proj.weight"),
            **self.q_norm.weight_targets(f"{prefix}.q_norm.weight"),
            **self.k_norm.weight_targets(f"{prefix}.k_norm.weight"),
        }

    def forward(
        self,
        stream: ResidualStream,
        norm: RMSNorm,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        qkv, residual = self.qkv_proj(stream, norm)
        k_cache, v_cache = kv_cache.unbind(0)
        norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        if self.backend.fuses(metadata):
            out = self.backend.forward_fused(
                qkv, *norms, cos_sin, k_cache, v_cache, metadata, self.scale
            )
        else:
            q = qk_norm_rope_kv_write(
                qkv, *norms, cos_sin, positions, metadata.slot_mapping, k_cache, v_cache
            )
            out = self.backend.forward(q, k_cache, v_cache, metadata, self.scale)
        return self.o_proj(out.flatten(1), residual)


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> None:
        super().__init__()
        rows = Rows.split(config.intermediate_size, tp, "intermediate_size")
        self.gate_up_proj = GateUpLinear(config.hidden_size, [rows, rows], dtype=dtype)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, dtype, tp)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        projections = [f"{prefix}.{name}_proj.weight" for name in ("gate", "up")]
        return {
            **self.gate_up_proj.weight_targets(projections),
            **self.down_proj.weight_targets(f"{prefix}.down_proj.weight"),
        }

    def forward(self, stream: ResidualStream, norm: RMSNorm) -> ResidualStream:
        x, residual = self.gate_up_proj(stream, norm)
        return self.down_proj(x, residual)


class Qwen3Block(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        backend: AttentionBackend,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Qwen3Attention(config, dtype, backend, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = Qwen3MLP(config, dtype, tp)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        first, second = self.input_layernorm, self.post_attention_layernorm
        return {
            **first.weight_targets(f"{prefix}.input_layernorm.weight"),
            **self.self_attn.weight_targets(f"{prefix}.self_attn"),
            **second.weight_targets(f"{prefix}.post_attention_layernorm.weight"),
            **self.mlp.weight_targets(f"{prefix}.mlp"),
        }

    def forward(
        self,
        stream: ResidualStream,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        # Each half of the block takes the norm it starts with, and ends with a sum that may be left
        # to the next half: projecting, adding and normalising are one operation or two, as it is
        # best for so many rows.
        stream = self.self_attn(
            stream, self.input_layernorm, positions, cos_sin, kv_cache, metadata
        )
        return self.mlp(stream, self.post_attention_layernorm)


class Qwen3ForCausalLM(nn.Module):
    """The model in two halves, because a step needs logits of few of its tokens:

    `forward`, the trunk: token ids [T] -> hidden states [T, hidden_size]
    `compute_logits`, the head: chosen hidden states [K, hidden_size] -> logits [K, vocab_size]
    `compute_own_logits`: of this rank's part of the vocabulary alone
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
        num_positions: int,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        tp = tp or TensorParallel()
        self.config = config
        with device:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, dtype, tp
            )
            self.layers = nn.ModuleList(
                Qwen3Block(config, dtype, backend, tp) for _ in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                dtype,
                tp,
                tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            )
        self.cos_sin = rotary_table(config, num_positions, device)

    @staticmethod
    def check_parallel_size(config: ModelConfig, size: int) -> None:
        """Raises the ValueError that `size` ranks would raise, without building a layer."""
        tp = TensorParallel(size=size)
        tp.split(config.num_attention_heads, "num_attention_heads")
        tp.split(config.intermediate_size, "intermediate_size")
        key_value_rows(config, tp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Checkpoint tensor name -> where it goes."""
        targets = {
            **self.embed_tokens.weight_targets("model.embed_tokens.weight"),
            **self.norm.weight_targets("model.norm.weight"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Qwen3Block)
            targets.update(layer.weight_targets(f"model.layers.{index}"))
        if not self.config.tie_word_embeddings:
            targets.update(self.lm_head.weight_targets("lm_head.weight"))
        return targets

    def optional_weights(self) -> frozenset[str]:
        """Tensors a checkpoint may hold that add nothing: a tied head, saved a second time."""
        return frozenset({"lm_head.weight"} if self.config.tie_word_embeddings else ())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """kv_cache [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
        stream = ResidualStream(self.embed_tokens(input_ids))
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            stream = layer(stream, positions, self.cos_sin, layer_cache, metadata)
        return stream.sum()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.gather(self.compute_own_logits(hidden))

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[K, share]: token ids from rank * share on; at the last ranks some are padding."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def key_value_rows(config: ModelConfig, tp: TensorParallel) -> Rows:
    """Rows of k_proj and v_proj on this rank: whole heads, shared by ranks when they are fewer."""
    heads = config.num_key_value_heads
    if heads % tp.size and tp.size % heads:
        raise ValueError(
            f"tensor_parallel_size={tp.size} and num_key_value_heads={heads}: "
            f"one must be a multiple of the other"
        )
    local_heads = max(1, heads // tp.size)
    first = tp.rank * heads // tp.size
    return Rows(heads * config.head_dim, first * config.head_dim, local_heads * config.head_dim)
