"""Paged KV memory: who holds which block, and which blocks hold tokens worth finding again.

PagedAttention (arXiv:2309.06180) gives the pages; the prefix cache follows vLLM's automatic prefix
caching, with one change: a cached block is found by the pair (identity of its parent, its own
tokens), compared exactly, instead of by a chained hash. See docs/architecture.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import numpy as np

from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable, slots_of

BlockEvent = tuple[int, Literal["alloc", "hit", "free", "evict"], str]

# The parent of a first block.
ROOT = 0


class OutOfBlocks(RuntimeError):
    """A caller allocated without asking `can_allocate` first."""


class BlockManager:
    """Blocks are in use (reference count > 0) or free; free ones wait in least-recently-used order.

         in use            free, oldest first
      [ 7 ][ 2 ][ 9 ]     [ 4 ][ 0 ][ 5*][ 1*][ 8*]      * registered: still a hit until reused
                             ^ next to be reused

    A registered block has an identity that no other registration, past or future, shares. A chain
    of hits is therefore exact: each block's parent is the very block hit before it.
    """

    def __init__(
        self, table: SlotTable, enable_prefix_caching: bool, record_events: bool = False
    ) -> None:
        """`record_events`: note every change in `events`, for the trace, which empties the list."""
        self.table = table
        self.num_blocks = table.limits.num_blocks
        self.block_size = table.limits.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events: list[BlockEvent] | None = [] if record_events else None
        self._reference_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._cached: dict[tuple[int, bytes], int] = {}  # (parent identity, tokens) -> block
        self._keys: dict[int, tuple[int, bytes]] = {}  # registered block -> its key
        self._identities: dict[int, int] = {}  # registered block -> its identity
        self._last_identity = ROOT

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their content, held by a sequence or not."""
        return len(self._keys)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the KV of the first tokens of a waiting sequence.

        At least one token is left to compute, for there is nothing to sample from otherwise. Takes
        nothing: the blocks are held from `hold_prefix` on.
        """
        if not self.enable_prefix_caching or sequence.prompt_logprobs is not None:
            return []
        tokens, size = sequence.token_ids, self.block_size
        blocks: list[int] = []
        parent = ROOT
        for end in range(size, len(tokens), size):
            block = self._cached.get((parent, tokens[end - size : end].tobytes()))
            if block is None:
                break
            blocks.append(block)
            parent = self._identities[block]
        return blocks

    def will_hit(self, sequence: Sequence, prefix: list[int], prefills: list[Sequence]) -> bool:
        """Will a waiting sequence find more than `prefix` if it is admitted later, because another
        completion of its request, the last of `prefills`, is computing their prompt now?"""
        return (
            self.enable_prefix_caching
            and bool(prefills)
            and prefills[-1].request_id == sequence.request_id
            and len(prefix) < (sequence.num_prompt_tokens - 1) // self.block_size
        )

    def can_admit(self, prefix: list[int], num_tokens: int, reserved: int = 0) -> bool:
        """Would a new sequence of `num_tokens` with these hits fit and leave `reserved` blocks?
        Idle hits leave the free list, so they do not count as free for the rest."""
        needed = -(-num_tokens // self.block_size) - len(prefix)
        idle_hits = sum(1 for block in prefix if not self._reference_counts[block])
        return needed + reserved <= len(self._free) - idle_hits

    def hold_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        """Enter hits into a newly admitted sequence's table; their tokens count as computed."""
        for block in prefix:
            if not self._reference_counts[block]:
                del self._free[block]
            self._reference_counts[block] += 1
            self._record(block, "hit", sequence)
        table, slot = self.table, sequence.slot
        table.append_blocks(slot, prefix)
        table.num_computed_tokens[slot] = len(prefix) * self.block_size
        table.num_registered_blocks[slot] = len(prefix)
        if prefix:
            sequence.last_registered = self._identities[prefix[-1]]

    def num_blocks_needed(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Blocks missing for `num_new_tokens` after those computed."""
        end = sequence.num_computed_tokens + num_new_tokens
        return max(0, -(-end // self.block_size) - int(self.table.num_blocks[sequence.slot]))

    def can_allocate(self, sequence: Sequence, num_new_tokens: int) -> bool:
        return self.num_blocks_needed(sequence, num_new_tokens) <= len(self._free)

    def room(self, sequence: Sequence) -> int:
        """Tokens for which a running sequence could have blocks: its own and all free ones."""
        blocks = int(self.table.num_blocks[sequence.slot]) + len(self._free)
        return blocks * self.block_size - sequence.num_computed_tokens

    def num_blocks_soon(self, decodes: list[Sequence], num_steps: int) -> int:
        """Blocks that running sequences with a place for their next token will take within
        `num_steps` steps more. The last token of a sequence needs none: its KV is never read."""
        table = self.table
        slots = slots_of(decodes)
        end = table.num_computed_tokens[slots] + 1 + num_steps
        end = np.minimum(end, table.finish_length[slots] - 1)
        needed = -(-end // self.block_size) - table.num_blocks[slots]
        return int(np.maximum(needed, 0).sum())

    def at_block_end(self, sequences: list[Sequence], slots: np.ndarray) -> list[Sequence]:
        """Those of the running `sequences`, in these slots, whose next token needs a new block."""
        table = self.table
        end = table.num_blocks[slots] * self.block_size
        rows = (end <= table.num_computed_tokens[slots]).nonzero()[0]
        return [sequences[row] for row in rows.tolist()]

    def allocate_one_each(self, sequences: list[Sequence]) -> bool:
        """A block for each of these sequences at a block's end. False, with none taken: there are
        too few."""
        if len(sequences) > len(self._free):
            return False
        if sequences:
            blocks = [self._take(sequence) for sequence in sequences]
            self.table.append_block_each(slots_of(sequences), blocks)
        return True

    def allocate(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Take what `num_new_tokens` more tokens need: all blocks or, raising OutOfBlocks, none."""
        needed = self.num_blocks_needed(sequence, num_new_tokens)
        if needed > len(self._free):
            raise OutOfBlocks(f"{needed} blocks needed, {len(self._free)} free")
        if needed:
            self.table.append_blocks(sequence.slot, [self._take(sequence) for _ in range(needed)])

    def free(self, sequence: Sequence) -> None:
        """Let go of all blocks of a running sequence.

        The last block goes to the free list first, so that a prefix is reused from its end: a
        beginning without its end is still a hit, an end without its beginning is not.
        """
        slot = sequence.slot
        for block in reversed(self.table.blocks_of(slot)):
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                self._free[block] = None
                self._record(block, "free", sequence)
        self.table.num_blocks[slot] = 0

    def register(
        self, sequences: list[Sequence], slots: np.ndarray, num_written: np.ndarray
    ) -> None:
        """Make blocks that lie wholly below `num_written` findable: their KV has been computed.
        All three have one entry per sequence.

        A block whose content is already registered elsewhere (two sequences computed the same
        prefix in the same step) stays private; the chain goes on from the registered twin.
        """
        if not self.enable_prefix_caching:
            return
        table, size = self.table, self.block_size
        begins, ends = table.num_registered_blocks[slots], num_written // size
        rows = (begins < ends).nonzero()[0]
        if not len(rows):
            return
        slots, begins, ends = slots[rows], begins[rows], ends[rows]
        columns = (rows, slots, begins, ends)
        for row, slot, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            sequence = sequences[row]
            contents = table.token_ids[slot, begin * size : end * size].tobytes()
            step = size * table.token_ids.itemsize
            for i, candidate in enumerate(table.block_table[slot, begin:end].tolist()):
                key = (sequence.last_registered, contents[i * step : (i + 1) * step])
                block = self._cached.setdefault(key, candidate)
                if block not in self._identities:
                    self._last_identity += 1
                    self._keys[block] = key
                    self._identities[block] = self._last_identity
                sequence.last_registered = self._identities[block]
        table.num_registered_blocks[slots] = ends

    def check(self) -> None:
        """Assert that no block is lost, double or miscounted. For tests: reads everything."""
        held = [0] * self.num_blocks
        free_slots = set(self.table._free)
        for slot in range(self.table.limits.max_num_sequences):
            blocks = self.table.blocks_of(slot)
            assert not blocks or slot not in free_slots, f"slot {slot} is free but holds {blocks}"
            assert len(set(blocks)) == len(blocks), f"slot {slot} holds a block twice: {blocks}"
            for block in blocks:
                held[block] += 1
        table = self.table
        assert len(set(table._free)) == table.num_free, "a slot is free twice"
        assert held == self._reference_counts, "reference counts differ from the block tables"
        idle = {block for block, count in enumerate(held) if not count}
        assert idle == set(self._free), "the free list is not exactly the blocks nobody holds"
        assert self._keys.keys() == self._identities.keys()
        assert self._cached == {key: block for block, key in self._keys.items()}
        assert len(set(self._identities.values())) == len(self._identities)

    def _take(self, sequence: Sequence) -> int:
        block, _ = self._free.popitem(last=False)
        self._reference_counts[block] = 1
        key = self._keys.pop(block, None)
        if key is not None:
            # The block's content changes owner: whoever looks for the old content must miss.
            del self._cached[key]
            del self._identities[block]
            self._record(block, "evict", sequence)
        self._record(block, "alloc", sequence)
        return block

    def _record(
        self, block: int, event: Literal["alloc", "hit", "free", "evict"], sequence: Sequence
    ) -> None:
        if self.events is not None:
            self.events.append((block, event, sequence.name))
