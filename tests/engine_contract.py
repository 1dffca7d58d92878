"""What every stage's engine must do, whatever its policy. Subclass with a `stage`; the tests use
nothing but the engine protocol and the pool's own consistency check."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

import steps
from shared import SamplingParams
from shared.outputs import StepOutput
from tests.reference import VARIANTS, Reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, 128) for _ in range(length)]


def requests_of_all_kinds(rng: random.Random) -> dict[str, tuple[list[int], SamplingParams]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "seed": 7, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0, "logit_bias": {126: 5.0}, "min_tokens": 4},
    ]
    return {
        f"r{number}": (
            prompt_of(rng, length),
            SamplingParams(**kinds[number % len(kinds)], max_tokens=12, ignore_eos=True),
        )
        for number, length in enumerate([1, 16, 17, 33, 90, 5, 40, 64, 2, 31, 70, 8])
    }


def drive(
    engine: Any,
    requests: dict[str, tuple[list[int], SamplingParams]],
    between: Callable[[int], None] = lambda step: None,
) -> dict[tuple[str, int], list[StepOutput]]:
    """Add all, step to the end, checking the pool on the way; outputs by (request, index)."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    outputs: dict[tuple[str, int], list[StepOutput]] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.block_manager.check()
        step += 1
        assert step < 10_000
        between(step)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def assert_idle(engine: Any) -> None:
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks
    assert engine.table.num_free == engine.limits.max_num_sequences


