"""Tables and single numbers from the JSON files under bench/results, read as plain JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tools.docsite import ROOT

RESULTS = ROOT / "bench" / "results"
Row = dict[str, Any]

# Name in `medians` -> (header, format).
COLUMNS = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "ttft_ms.p50": ("TTFT p50 ms", ",.0f"),
    "tpot_ms.p50": ("TPOT p50 ms", ",.2f"),
    "gap_ms.p50": ("gap p50 ms", ",.1f"),
    "gap_ms.p95": ("gap p95 ms", ",.1f"),
    "gap_ms.p99": ("gap p99 ms", ",.1f"),
    "gap_ms.max": ("gap max ms", ",.1f"),
    "prefix_hit_tokens": ("prefix hits", ",.0f"),
}
GAP_COLUMNS = ["tokens_per_second", "gap_ms.p50", "gap_ms.p99", "gap_ms.max", "ttft_ms.p50"]
DEFAULT_COLUMNS = {
    "decode_gap": GAP_COLUMNS,
    "decode_gap_busy": GAP_COLUMNS,
    "decode_gap_many": GAP_COLUMNS,
    "decode_gap_few": GAP_COLUMNS,
    "decode_gap_long": GAP_COLUMNS,
    "shared_prefix": ["tokens_per_second", "ttft_ms.p50", "prefix_hit_tokens"],
    "batch1": ["tokens_per_second", "tpot_ms.p50"],
    "batch8": ["tokens_per_second", "tpot_ms.p50"],
}
OTHER_COLUMNS = ["tokens_per_second", "ttft_ms.p50", "tpot_ms.p50", "gap_ms.p99"]
# Effective settings that tell rows of one stage apart.
SETTINGS = {
    "attention_backend": "{}",
    "kvcache_block_size": "block {}",
    "flags": "{}",  # of a row that never ran, and so has no settings
    "max_prefill_tokens_per_step": "prefill {}",
    "mixed_batch": "{}",
    "max_prefill_defer": "defer {}",
    "enforce_eager": "eager",
    "tensor_parallel_size": "TP{}",
    "data_parallel_size": "DP{}",
}
DEFAULTS = {
    "mixed_batch": "unified",
    "enforce_eager": False,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "flags": "",
}


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """Rows of a file under bench/results that describe runs of a stage; () for other kinds."""
    content = json.loads((RESULTS / name).read_text())
    if not isinstance(content, list):
        return ()
    return tuple(
        row
        for row in content
        if isinstance(row, dict) and {"stage", "medians", "workload"} <= row.keys()
    )


def files() -> list[str]:
    return sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json"))


def compared() -> list[str]:
    """The files that compare stages as they are. A sweep has rows at many settings, and none of
    them stands for its stage."""
    return [name for name in files() if "sweep" not in Path(name).name]


def online_rows(name: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Rows of an online rate sweep by their work, model and machine, with those as text."""
    content = json.loads((RESULTS / name).read_text())
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in content if isinstance(content, list) else []:
        if isinstance(row, dict) and {"label", "rate_rps", "medians", "hardware"} <= row.keys():
            lengths = json.dumps(row.get("options", {}).get("work"), sort_keys=True)
            key = (str(row.get("scenario") or "own_flags"), str(row.get("model")), place(row))
            groups.setdefault((*key, lengths), []).append(row)
    return [(key[:3], rows) for key, rows in groups.items()]


def place(row: Row) -> str:
    hardware = row["hardware"]
    gpus = [gpu["name"] for gpu in hardware.get("gpus", [])]
    text = f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else "".join(gpus)
    return text or f"{hardware['cpu']}, {hardware['cpu_count']} cores"


def context(row: Row) -> tuple[str, ...]:
    """What rows must share to stand in one table: workload, model, machine."""
    work = row["workload"]
    model = row["config"].get("model") or "bundled model"
    dtype = row["config"].get("dtype", "dtype unknown")
    return (
        f"{work['name']}, {work['scale']} size",
        f"{model}, {dtype}",
        place(row),
        work["sha256"][:12],
    )


