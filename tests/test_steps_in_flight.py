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


def run(
    engine: Any, prompts: dict[str, list[int]], params: SamplingParams, depth: int
) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    flights: deque[tuple[Any, Any]] = deque()
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    schedule = engine.scheduler.schedule()
    while schedule.sequences or flights:
        if schedule.sequences:
            batch = build_batch(schedule, engine.table)
            flights.append((batch, engine.runner.submit(batch)))
        if len(flights) > depth or not schedule.sequences:
            batch, handle = flights.popleft()
            parts = (engine.table, engine.block_manager, engine.queues)
            for output in commit(batch, handle.result(), *parts):
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
