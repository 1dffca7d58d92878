"""What runs in a replica's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from steps import load

from .config import Config

if TYPE_CHECKING:
    from shared.engine.protocol import Engine


def build_engine(
    options: dict[str, Any], end: Callable[[Exception], NoReturn] | None = None
) -> Engine:
    """The engine that the options name. Raises ValueError or OSError."""
    config = Config(**options)
    engine: Engine = load(config.engine).Engine(config.wrapped)
    return engine
