"""Pictures of results, drawn from the same rows as the tables beside them."""

from __future__ import annotations

import math

from tools.docsite import results
from tools.docsite.results import Row
from bench.svg import FAINT, INK, Picture

POINTS = (
    ("gap_ms.p50", "p50", "#5aa457"),
    ("gap_ms.p95", "p95", "#3b78bd"),
    ("gap_ms.p99", "p99", "#c8641b"),
    ("gap_ms.max", "largest", "#8a3b8f"),
)
BAR, FLOOR = "#3b78bd", "#c8641b"
LEFT, WIDTH, ROW = 160.0, 560.0, 28.0


def gaps(rows: list[Row]) -> str:
    """Gaps between tokens, one line per stage, milliseconds on a logarithmic axis."""
    values = [row["medians"][name] for row in rows for name, _, _ in POINTS]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    picture = Picture()

    def x_of(milliseconds: float) -> float:
        return LEFT + WIDTH * (math.log10(milliseconds) - low) / (high - low)

    bottom = 36 + ROW * len(rows)
    for exponent in range(low, high):
        for factor in (1, 2, 5):
            x = x_of(factor * 10.0**exponent)
            picture.line([(x, 30), (x, bottom)], "#b9b9b9", 0.5)
            label = f"{factor * 10.0**exponent:g}"
            picture.text(x, bottom + 14, label, size=10, fill=FAINT)
    picture.text(LEFT + WIDTH, bottom + 14, f"{10.0**high:g}", size=10, fill=FAINT)
    picture.text(LEFT - 12, bottom + 14, "gap, ms", anchor="end", size=10, fill=FAINT)
    x = LEFT
    for _, name, colour in POINTS:
        picture.rect(x, 6, 10, 10, colour)
        picture.text(x + 15, 15, name, anchor="start")
        x += 80
    for index, row in enumerate(rows):
        y = 36 + ROW * (index + 0.5)
        picture.text(LEFT - 12, y + 4, row["stage"], anchor="end", size=12)
        xs = [x_of(row["medians"][name]) for name, _, _ in POINTS]
        picture.line([(xs[0], y), (xs[-1], y)], "#9a9a9a", 2)
        for x, (_, _, colour) in zip(xs, POINTS, strict=True):
            picture.rect(x - 5, y - 5, 10, 10, colour)
    return picture.svg(LEFT + WIDTH + 40, bottom + 24, "Gaps between tokens of running requests")


def throughput(rows: list[Row]) -> str:
    """Output tokens per second, one bar per stage: the spread of the runs as a line, the physical
    floor, where it is known, as a mark."""
    floors = [
        row["medians"]["tokens_per_second"] / row["percent_of_floor"] * 100
        if row.get("percent_of_floor")
        else 0.0
        for row in rows
    ]
    most = max([*floors, *(row["spread"]["tokens_per_second"][1] for row in rows)])
    picture = Picture()
    for index, (row, floor) in enumerate(zip(rows, floors, strict=True)):
        y = 30 + ROW * index
        median = row["medians"]["tokens_per_second"]
        picture.text(LEFT - 12, y + 14, row["stage"], anchor="end", size=12)
        picture.rect(LEFT, y + 3, WIDTH * median / most, ROW - 10, BAR)
        spread = [LEFT + WIDTH * value / most for value in row["spread"]["tokens_per_second"]]
        picture.line([(x, y + 12) for x in spread], INK, 2)
        if floor:
            x = LEFT + WIDTH * floor / most
            picture.line([(x, y), (x, y + ROW - 4)], FLOOR, 3)
        picture.text(LEFT + WIDTH + 12, y + 16, f"{median:,.0f}", anchor="start", size=11)
    picture.rect(LEFT, 6, 10, 10, BAR)
    picture.text(LEFT + 15, 15, "output tokens/s, median (line: all runs)", anchor="start")
    picture.rect(LEFT + 270, 6, 4, 12, FLOOR)
    picture.text(LEFT + 280, 15, "physical floor", anchor="start")
    return picture.svg(LEFT + WIDTH + 90, 34 + ROW * len(rows), "Throughput of the stages")


def of_workload(kind: str, workload: str) -> list[tuple[str, str]]:
    """(caption, SVG) for every context in which at least two stages were measured."""
    draw = {"gaps": gaps, "throughput": throughput}[kind]
    found = []
    for context, newest in results.newest_rows([workload]):
        if len(newest) > 1:
            rows = [newest[stage][0] for stage in sorted(newest)]
            caption = f"{'; '.join(context[:3])}. From `bench/results/{newest[min(newest)][1]}`."
            found.append((caption, draw(rows)))
    return found
