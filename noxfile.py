"""One command for each thing a contributor does; `nox -l` lists them.

Every session installs this project in editable mode with the versions of constraints.txt. Arguments
after `--` go to the session's main command: `nox -s tests -- -k scheduler -x`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint"]
nox.options.reuse_existing_virtualenvs = True
# Not uv: pip honours the machine's own pip configuration (mirrors, local wheels) and constraints.
nox.options.default_venv_backend = "virtualenv"

CONSTRAINTS = ("-c", "constraints.txt")
PACKAGES = ("shared", "steps", "bench")
# The bundled checkpoint is all that the tests need; a test that would download something fails.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def install(session: nox.Session, *extras: str) -> None:
    """Install the project with its extras, and with the GPU ones where an NVIDIA GPU is present."""
    wanted = set(extras)
    if shutil.which("nvidia-smi"):
        wanted.add("gpu")
    suffix = f"[{','.join(sorted(wanted))}]" if wanted else ""
    session.install("-e", f".{suffix}", *CONSTRAINTS)


def flags(defaults: dict[str, str], posargs: list[str]) -> list[str]:
    """The posargs, preceded by each default flag that they do not set themselves."""
    given = {arg.split("=", 1)[0] for arg in posargs}
    kept = [part for flag, value in defaults.items() if flag not in given for part in (flag, value)]
    return [*kept, *posargs]


def pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    profile = os.environ.get("HYPOTHESIS_PROFILE")
    options = [f"--hypothesis-profile={profile}"] if profile else []
    session.run("pytest", *options, *args, *session.posargs, env={**OFFLINE, **(env or {})})


@nox.session
def demo(session: nox.Session) -> None:
    """Generate text with the bundled checkpoint; the first thing to run in a fresh checkout."""
    install(session)
    defaults = {
        "--prompt": "ROMEO:\n",
        "--max-tokens": "200",
        "--temperature": "0.7",
        "--seed": "0",
    }
    # The bundled model's matrices are too small to share: a second thread mostly waits, and on a
    # busy machine it waits long.
    env = {"OMP_NUM_THREADS": "1"}
    command = ("python", "-m", "steps.00_baseline.generate")
    session.run(*command, *flags(defaults, session.posargs), env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tests, on the CPU."""
    install(session, "dev")
    pytest(session, "-m", "not gpu and not slow")


@nox.session
def tests_full(session: nox.Session) -> None:
    """All tests that need no GPU, the slow ones included; those of the site need Chromium."""
    install(session, "dev", "docs", "browser", "ray")
    pytest(session, "-m", "not gpu")


@nox.session
def kernels(session: nox.Session) -> None:
    """The Triton kernels against their torch references, in Triton's CPU interpreter."""
    libc = platform.libc_ver()[0]
    if not (sys.platform == "linux" and libc == "glibc") or platform.machine() not in (
        "x86_64",
        "aarch64",
    ):
        session.skip(
            "Triton publishes wheels for Linux with glibc on x86_64 and aarch64 only; this is "
            f"{sys.platform} {libc} {platform.machine()}. The torch references are still tested "
            "by `nox -s tests`."
        )
    install(session, "dev", "gpu")
    # Read when a kernel is decorated, so it has to be set before anything is imported.
    pytest(session, "-m", "not gpu", "tests/kernels", env={"TRITON_INTERPRET": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff (lint, format) and mypy. `nox -s lint -- --fix` lets ruff repair what it can."""
    install(session, "dev")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *(arg for package in PACKAGES for arg in ("-p", package)))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; a broken link or a source region that is gone is an error."""
    # Only the site's own tools: building it reads sources and results as text, so torch stays out.
    project = nox.project.load_toml(Path("pyproject.toml"))["project"]
    session.install(*project["optional-dependencies"]["docs"], *CONSTRAINTS)
    # The variable silences Material's notice about its own future, which is not about this site.
    env = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare all stages on the frozen workloads; results, tables and plots go to out/bench."""
    install(session)
    # One thread for the same reason as in the demo; a GPU's host has no use for more either.
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    session.run("python", "-m", "bench.compare", *session.posargs, env=env)
