"""Tables of online results: one row read downwards for the terminal, all rows for the docs.

python -m bench.online.report out/online.json > out/online.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from bench.online.ceiling import describe
from bench.online.row import OnlineResult, read_online
from shared.cli import run_main

POINTS = ("avg", "p50", "p90", "p95", "p99", "max")
# Name of the row, name in `Latencies`.
LATENCIES = (
    ("TTFT", "ttft_scheduled_ms"),
    ("TTFT from sending", "ttft_ms"),
    ("TPOT", "tpot_ms"),
    ("gap between pieces", "gap_ms"),
    ("latency", "latency_scheduled_ms"),
    ("latency from sending", "latency_ms"),
    ("wait for a client", "queue_ms"),
)
# Of these, what is shown for each type of request.
TYPE_LATENCIES = ("ttft_scheduled_ms", "tpot_ms", "latency_scheduled_ms")
# Header, names in `medians` (several are joined by a slash), number format.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("tokens/s", ("tokens_per_second",), ",.1f"),
    ("tokens/s while requests came", ("arriving_tokens_per_second",), ",.1f"),
    ("RPS", ("requests_per_second",), ",.2f"),
    ("goodput RPS", ("goodput.requests_per_second",), ",.2f"),
    ("in SLO", ("goodput.share",), ".0%"),
    (
        "TTFT ms from arrival avg/p90",
        ("latencies.ttft_scheduled_ms.avg", "latencies.ttft_scheduled_ms.p90"),
        ",.1f",
    ),
    (
        "TTFT ms from sending avg/p90",
        ("latencies.ttft_ms.avg", "latencies.ttft_ms.p90"),
        ",.1f",
    ),
    ("TPOT ms avg/p90", ("latencies.tpot_ms.avg", "latencies.tpot_ms.p90"), ",.2f"),
    ("gap ms p99/max", ("latencies.gap_ms.p99", "latencies.gap_ms.max"), ",.1f"),
    (
        "latency s from arrival avg/p90",
        ("latencies.latency_scheduled_ms.avg", "latencies.latency_scheduled_ms.p90"),
        "ms as s",
    ),
    ("failed", ("failed",), ",.0f"),
)


def context(row: OnlineResult) -> str:
    """What rows of one table have in common: without it the numbers mean nothing."""
    hardware = row.hardware
    if hardware.gpus:
        where = f"{len(hardware.gpus)} x {hardware.gpus[0].name}, driver {hardware.driver}"
    else:
        where = f"{hardware.cpu}, {hardware.cpu_count} cores"
    if not row.target_is_local:
        where = f"server elsewhere, client on {where}"
    parts = [f"{row.scenario or 'own flags'} ({_work(row)}; {_load(row)})", _model(row), where]
    return "; ".join(parts)


def _work(row: OnlineResult) -> str:
    work = row.options["work"]
    if work["workload"] == "random":
        lengths = (
            "prompts {min_input_len}-{max_input_len}, outputs {min_output_len}-{max_output_len}"
        )
    else:
        lengths = (
            "{prompt_len_distribution} prompts {short_input_len}/{long_input_len}, "
            "outputs {short_output_len}/{long_output_len}"
        )
        if work["prompt_len_distribution"] == "bimodal":
            lengths += ", {long_prompt_ratio:.0%} long"
    return lengths.format(**work) + f", seed {work['seed']}"


def _load(row: OnlineResult) -> str:
    load = row.options["load"]
    pattern = {
        "burst": "all at once",
        "stagger": "one every {stagger_interval_ms:g} ms",
        "batch": "{batch_size} every {batch_interval:g} s",
        "poisson": "Poisson",
        "continuous": "closed loop",
    }[load["arrival_pattern"]].format(**load)
    if load["duration"] is not None:
        size = f"for {load['duration']:g} s"
    else:
        size = f"{row.runs[0].requests if row.runs else load['num_requests']} requests"
    clients = load["concurrency"]
    return f"{pattern}, {size}, {'any number of' if clients is None else clients} clients"


def _model(row: OnlineResult) -> str:
    dtype = row.config.get("dtype")
    return row.model + (f", {dtype}" if dtype else "")


# --- for the docs --------------------------------------------------------------------------------


def tables(rows: Sequence[OnlineResult]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(caption, headers, cells): one table per work, load, model and machine; rows as they came."""
    groups: dict[str, list[OnlineResult]] = {}
    for row in rows:
        groups.setdefault(context(row), []).append(row)
    return [(caption, *_table(group)) for caption, group in groups.items()]


