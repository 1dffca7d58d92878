"""The scheduler of stage 01 with decodes and prompts kept apart: decodes stand in front, and
prompts that have just come let some steps be all decode."""

from __future__ import annotations

from itertools import accumulate

from shared.engine.batch import Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from steps import load

from .config import Config

ChunkedPrefillScheduler = load("01_chunked_prefill").Scheduler


class Scheduler(ChunkedPrefillScheduler):  # type: ignore[misc, valid-type]
    """Budget, chunks, admission and preemption are those of stage 01."""

    def __init__(self, config: Config, queues: Queues, block_manager: BlockManager) -> None:
        super().__init__(config, queues, block_manager)
        self.num_deferred = 0  # steps in a row that have let prompts wait

    def _may_admit(self, decodes: Schedule, prefills: Schedule, budget: int) -> bool:
        may: bool = super()._may_admit(decodes, prefills, budget)
        return may and not self._defer(decodes, prefills, budget)

    def _defer(self, decodes: Schedule, prefills: Schedule, budget: int) -> bool:
        """May this step be all decode, so that it replays a graph, although prompts could start?

        Prompts that come one by one then start together, in one mixed step for several. With
        enough of them to fill a step, or without decodes, nothing is won by waiting.
        """
        queues = self.queues
        could_start = queues.waiting and queues.table.num_free and not prefills.sequences
        waiting_tokens = accumulate(s.num_tokens for s in queues.waiting)
        if (
            could_start
            and decodes.sequences
            and self.num_deferred < self.config.max_prefill_defer
            and all(total < budget for total in waiting_tokens)
        ):
            self.num_deferred += 1
            return True
        self.num_deferred = 0
        return False

    def _combine(self, decodes: Schedule, prefills: Schedule) -> Schedule:
        """Decodes in front, chunks behind: attention computes either in its own way. What a row
        carries is looked up by its slot: its order in the batch changes nothing else."""
        if not prefills.sequences:
            decodes.preempted = decodes.preempted + prefills.preempted
            return decodes
        return Schedule(
            decodes.sequences + prefills.sequences,
            decodes.num_new_tokens + prefills.num_new_tokens,
            num_decode_rows=decodes.num_decode_rows,
            preempted=decodes.preempted + prefills.preempted,
        )
