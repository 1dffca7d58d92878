"""The starter scheduler's tests fail until it is written, and pass with the solution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(scheduler: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, "exercises/starter_scheduler"],
        cwd=ROOT,
        env={**os.environ, "SCHEDULER": scheduler},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_the_solution_passes() -> None:
    done = run("solution")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_the_starter_fails_everything() -> None:
    done = run("scheduler")
    assert " passed" not in done.stdout, done.stdout[-2000:]
    assert "write schedule()" in done.stdout
