"""The one set of options every stage understands, validated once and then frozen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

# flash-attn 2 reads pages in units of 256 tokens and refuses any other size.
FLASH_ATTN_BLOCK_SIZE = 256

# Everything that is counted here is an int32 on the device.
LARGEST = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=LARGEST)]


class EngineConfig(BaseModel):
    """Options of an engine. Unknown names and wrong values raise ValueError naming the field.

    `max_num_batched_tokens`, `num_kvcache_blocks` and `max_model_length` are independent of each
    other: no combination is a start-up error as long as one block and one token fit. What follows
    from them (the effective limits) is logged in the start-up banner.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    model: str | None = None
    """A directory, a Hugging Face id, or None for the bundled checkpoint. With load_format=dummy
    also the name of a real size: qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda when there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on cpu, the checkpoint's own on cuda."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's true shape, no weight files needed."""
    max_model_length: Annotated[Positive | None, tyro.conf.arg(name="max-model-len")] = None
    """Most tokens (prompt and output) of a sequence; None: the model's own limit. The effective
    limit is the smaller of this and the tokens in the pool; reaching it finishes with "length"."""
    max_num_batched_tokens: Positive = 16384
    """Token budget of a step. At most this many sequences run at once."""
    max_num_sequences: Annotated[Positive, tyro.conf.arg(name="max-num-seqs")] = 512
    """Sequences that run at once."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.9
    """Share of the GPU's memory the engine may use, KV cache included."""
    num_kvcache_blocks: Annotated[int, Field(le=LARGEST)] = -1
    """Blocks in the KV pool. -1: what memory allows after weights, activations and graphs (on
    cpu at most 1 GiB)."""
    kvcache_block_size: Positive | Literal["auto"] = "auto"
    """Tokens per block. auto: 16 with triton and torch, 256 with flash_attn."""
    attention_backend: Literal["auto", "triton", "flash_attn", "torch"] = "auto"
    """auto: triton where it can run (bench/results/kernels_h200.json says why), else torch."""
    enable_prefix_caching: bool = True
    """Reuse the KV of full blocks whose tokens, and all tokens before them, are the same."""
    enforce_eager: bool = False
    """Never capture or replay CUDA graphs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds dummy weights and the noise of requests that bring no seed of their own."""
    tensor_parallel_size: Positive = 1
    """GPUs that share every layer (stage 04)."""
    data_parallel_size: Positive = 1
    """Replicas of the engine (stage 04)."""
    trace: str | None = None
    """Write one JSON line per step to this file."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.num_kvcache_blocks != -1 and self.num_kvcache_blocks < 1:
            raise ValueError(
                f"num_kvcache_blocks must be -1 (from memory) or at least 1, "
                f"got {self.num_kvcache_blocks}"
            )
        if self.attention_backend == "flash_attn" and self.kvcache_block_size not in (
            "auto",
            FLASH_ATTN_BLOCK_SIZE,
        ):
            raise ValueError(
                f"attention_backend=flash_attn needs kvcache_block_size={FLASH_ATTN_BLOCK_SIZE}, "
                f"got kvcache_block_size={self.kvcache_block_size}"
            )
        return self

    def replace(self, **changes: Any) -> EngineConfig:
        """A validated copy with some fields changed."""
        return type(self)(**{**self.model_dump(), **changes})


class ChunkedPrefillConfig(EngineConfig):
    """What stages add that can compute a prompt in pieces. Sizes are clamped: to
    max_num_batched_tokens, and a chunk to what a step may prefill. The fields hold what is in
    effect."""

    max_prefill_tokens_per_step: Annotated[Positive, Field(validate_default=True)] = 8192
    """Most prompt tokens of a step. Smaller: shorter gaps between the tokens of what decodes
    meanwhile, and a later first token."""
    max_prefill_chunk_size: Annotated[Positive, Field(validate_default=True)] = 4096
    """Most tokens of one prompt in a step; the rest of the step is for the prompts behind it."""

    @field_validator("max_prefill_tokens_per_step", "max_prefill_chunk_size")
    @classmethod
    def _clamp(cls, value: int, info: ValidationInfo) -> int:
        # Only fields above the one being validated are there, and only if they are valid.
        bounds = ("max_num_batched_tokens", "max_prefill_tokens_per_step")
        return min(value, *(info.data.get(bound, value) for bound in bounds))