def settings(row: Row) -> str:
    config, parts = row["config"], []
    for name, form in SETTINGS.items():
        value = config.get(name)
        if value is not None and value != DEFAULTS.get(name):
            parts.append(form.format(value))
    return ", ".join(parts) or "-"


def commit(row: Row) -> str:
    return (row.get("commit") or "unknown")[:10] + ("+changes" if row.get("dirty") else "")


def value(row: Row, metric: str, form: str) -> str:
    """The median, with the smallest and largest run where they differ."""
    if metric not in row["medians"]:
        return "-"
    text = format(row["medians"][metric], form)
    low, high = (format(v, form) for v in row["spread"][metric])
    return text if low == high else f"{text} ({low}-{high})"


def problems(row: Row) -> list[str]:
    """What a row's numbers leave out: requests, or whole runs."""
    failed = max((run.get("failed", 0) for run in row["runs"]), default=0)
    notes = [f"{failed} requests failed"] if failed else []
    return [*notes, row["error"]] if row.get("error") else notes


def table(rows: Sequence[Row], metrics: Sequence[str], source: str) -> str:
    """Rows of one context, with the context below."""
    metrics = [m for m in metrics if any(m in row["medians"] for row in rows)]
    headers = ["stage", *(COLUMNS[m][0] for m in metrics), "% of floor", "settings", "runs"]
    lines = [
        "| " + " | ".join(headers) + " |",
        "|---|" + "---:|" * (len(metrics) + 1) + "---|---:|",
    ]
    for row in rows:
        floor = row.get("percent_of_floor")
        cells = [
            row["stage"],
            *(value(row, m, COLUMNS[m][1]) for m in metrics),
            "-" if floor is None else f"{floor:.1f}",
            settings(row),
            "; ".join([str(len(row["runs"])), *problems(row)]),
        ]
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    commits = ", ".join(dict.fromkeys(commit(row) for row in rows))
    where = "; ".join(context(rows[0])[:3])
    note = (
        f"<small>{where}. Median (smallest-largest) of the runs. `bench/results/{source}`, "
        f"workload `{context(rows[0])[3]}`, commit {commits}.</small>"
    )
    return "\n".join([*lines, "", note])


