"""Compares stages, and other engines, on the same work, in alternating order (A B C C B A).

    python -m bench.compare
    python -m bench.compare --steps 00_baseline 01_chunked_prefill --workload decode_gap \\
        --output out/gaps --model qwen3-0.6b
    python -m bench.compare --model qwen3-0.6b \\
        --external "vllm=/opt/vllm/bin/python -m bench.external.vllm"

A process per stage and round runs all workloads. Flags that this does not know go to the benchmark
of every stage that has them. In the output directory `runs.json` gets a row per process and
workload, `results.json` one per stage and workload; both only ever grow. `results.md` is made from
`results.json`, the plots from the newest comparison. A stage that loses or fails keeps its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

import steps as stages
from bench.cli import flag_name
from bench.rounds import Contender, RunOptions, run_comparison
from bench.workloads import WorkloadName
from shared.cli import run_main
from shared.models.config import real_model_names


@dataclass(frozen=True)
class CompareOptions(RunOptions):
    steps: tuple[str, ...] = ("all",)
    """Stages by name, the first being what the others are compared with; or all of them."""
    workload: tuple[WorkloadName, ...] = ("nano", "decode_gap", "shared_prefix")
    """One or more workloads."""
    external: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=CMD")] = ()
    """Other engines, run beside the stages; see bench/external. Started from the root of the
    project."""


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


def external_engines(wanted: Sequence[str]) -> list[Contender]:
    """Raises ValueError for what is not NAME=CMD."""
    found = []
    for text in wanted:
        name, _, command = text.partition("=")
        if not name or not command or name in stages.names():
            raise ValueError(f"--external {text!r} is not NAME=CMD with a name of its own")
        found.append(Contender(name, command=command))
    return found


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


def with_weights(flags: Sequence[str]) -> list[str]:
    """A model that is the name of a real size (`--model qwen3-0.6b`) has random weights."""
    pairs = pairwise([*flags, ""])
    models = [a.partition("=")[2] or b for a, b in pairs if flag_name(a) == "model"]
    has_format = any(flag_name(arg) == "load_format" for arg in flags)
    if has_format or not models or models[-1] not in real_model_names():
        return list(flags)
    return [*flags, "--load-format", "dummy"]


def main(args: Sequence[str] | None = None) -> int:
    """Exit status: 1 if something failed; its row says why."""
    options, flags = tyro.cli(
        CompareOptions,
        prog="python -m bench.compare",
        description="Measure stages on the same work. Further flags are options of the engines.",
        args=args,
        return_unknown_args=True,
    )
    names = stage_names(options.steps)
    flags = with_weights(flags)
    contenders = [Contender(name, tuple(flags_for(name, names, flags))) for name in names]
    contenders += external_engines(options.external)
    return run_comparison(contenders, options.workload, options)


if __name__ == "__main__":
    run_main(main)
