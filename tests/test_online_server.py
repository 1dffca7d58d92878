"""The server as clients meet it: OpenAI's own client, and HTTP by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

import steps
from shared import SamplingParams
from tests.fakes import VOCABULARY, expected_output
from tests.online_server import TIMEOUT, ServerThread, fake_server, raw_request, wait_until

PROMPT = "ROMEO:\n"
MESSAGES: Any = [{"role": "user", "content": "Who's there?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(max_body_bytes=4 * 2**20) as server:  # huge ones are tried, too
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the pool is whole."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """What the same engine says offline."""
    with steps.load("01_chunked_prefill").LLM(dtype="float32", num_kvcache_blocks=200) as llm:
        yield llm


def offline(llm: Any, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate([prompt], SamplingParams(**params))[0]


# ---- OpenAI's client


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "max_tokens": 20},
        {"seed": 3, "max_tokens": 20, "temperature": 0.8, "top_p": 0.9},
        {"temperature": 0, "max_tokens": 20, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0, "max_tokens": 20, "logit_bias": {"11": -100}},
        {"temperature": 0, "max_tokens": 60, "stop": ["\n"]},
        {"temperature": 0, "max_tokens": 0, "echo": True},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}, "seed": 1},
        {"extra_body": {"ignore_eos": True, "min_tokens": 4, "stop_token_ids": [5]}, "seed": 2},
    ],
)
def test_completions_equal_offline(client: openai.OpenAI, llm: Any, fields: Any) -> None:
    own = {name: value for name, value in fields.items() if name not in ("extra_body", "echo")}
    own |= fields.get("extra_body", {})
    if "logit_bias" in own:
        own["logit_bias"] = {int(key): float(value) for key, value in own["logit_bias"].items()}
    if fields.get("echo"):
        own["prompt_logprobs"] = 0
    expected = offline(llm, **own)
    prefix = PROMPT if fields.get("echo") else ""
    whole = client.completions.create(model="tiny", prompt=PROMPT, **fields)
    assert whole.choices[0].text == prefix + expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == expected.finish_reason
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


def test_chat(client: openai.OpenAI, llm: Any) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30))[0]
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**fields, max_completion_tokens=30)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)

    chunks = list(
        client.chat.completions.create(
            **fields, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
    )
    *middle, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in middle) == expected.text
    assert middle[0].choices[0].delta.role == "assistant"
    assert middle[-1].choices[0].finish_reason == expected.finish_reason
    assert last.choices == []
    assert last.usage == whole.usage or last.usage.completion_tokens == len(expected.token_ids)
    assert last.metrics["ttft"] <= last.metrics["total_time"]  # type: ignore[attr-defined]


def test_the_next_turn_takes_an_answer_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    said = first.choices[0].message.model_dump()
    conversation: Any = [*MESSAGES, said, {"role": "user", "content": "And then?"}]
    again = client.chat.completions.create(model="tiny", messages=conversation, max_tokens=4)
    assert again.usage is not None
    assert again.usage.completion_tokens <= 4


def test_async_client_runs_many_at_once(server: ServerThread, llm: Any) -> None:
    texts = [f"Speech {number}:\n" for number in range(12)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=TIMEOUT, max_retries=0
        ) as client:

            async def stream(text: str) -> str:
                chunks = await client.completions.create(
                    model="tiny", prompt=text, max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks])

            async def whole(text: str) -> str:
                answer = await client.completions.create(
                    model="tiny", prompt=text, max_tokens=16, temperature=0
                )
                return answer.choices[0].text

            kinds = [stream, whole]
            work = (kinds[n % 2](text) for n, text in enumerate(texts))
            return list(await asyncio.gather(*work))

    expected = llm.generate(texts, SamplingParams(temperature=0, max_tokens=16))
    assert asyncio.run(ask()) == [output.text for output in expected]


def test_several_prompts_and_completions(client: openai.OpenAI, llm: Any) -> None:
    prompts = ["ROMEO:\n", "KING LEAR:\nBlow"]
    params = SamplingParams(n=2, seed=5, max_tokens=8)
    expected = [c.text for output in llm.generate(prompts, params) for c in output.outputs]
    fields: Any = {"model": "tiny", "prompt": prompts, "n": 2, "seed": 5, "max_tokens": 8}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == expected
    assert len(set(expected)) == 4
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(llm.tokenizer.encode(p)) for p in prompts)

    texts = [""] * 4
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected

    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    again = client.completions.create(**{**fields, "prompt": ids})
    assert [choice.text for choice in again.choices] == expected


# ---- log probabilities


def test_completion_logprobs(client: openai.OpenAI, llm: Any) -> None:
    expected = offline(llm, temperature=0, max_tokens=6, logprobs=2)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(
        [row[t].logprob for t, row in zip(expected.token_ids, expected.logprobs, strict=True)]
    )
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])


def test_scoring_a_prompt_as_lm_eval_does(http: httpx.Client, llm: Any) -> None:
    """Log-likelihood of a continuation: echo, logprobs, no tokens."""
    context, continuation = "To be, or not", " to be"
    ids = llm.tokenizer.encode(context + continuation)
    start = len(llm.tokenizer.encode(context))
    (output,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
    expected = [
        row[token].logprob
        for token, row in zip(ids[start:], output.prompt_logprobs[start:], strict=True)
    ]
    fields = {"model": "tiny", "prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    for max_tokens in (0, 1):
        answer = post(http, "/v1/completions", {**fields, "max_tokens": max_tokens})
        logprobs = answer["choices"][0]["logprobs"]
        end = len(ids)
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][start:end] == pytest.approx(expected)
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        for lp, top in zip(
            logprobs["token_logprobs"][1:end], logprobs["top_logprobs"][1:end], strict=True
        ):
            assert lp <= max(top.values())
        assert answer["usage"]["completion_tokens"] == max_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
    fields |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**fields)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert whole.usage is not None
    assert len(logprobs.content) == whole.usage.completion_tokens
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) == 3
        assert entry.bytes is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == (
        whole.choices[0].message.content
    )
    streamed = [
        entry
        for chunk in client.chat.completions.create(**fields, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [e.token for e in streamed] == [e.token for e in logprobs.content]


# ---- the wire


def post(http: httpx.Client, path: str, body: Any, status: int = 200) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def refusal(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return error


def test_not_streaming_is_the_default(http: httpx.Client) -> None:
    answer = post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
    assert answer["object"] == "text_completion"
    metrics = answer["metrics"]
    assert 0 < metrics["ttft"] <= metrics["total_time"]
    assert metrics["tpot"] > 0


def test_events_end_with_done(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "ignore_eos": True}
    response = http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[-1]["metrics"]["total_time"] > 0
    assert "metrics" not in chunks[0]


def test_usage_in_every_chunk_on_request(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = http.post("/v1/completions", json={**body, "stream_options": options})
    events = [e.removeprefix("data: ") for e in response.text.split("\n\n")[:-2]]
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_characters_arrive_whole(http: httpx.Client, llm: Any) -> None:
    """Bytes of a character come in several tokens, and special tokens have no text."""
    ids = llm.tokenizer.encode("你<|im_end|>é")
    bias = dict.fromkeys(map(str, ids[:3]), 100)
    body = {"prompt": "x", "max_tokens": 12, "logit_bias": bias, "seed": 0, "ignore_eos": True}
    whole = post(http, "/v1/completions", {**body, "return_token_ids": True})["choices"][0]
    assert whole["text"] == llm.tokenizer.decode(whole["token_ids"])
    response = http.post("/v1/completions", json={**body, "stream": True})
    events = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]


def test_a_stop_string_across_tokens_never_shows(http: httpx.Client, llm: Any) -> None:
    text = offline(llm, temperature=0, max_tokens=40).text
    stop = text[10:14]  # begins and ends inside words
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop}
    expected = text[: text.index(stop)]
    whole = post(http, "/v1/completions", body)
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < 40
    response = http.post("/v1/completions", json={**body, "stream": True})
    pieces = [json.loads(e[6:])["choices"][0]["text"] for e in response.text.split("\n\n")[:-2]]
    assert "".join(pieces) == expected
    assert stop not in "".join(pieces)


def test_finish_reasons_are_true(http: httpx.Client, llm: Any) -> None:
    length = post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert length["choices"][0]["finish_reason"] == "length"
    first = offline(llm, temperature=0, max_tokens=1).token_ids
    body = {"prompt": PROMPT, "temperature": 0, "stop_token_ids": first}
    stop = post(http, "/v1/completions", body)
    assert stop["choices"][0]["finish_reason"] == "stop"
    assert (stop["choices"][0]["text"], stop["usage"]["completion_tokens"]) == ("", 1)


def test_prefix_hits_are_counted(http: httpx.Client) -> None:
    body = {"prompt": "Now is the winter of our discontent " * 6, "max_tokens": 1}
    cached = [
        post(http, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached[1] > cached[0]


# ---- refusals


def test_a_bad_request_harms_nobody_else(http: httpx.Client, server: ServerThread) -> None:
    bad: list[Any] = [
        {"prompt": ""},
        {"prompt": [1] * 100_000},
        {"prompt": [4096]},
        {"prompt": [-1]},
        {"prompt": PROMPT, "max_tokens": -1},
        {"prompt": PROMPT, "best_of": 3},
        {"prompt": PROMPT, "suffix": "x"},
        {"prompt": PROMPT, "what": 1},
        {"prompt": ["fine", ""]},
        {"prompt": "x " * 10_000},
        {},
        [],
        7,
    ]
    running = {"prompt": PROMPT, "max_tokens": 150, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=running) as response:
        lines = response.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as other:
            for body in bad:
                refusal(other.post("/v1/completions", json=body), 400)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(rest)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'{"prompt":"\\ud800"}']
)
def test_what_is_not_json_is_refused(http: httpx.Client, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    refusal(http.post("/v1/completions", content=content, headers=headers), 400)


def test_forms_of_other_web_pages_are_refused(http: httpx.Client) -> None:
    """A page may post text/plain anywhere without being asked; JSON it may not."""
    content = json.dumps({"prompt": PROMPT})
    headers = {"Content-Type": "text/plain"}
    refusal(http.post("/v1/completions", content=content, headers=headers), 400)
    response = http.options("/v1/completions", headers={"Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in response.headers


def test_unknown_models_and_paths(http: httpx.Client, client: openai.OpenAI) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "a", "model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    refusal(http.get("/v1/models/gpt-4"), 404)
    refusal(http.get("/v1/nothing"), 404)
    refusal(http.get("/v1/completions"), 405)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format={"type": "json_object"}
        )


def test_a_body_is_no_longer_than_what_the_model_can_hold() -> None:
    with fake_server() as server:
        default = server.api.max_body_bytes
        assert default == 512 * 1024  # of 8,000 tokens
        body = b'{"prompt": [1], "max_tokens": 1}'
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
            headers = {"Content-Type": "application/json"}
            fitting = http.post("/v1/completions", content=body.ljust(default), headers=headers)
            assert fitting.status_code == 200
            longer = body.ljust(default + 1)
            error = refusal(http.post("/v1/completions", content=longer, headers=headers), 413)
            assert str(default) in error["message"]
        limits = replace(server.engine.info.limits, max_model_length=131072)
        server.engine._client.info.limits = limits
        assert server.api.max_body_bytes == 2 * 2**20


def test_limits_on_bodies_queue_and_tokens() -> None:
    options: Any = {"max_body_bytes": 2000, "max_output_tokens": 5, "api_key": "secret"}
    options["allow_origins"] = ("http://page",)
    with ServerThread(start={"max_queued_requests": 2}, **options) as server:
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=TIMEOUT) as http:
            refusal(http.post("/v1/completions", json={"prompt": "x" * 3000}), 413)
            chunked = iter([b'{"prompt": "', *[b"x" * 1000] * 3, b'"}'])
            json_type = {"Content-Type": "application/json"}
            response = http.post("/v1/completions", content=chunked, headers=json_type)
            refusal(response, 413)
            for path, body in (
                ("/v1/completions", {"prompt": "x", "max_tokens": 6}),
                ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6}),
            ):
                assert refusal(http.post(path, json=body), 400)["param"] == "max_tokens"
            body = {"messages": MESSAGES, "ignore_eos": True}
            answer = post(http, "/v1/chat/completions", body)
            assert answer["usage"]["completion_tokens"] == 5
            body = {"prompt": ["a", "b", "c"], "max_tokens": 5}
            assert refusal(http.post("/v1/completions", json=body), 400)["param"] == "prompt"
            post(http, "/v1/completions", {**body, "prompt": ["a", "b"]})
            response = http.get("/v1/models", headers={"Origin": "http://page"})
            assert response.headers["access-control-allow-origin"] == "http://page"
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/debug/stats"):
                refusal(httpx.get(server.url + path, headers=key), 401)
            refusal(httpx.post(f"{server.url}/v1/completions", headers=key, content=b"{"), 401)
        for scheme in ("bearer secret", "BEARER  secret"):
            key = {"Authorization": scheme}
            assert httpx.get(f"{server.url}/v1/models", headers=key).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200


def test_a_full_queue_is_told() -> None:
    with ServerThread(start={"max_queued_requests": 1}) as server:
        with running(server):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]})
        assert refusal(answer, 429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"


# ---- the other routes


@pytest.mark.parametrize(
    "text", [r'"\ud800"', r'"\udc00x"', r'"\ud800\ud800"', '"\xff"', "{", '{"prompt": NaN}', ""]
)
def test_what_is_no_text_is_no_json(http: httpx.Client, text: str) -> None:
    json_type = {"Content-Type": "application/json"}
    body = f'{{"prompt": {text}}}'.encode("latin-1")
    for path in ("/v1/completions", "/tokenize"):
        error = refusal(http.post(path, content=body, headers=json_type), 400)
        assert "JSON" in error["message"]
        assert ("halves of a character" in error["message"]) == ("\\ud" in text)


def test_the_version_is_known(http: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+.*", http.get("/version").json()["version"])


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 200 * 16


def test_tokenize_and_back(http: httpx.Client, llm: Any) -> None:
    text = "To be, or not\n你好"
    answer = post(http, "/tokenize", {"prompt": text})
    assert answer["tokens"] == llm.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert post(http, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    chat = post(http, "/tokenize", {"messages": MESSAGES})
    assert chat["tokens"] == llm.tokenizer.encode(llm.render_chat(MESSAGES))
    short = post(http, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert short["count"] < chat["count"]
    for path, body, param in (
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ):
        assert refusal(http.post(path, json=body), 400)["param"] == param


def test_probes_may_ask_for_the_head_alone(http: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        assert http.head(path).status_code == http.get(path).status_code == 200


def metric(http: httpx.Client, name: str) -> float:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(f"vllm:{name}"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name}")


def test_a_first_token_is_counted_when_it_comes(http: httpx.Client, server: ServerThread) -> None:
    def counts() -> list[float]:
        names = ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
        return [metric(http, name) for name in names]

    before = counts()
    body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert counts() == [before[0] + 1, before[1]]
    server.wait_idle()
    assert counts() == [before[0] + 1, before[1]]


def test_metrics_have_vllms_names_and_count(http: httpx.Client, server: ServerThread) -> None:
    names = ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
    names += ("request_time_per_output_token_seconds_count", "generation_tokens_total")
    before = {name: metric(http, name) for name in names}
    post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    server.wait_idle()
    grown = {name: metric(http, name) - before[name] for name in names}
    assert grown == {**dict.fromkeys(names, 1.0), "generation_tokens_total": 4.0}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        'request_success_total{finished_reason="length"',
    ):
        metric(http, name)


def test_debug_stats(http: httpx.Client) -> None:
    def decode_steps() -> int:
        steps: int = http.get("/debug/stats").json()["stats"]["counters"]["decode_steps"]
        return steps

    before = decode_steps()
    post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    wait_until(lambda: decode_steps() >= before + 3)


# ---- going away


def stream_by_hand(
    server: ServerThread, receive_buffer: int | None = None, **fields: Any
) -> socket.socket:
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True, **fields}
    head = "POST /v1/completions HTTP/1.1"
    return raw_request(server.port, head, json.dumps(body).encode(), receive_buffer)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_engine_and_only_its_own(
    server: ServerThread, http: httpx.Client, stream: bool
) -> None:
    """Within a step, streamed or not; somebody else's request goes on."""
    staying = {"prompt": "KING", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=staying) as response:
        lines = response.iter_lines()
        next(lines)
        connection = stream_by_hand(server, stream=stream)
        if stream:
            assert connection.recv(100)
        wait_until(lambda: server.engine.num_unfinished == 2)
        connection.close()
        wait_until(lambda: server.engine.num_unfinished == 1)
        assert list(lines)[-2] == "data: [DONE]"


