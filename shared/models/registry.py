"""Architectures by the name that config.json gives them."""

from __future__ import annotations

from shared.models.qwen3 import Qwen3ForCausalLM

# Another model is one more line here: a class with Qwen3ForCausalLM's public methods.
MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
