"""Text from tokens: nothing torn, nothing lost, nothing shown that a stop string takes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from shared.engine.output import IncrementalDetokenizer, OutputProcessor, StopChecker
from shared.outputs import Logprob
from shared.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Longest hold-back, in characters, whatever comes.
BOUND = 1


@cache
def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as Qwen3's, with a few merges: common words are one token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    corpus = ["the quick brown fox jumps over the lazy dog", "你好世界，你好", "über 🙂"] * 20
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(backend, {}, {})


def byte_id(byte: int) -> int:
    """The token of one byte: the alphabet is sorted by its printable stand-ins."""
    backend = byte_level_tokenizer()._backend
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    stand_in = chr(byte) if byte in kept else chr(256 + others.index(byte))
    token_id = backend.token_to_id(stand_in)
    assert token_id is not None
    return token_id


def bytes_to_ids(data: bytes) -> list[int]:
    return [byte_id(byte) for byte in data]


def split(ids: Sequence[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in pieces of these sizes, over and over."""
    pieces, start = [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(list(ids[start : start + size]))
        start += size
    return pieces


some_ids = st.one_of(
    st.text(max_size=6).map(lambda text: bytes_to_ids(text.encode())),
    st.text(max_size=6).map(lambda text: byte_level_tokenizer().encode(text)),
    st.binary(max_size=6).map(bytes_to_ids),
    st.sampled_from(["你", "🙂", REPLACEMENT]).map(lambda c: bytes_to_ids(c.encode()[:-1])),
    st.sampled_from([0x80, 0xBD, 0xE4, 0xF0, 0xFF]).map(lambda b: [byte_id(b)] * 20),
    st.lists(st.integers(0, 340), max_size=6),  # specials, and ids beyond the tokenizer's
    st.integers(0, 400).map(lambda token: [token] * 40),
)
streams = st.lists(some_ids, max_size=8).map(lambda parts: [t for part in parts for t in part])
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@given(streams, sizes, st.booleans())
def test_pieces_are_the_decoding_of_all_tokens(
    ids: list[int], sizes: list[int], skip_special: bool
) -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special)
    text = ""
    seen: list[int] = []
    for piece in split(ids, sizes):
        text += detokenizer.add(piece)
        seen += piece
        so_far = tokenizer.decode(seen, skip_special_tokens=skip_special)
        assert so_far.startswith(text)
        assert len(so_far) - len(text) <= BOUND
        assert len(detokenizer._window) < 32
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip_special)


@pytest.mark.parametrize("text", ["你好，世界 🙂 the quick über", "👨‍👩‍👧‍👦" * 20, "a" * 100])
def test_a_character_spread_over_tokens_is_never_torn(text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    pieces = [detokenizer.add([token]) for token in bytes_to_ids(text.encode())]
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)
    assert detokenizer.finish() == ""


def test_a_character_that_is_never_finished_comes_with_the_end() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    assert detokenizer.add(bytes_to_ids("ok你".encode()[:-1])) == "ok"
    assert detokenizer.finish() == REPLACEMENT


def test_a_special_token_inside_a_character_changes_nothing() -> None:
    tokenizer = byte_level_tokenizer()
    first, *rest = bytes_to_ids("你".encode())
    special = min(tokenizer.special_ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add([first, special]) == ""
    assert detokenizer.add(rest) == "你"


class CountingTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids = tokenizer.special_ids
        self.num_decoded = 0
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += 1 + len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    "data", [b"a", b"\xff", b"\xe4", b"\xf0\x9f", "🙂".encode(), "\ufffd".encode(), b"a\x80"]
)
@pytest.mark.parametrize("size", [1, 4])
def test_the_cost_per_token_does_not_grow(data: bytes, size: int) -> None:
    costs = []
    for length in (400, 4000):
        tokenizer = CountingTokenizer(byte_level_tokenizer())
        detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
        ids = (bytes_to_ids(data) * length)[:length]
        for piece in split(ids, [size]):
            detokenizer.add(piece)
        costs.append(tokenizer.num_decoded / length)
    assert costs[1] < costs[0] * 1.2 < 60


def test_ids_without_text_do_not_pile_up() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    for _ in range(1000):
        assert detokenizer.add([100_000]) == ""
    assert len(detokenizer._window) <= 16
    assert detokenizer.add(bytes_to_ids(b"hi")) == "hi"