def stage_tables(
    stage: str, against: Sequence[str], workloads: Sequence[str], left_out: Sequence[str] = ()
) -> str:
    """Every table with rows of `stage`, beside those of other stages in the same file."""
    parts, missing = [], []
    for workload in workloads:
        found = []
        for name in compared():
            if name in left_out:
                continue
            groups: dict[tuple[str, ...], list[Row]] = {}
            for row in rows_of(name):
                if row["workload"]["name"] == workload and row["stage"] in (stage, *against):
                    groups.setdefault(context(row), []).append(row)
            for rows in groups.values():
                if any(row["stage"] == stage for row in rows):
                    metrics = DEFAULT_COLUMNS.get(workload, OTHER_COLUMNS)
                    found.append(table(rows, metrics, name))
        if found:
            parts.append(f"**`{workload}`**\n\n" + "\n\n".join(found))
        else:
            missing.append(f"`{workload}`")
    if missing:
        parts.append(f"No result in this repository yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


Newest = dict[str, tuple[Row, str]]  # stage -> its newest row, and the file


def newest_rows(workloads: Sequence[str]) -> list[tuple[tuple[str, ...], Newest]]:
    """The newest rows by context, in the order of the workloads.

    Stages in one file ran in turns. Rows of two such files do not stand side by side: a context
    that both have comes twice, unless the newer one has all stages of the other.
    """
    groups: dict[tuple[str, ...], dict[str, Newest]] = {}
    for name in compared():
        for row in rows_of(name):
            if row["workload"]["name"] in workloads and row["medians"]:
                groups.setdefault(context(row), {}).setdefault(name, {})[row["stage"]] = row, name
    found = [(key, rows) for key, by_file in groups.items() for rows in _side_by_side(by_file)]
    return sorted(found, key=lambda item: (workloads.index(item[0][0].split(",")[0]), item[0]))


def _side_by_side(by_file: dict[str, Newest]) -> list[Newest]:
    oldest_first = sorted(by_file.values(), key=_created)
    several = [rows for rows in oldest_first if len(rows) > 1]
    if not several:
        return [{stage: row for rows in oldest_first for stage, row in rows.items()}]
    return [
        rows
        for i, rows in enumerate(several)
        if not any(rows.keys() <= newer.keys() for newer in several[i + 1 :])
    ]


def _created(rows: Newest) -> str:
    return max(row.get("created", "") for row, _ in rows.values())


def ladder(workloads: Sequence[str]) -> str:
    """One line a stage, one number for every context that has more than one stage or a GPU."""
    columns = [
        (key, newest)
        for key, newest in newest_rows(workloads)
        if len(newest) > 1 or next(iter(newest.values()))[0]["hardware"].get("gpus")
    ]
    heads, sources = ["stage"], []
    for (work, model, place, sha256), newest in columns:
        workload = work.split(",")[0]
        title, _ = COLUMNS[_ladder_metric(workload)]
        where = (workload, model.split(",")[0].removesuffix(" checkpoint"), place.split(",")[0])
        heads.append(f"{title}<br><small>{'<br>'.join(where)}</small>")
        names = ", ".join(dict.fromkeys(f"`{name}`" for _, name in newest.values()))
        commits = ", ".join(dict.fromkeys(commit(row) for row, _ in newest.values()))
        sources.append(f"{workload} `{sha256}` from {names}, commit {commits}")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * len(columns)]
    for stage in sorted({stage for _, newest in columns for stage in newest}):
        cells = [stage]
        for (work, *_), newest in columns:
            metric = _ladder_metric(work.split(",")[0])
            row = newest[stage][0] if stage in newest else None
            has_value = row is not None and metric in row["medians"]
            cells.append(
                format(row["medians"][metric], COLUMNS[metric][1]) if row and has_value else "-"
            )
        lines.append("| " + " | ".join(cells) + " |")
    note = f"<small>Medians. Under `bench/results`: {'; '.join(sources)}.</small>"
    return "\n".join([*lines, "", note]) if columns else ""


def _ladder_metric(workload: str) -> str:
    """What a workload is about."""
    return "gap_ms.p99" if DEFAULT_COLUMNS.get(workload) == GAP_COLUMNS else "tokens_per_second"


def _find(name: str, stage: str, workload: str, wanted: dict[str, str]) -> Row:
    """The newest matching row of a workload, or of an online scenario (`wanted` may have its
    `rate_rps` too). Raises ValueError if there is none."""
    if name not in files():
        raise ValueError(f"bench/results/{name} is not there")
    rows = [(row["workload"]["name"], row) for row in rows_of(name)]
    rows += [(key[0], row) for key, group in online_rows(name) for row in group]
    found = [
        row
        for work, row in rows
        if row.get("stage") == stage
        and work == workload
        and all(str(_setting(row, k)) == v for k, v in wanted.items())
    ]
    if not found:
        raise ValueError(f"bench/results/{name} has no row of {stage} on {workload} with {wanted}")
    return found[-1]


def _setting(row: Row, name: str) -> Any:
    if name == "rate_rps":
        return f"{row.get(name) or 0:g}"
    return row["config"].get(name, DEFAULTS.get(name))


def number(name: str, stage: str, workload: str, metric: str, form: str, **wanted: str) -> str:
    row = _find(name, stage, workload, wanted)
    if metric == "percent_of_floor":
        return format(row[metric], form)
    if metric == "serving_percent" and (share := serving_percent(row)) is not None:
        return format(share, form)
    if metric not in row["medians"]:
        raise ValueError(f"bench/results/{name}: no {metric} for {stage} on {workload}")
    return format(row["medians"][metric], form)


