"""Stage 00: the whole engine with the simplest policy, prefill first."""

from shared.config import EngineConfig as Config
from shared.llm import OfflineLLM

from .engine import Engine


class LLM(OfflineLLM):
    """Offline generation with this stage's engine."""

    engine_class = Engine
    config_class = Config


__all__ = ["LLM", "Config", "Engine"]
