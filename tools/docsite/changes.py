"""What a stage changes: its files against those of the stage before, and what it reuses."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

from tools.docsite import ROOT, sources


@dataclass(frozen=True)
class FileChange:
    name: str
    lines_before: int | None  # None: the file is new
    lines: int | None  # None: the file is gone
    added: int
    removed: int
    diff: str


def stages() -> list[str]:
    return sorted(
        p.name for p in (ROOT / "steps").glob("[0-9][0-9]_*") if (p / "__init__.py").exists()
    )


def before(stage: str) -> str | None:
    """The stage it is compared with: the one whose scheduler it extends, else the one before; None
    for the first, and for one without a scheduler, which wraps any of the others. Raises ValueError
    for an unknown one."""
    known = stages()
    if stage not in known:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(known)}")
    index = known.index(stage)
    if not index or "scheduler.py" not in files_of(stage):
        return None
    extends = re.search(r'load\("(\w+)"\)', "".join(_lines(f"steps/{stage}/scheduler.py")))
    return extends[1] if extends else known[index - 1]


def files_of(stage: str) -> list[str]:
    """Names relative to the stage's directory, Python files and others that belong to it."""
    root = ROOT / "steps" / stage
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".html")
    )


def changes(stage: str) -> list[FileChange]:
    """One entry per file of this stage or the one before, equal ones included."""
    old_stage = before(stage)
    new_files = files_of(stage)
    old_files = [] if old_stage is None else files_of(old_stage)
    result = []
    for name in sorted({*new_files, *old_files}):
        old = _lines(f"steps/{old_stage}/{name}") if name in old_files else None
        new = _lines(f"steps/{stage}/{name}") if name in new_files else None
        diff = list(
            difflib.unified_diff(
                old or [],
                new or [],
                f"steps/{old_stage}/{name}",
                f"steps/{stage}/{name}",
                lineterm="",
            )
        )
        body = diff[2:]
        result.append(
            FileChange(
                name,
                None if old is None else len(old),
                None if new is None else len(new),
                sum(line.startswith("+") for line in body),
                sum(line.startswith("-") for line in body),
                "\n".join(diff),
            )
        )
    return result


def _lines(path: str) -> list[str]:
    return sources.read(path).splitlines()


def reused(stage: str) -> list[str]:
    """Every file outside the stage that it imports, directly or not."""
    own = {f"steps/{stage}/{name}" for name in files_of(stage) if name.endswith(".py")}
    seen: set[str] = set()
    todo = sorted(own)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        todo += [found for found in _imports(path) if found not in seen]
    return sorted(seen - own)


def _imports(path: str) -> list[str]:
    """Files of this repository that a file imports, `steps.load("...")` and lazy names included."""
    package = path.rsplit("/", 1)[0].split("/")
    found: list[str] = []
    for node in ast.walk(ast.parse(sources.read(path))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *((node.module or "").split(".") if node.module else [])]
            found += _files("/".join(module))
            for alias in node.names:
                found += _files("/".join([*module, alias.name]))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found += _files(alias.name.replace(".", "/"))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "load"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            stage = str(node.args[0].value)
            if (ROOT / "steps" / stage).is_dir():
                found += [
                    f"steps/{stage}/{name}" for name in files_of(stage) if name.endswith(".py")
                ]
    return [name for name in found if name.split("/")[0] in ("shared", "steps")]


def _files(stem: str) -> list[str]:
    candidates = (f"{stem}.py", f"{stem}/__init__.py")
    return [name for name in candidates if (ROOT / name).is_file()]
