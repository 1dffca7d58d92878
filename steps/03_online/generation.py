"""What one HTTP request has the engine do, and what comes of it, as pieces of text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.output import CompletionDelta, OutputProcessor
from shared.outputs import StepOutput, TokenLogprobs
from shared.sampling_params import SamplingParams

from .api_types import RequestTimes, Usage
from .async_engine import AsyncEngine, Stream
from .errors import ApiError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """The engine's part of an HTTP request: prompts, [n] int32 each, checked, and one set of
    parameters for all of them."""

    prompts: list[np.ndarray]
    params: SamplingParams


@dataclass(slots=True)
class Choice:
    """One completion, as far as it has come."""

    index: int
    """Among all of the request's: the n of the first prompt, then those of the second..."""
    prompt: int
    """Position of its prompt."""
    processor: OutputProcessor
    first_time: float | None = None
    last_time: float | None = None


@dataclass(slots=True)
class Piece:
    """What is new of a choice."""

    choice: Choice
    delta: CompletionDelta
    is_first: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first piece, when asked for."""


class Generation:
    """One engine request for each prompt of the task. They end with `pieces`, however that ends."""

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        task: Task,
        arrival: float,
        on_first: Callable[[float], None],
        on_end: Callable[[Generation], None],
    ) -> None:
        """`arrival`: time.perf_counter() when the HTTP request was there. `on_first` is told how
        many seconds later the first token of any choice came."""
        self._on_first = on_first
        self._on_end = on_end
        self.engine = engine
        self.request_id = request_id
        self.task = task
        self.arrival = arrival
        self.num_prompt_tokens = sum(map(len, task.prompts))
        self.num_cached_tokens = 0
        self.choices = [
            Choice(
                prompt * task.params.n + index,
                prompt,
                OutputProcessor(engine.tokenizer, task.params),
            )
            for prompt in range(len(task.prompts))
            for index in range(task.params.n)
        ]
        self.num_unfinished = len(self.choices)
        self._first_time: float | None = None  # of all choices

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Everything new since the last look, until all choices have ended.

        Close it (contextlib.aclosing) when it is left early: the engine then stops between two
        steps. Raises QueueFull, with nothing left enqueued; EngineDeadError; ApiError 500 if the
        engine gave up on the request.
        """
        streams: list[Stream] = []
        try:
            for number, prompt in enumerate(self.task.prompts):
                name = f"{self.request_id}-{number}"
                streams.append(self.engine.generate(name, prompt, self.task.params))
            async with contextlib.aclosing(_merged(streams)) as outputs_of:
                async for number, outputs in outputs_of:
                    pieces = self._take(streams[number], number, outputs)
                    if pieces:
                        yield pieces
                    if not self.num_unfinished:
                        return
        finally:
            if len(streams) == len(self.task.prompts):
                self._on_end(self)
            for stream in streams:
                await stream.aclose()

    def _take(self, stream: Stream, number: int, outputs: list[StepOutput]) -> list[Piece]:
        now = time.perf_counter()
        pieces = []
        for output in outputs:
            choice = self.choices[number * self.task.params.n + output.index]
            if choice.processor.finish_reason is not None:
                continue  # surplus: a stop string ended it
            if output.error is not None or output.finish_reason == "abort":
                logger.error("request %s failed: %s", output.request_id, output.error)
                raise ApiError(500, "the engine could not complete the request")
            is_first = choice.last_time is None
            delta = choice.processor.add(
                output.new_token_ids, output.finish_reason, output.logprobs
            )
            if is_first and output.index == 0:
                self.num_cached_tokens += output.num_cached_tokens
            if is_first and output.new_token_ids:
                choice.first_time = now
                if self._first_time is None:
                    self._first_time = now
                    self._on_first(now - self.arrival)
            choice.last_time = now
            if delta.must_abort:
                stream.abort_sequence(output.index)
            if delta.finish_reason is not None:
                self.num_unfinished -= 1
            pieces.append(Piece(choice, delta, is_first, output.prompt_logprobs))
        return pieces

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.processor.num_tokens for choice in self.choices)

    def usage(self) -> Usage:
        completion_tokens = self.num_output_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.num_prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def times(self) -> RequestTimes:
        """So far."""
        gaps = [
            (c.last_time - c.first_time) / (c.processor.num_tokens - 1)
            for c in self.choices
            if c.first_time is not None and c.last_time is not None and c.processor.num_tokens > 1
        ]
        return {
            "ttft": None if self._first_time is None else self._first_time - self.arrival,
            "tpot": sum(gaps) / len(gaps) if gaps else None,
            "total_time": time.perf_counter() - self.arrival,
        }


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[StepOutput]], None]:
    """What the streams give, with the stream's position. Each runs ahead by one item at most;
    whatever else comes meanwhile coalesces in the stream."""
    if len(streams) == 1:
        async for outputs in streams[0]:
            yield 0, outputs
        return
    ready: asyncio.Queue[tuple[int, list[StepOutput] | BaseException | None]] = asyncio.Queue(1)

    async def pump(number: int, stream: Stream) -> None:
        end: BaseException | None = None
        try:
            async for outputs in stream:
                await ready.put((number, outputs))
        except Exception as error:
            end = error
        await ready.put((number, end))

    pumps = [asyncio.create_task(pump(n, stream)) for n, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            number, item = await ready.get()
            if isinstance(item, BaseException):
                raise item
            elif item is None:
                num_open -= 1
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
