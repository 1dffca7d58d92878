"""Which replica gets a request. Policy only: it knows loads and prompts, and talks to nobody.

least_tokens    the replica with the least work left: tokens of prompts and of answers still to
                come, since sixteen short requests may be less than one long one
prefix          the replica that has seen the longest beginning of the prompt, so that what it
                holds in its cache is not computed and held a second time elsewhere; unless it
                is overloaded, for a hit saves a part of the prompt, and a queue costs all of it,
                or the beginning is a small part: all chats begin with one system prompt
round_robin     each in turn
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np

Policy = Literal["prefix", "least_tokens", "round_robin"]

# A replica is overloaded that has this many times as much work left as the least loaded one...
OVERLOAD_RATIO = 1.5
# ...and this many tokens besides: so much is soon done, and not worth a second copy of a prefix.
OVERLOAD_TOKENS = 4096
# Of a prompt; what is computed again of a smaller hit does not matter beside the rest.
MIN_HIT_SHARE = 0.5


class Router:
    def __init__(self, num_replicas: int, policy: Policy, block_size: int, num_blocks: int) -> None:
        """`block_size`, `num_blocks`: of a replica's cache, which cannot remember more."""
        self._policy = policy
        self._block_size = block_size
        self._seen = [PrefixMemory(num_blocks) for _ in range(num_replicas)]
        self._turn = 0

    def choose(self, tokens: np.ndarray, loads: Mapping[int, int]) -> int:
        """The replica for a prompt, [n] int32, which is taken to go there.

        `loads`: of the replicas that live, at least one: tokens of work left.
        """
        if self._policy == "round_robin":
            chosen = self._next_of(loads)
        elif self._policy == "least_tokens":
            chosen = self._least(loads)
        else:
            blocks = block_hashes(tokens, self._block_size)
            chosen = self._by_prefix(blocks, MIN_HIT_SHARE * len(tokens), loads)
            self._seen[chosen].add(blocks)
        self._turn = chosen + 1
        return chosen

    def forget(self, replica: int) -> None:
        """Its engine has ended, and its cache with it."""
        self._seen[replica].clear()

    def _by_prefix(self, blocks: list[int], least_hit: float, loads: Mapping[int, int]) -> int:
        """`least_hit`: tokens."""
        least = self._least(loads)
        known = {replica: self._seen[replica].count(blocks) for replica in loads}
        longest = max(known.values())
        if longest * self._block_size < least_hit:
            return least
        home = self._least({r: loads[r] for r, count in known.items() if count == longest})
        is_overloaded = loads[home] > OVERLOAD_RATIO * loads[least] + OVERLOAD_TOKENS
        return least if is_overloaded else home

    def _least(self, loads: Mapping[int, int]) -> int:
        """Of equal ones, each in turn: whoever asks one by one finds all of them idle."""
        smallest = min(loads.values())
        return self._next_of([replica for replica, load in loads.items() if load == smallest])

    def _next_of(self, replicas: Collection[int]) -> int:
        """The first one from that on whose turn it is."""
        return min(replicas, key=lambda replica: (replica - self._turn) % len(self._seen))


class PrefixMemory:
    """Blocks of prompts that a replica has got, the newest ones: least recently used, as in its own
    cache."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, blocks: list[int]) -> int:
        """How many of the first blocks are there."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def add(self, blocks: list[int]) -> None:
        # Backwards: of a prompt, the last block is the first to be forgotten.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def block_hashes(tokens: np.ndarray, block_size: int) -> list[int]:
    """One for each full block, of its tokens and all before them: equal for equal beginnings.

    Python's own, so for this process only; two that collide send a request to the wrong replica,
    where it is computed like any other.
    """
    hashes, parent = [], 0
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash((parent, tokens[end - block_size : end].tobytes()))
        hashes.append(parent)
    return hashes