class EngineContract:
    stage: str

    def make_engine(self, module: ModuleType, config: Any) -> Any:
        return module.Engine(config)

    @contextmanager
    def engine(self, reference: Reference, **config: Any) -> Iterator[Any]:
        module = steps.load(self.stage)
        options = {"dtype": "float32", "max_model_length": 512, "num_kvcache_blocks": 200}
        engine = self.make_engine(
            module, module.Config(model=str(reference.directory), **{**options, **config})
        )
        try:
            yield engine
            assert_idle(engine)
        finally:
            engine.close()

    # Greedy output is transformers', token for token

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("block_size", [16, 64, 256])
    def test_greedy_batch(self, references: Any, variant: str, block_size: int) -> None:
        reference, rng = references(variant), random.Random(1)
        lengths = [1, 2, 15, 16, 17, 31, 64, 65, 200, 300]
        requests = {f"r{n}": (prompt_of(rng, n), GREEDY) for n in lengths}
        with self.engine(reference, kvcache_block_size=block_size, num_kvcache_blocks=64) as engine:
            outputs = drive(engine, requests)
        for request_id, (prompt, _) in requests.items():
            reference.assert_greedy(prompt, tokens_of(outputs[request_id, 0]))
            assert outputs[request_id, 0][-1].finish_reason == "length"

    @pytest.mark.parametrize("budget", [40, 64, 1000])
    def test_token_budgets(self, references: Any, budget: int) -> None:
        reference, rng = references("base"), random.Random(2)
        requests = {f"r{i}": (prompt_of(rng, rng.randrange(1, 40)), GREEDY) for i in range(12)}
        with self.engine(reference, max_num_batched_tokens=budget, max_num_sequences=5) as engine:
            outputs = drive(engine, requests)
        for request_id, (prompt, _) in requests.items():
            reference.assert_greedy(prompt, tokens_of(outputs[request_id, 0]))

    @pytest.mark.parametrize("budget", [1, 7, 33])
    def test_prompts_longer_than_the_budget(self, references: Any, budget: int) -> None:
        """Refused by a stage that cannot cut them; the others are served as if they fitted."""
        reference, rng = references("base"), random.Random(16)
        lengths = [budget, budget + 1, 2 * budget, 3 * budget + 2, 100]
        requests = {f"r{n}": (prompt_of(rng, n), GREEDY) for n in lengths}
        with self.engine(reference, max_num_batched_tokens=budget, max_num_sequences=4) as engine:
            if not engine.cuts_prompts:
                for request_id in [
                    r for r, (prompt, _) in requests.items() if len(prompt) > budget
                ]:
                    with pytest.raises(ValueError, match="max_num_batched_tokens"):
                        engine.add_request(request_id, *requests.pop(request_id))
            outputs = drive(engine, requests)
        for request_id, (prompt, _) in requests.items():
            got = tokens_of(outputs[request_id, 0])
            assert len(got) == 12
            reference.assert_greedy(prompt, got)

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("variant", ["base", "odd_groups_untied"])
    def test_constant_preemption(self, references: Any, variant: str, caching: bool) -> None:
        reference, rng = references(variant), random.Random(3)
        params = GREEDY.model_copy(update={"max_tokens": 40})
        requests = {f"r{i}": (prompt_of(rng, rng.randrange(5, 30)), params) for i in range(6)}
        with self.engine(
            reference,
            kvcache_block_size=4,
            num_kvcache_blocks=20,
            max_num_batched_tokens=48,
            enable_prefix_caching=caching,
        ) as engine:
            outputs = drive(engine, requests)
        for request_id, (prompt, _) in requests.items():
            got = tokens_of(outputs[request_id, 0])
            assert len(got) == 40
            reference.assert_greedy(prompt, got)

    def test_shared_prefixes_hot_and_cold(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(4)
        prefix = prompt_of(rng, 48)
        prompts = [prefix + prompt_of(rng, n) for n in (1, 2, 16, 17)]
        # Whole prompt cached, length a multiple of the block size: one token must be computed.
        prompts += [prefix, prefix[:16], prefix[:17]]
        with self.engine(reference) as engine:
            hits = []
            for wave in range(3):
                requests = {f"{wave}.{i}": (p, GREEDY) for i, p in enumerate(prompts)}
                outputs = drive(engine, requests)
                for request_id, (prompt, _) in requests.items():
                    reference.assert_greedy(prompt, tokens_of(outputs[request_id, 0]))
                hits.append([outputs[r, 0][0].num_cached_tokens for r in requests])
        assert hits[1] == hits[2] == [48, 48, 48, 64, 32, 0, 16]

    def test_same_tokens_after_another_prefix_are_no_hit(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(5)
        block = prompt_of(rng, 16)
        first, second = prompt_of(rng, 16) + block * 2, prompt_of(rng, 16) + block * 2
        with self.engine(reference) as engine:
            for name, prompt in (("a", first), ("b", second), ("c", block * 2 + [5])):
                outputs = drive(engine, {name: (prompt, GREEDY)})
                assert outputs[name, 0][0].num_cached_tokens == 0
                reference.assert_greedy(prompt, tokens_of(outputs[name, 0]))

    def test_reused_blocks_are_no_hit(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(6)
        prompts = [prompt_of(rng, 40) for _ in range(6)]
        with self.engine(reference, num_kvcache_blocks=4, max_model_length=64) as engine:
            for turn in range(18):
                prompt = prompts[rng.randrange(6)]
                outputs = drive(engine, {str(turn): (prompt, GREEDY)})
                reference.assert_greedy(prompt, tokens_of(outputs[str(turn), 0]))

    def test_aborts_at_random(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(7)
        requests = {f"r{i}": (prompt_of(rng, rng.randrange(1, 60)), GREEDY) for i in range(20)}
        aborted: set[str] = set()
        with self.engine(reference, num_kvcache_blocks=24) as engine:

            def abort_one(step: int) -> None:
                victim = f"r{rng.randrange(20)}"
                if step % 3 == 0:
                    engine.abort_request(victim)
                    engine.abort_request(victim)
                    aborted.add(victim)
                engine.abort_request("never seen")

            outputs = drive(engine, requests, abort_one)
        for request_id, (prompt, _) in requests.items():
            got = outputs.get((request_id, 0), [])
            if request_id not in aborted:
                assert got[-1].finish_reason == "length"
            if got:
                reference.assert_greedy(prompt, tokens_of(got))

    # Ends

    def test_end_of_text_and_stop_tokens(self, references: Any) -> None:
        reference = references("base")
        prompt = prompt_of(random.Random(8), 9)
        expected = reference.greedy(prompt, 12)
        stop = next(t for t in expected[3:] if t not in expected[:3])
        end = expected.index(stop) + 1
        cases = {
            "stop": GREEDY.model_copy(update={"stop_token_ids": (stop,)}),
            "late": GREEDY.model_copy(update={"stop_token_ids": (stop,), "min_tokens": 12}),
        }
        with self.engine(reference) as engine:
            outputs = drive(engine, {name: (prompt, p) for name, p in cases.items()})
        assert tokens_of(outputs["stop", 0]) == expected[:end]
        assert outputs["stop", 0][-1].finish_reason == "stop"
        assert len(tokens_of(outputs["late", 0])) == 12
        assert stop not in tokens_of(outputs["late", 0])[:11]

    def test_model_length_ends_a_sequence(self, references: Any) -> None:
        reference, prompt = references("base"), prompt_of(random.Random(9), 30)
        long = GREEDY.model_copy(update={"max_tokens": 1000})
        with self.engine(reference, max_model_length=50) as engine:
            outputs = drive(engine, {"a": (prompt, long), "b": (prompt[:1] * 49, long)})
        assert len(tokens_of(outputs["a", 0])) == 20
        assert len(tokens_of(outputs["b", 0])) == 1
        assert outputs["a", 0][-1].finish_reason == "length"
        with self.engine(reference, num_kvcache_blocks=2, kvcache_block_size=16) as engine:
            assert engine.max_model_length == 32
            outputs = drive(engine, {"a": (prompt, long)})
        reference.assert_greedy(prompt, tokens_of(outputs["a", 0]))
        assert len(tokens_of(outputs["a", 0])) == 2

    def test_smallest_engine(self, references: Any) -> None:
        reference, prompt = references("base"), [7]
        with self.engine(
            reference,
            num_kvcache_blocks=1,
            kvcache_block_size=2,
            max_num_batched_tokens=1,
            max_num_sequences=1,
        ) as engine:
            outputs = drive(engine, {"a": (prompt, GREEDY), "b": (prompt, GREEDY)})
        assert len(tokens_of(outputs["a", 0])) == len(tokens_of(outputs["b", 0])) == 1

    # Sampling

    def test_seeds_do_not_depend_on_the_batch(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(10)
        prompt = prompt_of(rng, 20)
        seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=16, ignore_eos=True)
        filtered = seeded.model_copy(update={"top_k": 20, "top_p": 0.9, "presence_penalty": 0.5})
        others = {
            f"o{i}": (
                prompt_of(rng, rng.randrange(1, 60)),
                SamplingParams(
                    temperature=rng.choice([0.0, 0.8]),
                    top_p=rng.choice([1.0, 0.8]),
                    frequency_penalty=rng.choice([0.0, 0.3]),
                    max_tokens=rng.randrange(1, 30),
                    ignore_eos=True,
                ),
            )
            for i in range(8)
        }
        for params in (seeded, filtered):
            with self.engine(reference) as engine:
                alone = tokens_of(drive(engine, {"s": (prompt, params)})["s", 0])
                crowded = drive(engine, {**others, "s": (prompt, params)})["s", 0]
                assert tokens_of(crowded) == alone
            with self.engine(reference, num_kvcache_blocks=8) as engine:
                preempted = drive(
                    engine, {"t": (prompt_of(rng, 40), seeded), "s": (prompt, params)}
                )
                assert tokens_of(preempted["s", 0]) == alone

    def test_completions_of_one_request_differ(self, references: Any) -> None:
        reference, prompt = references("base"), prompt_of(random.Random(11), 20)
        params = SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=16, ignore_eos=True)
        with self.engine(reference) as engine:
            first = drive(engine, {"a": (prompt, params)})
            again = drive(engine, {"b": (prompt, params)})
            one = drive(engine, {"c": (prompt, params.model_copy(update={"n": 1}))})
        samples = [tuple(tokens_of(first["a", index])) for index in range(5)]
        assert len(set(samples)) == 5
        assert samples == [tuple(tokens_of(again["b", index])) for index in range(5)]
        assert samples[0] == tuple(tokens_of(one["c", 0]))

    def test_one_completion_can_be_aborted(self, references: Any) -> None:
        reference, prompt = references("base"), prompt_of(random.Random(12), 20)
        with self.engine(reference) as engine:

            def abort(step: int) -> None:
                if step == 8:  # all have begun, none has ended
                    engine.abort_sequence("a", 1)
                    engine.abort_sequence("a", 1)

            params = GREEDY.model_copy(update={"n": 3, "max_tokens": 40})
            outputs = drive(engine, {"a": (prompt, params)}, abort)
        first, aborted, last = (len(tokens_of(outputs["a", index])) for index in range(3))
        assert first == last == 40
        assert 0 < aborted < 40  # an engine in another process may be some steps ahead

    # Log probabilities

    def test_logprobs_are_the_models_own(self, references: Any) -> None:
        reference, prompt = references("base"), prompt_of(random.Random(13), 20)
        params = SamplingParams(
            temperature=0.7, top_k=5, seed=3, logprobs=4, max_tokens=8, ignore_eos=True
        )
        with self.engine(reference) as engine:
            outputs = drive(engine, {"a": (prompt, params), "b": (prompt, GREEDY)})
        assert all(output.logprobs is None for output in outputs["b", 0])
        got = tokens_of(outputs["a", 0])
        expected = reference.logprobs(prompt + got)
        for step, output in enumerate(outputs["a", 0]):
            row = expected[len(prompt) - 1 + step]
            assert output.logprobs is not None
            (logprobs,) = output.logprobs
            assert next(iter(logprobs)) == got[step]
            assert set(row.topk(4).indices.tolist()) <= set(logprobs)
            for token, entry in logprobs.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
                assert entry.rank == int((row > row[token]).sum()) + 1

    @pytest.mark.parametrize("max_tokens", [0, 6])
    def test_prompt_logprobs_also_on_a_cached_prefix(
        self, references: Any, max_tokens: int
    ) -> None:
        reference, prompt = references("base"), prompt_of(random.Random(14), 70)
        scored = SamplingParams(
            temperature=0, prompt_logprobs=2, max_tokens=max_tokens, ignore_eos=True
        )
        with self.engine(reference) as engine:
            drive(engine, {"warm": (prompt, GREEDY)})
            outputs = drive(engine, {"a": (prompt, scored), "b": (prompt, GREEDY)})["a", 0]
        assert len(tokens_of(outputs)) == max_tokens
        assert outputs[-1].finish_reason == "length"
        (logprobs,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(logprobs) == len(prompt)
        assert logprobs[0] is None
        expected = reference.logprobs(prompt)
        for position, entry in enumerate(logprobs[1:], start=1):
            row, token = expected[position - 1], prompt[position]
            assert entry is not None
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert set(row.topk(2).indices.tolist()) <= set(entry)

    # Bad requests

    @pytest.mark.parametrize(
        "prompt, params, named",
        [
            ([], {}, "prompt_token_ids"),
            ([1, 128], {}, "prompt_token_ids"),
            ([1, -1], {}, "prompt_token_ids"),
            ([1, True], {}, "prompt_token_ids"),
            ([1, 2.0], {}, "prompt_token_ids"),
            ([1] * 512, {}, "max_model_length"),
            ([1], {"logit_bias": {128: 1.0}}, "logit_bias"),
            ([1], {"stop_token_ids": [500]}, "stop_token_ids"),
        ],
    )
    def test_a_bad_request_disturbs_nobody(
        self, references: Any, prompt: list[Any], params: dict[str, Any], named: str
    ) -> None:
        reference, good = references("base"), prompt_of(random.Random(15), 20)
        with self.engine(reference) as engine:

            def intrude(step: int) -> None:
                if step == 2:
                    with pytest.raises(ValueError, match=named):
                        engine.add_request("bad", prompt, SamplingParams(**params))

            outputs = drive(engine, {"good": (good, GREEDY)}, intrude)
        reference.assert_greedy(good, tokens_of(outputs["good", 0]))
        assert outputs.keys() == {("good", 0)}

    def test_a_request_id_in_use_is_refused(self, references: Any) -> None:
        with self.engine(references("base")) as engine:
            engine.add_request("a", [1, 2], GREEDY)
            with pytest.raises(ValueError, match="request_id"):
                engine.add_request("a", [1, 2], GREEDY)
            engine.abort_request("a")
            drive(engine, {"a": ([1, 2], GREEDY)})
