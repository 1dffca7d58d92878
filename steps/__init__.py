"""The stages. Each is a complete engine in a package whose name starts with its number."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType


def names() -> list[str]:
    """Every stage, in order."""
    here = Path(__file__).parent
    return sorted(p.name for p in here.glob("[0-9][0-9]_*") if (p / "__init__.py").exists())


def load(name: str) -> ModuleType:
    """The package of a stage: `load("00_baseline").LLM`. Raises ValueError for an unknown one.

    A function, because an import statement cannot spell a name that starts with a digit.
    """
    if name not in names():
        raise ValueError(f"no stage {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"steps.{name}")
