"""Compares two result files row by row: the second over the first, with the spread of both.

    python -m bench.diff before/results.json after/results.json

Takes files of `bench.compare`, `bench.sweep` and `steps.NN_x.bench`, or of `bench.online`. Of equal
rows in a file the newest counts. The range of a ratio goes from the second's smallest over the
first's largest to the reverse. A star: it does not contain 1, so the two differ by more than their
repeats do. Rows of different work are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from bench.plots import SETTINGS
from bench.result import SCHEMA_VERSION, Hardware, WorkloadInfo, read_rows
from shared.cli import run_main

# Header, names in `medians` offline and online.
METRICS = (
    ("tokens/s", "tokens_per_second", "tokens_per_second"),
    ("TTFT p50", "ttft_ms.p50", "latencies.ttft_scheduled_ms.p50"),
    ("TPOT p50", "tpot_ms.p50", "latencies.tpot_ms.p50"),
    ("gap p99", "gap_ms.p99", "latencies.gap_ms.p99"),
    ("goodput", "", "goodput.requests_per_second"),
)
PIPED_WIDTH = 160


class AnyRow(msgspec.Struct, frozen=True):
    """What rows of offline and online results have in common, and what tells them apart."""

    created: str
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    medians: dict[str, float]
    spread: dict[str, tuple[float, float]]
    schema_version: int
    stage: str | None = None
    workload: WorkloadInfo | None = None
    label: str = ""
    scenario: str | None = None
    rate_rps: float | None = None
    sha256: str = ""
    model: str | None = None

    @property
    def work(self) -> tuple[str, str]:
        """What was done, by name; equal names have to have equal hashes."""
        if self.workload is not None:
            return self.workload.name, self.workload.scale
        rate = "" if self.rate_rps is None else f"{self.rate_rps:g} requests/s"
        return self.scenario or "own flags", rate

    @property
    def work_hash(self) -> str:
        return self.sha256 if self.workload is None else self.workload.sha256

    @property
    def who(self) -> tuple[Any, ...]:
        model = self.model or self.config.get("model")
        name = self.label if self.workload is None else self.stage
        return *self.work, name, model, self.config.get("dtype")

    @property
    def settings(self) -> str:
        parts = [form.format(self.config[n]) for n, form in SETTINGS.items() if n in self.config]
        return ", ".join(parts)

    @property
    def place(self) -> str:
        gpus = [gpu.name for gpu in self.hardware.gpus]
        return f"{len(gpus)} x {gpus[0]}" if gpus else self.hardware.cpu


@dataclass(frozen=True)
class Pair:
    name: str
    first: AnyRow | None
    second: AnyRow | None


def pairs(first: Sequence[AnyRow], second: Sequence[AnyRow]) -> list[Pair]:
    """Rows of the same stage, work and model; where a file has several, of the same settings too.

    Raises ValueError if work of one name differs in its content, or if no row has a counterpart.
    """
    _check_work(first, second)
    crowded = _crowded(first) | _crowded(second)
    keyed = [
        {(*row.who, row.settings if row.who in crowded else ""): row for row in _by_age(rows)}
        for rows in (first, second)
    ]
    found = []
    for key in dict.fromkeys([*keyed[0], *keyed[1]]):
        name = " ".join(str(part) for part in key if part)
        found.append(Pair(name, keyed[0].get(key), keyed[1].get(key)))
    if not any(pair.first and pair.second for pair in found):
        raise ValueError("no row of the one file has a counterpart in the other")
    return found


def _by_age(rows: Sequence[AnyRow]) -> list[AnyRow]:
    return sorted((row for row in rows if row.medians), key=lambda row: row.created)


def _crowded(rows: Sequence[AnyRow]) -> set[tuple[Any, ...]]:
    """Those with rows that differ in their settings."""
    settings: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        settings.setdefault(row.who, set()).add(row.settings)
    return {who for who, found in settings.items() if len(found) > 1}


def _check_work(first: Sequence[AnyRow], second: Sequence[AnyRow]) -> None:
    known = {row.work: row.work_hash for row in first}
    for row in second:
        if known.get(row.work, row.work_hash) != row.work_hash:
            name = " ".join(part for part in row.work if part)
            raise ValueError(
                f"{name} is not the same work in both files: sha256 {known[row.work][:12]} and "
                f"{row.work_hash[:12]}"
            )


def ratio(first: AnyRow, second: AnyRow, metric: str) -> str:
    """`1.05 (1.01-1.09) *`; without a range where one of them ran only once."""
    old, new = first.medians.get(metric), second.medians.get(metric)
    if not old or new is None:
        return "-"
    text = f"{new / old:.3f}"
    lowest, highest = first.spread[metric]
    if min(len(first.runs), len(second.runs)) < 2 or not lowest:
        return text
    low, high = second.spread[metric][0] / highest, second.spread[metric][1] / lowest
    return f"{text} ({low:.3f}-{high:.3f})" + (" *" if low > 1 or high < 1 else "")


def table(found: Sequence[Pair]) -> Table:
    both = [(p.first, p.second) for p in found if p.first is not None and p.second is not None]
    columns = [
        (header, offline, online)
        for header, offline, online in METRICS
        if any(offline in a.medians or online in a.medians for a, _ in both)
    ]
    made = Table(title="second / first; *: beyond the spread", title_justify="left")
    made.add_column("row", overflow="fold")
    for header in (*(c[0] for c in columns), "runs"):
        made.add_column(header, justify="right", overflow="fold")
    for pair in found:
        a, b = pair.first, pair.second
        if a is None or b is None:
            missing = "only in the second" if a is None else "only in the first"
            made.add_row(pair.name, missing)
            continue
        cells = [ratio(a, b, c[1] if a.workload is not None else c[2]) for c in columns]
        made.add_row(pair.name, *cells, f"{len(a.runs)}, {len(b.runs)}")
    return made


def describe(rows: Sequence[AnyRow]) -> str:
    """Commits and machines of a file."""
    commits = {(row.commit or "unknown")[:10] + "+changes" * bool(row.dirty) for row in rows}
    places = {row.place for row in rows}
    return f"commit {', '.join(sorted(commits))}; {', '.join(sorted(places))}"


def main(
    first: Annotated[Path, tyro.conf.Positional], second: Annotated[Path, tyro.conf.Positional]
) -> int:
    """Compare two result files, the second with the first.

    Args:
        first: JSON of results.
        second: JSON of results of the same work.
    """
    rows = [read_rows(path, list[AnyRow], SCHEMA_VERSION) for path in (first, second)]
    found = pairs(*rows)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    for name, path, of_file in zip(("first", "second"), (first, second), rows, strict=True):
        console.print(f"{name}: {path}: {describe(of_file)}", highlight=False, soft_wrap=True)
    if len({row.place for of_file in rows for row in of_file}) > 1:
        console.print("These are different machines.")
    console.print(table(found))
    return 0


if __name__ == "__main__":
    run_main(lambda: tyro.cli(main, prog="python -m bench.diff", args=sys.argv[1:]))
