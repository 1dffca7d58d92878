"""Offline use: prompts in, finished texts out. Each stage's `LLM` is this class over its engine."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shared.config import EngineConfig
from shared.engine.output import OutputProcessor, without_stop_token
from shared.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, StepOutput
from shared.progress import ProgressBar
from shared.prompts import (
    Message,
    Prompt,
    as_token_ids,
    params_per_prompt,
    split_conversations,
    split_prompts,
)
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.engine.protocol import Engine
    from shared.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OfflineLLM:
    """An engine and the loop that drives it.

    Keyword arguments are the fields of the stage's Config. A `generate` while a stream is open is
    fine, they share the steps. Threads have to take turns: one that meets another inside the
    engine gets a RuntimeError.
    """

    engine_class: ClassVar[type[Any]]  # a class that implements shared.engine.protocol.Engine
    config_class: ClassVar[type[EngineConfig]] = EngineConfig

    def __init__(self, model: str | os.PathLike[str] | None = None, **config: Any) -> None:
        """Raises ValueError naming the field, or OSError naming the file, if this cannot work."""
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        self.config = self.config_class(model=model, **config)
        self.engine: Engine = self.engine_class(self.config)
        self._lock = threading.RLock()  # reentrant: a stream may be collected, so closed, in a step
        self._inside: int | None = None  # the thread that adds requests or makes a step
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}  # unfinished, of all calls in progress

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with dummy weights of a real size: such a model takes and gives ids only."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in their order.

        A prompt is a text or a list of token ids; a list of numbers is one prompt. One
        SamplingParams for all, or one for each. `use_tqdm` (vLLM's name) allows a progress bar on
        a terminal for work longer than a second.

        Raises ValueError, with nothing enqueued, if any prompt or its parameters cannot run; it
        names the prompt by its position. If anything is raised on the way, Ctrl-C included, this
        call's requests are aborted and the engine stays usable. A request that fails inside the
        engine ends alone, with `error` set in its outputs.
        """
        return self._run(self._prepare(split_prompts(prompts), sampling_params, True), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The model's answer to a conversation, or to each of several; otherwise as `generate`.

        `chat_template_kwargs` reach the template (Qwen3: {"enable_thinking": False}).
        """
        kwargs = chat_template_kwargs or {}
        texts = [self.render_chat(one, **kwargs) for one in split_conversations(messages)]
        # The template has written the special tokens already.
        return self._run(self._prepare(texts, sampling_params, False), use_tqdm)

    def render_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> str:
        """The conversation as the model's template writes it, up to where the answer begins.

        Raises ValueError if the model has no template or the template rejects the messages.
        """
        kwargs = {"add_generation_prompt": True, **template_kwargs}
        return self._need_tokenizer("chat").apply_chat_template(messages, **kwargs)

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> TextStream:
        """Complete one prompt (n=1) and iterate over its text while it is generated.

        Set `add_special_tokens` to False for the text of `render_chat`. The request is enqueued
        when the iteration starts; leaving it early, or `close()`, aborts it.
        """
        (request,) = self._prepare([prompt], sampling_params, add_special_tokens)
        if request.params.n != 1:
            raise ValueError(f"a stream shows one completion, got n={request.params.n}")
        request.processors = [OutputProcessor(self.tokenizer, request.params)]
        return TextStream(self._stream(request), request.output, lambda: self._end([request]))

    def close(self) -> None:
        """Release the engine. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and model={self.config.model!r} has none: "
                "give prompts as token ids"
            )
        return self.tokenizer

    def _prepare(
        self,
        prompts: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        add_special_tokens: bool,
    ) -> list[_Request]:
        """Checks everything, enqueues nothing."""
        all_params = params_per_prompt(sampling_params, len(prompts))
        requests = []
        for position, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
            try:
                requests.append(self._request(prompt, params, add_special_tokens))
            except ValueError as error:
                raise ValueError(f"prompt {position}: {error}") from error
        return requests

    def _request(
        self, prompt: object, params: SamplingParams, add_special_tokens: bool
    ) -> _Request:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a text prompt")
            text, token_ids = prompt, tokenizer.encode(prompt, add_special_tokens)
        else:
            text, token_ids = None, as_token_ids(prompt)
        self.engine.check_request(token_ids, params)
        request = _Request(str(next(self._ids)), text, token_ids, params)
        if params.stop:
            request.processors = [OutputProcessor(self.tokenizer, params) for _ in range(params.n)]
        return request

    def _run(self, requests: list[_Request], show_progress: bool) -> list[RequestOutput]:
        with (
            self._enqueued(requests),
            ProgressBar([r.output for r in requests], show_progress) as progress,
        ):
            waiting = list(reversed(requests))
            while waiting:
                if waiting[-1].is_finished:
                    waiting.pop()
                else:
                    progress.update(self._step())
        return [request.output for request in requests]

    def _stream(self, request: _Request) -> Generator[str, None, None]:
        completion = request.output.outputs[0]
        num_sent = 0
        with self._enqueued([request]):
            while True:
                if len(completion.text) > num_sent:
                    piece = completion.text[num_sent:]
                    num_sent += len(piece)
                    yield piece
                elif request.is_finished:
                    return
                else:
                    self._step()

    @contextmanager
    def _enqueued(self, requests: list[_Request]) -> Iterator[None]:
        """However the block ends, none of its requests is left in the engine."""
        try:
            with _interrupt_afterwards(), self._alone():
                for request in requests:
                    self._requests[request.id] = request
                    self.engine.add_request(
                        request.id, request.output.prompt_token_ids, request.params
                    )
            yield
        finally:
            self._end(requests)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The engine for this thread alone. Finding another one inside is its user's mistake."""
        if self._inside not in (None, threading.get_ident()):
            raise RuntimeError("another thread is using this LLM: threads have to take turns")
        with self._lock:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = None

    def _step(self) -> float:
        """One step of the engine; returns the time after it."""
        with _interrupt_afterwards(), self._alone():
            outputs = self.engine.step()
            now = time.perf_counter()
            self._take(outputs, now)
            if not outputs and self._requests and not self.engine.has_unfinished_requests():
                lost = ", ".join(self._requests)
                raise RuntimeError(f"the engine is idle but has not finished requests {lost}")
        return now

    def _end(self, requests: list[_Request]) -> None:
        """Abort what has not finished, between steps, whichever thread makes them."""
        with _interrupt_afterwards(), self._lock:
            for request in requests:
                self._abort(request)

    def _take(self, outputs: list[StepOutput], now: float) -> None:
        """Hundreds of outputs per step come through here: the common case stays short."""
        requests = self._requests
        for output in outputs:
            request = requests.get(output.request_id)
            if request is None:  # aborted while the step was in flight
                continue
            if not request.is_started:
                request.start(output, now)
            finish_reason = output.finish_reason
            if request.processors is not None:
                finish_reason = self._take_processed(request, request.processors, output)
            else:
                completion = request.output.outputs[output.index]
                completion.token_ids += output.new_token_ids
                if output.logprobs is not None and completion.logprobs is not None:
                    completion.logprobs += output.logprobs
            if output.prompt_logprobs is not None:
                request.output.prompt_logprobs = output.prompt_logprobs
            if output.error is not None:
                logger.error("request %s failed: %s", request.id, output.error)
                self._abort(request, output.error)
            elif finish_reason is not None:
                self._finish(request, output.index, finish_reason, now)

    def _take_processed(
        self, request: _Request, processors: list[OutputProcessor], output: StepOutput
    ) -> FinishReason | None:
        delta = processors[output.index].add(
            output.new_token_ids, output.finish_reason, output.logprobs
        )
        completion = request.output.outputs[output.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if delta.logprobs is not None and completion.logprobs is not None:
            completion.logprobs += delta.logprobs
        if delta.must_abort:
            self.engine.abort_sequence(request.id, output.index)
        return delta.finish_reason

    def _finish(self, request: _Request, index: int, reason: FinishReason, now: float) -> None:
        completion = request.output.outputs[index]
        completion.finish_reason = reason
        if request.processors is None and self.tokenizer is not None:
            # At once: token by token is only worth it where somebody reads along or text may stop.
            completion.text = self.tokenizer.decode(
                without_stop_token(completion.token_ids, reason)
            )
        request.num_unfinished -= 1
        if request.is_finished:
            request.output.metrics.finished_time = now
            self._requests.pop(request.id, None)

    def _abort(self, request: _Request, error: str | None = None) -> None:
        """End all of the request that has not ended, whether or not it has been enqueued."""
        if request.id in self._requests:
            self.engine.abort_request(request.id)
        now = time.perf_counter()
        for index, completion in enumerate(request.output.outputs):
            if completion.finish_reason is None:
                if request.processors is not None:
                    completion.text += request.processors[index].add([], "abort").text
                self._finish(request, index, "abort", now)
                completion.error = error


class TextStream(Iterator[str]):
    """Pieces of text as they become certain; `output` fills meanwhile."""

    def __init__(
        self, pieces: Generator[str, None, None], output: RequestOutput, end: Callable[[], None]
    ) -> None:
        self._pieces = pieces
        self._end = end
        self.output = output

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Abort the request if it has not finished."""
        self._pieces.close()
        self._end()  # one that was never read as well


class _Request:
    """A request on its way, and the output it grows into."""

    __slots__ = ("id", "is_started", "num_unfinished", "output", "params", "processors")

    def __init__(
        self, request_id: str, text: str | None, token_ids: list[int], params: SamplingParams
    ) -> None:
        self.id = request_id
        self.params = params
        self.num_unfinished = params.n
        self.is_started = False
        # One per completion, or None where the text is only needed at the end.
        self.processors: list[OutputProcessor] | None = None
        completions = [
            CompletionOutput(index, logprobs=None if params.logprobs is None else [])
            for index in range(params.n)
        ]
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        self.output = RequestOutput(request_id, text, token_ids, completions, metrics)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def start(self, first: StepOutput, now: float) -> None:
        self.is_started = True
        self.output.metrics.num_cached_tokens = first.num_cached_tokens
        if first.new_token_ids:  # none if only the prompt is scored
            self.output.metrics.first_token_time = now


@contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """Ctrl-C inside the block is raised at its end: no step is left half done.

    A second one is raised at once, for a step that hangs. Where Ctrl-C is already handled in
    another way, or this is not the main thread, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
