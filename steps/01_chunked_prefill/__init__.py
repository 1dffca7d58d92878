"""Stage 01: a token budget per step. Decodes first, chunks of prompts fill the rest."""

from steps import lazily

from .config import Config

__all__ = ["LLM", "Config", "Engine", "Scheduler"]

__getattr__ = lazily(__name__, Engine=".engine", LLM=".llm", Scheduler=".scheduler")
