"""Prefill first: as long as a waiting prompt fits, a step is all prefill; otherwise all decode."""

from __future__ import annotations

from shared.config import EngineConfig
from shared.engine.batch import Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues


class Scheduler:
    def __init__(self, config: EngineConfig, queues: Queues, block_manager: BlockManager) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.queues = queues
        self.block_manager = block_manager

    def schedule(self) -> Schedule:
        """The next step. Empty only when nothing is unfinished."""
        schedule = self._schedule_prefills()
        return schedule if schedule.sequences else self._schedule_decodes()

    def _schedule_prefills(self) -> Schedule:
        """Whole prompts, first come first served, until the budget, the slots or the blocks end.

        New prompts make every running decode wait. That is the price of this policy; the
        decode_gap benchmark puts a number on it.
        """
        schedule, queues, manager = Schedule(), self.queues, self.block_manager
        budget = self.max_num_batched_tokens
        if queues.running and (rest := queues.running[-1].num_uncomputed_tokens) > 1:
            # A recomputation that did not fit into the step before.
            schedule.add(queues.running[-1], min(rest, budget))
            return schedule
        while queues.waiting and queues.table.num_free and budget:
            sequence = queues.waiting[0]
            prefix = manager.find_prefix(sequence)
            if manager.will_hit(sequence, prefix, schedule.sequences):
                break
            num_new = sequence.num_tokens - len(prefix) * manager.block_size
            # Alone in its step, a preempted sequence may exceed the budget, because it has
            # generated tokens since it was let in. It is cut: the only cut of this stage.
            if num_new > budget and schedule.sequences:
                break
            if not manager.can_admit(prefix, sequence.num_tokens):
                break
            queues.admit(prefix)
            manager.allocate(sequence, num_new)
            num_new = min(num_new, budget)
            schedule.add(sequence, num_new)
            budget -= num_new
        return schedule

    def _schedule_decodes(self) -> Schedule:
        """One token for every running sequence. When blocks run out, the newest ones give theirs
        back, so that the oldest always advances."""
        schedule, queues, manager = Schedule(), self.queues, self.block_manager
        at_end = manager.at_block_end(queues.running, queues.slots_of(queues.running))
        if not manager.allocate_one_each(at_end):
            for sequence in at_end:
                while sequence.is_running and not manager.can_allocate(sequence, 1):
                    victim = queues.running[-1]
                    queues.preempt(victim)
                    schedule.preempted.append(victim)
                if sequence.is_running:
                    manager.allocate(sequence, 1)
        schedule.sequences = queues.running
        schedule.slots = queues.slots_of(queues.running)
        schedule.num_new_tokens = [1] * len(queues.running)
        schedule.num_decode_rows = len(queues.running)
        return schedule
