"""Replicas for tests: fake ones, mostly in threads, and stage 04's modules.

Imports no torch, as tests/online.py: a process with a fake engine is there in half a second.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from tests.online import FakeEngine, Slow, unusable

FATAL = 13


def parallel(module: str) -> Any:
    """A module of stage 04."""
    return importlib.import_module(f"steps.04_dp_tp.{module}")


def config(num_replicas: int = 2, **options: Any) -> Any:
    """Of a model without files; the fake engines look at nothing in it."""
    given = {"model": "qwen3-0.6b", "load_format": "dummy", "device": "cpu", **options}
    return parallel("config").Config(data_parallel_size=num_replicas, **given)


class Mortal(Slow):
    """Dies in the step after that which computes a prompt that begins with FATAL."""

    def before_step(self) -> None:
        super().before_step()
        if any(sequence.token_ids[0] == FATAL for sequence in self.queues.running):
            raise RuntimeError("bad luck")


class Behind:
    """Builds engines and remembers them; replicas start at the same time, so in any order."""

    def __init__(self, build: Any = FakeEngine) -> None:
        self.build = build
        self.engines: list[Any] = []

    def __call__(self, options: dict[str, Any], end: Any) -> Any:
        self.engines.append(self.build(options, end))
        return self.engines[-1]


def half_unusable(options: dict[str, Any], end: Any) -> Any:
    """Of two replicas with a trace, the second."""
    if options["trace"].endswith(".1.jsonl"):
        unusable(options, end)
    return FakeEngine(options)


def endless(options: dict[str, Any], end: Any) -> Any:
    """Is never ready."""
    time.sleep(600)
