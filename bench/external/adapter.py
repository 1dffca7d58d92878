"""What the commands for engines of others share: drive one as a stage is driven, write a report.

They run in the other engine's own environment, from the root of this project; beside the engine
that needs numpy, msgspec, pydantic and tyro.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from bench.external import Measured, Report, WorkFile
from bench.offline import BenchEngine, Driver
from shared.models.config import REAL_CONFIGS, real_model_names

TINY = Path(__file__).parents[2] / "shared" / "checkpoints" / "tiny"
# A steady decode must not reach it while the window is open.
MAX_MODEL_LENGTH = 16384

# From the model's directory, whether its weights are random, and options to an engine.
Start = Callable[[str, bool, dict[str, Any]], BenchEngine]


def main(package: str, start: Start, args: Sequence[str] | None = None) -> NoReturn:
    """Runs the work of a file. Status 2, with one line on stderr: the engine is not installed."""
    parser = argparse.ArgumentParser(description=f"Run frozen workloads on {package}.")
    parser.add_argument("--model", help="directory; default: the model of our stages")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("NAME", "JSON"),
        help="an option of the engine; may be repeated",
    )  # fmt: skip
    parser.add_argument("work", type=Path)
    parser.add_argument("result", type=Path)
    parsed = parser.parse_args(args)
    given = msgspec.json.decode(parsed.work.read_bytes(), type=WorkFile)
    named = {name: json.loads(value) for name, value in parsed.set}
    with tempfile.TemporaryDirectory() as directory:
        model, dummy = model_directory(given.config, Path(directory))
        if parsed.model is not None:
            model, dummy = parsed.model, False
        try:
            engine = start(model, dummy, options(given.config) | named)
        except ImportError as error:
            print(f"{package} is not installed in {sys.executable}: {error}", file=sys.stderr)
            sys.exit(2)
        report = Report(measure(Driver(engine), given), named, versions(package))
    parsed.result.write_bytes(msgspec.json.encode(report))
    sys.exit(0)


def measure(driver: Driver, given: WorkFile) -> list[Measured]:
    measured = []
    for one in given.work:
        driver.run(one.warmup)
        samples = msgspec.structs.asdict(driver.samples(one.workload))
        measured.append(Measured(workload=one.workload.name, **samples))
    return measured


def options(config: dict[str, Any]) -> dict[str, Any]:
    """What both engines call the same, as our stages had it."""
    return {
        "max_model_len": min(config["max_model_length"], MAX_MODEL_LENGTH),
        "max_num_seqs": config["max_num_sequences"],
        "gpu_memory_utilization": config["gpu_memory_utilization"],
        "enforce_eager": config["enforce_eager"],
    }


def model_directory(config: dict[str, Any], place: Path) -> tuple[str, bool]:
    """(directory or hub id, whether its weights are random). For a real size without files, a
    directory with its config and some tokenizer is made."""
    model = config.get("model")
    if model is None:
        return str(TINY), False
    if model not in real_model_names():
        return model, config.get("load_format") == "dummy"
    shutil.copy(REAL_CONFIGS / f"{model}.json", place / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, place / name)
    return str(place), True


def versions(package: str) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in (package, "torch", "triton", "flash-attn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
