"""Stage 03's modules, by name: no import statement can spell that of their package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

STAGE = "03_online"


def online(module: str) -> Any:
    """`online("client").EngineClient`"""
    return import_module(f"steps.{STAGE}.{module}")
