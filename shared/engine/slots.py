"""Per-slot arrays: everything a step needs to know about running sequences, in numpy.

A running sequence owns a slot (a row of every array here) until it finishes or is preempted.
Building a batch for 512 sequences is then a few fancy-indexing operations instead of a loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shared.engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What a runner can hold: fixed once weights, buffers and the KV pool are in memory."""

    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_length: int
    """The effective maximum: the smaller of the configured one and the tokens in the pool."""
    max_num_sequences: int
    max_num_batched_tokens: int


class SlotTable:
    """Free slots and the arrays. Lengths:

    tokens        prompt ............ | generated ...
                  0        num_prompt_tokens        num_tokens        finish_length
    KV written    0 ............... num_computed_tokens

    `num_tokens` counts a token from the moment its step is submitted; its value enters
    `token_ids` when the step's result is committed.
    """

    def __init__(self, limits: Limits) -> None:
        size, length = limits.max_num_sequences, limits.max_model_length
        columns = -(-length // limits.block_size)
        self.limits = limits
        try:
            self.token_ids = np.zeros((size, length), np.int32)
        except MemoryError:
            raise ValueError(
                f"max_num_sequences={size} sequences of max_model_length={length} tokens do not "
                f"fit in memory"
            ) from None
        self.num_tokens = np.zeros(size, np.int32)
        self.num_prompt_tokens = np.zeros(size, np.int32)
        self.num_computed_tokens = np.zeros(size, np.int32)
        self.finish_length = np.zeros(size, np.int32)
        self.block_table = np.zeros((size, columns), np.int32)
        self.num_blocks = np.zeros(size, np.int32)
        self.num_registered_blocks = np.zeros(size, np.int32)
        self.temperature = np.zeros(size, np.float32)
        self.seed = np.zeros(size, np.int64)
        # Tokens from which on only the temperature matters to the row's sampling.
        self.plain_from = np.zeros(size, np.int32)
        # The last token was sampled into this slot on the device, so the next input is read there.
        self.decoding = np.zeros(size, np.bool_)
        # Counts the slot's owners: a step in flight and the sampler's token history can tell
        # whether the slot is still whose it was.
        self.generation = np.zeros(size, np.int64)
        # Writes to block_table that no batch has taken (flat index -> block), for the copy on the
        # device. A dict: a cell written twice must get there once, with its last value.
        self.block_updates: dict[int, int] = {}
        # Of all sequences there have been: a step that samples none of these stops nobody.
        self.stop_token_ids: set[int] = set()
        self._free = list(range(size - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot and copy it in; nothing is computed yet."""
        slot = self._free.pop()
        tokens = sequence.token_ids
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        len_prompt = sequence.num_prompt_tokens
        self.num_prompt_tokens[slot] = len_prompt
        self.num_computed_tokens[slot] = 0
        self.finish_length[slot] = sequence.finish_length
        self.num_blocks[slot] = 0
        self.num_registered_blocks[slot] = 0
        self.temperature[slot] = sequence.params.temperature
        self.seed[slot] = sequence.seed
        plain_after = sequence.params.plain_after
        # Nothing is sampled at finish_length or beyond: a bound that fits, whatever was asked for.
        last = sequence.finish_length
        self.plain_from[slot] = last if plain_after is None else min(len_prompt + plain_after, last)
        self.decoding[slot] = False
        self.stop_token_ids |= sequence.stop_token_ids
        sequence.enter(self, slot)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back; the sequence keeps its tokens."""
        slot = sequence.slot
        sequence.leave()
        self.generation[slot] += 1
        self._free.append(slot)

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        begin = int(self.num_blocks[slot])
        self.block_table[slot, begin : begin + len(blocks)] = blocks
        self.num_blocks[slot] += len(blocks)
        first = slot * self.block_table.shape[1] + begin
        self.block_updates.update(enumerate(blocks, first))

    def append_block_each(self, slots: np.ndarray, blocks: list[int]) -> None:
        """One block for each of these different slots."""
        columns = self.num_blocks[slots]
        self.block_table[slots, columns] = blocks
        self.num_blocks[slots] = columns + 1
        indices = slots * self.block_table.shape[1] + columns
        self.block_updates.update(zip(indices.tolist(), blocks, strict=True))

    def blocks_of(self, slot: int) -> list[int]:
        return self.block_table[slot, : self.num_blocks[slot]].tolist()

    def take_block_updates(self, slots: np.ndarray) -> np.ndarray:
        """[U, 2] int32 pairs (flat index into block_table, block) of these slots; forgets them.

        Those of others wait for a step of theirs: whose step fails ends with it, so whoever goes on
        depends on no step that failed, nor on one whose result is not known yet.
        """
        updates = np.empty((len(self.block_updates), 2), np.int32)
        if not self.block_updates:  # most steps of few rows take no block
            return updates
        updates[:, 0] = list(self.block_updates)
        updates[:, 1] = list(self.block_updates.values())
        chosen = np.zeros(len(self.block_table), np.bool_)
        chosen[slots] = True
        taken = chosen[updates[:, 0] // self.block_table.shape[1]]
        self.block_updates = dict(updates[~taken].tolist())
        return updates[taken]


def slots_of(sequences: list[Sequence]) -> np.ndarray:
    """[len(sequences)] intp: numpy takes several times as long to index by anything else."""
    return np.fromiter((s.slot for s in sequences), np.intp, len(sequences))