def test_who_leaves_before_the_first_token_was_never_there(server: ServerThread) -> None:
    long = [7] * 3000
    connection = stream_by_hand(server, prompt=long, max_tokens=100)
    wait_until(lambda: server.engine.num_unfinished == 1)
    connection.close()
    wait_until(lambda: server.engine.num_unfinished == 0)


def test_half_a_request_is_no_request(server: ServerThread, http: httpx.Client) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert http.get("/health").status_code == 200


def test_a_slow_reader_slows_nobody_and_loses_nothing() -> None:
    """What it does not read is neither dropped nor queued event by event."""
    with fake_server() as server:
        fields = {"prompt": [1, 2], "max_tokens": 3000, "return_token_ids": True}
        connection = stream_by_hand(server, receive_buffer=4096, **fields)
        wait_until(lambda: server.engine.num_unfinished == 1)
        other = {"prompt": [3], "max_tokens": 20, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=other).status_code == 200
        server.wait_idle()  # the engine has long finished what is not read yet
        content = b""
        while b"[DONE]" not in content:
            piece = connection.recv(65536)
            assert piece
            content += piece
        connection.close()
    choices = [event["choices"][0] for event in events_of(content)]
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    assert token_ids == expected_output([1, 2], 3000, VOCABULARY)
    assert choices[-1]["finish_reason"] == "length"
    assert len(choices) < 3000


