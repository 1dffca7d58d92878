"""Offline use of this stage."""

from __future__ import annotations

from shared.config import EngineConfig as Config
from shared.llm import OfflineLLM

from .engine import Engine


class LLM(OfflineLLM):
    """Offline generation with this stage's engine."""

    engine_class = Engine
    config_class = Config
