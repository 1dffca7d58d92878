"""Tables of stages 03 and 04: servers under load, and what several GPUs bring."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tools.docsite import results
from tools.docsite.results import Row

Size = tuple[int, int]  # data parallel, tensor parallel
ONE: Size = (1, 1)

GOODPUT = "goodput.requests_per_second"
LOAD = "load for one GPU"
BELOW, SATURATED = "below saturation", "saturated"

OFFLINE = {"tokens_per_second": ("tokens/s", ",.0f"), "tpot_ms.p50": ("TPOT p50 ms", ",.2f")}
ONLINE = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "requests_per_second": ("requests/s", ",.2f"),
    GOODPUT: ("goodput, requests/s", ",.2f"),
    "latencies.ttft_ms.avg": ("TTFT avg ms", ",.0f"),
    "latencies.ttft_ms.p90": ("TTFT p90 ms", ",.0f"),
    "latencies.tpot_ms.avg": ("TPOT avg ms", ",.2f"),
    "latencies.tpot_ms.p90": ("TPOT p90 ms", ",.2f"),
    "latencies.latency_scheduled_ms.avg": ("latency avg ms", ",.0f"),
    "latencies.latency_scheduled_ms.p90": ("latency p90 ms", ",.0f"),
}
TEXTS = ("model", "engine", LOAD)  # columns


def tables(stage: str, names: Sequence[str]) -> str:
    """Of every named workload a table for each model, of every named scenario one: a row for each
    rate and size, and how many times the tokens per second of one GPU it reaches. Online rows carry
    the stage of the engine that was served: all count whose engine and model several GPUs have
    served."""
    parts, missing = [], []
    for name in names:
        found = []
        for source in results.files():
            for metrics, rows in (*_offline(source, name, stage), *_online(source, name)):
                several = {_served(row) for row in rows if _size(row) != ONE}
                if several:
                    compared = [row for row in rows if _served(row) in several]
                    found.append(_table(compared, metrics, source))
        if found:
            parts.append(f"**`{name}`**\n\n" + "\n\n".join(found))
        else:
            missing.append(f"`{name}`")
    if missing:
        parts.append(f"Not measured yet on several GPUs: {', '.join(missing)}.")
    return "\n\n".join(parts)


def served(names: Sequence[str]) -> str:
    """Of every named scenario a table: whatever engine served it from one GPU."""
    parts = []
    for name in names:
        groups = [
            ([row for row in rows if _size(row) == ONE], metrics, source)
            for source in results.files()
            for metrics, rows in _online(source, name)
        ]
        found = [_table(*group) for group in groups if group[0]]
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
    for (scenario, *_), rows in results.online_rows(source):
        if scenario == name:
            for row in rows:
                gpus = {gpu["name"] for gpu in row["hardware"].get("gpus", [])}
                groups.setdefault(tuple(sorted(gpus)), []).append(row)
    return [(ONLINE, rows) for rows in groups.values()]


def _model(row: Row) -> str:
    return row.get("model") or row["config"].get("model") or "bundled model"


def _served(row: Row) -> tuple[str, str]:
    return _model(row), row["stage"]


def _size(row: Row) -> Size:
    config = row["config"]
    return config.get("data_parallel_size", 1), config.get("tensor_parallel_size", 1)


Plan = tuple[str, float, str, str]


def _plan(row: Row) -> Plan:
    """What rows must share to be compared: the model, the rate, the engine, and every request with
    its arrival."""
    return _model(row), row.get("rate_rps") or 0.0, row["stage"], row.get("sha256", "")


def _table(rows: Sequence[Row], metrics: dict[str, tuple[str, str]], source: str) -> str:
    """The newest row of each model, rate, engine and size. What all of them share stands below."""
    newest = {
        (_plan(row), _size(row)): row
        for row in sorted(rows, key=lambda row: row.get("created", ""))
    }
    weights: dict[str, int] = {}  # one rank of several holds less
    for row in rows:
        size = row["config"].get("weights_bytes", 0)
        weights[_model(row)] = max(size, weights.get(_model(row), 0))
    shown = [newest[key] for key in sorted(newest, key=lambda key: (weights[key[0][0]], key))]
    columns = {
        "model": [_model(row) for row in shown],
        "engine": [row["stage"] if "label" in row else "" for row in shown],
        "offered, requests/s": [f"{row.get('rate_rps') or 0:g}" for row in shown],
        "requests": [f"{row['medians'].get('requests', 0):.0f}" for row in shown],
    }
    shared = {name: cells[0] for name, cells in columns.items() if len(set(cells)) == 1}
    columns = {name: cells for name, cells in columns.items() if name not in shared}
    is_compared = any(_size(row) != ONE for row in shown)
    if is_compared:
        columns["DP"], columns["TP"] = ([str(_size(row)[i]) for row in shown] for i in (0, 1))
    for metric, (header, form) in metrics.items():
        if any(metric in row["medians"] for row in shown):
            columns[header] = [results.value(row, metric, form) for row in shown]
    if is_compared:
        columns["times one"] = [_times_one(row, newest.get((_plan(row), ONE))) for row in shown]
        if any(row.get("rate_rps") for row in shown):
            columns[LOAD] = [_load_for_one(row, newest) for row in shown]
    elif any(serving := [results.serving_percent(row) for row in shown]):
        columns["serving, % of steps"] = [f"{share:.1f}" if share else "-" for share in serving]
    columns["GPU use %"] = [
        ", ".join(f"{use['utilization_percent']:.0f}" for use in row.get("gpu_use", [])) or "-"
        for row in shown
    ]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "".join("---|" if name in TEXTS else "---:|" for name in columns),
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*columns.values(), strict=True)]
    what = [f"{name}: {cell}" for name, cell in shared.items() if cell not in ("", "0")]
    places = dict.fromkeys(results.place(row) for row in shown)
    commits = ", ".join(dict.fromkeys(results.commit(row) for row in shown))
    note = (
        f"<small>{'; '.join([*places, *what])}. Median (smallest-largest) of the "
        f"runs.{_best_goodput(shown)} `bench/results/{source}`, commit {commits}.</small>"
    )
    return "\n".join([*lines, "", note])


def _times_one(row: Row, one: Row | None) -> str:
    speed = row["medians"].get("tokens_per_second")
    base = one and one["medians"].get("tokens_per_second")
    return "-" if not base or speed is None else f"{speed / base:.2f}"


def _load_for_one(row: Row, newest: Mapping[tuple[Plan, Size], Row]) -> str:
    """Whether one GPU keeps the promise of the goodput at this load, or already not at a lower
    rate. With a limited number of clients no queue grows in the server: then, whether requests wait
    longer for a client than for their first token."""
    model, rate, stage, _ = _plan(row)
    one = newest.get((_plan(row), ONE))
    if one is None:
        lower = [
            other
            for (plan, size), other in newest.items()
            if size == ONE and (plan[0], plan[2]) == (model, stage) and plan[1] < rate
        ]
        is_saturated = any(_load_for_one(other, newest) == SATURATED for other in lower)
        return SATURATED if is_saturated else "-"
    medians, clients = one["medians"], one["options"]["load"]["concurrency"]
    if clients is None:
        share = medians.get("goodput.share")
        return "-" if share is None else SATURATED if share < 1 else BELOW
    is_full = medians["latencies.queue_ms.avg"] > medians["latencies.ttft_ms.avg"]
    return f"{BELOW}, {clients} clients busy" if is_full else BELOW


def _best_goodput(rows: Collection[Row]) -> str:
    """The most of each size over the rates: past saturation it falls, at other rates for each. Of
    one rate, several engines or several models nothing is said."""
    best: dict[Size, float] = {}
    if len({_served(row) for row in rows}) > 1 or len({row.get("rate_rps") for row in rows}) == 1:
        return ""
    for row in rows:
        if GOODPUT in row["medians"]:
            size = _size(row)
            best[size] = max(best.get(size, 0.0), row["medians"][GOODPUT])
    if len(best) < 2 or not best.get(ONE):
        return ""
    parts = [
        f"DP {data}, TP {tensor}: {most:,.2f} ({most / best[ONE]:.2f} times one)"
        for (data, tensor), most in sorted(best.items())
    ]
    return f" Most goodput at any rate, requests/s: {'; '.join(parts)}."
