"""Goodput of every engine by offered load: a server for each, one after the other.

    python -m bench.online.saturation --model qwen3-0.6b --rounds 1
    python -m bench.online.saturation --engines 00_baseline 01_chunked_prefill --output out/load
    python -m bench.online.saturation --server 04_dp_tp --engines 01_chunked_prefill \\
        --data-parallel-size 2 --label "2 replicas" --output out/replicas

In every round each engine gets a server of its own and an open-loop sweep of rates (scenario
`saturation`), alternating: A B C, C B A. Flags that this does not know go to `bench.online` if it
has them (but --model, which is the server's), else to the servers whose engines have them. In the
output directory `runs.json` gets a row per engine, rate and round, `results.json` one per engine
and rate, both only ever grow; `saturation.svg` has a curve per engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tyro

import steps as stages
from bench.cli import flag_name
from bench.compare import flags_for, with_weights
from bench.online import plot
from bench.online.options import Load, Measure, Target, Work
from bench.online.row import OnlineResult, append_online, read_online
from bench.result import ROOT, best_floor, percent_of_floor, prepare_output, summarise
from bench.rounds import RunOptions, alternate
from shared.cli import EXIT_FAILED, run_main

logger = logging.getLogger(__name__)

SERVING = re.compile(r"serving \S+ at (http://\S+)")
START_SECONDS = 600.0  # to load weights and capture graphs
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class SaturationOptions(RunOptions):
    output: Path = Path("out/saturation")
    """Directory for runs.json, results.json, the plot and the servers' logs."""
    engines: tuple[str, ...] = ("all",)
    """Stages that are engines, or all of them."""
    server: str = "03_online"
    """The stage that serves them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (ROOT / "steps" / self.server / "serve.py").exists():
            raise ValueError(f"stage {self.server!r} has no server")


def engine_names(wanted: Sequence[str]) -> list[str]:
    """Raises ValueError for a stage that is no engine."""
    if tuple(wanted) == ("all",):
        return stages.engines()
    for name in wanted:
        if name not in stages.engines():
            raise ValueError(f"no engine {name!r}; there are: {', '.join(stages.engines())}")
    return list(dict.fromkeys(wanted))


def split_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags of the client, flags of the server)."""
    groups = (Target, Work, Load, Measure)
    own = {field.name for group in groups for field in dataclasses.fields(group)}
    own = (own | {"scenario"}) - {"model"}
    client: list[str] = []
    server: list[str] = []
    current = server
    for arg in flags:
        if name := flag_name(arg):
            current = client if name.removeprefix("no_") in own else server
        current.append(arg)
    return client, server


@contextlib.contextmanager
def serving(stage: str, engine: str, flags: Sequence[str], log: Path) -> Iterator[str]:
    """A server's address. Raises RuntimeError with its last words if it does not start."""
    command = [sys.executable, "-m", f"steps.{stage}.serve", "--port", "0", "--engine", engine]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=file, stderr=file)
    try:
        yield _address(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None  # looked at first: what it wrote last is in the file
        text = log.read_text(errors="replace")
        if (found := SERVING.search(text)) is not None:
            return found[1]
        if ended:
            lines = [line for line in text.splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"exit status {process.returncode}")
        time.sleep(0.1)
    raise RuntimeError(f"no server after {START_SECONDS:.0f} s")


def merge(rows: Sequence[OnlineResult]) -> list[OnlineResult]:
    """One row per engine, its settings, work and rate, of its rows from all rounds."""
    groups: dict[tuple[object, ...], list[OnlineResult]] = {}
    for row in rows:
        key = row.label, row.target, row.sha256, row.rate_rps
        groups.setdefault(key, []).append(row)
    merged = []
    for group in groups.values():
        runs = [run for row in group for run in row.runs]
        medians, spread = summarise(runs)
        errors = list(dict.fromkeys(row.error for row in group if row.error))
        floor = best_floor(row.floor for row in group)
        merged.append(
            msgspec.structs.replace(
                group[0],
                runs=runs,
                medians=medians,
                spread=spread,
                floor=floor,
                percent_of_floor=percent_of_floor("online", medians, floor),
                error="; ".join(errors) or None,
            )
        )
    return merged


def measure(
    options: SaturationOptions,
    engine: str,
    number: int,
    client: Sequence[str],
    flags: Sequence[str],
    limit: float,
) -> list[OnlineResult]:
    """The rows of one engine in one round, which are also appended to runs.json.

    Raises RuntimeError if there is no server, or no row.
    """
    output = options.output.resolve()  # the client starts elsewhere
    path = output / "runs.json"
    known = len(read_online(path)) if path.exists() else 0
    log = output / f"{engine}_{number}.log"
    with serving(options.server, engine, flags, log) as url:
        command = [
            sys.executable, "-m", "bench.online", "--base-url", url, "--label", engine,
            "--scenario", "saturation", "--first-repeat", str(number), "--output", str(path),
            *client,
        ]  # fmt: skip
        try:
            subprocess.run(command, cwd=ROOT, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            logger.error("%s: stopped after %.0f s", engine, limit)
    rows = read_online(path)[known:] if path.exists() else []
    if not rows:
        raise RuntimeError(f"nothing was measured; see {log}")
    return rows


def run(options: SaturationOptions, flags: Sequence[str]) -> int:
    """Exit status: 1 if an engine was not measured at some rate in some round."""
    names = engine_names(options.engines)
    client, for_servers = split_flags(flags)
    if len(names) > 1 and "label" in map(flag_name, client):
        raise ValueError(
            f"--label names one engine, and these are {len(names)}: {', '.join(names)}"
        )
    for_servers = with_weights(for_servers)
    output = options.output
    prepare_output(output / "runs.json")
    started, rows, failed = time.monotonic(), [], False
    count = len(names) * options.rounds
    logger.info("%d servers, one after the other; %s", count, options.at_most(count))
    for number, engine in alternate(names, options.rounds):
        try:
            limit = options.next_timeout(started)
            own = flags_for(engine, names, for_servers)
            found = measure(options, engine, number, client, own, limit)
            failed = failed or any(row.error is not None for row in found)
            rows += found
        except RuntimeError as error:
            failed = True
            logger.error("round %d, %s: %s", number + 1, engine, error)
    if rows:
        merged = merge(rows)
        append_online(output / "results.json", merged)
        plot.write(merged, output / "saturation.svg")
        logger.info("%s, %s", output / "results.json", output / "saturation.svg")
    return EXIT_FAILED if failed else 0


def main(args: Sequence[str] | None = None) -> int:
    options, flags = tyro.cli(
        SaturationOptions,
        prog="python -m bench.online.saturation",
        description="Goodput of every engine behind the server, by offered load. Further flags are "
        "options of the server or the load.",
        args=args,
        return_unknown_args=True,
    )
    return run(options, flags)


if __name__ == "__main__":
    run_main(main)
