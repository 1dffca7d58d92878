"""Prompts in chunks, under a token budget: what every stage that cuts prompts has to keep."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from shared import SamplingParams
from tests.engine_contract import drive, prompt_of, tokens_of
from tests.fakes import (
    VOCABULARY,
    Step,
    cuts_prompts,
    expected_output,
    fake_engine,
    run_to_end,
    watch,
)
from tests.reference import Reference

STAGES = [name for name in steps.engines() if cuts_prompts(steps.load(name))]
CHUNKED = "01_chunked_prefill"


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def distinct(first: int, length: int) -> list[int]:
    """A prompt that shares no block with those of another `first`."""
    return [first, *(n % VOCABULARY for n in range(length - 1))]


def chunks_of(taken: list[Step], name: str) -> list[tuple[int, int]]:
    return [(start, length) for step in taken for n, start, length in step.chunks if n == name]


# The budget


@pytest.mark.parametrize("stage", STAGES)
@given(data=st.data())
def test_budgets_are_kept_and_no_decode_is_skipped(stage: str, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 20), label="budget")
    per_step = data.draw(st.integers(1, 24), label="max_prefill_tokens_per_step")
    per_chunk = data.draw(st.integers(1, 24), label="max_prefill_chunk_size")
    num_blocks = data.draw(st.integers(12, 40), label="num_blocks")
    engine = fake_engine(
        stage,
        block_size=3,
        num_blocks=num_blocks,
        budget=budget,
        max_prefill_tokens_per_step=per_step,
        max_prefill_chunk_size=per_chunk,
    )
    request = st.tuples(st.integers(0, 15), st.integers(1, 24), st.integers(1, 10))
    arrivals = data.draw(st.lists(request, min_size=1, max_size=8), label="(step, prompt, output)")
    prompts = {f"r{i}": distinct(i, length) for i, (_, length, _) in enumerate(arrivals)}
    taken = watch(engine)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    now = 0
    while now <= 15 or engine.has_unfinished_requests():
        for i, (arrival, _, max_tokens) in enumerate(arrivals):
            if arrival == now:
                engine.add_request(f"r{i}", prompts[f"r{i}"], params(max_tokens))
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        now += 1
    for step in taken:
        prefilled = [length for _, _, length in step.chunks]
        assert len(step.decodes) + sum(prefilled) <= budget
        assert sum(prefilled) <= per_step
        assert all(length <= per_chunk for length in prefilled)
        decoding = set(step.decoding)
        assert decoding == set(step.decodes) | (decoding & set(step.preempted))
    for i, (_, _, max_tokens) in enumerate(arrivals):
        expected = expected_output(prompts[f"r{i}"], max_tokens, VOCABULARY)
        assert tokens[f"r{i}"] == expected


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("budget, per_step", [(9, 9), (64, 1), (64, 3)])
def test_more_decodes_than_tokens_for_prompts(stage: str, budget: int, per_step: int) -> None:
    """A prompt creeps forward with what the decodes leave of the budget, or with the smaller one of
    its own; the decodes do not notice."""
    engine = fake_engine(
        stage, budget=budget, max_num_sequences=9, max_prefill_tokens_per_step=per_step
    )
    for i in range(8):
        engine.add_request(f"d{i}", [i], params(40))
    while len(engine.queues.by_phase()[0]) < 8:
        engine.step()
    taken = watch(engine)
    engine.add_request("p", distinct(9, 12), params(3))
    tokens = run_to_end(engine)
    room = min(per_step, budget - 8)
    assert chunks_of(taken, "p") == [(start, room) for start in range(0, 12, room)]
    decodes = [f"d{i}" for i in range(8)]
    assert all(step.decodes[:8] == decodes for step in taken[:20])
    assert tokens["p"] == expected_output(distinct(9, 12), 3, VOCABULARY)


def test_limits_are_clamped_to_the_budget() -> None:
    for stage in STAGES:
        config = steps.load(stage).Config
        assert config().max_prefill_tokens_per_step == 8192
        assert config().max_prefill_chunk_size == 4096
        clamped = config(max_num_batched_tokens=100)
        assert clamped.max_prefill_tokens_per_step == clamped.max_prefill_chunk_size == 100
        clamped = config(max_prefill_tokens_per_step=50)
        assert (clamped.max_prefill_tokens_per_step, clamped.max_prefill_chunk_size) == (50, 50)
        with pytest.raises(ValueError, match="max_prefill_chunk_size"):
            config(max_prefill_chunk_size=0)


# The order


def test_first_come_first_served() -> None:
    """Older prompts first, and several cut in one step; the decode that overtakes by being short
    takes its token off the top."""
    engine = fake_engine(CHUNKED, budget=16, max_prefill_chunk_size=8)
    taken = watch(engine)
    for i, (name, length) in enumerate([("a", 20), ("b", 3), ("c", 20), ("d", 2)]):
        engine.add_request(name, distinct(i, length), params(3))
    for _ in range(4):
        engine.step()
    assert [step.chunks for step in taken] == [
        [("a", 0, 8), ("b", 0, 3), ("c", 0, 5)],
        [("a", 8, 8), ("c", 5, 7)],  # b's token is the sixteenth
        [("a", 16, 4), ("c", 12, 8), ("d", 0, 2)],
        [],
    ]
    assert [step.decodes for step in taken] == [[], ["b"], ["b"], ["a", "c", "d"]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_prompt_that_does_not_fit_is_not_overtaken(stage: str) -> None:
    engine = fake_engine(stage, num_blocks=10, block_size=2)
    engine.add_request("running", distinct(0, 4), params(10))
    engine.step()
    taken = watch(engine)
    engine.add_request("large", distinct(1, 16), params(2))
    engine.add_request("small", distinct(2, 2), params(2))
    run_to_end(engine)
    started = [name for step in taken for name, start, _ in step.chunks if start == 0]
    assert started == ["large", "small"]


# Chunks


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_chunk_boundaries_at_every_offset(stage: str, block_size: int) -> None:
    """Single tokens, chunks that end inside, at and beyond a block. Only the last one samples."""
    length = 13
    prompt = distinct(7, length)
    for chunk in range(1, length + 2):
        engine = fake_engine(stage, block_size=block_size, max_prefill_chunk_size=chunk)
        taken = watch(engine)
        engine.add_request("a", prompt, params(5))
        cuts = [(start, min(chunk, length - start)) for start in range(0, length, chunk)]
        for start, tokens in cuts:
            outputs = engine.step()
            assert len(outputs) == (start + tokens == length)
            (sequence,) = engine.queues.running
            assert sequence.num_computed_tokens >= start + tokens
            held = int(engine.table.num_blocks[sequence.slot])
            needed = -(-sequence.num_computed_tokens // block_size)
            assert held == needed, "blocks come chunk by chunk"
        assert chunks_of(taken, "a") == cuts
        assert outputs[0].new_token_ids + run_to_end(engine)["a"] == expected_output(
            prompt, 5, VOCABULARY
        )


@pytest.mark.parametrize("stage", STAGES)
def test_two_cuts_at_every_pair_of_offsets(stage: str) -> None:
    """Whoever runs beside it: the budget that is left cuts a prompt at uneven places."""
    prompt = distinct(7, 9)
    for first in range(1, 8):
        engine = fake_engine(stage, block_size=2, budget=10, max_prefill_tokens_per_step=10)
        taken = watch(engine)
        engine.add_request("before", distinct(1, 10 - first), params(1))
        engine.add_request("a", prompt, params(4))
        tokens = run_to_end(engine)
        assert chunks_of(taken, "a") == [(0, first), (first, 9 - first)]
        assert tokens["a"] == expected_output(prompt, 4, VOCABULARY)


@pytest.mark.parametrize("stage", STAGES)
def test_a_prefix_hit_shortens_the_first_chunk(stage: str) -> None:
    engine = fake_engine(stage, block_size=4, max_prefill_chunk_size=6)
    engine.add_request("a", distinct(1, 10), params(1))
    run_to_end(engine)
    taken = watch(engine)
    engine.add_request("b", [*distinct(1, 8), *distinct(2, 8)], params(1))
    run_to_end(engine)
    assert chunks_of(taken, "b") == [(8, 6), (14, 2)]


@pytest.mark.parametrize("stage", STAGES)
def test_completions_of_a_cut_prompt_wait_for_it(stage: str) -> None:
    engine = fake_engine(stage, block_size=4, max_prefill_chunk_size=6)
    taken = watch(engine)
    engine.add_request("a", distinct(1, 21), params(1).model_copy(update={"n": 4}))
    engine.add_request("b", distinct(2, 3), params(1))
    tokens = run_to_end(engine)
    assert chunks_of(taken, "a") == [(0, 6), (6, 6), (12, 6), (18, 3)]
    assert [step.chunks for step in taken[4:]] == [
        [("a#1", 20, 1), ("a#2", 20, 1), ("a#3", 20, 1), ("b", 0, 3)]
    ]
    assert len({tuple(got) for name, got in tokens.items() if name != "b"}) == 1


# Memory


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_preemption_in_the_middle_of_a_prompt(stage: str, caching: bool) -> None:
    """The decode is older and grows; the prompt gives way, and starts again later."""
    engine = fake_engine(
        stage,
        block_size=2,
        num_blocks=13,
        max_prefill_chunk_size=1,
        enable_prefix_caching=caching,
    )
    taken = watch(engine)
    engine.add_request("d", distinct(1, 4), params(20))
    begun = [token for _ in range(5) for output in engine.step() for token in output.new_token_ids]
    engine.add_request("p", distinct(2, 12), params(6))
    tokens = run_to_end(engine)
    (preempted,) = [i for i, step in enumerate(taken) if "p" in step.preempted]
    done = chunks_of(taken[:preempted], "p")
    assert 0 < len(done) < 12, "it was not in the middle"
    assert chunks_of(taken[preempted:], "p")[-1] == (11, 1)
    assert begun + tokens["d"] == expected_output(distinct(1, 4), 20, VOCABULARY)
    assert tokens["p"] == expected_output(distinct(2, 12), 6, VOCABULARY)


@pytest.mark.parametrize("stage", STAGES)
def test_half_computed_prompts_that_hold_all_blocks(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they came to it (here admission believes that everything fits), the older one goes
    on and the newer one starts again: no step is empty."""
    engine = fake_engine(
        stage, block_size=2, num_blocks=6, max_prefill_chunk_size=2, enable_prefix_caching=False
    )
    manager = engine.block_manager
    monkeypatch.setattr(manager, "can_admit", lambda *args: manager.num_free_blocks > 0)
    taken = watch(engine)
    for i, name in enumerate("abc"):
        engine.add_request(name, distinct(i, 10), params(2))
    tokens = run_to_end(engine)
    assert [step.preempted for step in taken[:3]] == [[], [], ["c"]]
    assert "b" in [name for step in taken for name in step.preempted]
    assert "a" not in [name for step in taken for name in step.preempted]
    for step in taken:  # whoever gave its blocks back is not let in again at once
        assert not set(step.preempted) & {name for name, _, _ in step.chunks}
    for i, name in enumerate("abc"):
        assert tokens[name] == expected_output(distinct(i, 10), 2, VOCABULARY)


