"""Tables for the terminal and the docs, made from result rows and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import JustifyMethod
from rich.table import Table

from bench.result import Result

# Header, name in `medians`, number format.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens/s", "tokens_per_second", ",.1f"),
    ("TTFT p50 ms", "ttft_ms.p50", ",.1f"),
    ("TPOT p50 ms", "tpot_ms.p50", ",.2f"),
    ("gap p50 ms", "gap_ms.p50", ",.2f"),
    ("gap p99 ms", "gap_ms.p99", ",.2f"),
    ("gap max ms", "gap_ms.max", ",.1f"),
    ("prefix hits", "prefix_hit_tokens", ",.0f"),
    ("failed", "failed", ",.0f"),
)
# Columns that say how rows came about; mostly the same for all of a comparison.
CIRCUMSTANCES = ("prefix hits", "failed", "config", "runs", "commit")


def context(row: Result) -> str:
    """What rows of one table have in common: without it the numbers mean nothing."""
    hardware, config = row.hardware, row.config
    if hardware.gpus:
        names = [gpu.name for gpu in hardware.gpus]
        where = f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]
        where += f", driver {hardware.driver}" if hardware.driver else ""
    else:
        where = f"{hardware.cpu}, {hardware.cpu_count} cores"
    model = config.get("model") or "bundled model"
    work = row.workload
    return (
        f"{work.name} ({work.scale}, ids below {work.id_limit}, sha256 {work.sha256[:12]}); "
        f"{model}, {config.get('dtype', 'dtype unknown')}; {where}"
    )


def tables(rows: Sequence[Result]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(caption, headers, cells): one table per workload, model and machine, in order of arrival.

    A row's ratio is its throughput over that of the first row, or of the latest so far of that
    stage with the same settings: rows of an older commit are not what a newer one was run against.
    Micro workloads compare time per token; above 1 is always faster.
    """
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(context(row), []).append(row)
    return [(caption, *_table(group)) for caption, group in groups.items()]


def _table(rows: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    columns = [c for c in COLUMNS if any(c[1] in row.medians for row in rows)]
    headers = ["stage", *(c[0] for c in columns), "% of floor", "ratio", "config", "runs", "commit"]
    cells = []
    reference = rows[0]
    for row in rows:
        alike = row.stage == reference.stage and _config_cell(row) == _config_cell(reference)
        if alike and row.medians:
            reference = row
        line = [row.stage, *(_cell(row, name, form) for _, name, form in columns)]
        percent, ratio = row.percent_of_floor, _ratio(row, reference)
        line += [
            "-" if percent is None else f"{percent:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
            _config_cell(row),
            str(len(row.runs)) if row.error is None else f"{len(row.runs)}; {row.error}",
            (row.commit or "unknown")[:10] + ("+changes" if row.dirty else ""),
        ]
        cells.append(line)
    return headers, cells


def _cell(row: Result, name: str, form: str) -> str:
    if name not in row.medians:
        return "-"
    text = format(row.medians[name], form)
    low, high = (format(v, form) for v in row.spread[name])
    return text if low == high else f"{text} ({low}-{high})"


def _config_cell(row: Result) -> str:
    config = row.config
    parts = []
    names = {"attention_backend": "{}", "kvcache_block_size": "block {}", "flags": "{}"}
    for name, form in names.items():
        if config.get(name):
            parts.append(form.format(config[name]))
    for name, short in (("tensor_parallel_size", "TP"), ("data_parallel_size", "DP")):
        if config.get(name, 1) != 1:
            parts.append(f"{short}{config[name]}")
    if config.get("enforce_eager"):
        parts.append("eager")
    if (tokens := config.get("max_prefill_tokens_per_step")) is not None:
        parts.append(f"prefill {tokens}")
    if config.get("mixed_batch") == "separate":
        parts.append("separate")
    if (num_steps := config.get("max_prefill_defer")) is not None:
        parts.append(f"defer {num_steps}")
    return ", ".join(parts) or "-"


def _ratio(row: Result, first: Result) -> float | None:
    if row.workload.name.startswith("batch"):
        mine, reference = first.medians.get("tpot_ms.p50"), row.medians.get("tpot_ms.p50")
    else:
        mine = row.medians.get("tokens_per_second")
        reference = first.medians.get("tokens_per_second")
    return mine / reference if mine and reference else None


def markdown(rows: Sequence[Result]) -> str:
    """The tables for the docs."""
    parts = []
    for caption, headers, cells in tables(rows):
        lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *cells]
        # A pipe in an error message would open another column.
        text = ["| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines]
        libraries = _libraries(rows, caption)
        parts.append("\n".join([f"**{caption}**", "", *text, "", libraries]))
    return "\n\n".join(parts) + "\n"


def _libraries(rows: Sequence[Result], caption: str) -> str:
    used = {k: v for row in rows if context(row) == caption for k, v in row.versions.items()}
    floors = [row.floor for row in rows if context(row) == caption and row.floor is not None]
    text = "Median (smallest-largest) of the runs. " + ", ".join(
        f"{k} {v}" for k, v in used.items()
    )
    if floors:
        last = floors[-1]
        text += f". Floor at {rate(last.bandwidth, 'B/s')} and {rate(last.matmul_rate, 'FLOP/s')}"
    return text + "."


def rate(value: float, unit: str) -> str:
    """In tera or giga, whichever leaves a digit in front of the point."""
    scale, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / scale:,.2f} {prefix}{unit}"


