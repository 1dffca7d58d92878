"""Which version of this project runs."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

NAME = "baby-vllm"


def version() -> str:
    """Of the installed package, or of the checkout that runs without being installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        file = Path(__file__).parent.parent / "pyproject.toml"
        found: str = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
        return found
