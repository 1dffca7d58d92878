"""The bundled model as a user meets it: text in, text out, and transformers says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import steps
from shared import SamplingParams
from shared.models.hub import BUNDLED_CHECKPOINT
from tests.reference import Reference

CHAT = [{"role": "user", "content": "Tell me about love."}]


@pytest.fixture(scope="module", params=steps.engines())
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    with steps.load(request.param).LLM(num_kvcache_blocks=200, dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(BUNDLED_CHECKPOINT)


def test_greedy_text_is_that_of_transformers(llm: Any, reference: Reference) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(BUNDLED_CHECKPOINT)
    prompts = ["ROMEO:\n", "To be, or not to be", "KING LEAR:\nBlow, winds, and", "Café 🎭 戏"]
    chat = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = [*llm.generate(prompts, params), *llm.chat(CHAT, params)]
    for text, output in zip([*prompts, chat], outputs, strict=True):
        assert output.prompt_token_ids == theirs(text, add_special_tokens=False).input_ids
        reference.assert_greedy(output.prompt_token_ids, output.token_ids)
        assert output.text == theirs.decode(output.token_ids, skip_special_tokens=True)


def test_chat_answers_end_by_themselves(llm: Any) -> None:
    params = SamplingParams(temperature=0.7, seed=0, n=8, max_tokens=200)
    (output,) = llm.chat(CHAT, params)
    ended = [completion for completion in output.outputs if completion.finish_reason == "stop"]
    assert len(ended) >= 6
    assert all("<|" not in completion.text for completion in output.outputs)


def test_the_file_stays_small() -> None:
    assert (BUNDLED_CHECKPOINT / "model.safetensors").stat().st_size < 16_000_000
