"""Random schedules on the fake model, for every stage: whatever comes, the pool stays whole, every
step makes progress within its budget, and every request ends with exactly its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from shared import SamplingParams
from shared.engine.batch import Batch
from shared.engine.slots import Limits
from tests.fakes import VOCABULARY, FakeHandle, FakeRunner, cuts_prompts, expected_output


@dataclass(frozen=True)
class Request:
    arrival: int  # in steps
    prompt: list[int]
    max_tokens: int
    n: int
    stop_token: int | None
    aborted_after: int | None  # steps after its arrival


@st.composite
def requests(draw: st.DrawFn, longest: int) -> list[Request]:
    # Few distinct prefixes over a tiny alphabet, so that hits, twins and partial matches abound.
    prefixes = draw(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=3))
    drawn = []
    for _ in range(draw(st.integers(1, 10))):
        tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
        drawn.append(
            Request(
                arrival=draw(st.integers(0, 20)),
                prompt=(draw(st.sampled_from(prefixes)) + tail)[: longest - 1],
                max_tokens=draw(st.integers(0, 20)),
                n=draw(st.integers(1, 3)),
                stop_token=draw(st.none() | st.integers(0, VOCABULARY - 1)),
                aborted_after=draw(st.none() | st.integers(0, 12)),
            )
        )
    return drawn


@st.composite
def limits(draw: st.DrawFn, smallest_budget: int) -> Limits:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_blocks = draw(st.integers(-(-24 // block_size), 60))
    budget = draw(st.integers(smallest_budget, 60))
    return Limits(
        vocab_size=VOCABULARY,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_length=min(draw(st.integers(24, 60)), num_blocks * block_size),
        max_num_sequences=min(draw(st.integers(1, 6)), budget),
        max_num_batched_tokens=budget,
    )


# Options that only some stages have.
OPTIONS: dict[str, st.SearchStrategy[object]] = {
    "max_prefill_tokens_per_step": st.integers(1, 60),
    "max_prefill_chunk_size": st.integers(1, 60),
    "mixed_batch": st.sampled_from(["unified", "separate"]),
    "max_prefill_defer": st.integers(0, 5),
}


@pytest.mark.parametrize("stage", steps.engines())
@given(data=st.data(), caching=st.booleans())
def test_any_schedule(stage: str, data: st.DataObject, caching: bool) -> None:
    module = steps.load(stage)
    # A stage that cannot cut would refuse most of these prompts under a smaller budget.
    lim = data.draw(limits(smallest_budget=1 if cuts_prompts(module) else 24), label="limits")
    todo = data.draw(requests(lim.max_model_length), label="requests")
    options = data.draw(
        st.fixed_dictionaries(
            {name: drawn for name, drawn in OPTIONS.items() if name in module.Config.model_fields}
        ),
        label="options",
    )
    config = module.Config(
        model="qwen3-0.6b",
        load_format="dummy",
        max_num_batched_tokens=lim.max_num_batched_tokens,
        max_num_sequences=lim.max_num_sequences,
        enable_prefix_caching=caching,
        **options,
    )
    runner = FakeRunner(lim)
    engine = module.Engine(config, runner=runner)
    outputs: dict[tuple[int, int], list[int]] = {}
    reasons: dict[tuple[int, int], str] = {}
    aborted: set[int] = set()

    last_event = max(r.arrival + (r.aborted_after or 0) for r in todo)
    now = 0
    while now <= last_event or engine.has_unfinished_requests():
        for number, request in enumerate(todo):
            if request.arrival == now:
                stop = () if request.stop_token is None else (request.stop_token,)
                params = SamplingParams(
                    temperature=0,
                    max_tokens=request.max_tokens,
                    n=request.n,
                    stop_token_ids=stop,
                    ignore_eos=True,
                    prompt_logprobs=1 if request.max_tokens == 0 else None,
                )
                engine.add_request(str(number), request.prompt, params)
            if request.aborted_after is not None and now == request.arrival + request.aborted_after:
                engine.abort_request(str(number))
                aborted.add(number)
        steps_run = runner.num_results
        busy = engine.has_unfinished_requests()
        for output in engine.step():
            key = (int(output.request_id), output.index)
            assert key not in reasons, "output after the end"
            assert key[0] not in aborted, "output after an abort"
            outputs.setdefault(key, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[key] = output.finish_reason
        engine.block_manager.check()
        assert runner.num_results >= steps_run + busy, "a step without progress"
        if busy:
            assert runner.batches[-1].num_tokens <= lim.max_num_batched_tokens
            assert runner.batches[-1].num_rows <= lim.max_num_sequences
        now += 1
        assert now < 5000, "no end in sight"

    for number, request in enumerate(todo):
        room = lim.max_model_length - len(request.prompt)
        expected = expected_output(request.prompt, min(request.max_tokens, room), VOCABULARY)
        reason = "length"
        if request.stop_token is not None and request.stop_token in expected:
            expected = expected[: expected.index(request.stop_token) + 1]
            reason = "stop"
        for index in range(request.n):
            got = outputs.get((number, index), [])
            if (number, index) in reasons:
                assert (got, reasons[number, index]) == (expected, reason)
            else:
                assert number in aborted
                assert got == expected[: len(got)]
    assert engine.block_manager.num_free_blocks == lim.num_blocks, "blocks are lost"
    assert engine.table.num_free == lim.max_num_sequences, "slots are lost"
    engine.close()


@pytest.mark.parametrize("stage", steps.engines())
def test_a_failing_step_ends_its_requests_and_no_others(stage: str) -> None:
    module = steps.load(stage)
    limits = Limits(VOCABULARY, 2, 40, 40, 2, 40)
    config = module.Config(
        model="qwen3-0.6b", load_format="dummy", max_num_sequences=2, max_num_batched_tokens=40
    )
    runner = FakeRunner(limits)
    engine = module.Engine(config, runner=runner)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add_request(name, [1, 2, 3], params)
    engine.step()
    submit = runner.submit

    def fail(batch: Batch) -> FakeHandle:
        runner.submit = submit  # type: ignore[method-assign]
        raise MemoryError("no room")

    runner.submit = fail  # type: ignore[method-assign]
    failed = [output for output in engine.step() if output.finish_reason is not None]
    assert {output.finish_reason for output in failed} == {"abort"}
    assert {output.error for output in failed} == {"MemoryError: no room"}
    engine.block_manager.check()
    rest = [name for name in ("a", "b", "c") if name not in {o.request_id for o in failed}]
    tokens: dict[str, list[int]] = {name: [] for name in rest}
    engine.add_request("d", [1, 2, 3], params)
    tokens["d"] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    assert rest == ["c"]
    assert all(got == expected_output([1, 2, 3], 5, VOCABULARY) for got in tokens.values())
    assert engine.block_manager.num_free_blocks == limits.num_blocks


@pytest.mark.parametrize("stage", steps.engines())
def test_completions_of_one_request_share_their_prompt(stage: str) -> None:
    """The prompt of n completions is computed once, and n times the last token; all completions
    but the first start together."""
    module = steps.load(stage)
    limits = Limits(VOCABULARY, 4, 100, 100, 8, 100)
    config = module.Config(
        model="qwen3-0.6b", load_format="dummy", max_num_sequences=8, max_num_batched_tokens=100
    )
    runner = FakeRunner(limits)
    engine = module.Engine(config, runner=runner)
    prompt = [n % 7 for n in range(41)]
    engine.add_request("a", prompt, SamplingParams(temperature=0, n=5, max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    prefilled = sum(
        int((~b.decoding[np.repeat(np.arange(b.num_rows), np.diff(b.cu_seqlens_q))]).sum())
        for b in runner.batches
    )
    assert prefilled == 41 + 4
    assert sum(not b.decoding.all() for b in runner.batches) == 2


@pytest.mark.parametrize(
    "stage", [s for s in steps.engines() if "mixed_batch" in steps.load(s).Config.model_fields]
)
def test_a_failing_step_takes_no_blocks_of_others_along(stage: str) -> None:
    """With mixed_batch=separate, the prompts that come next take their blocks when the decodes
    before them are scheduled. When that step fails, nobody else must suffer."""
    module = steps.load(stage)
    config = module.Config(
        model="qwen3-0.6b",
        load_format="dummy",
        max_num_sequences=4,
        max_num_batched_tokens=40,
        mixed_batch="separate",
    )
    engine = module.Engine(config, runner=FakeRunner(Limits(VOCABULARY, 2, 40, 40, 4, 40)))
    submit = engine.runner.submit

    def failing(batch: Batch) -> FakeHandle:
        if batch.decoding.any() and len(engine.queues.running) > 1:
            engine.runner.submit = submit
            raise MemoryError("no room")
        handle: FakeHandle = submit(batch)
        return handle

    engine.runner.submit = failing
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("decode", [1, 2, 3], params)
    engine.step()
    engine.add_request("prompt", [4, 5, 6, 7, 8], params)
    tokens: dict[str, list[int]] = {"decode": [], "prompt": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    assert len(tokens["decode"]) < 8
    assert tokens["prompt"] == expected_output([4, 5, 6, 7, 8], 8, VOCABULARY)
