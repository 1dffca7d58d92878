"""`transformers` as the judge: small random Qwen3 checkpoints and their greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

# Where the reference's two best logits are closer than this, float32 arithmetic in another order
# may rightly choose the other one.
TIE = 1e-4

# name -> what differs from BASE. head_dim != hidden / heads throughout, as in Qwen3 itself.
BASE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "initializer_range": 0.15,
    "eos_token_id": 0,
    "bos_token_id": None,
}
VARIANTS = {
    "base": {},
    "odd_groups_untied": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": False,
    },
    "single_kv_head": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "hidden_size": 56,
        "rope_theta": 1000000.0,
    },
    "multi_head": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32},
}


@dataclass
class Reference:
    """A checkpoint on disk and the model `transformers` makes of it, in float32."""

    directory: Path

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy tokens, not stopping at end-of-text."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=num_tokens,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary]: row p is about the token at p + 1."""
        return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    @torch.inference_mode()
    def assert_greedy(self, prompt: list[int], got: list[int]) -> None:
        """`got` is the greedy continuation: each token has the largest logit after those before
        it, so that by induction the whole is what `greedy` would say. One forward pass."""
        logits = self.model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1)
        shortfall = best.values - logits.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        wrong = (shortfall >= TIE).nonzero().flatten().tolist()
        assert not wrong, (
            f"tokens {wrong} of {got} are not greedy: transformers says {best.indices.tolist()}, "
            f"by {shortfall[wrong].tolist()}"
        )


def make_checkpoint(directory: Path, variant: str, seed: int = 0, **changes: Any) -> Reference:
    """A random model of the variant's shape, saved by transformers itself. `changes`: fields of a
    shape that is no variant."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**BASE, **VARIANTS.get(variant, {}), **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return Reference(directory)
