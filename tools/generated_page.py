"""The command line of the tools that write a part of a docs page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def run(page: Path, rewritten: Callable[[str], str], description: str | None, tool: str) -> None:
    """Rewrite `page`, or with --check exit with status 1 if that would change it."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    old = page.read_text()
    new = rewritten(old)
    if check and new != old:
        sys.exit(f"{page} is out of date: run python -m tools.{tool}")
    page.write_text(new)
