"""Pictures of results, drawn from the same rows as the tables beside them."""

from __future__ import annotations

from bench import plots
from tools.docsite import results


def of_workload(kind: str, workload: str) -> list[tuple[str, str]]:
    """(caption, SVG) for every context in which at least two stages were measured."""
    draw = plots.KINDS[kind]
    found = []
    for context, newest in results.newest_rows([workload]):
        rows = [newest[stage][0] for stage in sorted(newest)]
        if len(newest) > 1 and (svg := draw(rows)) is not None:
            caption = f"{'; '.join(context[:3])}. From `bench/results/{newest[min(newest)][1]}`."
            found.append((caption, svg))
    return found


def of_goodput() -> list[tuple[str, str]]:
    """(caption, SVG) for every file of an online rate sweep, and each kind of load in it."""
    found = []
    for name in results.files():
        for context, rows in results.online_rows(name):
            if (svg := plots.goodput(rows)) is not None:
                caption = f"{'; '.join(context)}. From `bench/results/{name}`."
                found.append((caption, svg))
    return found
