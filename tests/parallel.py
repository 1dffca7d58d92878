"""Replicas for tests: fake ones in threads, and stage 04's modules."""

from __future__ import annotations

import importlib
from typing import Any


def parallel(module: str) -> Any:
    """A module of stage 04."""
    return importlib.import_module(f"steps.04_dp_tp.{module}")


def config(num_replicas: int = 2, **options: Any) -> Any:
    """Of a model without files; the fake engines look at nothing in it."""
    given = {"model": "qwen3-0.6b", "load_format": "dummy", "device": "cpu", **options}
    return parallel("config").Config(data_parallel_size=num_replicas, **given)
