"""Decodes in front, prompts behind: the order of a batch, and the steps that have no prompts."""

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
from tests.fakes import VOCABULARY, Step, expected_output, fake_engine, run_to_end, watch
from tests.reference import Reference

# All whose mixed batches have decodes in front.
STAGES = [name for name in steps.engines() if steps.load(name).Engine.decodes_in_front]
pytestmark = pytest.mark.parametrize("stage", STAGES)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


# The order


@given(data=st.data())
def test_decodes_stand_in_front(stage: str, data: st.DataObject) -> None:
    engine = fake_engine(
        stage,
        budget=data.draw(st.integers(2, 16), label="budget"),
        max_prefill_chunk_size=data.draw(st.integers(1, 8), label="chunk"),
        max_prefill_defer=data.draw(st.integers(0, 3), label="defer"),
    )
    taken = watch(engine)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6), label="lengths")
    for i, length in enumerate(lengths):
        engine.add_request(f"r{i}", [i] * length, params(6))
    tokens = run_to_end(engine)
    for step in taken:
        assert step.order == step.decodes + [name for name, _, _ in step.chunks]
        assert step.num_decode_rows == len(step.decodes)
    for i, length in enumerate(lengths):
        assert tokens[f"r{i}"] == expected_output([i] * length, 6, VOCABULARY)


def test_order_of_admission_is_kept_on_either_side(stage: str) -> None:
    engine = fake_engine(stage, budget=10, max_prefill_chunk_size=3, max_prefill_defer=0)
    taken = watch(engine)
    for i, (name, length) in enumerate([("long", 20), ("b", 2), ("wide", 12), ("d", 1)]):
        engine.add_request(name, [i] * length, params(9))
    for _ in range(3):
        engine.step()
    assert [step.order for step in taken[:3]] == [
        ["long", "b", "wide", "d"],
        ["b", "d", "long", "wide"],
        ["b", "d", "long", "wide"],
    ]
    assert [step.num_decode_rows for step in taken[:3]] == [0, 2, 2]