def serving_percent(row: Row) -> float | None:
    """Of a served engine's time in steps, what it spent between them; None where nobody counted."""
    counts = [run.get("server") or {} for run in row.get("runs", ())]
    shares = [
        100 * count["serving_seconds"] / count["step_seconds"]
        for count in counts
        if count.get("step_seconds")
    ]
    return statistics.median(shares) if shares else None


def ratio(
    name: str, stage: str, other: str, workload: str, metric: str, form: str, **wanted: str
) -> str:
    """`metric` of a stage over that of another."""
    mine = _find(name, stage, workload, wanted)["medians"][metric]
    return format(mine / _find(name, other, workload, wanted)["medians"][metric], form)


def sweep(name: str, option: str, metrics: Sequence[str]) -> str:
    """One line per value of an option, with every run's value."""
    groups: dict[tuple[Any, str], list[Row]] = {}
    for row in rows_of(name):
        if option not in row["config"] or any(m not in row["medians"] for m in metrics):
            continue  # it failed, and stays in the file
        mixed = str(row["config"].get("mixed_batch", "unified"))
        groups.setdefault((row["config"][option], mixed), []).append(row)
    if not groups:
        return f"`bench/results/{name}` has no row with these numbers yet."
    ordered = sorted(groups.items(), key=lambda item: (item[0][1] != "unified", item[0][0]))
    headers = [f"`{option}`", *(COLUMNS[m][0] for m in metrics)]
    lines = ["| " + " | ".join(headers) + " |", "|---|" + "---:|" * len(metrics)]
    for (number_of_tokens, mixed), rows in ordered:
        label = f"{number_of_tokens}" + ("" if mixed == "unified" else f", `--mixed-batch {mixed}`")
        cells = [
            ", ".join(format(v, COLUMNS[m][1]) for v in sorted(r["medians"][m] for r in rows))
            for m in metrics
        ]
        lines.append("| " + " | ".join([label, *cells]) + " |")
    first = groups[ordered[0][0]][0]
    note = "; ".join(context(first)[:3])
    return "\n".join(
        [
            *lines,
            "",
            (
                f"<small>{note}. One value per run. `bench/results/{name}`, "
                f"commit {commit(first)}.</small>"
            ),
        ]
    )


def swept(name: str) -> str:
    """Every point of a sweep by name, from files sweep_NAME*.json: a table per workload and
    machine."""
    parts = []
    for file in files():
        if not Path(file).name.startswith(f"sweep_{name.replace('-', '_')}"):
            continue
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows_of(file):
            groups.setdefault(context(row), []).append(row)
        for key, rows in groups.items():
            workload = key[0].split(",")[0]
            metrics = DEFAULT_COLUMNS.get(workload, OTHER_COLUMNS)
            parts.append(f"**`{workload}`**\n\n" + table(rows, metrics, file))
    return "\n\n".join(parts) or (
        f"No result of `python -m bench.sweep {name}` in this repository yet."
    )


def kernel_rows(operation: str, shape: str | None = None, implementation: str | None = None) -> str:
    """What bench/results/kernels_*.json say about one kernel, one shape of it, or one
    implementation of that."""
    parts = []
    for path in sorted(RESULTS.rglob("kernels_*.json")):
        report = json.loads(path.read_text())
        rows = [
            row
            for row in report["rows"]
            if row["operation"] == operation
            and shape in (None, row["shape"])
            and implementation in (None, row["implementation"])
        ]
        if not rows:
            continue
        gpus = ", ".join(gpu["name"] for gpu in report["hardware"]["gpus"])
        lines = [
            "| shape | implementation | µs | rate | % of ceiling |",
            "|---|---|---:|---:|---:|",
        ]
        lines += [
            f"| {row['shape']} | {row['implementation']} | {row['microseconds']:,.1f} | "
            f"{row['rate']:,.0f} {row['unit']} | {row['percent_of_ceiling']:.0f} |"
            for row in rows
        ]
        note = (
            f"<small>{gpus}, bfloat16; a copy reaches {report['copy_gb_per_second']:,.0f} GB/s, a "
            f"matrix product {report['matmul_tflop_per_second']:,.0f} TFLOP/s. `bench/results/"
            f"{path.relative_to(RESULTS)}`, commit {commit(report)}.</small>"
        )
        parts.append("\n".join([*lines, "", note]))
    if not parts:
        raise ValueError(f"no kernel results for {(operation, shape, implementation)}")
    return "\n\n".join(parts)


