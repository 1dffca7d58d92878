"""Offline use of this stage."""

from __future__ import annotations

from shared.llm import OfflineLLM

from .config import Config
from .engine import Engine


class LLM(OfflineLLM):
    """Offline generation with this stage's engine."""

    engine_class = Engine
    config_class = Config
