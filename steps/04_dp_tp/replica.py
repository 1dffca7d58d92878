"""What runs in a replica's process: an engine, and rank 0 of the model that it shares out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steps import load

from .config import Config

if TYPE_CHECKING:
    from shared.engine.protocol import Engine


def build_engine(options: dict[str, Any], end: Callable[[Exception], None]) -> Engine:
    """The engine that the options name. `end` ends this process: what the end of a worker leads to.
    Raises ValueError or OSError."""
    config: Any = Config(**options)
    engine_class, wrapped = load(config.engine).Engine, config.wrapped
    if wrapped.tensor_parallel_size == 1:
        engine: Engine = engine_class(wrapped)
        return engine
    from .runner import (
        start_group,  # here: the front end imports this module, and does without torch
    )

    runner = start_group(wrapped, engine_class.decodes_in_front, end)
    try:
        engine = engine_class(wrapped, runner)
    except BaseException:
        runner.close()
        raise
    return engine
