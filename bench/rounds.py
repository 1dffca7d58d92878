"""Runs contenders against each other: a fresh process for each in every round, in alternating
order (A B C, C B A), and one row per contender and workload made of them."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import tyro
from rich.console import Console

from bench import external, plots
from bench.call import call
from bench.result import (
    Result,
    append_results,
    best_floor,
    common_config,
    percent_of_floor,
    prepare_output,
    read_results,
    summarise,
)
from bench.tables import markdown, rich_tables
from bench.workloads import WorkloadName
from shared.cli import EXIT_FAILED

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Columns of the tables when the output is no terminal and so has no width.
PIPED_WIDTH = 200


@dataclass(frozen=True)
class RunOptions:
    output: Path = Path("out/bench")
    """Directory for runs.json, results.json, results.md and the plots."""
    rounds: int = 2
    """Every other round runs backwards."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1800.0
    """For one process."""
    time_limit: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """For all of them. What has not run by then is left out, and its row says so."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError("rounds must be at least 1")
        if self.timeout <= 0 or (self.time_limit is not None and self.time_limit <= 0):
            raise ValueError("timeout and time-limit must be positive")

    def at_most(self, count: int) -> str:
        """How long so many processes may take."""
        seconds = min(count * self.timeout, self.time_limit or math.inf)
        return f"at most {seconds / 60:.0f} min together"

    def next_timeout(self, started: float) -> float:
        """For a process that starts now, on the clock of `time.monotonic`.

        Raises RuntimeError when the time for all is over.
        """
        if self.time_limit is None:
            return self.timeout
        left = started + self.time_limit - time.monotonic()
        if left <= 0:
            raise RuntimeError(f"the {self.time_limit:.0f} s were over")
        return min(self.timeout, left)


@dataclass(frozen=True)
class Contender:
    """One row of a comparison."""

    name: str
    """The stage, or what somebody else's engine is to be called."""
    flags: tuple[str, ...] = ()
    """Of the stage's benchmark."""
    command: str | None = None
    """Runs somebody else's engine; see bench.external."""

    @property
    def label(self) -> str:
        return " ".join((self.name, *self.flags))


@dataclass(frozen=True)
class Attempt:
    """What one process left, and why there are not all rows."""

    rows: list[Result]
    problem: str | None = None

    def row(self, workload: WorkloadName) -> Result | None:
        return next((row for row in self.rows if row.workload.name == workload), None)


# (who, number of the round, rows that there are so far)
Run = Callable[[Contender, int, Sequence[Result]], Attempt]


def alternate(contenders: Sequence[T], rounds: int) -> list[tuple[int, T]]:
    """(round, contender): A B C C B A ..., so that a machine that drifts favours nobody."""
    return [
        (number, contender)
        for number in range(rounds)
        for contender in (contenders if number % 2 == 0 else reversed(contenders))
    ]


def compare(
    contenders: Sequence[Contender], workloads: Sequence[WorkloadName], rounds: int, run: Run
) -> list[Result]:
    """One row per workload and contender. In a round all see equal prompts.

    Raises RuntimeError when nothing ran at all: there is nothing to make a table of.
    """
    attempts: dict[Contender, list[Attempt]] = {contender: [] for contender in contenders}
    seen: list[Result] = []
    for number, contender in alternate(contenders, rounds):
        attempt = run(contender, number, seen)
        attempts[contender].append(attempt)
        seen += attempt.rows
    if not seen:
        problem = next(iter(attempts.values()))[0].problem
        raise RuntimeError(f"nothing ran {', '.join(workloads)}: {problem}")
    merged = []
    for workload in workloads:
        like = next((row for row in seen if row.workload.name == workload), None)
        if like is None:
            logger.error("nothing ran %s", workload)
            continue
        merged += [merge(c, workload, attempts[c], like) for c in contenders]
    return merged


