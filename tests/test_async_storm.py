"""Storms against stage 05, over a model that runs only when a result is read: stops, aborts, ids
that come again, steps that fail on either way, and pauses with a step in flight."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import pytest

from shared import SamplingParams
from shared.engine.batch import Batch
from shared.engine.result import StepResult
from shared.engine.slots import Limits
from tests.fakes import VOCABULARY, FakeRunner, expected_output, fake_engine

LENGTH = 48


class LazyHandle:
    used_graph = False

    def __init__(self, runner: LazyRunner, number: int) -> None:
        self._runner = runner
        self._number = number

    def result(self) -> StepResult:
        return self._runner.run_until(self._number)


class LazyRunner(FakeRunner):
    """Runs a step, after all before it, when its result is read. Some fail."""

    def __init__(self, limits: Limits, chance: random.Random, share_of_failures: float) -> None:
        super().__init__(limits)
        self._chance = chance
        self._share = share_of_failures
        self._due: deque[Batch] = deque()
        self._results: list[StepResult] = []

    def submit(self, batch: Batch) -> Any:
        self._perhaps_fail()
        self._due.append(copy.deepcopy(batch))  # whoever changes it later changes too late
        return LazyHandle(self, len(self._results) + len(self._due) - 1)

    def run_until(self, number: int) -> StepResult:
        while len(self._results) <= number:
            self._results.append(super().submit(self._due.popleft()).result())
        self._perhaps_fail()
        return self._results[number]

    def _perhaps_fail(self) -> None:
        if self._chance.random() < self._share:
            raise MemoryError("no room")


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
        mixed_batch=rng.choice(["unified", "separate"]),
        max_prefill_chunk_size=rng.randrange(1, 60),
    )
    engine.runner = LazyRunner(engine.limits, random.Random(seed), share_of_failures)
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