def any_params(rng: random.Random) -> SamplingParams:
    """Whatever a row can carry, and a seed, so that the row's tokens are known beforehand."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 0, 5, 30]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logit_bias=rng.choice([None, {rng.randrange(128): 5.0}]),
        logprobs=rng.choice([None, 0, 3]),
        min_tokens=rng.choice([0, 4]),
        max_tokens=rng.randrange(4, 20),
        seed=rng.randrange(1 << 40),
        ignore_eos=rng.choice([True, False]),
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_row_keeps_its_own_sampling(
    references: Callable[[str], Reference], seed: int, stage: str
) -> None:
    """Tokens and log probabilities of each request are those it gets alone, in stage 00."""
    reference, rng = references("base"), random.Random(seed)
    requests = {
        f"r{i}": (prompt_of(rng, rng.choice([2, 5, 11, 40, 70])), any_params(rng))
        for i in range(12)
    }

    def make(stage: str, **options: Any) -> Any:
        module = steps.load(stage)
        config = {"num_kvcache_blocks": 40, "max_model_length": 128, "kvcache_block_size": 16}
        return module.Engine(module.Config(model=str(reference.directory), **config, **options))

    baseline = make("00_baseline")
    alone = {name: drive(baseline, {name: request})[name, 0] for name, request in requests.items()}
    baseline.close()
    engine = make(stage, max_num_batched_tokens=32, max_num_sequences=7, max_prefill_chunk_size=9)
    taken, admitted = watch(engine), Admissions(engine)
    mixed = drive(engine, requests)
    assert any(admitted.permuted(step) for step in taken), "the test permutes nothing"
    engine.close()
    for name in requests:
        assert tokens_of(mixed[name, 0]) == tokens_of(alone[name])
        for ours, its_own in zip(mixed[name, 0], alone[name], strict=True):
            assert ours.finish_reason == its_own.finish_reason
            assert (ours.logprobs is None) == (its_own.logprobs is None)
            for got, want in zip(ours.logprobs or [], its_own.logprobs or [], strict=True):
                assert got.keys() == want.keys()
                for token, entry in got.items():
                    assert entry.logprob == pytest.approx(want[token].logprob, abs=1e-3)


class Admissions:
    """In which order sequences were admitted."""

    def __init__(self, engine: Any) -> None:
        self.names: list[str] = []
        admit = engine.queues.admit

        def watched(prefix: list[int]) -> Any:
            sequence = admit(prefix)
            self.names.append(sequence.name)
            return sequence

        engine.queues.admit = watched

    def permuted(self, step: Step) -> bool:
        return step.order != sorted(step.order, key=self.names.index)


# Steps without prompts


def decoding_engine(stage: str, **options: Any) -> tuple[Any, list[Step]]:
    """One decode runs."""
    engine = fake_engine(stage, **options)
    engine.add_request("d", [1, 2], params(30))
    engine.step()
    return engine, watch(engine)


@pytest.mark.parametrize("defer", [0, 1, 3, 7])
def test_prompts_wait_for_a_few_steps_and_start_together(stage: str, defer: int) -> None:
    engine, taken = decoding_engine(stage, max_prefill_defer=defer)
    for i in range(min(defer + 1, 4)):  # one more arrives before every step
        engine.add_request(f"p{i}", [3 + i] * 5, params(2))
        engine.step()
    run_to_end(engine)
    started = [i for i, step in enumerate(taken) if step.chunks]
    assert started == [defer]
    assert [name for name, _, _ in taken[defer].chunks] == [
        f"p{i}" for i in range(min(defer + 1, 4))
    ]
    assert all(step.num_decode_rows == len(step.order) for step in taken[:defer])


def test_nothing_waits_when_nothing_decodes(stage: str) -> None:
    engine = fake_engine(stage, max_prefill_defer=5)
    taken = watch(engine)
    for i in range(3):
        engine.add_request(f"r{i}", [i] * 4, params(1))
        engine.step()
    assert [len(step.chunks) for step in taken] == [1, 1, 1]


def test_prompts_that_fill_a_step_do_not_wait(stage: str) -> None:
    engine, taken = decoding_engine(stage, max_prefill_defer=5, max_prefill_tokens_per_step=10)
    engine.add_request("a", [3] * 6, params(1))
    engine.step()
    assert taken[0].chunks == []
    engine.add_request("b", [4] * 6, params(1))
    engine.step()
    assert taken[1].chunks == [("a", 0, 6), ("b", 0, 4)]


def test_a_prompt_that_has_begun_goes_on(stage: str) -> None:
    """Its steps are mixed anyway, so that others may join it at once."""
    engine, taken = decoding_engine(stage, max_prefill_defer=2, max_prefill_chunk_size=4)
    engine.add_request("long", [3] * 20, params(1))
    for _ in range(3):
        engine.step()
    engine.add_request("late", [4] * 4, params(1))
    run_to_end(engine)
    chunks = [[name for name, _, _ in step.chunks] for step in taken[:7]]
    assert chunks == [[], [], ["long"], ["long", "late"], ["long"], ["long"], ["long"]]


def test_a_stream_of_prompts_is_never_starved(stage: str) -> None:
    """One prompt per step, for long: none waits for more than max_prefill_defer steps."""
    engine, taken = decoding_engine(stage, max_prefill_defer=3)
    for i in range(24):
        engine.add_request(f"p{i}", [i, 5, 5], params(1))
        engine.step()
    run_to_end(engine)
    started = {name: i for i, step in enumerate(taken) for name, _, _ in step.chunks}
    assert list(started) == [f"p{i}" for i in range(24)]
    assert [started[f"p{i}"] for i in range(24)] == [3 + i // 4 * 4 for i in range(24)]
