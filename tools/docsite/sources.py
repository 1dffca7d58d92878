"""Regions of the source by name, so that code on a page is the code that runs.

A region is a path and a Python name in it: `steps/00_baseline/scheduler.py` and
`Scheduler.schedule`. The source needs no markers, and a name that has gone stops the build.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from functools import cache

from tools.docsite import ROOT

PACKAGES = ("shared", "steps", "bench", "exercises", "tests", "tools")


@dataclass(frozen=True)
class Region:
    """Lines `first` to `last` of a file, counted from 1."""

    path: str
    first: int
    last: int
    text: str

    @property
    def num_lines(self) -> int:
        return self.last - self.first + 1


def python_files() -> list[str]:
    """Every source file that the site shows, relative to the root."""
    return sorted(
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    )


@cache
def read(path: str) -> str:
    """Raises ValueError for a file that is not there."""
    try:
        return (ROOT / path).read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


@cache
def _names(path: str) -> dict[str, tuple[int, int]]:
    """Qualified name -> first and last line, of everything that a module or a class defines."""
    found: dict[str, tuple[int, int]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for position, node in enumerate(body):
            names: list[str] = []
            first = node.lineno
            last = node.end_lineno or first
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.name]
                first = min([first, *(d.lineno for d in node.decorator_list)])
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
                after = body[position + 1] if position + 1 < len(body) else None
                if _is_text(after):  # the attribute's docstring
                    last = after.end_lineno or last
            for name in names:
                found[prefix + name] = (first, last)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(read(path)).body, "")
    return found


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def region(path: str, name: str = "") -> Region:
    """Raises ValueError if the file or the name in it is not there. No name: the whole file."""
    text = read(path)
    lines = text.splitlines()
    if not name:
        return Region(path, 1, len(lines), text)
    if name not in _names(path):
        near = [known for known in _names(path) if known.endswith(name.rsplit(".", 1)[-1])]
        hint = f"; perhaps {', '.join(near)}" if near else ""
        raise ValueError(f"{path} defines no {name!r}{hint}")
    first, last = _names(path)[name]
    return Region(path, first, last, textwrap.dedent("\n".join(lines[first - 1 : last])))


def summary(path: str) -> str:
    """The first sentence of a module's docstring; empty for what is no Python."""
    if not path.endswith(".py"):
        return ""
    text = " ".join((ast.get_docstring(ast.parse(read(path))) or "").split())
    end = text.find(". ")
    text = text if end < 0 else text[: end + 1]
    return text.split(": python -m")[0].split(": `python -m")[0]


def parse_spot(spot: str) -> Region:
    """`path#Name` or `path`."""
    path, _, name = spot.partition("#")
    return region(path, name)


def constant(path: str, name: str) -> str:
    """The value of a module's constant, as it is written."""
    node = ast.parse(region(path, name).text).body[0]
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        raise ValueError(f"{path}: {name} is no constant")
    return ast.unparse(node.value)