def report(row: Result) -> Table:
    """One row for the terminal, read downwards."""
    table = Table(title=f"{row.stage}: {context(row)}", title_justify="left", show_header=False)
    table.add_column(justify="right")
    table.add_column()
    headers, cells = _table([row])
    for header, text in zip(headers[1:], cells[0][1:], strict=True):
        if header != "ratio":
            table.add_row(header, text)
    for line in _floor_lines(row):
        table.add_row(*line)
    return table


def _floor_lines(row: Result) -> list[tuple[str, str]]:
    floor = row.floor
    if floor is None:
        return []
    step = "" if floor.tpot_ms is None else f", {floor.tpot_ms:.3f} ms a decode step"
    lines = [
        ("floor", f"{floor.tokens_per_second:,.0f} tokens/s{step}"),
        (
            "measured rates",
            f"{rate(floor.bandwidth, 'B/s')}, {rate(floor.matmul_rate, 'FLOP/s')}"
            + (f", x {floor.devices} devices" if floor.devices > 1 else ""),
        ),
    ]
    seconds = row.medians.get("seconds")
    # With decode gaps the floor does more work, not the same in less time.
    if seconds and not row.workload.name.startswith("decode_gap"):
        moved, done = floor.bytes_moved / seconds, floor.flops / seconds
        text = f"{rate(moved, 'B/s')}, {rate(done, 'FLOP/s')} of what had to be done"
        lines.append(("achieved", text))
    return lines


def rich_tables(rows: Sequence[Result]) -> list[Table]:
    """The same tables for the terminal, narrower: a range stands below its median, and
    circumstances that are equal in all rows stand above them once."""
    rendered = []
    for caption, headers, cells in tables(rows):
        columns = list(zip(headers, *cells, strict=True))
        same = [c for c in columns if c[0] in CIRCUMSTANCES and len(cells) > 1 == len(set(c[1:]))]
        title = "; ".join([caption, *(f"{header} {cell}" for header, cell, *_ in same)])
        table = Table(title=title, title_justify="left")
        kept = [column for column in columns if column not in same]
        for index, (header, *_) in enumerate(kept):
            justify: JustifyMethod = "left" if index == 0 else "right"
            table.add_column(header, justify=justify, overflow="fold", no_wrap=index == 0)
        for line in zip(*(column[1:] for column in kept), strict=True):
            table.add_row(*(cell.replace(" (", "\n(") for cell in line))
        rendered.append(table)
    return rendered
