"""Your scheduler. The tests beside this file say what it must do; they fail until it does."""

from __future__ import annotations

from shared.config import EngineConfig
from shared.engine.batch import Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues


class Scheduler:
    """What you have:

    queues.waiting              sequences in order of arrival
    queues.running              sequences in order of admission
    queues.by_phase()           (those that decode, those that are still prompts)
    queues.table.num_free       free slots
    queues.admit(prefix)        the first waiting sequence starts to run
    queues.preempt(sequence)    back to the head of the waiting queue, its blocks are free

    block_manager.find_prefix(sequence)             blocks that hold its beginning already
    block_manager.can_admit(prefix, num_tokens)     would so many tokens fit?
    block_manager.will_hit(sequence, prefix, prefills)
                                                    a completion of the same request is computing it
    block_manager.can_allocate(sequence, n)         blocks for n more tokens?
    block_manager.room(sequence)                    the most tokens for which there are blocks
    block_manager.allocate(sequence, n)             take them

    sequence.num_tokens, sequence.num_uncomputed_tokens, sequence.is_running
    """

    def __init__(self, config: EngineConfig, queues: Queues, block_manager: BlockManager) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.queues = queues
        self.block_manager = block_manager

    def schedule(self) -> Schedule:
        """The next step: `Schedule.add(sequence, num_new_tokens)` for everyone who computes
        something, and `Schedule.preempted` for everyone who had to go. `num_decode_rows` counts the
        decodes, if they stand in front; 0 is always correct.

        Begin with one sequence at a time, and let the tests lead you on.
        """
        raise NotImplementedError("exercises/starter_scheduler/scheduler.py: write schedule()")
