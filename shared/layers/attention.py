"""What attention needs to know about a batch, and the backends that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernels.paged_decode_attention import (
    paged_decode_attention,
    paged_decode_attention_reference,
)
from shared.kernels.paged_prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)


@dataclass(frozen=True)
class AttentionMetadata:
    """One batch, as attention sees it: R rows (sequences), T new tokens, S slots.

    The first `num_decode_rows` rows have exactly one new token each and go to the decode kernel;
    the rest go to the variable-length kernel.

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


class AttentionBackend(Protocol):
    """q [T, num_heads, D] over pages [num_blocks, block_size, num_kv_heads, D] -> like q."""

    name: str

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor: ...


class TorchBackend:
    """Gather pages, then torch's scaled dot-product attention. Runs anywhere."""

    name = "torch"

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


class TritonBackend:
    """The kernels of this repository."""

    name = "triton"

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m, split = metadata, metadata.num_decode_rows
        num_rows = m.slots.shape[0]
        if split == num_rows:
            return paged_decode_attention(
                q, k_cache, v_cache, m.block_tables, m.slots, m.seq_lens, scale
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
        decodes = paged_decode_attention(
            q[:split], k_cache, v_cache, m.block_tables, m.slots[:split], m.seq_lens[:split], scale
        )
        prefills = paged_prefill_attention(
            q[split:],
            k_cache,
            v_cache,
            m.block_tables,
            m.slots[split:],
            m.cu_seqlens_q[split:] - split,
            m.seq_lens[split:],
            m.max_query_len,
            scale,
        )
        return torch.cat((decodes, prefills))


class FlashAttentionBackend:
    """flash-attn 2 over pages of 256 tokens (arXiv:2307.08691)."""

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen = flash_attn_varlen_func
        self.with_kvcache = flash_attn_with_kvcache

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        m, split = metadata, metadata.num_decode_rows
        num_rows = m.slots.shape[0]
        num_columns = -(-m.max_seq_len // k_cache.shape[1])
        block_tables = m.block_tables[m.slots, :num_columns]
        parts = []
        if split:
            parts.append(
                self.with_kvcache(
                    q[:split].unsqueeze(1),
                    k_cache,
                    v_cache,
                    cache_seqlens=m.seq_lens[:split],
                    block_table=block_tables[:split],
                    softmax_scale=scale,
                    causal=True,
                ).squeeze(1)
            )
        if split < num_rows:
            lengths = m.seq_lens[split:]
            cu_seqlens_k = torch.zeros(num_rows - split + 1, dtype=torch.int32, device=q.device)
            torch.cumsum(lengths, 0, out=cu_seqlens_k[1:])
            parts.append(
                self.varlen(
                    q[split:],
                    k_cache,
                    v_cache,
                    cu_seqlens_q=m.cu_seqlens_q[split:] - split,
                    cu_seqlens_k=cu_seqlens_k,
                    max_seqlen_q=m.max_query_len,
                    max_seqlen_k=m.max_seq_len,
                    block_table=block_tables[split:],
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
