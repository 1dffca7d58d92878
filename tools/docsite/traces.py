"""Numbers from the recorded step traces, read as plain JSON (shared/engine/trace.py)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tools.docsite import ROOT

TRACES = ROOT / "docs" / "trace_viewer" / "traces"


@cache
def read(name: str) -> list[dict[str, Any]]:
    """Raises ValueError for a trace that is not there."""
    path = TRACES / f"{name}.jsonl"
    if not path.exists():
        raise ValueError(f"no recorded trace {name!r}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def milliseconds(record: dict[str, Any]) -> float:
    """From scheduling to the sampled ids."""
    return float(record["schedule_ms"] + record["forward_ms"] + record["wait_ms"])


def longest_wait(records: list[dict[str, Any]]) -> float:
    """The longest time between two tokens of one request, in milliseconds of steps."""
    last: dict[str, float] = {}
    longest = clock = 0.0
    for record in records:
        clock += milliseconds(record)
        for name in record["decodes"]:
            longest = max(longest, clock - last.get(name, clock))
            last[name] = clock
        for name, _, _ in record["prefills"]:
            last[name] = clock  # of the chunks, the last one stays: it gives the first token
    return longest