def events_of(content: bytes) -> list[Any]:
    """The events in a chunked response, without the last."""
    _, _, rest = content.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    *events, done = [e.removeprefix(b"data: ") for e in body.split(b"\n\n") if e]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_every_completion_has_the_logprobs_of_an_echoed_prompt(
    http: httpx.Client, max_tokens: int
) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "n": 2, "max_tokens": max_tokens}
    first, second = http.post("/v1/completions", json=body).json()["choices"]
    length = len(first["logprobs"]["tokens"]) - max_tokens
    assert length > 1
    assert first["logprobs"]["token_logprobs"][:length] == pytest.approx(
        second["logprobs"]["token_logprobs"][:length], abs=1e-4
    )


@pytest.mark.parametrize(
    "field, value",
    [
        ("stop", [0] * 300_000),
        ("stop_token_ids", ["x"] * 300_000),
        ("logit_bias", {str(n): "x" for n in range(100_000)}),
        ("prompt", [[]] * 300_000),
    ],
)
def test_a_list_without_end_is_one_error(http: httpx.Client, field: str, value: Any) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": PROMPT, field: value}), 400)
    assert error["param"] == field
    assert len(error["message"]) < 500


def test_what_can_never_fit_is_refused_before_it_is_tokenised(
    server: ServerThread, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine.tokenizer), "encode", None)
    text = "To be or not to be, that is the question " * 5_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = refusal(http.post(path, json=body), 400)
        assert error["param"] == next(iter(body))
        assert "at least" in error["message"]


