"""Draw the recorded traces of all stages below each other, on one time axis, for the docs.

python -m tools.draw_timelines             # the timelines in docs/images
python -m tools.draw_timelines --check     # exit status 1 if a picture is out of date
python -m tools.draw_timelines --record    # run the scenarios of every stage first

A step is a bar as wide as it was long and as high as its tokens (square root, so that one decode
stays visible beside a prompt). The line is the share of the pool in use, the strip below says
whether the step replayed a CUDA graph.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

from bench.svg import FAINT, Picture
from shared.engine.trace import StepRecord, read_trace
from steps import load, names
from tools import draw_trace
from tools.docsite import changes, traces
from tools.draw_trace import duration

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
SCENARIO = "long_prompt"
# Prompt tokens a step in each recorded scenario, for the stages that have the option.
PREFILL_TOKENS = {"long_prompt": 128, "prefixes": 64}

DECODE, PREFILL, KV, GRAPH, EAGER = "#5aa457", "#3b78bd", "#c8641b", "#c8641b", "#b9b9b9"
LEFT, WIDTH, HEIGHT, GAP = 20.0, 860.0, 74.0, 62.0
TOP = 50.0


def num_prefilled(record: StepRecord) -> int:
    return sum(length for _, _, length in record.prefills)


def pool_size(records: list[StepRecord]) -> int:
    """Blocks in the pool: all are free once everything has finished."""
    return max(record.free_blocks for record in records)


def draw(panels: dict[str, list[StepRecord]], title: str) -> str:
    """Panels on one time axis. Raises ValueError if there are no steps."""
    if not panels or not all(panels.values()):
        raise ValueError("a trace holds no steps")
    longest = max(sum(map(duration, records)) for records in panels.values())
    most = max(len(r.decodes) + num_prefilled(r) for records in panels.values() for r in records)
    picture = Picture()
    _legend(picture)
    for index, (stage, records) in enumerate(panels.items()):
        _panel(picture, TOP + index * (HEIGHT + GAP), stage, records, WIDTH / longest, most)
    bottom = TOP + len(panels) * (HEIGHT + GAP) - GAP + 24
    interval = next(ms for ms in (10, 20, 50, 100, 200, 500, 1000, 10**9) if longest / ms <= 12)
    for tick in range(0, int(longest) + 1, interval):
        picture.text(LEFT + tick * WIDTH / longest, bottom + 12, str(tick), size=10, fill=FAINT)
    picture.text(LEFT, bottom + 28, "time in steps, ms", anchor="start", size=11, fill=FAINT)
    return picture.svg(LEFT + WIDTH + 60, bottom + 38, title)


def _panel(
    picture: Picture,
    top: float,
    stage: str,
    records: list[StepRecord],
    scale: float,
    most: int,
) -> None:
    total = sum(map(duration, records))
    gaps = traces.longest_wait([msgspec.to_builtins(record) for record in records])
    note = (
        f"{len(records)} steps, {total:,.0f} ms; longest wait of a decoding request {gaps:,.0f} ms"
    )
    picture.text(LEFT, top - 4, stage, anchor="start", size=12.5, bold=True)
    picture.text(LEFT + 150, top - 4, note, anchor="start", size=11, fill=FAINT)
    base, x, pool = top + HEIGHT + 4, LEFT, pool_size(records)
    line: list[tuple[float, float]] = []
    for record in records:
        width = scale * duration(record)
        gap = 1.0 if width > 4 else 0.0
        tokens = len(record.decodes) + num_prefilled(record)
        height = HEIGHT * (tokens / most) ** 0.5
        decodes = height * len(record.decodes) / max(tokens, 1)
        picture.rect(x, base - decodes, width - gap, decodes, DECODE)
        picture.rect(x, base - height, width - gap, height - decodes, PREFILL)
        picture.rect(x, base + 3, width - gap, 6, GRAPH if record.graph else EAGER)
        y = base - HEIGHT * (1 - record.free_blocks / pool)
        line += [(x, y), (x + width, y)]
        x += width
    picture.line(line, KV)


def _legend(picture: Picture) -> None:
    x = LEFT
    for colour, text in (
        (DECODE, "decode tokens"),
        (PREFILL, "prompt tokens"),
        (KV, "line: share of the pool in use"),
        (EAGER, "strip: eager step"),
        (GRAPH, "strip: CUDA graph"),
    ):
        picture.rect(x, 8, 12, 12, colour)
        picture.text(x + 17, 18, text, anchor="start", size=11)
        x += 42 + 6 * len(text)


def recorded(scenario: str) -> dict[str, list[StepRecord]]:
    """Stage -> steps, for every stage with a recorded trace."""
    found = sorted(traces.TRACES.glob(f"*__{scenario}.jsonl"))
    return {path.stem.split("__")[0]: read_trace(path) for path in found}


def record_all() -> None:
    """One process for each: what a run leaves behind must not slow the next one down."""
    for stage in names():
        if not (ROOT / "steps" / stage / "scheduler.py").exists():
            continue  # it serves the engine of another stage
        config = load(stage).Config
        for scenario, tokens in PREFILL_TOKENS.items():
            output = traces.TRACES / f"{stage}__{scenario}.jsonl"
            command = [sys.executable, "-m", "tools.record_trace", stage, scenario, str(output)]
            if "max_prefill_tokens_per_step" in config.model_fields:
                command += ["--set", f"max_prefill_tokens_per_step={tokens}"]
            subprocess.run(command, check=True, cwd=ROOT)


def pictures() -> dict[str, str]:
    """File name -> content."""
    found = recorded(SCENARIO)
    made = {"timeline_stages.svg": draw(found, "The same arrivals in every stage")}
    stages = list(found)
    for stage in stages:
        if (before := changes.before(stage)) is None:
            continue
        pair = {before: found[before], stage: found[stage]}
        made[f"timeline_{stage}.svg"] = draw(pair, f"The same arrivals in {before} and {stage}")
    for stage, records in found.items():
        title = f"{stage}: what every sequence did, by time"
        made[f"{stage[:2]}_timeline_ms.svg"] = draw_trace.draw(records, "time", title)
    first = stages[0]
    title = f"{first}: what every sequence did, by step"
    made[f"{first[:2]}_timeline.svg"] = draw_trace.draw(found[first], "steps", title)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draw_timelines", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--record", action="store_true", help="run the scenarios first")
    options = parser.parse_args()
    if options.record:
        record_all()
    for name, content in pictures().items():
        path = IMAGES / name
        if options.check and (not path.exists() or path.read_text() != content):
            sys.exit(f"{path} is out of date: run python -m tools.draw_timelines")
        if not options.check:
            path.write_text(content)


if __name__ == "__main__":
    main()
