"""The HTTP API's pure parts: what a request may say, how errors read, how choices are written."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

import shared
from shared.engine.output import CompletionDelta, OutputProcessor
from shared.engine.request import check_request
from shared.engine.slots import Limits
from shared.outputs import Logprob
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

api_types = importlib.import_module("steps.03_online.api_types")
chat = importlib.import_module("steps.03_online.chat")
completions = importlib.import_module("steps.03_online.completions")
errors = importlib.import_module("steps.03_online.errors")
generation = importlib.import_module("steps.03_online.generation")
params = importlib.import_module("steps.03_online.params")

LIMITS = Limits(
    vocab_size=4096,
    block_size=16,
    num_blocks=64,
    max_model_length=1024,
    max_num_sequences=8,
    max_num_batched_tokens=64,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    directory = Path(shared.__file__).parent / "checkpoints" / "tiny"
    return Tokenizer.from_directory(directory)


def make_model(tokenizer: Tokenizer | None, max_tokens: int = 1024) -> Any:
    def check(prompt: Any, params: SamplingParams) -> np.ndarray:
        return check_request(prompt, params, LIMITS)

    return params.Model(tokenizer, LIMITS, max_tokens, check, max_prompts=8)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Any:
    return make_model(tokenizer)


def completion(**fields: Any) -> Any:
    return api_types.CompletionRequest(**{"prompt": "a", **fields})


def conversation(content: Any = "hello", **fields: Any) -> Any:
    return api_types.ChatRequest(messages=[{"role": "user", "content": content}], **fields)


def refused(prepare: Any, body: Any, model: Any) -> Any:
    with pytest.raises(errors.ApiError) as caught:
        prepare(body, model)
    assert caught.value.status_code == 400
    return caught.value


# No field is accepted and ignored.


def test_every_field_of_openai_is_known() -> None:
    """So that each is either served or refused with a reason, and null is always "not given"."""
    for kind, params_class in (
        (api_types.CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (api_types.ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ):
        missing = params_class.__annotations__.keys() - kind.model_fields.keys()
        assert not missing, missing
    needed = {"prompt", "messages", "model"}
    completion(**dict.fromkeys(api_types.CompletionRequest.model_fields.keys() - needed))
    conversation(**dict.fromkeys(api_types.ChatRequest.model_fields.keys() - needed))


@pytest.mark.parametrize(
    "field,value",
    [
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("function_call", "auto"),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("parallel_tool_calls", False),
        ("prediction", {"type": "content", "content": "x"}),
        ("no_such_field", 1),
        ("n", "2"),
        ("n", True),
        ("stream", 1),
        ("temperature", "hot"),
        ("max_completion_tokens", 1.5),
        ("stop", [1]),
        ("logit_bias", {"1": "x"}),
        ("stream_options", {"include_everything": True}),
    ],
)
def test_chat_refuses_what_it_does_not_do(field: str, value: Any) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        conversation(**{field: value})
    error = errors.invalid_body(caught.value.errors())
    assert error.status_code == 400
    assert error.param.split(".")[0] == field
    assert field in error.detail


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": False},
        {"modalities": ["text"], "service_tier": "auto", "user": "me", "verbosity": "medium"},
        {"stop": "x", "stream": True, "stream_options": {"include_usage": True}},
        {"n": None, "temperature": None, "stop": None, "max_tokens": None, "logit_bias": None},
    ],
)
def test_chat_takes_what_asks_for_nothing_else(fields: dict[str, Any]) -> None:
    conversation(**fields)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://x"}}],
        [{"type": "text"}],
        None,
        7,
        [["a"]],
    ],
)
def test_content_is_text(content: Any) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        conversation(content)
    error = errors.invalid_body(caught.value.errors())
    assert error.param.startswith("messages.0.content")


def test_a_message_without_known_role_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError):
        api_types.ChatRequest(messages=[{"role": "tool", "content": "x"}])
    with pytest.raises(pydantic.ValidationError):
        api_types.ChatRequest(messages=[])


@pytest.mark.parametrize(
    "prompt,parsed",
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompt_forms(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [], [1, "a"], [[1, "a"]], [1.5], [True]])
def test_other_prompts_are_refused_in_one_line(prompt: Any) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        completion(prompt=prompt)
    assert len(caught.value.errors()) == 1
    assert errors.invalid_body(caught.value.errors()).param.startswith("prompt")


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"n": 0}, "n"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"min_tokens": 40}, "min_tokens"),
        ({"logprobs": 101}, "logprobs"),
        ({"logprobs": 101, "echo": True}, "logprobs"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {"01": 1.0}}, "logit_bias"),
        ({"logit_bias": {"4096": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 101.0}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 1024}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a"] * 50, "n": 100}, "prompt"),
    ],
)
def test_wrong_values_name_their_field(fields: Any, param: str, model: Any) -> None:
    error = refused(completions.prepare, completion(**fields), model)
    assert error.param == param
    assert error.detail.startswith(param) or param == "prompt"
    assert "prompt_token_ids" not in error.detail


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"content": "word " * 2000}, "messages"),
    ],
)
def test_wrong_chat_values_name_their_field(fields: Any, param: str, model: Any) -> None:
    assert refused(chat.prepare, conversation(**fields), model).param == param


def test_a_model_without_tokenizer_takes_ids_and_explains_the_rest() -> None:
    model = make_model(None)
    task, _ = completions.prepare(completion(prompt=[1, 2]), model)
    assert task.prompts[0].tolist() == [1, 2]
    assert refused(completions.prepare, completion(), model).param == "prompt"
    assert refused(completions.prepare, completion(prompt=[1], echo=True), model).param == "echo"
    assert refused(chat.prepare, conversation(), model).param == "messages"


def test_defaults_are_openais(model: Any) -> None:
    task, _ = completions.prepare(completion(), model)
    assert task.params == SamplingParams(max_tokens=16)
    task, _ = chat.prepare(conversation(), model)
    assert task.params == SamplingParams(max_tokens=1024 - len(task.prompts[0]))


def test_a_limit_on_max_tokens_lowers_the_defaults_too(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, max_tokens=8)
    assert completions.prepare(completion(), model)[0].params.max_tokens == 8
    assert chat.prepare(conversation(), model)[0].params.max_tokens == 8
    assert refused(completions.prepare, completion(max_tokens=9), model).param == "max_tokens"


def test_every_sampling_field_arrives(model: Any) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 7,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [4],
        "ignore_eos": True,
    }
    task, _ = completions.prepare(completion(**fields, logit_bias={"3": -100}, logprobs=2), model)
    assert task.params == SamplingParams(**fields, logit_bias={3: -100.0}, logprobs=2)
    # What the API has in common with SamplingParams, it passes on.
    common = SamplingParams.model_fields.keys() & api_types.CompletionRequest.model_fields.keys()
    assert common == set(api_types.SAMPLING_FIELDS) | {"logit_bias", "logprobs"}


def test_messages_reach_the_template(model: Any, tokenizer: Tokenizer) -> None:
    body = api_types.ChatRequest(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
            {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
        ]
    )
    task, _ = chat.prepare(body, model)
    assert tokenizer.decode(task.prompts[0].tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
    )


def piece(delta: CompletionDelta, is_first: bool = True, prompt_logprobs: Any = None) -> Any:
    processor = OutputProcessor(None, SamplingParams())
    choice = generation.Choice(0, 0, processor)
    return generation.Piece(choice, delta, is_first, prompt_logprobs)


def test_offsets_count_characters_also_where_tokens_split_them(
    model: Any, tokenizer: Tokenizer
) -> None:
    text = "né 你<|im_end|>!"
    ids = tokenizer.encode(text)
    body = completion(prompt=text, echo=True, logprobs=0, max_tokens=0)
    _, form = completions.prepare(body, model)
    rows = [None, *({token: Logprob(-1.0, 1)} for token in ids[1:])]
    made = form.chunk(piece(CompletionDelta(finish_reason="length"), True, rows))
    assert made["text"] == text
    offsets = made["logprobs"]["text_offset"]
    for token, start in zip(ids, offsets, strict=True):
        content = tokenizer.token_bytes(token)
        if content and content[0] & 0xC0 != 0x80:  # a token that begins a character
            assert text[start:].encode().startswith(content)
    assert made["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1)
    assert made["logprobs"]["top_logprobs"][0] is None


def test_a_part_of_a_character_is_named_by_its_bytes(tokenizer: Tokenizer) -> None:
    names = [params.token_text(tokenizer, t) for t in tokenizer.encode("你")]
    assert len(names) > 1
    assert all(name.startswith("bytes:\\x") for name in names)
    assert params.token_text(None, 5) == "token_id:5"


def test_impossible_tokens_have_a_number_in_json(model: Any, tokenizer: Tokenizer) -> None:
    body = conversation(logprobs=True, top_logprobs=1)
    _, form = chat.prepare(body, model)
    token = tokenizer.encode("a")[0]
    best = tokenizer.encode("b")[0]
    row = {token: Logprob(float("-inf"), 9), best: Logprob(-0.5, 1)}
    made = form.choice(piece(CompletionDelta("a", [token], [row], "length")))
    (entry,) = made["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [top["token"] for top in entry["top_logprobs"]] == ["b"]
    assert entry["bytes"] == [97]


def test_token_ids_on_request(model: Any) -> None:
    _, form = completions.prepare(completion(prompt=[5, 6], return_token_ids=True), model)
    made = form.chunk(piece(CompletionDelta("", [7])))
    assert (made["token_ids"], made["prompt_token_ids"]) == ([7], [5, 6])
    assert "prompt_token_ids" not in form.chunk(piece(CompletionDelta("", [8]), False))


def test_errors_that_are_nobodys_answer_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    error = errors.as_api_error(KeyError("secret"))
    assert error.status_code == 500
    assert "secret" not in error.detail
    assert "secret" in caplog.text


def test_long_values_are_not_sent_back() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        completion(temperature="x" * 10_000)
    assert len(errors.invalid_body(caught.value.errors()).detail) < 300


HUGE = 100_000
WRONG_BODIES = {
    "fields": ("CompletionRequest", {"prompt": "a", **dict.fromkeys(map(str, range(HUGE)), 1)}),
    "fields of a message": ("ChatRequest", {"messages": [dict.fromkeys(map(str, range(HUGE)), 1)]}),
    "messages": ("ChatRequest", {"messages": [{"role": 1, "content": "a"}] * 4000}),
    "too many messages": ("ChatRequest", {"messages": [{}] * HUGE}),
    "parts": ("ChatRequest", {"messages": [{"role": "user", "content": [{}] * 4000}]}),
    "ids": ("DetokenizeRequest", {"tokens": ["a"] * HUGE}),
    "prompts": ("CompletionRequest", {"prompt": [[]] * HUGE}),
    "a prompt": ("CompletionRequest", {"prompt": [[[1] * HUGE]]}),
    "stops": ("CompletionRequest", {"prompt": "a", "stop_token_ids": ["a"] * HUGE}),
    "a value": ("CompletionRequest", {"prompt": "a", "n": {str(i): i for i in range(HUGE)}}),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_what_is_wrong_of_a_huge_body_is_told_in_a_few_words(name: str) -> None:
    """And found out as soon: all streams wait while a body is checked, so the number of errors and
    what is spelled of a value are bounded whatever its size."""
    kind, body = WRONG_BODIES[name]
    with pytest.raises(pydantic.ValidationError) as caught:
        getattr(api_types, kind).model_validate(body)
    assert caught.value.error_count() <= api_types.MAX_STOPS
    error = errors.invalid_body([{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()])
    assert len(error.detail) < 500
    assert "Content-Type" not in error.detail


def test_what_is_shown_of_a_value_is_its_beginning() -> None:
    shown = [
        errors._shown(value) for value in ([1, 2], {"b": [None]}, "x" * 500, [[0] * 500] * 500)
    ]
    assert shown[:2] == ["[1, 2]", "{'b': [None]}"]
    assert all(len(text) <= errors.MAX_SHOWN + 3 for text in shown)
    assert shown[2].startswith("'xxxx")
    assert shown[3].startswith("[[0, 0, 0")


def test_no_garbage_is_looked_for_while_a_body_is_read() -> None:
    app = importlib.import_module("steps.03_online.app")

    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("not JSON")

    with pytest.raises(ValueError, match="not JSON"), app._no_collection():
        fail()
    assert gc.isenabled()


def test_prompts_are_arrays_the_engine_takes(model: Any) -> None:
    task, _ = completions.prepare(completion(prompt=["one", "two"]), model)
    assert [array.dtype for array in task.prompts] == [np.int32, np.int32]