@pytest.mark.parametrize("stage", STAGES)
def test_decodes_that_need_no_block_soon_do_not_block_admission(stage: str) -> None:
    """Six decodes, two free blocks: a block for each decode would keep the prompt out for long."""
    engine = fake_engine(stage, block_size=16, num_blocks=8)
    for i in range(6):
        engine.add_request(f"d{i}", distinct(i, 3), params(13))
    while len(engine.queues.by_phase()[0]) < 6:
        engine.step()
    taken = watch(engine)
    engine.add_request("p", distinct(7, 32), params(1))
    run_to_end(engine)
    started = next(i for i, step in enumerate(taken) if step.chunks)
    assert started <= 3, "no longer than stage 02 defers"
    assert not any(step.preempted for step in taken)


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_that_decodes_need_soon_are_not_given_away(stage: str) -> None:
    """The prompt fits now, but one step later a decode would take it out again."""
    engine = fake_engine(stage, block_size=4, num_blocks=4)
    taken = watch(engine)
    engine.add_request("d", distinct(1, 7), params(5))
    engine.step()
    engine.add_request("p", distinct(2, 8), params(1))
    run_to_end(engine)
    assert not any(step.preempted for step in taken)
    # The decode's last token needs no block, so that the prompt need not wait for its end.
    assert chunks_of(taken[:5], "p") == []
    assert chunks_of(taken, "p") == [(0, 8)]


