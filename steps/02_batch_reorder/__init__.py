"""Stage 02: decodes in front, prompts behind, and steps that are all decode where possible."""

from steps import lazily

from .config import Config

__all__ = ["LLM", "Config", "Engine", "Scheduler"]

__getattr__ = lazily(__name__, Engine=".engine", LLM=".llm", Scheduler=".scheduler")