def small_batch() -> str:
    """Linear layers of few rows against the library's product, from small_batch_*.json."""
    parts = []
    for path in sorted(RESULTS.rglob("small_batch_*.json")):
        report = json.loads(path.read_text())
        gpus = ", ".join(gpu["name"] for gpu in report["hardware"]["gpus"])
        lines = [
            "| model | rows | product | floor µs | library µs | here µs |",
            "|---|---:|---|---:|---:|---:|",
        ]
        lines += [
            f"| {row['model']} | {row['rows']} | {row['operation']} | {row['floor_us']:.1f} | "
            f"{row['library_us']:.1f} | {row['kernel_us']:.1f} |"
            for row in report["rows"]
            if row["rows"] in (1, 8)
        ]
        note = (
            f"<small>{gpus}, bfloat16, weights not in the cache; norms and activation included; "
            f"1 and 8 rows. `bench/results/{path.relative_to(RESULTS)}`, commit "
            f"{commit(report)}.</small>"
        )
        parts.append("\n".join([*lines, "", note]))
    if not parts:
        raise ValueError("no results of linear layers with few rows")
    return "\n\n".join(parts)


def all_reduce() -> str:
    """Sums over ranks, from all_reduce_*.json."""
    parts = []
    for path in sorted(RESULTS.rglob("all_reduce_*.json")):
        report = json.loads(path.read_text())
        gpus = report["hardware"]["gpus"]
        note = (
            f"<small>{report['ranks']} x {gpus[0]['name']}, bfloat16, in CUDA graphs; one GPU "
            f"sends to the other at {report['gb_per_second']:,.0f} GB/s while as much flows back. "
            f"`bench/results/{path.relative_to(RESULTS)}`, commit {commit(report)}.</small>"
        )
        parts.append("\n".join([*all_reduce_lines(report["rows"]), "", note]))
    if not parts:
        raise ValueError("no results of sums over ranks")
    return "\n\n".join(parts)


def all_reduced(kilobytes: str, way: str = "peers_us", times: str = "0") -> str:
    """Microseconds of one sum of that size; of so many, milliseconds."""
    path = max(RESULTS.rglob("all_reduce_*.json"))
    rows = json.loads(path.read_text())["rows"]
    (one,) = [row[way] for row in rows if row["kilobytes"] == int(kilobytes)]
    return f"{one * int(times) / 1e3:.2f}" if int(times) else f"{one:.1f}"


