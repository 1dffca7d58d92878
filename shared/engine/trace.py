"""What every step did, one JSON object per line: the source of timelines, pictures and tests."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec

from shared.engine.batch import Batch, Schedule
from shared.engine.block_manager import BlockEvent, BlockManager
from shared.engine.queues import Queues

logger = logging.getLogger(__name__)

TRACE_VERSION = 1


class StepRecord(msgspec.Struct, kw_only=True):
    """One step. Sequences are named by request id, completions after the first by `id#index`."""

    version: int = TRACE_VERSION
    step: int
    time: float
    """Seconds since the trace began, at the start of the step."""
    decodes: list[str]
    prefills: list[tuple[str, int, int]]
    """(sequence, first token, number of tokens)."""
    preemptions: list[str]
    prefix_hits: list[tuple[str, int]]
    """(sequence, tokens found in the cache), for sequences admitted in this step."""
    running: list[str]
    waiting: list[str]
    """Both after the step."""
    block_events: list[BlockEvent]
    free_blocks: int
    schedule_ms: float
    forward_ms: float
    """Building the batch and submitting it; on cpu the forward pass itself."""
    wait_ms: float
    """Waiting for the sampled ids."""
    graph: bool


class StepClock:
    """Host times of one step, taken at its boundaries."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.laps: list[float] = []

    def lap(self) -> None:
        self.laps.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        times = [self.started, *self.laps]
        return [round((b - a) * 1e3, 4) for a, b in pairwise(times)]


class TraceWriter:
    """Appends StepRecords to a file."""

    def __init__(self, path: str) -> None:
        """Raises ValueError naming the option if the file cannot be written."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb")  # noqa: SIM115 (close() closes it)
        except (OSError, ValueError) as error:
            raise ValueError(f"trace={path!r} cannot be written: {error}") from error
        self._encoder = msgspec.json.Encoder()
        self._start = time.perf_counter()
        self._step = 0

    def write(
        self,
        schedule: Schedule,
        batch: Batch,
        clock: StepClock,
        used_graph: bool,
        queues: Queues,
        manager: BlockManager,
    ) -> None:
        """Call after the commit, so that blocks freed by finished sequences belong to this step.
        A file that can no longer be written ends the trace, not the step."""
        rows = zip(schedule.sequences, batch.decoding.tolist(), batch.starts.tolist(), strict=True)
        decodes: list[str] = []
        prefills: list[tuple[str, int, int]] = []
        for (sequence, is_decode, start), length in zip(rows, schedule.num_new_tokens, strict=True):
            if is_decode:
                decodes.append(sequence.name)
            else:
                prefills.append((sequence.name, start, length))
        events, manager.events = manager.events or [], []
        hits = Counter(name for _, event, name in events if event == "hit")
        schedule_ms, forward_ms, wait_ms = clock.milliseconds()
        record = StepRecord(
            step=self._step,
            time=round(clock.started - self._start, 6),
            decodes=decodes,
            prefills=prefills,
            preemptions=[s.name for s in schedule.preempted],
            prefix_hits=[(name, blocks * manager.block_size) for name, blocks in hits.items()],
            running=[s.name for s in queues.running],
            waiting=[s.name for s in queues.waiting],
            block_events=events,
            free_blocks=manager.num_free_blocks,
            schedule_ms=schedule_ms,
            forward_ms=forward_ms,
            wait_ms=wait_ms,
            graph=used_graph,
        )
        self._step += 1
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            logger.warning("the trace ends at step %d: %s", self._step, error)
            self._file = open(os.devnull, "wb")  # noqa: SIM115

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is lost was warned of
            self._file.close()


def read_trace(path: str | Path) -> list[StepRecord]:
    """Raises msgspec.ValidationError for a line that is not a step of this version."""
    decoder = msgspec.json.Decoder(StepRecord)
    return [decoder.decode(line) for line in Path(path).read_bytes().splitlines()]