def _table(rows: Sequence[OnlineResult]) -> tuple[list[str], list[list[str]]]:
    columns = [c for c in COLUMNS if any(c[1][0] in row.medians for row in rows)]
    has_rate = any(row.rate_rps is not None for row in rows)
    has_floor = any(row.percent_of_floor is not None for row in rows)
    has_gpu = any(row.gpu_use for row in rows)
    headers = ["target", *(["offered RPS"] if has_rate else []), *(c[0] for c in columns)]
    headers += ["% of floor"] if has_floor else []
    headers += [*(["GPU %"] if has_gpu else []), "client CPU %", "config", "runs", "commit"]
    cells = []
    for row in rows:
        line = [row.label]
        if has_rate:
            line.append("-" if row.rate_rps is None else f"{row.rate_rps:g}")
        line += [_cell(row, names, form) for _, names, form in columns]
        if has_floor:
            line.append("-" if row.percent_of_floor is None else f"{row.percent_of_floor:.1f}")
        if has_gpu:
            line.append(" / ".join(f"{use.utilization_percent:.0f}" for use in row.gpu_use) or "-")
        line += [
            _cell(row, ("client.busiest_percent",), ".0f"),
            _config_cell(row),
            str(len(row.runs)) if row.error is None else f"{len(row.runs)}; {row.error}",
            (row.commit or "unknown")[:10] + ("+changes" if row.dirty else ""),
        ]
        cells.append(line)
    return headers, cells


def _cell(row: OnlineResult, names: Sequence[str], form: str) -> str:
    return " / ".join(
        _number(row.medians[name], form) if name in row.medians else "-" for name in names
    )


def _number(value: float, form: str) -> str:
    return f"{value / 1e3:,.2f}" if form == "ms as s" else format(value, form)


def _config_cell(row: OnlineResult) -> str:
    config = row.config
    parts = [f"{row.target_version or 'unknown version'}"] if not config else []
    if config:
        parts.append(str(config.get("attention_backend", "?")))
        parts.append(f"block {config.get('kvcache_block_size')}")
    for name, short in (("tensor_parallel_size", "TP"), ("data_parallel_size", "DP")):
        if config.get(name, 1) != 1:
            parts.append(f"{short}{config[name]}")
    if row.options["target"]["mode"] == "direct":
        parts.append("without HTTP")
    if not row.options["target"]["extras"]:
        parts.append("outputs may end early")
    return ", ".join(parts)


