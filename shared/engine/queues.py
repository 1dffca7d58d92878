"""Where sequences are: waiting in arrival order, or running with a slot and blocks.

The moves between the two are the same in every stage; when to make them is each stage's policy.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from shared.engine.block_manager import BlockManager
from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable, slots_of


class Queues:
    def __init__(self, table: SlotTable, block_manager: BlockManager) -> None:
        self.table = table
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        # In order of admission. Replaced, never changed: whoever holds the list may keep it.
        self.running: list[Sequence] = []
        self._running_slots: tuple[list[Sequence], np.ndarray] = ([], np.empty(0, np.intp))
        # Counted since the engine started; what a preempted sequence looks up counts again.
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._unfinished: dict[str, dict[int, Sequence]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def by_phase(self) -> tuple[list[Sequence], list[Sequence]]:
        """(decodes, prompts) of the running sequences, each in order of admission. A preempted
        sequence that is computed again is a prompt until it has caught up. Without those that need
        no further step, and only wait for the result of one in flight."""
        table, slots = self.table, self.slots_of(self.running)
        decoding, known = table.decoding[slots], table.num_tokens[slots]
        last = np.where(decoding, table.finish_length[slots] - 1, known)
        due = table.num_computed_tokens[slots] < last
        if decoding.all() and due.all():
            return self.running, []
        decodes, prompts = decoding & due, ~decoding & due
        return (
            [self.running[row] for row in np.flatnonzero(decodes).tolist()],
            [self.running[row] for row in np.flatnonzero(prompts).tolist()],
        )

    def slots_of(self, sequences: list[Sequence]) -> np.ndarray:
        """[len(sequences)]. Those of `running` are looked up once for as long as nobody comes or
        goes: most steps decode the sequences of the step before."""
        if sequences is not self.running:
            return slots_of(sequences)
        if self._running_slots[0] is not sequences:
            self._running_slots = sequences, slots_of(sequences)
        return self._running_slots[1]

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of one request behind all others."""
        self.waiting.extend(sequences)
        self._unfinished[sequences[0].request_id] = {s.index: s for s in sequences}

    def admit(self, prefix: list[int]) -> Sequence:
        """The first waiting sequence starts to run, with `prefix` (from find_prefix) computed."""
        sequence = self.waiting[0]
        self.table.acquire(sequence)
        self.waiting.popleft()
        self.block_manager.hold_prefix(sequence, prefix)
        self.num_queried_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_computed_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self.running = [*self.running, sequence]
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the waiting queue; what was computed is computed again (vLLM's
        "recompute" preemption). Generated tokens stay: the recomputation is a longer prompt."""
        self.num_preemptions += 1
        self.running = [s for s in self.running if s is not sequence]
        self._let_go(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequences: list[Sequence]) -> None:
        """Running sequences leave for good."""
        gone = set(map(id, sequences))
        self.running = [s for s in self.running if id(s) not in gone]
        for sequence in sequences:
            self._let_go(sequence)
            self._forget(sequence)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one of its completions. Unknown ones are no error: it may just have
        finished."""
        sequences = self._unfinished.get(request_id, {})
        chosen = [s for s in sequences.values() if index is None or s.index == index]
        for sequence in chosen:
            if sequence.is_running:
                self.finish([sequence])
            else:
                self.waiting.remove(sequence)
                self._forget(sequence)

    def clear(self) -> None:
        """Drop everything."""
        for request_id in list(self._unfinished):
            self.abort(request_id)

    def _let_go(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        self.table.release(sequence)

    def _forget(self, sequence: Sequence) -> None:
        siblings = self._unfinished[sequence.request_id]
        del siblings[sequence.index]
        if not siblings:
            del self._unfinished[sequence.request_id]
