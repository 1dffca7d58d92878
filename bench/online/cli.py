"""What `python -m bench.online` does: measure one target under one load, or under several."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from bench import result as results
from bench.gpu import GpuMonitor, installed_gpus, load_nvml
from bench.online import report
from bench.online.ceiling import Ceiling, describe, http_client, measure_ceiling
from bench.online.driver import Client, drive
from bench.online.metrics import OnlineRun, summarise_run
from bench.online.options import Options, Target, parse
from bench.online.plan import build_plan, warmup_plan
from bench.online.row import CLIENT_PACKAGES, OnlineResult, append_online, read_online
from bench.online.sender import (
    HttpTarget,
    ServerInfo,
    http_session,
    plain_url,
    probe,
    server_stats,
)
from bench.result import Hardware, cpu_count, cpu_name
from shared.cli import EXIT_FAILED, run_main

if TYPE_CHECKING:
    from bench.online.floor import Device

logger = logging.getLogger(__name__)

# A client process this busy delays what it measures.
BUSY_PERCENT = 80.0


@dataclass(frozen=True)
class Backend:
    """A target, ready to be measured."""

    info: ServerInfo
    client: Client
    stats: Callable[[], Awaitable[dict[str, Any] | None]]
    """The engine's counters, of an engine of ours."""
    device: Device | None = None
    """Where the physical floor is known."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Measures, prints, writes, exits. Status 1: some load was not measured, or not one of its
    requests answered; 2, with one line on stderr: wrong options or files, or no server."""
    run_main(lambda: _main(sys.argv[1:] if args is None else args))


def _main(args: Sequence[str]) -> int:
    options, config = parse(args)
    output = options.measure.output
    # A file that cannot be appended to should say so before the work.
    results.prepare_output(output)
    if output is not None and output.exists():
        read_online(output)
    rows = asyncio.run(_run(options, config))
    return EXIT_FAILED if any(row.error is not None for row in rows) else 0


async def _run(options: Options, config: Any) -> list[OnlineResult]:
    console = Console(soft_wrap=True)
    ceiling = None
    rows: list[OnlineResult] = []
    async with open_backend(options, config) as backend:
        if options.measure.ceiling and options.target.mode == "http":
            ceiling = await measure_ceiling(options.measure.client_processes)
            logger.info("%s", describe(ceiling))
        await _warm_up(backend, options)
        backend = dataclasses.replace(backend, device=_device(backend, options))
        for rate in options.load.rates():
            row = await measure(backend, options, rate, ceiling)
            rows.append(row)
            try:
                console.print(report.terminal(row))
            finally:  # even if nobody reads the table any more
                if options.measure.output is not None:
                    append_online(options.measure.output, [row])
            if row.error is not None:
                logger.error("%s", row.error)
                break
    return rows


@contextlib.asynccontextmanager
async def open_backend(options: Options, config: Any) -> AsyncIterator[Backend]:
    if options.target.mode == "direct":
        from bench.online.direct import direct_engine

        async with direct_engine(config, options.load.timeout) as (info, client, stats):
            yield Backend(info, client, stats)
        return
    target = options.target
    url, key = plain_url(target.base_url), target.api_key or os.environ.get("OPENAI_API_KEY")
    async with http_session(key) as session:
        info = await probe(session, url, target.model, target.wait_ready)
        http = HttpTarget(
            base_url=url,
            model=info.model,
            api_key=key,
            stream=target.stream,
            extras=target.extras,
            usage=target.usage,
            chunk_usage=target.chunk_usage,
            timeout=options.load.timeout,
        )
        async with http_client(http, options.measure.client_processes) as client:
            yield Backend(info, client, lambda: server_stats(session, url))


def _device(backend: Backend, options: Options) -> Device | None:
    settings = backend.info.settings
    if not settings or not _is_local(options.target):
        return None
    from bench.online.floor import Device  # imports torch, which other targets do not need

    return Device.measure(settings)


def _vocab_size(backend: Backend, options: Options) -> int | None:
    return options.work.vocab_size or backend.info.vocab_size


async def _warm_up(backend: Backend, options: Options) -> None:
    """Raises ValueError if nothing is answered: the load itself would take long to say so."""
    if options.measure.warmup == 0:
        return
    plan = warmup_plan(options.work, options.measure.warmup, _vocab_size(backend, options))
    driven = await drive(backend.client, plan, options.load.concurrency)
    failures = [seen.failure for seen in driven.seen if seen.failure is not None]
    if len(failures) == len(plan.jobs):
        raise ValueError(f"not one warm-up request was answered: {failures[0]}")
    if failures:
        logger.warning(
            "%d of %d warm-up requests failed: %s", len(failures), len(plan.jobs), failures[0]
        )


