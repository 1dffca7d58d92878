"""The built site, once for all tests that look at it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a strict build. A broken link or a missing source region fails it."""
    for package in ("material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the site's tools are not installed ({package}): pip install -e '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(directory)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return directory
