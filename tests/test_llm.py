"""LLM over an engine that only pretends: what is asked of the engine, and what comes out."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from shared.config import EngineConfig
from shared.llm import OfflineLLM
from shared.outputs import Logprob, StepOutput
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer
from tests.test_output import byte_level_tokenizer, bytes_to_ids

VOCAB_SIZE = 400
MAX_LENGTH = 100
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"

Reply = Callable[[list[int], int], list[int]]


def echo(prompt: list[int], index: int) -> list[int]:
    """The default model: it says the prompt once more, then `index` times "!", then stops."""
    return prompt + bytes_to_ids(b"!") * index


class FakeEngine:
    """The engine protocol; every step gives `tokens_per_step` tokens to each sequence."""

    tokens_per_step = 1
    max_model_length = MAX_LENGTH
    vocab_size = VOCAB_SIZE

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = chat_tokenizer()
        self.reply: Reply = echo
        self.num_steps = 0
        self.added: list[str] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.failing: dict[str, str] = {}
        self.before_step: Callable[[int], None] = lambda number: None
        self.is_closed = False
        self._left: dict[tuple[str, int], list[int]] = {}
        self._params: dict[str, SamplingParams] = {}

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not all(type(t) is int and 0 <= t < VOCAB_SIZE for t in prompt_token_ids):
            raise ValueError("no such tokens")
        if not prompt_token_ids:
            raise ValueError("empty")
        if len(prompt_token_ids) >= MAX_LENGTH:
            raise ValueError("too long")

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.check_request(prompt_token_ids, params)
        assert request_id not in self._params
        self.added.append(request_id)
        self._params[request_id] = params
        for index in range(params.n):
            self._left[request_id, index] = list(self.reply(list(prompt_token_ids), index))

    def abort_request(self, request_id: str) -> None:
        self.aborted.append((request_id, None))
        for key in [key for key in self._left if key[0] == request_id]:
            del self._left[key]

    def abort_sequence(self, request_id: str, index: int) -> None:
        self.aborted.append((request_id, index))
        self._left.pop((request_id, index), None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[StepOutput]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        outputs = []
        for (request_id, index), left in list(self._left.items()):
            params = self._params[request_id]
            if request_id in self.failing:
                del self._left[request_id, index]
                error = self.failing[request_id]
                outputs.append(StepOutput(request_id, index, [], None, "abort", error))
                continue
            new = [left.pop(0) for _ in range(min(self.tokens_per_step, len(left)))]
            logprobs = None
            if params.logprobs is not None:
                logprobs = [{token: Logprob(-0.5, 1)} for token in new]
            reason = None if left else "length"
            if not left:
                del self._left[request_id, index]
            outputs.append(
                StepOutput(request_id, index, new, logprobs, reason, num_cached_tokens=3)
            )
        return outputs

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.is_closed = True


class FakeLLM(OfflineLLM):
    engine_class = FakeEngine
    engine: FakeEngine  # type: ignore[assignment]


def chat_tokenizer() -> Tokenizer:
    environment = jinja2.Environment()
    backend = byte_level_tokenizer()._backend
    return Tokenizer(backend, {"default": environment.from_string(TEMPLATE)}, {})


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    with FakeLLM() as llm:
        yield llm


def ids_of(text: str) -> list[int]:
    return bytes_to_ids(text.encode())


def assert_idle(llm: FakeLLM) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert not llm._requests


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_outputs_come_in_the_order_of_the_prompts(llm: FakeLLM, tokens_per_step: int) -> None:
    llm.engine.tokens_per_step = tokens_per_step
    outputs = llm.generate(["the quick fox, the fox", [7, 8], "你好"])
    assert [o.text for o in outputs] == ["the quick fox, the fox", *map(decoded, [[7, 8]]), "你好"]
    assert [o.prompt for o in outputs] == ["the quick fox, the fox", None, "你好"]
    assert outputs[1].prompt_token_ids == outputs[1].token_ids == [7, 8]
    assert {o.finish_reason for o in outputs} == {"length"}
    assert_idle(llm)


def decoded(ids: list[int]) -> str:
    return byte_level_tokenizer().decode(ids)


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
        (np.array([5, 6], np.int32), [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.int64(5), np.uint8(6)], [[5, 6]]),
        ([[5, 6], (7,), np.array([8])], [[5, 6], [7], [8]]),
        ([], []),
    ],
)
def test_ways_to_give_token_ids(llm: FakeLLM, prompts: Any, expected: list[list[int]]) -> None:
    outputs = llm.generate(prompts)
    assert [o.prompt_token_ids for o in outputs] == expected
    assert all(type(t) is int for o in outputs for t in o.prompt_token_ids)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        [],
        [VOCAB_SIZE],
        [-1],
        [True, 5],
        [1.0, 2],
        [5, None],
        [5, "a"],
        [[5]],
        np.array([1.5]),
        np.array([True]),
        np.array([[1]]),
        np.array([], np.int64),
        None,
        5,
        b"abc",
        {"prompt": "a"},
        "\ud800",
        [1] * MAX_LENGTH,
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_enqueued(llm: FakeLLM, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt 1: \S"):
        llm.generate(["fine", bad])
    assert llm.engine.added == []
    assert_idle(llm)


@pytest.mark.parametrize(
    "prompts", [None, 5, {"a": 1}, b"abc", [True], [1.5], [None], [object()], np.array(5), "", [-1]]
)
def test_prompts_of_no_use_at_all(llm: FakeLLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts)
    assert llm.engine.added == []


def test_sampling_params_are_one_for_all_or_one_each(llm: FakeLLM) -> None:
    each = [SamplingParams(n=1), SamplingParams(n=2)]
    assert [len(o.outputs) for o in llm.generate(["a", "b"], each)] == [1, 2]
    assert [len(o.outputs) for o in llm.generate(["a", "b"], each[1])] == [2, 2]
    assert len(llm.generate("a", each[:1])) == 1
    added = list(llm.engine.added)
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], each)
    for wrong in ({"n": 1}, [each[0], None], "ab"):
        with pytest.raises(ValueError, match="sampling_params"):
            llm.generate(["a", "b"], wrong)  # type: ignore[arg-type]
    assert llm.engine.added == added


def test_text_needs_a_tokenizer(llm: FakeLLM) -> None:
    llm.engine.tokenizer = None
    with pytest.raises(ValueError, match="prompt 0: a text prompt needs a tokenizer"):
        llm.generate("a")
    with pytest.raises(ValueError, match="prompt 0: stop needs a tokenizer"):
        llm.generate([5], SamplingParams(stop="a"))
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    (output,) = llm.generate([5, 6])
    assert (output.token_ids, output.text) == ([5, 6], "")


def test_a_request_the_engine_refuses_late_takes_the_others_back(llm: FakeLLM) -> None:
    def refuse(prompt: list[int], index: int) -> list[int]:
        if prompt == [6]:
            raise ValueError("no room")
        return prompt

    llm.engine.reply = refuse
    with pytest.raises(ValueError, match="no room"):
        llm.generate([[5], [6], [7]])
    assert_idle(llm)
    assert llm.generate([5])[0].token_ids == [5]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
def test_a_stop_string_ends_one_completion_of_several(llm: FakeLLM, tokens_per_step: int) -> None:
    replies = {0: "abcENDxyz", 1: "abcdefghij", 2: "xENDyyyyyy"}
    llm.engine.reply = lambda prompt, index: ids_of(replies[index])
    llm.engine.tokens_per_step = tokens_per_step
    params = SamplingParams(n=3, stop="END", max_tokens=50, logprobs=0)
    (output,) = llm.generate([5], params)
    assert [c.text for c in output.outputs] == ["abc", "abcdefghij", "x"]
    assert [c.finish_reason for c in output.outputs] == ["stop", "length", "stop"]
    assert [c.token_ids for c in output.outputs] == [*map(ids_of, ("abcEND", replies[1], "xEND"))]
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    request_id = output.request_id
    assert sorted(llm.engine.aborted) == [(request_id, 0), (request_id, 2)]
    assert_idle(llm)


def test_metrics(llm: FakeLLM) -> None:
    before = time.perf_counter()
    (output,) = llm.generate("abc")
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    times = [before, metrics.arrival_time, metrics.first_token_time, metrics.finished_time]
    assert times == sorted(times)
    assert metrics.num_cached_tokens == 3


def test_a_failing_request_ends_alone(llm: FakeLLM) -> None:
    llm.engine.before_step = lambda number: llm.engine.failing.update({"1": "page fault"})
    good, bad, also_good = llm.generate(["abc", "def", "ghi"], SamplingParams(n=2))
    assert [c.text for c in good.outputs] == ["abc", "abc!"]
    assert [c.text for c in also_good.outputs] == ["ghi", "ghi!"]
    for completion in bad.outputs:
        assert (completion.finish_reason, completion.error) == ("abort", "page fault")
    assert_idle(llm)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_is_raised_midway_leaves_the_engine_usable(llm: FakeLLM, error: BaseException) -> None:
    def fail_once(number: int) -> None:
        if number == 2:
            raise error

    llm.engine.before_step = fail_once
    with pytest.raises(type(error)):
        llm.generate(["abc", "d", "efg"])
    # "d" had finished in the first step.
    assert llm.engine.aborted == [("0", None), ("2", None)]
    assert_idle(llm)
    assert llm.generate("again")[0].text == "again"


def test_ctrl_c_waits_for_the_step(llm: FakeLLM) -> None:
    finished_steps = []

    def interrupted_step(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        finished_steps.append(number)

    llm.engine.before_step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abcdef")
    assert finished_steps == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)


def test_a_second_ctrl_c_does_not_wait(llm: FakeLLM) -> None:
    def hang(number: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    llm.engine.before_step = hang
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc")
    assert_idle(llm)


def test_generate_in_another_thread(llm: FakeLLM) -> None:
    texts = []
    thread = threading.Thread(target=lambda: texts.append(llm.generate("abc")[0].text))
    thread.start()
    thread.join(10)
    assert texts == ["abc"]


def test_threads_at_the_same_time_are_an_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    inside, tried = threading.Event(), threading.Event()
    end = llm._end

    def clean_up(requests: list[Any]) -> None:
        tried.set()
        end(requests)  # waits for the other thread's step

    def wait_in_the_first(number: int) -> None:
        inside.set()
        assert tried.wait(10)

    llm.engine.before_step = wait_in_the_first
    thread = threading.Thread(target=lambda: texts.append(llm.generate("abc")[0].text))
    thread.start()
    assert inside.wait(10)
    monkeypatch.setattr(llm, "_end", clean_up)
    with pytest.raises(RuntimeError, match="another thread is using this LLM"):
        llm.generate("xyz")
    thread.join(10)
    assert texts == ["abc"]
    assert llm.engine.added == ["0"]
    assert llm.generate("xyz")[0].text == "xyz"


def test_threads_never_get_wrong_texts(llm: FakeLLM) -> None:
    problems: list[object] = []

    def work(text: str) -> None:
        for _ in range(100):
            try:
                outputs = llm.generate([text, text[::-1]])
            except RuntimeError as error:
                if "another thread" not in str(error):
                    problems.append(error)
            else:
                problems.extend(o.text for o in outputs if o.text not in (text, text[::-1]))

    llm.engine.before_step = lambda number: time.sleep(0)
    threads = [threading.Thread(target=work, args=(text,)) for text in ("abcd", "xyz", "q")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert problems == []
    assert_idle(llm)


def test_an_engine_that_loses_a_request_is_no_endless_loop(llm: FakeLLM) -> None:
    llm.engine.reply = lambda prompt, index: [5] * 9
    llm.engine.before_step = lambda number: llm.engine._left.clear()
    with pytest.raises(RuntimeError, match="has not finished requests 0"):
        llm.generate([5])


def test_stream(llm: FakeLLM) -> None:
    stream = llm.generate_stream([*ids_of("ab你"), *ids_of("c")])
    pieces = list(stream)
    assert pieces == ["a", "b", "你", "c"]
    assert stream.output.text == "ab你c"
    assert stream.output.finish_reason == "length"
    assert_idle(llm)


def test_a_stream_checks_at_once_and_enqueues_when_read(llm: FakeLLM) -> None:
    for bad in ("", [-1]):
        with pytest.raises(ValueError, match="prompt 0: "):
            llm.generate_stream(bad)
    with pytest.raises(ValueError, match="n=2"):
        llm.generate_stream("a", SamplingParams(n=2))
    unread = llm.generate_stream("a")
    unread.close()
    assert unread.output.finish_reason == "abort"
    assert llm.engine.added == []


def test_a_stream_left_early_is_aborted(llm: FakeLLM) -> None:
    stream = llm.generate_stream("abcdef")
    assert next(stream) == "a"
    stream.close()
    assert llm.engine.aborted == [("0", None)]
    assert (stream.output.finish_reason, stream.output.text) == ("abort", "a")
    assert stream.output.metrics.finished_time is not None
    assert list(stream) == []
    assert_idle(llm)


def test_a_stream_never_shows_the_start_of_a_stop_string(llm: FakeLLM) -> None:
    llm.engine.reply = lambda prompt, index: ids_of("aENbENDc")
    stream = llm.generate_stream([5], SamplingParams(stop="END", max_tokens=20))
    assert list(stream) == ["a", "ENb"]
    assert stream.output.finish_reason == "stop"
    assert stream.output.token_ids == ids_of("aENbEND")


def test_generate_while_a_stream_is_open(llm: FakeLLM) -> None:
    stream = llm.generate_stream("abcdef")
    text = next(stream)
    assert llm.generate("xyz")[0].text == "xyz"
    assert text + "".join(stream) == "abcdef"
    assert_idle(llm)


def test_chat_goes_through_the_template_once(llm: FakeLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>"
    assert output.prompt_token_ids == byte_level_tokenizer().encode(output.prompt, False)
    assert output.text == "user\nhi"  # the echo, without its special tokens
    assert [o.prompt for o in llm.chat([messages, messages])] == [output.prompt] * 2
    for wrong in ("hi", ["hi"], [messages, "hi"], [messages[0], messages]):
        with pytest.raises(ValueError, match="messages must be"):
            llm.chat(wrong)  # type: ignore[arg-type]
    assert llm.chat([]) == []


def test_close(llm: FakeLLM) -> None:
    with llm:
        pass
    assert llm.engine.is_closed


def test_the_model_may_be_a_path() -> None:
    assert FakeLLM(Path("some") / "where").config.model == "some/where"


def test_config_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match="max_num_sequences"):
        FakeLLM(max_num_sequences=0)
    with pytest.raises(ValueError, match="no_such_option"):
        FakeLLM(no_such_option=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "enabled, seconds, shown", [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_progress_is_for_long_work_on_a_terminal(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, enabled: bool, seconds: float, shown: bool
) -> None:
    monkeypatch.setattr("shared.progress.ProgressBar.DELAY", seconds)
    monkeypatch.setattr("shared.progress.ProgressBar.INTERVAL", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    llm.generate(["abcdef", "ab"], use_tqdm=enabled)
    assert ("1/2" in terminal.getvalue()) == shown
    monkeypatch.setattr(sys, "stderr", None)  # closed
    assert llm.generate("ab", use_tqdm=enabled)[0].text == "ab"
    assert ("tokens/s" in terminal.getvalue()) == shown
