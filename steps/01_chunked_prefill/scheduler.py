"""A token budget per step: every decode gets its token first, chunks of prompts fill the rest."""

from __future__ import annotations

from shared.engine.batch import Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.sequence import Sequence

from .config import Config

# Blocks that running decodes take within this many steps are not given to new prompts: they would
# only be preempted for them. A block for every decode would be too many: most of them need none
# for many steps, and prompts that fit would have to wait.
RESERVED_STEPS = 4


class Scheduler:
    def __init__(self, config: Config, queues: Queues, block_manager: BlockManager) -> None:
        self.config = config
        self.queues = queues
        self.block_manager = block_manager
        self.postponed = Schedule()  # mixed_batch=separate: prefills of a step already decoded

    def schedule(self) -> Schedule:
        """The next step. Empty only when nothing is unfinished."""
        if self.postponed.sequences and (schedule := self._take_postponed()).sequences:
            return schedule
        decodes, prefills = Schedule(), Schedule()
        decoding, prompts = self.queues.by_phase()
        self._schedule_decodes(decodes, decoding)
        budget = min(
            self.config.max_prefill_tokens_per_step,
            self.config.max_num_batched_tokens - len(decodes.sequences),
        )
        budget = self._continue_prompts(prefills, prompts, budget)
        if self._may_admit(decodes, prefills, budget):
            self._admit_prompts(prefills, decodes.sequences, prompts, budget)
        return self._combine(decodes, prefills)

    def _schedule_decodes(self, schedule: Schedule, decoding: list[Sequence]) -> None:
        """One token for every running decode: at most max_num_batched_tokens sequences run, so
        that they always fit. When blocks run out, the newest sequences give theirs back, decodes
        or prompts, so that the oldest always advances."""
        queues, manager = self.queues, self.block_manager
        slots = queues.slots_of(decoding)
        at_end = manager.at_block_end(decoding, slots)
        if not manager.allocate_one_each(at_end):
            for sequence in at_end:
                while sequence.is_running and not manager.can_allocate(sequence, 1):
                    self._preempt(queues.running[-1], schedule)
                if sequence.is_running:
                    manager.allocate(sequence, 1)
        if schedule.preempted:
            decoding = [s for s in decoding if s.is_running]
            slots = queues.slots_of(decoding)
        schedule.sequences = decoding
        schedule.slots = slots
        schedule.num_new_tokens = [1] * len(schedule.sequences)
        schedule.num_decode_rows = len(schedule.sequences)

    def _continue_prompts(self, schedule: Schedule, prompts: list[Sequence], budget: int) -> int:
        """A chunk for every prompt that has begun, in order of admission; returns what is left of
        the budget.

        Several half-computed prompts may hold all blocks between them. Then the newest of them
        starts again later. Decodes are never its victims: they end, and a prompt can wait for that.
        """
        manager = self.block_manager
        prompts = [s for s in prompts if s.is_running]
        for sequence in prompts:
            if not budget:
                break
            while not manager.room(sequence) and prompts[-1] is not sequence:
                self._preempt(prompts.pop(), schedule)
            if not manager.room(sequence):
                break
            chunk = min(self._chunk(sequence, budget), manager.room(sequence))
            manager.allocate(sequence, chunk)
            schedule.add(sequence, chunk)
            budget -= chunk
        return budget

    def _admit_prompts(
        self, schedule: Schedule, decoding: list[Sequence], prompts: list[Sequence], budget: int
    ) -> None:
        """New prompts, first come first served, until the budget, the slots or the blocks end.

        A prompt takes blocks chunk by chunk, but begins only when there is room for all of it
        beside what the running ones are going to need soon.
        """
        queues, manager = self.queues, self.block_manager
        if not queues.waiting:
            return
        reserved = manager.num_blocks_soon(decoding, RESERVED_STEPS)
        reserved += sum(manager.num_blocks_needed(s, s.num_uncomputed_tokens) for s in prompts)
        while queues.waiting and queues.table.num_free and budget:
            sequence = queues.waiting[0]
            prefix = manager.find_prefix(sequence)
            if manager.will_hit(sequence, prefix, self._computing(schedule)):
                break
            if not manager.can_admit(prefix, sequence.num_tokens, reserved):
                break
            queues.admit(prefix)
            chunk = self._chunk(sequence, budget)
            manager.allocate(sequence, chunk)
            schedule.add(sequence, chunk)
            budget -= chunk
            reserved += manager.num_blocks_needed(sequence, sequence.num_uncomputed_tokens)

    def _computing(self, schedule: Schedule) -> list[Sequence]:
        """Prompts of which something is being computed when a new one is looked at."""
        return schedule.sequences

    def _may_admit(self, decodes: Schedule, prefills: Schedule, budget: int) -> bool:
        # Whoever had to give its blocks back in this step would be the first to ask for them.
        return not (decodes.preempted or prefills.preempted)

    def _combine(self, decodes: Schedule, prefills: Schedule) -> Schedule:
        """Both in one step, rows in order of admission: no boundary between decodes and chunks, so
        all go to the variable-length kernel."""
        preempted = decodes.preempted + prefills.preempted
        if decodes.sequences and self.config.mixed_batch == "separate":
            self.postponed, prefills = prefills, Schedule()
        if not prefills.sequences:
            decodes.preempted = preempted
            return decodes
        mixed = Schedule(preempted=preempted)
        num_new_tokens = dict.fromkeys(decodes.sequences, 1)
        num_new_tokens.update(zip(prefills.sequences, prefills.num_new_tokens, strict=True))
        for sequence in self.queues.running:
            if sequence in num_new_tokens:
                mixed.add(sequence, num_new_tokens[sequence])
        return mixed

    def _take_postponed(self) -> Schedule:
        """The prefills of the step before, without those aborted since."""
        postponed, self.postponed = self.postponed, Schedule()
        schedule = Schedule()
        for sequence, chunk in zip(postponed.sequences, postponed.num_new_tokens, strict=True):
            if sequence.is_running:
                schedule.add(sequence, chunk)
        return schedule

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_uncomputed_tokens, self.config.max_prefill_chunk_size, budget)

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        self.queues.preempt(victim)
        schedule.preempted.append(victim)