def merge(
    contender: Contender, workload: WorkloadName, attempts: Sequence[Attempt], like: Result
) -> Result:
    """One row of a contender's processes; one that never ran borrows the context of `like`."""
    found = [(attempt.row(workload), attempt.problem) for attempt in attempts]
    rows = [row for row, _ in found if row is not None]
    runs = [run for row in rows for run in row.runs]
    medians, spread = summarise(runs)
    problems = [problem if row is None else row.error for row, problem in found]
    errors = list(dict.fromkeys(p for p in problems if p))
    floor = best_floor(row.floor for row in rows)
    if rows:
        base = rows[0]
    else:
        config = {**common_config(like), "flags": " ".join(contender.flags)}
        base = msgspec.structs.replace(like, config=config)
    return msgspec.structs.replace(
        base,
        stage=contender.name,
        runs=runs,
        medians=medians,
        spread=spread,
        floor=floor,
        percent_of_floor=percent_of_floor(workload, medians, floor),
        gpu_use=rows[-1].gpu_use if rows else [],
        error="; ".join(errors) or None,
    )


def run_stage(
    contender: Contender, workloads: Sequence[WorkloadName], number: int, timeout: float
) -> Attempt:
    """One measured repeat of every workload in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.json"
        command = [
            sys.executable, "-m", f"steps.{contender.name}.bench", "--workload", *workloads,
            "--repeats", "1", "--first-repeat", str(number), "--json", str(path),
            *contender.flags,
        ]  # fmt: skip
        problem = call(command, timeout)
        return Attempt(read_results(path) if path.exists() else [], problem)


@dataclass
class Processes:
    """Runs a contender, within the time there is, and keeps every row as soon as it exists."""

    workloads: Sequence[WorkloadName]
    options: RunOptions
    count: int
    started: float = field(default_factory=time.monotonic)
    done: int = 0

    def announce(self) -> None:
        names = ", ".join(self.workloads)
        most = self.options.at_most(self.count)
        logger.info("%d processes, each with %s; %s", self.count, names, most)

    def __call__(self, contender: Contender, number: int, seen: Sequence[Result]) -> Attempt:
        try:
            timeout = self.options.next_timeout(self.started)
        except RuntimeError as error:
            attempt = Attempt([], str(error))
        else:
            attempt = self._attempt(contender, number, seen, timeout)
        append_results(self.options.output / "runs.json", attempt.rows)
        self._log(contender, number, attempt)
        return attempt

    def _attempt(
        self, contender: Contender, number: int, seen: Sequence[Result], timeout: float
    ) -> Attempt:
        if contender.command is None:
            return run_stage(contender, self.workloads, number, timeout)
        rows, problem = external.run(
            contender.name, contender.command, self.workloads, number, seen, timeout
        )
        return Attempt(rows, problem)

    def _log(self, contender: Contender, number: int, attempt: Attempt) -> None:
        self.done += 1
        outcomes = [
            f"{row.workload.name} {row.medians['tokens_per_second']:,.1f} tokens/s"
            for row in attempt.rows
            if "tokens_per_second" in row.medians
        ]
        outcomes += [attempt.problem] if attempt.problem else []
        left = (time.monotonic() - self.started) / self.done * (self.count - self.done)
        logger.info(
            "round %d, %s: %s (%d of %d, about %.0f s to go)",
            number + 1, contender.label, "; ".join(outcomes) or "nothing",
            self.done, self.count, left,
        )  # fmt: skip


def run_comparison(
    contenders: Sequence[Contender], workloads: Sequence[WorkloadName], options: RunOptions
) -> int:
    """Runs, prints, writes. A contender that loses or fails keeps its row. Exit status: 1 if
    something failed."""
    prepare_output(options.output / "runs.json")
    processes = Processes(workloads, options, count=len(contenders) * options.rounds)
    processes.announce()
    try:
        rows = compare(contenders, workloads, options.rounds, processes)
    except RuntimeError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    path = options.output / "results.json"
    append_results(path, rows)
    (options.output / "results.md").write_text(markdown(read_results(path)))
    drawn = plots.write(msgspec.to_builtins(rows), options.output)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(*rich_tables(rows))
    logger.info("%s; plots: %s", path, ", ".join(drawn) or "none")
    return EXIT_FAILED if any(row.error is not None for row in rows) else 0
