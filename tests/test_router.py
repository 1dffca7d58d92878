"""Which replica gets a request."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

router = importlib.import_module("steps.04_dp_tp.router")
Router, PrefixMemory = router.Router, router.PrefixMemory

POLICIES = ("prefix", "least_tokens", "round_robin")
BLOCK = 16


def made(policy: str, num_replicas: int = 2, num_blocks: int = 1000) -> Any:
    return Router(num_replicas, policy, BLOCK, num_blocks)


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length, np.int32)


def idle(num_replicas: int = 2) -> dict[int, int]:
    return dict.fromkeys(range(num_replicas), 0)


def chained(first: np.ndarray, *more: np.ndarray) -> np.ndarray:
    return np.concatenate([first, *more])


loads = st.dictionaries(st.integers(0, 7), st.integers(0, 10**6), min_size=1)


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 80), loads, st.booleans()), max_size=40),
)
def test_only_replicas_that_live_get_anything(policy: str, requests: list[Any]) -> None:
    chooser = made(policy, num_replicas=8, num_blocks=20)
    for seed, length, alive, has_died in requests:
        chosen = chooser.choose(prompt_of(length, seed), alive)
        assert chosen in alive
        if has_died:
            chooser.forget(chosen)
        assert all(len(memory) <= 20 for memory in chooser._seen)


@given(loads, st.integers(0, 100))
def test_the_least_loaded_replica_is_chosen(alive: dict[int, int], length: int) -> None:
    for policy in ("least_tokens", "prefix"):  # nobody has seen anything
        chosen = made(policy, 8).choose(prompt_of(length), alive)
        assert alive[chosen] == min(alive.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60), st.randoms())
def test_no_replica_is_overloaded_while_another_is_not(
    requests: list[tuple[int, int]], rng: random.Random
) -> None:
    """Pitfall 33. Work is done at random; whoever gets a request had at most so much more than the
    least loaded."""
    chooser, work = made("prefix", 3), idle(3)
    for prefix, thousands in requests:
        prompt = chained(prompt_of(64, prefix), prompt_of(10, rng.randrange(100)))
        chosen = chooser.choose(prompt, work)
        bound = router.OVERLOAD_RATIO * min(work.values()) + router.OVERLOAD_TOKENS
        assert work[chosen] <= bound
        work[chosen] += 1000 * thousands
        done = rng.randrange(3)
        work[done] = max(0, work[done] - rng.randrange(3000))


def test_a_shared_prefix_stays_together() -> None:
    chooser, prefixes = made("prefix", 4), [prompt_of(64, seed) for seed in range(8)]
    homes = [{chooser.choose(prefix, idle(4))} for prefix in prefixes]
    assert Counter(home for (home,) in homes) == {0: 2, 1: 2, 2: 2, 3: 2}
    for turn in range(5):
        for prefix, home in zip(prefixes, homes, strict=True):
            work = {n: random.Random(turn).randrange(router.OVERLOAD_TOKENS) for n in range(4)}
            home.add(chooser.choose(chained(prefix, prompt_of(20, 100 + turn)), work))
    assert all(len(home) == 1 for home in homes)


def test_an_overloaded_home_is_left_and_then_there_are_two() -> None:
    chooser, prefix = made("prefix"), prompt_of(64)
    home = chooser.choose(prefix, idle())
    other = 1 - home
    busy = {home: router.OVERLOAD_TOKENS, other: 0}
    assert chooser.choose(prefix, busy) == home
    busy[home] += 1
    assert chooser.choose(prefix, busy) == other
    assert chooser.choose(prefix, {home: 0, other: 10}) == home  # both know it now
    assert chooser.choose(prefix, {home: 10, other: 0}) == other
    longer = chained(prefix, prompt_of(32, 1))
    assert chooser.choose(longer, {home: 0, other: 10}) == home
    assert chooser.choose(longer, {home: 10, other: 0}) == home  # it alone knows all of it


def test_a_beginning_that_all_prompts_have_attracts_nobody() -> None:
    chooser, system = made("prefix"), prompt_of(2 * BLOCK)
    home = chooser.choose(chained(system, prompt_of(40, 1)), idle())
    busy = {home: 10, 1 - home: 0}
    assert chooser.choose(chained(system, prompt_of(2 * BLOCK + 1, 2)), busy) == 1 - home
    assert chooser.choose(chained(system, prompt_of(40, 1)), busy) == home  # most of it is known


def test_what_a_replica_lost_attracts_nothing() -> None:
    chooser, prompt = made("prefix", num_blocks=4), prompt_of(64)
    home = chooser.choose(prompt, idle())
    other = 1 - home
    assert chooser.choose(prompt, {home: 1, other: 0}) == home
    chooser.forget(home)
    assert chooser.choose(prompt, {home: 1, other: 0}) == other
    assert chooser.choose(prompt_of(64, 1), {home: 1, other: 0}) == other  # takes its place
    assert chooser.choose(prompt, {home: 0, other: 1}) == home


def test_equal_replicas_take_turns() -> None:
    for policy in POLICIES:
        chooser = made(policy, 3)
        order = [chooser.choose(prompt_of(40, seed), idle(3)) for seed in range(6)]
        assert order == [0, 1, 2, 0, 1, 2]
        assert chooser.choose(prompt_of(40, 9), {0: 0, 2: 0}) == 0
        assert chooser.choose(prompt_of(40, 8), {0: 0, 2: 0}) == 2
    assert [made("round_robin").choose(prompt_of(5), {0: 10**6, 1: 0}) for _ in range(2)] == [0, 0]


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30), st.integers(1, 8))
def test_memory_keeps_the_newest(prompts: list[list[int]], size: int) -> None:
    memory = PrefixMemory(size)
    for blocks in prompts:
        memory.add(blocks)
        assert len(memory) <= size
        kept = min(len(blocks), size)
        assert memory.count(blocks[:kept]) == kept  # its beginning, if all of it is too much


def test_hashes_are_of_the_block_and_all_before_it() -> None:
    first, second, block = prompt_of(BLOCK, 1), prompt_of(BLOCK, 2), prompt_of(BLOCK, 3)
    one = router.block_hashes(chained(first, block, prompt_of(BLOCK - 1)), BLOCK)
    other = router.block_hashes(chained(second, block), BLOCK)
    assert len(one) == len(other) == 2
    assert not set(one) & set(other)
    assert router.block_hashes(chained(first, second), BLOCK)[0] == one[0]
    assert router.block_hashes(prompt_of(BLOCK - 1), BLOCK) == []
