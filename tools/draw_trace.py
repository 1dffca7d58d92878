"""Draw a step trace (`--trace FILE`) as an SVG timeline: a row per sequence, a column per step.

    python -m tools.draw_trace out/00.trace.jsonl docs/images/00_timeline.svg
    python -m tools.draw_trace out/00.trace.jsonl docs/images/00_timeline_ms.svg --scale time

Under the rows stands how long each step took. With `--scale time` a column is as wide as its step
was long, which is what somebody who waits for tokens sees. Needs nothing but the project itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from bench.svg import FAINT, PAPER, Picture
from shared.cli import run_main
from shared.engine.trace import StepRecord, read_trace

Scale = Literal["steps", "time"]
State = Literal["prefill", "decode", "idle", "waiting", "preempted"]

# Told apart by lightness too, for readers who do not see the hues.
COLOURS: dict[State, str] = {
    "prefill": "#1f5fa8",
    "decode": "#7cc576",
    "idle": "#f3b24c",
    "waiting": "#dcdcdc",
    "preempted": "#c0392b",
}
MEANINGS: dict[State, str] = {
    "prefill": "prefill (number: tokens)",
    "decode": "decode, one token",
    "idle": "running, but no token in this step",
    "waiting": "waiting",
    "preempted": "preempted",
}

CELL, ROW, GAP = 18.0, 24.0, 4.0
LEFT, TOP, BARS = 76.0, 56.0, 70.0
TICKS = 5  # a number under every fifth column
PLOT_WIDTH = 820.0  # of a time-scaled picture
NARROWEST_LABEL = 17.0


@dataclass(frozen=True)
class Column:
    """One step on the picture."""

    record: StepRecord
    x: float
    width: float

    @property
    def milliseconds(self) -> float:
        return duration(self.record)


def duration(record: StepRecord) -> float:
    """Milliseconds from scheduling to the sampled ids."""
    return record.schedule_ms + record.forward_ms + record.wait_ms


def sequences(records: list[StepRecord]) -> list[str]:
    """Every sequence of the trace, in order of its first appearance."""
    seen: dict[str, None] = {}
    for record in records:
        seen.update(dict.fromkeys(record.decodes))
        seen.update(dict.fromkeys(name for name, _, _ in record.prefills))
        seen.update(dict.fromkeys([*record.preemptions, *record.running, *record.waiting]))
    return list(seen)


def state_of(name: str, record: StepRecord) -> tuple[State, str] | None:
    """What a sequence did in a step, and the label of its cell; None: it is not there."""
    lengths = [length for prefilled, _, length in record.prefills if prefilled == name]
    if lengths:
        return "prefill", str(sum(lengths))
    if name in record.decodes:
        return "decode", ""
    if name in record.preemptions:
        return "preempted", ""
    if name in record.running:
        return "idle", ""
    if name in record.waiting:
        return "waiting", ""
    return None


def columns(records: list[StepRecord], scale: Scale) -> list[Column]:
    total = sum(map(duration, records))
    x, placed = LEFT, []
    for record in records:
        width = CELL if scale == "steps" else PLOT_WIDTH * duration(record) / total
        placed.append(Column(record, x, width))
        x += width
    return placed


def draw(records: list[StepRecord], scale: Scale, title: str) -> str:
    """The timeline as SVG. Raises ValueError if there are no steps."""
    if not records:
        raise ValueError("the trace holds no steps")
    placed, rows = columns(records, scale), sequences(records)
    right = placed[-1].x + placed[-1].width
    width = max(right + 20, 660)
    bottom = TOP + len(rows) * ROW
    height = bottom + BARS + 40
    picture = Picture()
    _legend(picture)
    for row, name in enumerate(rows):
        y = TOP + row * ROW
        picture.text(LEFT - 8, y + ROW / 2 + 4, name, anchor="end", size=12)
        for column in placed:
            if (found := state_of(name, column.record)) is not None:
                _cell(picture, column, y, *found)
    _bars(picture, placed, bottom, scale)
    return picture.svg(width, height, title)


def _cell(picture: Picture, column: Column, y: float, state: State, label: str) -> None:
    gap = 1.0 if column.width > 3 else 0.0
    height = ROW - GAP
    picture.rect(column.x, y + GAP / 2, column.width - gap, height, COLOURS[state])
    if label and column.width >= NARROWEST_LABEL:
        size = 9 if len(label) * 5.4 <= column.width else 7.5
        middle = column.x + (column.width - gap) / 2
        picture.text(middle, y + ROW / 2 + 3, label, size=size, fill=PAPER)


def _bars(picture: Picture, placed: list[Column], top: float, scale: Scale) -> None:
    """How long each step took, and the axis below."""
    longest = max(column.milliseconds for column in placed)
    tallest = BARS - 30
    base = top + 16 + BARS - 24
    picture.text(
        LEFT - 8, base - tallest + 8, f"{longest:.0f} ms", anchor="end", size=10, fill=FAINT
    )
    picture.text(LEFT - 8, base, "0 ms", anchor="end", size=10, fill=FAINT)
    for column in placed:
        height = tallest * column.milliseconds / longest
        gap = 1.0 if column.width > 3 else 0.0
        picture.rect(column.x, base - height, column.width - gap, max(height, 0.5), FAINT)
    if scale == "steps":
        for column in placed[::TICKS]:
            middle = column.x + column.width / 2
            picture.text(middle, base + 14, str(column.record.step), size=10, fill=FAINT)
        picture.text(LEFT, base + 30, "step", anchor="start", size=11, fill=FAINT)
        return
    total = sum(column.milliseconds for column in placed)
    interval = next(ms for ms in (10, 20, 50, 100, 200, 500, 1000, 10**9) if total / ms <= 12)
    for tick in range(0, int(total) + 1, interval):
        x = LEFT + PLOT_WIDTH * tick / total
        picture.text(x, base + 14, str(tick), size=10, fill=FAINT)
    picture.text(LEFT, base + 30, "time in steps, ms", anchor="start", size=11, fill=FAINT)


def _legend(picture: Picture) -> None:
    x, y = LEFT, 14.0
    for index, (state, meaning) in enumerate(MEANINGS.items()):
        if index == 3:
            x, y = LEFT, y + 18
        picture.rect(x, y - 10, 12, 12, COLOURS[state])
        picture.text(x + 17, y, meaning, anchor="start", size=11)
        x += 40 + 6 * len(meaning)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draw_trace", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--scale", choices=["steps", "time"], default="steps")
    parser.add_argument("--first", type=int, default=0, metavar="STEP")
    parser.add_argument("--last", type=int, default=None, metavar="STEP")
    parser.add_argument("--title", default=None)
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
    except msgspec.DecodeError as error:
        raise ValueError(f"{options.trace} is no step trace: {error}") from error
    records = [
        record
        for record in trace
        if record.step >= options.first and (options.last is None or record.step <= options.last)
    ]
    title = options.title or f"Timeline of {options.trace.name}"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(draw(records, options.scale, title))
    print(f"{options.output}: {len(records)} steps, {len(sequences(records))} sequences")
    return 0


if __name__ == "__main__":
    run_main(main)
