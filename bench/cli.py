"""What `python -m steps.NN_x.bench` does: measure one stage on one workload, or on several."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import tyro
from rich.console import Console

from bench import result as results
from bench import tables
from bench.floor import Limits, ModelCost, Rates, best, measure_rates, num_devices, physical_floor
from bench.gpu import GpuMonitor, hardware, load_nvml
from bench.offline import Driver
from bench.result import GpuUse, Hardware, Result, RunMetrics, WorkloadInfo
from bench.workloads import (
    WARMUP,
    WARMUP_SHARE,
    Scale,
    WorkloadName,
    auto_scale,
    build_workload,
    engine_options,
)
from shared import EngineConfig
from shared.cli import EXIT_FAILED, flags_of, given, run_main
from shared.engine.resolve import resolve_device, resolve_dtype
from shared.models.config import ModelConfig
from shared.models.files import ModelFiles
from steps import load

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    workload: tuple[WorkloadName, ...] = ("nano",)
    """Frozen work to do, one after the other; see bench/workloads.py."""
    json: Path | None = None
    """Append the results to this JSON file."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Measured runs, after one that is not; each with prompts of its own."""
    first_repeat: int = 0
    """Number of the first measured run, for runs spread over several processes."""
    scale: Literal["auto"] | Scale = "auto"
    """Size of the workload. auto: cpu on a CPU, else full (full_large from 3e9 parameters)."""
    warmup: bool = True
    """Run the workload once, unmeasured, with prompts of its own."""

    def __post_init__(self) -> None:
        if not self.workload:
            raise ValueError("--workload needs a name")
        if self.repeats < 1 or self.first_repeat < 0:
            raise ValueError("repeats must be at least 1 and first-repeat at least 0")


def main(stage: str, args: Sequence[str] | None = None) -> NoReturn:
    """Measures, prints, writes, exits. Status 1: a run failed, and what was measured is kept; 2,
    with one line on stderr: wrong options or files."""
    run_main(lambda: _bench(stage, sys.argv[1:] if args is None else args))


def _bench(stage: str, args: Sequence[str]) -> int:
    options, config = parse(load(stage).Config, f"python -m steps.{stage}.bench", args)
    results.prepare_output(options.json, "--json")
    console = Console(soft_wrap=True)
    failed = False
    for row in measure(stage, options, config):
        if options.json is not None:
            results.append_results(options.json, [row])
        console.print(tables.report(row))
        if row.error is not None:
            failed = True
            logger.error("%s", row.error)
    return EXIT_FAILED if failed else 0


def parse(
    config_class: type[EngineConfig], prog: str, args: Sequence[str]
) -> tuple[BenchOptions, EngineConfig]:
    """Flags of the benchmark and of the stage's own config, side by side."""
    flat = tyro.conf.OmitArgPrefixes
    engine = flags_of(config_class, "engine")
    arguments = dataclasses.make_dataclass(
        "Arguments",
        [("bench", Annotated[BenchOptions, flat]), ("engine", Annotated[engine, flat])],
    )
    description = "Measure this stage on a frozen workload."
    parsed: Any = tyro.cli(arguments, prog=prog, description=description, args=args)
    # A flag that repeats a default is meant: no workload's own option may replace it.
    named = {flag_name(arg) for arg in args} & config_class.model_fields.keys()
    meant = {name: getattr(parsed.engine, name) for name in named}
    return parsed.bench, config_class(**{**meant, **given(parsed.engine)})


def flag_name(arg: str) -> str:
    """`--max-model-len=8` -> max_model_len. Empty for what is no flag."""
    return arg[2:].split("=", 1)[0].replace("-", "_") if arg.startswith("--") else ""


def measure(stage: str, options: BenchOptions, config: EngineConfig) -> Iterator[Result]:
    """A row per workload. An error while one runs is part of its row; one at start-up is raised.

    What `config` leaves open is set as the workload wants it, where the stage has such an option.
    Workloads that want the same run on one engine, unless one of them has failed on it.
    """
    shape = ModelFiles.find(config.model, config.load_format).config
    device = resolve_device(config)
    scale = auto_scale(device.type, shape) if options.scale == "auto" else options.scale
    dtype = resolve_dtype(config, shape, device)
    bench = _Bench(stage, options, scale, shape, dtype, device.type, results.git_state())
    groups: dict[EngineConfig, list[WorkloadName]] = {}
    for name in dict.fromkeys(options.workload):
        groups.setdefault(_wanted(config, name, scale), []).append(name)
    rates = bench.measure_rates()
    for wanted, names in groups.items():
        while names:
            effective, measured = bench.run(wanted, names)
            # Other processes can only have lowered what was measured: the best of before and after.
            rates, before = bench.measure_rates(), rates
            for one in measured:
                names.remove(one.workload)
                yield bench.row(one, effective, best(before, rates))


