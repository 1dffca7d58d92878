"""Stage 03: any engine, in a process of its own behind an asyncio front end that speaks HTTP."""

from steps import lazily

from .config import Config

__all__ = ["LLM", "AsyncEngine", "Config", "Engine"]

__getattr__ = lazily(__name__, AsyncEngine=".async_engine", Engine=".engine", LLM=".llm")
