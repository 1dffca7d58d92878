"""Stage 02: decodes in front, prompts behind, and steps that are all decode where possible."""

from shared.llm import OfflineLLM

from .config import Config
from .engine import Engine


class LLM(OfflineLLM):
    """Offline generation with this stage's engine."""

    engine_class = Engine
    config_class = Config


__all__ = ["LLM", "Config", "Engine"]
