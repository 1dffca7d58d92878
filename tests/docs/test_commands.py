"""Every command that README and pages show works, but those marked `<!-- not run: why -->`.

Commands and Python code marked `<!-- needs the server -->` are run while stage 03 serves the
bundled model; pages write its address as http://127.0.0.1:8000.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT

pytestmark = pytest.mark.slow

BLOCK = re.compile(
    r"(?:^<!-- (?:not run: (?P<reason>.+?)|(?P<server>needs the server)) -->\n)?"
    r"^```(?P<language>bash|console|python)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHOWN_SERVER = "http://127.0.0.1:8000"
SERVING = re.compile(r"serving \S+ at (http://\S+)")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "```bash" in path.read_text() or "```console" in path.read_text()
)
SHOWN = ("shared", "steps", "bench", "tools", "tests", "docs", "exercises", "pyproject.toml")


def commands(page: str, with_server: bool = False) -> list[str]:
    """The commands of a page, joined where they go on in the next line; those that need the server,
    or those that do not. Of Python code, only what needs the server: a whole block is one."""
    found = []
    for match in BLOCK.finditer((ROOT / page).read_text()):
        if match["reason"] or bool(match["server"]) != with_server:
            continue
        if match["language"] == "python":
            if with_server:
                found.append(f"python - <<'END'\n{match['body']}END")
            continue
        text = match["body"].replace("\\\n", " ")
        lines = text.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [line for line in lines if line.strip() and not line.startswith("#")]
    return found


CASES = [(page, command) for page in PAGES for command in commands(page)]
SERVER_CASES = [(page, command) for page in PAGES for command in commands(page, with_server=True)]


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
    assert any(page == "docs/stages/03_online.md" for page, _ in SERVER_CASES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page, command", CASES, ids=[f"{p}: {c[:60]}" for p, c in CASES])
def test_a_command_works(page: str, command: str, place: Path) -> None:
    run(page, command, place)


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "steps.03_online.serve", "--port", "0"]
    flags = ["--device", "cpu", "--num-kvcache-blocks", "400"]
    process = subprocess.Popen(
        [*command, *flags],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = next(filter(None, map(SERVING.search, process.stderr)), None)
        assert found is not None, "the server did not start"
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page, command", SERVER_CASES, ids=[f"{p}: {c[:60]}" for p, c in SERVER_CASES]
)
def test_a_command_works_with_the_server(page: str, command: str, place: Path, server: str) -> None:
    assert SHOWN_SERVER in command
    run(page, command.replace(SHOWN_SERVER, server), place)


def run(page: str, command: str, place: Path) -> None:
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
