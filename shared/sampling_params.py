"""How the next token is chosen and when a sequence ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.config import LARGEST

Finite = Field(allow_inf_nan=False)
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]

# Beyond these, one request's lists cost its neighbours more time than the forward pass.
MAX_LOGPROBS = 100
MAX_TOKEN_LIST = 1024
MAX_STOP_STRINGS = 64


class SamplingParams(BaseModel):
    """Sampling options of one request, with vLLM's names and order of processing.

    logit_bias, min_tokens, repetition / frequency / presence penalty, temperature, min_p, top_k,
    top_p. `logprobs` and `prompt_logprobs` are the model's own log-softmax, before all of these.
    Wrong values and unknown names raise ValueError naming the field.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Independent completions of the prompt."""
    temperature: Annotated[float, Field(ge=0, le=100), Finite] = 1.0
    """0 is greedy, exactly: the largest logit, no noise."""
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] = 0
    """Keep the k most probable tokens; 0 and -1 keep all."""
    top_p: Annotated[float, Field(gt=0, le=1), Finite] = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least p."""
    min_p: Annotated[float, Field(ge=0, le=1), Finite] = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    """Subtracted for every time a token was generated."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100), Finite] = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL)."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Makes the request reproducible, whatever else is in the batch."""
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST)] = 16
    """Most tokens to generate. 0 only scores the prompt and needs prompt_logprobs."""
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    """End-of-text and stop tokens are impossible before this many tokens."""
    stop: Annotated[tuple[str, ...], Field(max_length=MAX_STOP_STRINGS)] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_TOKEN_LIST)] = ()
    """Token ids that end the sequence, besides the model's own end-of-text ids."""
    ignore_eos: bool = False
    """Generate past end-of-text."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log probabilities of the sampled token and of this many most probable ones."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The same for every prompt token but the first. Such a request skips prefix hits."""
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100), Finite]],
            Field(max_length=MAX_TOKEN_LIST),
        ]
        | None
    ) = None
    """Added to the logits of these tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_tuple(cls, value: object) -> object:
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _stop_ids_as_tuple(cls, value: object) -> object:
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("stop must not contain an empty string")
        return value

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens=0 generates nothing: it needs prompt_logprobs")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        return self

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def plain_after(self) -> int | None:
        """Output tokens after which only the temperature matters, so that the head's CUDA graph
        can sample the row. None: never."""
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        if filters and self.temperature > 0:  # no filter removes the largest logit
            return None
        if self.has_penalties or self.logit_bias or self.logprobs is not None:
            return None
        return self.min_tokens