def _wanted(config: EngineConfig, name: WorkloadName, scale: Scale) -> EngineConfig:
    wanted = engine_options(name, scale)
    wanted = {name: value for name, value in wanted.items() if name in type(config).model_fields}
    return type(config)(**{**wanted, **config.model_dump(include=config.model_fields_set)})


@dataclasses.dataclass(frozen=True)
class _Measured:
    workload: WorkloadName
    runs: list[RunMetrics]
    error: str | None
    gpu_use: list[GpuUse]


@dataclasses.dataclass(frozen=True)
class _Bench:
    stage: str
    options: BenchOptions
    scale: Scale
    shape: ModelConfig
    dtype: torch.dtype
    device: str
    git_state: tuple[str | None, bool | None]

    @cached_property
    def hardware(self) -> Hardware:
        return hardware(self.device)

    @cached_property
    def cost(self) -> ModelCost:
        return ModelCost.of(self.shape, self.dtype.itemsize)

    def measure_rates(self) -> Rates:
        return measure_rates(self.device, self.dtype, self.cost.weight_bytes)

    def run(
        self, config: EngineConfig, names: Sequence[WorkloadName]
    ) -> tuple[dict[str, Any], list[_Measured]]:
        """(effective settings, what was measured). After a failure nothing more runs here."""
        measured: list[_Measured] = []
        gpus = self.hardware.gpus
        engine = load(self.stage).Engine(config)
        try:
            effective = effective_config(config, engine.describe())
            for name in names:
                monitor = GpuMonitor(load_nvml() if gpus else None, [gpu.uuid for gpu in gpus])
                runs, error = self._run(Driver(engine), name, monitor)
                measured.append(_Measured(name, runs, error, monitor.use()))
                if error is not None:
                    break
        finally:
            engine.close()
        return effective, measured

    def _run(
        self, driver: Driver, name: WorkloadName, monitor: GpuMonitor
    ) -> tuple[list[RunMetrics], str | None]:
        options, vocab_size = self.options, self.shape.vocab_size
        runs: list[RunMetrics] = []
        try:
            if options.warmup:
                warmup = build_workload(name, self.scale, vocab_size, WARMUP)
                driver.run(warmup.shortened(WARMUP_SHARE))
            with monitor:
                for repeat in range(options.first_repeat, options.first_repeat + options.repeats):
                    workload = build_workload(name, self.scale, vocab_size, repeat)
                    runs.append(driver.run(workload))
                    expects_hits = any(r.shared_tokens for r in workload.requests)
                    _log_run(name, runs[-1], expects_hits)
        except Exception as error:
            logger.exception("%s failed", name)
            return runs, f"{type(error).__name__}: {error}"
        return runs, None

    def row(self, measured: _Measured, effective: dict[str, Any], rates: Rates) -> Result:
        # Repeat 0 names the work, whichever repeats this process runs.
        work = build_workload(measured.workload, self.scale, self.shape.vocab_size)
        medians, spread = results.summarise(measured.runs)
        limits, devices = Limits.of(effective), num_devices(effective)
        floor = physical_floor(work, self.cost, rates, limits, devices)
        commit, dirty = self.git_state
        return Result(
            stage=self.stage,
            workload=WorkloadInfo(work.name, work.scale, work.id_limit, work.sha256),
            created=results.now(),
            commit=commit,
            dirty=dirty,
            hardware=self.hardware,
            versions=results.library_versions(),
            config=effective,
            runs=measured.runs,
            medians=medians,
            spread=spread,
            floor=floor,
            percent_of_floor=results.percent_of_floor(work.name, medians, floor),
            gpu_use=measured.gpu_use,
            error=measured.error,
        )


def _log_run(name: WorkloadName, run: RunMetrics, expects_hits: bool) -> None:
    logger.info(
        "%s, repeat %d: %d tokens in %.2f s, %.1f tokens/s",
        name, run.repeat, run.output_tokens, run.seconds, run.tokens_per_second,
    )  # fmt: skip
    if run.failed:
        logger.warning("%d of %d requests failed: %s", run.failed, run.requests, run.failures[0])
    if run.prefix_hit_tokens and not expects_hits:
        logger.warning("%d prompt tokens came from the prefix cache", run.prefix_hit_tokens)


def effective_config(config: EngineConfig, described: dict[str, Any]) -> dict[str, Any]:
    """What the engine says of itself, over what was asked for where it says nothing.

    Parallel sizes count only when the engine confirms them: a stage without them ignores them.
    """
    parallel = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    return {**config.model_dump(mode="json"), **parallel, **described}
