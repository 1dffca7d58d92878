"""What an online measurement leaves behind: one row per load, in JSON, and rows accumulate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.online.ceiling import Ceiling
from bench.online.metrics import OnlineRun
from bench.result import PACKAGES, Floor, GpuUse, Hardware, read_rows, write_json

SCHEMA_VERSION = 1
# Of a target's settings, what it finds out when it starts: memory that is free, and what follows.
FOUND_AT_START = frozenset(
    {"num_kvcache_blocks", "tokens_in_pool", "max_model_length"}
    | {f"{part}_bytes" for part in ("weights", "activations", "graphs", "pool")}
)
CLIENT_PACKAGES = (*PACKAGES, "aiohttp")


class OnlineResult(msgspec.Struct, frozen=True):
    """One target under one load, some repeats."""

    label: str
    scenario: str | None
    rate_rps: float | None
    """Asked for; None where requests do not come at a rate."""
    sha256: str
    """Of the requests of repeat 0, whichever repeats were run: it identifies the work."""
    id_limit: int
    """Token ids are below this."""
    options: dict[str, Any]
    """All flags of the client, by group."""
    created: str
    """UTC, ISO 8601."""
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    """Of the client's machine."""
    target_is_local: bool
    """Whether that is the target's machine, too."""
    versions: dict[str, str]
    """Of the client's libraries."""
    model: str
    target_version: str | None
    stage: str | None
    """Of an engine of ours."""
    config: dict[str, Any]
    """Effective values, as an engine of ours describes itself; empty for others."""
    ceiling: Ceiling | None
    runs: list[OnlineRun]
    medians: dict[str, float]
    """Of every number of the runs, by name: `latencies.ttft_ms.p90`."""
    spread: dict[str, tuple[float, float]]
    """(smallest, largest) over the runs."""
    floor: Floor | None = None
    """Of repeat 0. None: the target's model has no known shape, or its device is elsewhere."""
    percent_of_floor: float | None = None
    gpu_use: list[GpuUse] = []
    error: str | None = None
    """Why there are no numbers, or fewer repeats than asked for. The row stays."""
    schema_version: int = SCHEMA_VERSION

    @property
    def target(self) -> bytes:
        """Equal for rows of one engine with the same settings, but for those that it may find out
        itself: what the label alone does not say, for anybody may choose it."""
        given = {name: self.config[name] for name in self.config.keys() - FOUND_AT_START}
        return msgspec.json.encode((self.stage, self.model, given), order="sorted")


def read_online(path: Path) -> list[OnlineResult]:
    """All rows of a file. Raises ValueError naming the file when it holds something else."""
    return read_rows(path, list[OnlineResult], SCHEMA_VERSION)


def append_online(path: Path, rows: Sequence[OnlineResult]) -> None:
    write_json(path, [*(read_online(path) if path.exists() else []), *rows])
