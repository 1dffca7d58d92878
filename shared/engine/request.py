"""From a request to its sequences. Everything that could make it fail later is refused here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from shared.engine.seeds import sequence_seed
from shared.engine.sequence import Sequence
from shared.engine.slots import Limits
from shared.sampling_params import SamplingParams


def check_token_ids(token_ids: SequenceOf[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """[n] int32. Raises ValueError naming prompt_token_ids and the first id that is wrong."""
    if not isinstance(token_ids, np.ndarray):
        if not isinstance(token_ids, SequenceOf) or isinstance(token_ids, (str, bytes)):
            raise ValueError(
                f"prompt_token_ids must be a list of integers, got {type(token_ids).__name__}"
            )
        wrong = next((t for t in token_ids if type(t) is not int), None)
        if wrong is not None:
            raise ValueError(f"prompt_token_ids must be integers, got {wrong!r}")
        try:
            token_ids = np.array(token_ids, np.int64)
        except OverflowError:
            raise ValueError("prompt_token_ids holds a number of more than 64 bits") from None
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"prompt_token_ids must be one row of integers, got an array of {token_ids.dtype} "
            f"with shape {token_ids.shape}"
        )
    if not len(token_ids):
        raise ValueError("prompt_token_ids is empty: there is nothing to continue")
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"prompt_token_ids holds {outside[0]}, outside the vocabulary of {vocab_size} tokens"
        )
    return token_ids.astype(np.int32)


def check_lengths(
    num_prompt_tokens: int, params: SamplingParams, limits: Limits, cuts_prompts: bool
) -> None:
    """Raises ValueError if the prompt leaves no room for a first token, or fits no step of an
    engine that cannot cut it."""
    room = limits.max_model_length - min(1, params.max_tokens)
    if num_prompt_tokens > room:
        raise ValueError(
            f"prompt_token_ids has {num_prompt_tokens} tokens; at most {room} fit "
            f"(max_model_length={limits.max_model_length}, KV pool of "
            f"{limits.num_blocks * limits.block_size} tokens)"
        )
    if not cuts_prompts and num_prompt_tokens > limits.max_num_batched_tokens:
        raise ValueError(
            f"prompt_token_ids has {num_prompt_tokens} tokens: more than "
            f"max_num_batched_tokens={limits.max_num_batched_tokens}, and this stage "
            f"computes a prompt in one step"
        )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if a sampling option names a token the model does not have."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        outside = next((token for token in ids if token >= vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"{name} names token {outside}, outside the vocabulary of {vocab_size} tokens"
            )


def check_request_id(request_id: str) -> None:
    """Raises ValueError for what cannot be printed in a log."""
    if not isinstance(request_id, str) or not request_id.isprintable():
        raise ValueError(f"request_id must be a printable string, got {request_id!r}")


def check_request(
    prompt_token_ids: SequenceOf[int] | np.ndarray,
    params: SamplingParams,
    limits: Limits,
    cuts_prompts: bool = True,
) -> np.ndarray:
    """The prompt as [n] int32. Raises ValueError naming whatever could never run."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
    tokens = check_token_ids(prompt_token_ids, limits.vocab_size)
    check_lengths(len(tokens), params, limits, cuts_prompts)
    check_vocabulary(params, limits.vocab_size)
    return tokens


def make_sequences(
    request_id: str,
    tokens: np.ndarray,
    params: SamplingParams,
    limits: Limits,
    eos_token_ids: tuple[int, ...],
    seed: int,
) -> list[Sequence]:
    """The `params.n` sequences of a checked request."""
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= frozenset(eos_token_ids)
    return [
        Sequence(
            request_id,
            index,
            tokens,
            params,
            sequence_seed(seed, index),
            limits.max_model_length,
            stop_ids,
        )
        for index in range(params.n)
    ]
