"""Compares stages on the same work: a fresh process per run, in alternating order (A B C C B A).

    python -m bench.compare --steps all --workload nano --output bench/results/nano
    python -m bench.compare --steps 00_baseline 01_chunked_prefill --workload decode_gap \\
        --output out --model qwen3-0.6b --load-format dummy

Flags it does not know go to the benchmark of every stage that has them. In the output directory
`runs.json` gets a row per process and `results.json` one per stage; both only ever grow.
`results.md` is made from `results.json`. A stage that loses or fails keeps its row.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console

import steps as stages
from bench.cli import flag_name
from bench.result import (
    ROOT,
    Result,
    append_results,
    percent_of_floor,
    read_results,
    summarise,
)
from bench.tables import markdown, rich_tables
from bench.workloads import WorkloadName

logger = logging.getLogger(__name__)

# Columns of the tables when the output is no terminal and so has no width.
PIPED_WIDTH = 200


@dataclass(frozen=True)
class CompareOptions:
    output: Path
    """Directory for runs.json, results.json and results.md."""
    steps: tuple[str, ...] = ("all",)
    """Stages by name, the first being what the others are compared with; or all of them."""
    workload: tuple[WorkloadName, ...] = ("nano",)
    """One or more workloads."""
    rounds: int = 2
    """Every other round runs the stages backwards."""
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1800.0
    """For one process."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError("rounds must be at least 1")


@dataclass(frozen=True)
class Attempt:
    """What one process left: a row, or why there is none."""

    stage: str
    row: Result | None
    problem: str | None = None


RunStage = Callable[[str, WorkloadName, int], Attempt]


def stage_names(wanted: Sequence[str]) -> list[str]:
    """The stages asked for; "all": those that are engines by themselves, for the others run one of
    these. Raises ValueError for one without a benchmark."""
    directory = Path(stages.__file__).parent
    found = [name for name in stages.names() if (directory / name / "bench.py").exists()]
    if tuple(wanted) == ("all",):
        return [name for name in found if name in stages.engines()]
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise ValueError(f"no stage {unknown[0]!r} with a benchmark; there are: {', '.join(found)}")
    return list(dict.fromkeys(wanted))


def alternate(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, stage): A B C C B A ..., so that a machine that drifts favours nobody."""
    return [
        (number, name)
        for number in range(rounds)
        for name in (names if number % 2 == 0 else reversed(names))
    ]


def compare(
    names: Sequence[str], workload: WorkloadName, rounds: int, run: RunStage
) -> tuple[list[Result], list[Result]]:
    """(rows of single processes, one merged row per stage). Stages of a round see equal prompts.

    Raises RuntimeError when nothing ran at all: there is nothing to make a table of.
    """
    attempts = [run(name, workload, number) for number, name in alternate(names, rounds)]
    raw = [attempt.row for attempt in attempts if attempt.row is not None]
    if not raw:
        raise RuntimeError(f"no stage ran {workload}: {attempts[0].problem}")
    return raw, [
        merge(name, [a for a in attempts if a.stage == name], like=raw[0]) for name in names
    ]


def merge(stage: str, attempts: Sequence[Attempt], like: Result) -> Result:
    """One row from a stage's processes; one that never ran borrows the context of `like`."""
    rows = [attempt.row for attempt in attempts if attempt.row is not None]
    runs = [run for row in rows for run in row.runs]
    medians, spread = summarise(runs)
    problems = [a.problem or (a.row.error if a.row else None) for a in attempts]
    errors = list(dict.fromkeys(p for p in problems if p))
    # The best rates seen are closest to what the device can do.
    floors = [row.floor for row in rows if row.floor is not None]
    floor = max(floors, key=lambda f: f.tokens_per_second, default=None)
    return msgspec.structs.replace(
        rows[0] if rows else like,
        stage=stage,
        runs=runs,
        medians=medians,
        spread=spread,
        floor=floor,
        percent_of_floor=percent_of_floor(like.workload.name, medians, floor),
        gpu_use=rows[-1].gpu_use if rows else [],
        error="; ".join(errors) or None,
    )


def run_stage(
    stage: str, workload: WorkloadName, number: int, flags: Sequence[str], timeout: float
) -> Attempt:
    """One measured repeat of one stage in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "row.json"
        command = [
            sys.executable, "-m", f"steps.{stage}.bench",
            "--workload", workload, "--repeats", "1", "--first-repeat", str(number),
            "--json", str(path), *flags,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=timeout, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return Attempt(stage, None, f"no result after {timeout:.0f} s")
        if path.exists():
            return Attempt(stage, read_results(path)[0])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Attempt(stage, None, lines[-1] if lines else f"exit status {done.returncode}")


def flags_for(stage: str, names: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The flags without those that only other stages of the comparison have. A flag that no stage
    has stays: it is an error, and each stage says so."""
    others = {field for name in names for field in stages.load(name).Config.model_fields}
    foreign = others - stages.load(stage).Config.model_fields.keys()
    kept: list[str] = []
    drop = False
    for arg in flags:
        if name := flag_name(arg):
            drop = name in foreign
        if not drop:
            kept.append(arg)
    return kept


def main(args: Sequence[str] | None = None) -> None:
    options, flags = tyro.cli(
        CompareOptions, prog="python -m bench.compare", args=args, return_unknown_args=True
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = stage_names(options.steps)

    def run(stage: str, workload: WorkloadName, number: int) -> Attempt:
        own = flags_for(stage, names, flags)
        attempt = run_stage(stage, workload, number, own, options.timeout)
        speed = attempt.row.medians.get("tokens_per_second") if attempt.row else None
        outcome = f"{speed:,.1f} tokens/s" if speed else attempt.problem or "no tokens"
        logger.info("%s, round %d, %s: %s", workload, number + 1, stage, outcome)
        return attempt

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    for workload in options.workload:
        raw, merged = compare(names, workload, options.rounds, run)
        append_results(options.output / "runs.json", raw)
        append_results(options.output / "results.json", merged)
        console.print(*rich_tables(merged))
    text = markdown(read_results(options.output / "results.json"))
    (options.output / "results.md").write_text(text)


if __name__ == "__main__":
    main()
