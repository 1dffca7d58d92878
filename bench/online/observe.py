"""What a client sees of one request: when its pieces arrive, what is in them, how it ends."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"
MAX_FAILURE_TEXT = 200


class Observation(msgspec.Struct, gc=False):
    """Times are of the machine's monotonic clock, in seconds; equal in all its processes."""

    sent: float
    """When the client began to connect."""
    ended: float = 0.0
    arrivals: list[float] = []
    """When pieces with new tokens arrived; empty without stream. What could be read at one moment
    is one piece, whether the server sent it so or the client came late: a reader has it at once."""
    counts: list[int] = []
    """In each piece: tokens where the server says how many, else events."""
    counts_are_tokens: bool = False
    output_tokens: int = 0
    token_source: str = ""
    """Where that number is from. chunks: the server counted in every event; usage: at the end;
    length: it said that it reached max_tokens; events: nothing else was to be had."""
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache, where the server says."""
    server_times: dict[str, Any] | None = None
    """The server's own measurement, as it came."""
    failure: str | None = None


def failure_text(error: BaseException) -> str:
    return shorten(f"{type(error).__name__}: {error}")


def timeout_text(seconds: float) -> str:
    return f"timeout: not complete {seconds:g} s after it was sent"


def shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_FAILURE_TEXT else line[: MAX_FAILURE_TEXT - 3] + "..."


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct, gc=False):
    """A body, or an event of a stream; of all that may be in it, what is looked at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: dict[str, Any] | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def error_message(body: bytes) -> str:
    """The message in an error's JSON, in OpenAI's shape or an older one; else the text itself."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return shorten(body.decode(errors="replace"))
    return _message(content)


def _message(content: Any) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(key):
            content = content[key]
    return shorten(content if isinstance(content, str) else str(content))


class EventParser:
    """Cuts a byte stream into the data of server-sent events.

    The data of an event is one line, as JSON is written by every server there is; comments and
    other fields are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, content: bytes) -> list[bytes]:
        if self._rest:
            content = self._rest + content
        lines = content.split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class StreamReader:
    """Reads one stream into an observation."""

    def __init__(self, observation: Observation, max_tokens: int, exact: bool) -> None:
        """`exact`: anything but `max_tokens` tokens is a failure."""
        self.observation = observation
        self.max_tokens = max_tokens
        self.exact = exact
        self.is_done = False
        self._parser = EventParser()
        self._counted = 0  # tokens, or events
        self._usage: int | None = None
        self._finish_reason: str | None = None

    def feed(self, content: bytes, now: float) -> None:
        """Whatever could be read at time `now`. Raises msgspec.DecodeError for what is no JSON."""
        before = self._counted
        for payload in self._parser.feed(content):
            if payload == DONE:
                self.is_done = True
            else:
                self._take(_decode(payload))
        if self._counted > before:
            self.observation.arrivals.append(now)
            self.observation.counts.append(self._counted - before)

    def _take(self, answer: _Answer) -> None:
        seen = self.observation
        if answer.error is not None:
            seen.failure = "error in the stream: " + _message(answer.error)
        elif answer.object == "error":
            seen.failure = "error in the stream: " + shorten(answer.message or "")
        if answer.metrics is not None:
            seen.server_times = answer.metrics
        if answer.usage is not None:
            self._usage = answer.usage.completion_tokens
            if answer.usage.prompt_tokens_details is not None:
                seen.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
        if answer.choices:
            self._count(answer.choices[0], answer.usage)

    def _count(self, choice: _Choice, usage: _Usage | None) -> None:
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
        if usage is not None:
            self.observation.counts_are_tokens = True
            self._counted = max(self._counted, usage.completion_tokens)
        elif choice.token_ids is not None:
            self.observation.counts_are_tokens = True
            self._counted += len(choice.token_ids)
        # Some servers end with an event that has the reason and no token. An empty text alone says
        # nothing: a special token has none, nor has a part of a character.
        elif choice.text or choice.finish_reason is None or self._counted < self.max_tokens:
            self._counted += 1

    def end(self) -> None:
        """After the last byte: settles how many tokens came, and whether they should be so many."""
        seen = self.observation
        if seen.counts_are_tokens:
            seen.output_tokens, seen.token_source = self._counted, "chunks"
        elif self._usage is not None:
            seen.output_tokens, seen.token_source = self._usage, "usage"
        elif self._finish_reason == "length":
            seen.output_tokens, seen.token_source = self.max_tokens, "length"
        else:
            seen.output_tokens, seen.token_source = self._counted, "events"
        if seen.failure is not None:
            return
        if not self.is_done:
            seen.failure = "the stream ended without [DONE]"
        elif self._finish_reason is None:
            seen.failure = "the stream ended without a finish_reason"
        else:
            seen.failure = length_failure(seen.output_tokens, self.max_tokens, self.exact)


def length_failure(tokens: int, max_tokens: int, exact: bool) -> str | None:
    # Without the numbers: failures are counted by their text.
    if tokens > max_tokens:
        return "more tokens than asked for"
    if tokens == 0 or (exact and tokens < max_tokens):
        return "fewer tokens than asked for"
    return None


def read_body(seen: Observation, body: bytes, max_tokens: int, exact: bool) -> None:
    """The same for an answer that is not streamed. Raises msgspec.DecodeError."""
    answer = _decode(body)
    seen.server_times = answer.metrics
    reason = answer.choices[0].finish_reason if answer.choices else None
    if answer.usage is not None:
        seen.output_tokens, seen.token_source = answer.usage.completion_tokens, "usage"
        if answer.usage.prompt_tokens_details is not None:
            seen.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
    elif reason == "length":
        seen.output_tokens, seen.token_source = max_tokens, "length"
    else:
        seen.failure = "the answer says neither its usage nor that it reached max_tokens"
        return
    seen.failure = length_failure(seen.output_tokens, max_tokens, exact)
