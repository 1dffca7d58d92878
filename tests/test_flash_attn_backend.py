"""The flash-attn backend in whole engines, on the CPU: its two functions are played by this
repository's references, so everything that stands around them is what runs on a GPU."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import steps
from shared import SamplingParams
from shared.config import FLASH_ATTN_BLOCK_SIZE
from shared.kernels.paged_decode_attention import paged_decode_attention_reference
from shared.kernels.paged_prefill_attention import paged_prefill_attention_reference
from shared.layers.attention import ATTENTION_BACKENDS, FlashAttentionBackend
from tests.engine_contract import assert_idle, drive, prompt_of, tokens_of
from tests.test_cuda_graphs import rehearse


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    rows, seq_lens = block_table.shape[0], cu_seqlens_k.diff().tolist()
    assert causal
    assert block_table.is_contiguous()
    assert {t.dtype for t in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == rows + 1
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert cu_seqlens_q[-1] == len(q)
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert block_table.shape[1] * k.shape[1] >= max_seqlen_k >= max(seq_lens)
    bounds, every = cu_seqlens_q.tolist(), torch.arange(rows)
    return paged_prefill_attention_reference(
        q, k, v, block_table, every, bounds, seq_lens, softmax_scale
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    rows, new, _, _ = q.shape
    assert causal
    assert new == 1
    assert block_table.is_contiguous()
    assert len(cache_seqlens) == len(block_table) == rows
    lengths = cache_seqlens.tolist()
    every = torch.arange(rows)
    out = paged_decode_attention_reference(
        q[:, 0], k_cache, v_cache, block_table, every, lengths, softmax_scale
    )
    return out.unsqueeze(1)


def make_engine(stage: str, **options: Any) -> Any:
    """With the backend in torch's place: its own would be refused without a GPU."""
    module = steps.load(stage)
    flash_attn = ModuleType("flash_attn")
    vars(flash_attn).update(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    # Only while the engine is made: transformers would believe that the package is there.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", flash_attn)
        patch.setitem(ATTENTION_BACKENDS, "torch", FlashAttentionBackend)
        return module.Engine(module.Config(**options))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("stage", steps.engines())
def test_greedy_output_is_transformers(references: Any, stage: str, graphs: bool) -> None:
    """Rows that begin blocks in all kinds of steps, are preempted, and take blocks of others."""
    reference, rng = references("base"), random.Random(5)
    size = FLASH_ATTN_BLOCK_SIZE
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    lengths = [1, 2, 40, size - 10, size - 1, size, size + 1, 300, 500, 2 * size - 5]
    requests = {f"r{n}": (prompt_of(rng, n), params) for n in lengths}
    engine = make_engine(
        stage,
        model=str(reference.directory),
        dtype="float32",
        max_model_length=700,
        kvcache_block_size=size,
        num_kvcache_blocks=6,
        max_num_batched_tokens=600,
        max_num_sequences=5,
    )
    # This backend has graphs of decodes alone.
    trunk = rehearse(engine, stage, with_prefills=False)[0] if graphs else None
    outputs = drive(engine, requests)
    assert_idle(engine)
    assert engine.stats().preemptions > 0
    engine.close()
    for request_id, (prompt, _) in requests.items():
        reference.assert_greedy(prompt, tokens_of(outputs[request_id, 0]))
    assert trunk is None or trunk.replayed