def cut_at_stop(text: str, stop: list[str], unchecked: int = 0) -> tuple[str, bool]:
    """What the checker must do, by trying every end."""
    for end in range(unchecked + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


ab_text = st.text("ab", max_size=12)
ab_stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(ab_text, max_size=6), ab_stops, st.integers(0, 3))
def test_stop_strings_are_found_however_the_text_is_cut(
    pieces: list[str], stop: list[str], num_unchecked: int
) -> None:
    checker = StopChecker(stop)
    expected, expect_stopped = cut_at_stop(
        "".join(pieces), stop, len("".join(pieces[:num_unchecked]))
    )
    shown, stopped = "", False
    for number, piece in enumerate(pieces):
        certain, stopped = checker.add(piece, check=number >= num_unchecked)
        shown += certain
        assert expected.startswith(shown), "text was shown that is cut away"
        if stopped:
            break
    else:
        shown += checker.finish()
    assert (shown, stopped) == (expected, expect_stopped)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.add("hello\n") == ("hello", False)
    assert checker.add("world\n") == ("\nworld", False)
    assert checker.add("\nUs") == ("", False)
    assert checker.add("ual") == ("\n\nUsual", False)
    assert checker.add("\n\nUser: x") == ("", True)


def processor(**params: object) -> OutputProcessor:
    return OutputProcessor(byte_level_tokenizer(), SamplingParams.model_validate(params))


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    return bytes_to_ids(text.encode())


def test_a_stop_string_over_several_tokens_ends_text_tokens_and_logprobs() -> None:
    output = processor(stop=["END"], max_tokens=100, logprobs=0)
    first = output.add(ids_of("abE"), None, [{t: Logprob(-1.0, 1)} for t in ids_of("abE")])
    assert (first.text, first.finish_reason) == ("ab", None)
    ids = ids_of("NDxyz")
    last = output.add(ids, None, [{t: Logprob(-1.0, 1)} for t in ids])
    assert (last.text, last.finish_reason, last.must_abort) == ("", "stop", True)
    assert last.token_ids == ids[:2]
    assert last.logprobs is not None
    assert [list(entry) for entry in last.logprobs] == [[t] for t in ids[:2]]
    assert output.num_tokens == 5
    surplus = output.add(ids, "length")
    assert (surplus.text, surplus.token_ids, surplus.finish_reason) == ("", [], None)
    assert output.num_tokens == 5


def test_the_start_of_a_stop_string_appears_when_the_completion_ends_otherwise() -> None:
    output = processor(stop="END", max_tokens=3)
    assert output.add(ids_of("xEN")).text == "x"
    last = output.add([], "length")
    assert (last.text, last.finish_reason, last.must_abort) == ("EN", "length", False)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_the_token_that_ends_a_sequence_counts_but_has_no_text(stop: tuple[str, ...]) -> None:
    output = processor(stop=stop, max_tokens=9, stop_token_ids=ids_of("!"))
    delta = output.add(ids_of("a!"), "stop")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("a", ids_of("a!"), "stop")
    assert not delta.must_abort


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_an_unfinished_character_at_the_length_limit_is_one_replacement(
    stop: tuple[str, ...],
) -> None:
    output = processor(stop=stop, max_tokens=9)
    delta = output.add(bytes_to_ids("a你".encode()[:-1]), "length")
    assert delta.text == "a" + REPLACEMENT
    assert delta.finish_reason == "length"


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    output = processor(stop="END", max_tokens=4)
    delta = output.add(ids_of("aEND"), "length")
    assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("a", "stop", 4)


@pytest.mark.parametrize(
    "min_tokens, expected", [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")]
)
def test_min_tokens_delays_stop_strings(min_tokens: int, expected: str) -> None:
    output = processor(stop=".", max_tokens=9, min_tokens=min_tokens)
    assert "".join(output.add([token]).text for token in ids_of("a.b.c")) == expected


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    output = processor(stop="END", max_tokens=9, min_tokens=3)
    assert output.add(ids_of("xEN")).text == "x"
    assert output.add(ids_of("D")).finish_reason == "stop"


def test_special_tokens_have_no_text_but_others_do() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    output = processor(max_tokens=99)
    delta = output.add(ids, "length")
    assert delta.text == "a<think>b"
    assert delta.token_ids == ids


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputProcessor(None, SamplingParams())
    delta = output.add([1, 2], "length")
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [1, 2], "length")
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        OutputProcessor(None, SamplingParams(stop="x"))


@given(streams, sizes, ab_stops | st.just(["你"]), st.integers(0, 10))
def test_deltas_are_the_trimmed_decoding(
    ids: list[int], sizes: list[int], stop: list[str], min_tokens: int
) -> None:
    tokenizer = byte_level_tokenizer()
    output = processor(stop=stop, max_tokens=max(1, len(ids)), min_tokens=min(min_tokens, len(ids)))
    text, tokens, reason = "", [], None
    pieces = split(ids, sizes)
    for number, piece in enumerate(pieces):
        delta = output.add(piece, "length" if number == len(pieces) - 1 else None)
        text += delta.text
        tokens += delta.token_ids
        reason = reason or delta.finish_reason
    whole = tokenizer.decode(ids)
    assert tokens == ids[: len(tokens)]
    assert output.num_tokens == len(tokens)
    assert whole.startswith(text)
    if reason == "stop":
        assert any(whole[len(text) :].startswith(s) for s in stop)
        assert not cut_at_stop(tokenizer.decode(tokens[:-1]), stop)[1] or min_tokens
    else:
        assert (text, tokens) == (whole, ids)
