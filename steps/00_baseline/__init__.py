"""Stage 00: the whole engine with the simplest policy, prefill first."""

from shared.config import EngineConfig as Config
from steps import lazily

__all__ = ["LLM", "Config", "Engine", "Scheduler"]

__getattr__ = lazily(__name__, Engine=".engine", LLM=".llm", Scheduler=".scheduler")
