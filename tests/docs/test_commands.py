"""Every command that README and pages show works, but those marked `<!-- not run: why -->`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT

pytestmark = pytest.mark.slow

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?:bash|console)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "```bash" in path.read_text() or "```console" in path.read_text()
)
SHOWN = ("shared", "steps", "bench", "tools", "tests", "docs", "exercises", "pyproject.toml")


def commands(page: str) -> list[str]:
    """The commands of a page, joined where they go on in the next line."""
    found = []
    for match in BLOCK.finditer((ROOT / page).read_text()):
        if match["reason"]:
            continue
        text = match["body"].replace("\\\n", " ")
        lines = text.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [line for line in lines if line.strip() and not line.startswith("#")]
    return found


CASES = [(page, command) for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like the repository, so that what commands write is not in it."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in SHOWN:
        (directory / name).symlink_to(ROOT / name)
    return directory


def test_pages_have_commands() -> None:
    assert any(page.startswith("docs/stages/") for page, _ in CASES)
    assert any(page == "README.md" for page, _ in CASES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page, command", CASES, ids=[f"{p}: {c[:60]}" for p, c in CASES])
def test_a_command_works(page: str, command: str, place: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {
        **os.environ,
        "PATH": path,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BABY_VLLM_COMMIT": "unknown",
        "PYTHONPATH": str(place),
    }
    done = subprocess.run(
        ["bash", "-ec", command], cwd=place, env=env, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
