"""The many ways to give prompts and parameters, brought into one form."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.sampling_params import SamplingParams

Message = dict[str, Any]  # {"role": ..., "content": ...} and whatever the chat template reads
Prompt = str | Sequence[int] | np.ndarray


def split_prompts(prompts: object) -> list[object]:
    """The prompts one by one; a list of numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, list | tuple | range):
        raise ValueError(
            "prompts must be a text, a list of token ids, or a list of these, "
            f"got {type(prompts).__name__}"
        )
    nested = (str, list, tuple, range, np.ndarray)
    if prompts and not any(issubclass(kind, nested) for kind in set(map(type, prompts))):
        return [prompts]
    return list(prompts)


def split_conversations(messages: object) -> Sequence[Sequence[Message]]:
    """The conversations one by one; a list of tables is one conversation."""

    def is_conversation(value: object) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(m, dict) for m in value)

    if isinstance(messages, list | tuple):
        if messages and is_conversation(messages):
            return [messages]
        if all(map(is_conversation, messages)):
            return messages
    raise ValueError("messages must be a list of {role, content} tables, or a list of such lists")


def as_token_ids(prompt: object) -> list[int]:
    """Plain ints, whatever integers they were; whether the model has them is the engine's check."""
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise ValueError(
                "an array of token ids must be one row of integers, got "
                f"{prompt.dtype} with shape {prompt.shape}"
            )
        token_ids: list[int] = prompt.tolist()
        return token_ids
    if not isinstance(prompt, list | tuple | range):
        raise ValueError(
            f"a prompt must be a text or a list of token ids, got {type(prompt).__name__}"
        )
    kinds = set(map(type, prompt))
    if kinds <= {int}:
        return list(prompt)
    integer = {kind for kind in kinds if issubclass(kind, int | np.integer) and kind is not bool}
    if kinds != integer:
        wrong = next(token for token in prompt if type(token) not in integer)
        raise ValueError(f"token ids must be integers, got {reprlib.repr(wrong)}")
    return [int(token) for token in prompt]


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """One for each prompt, where one for all or none at all (the defaults) was given."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple):
        raise ValueError(
            "sampling_params must be a SamplingParams or a list with one for each prompt, "
            f"got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise ValueError(f"sampling_params must hold SamplingParams only, got {entry!r}")
    return params
