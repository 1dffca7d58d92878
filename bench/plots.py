"""Pictures of results as SVG, for the terminal's user and for the site.

Drawn from rows as they are in the JSON files, with nothing but the standard library: the site is
built without the engine's dependencies. Rows that lack what a picture shows are left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.svg import FAINT, INK, Picture

Row = dict[str, Any]

POINTS = (
    ("gap_ms.p50", "p50", "#5aa457"),
    ("gap_ms.p95", "p95", "#3b78bd"),
    ("gap_ms.p99", "p99", "#c8641b"),
    ("gap_ms.max", "largest", "#8a3b8f"),
)
BAR, FLOOR = "#3b78bd", "#c8641b"
LINES = ("#3b78bd", "#c8641b", "#5aa457", "#8a3b8f", "#b58900", "#2aa198")
LEFT, WIDTH, ROW, HEIGHT = 160.0, 560.0, 28.0, 240.0
CHARACTER = 7.0  # about the width of one, in a row's label
GRID = "#b9b9b9"
# Settings that may tell rows of one stage apart, and how a label names them.
SETTINGS = {
    "attention_backend": "{}",
    "max_num_batched_tokens": "budget {}",
    "max_prefill_tokens_per_step": "prefill {}",
    "mixed_batch": "{}",
    "max_prefill_defer": "defer {}",
    "enforce_eager": "eager {}",
}


def labels(rows: Sequence[Row]) -> list[str]:
    """The stages; where one has several rows, with the settings in which those differ."""
    found = []
    for row in rows:
        alike = [other["config"] for other in rows if other["stage"] == row["stage"]]
        parts = [
            form.format(row["config"][name])
            for name, form in SETTINGS.items()
            if name in row["config"] and any(c.get(name) != row["config"][name] for c in alike)
        ]
        found.append(", ".join([row["stage"], *parts]))
    return found


def gaps(rows: Sequence[Row]) -> str | None:
    """Gaps between tokens, one line per row, milliseconds on a logarithmic axis."""
    rows = [r for r in rows if all(r["medians"].get(name, 0) > 0 for name, _, _ in POINTS)]
    if not rows:
        return None
    values = [row["medians"][name] for row in rows for name, _, _ in POINTS]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    names = labels(rows)
    left = _margin(names)
    picture = Picture()

    def x_of(milliseconds: float) -> float:
        return left + WIDTH * (math.log10(milliseconds) - low) / (high - low)

    bottom = 36 + ROW * len(rows)
    for exponent in range(low, high):
        for factor in (1, 2, 5):
            x = x_of(factor * 10.0**exponent)
            picture.line([(x, 30), (x, bottom)], GRID, 0.5)
            label = f"{factor * 10.0**exponent:g}"
            picture.text(x, bottom + 14, label, size=10, fill=FAINT)
    picture.text(left + WIDTH, bottom + 14, f"{10.0**high:g}", size=10, fill=FAINT)
    picture.text(left - 12, bottom + 14, "gap, ms", anchor="end", size=10, fill=FAINT)
    x = left
    for _, name, colour in POINTS:
        picture.rect(x, 6, 10, 10, colour)
        picture.text(x + 15, 15, name, anchor="start")
        x += 80
    for index, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = 36 + ROW * (index + 0.5)
        picture.text(left - 12, y + 4, name, anchor="end", size=12)
        xs = [x_of(row["medians"][point]) for point, _, _ in POINTS]
        picture.line([(xs[0], y), (xs[-1], y)], "#9a9a9a", 2)
        for x, (_, _, colour) in zip(xs, POINTS, strict=True):
            picture.rect(x - 5, y - 5, 10, 10, colour)
    return picture.svg(left + WIDTH + 40, bottom + 24, "Gaps between tokens of running requests")


def throughput(rows: Sequence[Row]) -> str | None:
    """Output tokens per second, one bar per row: the spread of the runs as a line, the physical
    floor, where it is known, as a mark."""
    rows = [row for row in rows if row["medians"].get("tokens_per_second")]
    if not rows:
        return None
    floors = [
        row["medians"]["tokens_per_second"] / row["percent_of_floor"] * 100
        if row.get("percent_of_floor")
        else 0.0
        for row in rows
    ]
    most = max([*floors, *(row["spread"]["tokens_per_second"][1] for row in rows)])
    names = labels(rows)
    left = _margin(names)
    picture = Picture()
    for index, (row, floor) in enumerate(zip(rows, floors, strict=True)):
        y = 30 + ROW * index
        median = row["medians"]["tokens_per_second"]
        picture.text(left - 12, y + 14, names[index], anchor="end", size=12)
        picture.rect(left, y + 3, WIDTH * median / most, ROW - 10, BAR)
        spread = [left + WIDTH * value / most for value in row["spread"]["tokens_per_second"]]
        picture.line([(x, y + 12) for x in spread], INK, 2)
        if floor:
            x = left + WIDTH * floor / most
            picture.line([(x, y), (x, y + ROW - 4)], FLOOR, 3)
        picture.text(left + WIDTH + 12, y + 16, f"{median:,.0f}", anchor="start", size=11)
    picture.rect(left, 6, 10, 10, BAR)
    picture.text(left + 15, 15, "output tokens/s, median (line: all runs)", anchor="start")
    picture.rect(left + 270, 6, 4, 12, FLOOR)
    picture.text(left + 280, 15, "physical floor", anchor="start")
    return picture.svg(left + WIDTH + 90, 34 + ROW * len(rows), "Throughput")


def tradeoff(rows: Sequence[Row]) -> str | None:
    """Throughput over the gap's p99, a point for each row."""
    needed = ("gap_ms.p99", "tokens_per_second")
    rows = [row for row in rows if all(row["medians"].get(name, 0) > 0 for name in needed)]
    if len(rows) < 2:
        return None
    spots = [(r["medians"][needed[0]], r["medians"][needed[1]]) for r in rows]
    low, high = (math.log10(end(x for x, _ in spots)) for end in (min, max))
    most = _round_up(1.05 * max(y for _, y in spots))
    left, top = 70.0, 30.0
    picture = Picture()

    def at(milliseconds: float, speed: float) -> tuple[float, float]:
        share = (math.log10(milliseconds) - low) / ((high - low) or 1.0)
        return left + 40 + (WIDTH - 80) * share, top + HEIGHT * (1 - speed / most)

    _levels(picture, left, top, most)
    for exponent in range(math.floor(low), math.ceil(high) + 1):
        for tick in (factor * 10.0**exponent for factor in (1, 2, 5)):
            if low <= math.log10(tick) <= high:
                x, bottom = at(tick, 0)
                picture.line([(x, top), (x, bottom)], GRID, 0.5)
                picture.text(x, bottom + 14, f"{tick:g}", size=10, fill=FAINT)
    text = "p99 of the gaps, ms, logarithmic (up: output tokens/s)"
    picture.text(left, top + HEIGHT + 32, text, anchor="start", size=11)
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    for row, spot, label in zip(rows, spots, labels(rows), strict=True):
        x, y = at(*spot)
        picture.rect(x - 4, y - 4, 8, 8, LINES[stages.index(row["stage"]) % len(LINES)])
        picture.text(x, y - 10, label.removeprefix(f"{row['stage']}, "), size=10)
    return picture.svg(left + WIDTH + 60, top + HEIGHT + 42, "Throughput against gaps")


