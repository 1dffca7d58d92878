"""Tables of stage 04: what several GPUs bring."""

from __future__ import annotations

from collections.abc import Sequence

from tools.docsite import results
from tools.docsite.results import Row

Size = tuple[int, int]  # data parallel, tensor parallel

OFFLINE = {"tokens_per_second": ("tokens/s", ",.0f"), "tpot_ms.p50": ("TPOT p50 ms", ",.2f")}
ONLINE = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "requests_per_second": ("requests/s", ",.2f"),
    "goodput.requests_per_second": ("goodput, requests/s", ",.2f"),
    "latencies.ttft_scheduled_ms.p50": ("TTFT p50 ms", ",.0f"),
    "latencies.tpot_ms.p50": ("TPOT p50 ms", ",.2f"),
    "latencies.latency_scheduled_ms.p50": ("latency p50 ms", ",.0f"),
}


def tables(stage: str, names: Sequence[str]) -> str:
    """Of every named workload or scenario a table for each model and load: a row for each size, and
    how many times the tokens per second of one GPU it reaches."""
    parts, missing = [], []
    for name in names:
        found = [
            _table(rows, metrics, source)
            for source in results.files()
            for metrics, rows in (*_offline(source, name), *_online(source, name))
            if any(row["stage"] == stage and _size(row) != (1, 1) for row in rows)
        ]
        if found:
            parts.append(f"**`{name}`**\n\n" + "\n\n".join(found))
        else:
            missing.append(f"`{name}`")
    if missing:
        parts.append(f"Not measured yet on several GPUs: {', '.join(missing)}.")
    return "\n\n".join(parts)


Group = tuple[dict[str, tuple[str, str]], list[Row]]


def _offline(source: str, name: str) -> list[Group]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows_of(source):
        if row["workload"]["name"] == name:
            groups.setdefault(results.context(row), []).append(row)
    return [(OFFLINE, rows) for rows in groups.values()]


def _online(source: str, name: str) -> list[Group]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for key, rows in results.online_rows(source):
        for row in rows:
            if row.get("scenario") == name and "stage" in row:
                groups.setdefault((*key, str(row["rate_rps"])), []).append(row)
    return [(ONLINE, rows) for rows in groups.values()]


def _size(row: Row) -> Size:
    config = row["config"]
    return config.get("data_parallel_size", 1), config.get("tensor_parallel_size", 1)


def _table(rows: Sequence[Row], metrics: dict[str, tuple[str, str]], source: str) -> str:
    """The newest row of each size."""
    newest = {_size(row): row for row in sorted(rows, key=lambda row: row.get("created", ""))}
    metrics = {m: v for m, v in metrics.items() if any(m in r["medians"] for r in newest.values())}
    one = newest.get((1, 1), {"medians": {}})["medians"].get("tokens_per_second")
    headers = ["DP", "TP", *(header for header, _ in metrics.values()), "times one", "GPU use %"]
    lines = ["| " + " | ".join(headers) + " |", "|" + "---:|" * len(headers)]
    for (data, tensor), row in sorted(newest.items()):
        speed = row["medians"].get("tokens_per_second")
        used = [f"{use['utilization_percent']:.0f}" for use in row.get("gpu_use", [])]
        cells = [
            *(str(data), str(tensor)),
            *(results.value(row, metric, form) for metric, (_, form) in metrics.items()),
            "-" if one is None or speed is None else f"{speed / one:.2f}",
            ", ".join(used) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    row = rows[0]
    rate = row.get("rate_rps")
    load = f", {rate:g} requests/s offered" if rate else ""
    commits = ", ".join(dict.fromkeys(results.commit(row) for row in newest.values()))
    note = (
        f"<small>{row['config'].get('model') or 'bundled model'}{load}; {results.place(row)}. "
        f"Median (smallest-largest) of the runs. `bench/results/{source}`, commit "
        f"{commits}.</small>"
    )
    return "\n".join([*lines, "", note])