def test_huge_texts_leave_a_thread_for_the_others(
    server: ServerThread, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come: none of them may have the threads that long ones need."""
    tokenizer, may_end = server.engine.tokenizer, threading.Event()
    encode = type(tokenizer).encode
    started = []

    def slow(self: Any, text: str, add_special_tokens: bool = True) -> Any:
        if len(text) > 150_000:
            started.append(text)
            assert may_end.wait(TIMEOUT)
            return [1]
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", slow)

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as other:
            other.post("/tokenize", json={"prompt": "x" * 200_000})

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: bool(started))
        assert post(http, "/tokenize", {"prompt": "x " * 5_000})["count"]
    finally:
        may_end.set()
        for thread in threads:
            thread.join(TIMEOUT)
    assert len(started) == 3


def test_a_huge_prompt_does_not_stop_the_streams(server: ServerThread, http: httpx.Client) -> None:
    """Tokenising it takes long, and happens elsewhere."""
    huge = {"prompt": "To be or not to be, that is the question " * 50_000}
    running = {"prompt": PROMPT, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    answers = []

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as other:
            answers.append(other.post("/tokenize", json=huge))

    with http.stream("POST", "/v1/completions", json=running) as response:
        lines = response.iter_lines()
        next(lines)
        thread = threading.Thread(target=send)
        thread.start()
        arrivals = [time.perf_counter()]
        while thread.is_alive():
            next(lines)
            arrivals.append(time.perf_counter())
    thread.join()
    assert answers[0].status_code == 200
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    took = arrivals[-1] - arrivals[0]
    assert max(gaps) < took / 2, f"a gap of {max(gaps):.2f} s in {took:.2f} s"


# ---- the end


RUNNING: Any = {"prompt": [1, 2], "max_tokens": 3000, "stream": True, "ignore_eos": True}


@contextmanager
def running(server: ServerThread, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with (
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as http,
        http.stream("POST", "/v1/completions", json={**RUNNING, **fields}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def test_draining_ends_what_runs_and_refuses_the_rest() -> None:
    with fake_server() as server:
        with running(server) as lines:
            server.stop()
            wait_until(lambda: server.api.is_draining)
            refusal(httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]}), 503)
            refusal(httpx.get(f"{server.url}/ready"), 503)
            assert httpx.get(f"{server.url}/health").status_code == 200
            *_, last, done = lines
        assert '"finish_reason":"length"' in last
        assert done == "data: [DONE]"
        server.join()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)


@pytest.mark.parametrize("ask_twice", [True, False])
def test_what_does_not_end_in_time_is_told(ask_twice: bool) -> None:
    with fake_server(drain_timeout=TIMEOUT if ask_twice else 0.05) as server:
        with running(server) as lines:
            server.stop()
            if ask_twice:
                server.stop()
            *_, error, done = lines
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        server.join()


def test_a_dead_engine_is_told_at_once() -> None:
    """To streams as an event, to others as a status; /health says it too."""
    dying = threading.Event()

    def step() -> Any:
        if dying.is_set():
            raise RuntimeError("secret reason")
        time.sleep(0.01)
        return []

    with fake_server(step=step) as server:
        answers: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            body = {**RUNNING, "stream": stream}
            url = f"{server.url}/v1/completions"
            answers.append(httpx.post(url, json=body, timeout=TIMEOUT))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.num_unfinished == 2)
        dying.set()
        for thread in threads:
            thread.join(TIMEOUT)
        answers.append(httpx.get(f"{server.url}/health"))
        answers.append(httpx.get(f"{server.url}/ready"))
        answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]}))
        assert len(answers) == 5
        for answer in answers:
            assert refusal(answer, 503)["code"] == "engine_dead"
            assert "secret" not in answer.text
        assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_a_failing_step_ends_its_requests_with_an_error() -> None:
    """In mid-stream: an event, and the stream's usual end. The engine lives on."""
    with fake_server() as server:
        runner = server.engine_in_thread.runner
        submit = runner.submit
        with running(server) as lines:
            runner.submit = None
            *_, error, done = lines
        runner.submit = submit
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "NoneType" not in error
        assert done == "data: [DONE]"
        body = {"prompt": [1], "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.wait_idle()


def test_a_port_in_use_is_named() -> None:
    with ServerThread() as server:
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{server.port}.*in use"):
            listen(server.port)
        with ServerThread() as second:  # two servers on one host
            assert httpx.get(f"{second.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_host_that_nobody_knows_is_not_the_ports_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"cannot listen on nowhere:8000: Name.*Try another --host"):
        listen(8000, "nowhere")


def listen(port: int, host: str = "127.0.0.1") -> None:
    from tests.online_server import server as module

    module.listen(host, port)