def markdown(rows: Sequence[OnlineResult]) -> str:
    parts = []
    for caption, headers, cells in tables(rows):
        lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *cells]
        # A pipe in an error message would open another column.
        text = ["| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines]
        group = [row for row in rows if context(row) == caption]
        parts.append("\n".join([f"**{caption}**", "", *text, "", _note(group)]))
    return "\n\n".join(parts) + "\n"


def _note(rows: Sequence[OnlineResult]) -> str:
    versions = {name: version for row in rows for name, version in row.versions.items()}
    text = "Medians of the runs. Client: " + ", ".join(f"{k} {v}" for k, v in versions.items())
    limits = {slo(row) for row in rows} - {None}
    if limits:
        text += ". Goodput: " + "; ".join(sorted(str(limit) for limit in limits))
    ceilings = [row.ceiling for row in rows if row.ceiling is not None]
    if ceilings:
        text += f"; {describe(ceilings[-1])}"
    return text + "."


def slo(row: OnlineResult) -> str | None:
    """In words; None where there is none."""
    measure = row.options["measure"]
    parts = []
    if measure["slo_ttft_ms"] is not None:
        parts.append(f"TTFT from arrival within {measure['slo_ttft_ms']:g} ms")
    if measure["slo_tpot_ms"] is not None:
        parts.append(f"TPOT within {measure['slo_tpot_ms']:g} ms")
    return " and ".join(parts) or None


# --- for the terminal ----------------------------------------------------------------------------


def terminal(row: OnlineResult) -> RenderableType:
    """One row, with all its percentiles."""
    rate = "" if row.rate_rps is None else f" at {row.rate_rps:g} requests/s"
    summary = Table(
        title=f"{row.label}{rate}: {context(row)}", title_justify="left", show_header=False
    )
    summary.add_column(justify="right")
    summary.add_column()
    for name, text in _summary(row):
        summary.add_row(name, text)
    if not any(run.completed for run in row.runs):
        return summary
    latencies = Table(
        title="milliseconds; TTFT and latency from scheduled arrival, or from sending",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    latencies.add_column("", no_wrap=True)
    for point in POINTS:
        latencies.add_column(point, justify="right")
    for name in ("", *row.runs[0].by_type):
        _add_latencies(latencies, row, name)
    return Group(summary, latencies)


def _add_latencies(table: Table, row: OnlineResult, type_name: str) -> None:
    """All requests, or those of one type."""
    prefix = f"by_type.{type_name}." if type_name else ""
    for title, name in LATENCIES:
        if type_name and name not in TYPE_LATENCIES:
            continue
        values = [row.medians.get(f"{prefix}latencies.{name}.{point}") for point in POINTS]
        if values[0] is not None:
            label = f"{type_name}: {title}" if type_name else title
            table.add_row(label, *("-" if v is None else _milliseconds(v) for v in values))
    table.add_section()


def _milliseconds(value: float) -> str:
    """Short enough for a table of eighty columns."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _summary(row: OnlineResult) -> list[tuple[str, str]]:
    medians = row.medians
    lines: list[tuple[str, str]] = []
    if row.runs:
        lines.append(("requests", _requests(row)))
        lines.append(("tokens/s", _throughput(row)))
        lines.append(("requests/s", f"{medians['requests_per_second']:,.3f}"))
    if "goodput.share" in medians:
        good, share = medians["goodput.requests_per_second"], medians["goodput.share"]
        lines.append(("goodput", f"{good:,.3f} requests/s, {share:.1%} of all: {slo(row)}"))
    for run in row.runs:
        lines += [("failed", f"{count} x {reason}") for reason, count in run.failures.items()]
    if "tokens_per_piece" in medians:
        lines.append(("tokens per piece", f"{medians['tokens_per_piece']:.3f} on average"))
    for index, use in enumerate(row.gpu_use):
        memory = f"{use.memory_peak_bytes / 2**30:,.1f} GiB"
        busy = f"{use.utilization_percent:.0f}% busy, {use.power_watts:.0f} W, {memory}"
        lines.append((f"GPU {index}", busy))
    if row.runs:
        lines.append(("client", _client(row)))
    lines.append(("commit", (row.commit or "unknown")[:10] + ("+changes" if row.dirty else "")))
    return lines


def _requests(row: OnlineResult) -> str:
    run = row.runs[0]
    types = ", ".join(f"{group.requests} {name}" for name, group in run.by_type.items())
    text = f"{run.requests} ({types}) in {statistics.median(r.seconds for r in row.runs):,.2f} s"
    if "offered_rps" in row.medians:
        text += f", offered {row.medians['offered_rps']:,.3f} requests/s"
    return text + (f", {len(row.runs)} runs" if len(row.runs) > 1 else "")


def _throughput(row: OnlineResult) -> str:
    text = f"{row.medians['tokens_per_second']:,.1f} output tokens"
    if "arriving_tokens_per_second" in row.medians:
        text += f", {row.medians['arriving_tokens_per_second']:,.1f} while requests came"
    if row.floor is not None and row.percent_of_floor is not None:
        floor = f"{row.floor.tokens_per_second:,.1f}"
        text += f"; {row.percent_of_floor:.1f}% of the physical floor of {floor}"
    return text


def _client(row: OnlineResult) -> str:
    medians = row.medians
    text = (
        f"{medians['client.busiest_percent']:.0f}% of a core (busiest of "
        f"{row.runs[0].client.processes}), {medians['client.pieces_per_second']:,.0f} pieces/s, "
        f"at most {medians['client.peak_pieces_per_second']:,.0f}"
    )
    if row.ceiling is not None:
        share = medians["client.peak_pieces_per_second"] / row.ceiling.pieces_per_second
        text += f": {share:.0%} of its ceiling of {row.ceiling.pieces_per_second:,.0f}"
    return text


def main(files: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> int:
    """Print the tables of online results as markdown."""
    print(markdown([row for file in files for row in read_online(file)]), end="")
    return 0


if __name__ == "__main__":
    run_main(lambda: tyro.cli(main, prog="python -m bench.online.report", args=sys.argv[1:]))
