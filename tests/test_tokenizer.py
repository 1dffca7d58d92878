"""The tokenizer and chat templates, against `transformers` on the same files."""

from __future__ import annotations

import json
import os
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from shared.tokenizer import Tokenizer

# How Qwen cuts text into words before byte pairs are merged.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the cat sat on the mat",
    "don't count 1234 cats",
    "猫はマットの上",
    "été naïve",
    "🙂🙃 ok",
]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'unknown' %}
        {{ raise_exception('role ' + message.role) }}
    {% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}{{ message.content + '<|im_end|>\\n' }}
    {%- if message.stop_here %}{% break %}{% endif %}
{% endfor %}
{{ eos_token }} {{ unk_token is defined }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TEXTS = [
    "",
    " ",
    "the cat sat",
    "  two  spaces  ",
    "\n\n\t tabs\r\n",
    "猫はマットの上 未知",
    "👩‍👩‍👧 🏳️‍🌈 🙂",
    "e\u0301 and \u212b",
    "don't 3.14",
    "a<|im_end|>b <|im_start|>",
    "<|im_en",
    "<think>x</think>",
    "\x00\x7f\u200b\ufeff\u2028",
    "𝕳 עברית",
]


def write_tokenizer(directory: Path, **config: Any) -> Path:
    """A byte-level tokenizer like Qwen's, small, with a tokenizer_config.json."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, eos_token="<|im_end|>", pad_token="<|endoftext|>", **config)
    return directory


def write_config(directory: Path, **config: Any) -> None:
    # Qwen's class in `transformers` has an unk_token unless told otherwise.
    values = {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def reference(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


# ---- text


def test_encode_and_decode_equal_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    theirs = reference(directory)
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.special_ids == set(theirs.all_special_ids) | special(tokenizer, "<|im_start|>")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        for end in range(len(ids)):  # cut in the middle of characters
            assert tokenizer.decode(ids[:end]) == theirs.decode(ids[:end], skip_special_tokens=True)


def special(tokenizer: Tokenizer, text: str) -> set[int]:
    (token_id,) = tokenizer.encode(text)
    return {token_id}


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_special_tokens_vanish_only_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|><think>b"


def test_ids_without_text_are_empty(tokenizer: Tokenizer) -> None:
    """A model's vocabulary is padded beyond the tokenizer's; such ids can be sampled."""
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""


def test_lone_surrogate_is_an_error_of_the_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_limits_left_in_the_file_do_not_cut_or_pad(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(file)
    text = "the cat sat on the mat"
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_around_every_text_are_added_on_request_only(tmp_path: Path) -> None:
    """A template writes its own begin-of-text; adding it again would make two."""
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    backend = Backend.from_file(str(file))
    begin = backend.token_to_id("<|endoftext|>")
    raw = json.loads(file.read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [begin], "tokens": ["<|endoftext|>"]}
        },
    }
    file.write_text(json.dumps(raw))
    tokenizer = Tokenizer.from_directory(tmp_path)
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [begin, *plain]
    rendered = "<|endoftext|>the cat"
    assert tokenizer.encode(rendered, add_special_tokens=False) == [begin, *plain]


# ---- tokens that only tokenizer_config.json knows


ADDED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize("extra", ["additional_special_tokens", "extra_special_tokens"])
def test_tokens_declared_in_the_config_count(tmp_path: Path, extra: str) -> None:
    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    write_config(
        tmp_path,
        added_tokens_decoder={
            **{
                str(token_id): {"content": token.content, **ADDED, "special": token.special}
                for token_id, token in backend.get_added_tokens_decoder().items()
            },
            str(size): {"content": "<a>", **ADDED, "special": True},
            str(size + 1): {"content": "<b>", **ADDED, "special": False},
        },
        eos_token={"__type": "AddedToken", "content": "<a>", **ADDED},
        pad_token="<pad>",
        add_bos_token=False,
        **{extra: ["<think>", "<c>"]},
        chat_template="{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
    )
    ours, theirs = Tokenizer.from_directory(tmp_path), reference(tmp_path)
    text = "x<a><b><c><pad><think></think>y"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs) == size + 4
    assert ours.apply_chat_template([]) == "<a><pad>False"


@pytest.mark.parametrize(
    "config,message",
    [
        ({"added_tokens_decoder": {"9999": {"content": "<a>"}}}, "'<a>' the id 9999"),
        ({"added_tokens_decoder": {"x": {"content": "<a>"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"325": 3}}, r"added_tokens_decoder\.325"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<a>"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": []}, None),
        ({"eos_token": {"lstrip": True}}, "eos_token"),
        ({"extra_special_tokens": [3]}, "extra_special_tokens"),
        ({"extra_special_tokens": "abc"}, "extra_special_tokens must be a list"),
        ({"additional_special_tokens": 5}, "additional_special_tokens must be a list"),
        ({"additional_special_tokens": True}, "additional_special_tokens must be a list"),
        ({"additional_special_tokens": ["<a>", 5]}, "additional_special_tokens must be a text"),
        ({"eos_token": "\ud800"}, "eos_token is not valid Unicode"),
        ({"chat_template": "{{" + "(" * 5000 + ")" * 5000 + "}}"}, "chat template"),
        ({"chat_template": "{% for a in b %}" * 30 + "{% endfor %}" * 30}, "chat template"),
        ({"chat_template": "{% if %}"}, "chat template"),
        ({"chat_template": [{"name": "default"}]}, "chat template"),
        ({"chat_template": 3}, "chat template"),
    ],
)
def test_broken_config_names_file_and_field(
    tmp_path: Path, config: dict[str, Any], message: str | None
) -> None:
    write_tokenizer(tmp_path)
    write_config(tmp_path, **config)
    if message is None:
        Tokenizer.from_directory(tmp_path)
        return
    with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer_config\.json: .*{message}"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1'])
def test_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/{name}"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["link to nowhere", "link to itself", "pipe"])
def test_a_file_that_cannot_be_read_is_not_taken_for_absent(
    tmp_path: Path, name: str, kind: str
) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("nowhere" if kind == "link to nowhere" else name)
    with pytest.raises(ValueError, match=f"{file}: not a regular file"):
        Tokenizer.from_directory(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="the model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


# ---- chat templates

TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> & 'é' 猫"}}]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "  hi <there>\n", "stop_here": False},
    {"role": "assistant", "content": "ok", "stop_here": True},
    {"role": "user", "content": "never reached"},
]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["none", "empty", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_template_equals_transformers(
    directory: Path, tokenizer: Tokenizer, tools: Any, prompt: bool, variables: dict[str, Any]
) -> None:
    assert tokenizer.has_chat_template
    options = {"tools": tools, "add_generation_prompt": prompt, **variables}
    text = tokenizer.apply_chat_template(CHAT, **options)
    assert text == reference(directory).apply_chat_template(CHAT, tokenize=False, **options)
    assert "never reached" not in text
    assert "<|im_end|> False" in text


def test_template_rejects_messages(tokenizer: Tokenizer) -> None:
    rejected: list[dict[str, Any]] = [{"role": "unknown", "content": ""}, {"role": "user"}, {}]
    for message in rejected:
        with pytest.raises(ValueError, match="the chat template rejects the messages"):
            tokenizer.apply_chat_template([message])
    with pytest.raises(ValueError, match="role unknown"):
        tokenizer.apply_chat_template(rejected[:1])


def test_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert Tokenizer.from_directory(tmp_path).apply_chat_template([]) == "from the file é"
    (tmp_path / "chat_template.jinja").write_text("{% endif %}")
    with pytest.raises(ValueError, match=rf"{tmp_path}/chat_template\.jinja: not a usable"):
        Tokenizer.from_directory(tmp_path)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_tokenizer(tmp_path, chat_template=named)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "tools"
    write_config(tmp_path, chat_template=named[:1])
    assert Tokenizer.from_directory(tmp_path).apply_chat_template([], tools=TOOLS) == "plain"
    write_config(tmp_path, chat_template=[{"name": "rag", "template": ""}])
    with pytest.raises(ValueError, match="no default chat template, only: rag"):
        Tokenizer.from_directory(tmp_path).apply_chat_template([])


def test_helpers_that_templates_expect(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%Y') }}|{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}|"
        "{% generation %}said{% endgeneration %}|{% for i in range(9) %}"
        "{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}"
    )
    write_tokenizer(tmp_path, chat_template=template)
    text = Tokenizer.from_directory(tmp_path).apply_chat_template([])
    assert text == f'{datetime.now().year}|{{"a": 1, "b": "<é>"}}|said|02'


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__class__.mro() }}"],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, chat_template=template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": ""}]
    with pytest.raises(ValueError, match="the chat template rejects"):
        Tokenizer.from_directory(tmp_path).apply_chat_template(messages)
    assert len(messages) == 1


@given(st.text())
def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    text = unicodedata.normalize("NFC", text)  # the tokenizer's first step
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(10**9) == b""


@settings(max_examples=50)
@given(st.text() | st.text(" \n", max_size=200) | st.text("\u03b1\u0313\u0301\u0345", max_size=99))
def test_no_text_has_fewer_tokens_than_the_least(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert (tokenizer.least_tokens(text) > 0) == bool(text)


def test_where_a_token_may_hold_any_number_of_characters_nothing_is_known(tmp_path: Path) -> None:
    swallowing = AddedToken("<s>", lstrip=True)
    for change in ("lstrip", "lowercase", "whitespace"):
        backend = Backend.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
        if change == "lstrip":
            backend.add_tokens([swallowing])
        elif change == "lowercase":
            backend.normalizer = normalizers.Lowercase()
        else:
            backend.pre_tokenizer = pre_tokenizers.Whitespace()
        assert Tokenizer(backend, {}, {}).least_tokens("a" * 10_000) == 0
