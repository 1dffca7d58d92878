"""Requests and options at the edge: each is refused by name or works, and disturbs nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import steps
from shared import EngineConfig, SamplingParams
from shared.engine.slots import Limits, SlotTable
from shared.engine.trace import read_trace
from tests.fakes import VOCABULARY, expected_output, fake_engine, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LARGEST = 2**31 - 1


@pytest.mark.parametrize("stage", steps.engines())
def test_the_largest_numbers_are_only_numbers(stage: str) -> None:
    engine = fake_engine(stage, num_blocks=8)
    huge = SamplingParams(
        temperature=0, min_tokens=LARGEST, max_tokens=LARGEST, top_k=LARGEST, seed=2**63 - 1
    )
    engine.add_request("huge", [1, 2], huge)
    engine.add_request("small", [3, 4], GREEDY)
    tokens = run_to_end(engine)
    assert len(tokens["huge"]) == 30
    assert tokens["small"] == expected_output([3, 4], 5, VOCABULARY)


@pytest.mark.parametrize(
    "field",
    [
        {"max_num_batched_tokens": 2**31},
        {"max_num_sequences": 2**63},
        {"num_kvcache_blocks": 2**64},
        {"kvcache_block_size": 10**400},
        {"max_model_length": 2**31},
    ],
)
def test_numbers_beyond_the_device_are_refused_by_name(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        EngineConfig(**field)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"max_num_batched_tokens": LARGEST}, "max_num_batched_tokens"),
        ({"num_kvcache_blocks": LARGEST}, "num_kvcache_blocks"),
        ({"kvcache_block_size": LARGEST}, "kvcache_block_size"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_by_name(
    options: dict[str, int], named: str
) -> None:
    module = steps.load("00_baseline")
    with pytest.raises(ValueError, match=named):
        module.Engine(module.Config(device="cpu", **options))


@pytest.mark.parametrize("stage", steps.engines())
@pytest.mark.parametrize(
    "request_id, prompt, params, named",
    [
        (5, [1], GREEDY, "request_id"),
        ("\ud800", [1], GREEDY, "request_id"),
        ("a", None, GREEDY, "prompt_token_ids"),
        ("a", {1, 2}, GREEDY, "prompt_token_ids"),
        ("a", b"ab", GREEDY, "prompt_token_ids"),
        ("a", "ab", GREEDY, "prompt_token_ids"),
        ("a", [10**30], GREEDY, "prompt_token_ids"),
        ("a", [1], {}, "params"),
        ("a", [1], SamplingParams, "params"),
    ],
)
def test_wrong_kinds_are_refused_by_name(
    stage: str, request_id: Any, prompt: Any, params: Any, named: str
) -> None:
    engine = fake_engine(stage)
    with pytest.raises(ValueError, match=named):
        engine.add_request(request_id, prompt, params)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("stage", steps.engines())
def test_a_closed_engine_says_so(stage: str) -> None:
    engine = fake_engine(stage)
    engine.add_request("a", [1, 2], GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    for use in (engine.step, lambda: engine.add_request("b", [1], GREEDY)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    engine.abort_request("a")


@pytest.mark.parametrize("stage", steps.engines())
def test_a_full_disk_ends_the_trace_and_nothing_else(stage: str) -> None:
    engine = fake_engine(stage, trace="/dev/full")
    engine.add_request("a", [1, 2], GREEDY)
    assert run_to_end(engine)["a"] == expected_output([1, 2], 5, VOCABULARY)
    engine.close()


@pytest.mark.parametrize("path", ["", "/dev/null/file", "a\0b"])
def test_a_trace_that_cannot_be_opened_is_refused_by_name(path: str) -> None:
    with pytest.raises(ValueError, match="trace"):
        fake_engine("00_baseline", trace=path)


@pytest.mark.parametrize("stage", steps.engines())
def test_a_trace_accounts_for_every_token_and_block(stage: str, tmp_path: Any) -> None:
    file = tmp_path / "steps.jsonl"
    engine = fake_engine(stage, num_blocks=12, trace=str(file))
    prompts = {"a": [1] * 17, "b": [1] * 17, "c": [2] * 9}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY.model_copy(update={"n": 2}))
    tokens = run_to_end(engine)
    engine.close()
    records = read_trace(file)
    assert [record.step for record in records] == list(range(len(records)))
    computed: dict[str, int] = {}
    for record in records:
        for name in record.decodes:
            computed[name] = computed.get(name, 0) + 1
        for name, start, length in record.prefills:
            computed[name] = start + length
    # The last token's KV is never needed.
    for name, sampled in tokens.items():
        assert computed[name] == len(prompts[name.split("#")[0]]) + len(sampled) - 1
    assert records[-1].free_blocks == 12
    assert records[-1].running == records[-1].waiting == []


def test_blocks_are_told_to_the_device_with_the_first_step_of_their_slot() -> None:
    limits = Limits(
        vocab_size=9,
        block_size=4,
        num_blocks=20,
        max_model_length=12,
        max_num_sequences=4,
        max_num_batched_tokens=9,
    )
    table = SlotTable(limits)

    def taken(*slots: int) -> list[list[int]]:
        return sorted(table.take_block_updates(np.array(slots, np.intp)).tolist())

    table.append_blocks(0, [7])
    table.append_blocks(2, [8, 9])
    table.append_block_each(np.array([0, 1], np.intp), [3, 4])
    assert taken(3) == []
    assert taken(2, 0) == [[0, 7], [1, 3], [6, 8], [7, 9]]
    assert taken(2, 0) == []
    table.num_blocks[1] = 0  # slot 1 has another owner before it was in a step
    table.append_blocks(1, [5, 6])
    assert taken(0, 1, 2, 3) == [[3, 5], [4, 6]]
    assert not table.block_updates
