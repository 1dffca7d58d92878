"""What attention needs to know about a batch, and the backends that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from shared.config import FLASH_ATTN_BLOCK_SIZE
from shared.kernels.fused_decode_attention import FUSED_ROWS, fused_decode_attention
from shared.kernels.paged_decode_attention import (
    DecodeWorkspace,
    paged_decode_attention,
    paged_decode_attention_reference,
    rows_to_warm_up,
)
from shared.kernels.paged_mixed_attention import paged_mixed_attention
from shared.kernels.paged_prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)


@dataclass(frozen=True)
class AttentionMetadata:
    """One batch, as attention sees it: R rows (sequences), T new tokens, S slots.

    The first `num_decode_rows` rows have exactly one new token each and are computed as decodes, by
    pieces of their keys; the rest as chunks, by tiles of queries.

           row 0   row 1   row 2             row 3
        +-------+-------+-----------------+----------+
        |   d   |   d   |   p  p  p  p    |  p  p  p |      T = 9, num_decode_rows = 2
        +-------+-------+-----------------+----------+
        0       1       2                 6          9      cu_seqlens_q
    """

    slot_mapping: torch.Tensor  # [T] int32: where in the pool a token's KV goes; -1: nowhere
    slots: torch.Tensor  # [R] int32: the row's line in block_tables
    cu_seqlens_q: torch.Tensor  # [R + 1] int32: bounds of the rows' new tokens
    seq_lens: torch.Tensor  # [R] int32: tokens in the cache, new ones included
    block_tables: torch.Tensor  # [S, max_blocks] int32
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    # The same lengths on the host, for the torch backend, which loops over rows in Python.
    host_cu_seqlens_q: list[int]
    host_seq_lens: list[int]
    plan: object = None  # what the backend's `prepare` leaves for its `forward`


@dataclass(frozen=True)
class AttentionShape:
    """What a backend may allocate for: heads on this rank, and the most rows of a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_rows: int
    device: torch.device


class AttentionBackend(Protocol):
    """One instance serves all layers."""

    name: str
    graphs: Literal["decodes", "all"] | None
    """Which batches a CUDA graph may serve: `forward` launches the same kernels whatever the
    lengths of the rows, and reads them on the device."""

    def __init__(self, shape: AttentionShape) -> None: ...

    def rows_to_warm_up(self) -> Sequence[int]:
        """Numbers of decode rows that meet every compiled form of its kernels."""
        return ()

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """What is the same for all layers of a step, done once, when the block tables are up to
        date."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """q [T, num_heads, D] over pages [num_blocks, block_size, num_kv_heads, D] -> like q."""
        ...

    def fuses(self, metadata: AttentionMetadata) -> bool:
        """Whether this batch goes to `forward_fused` instead of `qk_norm_rope_kv_write` and
        `forward`."""
        return False

    def forward_fused(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """qkv [R, (num_heads + 2 * num_kv_heads) * D] -> [R, num_heads, D]."""
        raise RuntimeError(f"the {self.name} backend has no fused kernel")


class TorchBackend(AttentionBackend):
    """Gather pages, then torch's scaled dot-product attention. Runs anywhere."""

    name = "torch"
    graphs: Literal["decodes", "all"] | None = None  # loops over rows on the host

    def __init__(self, shape: AttentionShape) -> None:
        pass

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m, split = metadata, metadata.num_decode_rows
        out = torch.empty_like(q)
        if split:
            out[:split] = paged_decode_attention_reference(
                q[:split],
                k_cache,
                v_cache,
                m.block_tables,
                m.slots[:split],
                m.host_seq_lens[:split],
                scale,
            )
        if split < len(m.host_seq_lens):
            out[split:] = paged_prefill_attention_reference(
                q[split:],
                k_cache,
                v_cache,
                m.block_tables,
                m.slots[split:],
                [offset - split for offset in m.host_cu_seqlens_q[split:]],
                m.host_seq_lens[split:],
                scale,
            )
        return out


