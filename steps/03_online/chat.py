"""/v1/chat/completions: a conversation in, what the assistant says next out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.outputs import TokenLogprobs
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

from .api_types import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatTokenLogprob,
    Message,
    TopLogprob,
)
from .errors import invalid_value
from .generation import Piece, Task
from .params import Model, finite, sampling_params, served_reason, token_text

# What chat_template_kwargs may not set: the server does.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "self"})


def prepare(body: ChatRequest, model: Model) -> tuple[Task, ChatFormat]:
    """Raises ApiError 400 naming the field."""
    names = {"prompt_token_ids": "messages", "text": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    try:
        text = render(body.messages, model, body.chat_template_kwargs)
        # The template has written the special tokens already.
        token_ids = model.encode(text, "messages", add_special_tokens=False)
        params = _params(body, model, len(token_ids))
        prompt = model.check_request(token_ids, params)
    except ValueError as error:
        raise invalid_value(error, ChatRequest.model_fields, names, "messages") from error
    return Task([prompt], params), ChatFormat(body, model.tokenizer, prompt)


def render(
    messages: Sequence[Message],
    model: Model,
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as the model's template writes it. Raises ValueError."""
    tokenizer = model.need_tokenizer("messages")
    variables = template_kwargs or {}
    reserved = RESERVED & variables.keys()
    if reserved:
        raise ValueError(f"chat_template_kwargs must not set {min(reserved)}")
    return tokenizer.apply_chat_template(
        [_as_template_reads(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


def _as_template_reads(message: Message) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": "\n".join(part.text for part in message.content)}


def _params(body: ChatRequest, model: Model, num_prompt_tokens: int) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ValueError("top_logprobs needs logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ValueError("max_completion_tokens and max_tokens are two names of one limit")
    if limits == {0}:
        raise ValueError("max_tokens: at least 1, got 0")
    values = {"max_tokens": limits.pop()} if limits else {}
    room = model.limits.max_model_length - num_prompt_tokens
    # Without room the prompt is too long, which the engine's check explains.
    return sampling_params(
        body,
        model,
        max(room, 1),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **values,
    )


class ChatFormat:
    """Pieces of text as OpenAI's chat choices."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer | None, prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._token_ids = bool(body.return_token_ids)

    def chunk(self, piece: Piece) -> ChatChunkChoice:
        delta: ChatDelta = {"content": piece.delta.text}
        if piece.is_first:
            delta = {"role": "assistant", **delta}
        return self._with_ids(
            piece,
            {
                "index": piece.choice.index,
                "delta": delta,
                "logprobs": self._logprobs(piece),
                "finish_reason": served_reason(piece.delta.finish_reason),
            },
        )

    def choice(self, piece: Piece) -> ChatChoice:
        return self._with_ids(
            piece,
            {
                "index": piece.choice.index,
                "message": {"role": "assistant", "content": piece.delta.text, "refusal": None},
                "logprobs": self._logprobs(piece),
                "finish_reason": served_reason(piece.delta.finish_reason),
            },
        )

    def _with_ids(self, piece: Piece, choice: Any) -> Any:
        if self._token_ids:
            choice["token_ids"] = piece.delta.token_ids
            if piece.is_first:
                choice["prompt_token_ids"] = self._prompt.tolist()
        return choice

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        rows = zip(piece.delta.token_ids, piece.delta.logprobs or [], strict=True)
        return {"content": [self._token(*row) for row in rows], "refusal": None}

    def _token(self, token_id: int, row: TokenLogprobs) -> ChatTokenLogprob:
        top = [
            self._named(token, entry.logprob)
            for token, entry in sorted(row.items(), key=lambda item: item[1].rank)
            if entry.rank <= (self._top_logprobs or 0)
        ]
        return {**self._named(token_id, row[token_id].logprob), "top_logprobs": top}

    def _named(self, token_id: int, logprob: float) -> TopLogprob:
        content = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": content,
        }
