"""Tables of stages 03 and 04: servers under load, and what several GPUs bring."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tools.docsite import results
from tools.docsite.results import Row

Size = tuple[int, int]  # data parallel, tensor parallel

GOODPUT = "goodput.requests_per_second"

OFFLINE = {"tokens_per_second": ("tokens/s", ",.0f"), "tpot_ms.p50": ("TPOT p50 ms", ",.2f")}
ONLINE = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "requests_per_second": ("requests/s", ",.2f"),
    GOODPUT: ("goodput, requests/s", ",.2f"),
    "latencies.ttft_ms.avg": ("TTFT avg ms", ",.0f"),
    "latencies.ttft_ms.p90": ("TTFT p90 ms", ",.0f"),
    "latencies.tpot_ms.avg": ("TPOT avg ms", ",.2f"),
    "latencies.latency_scheduled_ms.avg": ("latency avg ms", ",.0f"),
    "latencies.latency_scheduled_ms.p90": ("latency p90 ms", ",.0f"),
}


def tables(stage: str, names: Sequence[str]) -> str:
    """Of every named workload or scenario a table for each model: a row for each rate and size, and
    how many times the tokens per second of one GPU it reaches. Online rows carry the stage of the
    engine that was served, so any stage counts there."""
    parts, missing = [], []
    for name in names:
        found = [
            _table(rows, metrics, source)
            for source in results.files()
            for metrics, rows in (*_offline(source, name, stage), *_online(source, name))
            if any(_size(row) != (1, 1) for row in rows)
        ]
        if found:
            parts.append(f"**`{name}`**\n\n" + "\n\n".join(found))
        else:
            missing.append(f"`{name}`")
    if missing:
        parts.append(f"Not measured yet on several GPUs: {', '.join(missing)}.")
    return "\n\n".join(parts)


def served(names: Sequence[str]) -> str:
    """Of every named scenario a table for each model, whatever served it."""
    parts = []
    for name in names:
        found = [
            _table(rows, metrics, source)
            for source in results.files()
            for metrics, rows in _online(source, name)
        ]
        text = "\n\n".join(found) or "No result in this repository yet."
        parts.append(f"**`{name}`**\n\n{text}")
    return "\n\n".join(parts)


Group = tuple[dict[str, tuple[str, str]], list[Row]]


def _offline(source: str, name: str, stage: str) -> list[Group]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows_of(source):
        if row["workload"]["name"] == name and row["stage"] == stage:
            groups.setdefault(results.context(row), []).append(row)
    return [(OFFLINE, rows) for rows in groups.values()]


def _online(source: str, name: str) -> list[Group]:
    """However many GPUs the machine shows: a server of one GPU may have been shown only that."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for (scenario, model, _), rows in results.online_rows(source):
        if scenario == name:
            for row in rows:
                gpus = {gpu["name"] for gpu in row["hardware"].get("gpus", [])}
                groups.setdefault((model, *sorted(gpus)), []).append(row)
    return [(ONLINE, rows) for rows in groups.values()]


def _size(row: Row) -> Size:
    config = row["config"]
    return config.get("data_parallel_size", 1), config.get("tensor_parallel_size", 1)


def _table(rows: Sequence[Row], metrics: dict[str, tuple[str, str]], source: str) -> str:
    """The newest row of each rate, size and engine."""
    newest = {
        (row.get("rate_rps") or 0.0, row["stage"], _size(row)): row
        for row in sorted(rows, key=lambda row: row.get("created", ""))
    }
    metrics = {m: v for m, v in metrics.items() if any(m in r["medians"] for r in newest.values())}
    offered = ["offered, requests/s"] if any(rate for rate, *_ in newest) else []
    engines = ["engine"] if any("label" in row for row in rows) else []
    names = [header for header, _ in metrics.values()]
    headers = [*offered, *engines, "DP", "TP", *names, "times one", "GPU use %"]
    lines = ["| " + " | ".join(headers) + " |", "|" + "---:|" * len(headers)]
    for (rate, stage, size), row in sorted(newest.items()):
        one = newest.get((rate, stage, (1, 1)), {"medians": {}})["medians"].get("tokens_per_second")
        speed = row["medians"].get("tokens_per_second")
        used = [f"{use['utilization_percent']:.0f}" for use in row.get("gpu_use", [])]
        cells = [
            *([f"{rate:g}"] if offered else []),
            *([stage] if engines else []),
            *(str(number) for number in size),
            *(results.value(row, metric, form) for metric, (_, form) in metrics.items()),
            "-" if one is None or speed is None else f"{speed / one:.2f}",
            ", ".join(used) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    row = rows[0]
    commits = ", ".join(dict.fromkeys(results.commit(row) for row in newest.values()))
    note = (
        f"<small>{row['config'].get('model') or 'bundled model'}; {results.place(rows[-1])}. "
        f"Median (smallest-largest) of the runs.{_best_goodput(newest.values())} "
        f"`bench/results/{source}`, commit {commits}.</small>"
    )
    return "\n".join([*lines, "", note])


def _best_goodput(rows: Collection[Row]) -> str:
    """The most of each size over the rates: past saturation it falls, at other rates for each. Of
    several engines nothing is said."""
    best: dict[Size, float] = {}
    if len({row["stage"] for row in rows}) > 1:
        return ""
    for row in rows:
        if GOODPUT in row["medians"]:
            size = _size(row)
            best[size] = max(best.get(size, 0.0), row["medians"][GOODPUT])
    if len(best) < 2 or not best.get((1, 1)):
        return ""
    parts = [
        f"DP {data}, TP {tensor}: {most:,.2f} ({most / best[1, 1]:.2f} times one)"
        for (data, tensor), most in sorted(best.items())
    ]
    return f" Most goodput at any rate, requests/s: {'; '.join(parts)}."
