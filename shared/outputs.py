"""What comes out of an engine, step by step, and out of `LLM.generate`, whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Log probability of one token and its rank among all (1: the most probable)."""

    logprob: float
    rank: int


# Sampled token first, then the most probable ones, best first.
TokenLogprobs = dict[int, Logprob]


class StepOutput(msgspec.Struct, gc=False, omit_defaults=True):
    """What one step produced for one sequence of a request (index 0..n-1).

    Hundreds are made per step; they hold no cycles, so the garbage collector need not know them.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per new token, when asked for."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token (the first is None), with the step that completes the prompt."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass
class RequestMetrics:
    """Host clock (time.perf_counter, seconds)."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    """Why the engine gave up (finish_reason "abort"); the rest is what there was until then."""


@dataclass
class RequestOutput:
    """A finished request; the shortcuts speak of completion 0."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs
