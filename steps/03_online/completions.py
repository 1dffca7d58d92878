"""/v1/completions: a text in, its continuation out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.outputs import TokenLogprobs
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

from .api_types import CompletionChoice, CompletionLogprobs, CompletionRequest
from .errors import invalid_value
from .generation import Piece, Task
from .params import LOWEST_LOGPROB, Model, finite, sampling_params, served_reason, token_text

# The engine takes a request between two steps, and all others wait for that.
MAX_CHOICES = 4096

# What the engine calls the fields of this request.
NAMES = {"prompt_token_ids": "prompt", "prompt_logprobs": "logprobs", "text": "prompt"}


def prepare(body: CompletionRequest, model: Model) -> tuple[Task, CompletionFormat]:
    """Raises ApiError 400 naming the field."""
    try:
        params = _params(body, model)
        prompts = [_prompt(prompt, body, params, model) for prompt in body.prompt]
        echoed = None
        if body.echo:
            echoed = [_text(*pair, model) for pair in zip(body.prompt, prompts, strict=True)]
    except ValueError as error:
        raise invalid_value(error, CompletionRequest.model_fields, NAMES, "prompt") from error
    return Task(prompts, params), CompletionFormat(body, model.tokenizer, prompts, echoed)


def _params(body: CompletionRequest, model: Model) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise ValueError("max_tokens=0 generates nothing: it needs echo")
    scores_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    params = sampling_params(
        body,
        model,
        SamplingParams.model_fields["max_tokens"].default,
        logprobs=body.logprobs,
        prompt_logprobs=(body.logprobs or 0) if scores_prompt else None,
    )
    if body.best_of not in (None, params.n):
        raise ValueError("best_of: only the same as n is supported")
    if len(body.prompt) > model.max_prompts:
        raise ValueError(
            f"prompt: at most {model.max_prompts} prompts are served at a time, "
            f"got {len(body.prompt)}"
        )
    if len(body.prompt) * params.n > MAX_CHOICES:
        raise ValueError(f"prompt: at most {MAX_CHOICES} completions in one request")
    return params


def _prompt(
    prompt: str | list[int], body: CompletionRequest, params: SamplingParams, model: Model
) -> np.ndarray:
    if isinstance(prompt, str):
        prompt = model.encode(prompt, "prompt", body.add_special_tokens is not False)
    return model.check_request(prompt, params)


def _text(prompt: str | list[int], token_ids: np.ndarray, model: Model) -> str:
    """What echo repeats: a text as it came, ids with all of their text."""
    if isinstance(prompt, str):
        return prompt
    return model.need_tokenizer("echo").decode(token_ids.tolist(), skip_special_tokens=False)


class CompletionFormat:
    """Pieces of text as OpenAI's completion choices."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        tokenizer: Tokenizer | None,
        prompts: list[np.ndarray],
        echoed: list[str] | None,
    ) -> None:
        """`echoed`: texts of the prompts, where they are repeated."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._echoed = echoed
        self._logprobs = body.logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._offsets: dict[int, int] = {}  # by choice: characters of its tokens so far

    def chunk(self, piece: Piece) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": piece.choice.index,
            "text": piece.delta.text,
            "logprobs": None,
            "finish_reason": served_reason(piece.delta.finish_reason),
        }
        if piece.is_first and self._echoed is not None:
            choice["text"] = self._echoed[piece.choice.prompt] + choice["text"]
        if self._logprobs:
            choice["logprobs"] = self._logprobs_of(piece)
        if self._token_ids:
            choice["token_ids"] = piece.delta.token_ids
            if piece.is_first:
                choice["prompt_token_ids"] = self._prompts[piece.choice.prompt].tolist()
        return choice

    # Whole, it looks the same.
    choice = chunk

    def _logprobs_of(self, piece: Piece) -> CompletionLogprobs:
        index = piece.choice.index
        made: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if piece.is_first and self._echoed is not None:
            prompt: list[int] = self._prompts[piece.choice.prompt].tolist()
            rows = piece.prompt_logprobs or []
            self._offsets[index] = self._extend(made, prompt, rows, 0, frozenset())
        skipped = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
        self._offsets[index] = self._extend(
            made,
            piece.delta.token_ids,
            piece.delta.logprobs or [],
            self._offsets.get(index, 0),
            skipped,
        )
        return made

    def _extend(
        self,
        made: CompletionLogprobs,
        token_ids: Sequence[int],
        rows: Sequence[TokenLogprobs | None],
        offset: int,
        skipped: frozenset[int],
    ) -> int:
        """Append tokens that begin at character `offset`; returns where they end."""
        for token_id, row in zip(token_ids, rows, strict=True):
            made["tokens"].append(token_text(self._tokenizer, token_id))
            made["text_offset"].append(offset)
            made["token_logprobs"].append(None if row is None else finite(row[token_id].logprob))
            made["top_logprobs"].append(None if row is None else self._by_text(row))
            if self._tokenizer is not None and token_id not in skipped:
                offset += num_characters(self._tokenizer.token_bytes(token_id))
        return offset

    def _by_text(self, row: TokenLogprobs) -> dict[str, float]:
        """Of tokens with the same text the most probable counts."""
        best: dict[str, float] = {}
        for token_id, entry in row.items():
            text = token_text(self._tokenizer, token_id)
            best[text] = max(best.get(text, LOWEST_LOGPROB), entry.logprob)
        return best


def num_characters(content: bytes) -> int:
    """Characters that begin in `content`; UTF-8 marks the bytes that only continue one."""
    return sum(byte & 0xC0 != 0x80 for byte in content)