def _round_up(value: float) -> float:
    """To a number of which a quarter is round, so that the axis can be read."""
    quarter = value / 4
    unit = 10.0 ** math.floor(math.log10(quarter))
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10)
    return 4 * unit * next(n for n in steps if quarter <= n * unit * (1 + 1e-9))


def _levels(picture: Picture, left: float, top: float, most: float) -> None:
    """Lines across, from nothing to the most, with their values."""
    for step in range(5):
        y = top + HEIGHT * (1 - step / 4)
        picture.line([(left, y), (left + WIDTH, y)], GRID, 0.5)
        picture.text(left - 8, y + 4, f"{most * step / 4:g}", anchor="end", size=10, fill=FAINT)


def goodput(rows: Sequence[Row]) -> str | None:
    """Requests per second within the SLO over those offered, a line per target; for each rate its
    newest row. The dashed line is what was offered. None if there are no two rates."""
    lines: dict[str, dict[float, float]] = {}
    for row in rows:
        reached = row["medians"].get("goodput.requests_per_second")
        if row.get("rate_rps") and reached is not None:
            lines.setdefault(row["label"], {})[row["rate_rps"]] = reached
    rates = sorted({rate for points in lines.values() for rate in points})
    if len(rates) < 2:
        return None
    low, high = math.log2(rates[0]), math.log2(rates[-1])
    span = high - low
    best = max(value for points in lines.values() for value in points.values())
    most = _round_up(best or 1.0)
    left, top = 60.0, 30.0
    picture = Picture()

    def at(rate: float, value: float) -> tuple[float, float]:
        x = left + WIDTH * (math.log2(rate) - low) / span
        return x, top + HEIGHT * (1 - value / most)

    for rate in rates:
        x, bottom = at(rate, 0)
        picture.line([(x, top), (x, bottom)], GRID, 0.5)
        picture.text(x, bottom + 14, f"{rate:g}", size=10, fill=FAINT)
    _levels(picture, left, top, most)
    text = "offered requests/s (up: requests/s within the SLO; dashed: as offered)"
    picture.text(left, top + HEIGHT + 32, text, anchor="start", size=11)
    end = math.log2(min(rates[-1], max(most, rates[0])))
    offered = [2 ** (low + (end - low) * part / 20) for part in range(21)]
    picture.line([at(rate, min(rate, most)) for rate in offered], FAINT, 1, dashed=True)
    x = left
    for index, (label, points) in enumerate(lines.items()):
        colour = LINES[index % len(LINES)]
        spots = [at(rate, points[rate]) for rate in sorted(points)]
        picture.line(spots, colour, 2)
        for spot_x, spot_y in spots:
            picture.rect(spot_x - 3, spot_y - 3, 6, 6, colour)
        picture.rect(x, 6, 10, 10, colour)
        picture.text(x + 15, 15, label, anchor="start")
        x += 35 + CHARACTER * len(label)
    return picture.svg(max(left + WIDTH, x) + 30, top + HEIGHT + 42, "Goodput by offered load")


def _margin(names: Sequence[str]) -> float:
    return max(LEFT, 24 + CHARACTER * max(map(len, names)))


KINDS: dict[str, Callable[[Sequence[Row]], str | None]] = {
    "throughput": throughput,
    "gaps": gaps,
    "tradeoff": tradeoff,
}


def write(rows: Sequence[Row], directory: Path) -> list[str]:
    """Writes KIND_WORKLOAD.svg for every workload, gaps where requests arrive by the clock; the
    names of what was written."""
    written = []
    for workload in dict.fromkeys(row["workload"]["name"] for row in rows):
        alike = [row for row in rows if row["workload"]["name"] == workload]
        for kind, draw in KINDS.items():
            if kind != "throughput" and not workload.startswith("decode_gap"):
                continue
            if (svg := draw(alike)) is not None:
                (directory / f"{kind}_{workload}.svg").write_text(svg)
                written.append(f"{kind}_{workload}.svg")
    return written