async def measure(
    backend: Backend, options: Options, rate: float | None, ceiling: Ceiling | None
) -> OnlineResult:
    """One row. What goes wrong while it is measured is part of the row."""
    vocab_size = _vocab_size(backend, options)
    reference = build_plan(options.work, options.load, rate, vocab_size, 0)
    nvml = load_nvml()
    gpus = [] if nvml is None else installed_gpus(nvml)
    monitor = GpuMonitor(nvml, [gpu.uuid for gpu in gpus])
    driver = None if nvml is None else nvml.nvmlSystemGetDriverVersion()
    commit, dirty = results.git_state()
    runs: list[OnlineRun] = []
    error = None
    with monitor:
        first = options.measure.first_repeat
        for repeat in range(first, first + options.measure.repeats):
            try:
                runs.append(await _repeat(backend, options, rate, repeat))
            except (RuntimeError, OSError, ValueError) as failure:
                error = f"{type(failure).__name__}: {failure}"
                break
            if runs[-1].completed == 0:
                reason = next(iter(runs[-1].failures))
                error = f"none of {runs[-1].requests} requests was answered: {reason}"
                break
    medians, spread = results.summarise(runs)
    info = backend.info
    floor = None
    if backend.device is not None:
        floor = backend.device.floor(reference, options.load.concurrency)
    return OnlineResult(
        label=options.target.label or info.stage or options.target.base_url,
        scenario=options.scenario,
        rate_rps=rate,
        sha256=reference.sha256,
        id_limit=reference.id_limit,
        options=_public(options),
        created=results.now(),
        commit=commit,
        dirty=dirty,
        hardware=Hardware(cpu_name(), cpu_count(), gpus, driver),
        target_is_local=_is_local(options.target),
        versions=results.library_versions(CLIENT_PACKAGES),
        model=info.model,
        target_version=info.version,
        stage=info.stage,
        config=info.settings,
        ceiling=ceiling,
        runs=runs,
        medians=medians,
        spread=spread,
        floor=floor,
        percent_of_floor=results.percent_of_floor("online", medians, floor),
        gpu_use=monitor.use() if _is_local(options.target) else [],
        error=error,
    )


async def _repeat(backend: Backend, options: Options, rate: float | None, repeat: int) -> OnlineRun:
    plan = build_plan(options.work, options.load, rate, _vocab_size(backend, options), repeat)
    title = "" if rate is None else f"{rate:g} requests/s"
    before = await backend.stats()
    with _Bar(len(plan.jobs), title) as bar:
        driven = await drive(backend.client, plan, options.load.concurrency, bar)
    gained = counters_gained(before, await backend.stats())
    run = summarise_run(plan, driven, repeat, options.measure, gained)
    _warn(run, options)
    return run


def _warn(run: OnlineRun, options: Options) -> None:
    if run.failed:
        reason, count = next(iter(run.failures.items()))
        logger.warning("%d of %d requests failed; %d x %s", run.failed, run.requests, count, reason)
    hits = run.server.get("prefix_hit_tokens", run.cached_prompt_tokens)
    if hits:
        logger.warning(
            "%d prompt tokens came from the prefix cache: these prompts were sent before. "
            "Use --first-repeat or --seed for others",
            hits,
        )
    if run.client.busiest_percent > BUSY_PERCENT:
        logger.warning(
            "a client process used %.0f%% of a core, so latencies are partly its own: "
            "use more than --client-processes %d",
            run.client.busiest_percent,
            options.measure.client_processes,
        )


def counters_gained(
    before: dict[str, Any] | None, after: dict[str, Any] | None
) -> dict[str, float]:
    """What the counters in /debug/stats have gained. What only ever shows a state is left out."""
    if before is None or after is None:
        return {}
    old, new = _counters(before), _counters(after)
    return {name: new[name] - old[name] for name in new if name in old}


def _counters(stats: dict[str, Any]) -> dict[str, float]:
    stats = stats.get("stats", {})
    own = ("preemptions", "step_seconds", "serving_seconds")
    whole = {k: v for k, v in stats.items() if k.startswith("prefix_") or k in own}
    return {**whole, **stats.get("counters", {})}


def _public(options: Options) -> dict[str, Any]:
    """The flags, without the key."""
    names = ("target", "work", "load", "measure")
    encoded = msgspec.json.encode({n: getattr(options, n) for n in names}, enc_hook=str)
    groups: dict[str, Any] = msgspec.json.decode(encoded)
    del groups["target"]["api_key"]
    return groups


def _is_local(target: Target) -> bool:
    if target.mode == "direct":
        return True
    host = urlsplit(target.base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, title: str) -> None:
        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, state="")
        self._queued = self._under_way = self._failed = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def due(self) -> None:
        self._queued += 1
        self._show()

    def sent(self) -> None:
        self._queued -= 1
        self._under_way += 1
        self._show()

    def ended(self, ok: bool) -> None:
        self._under_way -= 1
        self._failed += not ok
        self._show(1)

    def _show(self, advance: int = 0) -> None:
        state = f"{self._under_way} under way, {self._queued} queued, {self._failed} failed"
        self._progress.update(self._task, advance=advance, state=state)
