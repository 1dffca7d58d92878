"""The stages. Each is a complete engine in a package whose name starts with its number."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def names() -> list[str]:
    """Every stage, in order."""
    here = Path(__file__).parent
    return sorted(p.name for p in here.glob("[0-9][0-9]_*") if (p / "__init__.py").exists())


def engines() -> list[str]:
    """The stages that are engines by themselves, in order: they have a scheduler. The others wrap
    one of them."""
    here = Path(__file__).parent
    return [name for name in names() if (here / name / "scheduler.py").exists()]


def load(name: str) -> ModuleType:
    """The package of a stage: `load("00_baseline").LLM`. Raises ValueError for an unknown one.

    A function, because an import statement cannot spell a name that starts with a digit.
    """
    if name not in names():
        raise ValueError(f"no stage {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"steps.{name}")


def lazily(package: str, **module_of: str) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports names when they are first asked for.

    For what needs torch, whose import takes seconds: `--help` does without, and Ctrl-C meanwhile
    reaches the entry point, which can end cleanly.
    """

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return get