class TritonBackend(AttentionBackend):
    """The kernels of this repository."""

    name = "triton"
    graphs: Literal["decodes", "all"] | None = "all"

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.workspace = DecodeWorkspace.allocate(
            shape.max_rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.device
        )

    def rows_to_warm_up(self) -> Sequence[int]:
        s = self.shape
        return rows_to_warm_up(s.max_rows, s.num_kv_heads, s.head_dim, self.workspace.num_sms)

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m, split = metadata, metadata.num_decode_rows
        if split == m.slots.shape[0]:
            return paged_decode_attention(
                q, k_cache, v_cache, m.block_tables, m.slots, m.seq_lens, scale, self.workspace
            )
        if split == 0:
            return paged_prefill_attention(
                q,
                k_cache,
                v_cache,
                m.block_tables,
                m.slots,
                m.cu_seqlens_q,
                m.seq_lens,
                m.max_query_len,
                scale,
            )
        return paged_mixed_attention(
            q,
            k_cache,
            v_cache,
            m.block_tables,
            m.slots,
            m.cu_seqlens_q,
            m.seq_lens,
            split,
            m.max_query_len,
            scale,
            self.workspace,
        )

    def fuses(self, metadata: AttentionMetadata) -> bool:
        rows = metadata.slots.shape[0]
        return rows <= FUSED_ROWS and metadata.num_decode_rows == rows

    def forward_fused(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m = metadata
        return fused_decode_attention(
            qkv,
            q_weight,
            k_weight,
            eps,
            cos_sin,
            k_cache,
            v_cache,
            m.block_tables,
            m.slots,
            m.seq_lens,
            scale,
            self.workspace,
        )


@dataclass(frozen=True)
class FlashPlan:
    """flash-attn wants a line of pages per row, and offsets that start at 0."""

    block_tables: torch.Tensor  # [R, blocks of the longest row] int32
    cu_seqlens_q: torch.Tensor  # of the prefill rows
    cu_seqlens_k: torch.Tensor


class FlashAttentionBackend(AttentionBackend):
    """flash-attn 2 over pages of 256 tokens (arXiv:2307.08691)."""

    name = "flash_attn"
    # Its variable-length kernel is launched for the longest row times all rows: in a graph, which
    # has to allow for any, nearly all of its programs would find nothing to do.
    graphs: Literal["decodes", "all"] | None = "decodes"

    def __init__(self, shape: AttentionShape) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen = flash_attn_varlen_func
        self.with_kvcache = flash_attn_with_kvcache

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        m, split = metadata, metadata.num_decode_rows
        num_columns = -(-m.max_seq_len // FLASH_ATTN_BLOCK_SIZE)
        lengths = m.seq_lens[split:].cumsum(0, dtype=torch.int32)
        plan = FlashPlan(
            block_tables=m.block_tables[m.slots, :num_columns],
            cu_seqlens_q=m.cu_seqlens_q[split:] - split,
            cu_seqlens_k=torch.nn.functional.pad(lengths, (1, 0)),
        )
        return replace(m, plan=plan)

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m, split, plan = metadata, metadata.num_decode_rows, metadata.plan
        assert isinstance(plan, FlashPlan)
        parts = []
        if split:
            decodes = self.with_kvcache(
                q[:split].unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=m.seq_lens[:split],
                block_table=plan.block_tables[:split],
                softmax_scale=scale,
                causal=True,
            )
            parts.append(decodes.squeeze(1))
        if split < m.slots.shape[0]:
            parts.append(
                self.varlen(
                    q[split:],
                    k_cache,
                    v_cache,
                    cu_seqlens_q=plan.cu_seqlens_q,
                    cu_seqlens_k=plan.cu_seqlens_k,
                    max_seqlen_q=m.max_query_len,
                    max_seqlen_k=m.max_seq_len,
                    block_table=plan.block_tables[split:],
                    softmax_scale=scale,
                    causal=True,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchBackend,
    "triton": TritonBackend,
    "flash_attn": FlashAttentionBackend,
}
