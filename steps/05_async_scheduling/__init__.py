"""Stage 05: the next step is scheduled and submitted while the device computes the last one."""

from steps import lazily

from .config import Config

__all__ = ["LLM", "Config", "Engine", "Scheduler"]

__getattr__ = lazily(__name__, Engine=".engine", LLM=".llm", Scheduler=".scheduler")
