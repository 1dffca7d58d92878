"""The core lets the next step start before the last one's result is read: stages that overlap the
host with the device will rely on it, so it is tested from the first stage on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

import steps
from shared import SamplingParams
from shared.engine.batch import Schedule, build_batch
from shared.engine.commit import commit
from shared.engine.slots import Limits
from tests.fakes import FakeRunner, expected_output
from tests.reference import Reference


@pytest.mark.parametrize("penalty", [0.0, 0.7])
@pytest.mark.parametrize("depth", [1, 2])
def test_results_read_late(
    references: Callable[[str], Reference], depth: int, penalty: float
) -> None:
    """Submit `depth` decode steps ahead of the results; the tokens are those of the usual order."""
    module, reference = steps.load("00_baseline"), references("base")
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, frequency_penalty=penalty
    )
    rng = random.Random(0)
    prompts = {f"r{i}": [rng.randrange(1, 128) for _ in range(3 + 7 * i)] for i in range(4)}
    config = module.Config(
        model=str(reference.directory), max_model_length=64, kvcache_block_size=4
    )
    expected = run(module.Engine(config), prompts, params, 0)
    assert run(module.Engine(config), prompts, params, depth) == expected


def test_what_leaves_while_its_step_is_in_flight() -> None:
    """A sequence that is aborted, or whose stop token is found late, has a step in flight; its
    slot and blocks may be another's by the time that step is committed."""
    limits = Limits(
        vocab_size=50,
        block_size=2,
        num_blocks=12,
        max_model_length=24,
        max_num_sequences=1,
        max_num_batched_tokens=24,
    )
    module = steps.load("00_baseline")
    config = module.Config(model="qwen3-0.6b", load_format="dummy", max_num_batched_tokens=24)
    engine = module.Engine(config, runner=FakeRunner(limits))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def submit(schedule: Schedule) -> tuple[Any, Any, Any]:
        batch = build_batch(schedule, engine.table)
        return schedule, batch, engine.runner.submit(batch)

    def decode() -> Schedule:
        schedule = Schedule(num_decode_rows=1)
        engine.block_manager.allocate(engine.queues.running[0], 1)
        schedule.add(engine.queues.running[0], 1)
        return schedule

    def land(flown: Schedule, batch: Any, handle: Any) -> list[Any]:
        parts = (engine.table, engine.block_manager, engine.queues)
        outputs = commit(flown, batch, handle.result(), *parts)
        engine.block_manager.check()
        return outputs

    stop = expected_output([1, 2, 3], 2, 50)[1]
    stopping = params.model_copy(update={"stop_token_ids": (stop,)})
    engine.add_request("stops", [1, 2, 3], stopping)
    land(*submit(engine.scheduler.schedule()))
    second, third = submit(decode()), submit(decode())
    assert [output.finish_reason for output in land(*second)] == ["stop"]
    assert land(*third) == []

    engine.add_request("aborted", [4, 5, 6], params)
    land(*submit(engine.scheduler.schedule()))
    flight = submit(decode())
    engine.abort_request("aborted")
    engine.add_request("next", [7, 8, 9, 10], params)
    schedule = engine.scheduler.schedule()
    prefill = submit(schedule)
    assert land(*flight) == []
    tokens = [token for output in land(*prefill) for token in output.new_token_ids]
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.new_token_ids]
    assert tokens == expected_output([7, 8, 9, 10], 8, 50)
    assert engine.block_manager.num_free_blocks == limits.num_blocks


def run(
    engine: Any, prompts: dict[str, list[int]], params: SamplingParams, depth: int
) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    flights: deque[tuple[Any, Any, Any]] = deque()
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    schedule = engine.scheduler.schedule()
    while schedule.sequences or flights:
        if schedule.sequences:
            batch = build_batch(schedule, engine.table)
            flights.append((schedule, batch, engine.runner.submit(batch)))
        if len(flights) > depth or not schedule.sequences:
            flown, batch, handle = flights.popleft()
            parts = (engine.table, engine.block_manager, engine.queues)
            for output in commit(flown, batch, handle.result(), *parts):
                tokens[output.request_id] += output.new_token_ids
        # The length at which a sequence ends is known before its last value is.
        schedule = Schedule()
        for sequence in engine.queues.running:
            if sequence.num_tokens < sequence.finish_length:
                engine.block_manager.allocate(sequence, 1)
                schedule.add(sequence, 1)
        schedule.num_decode_rows = len(schedule.sequences)
    engine.block_manager.check()
    engine.close()
    return tokens
