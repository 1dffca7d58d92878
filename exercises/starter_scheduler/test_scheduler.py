"""What a scheduler must do, from the easiest to the hardest.

python -m pytest exercises/starter_scheduler -x
SCHEDULER=solution python -m pytest exercises/starter_scheduler
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from exercises.starter_scheduler.engine import make_engine
from shared import SamplingParams
from tests.fakes import VOCABULARY, Step, expected_output, run_to_end, watch

MOST_STEPS = 2000


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(engine: Any) -> list[Step]:
    """To the end, with every decision; the pool is checked after every step."""
    taken = watch(engine)
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished_requests():
            return taken
        engine.step()
        engine.block_manager.check()
    raise AssertionError(f"not finished after {MOST_STEPS} steps")


def test_1_one_request_gets_its_tokens() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(5))
    assert run_to_end(engine) == {"a": expected_output([1, 2, 3], 5, VOCABULARY)}


def test_2_several_requests_share_a_step() -> None:
    engine = make_engine()
    for name in "abc":
        engine.add_request(name, [ord(name) % 50] * 3, params(6))
    taken = run(engine)
    assert any(len(step.decodes) == 3 for step in taken), "all three can decode in one step"
    assert len(taken) <= 10


def test_3_the_budget_is_kept() -> None:
    engine = make_engine(budget=8)
    for i in range(6):
        engine.add_request(str(i), [i] * 7, params(4))
    for step in run(engine):
        assert len(step.decodes) + sum(length for *_, length in step.chunks) <= 8


def test_4_a_prompt_longer_than_the_budget_is_cut() -> None:
    engine = make_engine(budget=8)
    prompt = [i % 50 for i in range(30)]
    engine.add_request("a", prompt, params(3))
    assert run_to_end(engine) == {"a": expected_output(prompt, 3, VOCABULARY)}


def test_5_no_decode_waits_for_a_prompt() -> None:
    engine = make_engine(budget=8)
    engine.add_request("short", [1, 2], params(30))
    engine.step()
    engine.add_request("long", [i % 50 for i in range(40)], params(3))
    while_running = [step for step in run(engine) if "short" in step.order or step.chunks]
    decoding = while_running[: 30 - 1]
    assert all("short" in step.decodes for step in decoding), "a gap between two tokens"


def test_6_first_come_first_served() -> None:
    engine = make_engine(budget=8)
    for name in "abcd":
        engine.add_request(name, [ord(name) % 50] * 12, params(2))
    firsts = [name for step in run(engine) for name, start, _ in step.chunks if start == 0]
    assert firsts == ["a", "b", "c", "d"]


def test_7_a_pool_that_is_too_small_for_all() -> None:
    engine = make_engine(budget=16, num_blocks=9)
    prompts = {name: [ord(name) % 50] * 9 for name in "abc"}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params(15))
    expected = {name: expected_output(p, 15, VOCABULARY) for name, p in prompts.items()}
    assert run_to_end(engine) == expected


def test_8_a_shared_beginning_is_computed_once() -> None:
    engine = make_engine(budget=16)
    beginning = [i % 50 for i in range(12)]
    engine.add_request("first", [*beginning, 1], params(2))
    run(engine)
    engine.add_request("second", [*beginning, 2], params(2))
    assert sum(length for step in run(engine) for *_, length in step.chunks) == 1


@pytest.mark.parametrize("seed", range(40))
def test_9_whatever_comes(seed: int) -> None:
    draw = random.Random(seed)
    engine = make_engine(
        budget=draw.randint(4, 20), num_blocks=draw.randint(9, 30), max_num_sequences=5
    )
    expected, tokens, sent = {}, {}, 0
    for _ in range(MOST_STEPS):
        while sent < 12 and draw.random() < 0.3:
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
            length = draw.randint(1, 15)
            engine.add_request(str(sent), prompt, params(length))
            expected[str(sent)] = expected_output(prompt, length, VOCABULARY)
            sent += 1
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        engine.block_manager.check()
        if sent == 12 and not engine.has_unfinished_requests():
            break
    assert tokens == expected