def all_reduce_lines(rows: Sequence[Row]) -> list[str]:
    ways = {
        "nccl_us": "NCCL",
        "one_shot_us": "symmetric memory, one shot",
        "two_shot_us": "two shots",
        "peers_us": "here",
    }
    lines = [
        "| KiB | floor µs | " + " | ".join(f"{way} µs" for way in ways.values()) + " |",
        "|" + "---:|" * (2 + len(ways)),
    ]
    for row in rows:
        times = ["-" if row[way] is None else f"{row[way]:.1f}" for way in ways]
        cells = [f"{row['kilobytes']:,}", f"{row['floor_us']:.1f}", *times]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def decode_profile(*names: str) -> str:
    """Where the time of a decode step goes: a table for each of these files, by default for all of
    one device."""
    parts = []
    named = [RESULTS / name for name in names]
    for path in named or sorted(RESULTS.rglob("decode_profile_*.json")):
        report = json.loads(path.read_text())
        steps, config = report["steps"], report["config"]
        ranks = config.get("tensor_parallel_size", 1)
        if ranks > 1 and not named:
            continue
        heads = [f"{step['rows']} x {step['context']:,.0f} tokens" for step in steps]
        lines = [
            "| " + " | ".join([f"{config['model']}, {_ranks(ranks)}µs", *heads]) + " |",
            "|---|" + "---:|" * len(steps),
        ]
        lines += profile_lines(steps)
        note = (
            f"<small>{config['device_name']}, {config['dtype']}; in brackets the bytes that must "
            f"be read and written at {report['copy_gb_per_second']:,.0f} GB/s, a copy's rate. "
            f"`bench/results/{path.relative_to(RESULTS)}`, commit {commit(report)}.</small>"
        )
        parts.append("\n".join([*lines, "", note]))
    if not parts:
        raise ValueError("no decode profile")
    return "\n\n".join(parts)


def _ranks(count: int) -> str:
    return f"one of {count} ranks, " if count > 1 else ""


def idle(name: str, rows: str) -> str:
    """Percentage of a decode step of so many rows in which no kernel ran."""
    report = json.loads((RESULTS / name).read_text())
    (step,) = [step for step in report["steps"] if step["rows"] == int(rows)]
    return f"{100 * (1 - step['busy'] / step['step']):.0f}"


def profile_lines(steps: Sequence[Row]) -> list[str]:
    """The lines of a table with a column for each step: its parts, and what is not busy."""
    lines = []
    for same in zip(*(step["parts"] for step in steps), strict=True):
        cells = [f"{part['microseconds']:,.0f} ({part['floor']:,.0f})" for part in same]
        launches = "/".join(dict.fromkeys(f"{part['launches']:.0f}" for part in same))
        lines.append(f"| {same[0]['part']}, {launches} launches | {' | '.join(cells)} |")
    floors = [sum(part["floor"] for part in step["parts"]) for step in steps]
    busy = [f"{step['busy']:,.0f}" for step in steps]
    rest = [f"{step['step'] - step['busy']:,.0f}" for step in steps]
    whole = [f"{s['step']:,.0f} ({floor:,.0f})" for s, floor in zip(steps, floors, strict=True)]
    return [
        *lines,
        f"| the GPU is busy | {' | '.join(busy)} |",
        f"| gaps and host | {' | '.join(rest)} |",
        f"| the step | {' | '.join(whole)} |",
    ]


def memory() -> str:
    """What the newest GPU row of every model says about its memory."""
    newest: dict[tuple[str, str], tuple[Row, str]] = {}
    for name in files():
        for row in rows_of(name):
            if row["hardware"].get("gpus") and row["config"].get("pool_bytes"):
                key = (row["config"]["model"], row["hardware"]["gpus"][0]["name"])
                if key not in newest or row["created"] >= newest[key][0]["created"]:
                    newest[key] = (row, name)
    if not newest:
        raise ValueError("no GPU result says how its memory was used")
    lines = [
        "| model, GPU | of | weights | activations | graphs | pool | blocks | tokens |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (model, gpu), (row, _) in sorted(newest.items()):
        config = row["config"]
        total = row["hardware"]["gpus"][0]["memory_bytes"] * config["gpu_memory_utilization"]
        sizes = [
            total,
            *(config[f"{n}_bytes"] for n in ("weights", "activations", "graphs", "pool")),
        ]
        cells = [f"{size / 2**30:,.2f} GiB" for size in sizes]
        cells += [f"{config['num_kvcache_blocks']:,}", f"{config['tokens_in_pool']:,}"]
        lines.append(f"| {model}, {gpu} | " + " | ".join(cells) + " |")
    names = ", ".join(f"`bench/results/{n}`" for n in dict.fromkeys(n for _, n in newest.values()))
    note = f"<small>Effective settings of the newest result of each model, {names}.</small>"
    return "\n".join([*lines, "", note])
