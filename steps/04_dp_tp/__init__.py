"""Stage 04: any engine on several GPUs: layers shared by some of them, replicas on the others."""

from steps import lazily

from .config import Config

__all__ = ["LLM", "AsyncEngine", "Config", "Engine"]

__getattr__ = lazily(__name__, AsyncEngine=".async_engine", Engine=".engine", LLM=".llm")
