"""Everything an engine reads before it builds a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.models.config import (
    ModelConfig,
    is_given,
    load_model_config,
    real_model_config,
    real_model_names,
)
from shared.models.hub import resolve_model
from shared.tokenizer import TOKENIZER_FILE, Tokenizer

# What an engine calls the model that comes with this package.
BUNDLED = "bundled tiny checkpoint"


@dataclass(frozen=True)
class ModelFiles:
    config: ModelConfig
    weights: Path | None
    """Directory of the weight files; None: random weights."""
    directory: Path | None
    """Directory of all other files; None for a real size known by name only."""

    @classmethod
    def find(cls, model: str | None, load_format: Literal["auto", "dummy"]) -> ModelFiles:
        """Raises ValueError or OSError naming the model or file that is wrong."""
        if load_format == "dummy" and model in real_model_names():
            return cls(real_model_config(model), weights=None, directory=None)
        directory = resolve_model(model)
        config = load_model_config(directory)
        return cls(config, None if load_format == "dummy" else directory, directory)

    def tokenizer(self) -> Tokenizer | None:
        """None where there is none: the engine itself needs token ids only."""
        if self.directory is None or not is_given(self.directory / TOKENIZER_FILE):
            return None
        return Tokenizer.from_directory(self.directory)
