"""Curves over the offered rate, made from result files and nothing else.

    python -m bench.online.plot out/saturation.json --output out/saturation.svg

Goodput, throughput, TTFT and TPOT, one line per target. Its numbers are the tables of
`bench.online.report`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.online.report import context, slo
from bench.online.row import OnlineResult, read_online
from shared.cli import run_main

# Title, y label, (name in `medians`, line style), logarithmic.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...], bool], ...] = (
    (
        "Goodput (dotted: as offered)",
        "requests/s within the SLO",
        (("goodput.requests_per_second", "-"),),
        False,
    ),
    (
        "Throughput while requests arrive",
        "output tokens/s",
        (("arriving_tokens_per_second", "-"),),
        False,
    ),
    (
        "TTFT from arrival (dashed: p99)",
        "ms, median",
        (("latencies.ttft_scheduled_ms.p50", "-"), ("latencies.ttft_scheduled_ms.p99", "--")),
        True,
    ),
    (
        "TPOT (dashed: p99)",
        "ms, median",
        (("latencies.tpot_ms.p50", "-"), ("latencies.tpot_ms.p99", "--")),
        True,
    ),
)
# Okabe and Ito's: told apart without red and green.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"


def curves(rows: Sequence[OnlineResult]) -> dict[str, list[OnlineResult]]:
    """Rows with a rate by label, each rate once (the newest) and in order. Raises ValueError if one
    label is of several targets, whose rates would make one curve."""
    found: dict[str, dict[float, OnlineResult]] = {}
    for row in rows:
        if row.rate_rps is not None and row.medians:
            found.setdefault(row.label, {})[row.rate_rps] = row
    for label, points in found.items():
        if len({row.target for row in points.values()}) > 1:
            raise ValueError(f"{label!r} is of several engines, or of one with several settings")
    return {label: [by[rate] for rate in sorted(by)] for label, by in found.items()}


def draw(rows: Sequence[OnlineResult]) -> Figure:
    """Raises ValueError for rows without rates, or that no figure should hold together."""
    lines = curves(rows)
    if not lines:
        raise ValueError("there are no rows at a rate: nothing to draw a curve of")
    contexts = {context(row) for points in lines.values() for row in points}
    if len(contexts) > 1:
        raise ValueError("these rows are of different work: " + " | ".join(sorted(contexts)))
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(2, 2).flat)
    for axis, (title, label, series, logarithmic) in zip(axes, PANELS, strict=True):
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("offered requests/s")
        axis.set_ylabel(label)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        if logarithmic:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
        for index, (name, points) in enumerate(lines.items()):
            for key, style in series:
                _line(axis, name if style == "-" else None, points, key, style, index)
    rates = sorted({_rate(row) for points in lines.values() for row in points})
    axes[0].plot(rates, rates, ":", color="grey", linewidth=1, zorder=0)
    # The diagonal would flatten every curve that has left it.
    axes[0].set_ylim(0, _top(lines))
    axes[1].set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    figure.suptitle(_caption(lines), fontsize="small", wrap=True)
    return figure


def _line(
    axis: Axes, label: str | None, rows: Sequence[OnlineResult], key: str, style: str, index: int
) -> None:
    rows = [row for row in rows if key in row.medians]
    axis.plot(
        [_rate(row) for row in rows],
        [row.medians[key] for row in rows],
        style,
        label=label,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=4,
    )


def _rate(row: OnlineResult) -> float:
    assert row.rate_rps is not None  # see `curves`
    return row.rate_rps


def _top(lines: dict[str, list[OnlineResult]]) -> float:
    rows = [row for points in lines.values() for row in points]
    best = max(row.medians.get("goodput.requests_per_second", 0.0) for row in rows)
    return 1.2 * best or 1.0


def _caption(lines: dict[str, list[OnlineResult]]) -> str:
    rows = [row for points in lines.values() for row in points]
    commits = sorted({(row.commit or "unknown")[:10] + "+" * bool(row.dirty) for row in rows})
    limits = sorted({limit for row in rows if (limit := slo(row)) is not None})
    parts = [context(rows[0]), *limits, f"commit {', '.join(commits)}"]
    return "; ".join(parts)


def write(rows: Sequence[OnlineResult], output: Path) -> None:
    # The same rows give the same bytes: no date, no random ids.
    with mpl.rc_context({"svg.hashsalt": "online", "svg.fonttype": "none"}):
        draw(rows).savefig(output, format="svg", metadata={"Date": None})


def rows_at_rates(file: Path) -> list[OnlineResult]:
    """Raises ValueError for a file that has none."""
    rows = [row for row in read_online(file) if row.rate_rps is not None]
    if not rows:
        raise ValueError(f"{file} has no rows at a rate, and only sweeps over rates are drawn")
    return rows


def main(files: Annotated[tuple[Path, ...], tyro.conf.Positional], output: Path) -> int:
    """Draw the curves of a rate sweep as SVG.

    Args:
        files: JSON files of `python -m bench.online`.
        output: the SVG file to write.
    """
    write([row for file in files for row in rows_at_rates(file)], output)
    return 0


if __name__ == "__main__":
    run_main(lambda: tyro.cli(main, prog="python -m bench.online.plot", args=sys.argv[1:]))
