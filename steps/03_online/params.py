"""From a request's fields to SamplingParams, and the small helpers both endpoints share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.slots import Limits
from shared.outputs import FinishReason as EngineFinishReason
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

from .api_types import SAMPLING_FIELDS, FinishReason, GenerationRequest

TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

# JSON has no infinity; OpenAI writes this for it.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Model:
    """What a request is prepared with."""

    tokenizer: Tokenizer | None
    limits: Limits
    max_tokens: int
    """Most that a request may ask for."""
    check_request: Callable[[Sequence[int], SamplingParams], np.ndarray]
    """The engine's: the prompt as it takes it, or a ValueError."""
    max_prompts: int
    """Most that a request may have: more could never be queued together."""

    def encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises ValueError if the field is longer than could ever fit,
        before that takes long to count."""
        tokenizer = self.need_tokenizer(field)
        least, most = tokenizer.least_tokens(text), self.limits.max_model_length
        if least > most:
            raise ValueError(f"{field} has at least {least} tokens; at most {most} fit")
        return tokenizer.encode(text, add_special_tokens)

    def need_tokenizer(self, field: str) -> Tokenizer:
        """Raises ValueError naming the field that needs it."""
        if self.tokenizer is None:
            raise ValueError(f"{field} needs a tokenizer, and this model has none: give token ids")
        return self.tokenizer


def sampling_params(
    body: GenerationRequest, model: Model, default_max_tokens: int, **values: Any
) -> SamplingParams:
    """`values` have precedence over the request's. Raises ValueError naming the field."""
    if body.stream_options is not None and not body.stream:
        raise ValueError("stream_options needs stream")
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    default = {"max_tokens": min(default_max_tokens, model.max_tokens)}
    params = SamplingParams(**{**default, **given, **values})
    if params.max_tokens > model.max_tokens:
        raise ValueError(
            f"max_tokens: at most {model.max_tokens} are served, got {params.max_tokens}"
        )
    return params


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        if TOKEN_ID.fullmatch(key) is None:
            raise ValueError(f"logit_bias: keys are token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in biases.items()}


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """How logprobs name a token. A part of a character has no text: OpenAI spells its bytes."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def served_reason(reason: EngineFinishReason | None) -> FinishReason | None:
    """OpenAI's ways to end. What was aborted is answered with an error and never comes here."""
    assert reason != "abort"
    return reason
