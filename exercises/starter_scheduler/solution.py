"""One answer: decodes first, then one prompt at a time, cut where the budget ends."""

from __future__ import annotations

from shared.config import EngineConfig
from shared.engine.batch import Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.sequence import Sequence


class Scheduler:
    def __init__(self, config: EngineConfig, queues: Queues, block_manager: BlockManager) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.queues = queues
        self.block_manager = block_manager

    def schedule(self) -> Schedule:
        schedule = Schedule()
        decodes, prompts = self.queues.by_phase()
        self._schedule_decodes(schedule, decodes)
        budget = self.max_num_batched_tokens - len(schedule.sequences)
        begun = [sequence for sequence in prompts if sequence.is_running]
        if begun:
            budget = self._continue(schedule, begun[0], budget)
        # One prompt at a time: two half-computed ones could hold all blocks between them.
        if not schedule.preempted and self._all_computed(schedule, begun):
            self._admit(schedule, budget)
        return schedule

    def _schedule_decodes(self, schedule: Schedule, decodes: list[Sequence]) -> None:
        queues, manager = self.queues, self.block_manager
        for sequence in decodes:
            # The newest goes, so that the oldest always advances. It may be this one.
            while sequence.is_running and not manager.can_allocate(sequence, 1):
                victim = queues.running[-1]
                queues.preempt(victim)
                schedule.preempted.append(victim)
            if sequence.is_running:
                manager.allocate(sequence, 1)
                schedule.add(sequence, 1)
        schedule.num_decode_rows = len(schedule.sequences)

    def _continue(self, schedule: Schedule, sequence: Sequence, budget: int) -> int:
        chunk = min(sequence.num_uncomputed_tokens, budget, self.block_manager.room(sequence))
        if chunk > 0:
            self.block_manager.allocate(sequence, chunk)
            schedule.add(sequence, chunk)
        return budget - chunk

    def _all_computed(self, schedule: Schedule, begun: list[Sequence]) -> bool:
        """Does this step reach the last known token of the prompt that had begun?"""
        chunks = dict(zip(schedule.sequences, schedule.num_new_tokens, strict=True))
        return all(s.num_uncomputed_tokens == chunks.get(s, 0) for s in begun)

    def _admit(self, schedule: Schedule, budget: int) -> None:
        queues, manager = self.queues, self.block_manager
        while queues.waiting and queues.table.num_free and budget:
            sequence = queues.waiting[0]
            prefix = manager.find_prefix(sequence)
            if manager.will_hit(sequence, prefix, schedule.sequences):
                break
            if not manager.can_admit(prefix, sequence.num_tokens):
                break
            queues.admit(prefix)
            chunk = min(sequence.num_uncomputed_tokens, budget)
            manager.allocate(sequence, chunk)
            schedule.add(sequence, chunk)
            budget -= chunk
            if chunk < sequence.num_uncomputed_tokens:
                break
