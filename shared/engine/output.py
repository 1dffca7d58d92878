"""From token ids to text: incremental detokenising, stop strings, and where a completion ends.

The engine deals in ids only. `OutputProcessor` turns what it reports for one sequence into text
that is safe to show: no half of a character and no half of a stop string is ever given out. `LLM`
and the HTTP server both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shared.outputs import FinishReason, TokenLogprobs
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most 4 bytes, so at most this many bytes of it wait for the rest.
MAX_UNFINISHED_BYTES = 3

# Tokens decoded again with the next one while a character is unfinished.
MAX_WINDOW = 16


class IncrementalDetokenizer:
    """Text of a growing list of token ids, piece by piece, at constant cost per token.

    For any ids, the pieces of `add` and `finish` together are `tokenizer.decode` of all the ids,
    also where their bytes are not UTF-8. The tokenizer has to be a byte-level BPE (Qwen, GPT-2,
    Llama 3): its text is that of the tokens' bytes, and only the last character can still change.
    So a U+FFFD at the end, which stands for bytes that may be the beginning of a character, is
    held back until the next character is there, and nothing else is: no flood of invalid bytes
    makes it wait for ever.

    Tokens are kept only while that is so; their text is

        [ given out earlier | given out now | U+FFFD held back ]

    With `skip_special_tokens`, special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # empty, or tokens of which the last is not finished
        self._num_given = 0  # characters of decode(window) already given out

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that has become certain, possibly none."""
        visible = [t for t in token_ids if t not in self._skipped]
        if not visible:
            return ""
        self._window += visible
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_given :]
            self._window, self._num_given = [], 0
            return piece
        piece = text[self._num_given : -1]
        self._num_given += len(piece)
        if len(self._window) >= MAX_WINDOW:
            self._shrink(text)
        return piece

    def finish(self) -> str:
        """What was held back. Nothing may be added afterwards."""
        return self._decode(self._window)[self._num_given :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _shrink(self, text: str) -> None:
        """Forget the oldest tokens of the window, of which `text` is the decoding.

        The cut must not go through an unfinished character at the end. If it did, fewer than its
        bytes would be left, and each gives one character at most: a longer text rules it out.
        Going through any other character does no harm, since that one is given out.
        """
        for size in range(MAX_UNFINISHED_BYTES, len(self._window)):
            tail = self._decode(self._window[-size:])
            if len(tail) >= MAX_UNFINISHED_BYTES:
                self._window = self._window[-size:]
                self._num_given -= len(text) - len(tail)
                return
        # Only ids without any text (a model's vocabulary may be larger than the tokenizer's) can
        # fill the window to here. Without them it is short.
        self._window = [t for t in self._window if self._decode([t])]


class StopChecker:
    """Finds stop strings in text that arrives in pieces.

    Of several stop strings the one that is complete first counts (of those the longest), so that
    the result does not depend on how the text is cut into pieces. The longest end of the text that
    could be the beginning of a stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def add(self, text: str, check: bool = True) -> tuple[str, bool]:
        """Append text; returns (text that is certain, whether a stop string was found).

        Once one is found, the text ends before it. With check=False no stop string may end in this
        piece, but one may begin in it.
        """
        if not text:
            return "", False
        num_seen = len(self._held)
        buffer = self._held + text
        if check:
            start = self._find(buffer, num_seen)
            if start is not None:
                self._held = ""
                return buffer[:start], True
        certain = self._possible_start(buffer)
        self._held = buffer[certain:]
        return buffer[:certain], False

    def finish(self) -> str:
        """The text held back, now that no more follows."""
        return self._held

    def _find(self, buffer: str, num_seen: int) -> int | None:
        """Start of the stop string that ends first, of those that end beyond `num_seen`."""
        ends = []
        for stop in self._stop:
            start = buffer.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        return min(ends)[1] if ends else None

    def _possible_start(self, buffer: str) -> int:
        """The first position from which the buffer is a proper beginning of a stop string."""
        first = len(buffer)
        for stop in self._stop:
            position = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= position < first:
                if stop.startswith(buffer[position:]):
                    first = position
                else:
                    position = buffer.find(stop[0], position + 1)
        return first


class CompletionDelta(msgspec.Struct):
    """What one step adds to a completion, surplus removed."""

    text: str = ""
    token_ids: list[int] = []
    """Tokens that count, the one that ends the completion included."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token that counts, when the engine gave any."""
    finish_reason: FinishReason | None = None
    """Set exactly once, by the delta that ends the completion."""
    must_abort: bool = False
    """A stop string was found. The engine does not know: abort this sequence there."""


class OutputProcessor:
    """Text, tokens and end of one sequence; vLLM's rules.

    - A token that ends the sequence (end of text, `stop_token_ids`) counts, but has no text.
    - A stop string ends the text before it. The token that completes it is the last that counts;
      what the engine has sampled beyond it is surplus.
    - Stop strings are looked for after `min_tokens` tokens.

    Without a tokenizer there is no text, and `stop` is a ValueError.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise ValueError("stop needs a tokenizer, and this model has none")
        self.num_tokens = 0
        """Tokens that count so far: completion tokens of the usage."""
        self.finish_reason: FinishReason | None = None
        self._min_tokens = params.min_tokens
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._checker = StopChecker(params.stop) if params.stop else None

    def add(
        self,
        new_token_ids: list[int],
        finish_reason: FinishReason | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> CompletionDelta:
        """Takes these fields of a StepOutput. After the end it returns empty deltas."""
        if self.finish_reason is not None:
            return CompletionDelta()
        if self._checker is not None:
            delta = self._add_checked(self._checker, new_token_ids, finish_reason)
        else:
            delta = CompletionDelta(
                self._decode(new_token_ids, finish_reason), new_token_ids, None, finish_reason
            )
        if logprobs is not None:
            delta.logprobs = logprobs[: len(delta.token_ids)]
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        return delta

    def _decode(self, new_token_ids: list[int], finish_reason: FinishReason | None) -> str:
        if self._detokenizer is None:
            return ""
        if finish_reason is None:
            return self._detokenizer.add(new_token_ids)
        shown = without_stop_token(new_token_ids, finish_reason)
        return self._detokenizer.add(shown) + self._detokenizer.finish()

    def _add_checked(
        self, checker: StopChecker, new_token_ids: list[int], finish_reason: FinishReason | None
    ) -> CompletionDelta:
        text = ""
        # Token by token, since the one that completes a stop string has to be known.
        for count, token_id in enumerate(without_stop_token(new_token_ids, finish_reason), 1):
            piece, stopped = checker.add(
                self._decode([token_id], None), self.num_tokens + count > self._min_tokens
            )
            text += piece
            if stopped:
                # If the engine has ended the sequence by itself, aborting it again does no harm.
                return CompletionDelta(text, new_token_ids[:count], None, "stop", must_abort=True)
        if finish_reason is not None:
            rest = self._decode([], finish_reason)
            enough = self.num_tokens + len(new_token_ids) > self._min_tokens
            piece, stopped = checker.add(rest, enough)
            text += piece
            if stopped:
                finish_reason = "stop"
            else:
                text += checker.finish()
        return CompletionDelta(text, new_token_ids, None, finish_reason)


def without_stop_token(token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
    """The tokens that have text: all but the last if that one has ended the sequence."""
    return token_ids[:-1] if finish_reason == "stop" else token_ids
