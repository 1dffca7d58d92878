"""Stage 01: a token budget per step. Decodes first, chunks of prompts fill the rest."""

from shared.llm import OfflineLLM

from .config import Config
from .engine import Engine


class LLM(OfflineLLM):
    """Offline generation with this stage's engine."""

    engine_class = Engine
    config_class = Config


__all__ = ["LLM", "Config", "Engine"]
