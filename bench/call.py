"""Starts a command and waits for it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import pairwise

from bench.result import ROOT


def call(command: Sequence[str], timeout: float) -> str | None:
    """Runs it from the root of the project. None, or in one line why it failed."""
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"no result after {timeout:.0f} s"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    # A wrong flag is told in a frame of several lines, the first of which says what is wrong.
    framed = [line.strip("│ ") for top, line in pairwise(lines) if top.startswith("╭")]
    return (framed or lines or [f"exit status {done.returncode}"])[-1]