@pytest.mark.parametrize("steps_between", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_that_begun_prompts_still_need_are_not_given_away(
    stage: str, steps_between: int
) -> None:
    """Either prompt fits, both do not; of the first only a little has been allocated."""
    engine = fake_engine(stage, block_size=2, num_blocks=10, max_prefill_chunk_size=2)
    taken = watch(engine)
    engine.add_request("a", distinct(1, 12), params(1))
    for _ in range(steps_between):
        engine.step()
    engine.add_request("b", distinct(2, 12), params(1))
    run_to_end(engine)
    assert not any(step.preempted for step in taken)
    assert [len(step.chunks) for step in taken] == [1] * 12


# The two halves of a step


def test_unified_steps_use_one_kernel() -> None:
    """Rows in order of admission, decodes among the chunks; the decode kernel for decodes alone."""
    engine = fake_engine(CHUNKED, budget=8, max_prefill_chunk_size=4)
    taken = watch(engine)
    engine.add_request("long", distinct(1, 12), params(2))
    engine.add_request("short", distinct(2, 4), params(6))
    run_to_end(engine)
    assert taken[1].order == ["long", "short"]
    assert taken[1].decodes == ["short"]
    mixed = [step for step in taken if step.chunks]
    assert {step.num_decode_rows for step in mixed} == {0}
    assert all(s.num_decode_rows == len(s.decodes) for s in taken if not s.chunks)


def separate_engine() -> tuple[Any, list[Step]]:
    """A decode runs, and a prompt of three chunks has arrived."""
    engine = fake_engine(CHUNKED, mixed_batch="separate", max_prefill_chunk_size=4)
    engine.add_request("d", distinct(1, 2), params(8))
    engine.step()
    taken = watch(engine)
    engine.add_request("p", distinct(2, 12), params(2))
    return engine, taken


def test_separate_steps_deliver_decodes_before_the_prefill_runs() -> None:
    engine, taken = separate_engine()
    tokens = [[o.request_id for o in engine.step()] for _ in range(6)]
    assert [(s.decodes, s.chunks) for s in taken] == [
        (["d"], []),
        ([], [("p", 0, 4)]),
        (["d"], []),
        ([], [("p", 4, 4)]),
        (["d"], []),
        ([], [("p", 8, 4)]),
    ]
    assert tokens == [["d"], [], ["d"], [], ["d"], ["p"]]
    assert [s.num_decode_rows for s in taken] == [1, 0] * 3
    run_to_end(engine)
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks


@pytest.mark.parametrize("others", [0, 1])
def test_abort_between_the_halves_of_a_step(others: int) -> None:
    engine, taken = separate_engine()
    for i in range(others):
        engine.add_request(f"o{i}", distinct(5 + i, 3), params(2))
    engine.step()
    engine.abort_request("p")
    engine.add_request("new", distinct(3, 3), params(2))
    tokens = run_to_end(engine)
    assert "p" not in tokens
    assert tokens["new"] == expected_output(distinct(3, 3), 2, VOCABULARY)
    # The rest of the second half runs; without a rest, the next step is a new one.
    assert (taken[1].decodes, taken[1].chunks) == (([], [("o0", 0, 3)]) if others else (["d"], []))
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks


# On the real model


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 69])
def test_prompt_logprobs_of_a_cut_prompt(
    references: Callable[[str], Reference], stage: str, chunk: int
) -> None:
    reference, prompt = references("base"), prompt_of(random.Random(1), 70)
    module = steps.load(stage)
    config = module.Config(
        model=str(reference.directory),
        num_kvcache_blocks=40,
        max_model_length=128,
        max_prefill_chunk_size=chunk,
    )
    engine = module.Engine(config)
    scored = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=3, ignore_eos=True)
    outputs = drive(engine, {"a": (prompt, scored), "b": (prompt[:40], params(9))})["a", 0]
    (logprobs,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(logprobs) == len(prompt)
    expected = reference.logprobs(prompt)
    for position, entry in enumerate(logprobs[1:], start=1):
        assert entry is not None
        got = entry[prompt[position]].logprob
        assert got == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
    reference.assert_greedy(prompt, tokens_of(outputs))
    engine.close()
