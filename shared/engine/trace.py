"""What every step did, one JSON object per line: the source of timelines, pictures and tests."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from shared.engine.batch import Batch, Schedule
from shared.engine.block_manager import BlockEvent, BlockManager
from shared.engine.queues import Queues
from shared.engine.stats import StepCounters
from shared.outputs import StepOutput

logger = logging.getLogger(__name__)

TRACE_VERSION = 1

# Steps a listener may be behind; older records are dropped.
MAX_UNREAD = 256


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
    """Host times of one step: when it began, and the seconds of its parts."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()
        self.laps: list[float] = []

    def lap(self) -> None:
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now

    def resume(self) -> None:
        """What has passed since the last lap is part of none."""
        self._last = time.perf_counter()

    def milliseconds(self) -> list[float]:
        return [round(seconds * 1e3, 4) for seconds in self.laps]


class StepRecorder:
    """Counts every step, and describes it while a trace file or a listener wants to know."""

    def __init__(self, path: str | None) -> None:
        """`path`: the trace file. Raises ValueError naming the option if it cannot be written."""
        self.counters = StepCounters()
        self._file = None if path is None else _open(path)
        self._unread: deque[StepRecord] | None = None
        self._encoder = msgspec.json.Encoder()
        self._start = time.perf_counter()
        self._step = 0

    @property
    def is_recording(self) -> bool:
        return self._file is not None or self._unread is not None

    def listen(self, on: bool) -> None:
        """Keep records for `take`: the newest MAX_UNREAD at most."""
        if on != (self._unread is not None):
            self._unread = deque(maxlen=MAX_UNREAD) if on else None

    def take(self) -> list[StepRecord]:
        """What has been recorded since the last look, for the listener."""
        if not self._unread:
            return []
        records = list(self._unread)
        self._unread.clear()
        return records

    def step(
        self,
        schedule: Schedule,
        batch: Batch,
        outputs: list[StepOutput],
        clock: StepClock,
        used_graph: bool,
        queues: Queues,
        manager: BlockManager,
    ) -> None:
        """Call after the commit, so that blocks freed by finished sequences belong to this step."""
        # Most outputs have one token; that of a prompt with nothing to generate has none.
        num_generated = len(outputs) - [output.new_token_ids for output in outputs].count([])
        self._count(batch, num_generated, clock, used_graph)
        if not self.is_recording:
            manager.events = None
        else:
            record = self._record(schedule, batch, clock, used_graph, queues, manager)
            if self._file is not None:
                self._write(self._file, record)
            if self._unread is not None:
                self._unread.append(record)
        self._step += 1

    def failed_step(self) -> None:
        self.counters.failed_steps += 1

    def _count(self, batch: Batch, num_generated: int, clock: StepClock, used_graph: bool) -> None:
        counters, num_decodes = self.counters, int(np.count_nonzero(batch.decoding))
        if num_decodes == batch.num_rows:
            counters.decode_steps += 1
        elif num_decodes:
            counters.mixed_steps += 1
        else:
            counters.prefill_steps += 1
        if used_graph:
            counters.graph_steps += 1
        else:
            counters.eager_steps += 1
        counters.prefill_tokens += batch.num_tokens - num_decodes
        counters.generation_tokens += num_generated
        schedule_seconds, forward_seconds, wait_seconds = clock.laps
        counters.schedule_seconds += schedule_seconds
        counters.forward_seconds += forward_seconds
        counters.wait_seconds += wait_seconds

    def _record(
        self,
        schedule: Schedule,
        batch: Batch,
        clock: StepClock,
        used_graph: bool,
        queues: Queues,
        manager: BlockManager,
    ) -> StepRecord:
        rows = zip(schedule.sequences, batch.decoding.tolist(), batch.starts.tolist(), strict=True)
        decodes: list[str] = []
        prefills: list[tuple[str, int, int]] = []
        for (sequence, is_decode, start), length in zip(rows, schedule.num_new_tokens, strict=True):
            if is_decode:
                decodes.append(sequence.name)
            else:
                prefills.append((sequence.name, start, length))
        hits: Counter[str] = Counter()
        if manager.events is None:  # somebody has just begun to listen: tell what is held already
            events: list[BlockEvent] = [
                (block, "hit", s.name)
                for s in queues.running
                for block in manager.table.blocks_of(s.slot)
            ]
        else:
            events = manager.events
            hits.update(name for _, event, name in events if event == "hit")
        manager.events = []
        schedule_ms, forward_ms, wait_ms = clock.milliseconds()
        return StepRecord(
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

    def _write(self, file: BinaryIO, record: StepRecord) -> None:
        """A file that can no longer be written ends the trace, not the step."""
        try:
            file.write(self._encoder.encode(record) + b"\n")
            file.flush()
        except OSError as error:
            logger.warning("the trace ends at step %d: %s", self._step, error)
            self.close()

    def close(self) -> None:
        """Close the trace file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what is lost was warned of
                file.close()


def _open(path: str) -> BinaryIO:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "wb")
    except (OSError, ValueError) as error:
        raise ValueError(f"trace={path!r} cannot be written: {error}") from error


def read_trace(path: str | Path) -> list[StepRecord]:
    """Raises msgspec.ValidationError for a line that is not a step of this version."""
    decoder = msgspec.json.Decoder(StepRecord)
    return [decoder.decode(line) for line in Path(path).read_bytes().splitlines()]
