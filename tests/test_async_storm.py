"""Storms against stage 05, over a model that runs only when a result is read: stops, aborts, ids
that come again, steps that fail on either way, and pauses with a step in flight."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shared import SamplingParams
from shared.engine.batch import Batch
from shared.engine.result import StepResult
from shared.engine.slots import Limits
from tests.fakes import EMPTY, VOCABULARY, FakeRunner, expected_output, fake_engine, watch

LENGTH = 48


class LazyHandle:
    used_graph = False

    def __init__(self, runner: LazyRunner, number: int) -> None:
        self._runner = runner
        self._number = number

    def result(self) -> StepResult:
        return self._runner.run_until(self._number)


class LazyRunner(FakeRunner):
    """Runs a step, after all before it, when its result is read. `fails` says whether one fails:
    at its "submit", at its "run", so that nothing of it happens, or when its result is "read"."""

    def __init__(self, limits: Limits, fails: Callable[[str], bool]) -> None:
        super().__init__(limits)
        self.sampled[:] = 0  # as on a device: a token, whoever looks
        self._fails = fails
        self._due: deque[Batch] = deque()
        self._results: list[StepResult | None] = []

    def submit(self, batch: Batch) -> Any:
        if self._fails("submit"):
            raise MemoryError("no room")
        self._due.append(copy.deepcopy(batch))  # whoever changes it later changes too late
        return LazyHandle(self, len(self._results) + len(self._due) - 1)

    def run_until(self, number: int) -> StepResult:
        while len(self._results) <= number:
            batch = self._due.popleft()
            failed = self._fails("run")
            self._results.append(None if failed else super().submit(batch).result())
        result = self._results[number]
        if self._fails("read") or result is None:
            raise MemoryError("no room")
        return result

    def _read(self, batch: Batch, row: int) -> np.ndarray:
        """As a real model: rows without a past compute nonsense, and their KV is nonsense."""
        try:
            return super()._read(batch, row)
        except AssertionError:
            begin, end = batch.cu_seqlens_q[row : row + 2]
            self.pool[batch.slot_mapping[begin:end]] = EMPTY
            return np.array([EMPTY])


@pytest.mark.parametrize("share_of_failures", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(10))
def test_storm(seed: int, share_of_failures: float) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    engine = fake_engine(
        "05_async_scheduling",
        block_size=block_size,
        num_blocks=LENGTH // block_size + rng.randrange(8),
        max_num_sequences=rng.randrange(1, 7),
        budget=rng.randrange(1, 60),
        enable_prefix_caching=bool(seed % 3),
        max_prefill_defer=rng.choice([0, 3]),
        max_prefill_chunk_size=rng.randrange(1, 60),
    )
    chance = random.Random(seed)
    engine.runner = LazyRunner(engine.limits, lambda _: chance.random() < share_of_failures)
    prefixes = [[rng.randrange(3) for _ in range(rng.randrange(13))] for _ in range(3)]
    live: dict[tuple[str, int], tuple[list[int], list[int], str]] = {}

    def add() -> None:
        request_id = str(rng.randrange(12))
        if any(name == request_id for name, _ in live):
            return
        tokens = rng.choice(prefixes) + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        stop, n = rng.choice([None, rng.randrange(VOCABULARY)]), rng.randrange(1, 4)
        expected = expected_output(tokens, rng.randrange(20), VOCABULARY)
        params = SamplingParams(
            temperature=0,
            max_tokens=len(expected),
            n=n,
            ignore_eos=True,
            stop_token_ids=() if stop is None else (stop,),
            prompt_logprobs=None if expected else 1,
        )
        reason = "length"
        if stop in expected:
            expected, reason = expected[: expected.index(stop) + 1], "stop"
        engine.add_request(request_id, tokens, params)
        live.update({(request_id, i): ([], expected, reason) for i in range(n)})

    def abort() -> None:
        request_id, index = rng.choice(sorted(live))
        if rng.random() < 0.5:
            engine.abort_sequence(request_id, index)
            del live[request_id, index]
        else:
            engine.abort_request(request_id)
            for key in [key for key in live if key[0] == request_id]:
                del live[key]

    def step() -> None:
        for output in engine.step():
            got, expected, reason = live[output.request_id, output.index]
            got += output.new_token_ids
            assert got == expected[: len(got)]
            if output.finish_reason is not None:
                assert output.error or (got, output.finish_reason) == (expected, reason)
                del live[output.request_id, output.index]
        engine.block_manager.check()

    for now in range(200):
        if now % 50 < 30 and rng.random() < 0.4:
            add()
        if live and rng.random() < 0.1:
            abort()
        if engine.has_unfinished_requests():  # as a server: an idle engine is left alone
            step()
    for _ in range(2000):
        if engine.has_unfinished_requests():
            step()
    assert not live
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks
    assert engine.table.num_free == engine.limits.max_num_sequences
    add()
    engine.step()
    engine.close()  # with a step in flight
    engine.close()


@pytest.mark.parametrize("max_prefill_defer", [0, 3])
@pytest.mark.parametrize("when", ["submit", "run", "read"])
def test_every_step_may_fail_beside_the_one_in_flight(when: str, max_prefill_defer: int) -> None:
    """Whichever step it is, and although the next one may be in flight: only sequences that were
    in it end, and all others get the tokens that they would have got, then and later."""
    prompts = {f"r{i}": [i % 2, *range(3, 5 + 3 * i)] for i in range(6)}
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)

    def run(fails: Callable[[str], bool]) -> tuple[set[str], list[set[str]]]:
        """(who failed, who was in each step)"""
        engine = fake_engine(
            "05_async_scheduling",
            block_size=2,
            num_blocks=40,
            max_num_sequences=3,
            budget=16,
            max_prefill_defer=max_prefill_defer,
            max_prefill_chunk_size=6,
        )
        engine.runner = LazyRunner(engine.limits, fails)
        steps, everybody = watch(engine), set[str]()
        for _ in range(2):  # the second time over what the first has left in the prefix cache
            waiting, got = list(prompts), {name: list[int]() for name in prompts}
            failed: set[str] = set()
            while waiting or engine.has_unfinished_requests():
                if waiting:
                    name = waiting.pop(0)
                    engine.add_request(name, prompts[name], params)
                for output in engine.step():
                    got[output.request_id] += output.new_token_ids
                    if output.error:
                        failed.add(output.request_id)
                engine.block_manager.check()
            for name, tokens in got.items():
                expected = expected_output(prompts[name], 7, VOCABULARY)
                assert tokens == expected[: len(tokens)]
                assert (len(tokens) < 7) == (name in failed)
            everybody |= failed
            assert engine.block_manager.num_free_blocks == engine.limits.num_blocks
            assert engine.table.num_free == engine.limits.max_num_sequences
        return everybody, [set(step.order) for step in steps]

    failed, steps = run(lambda _: False)
    assert not failed
    for number in range(len(steps)):
        events = itertools.count()
        failed, taken = run(lambda event, c=events, n=number: event == when and next(c) == n)
        assert failed <= taken[number]
