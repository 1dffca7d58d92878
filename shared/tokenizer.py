"""Text to token ids and back, and chat messages to text.

Over the `tokenizers` library alone: `transformers` is only what the tests compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from shared.models.config import check_file, is_given, read_json_object

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

TOKEN_ID = re.compile("[0-9]{1,10}")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2's, Qwen's) writes bytes with."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + position): byte for position, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()

# NFC makes one character of at most this many, as a Greek letter with three marks.
MOST_COMPOSED = 4


class Tokenizer:
    """A checkpoint's tokenizer and chat template; safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        templates: dict[str, Template],
        template_variables: dict[str, str],
    ) -> None:
        self._backend = backend
        self._templates = templates
        self._template_variables = template_variables
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens that have a text; the model's vocab_size may be padded beyond it."""
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        """Ids that `decode` leaves out by default."""
        self._longest_token = _longest_token(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, where they are, tokenizer_config.json and chat_template.jinja.

        Raises FileNotFoundError without a tokenizer.json and ValueError for a file that cannot be
        understood; both name the file.
        """
        backend = _read_backend(directory / TOKENIZER_FILE)
        config_file = directory / TOKENIZER_CONFIG_FILE
        config = read_json_object(config_file) if is_given(config_file) else {}
        named = _named_tokens(config_file, config)
        _add_declared_tokens(backend, config_file, config, named)
        variables = {name: token.content for name, token in named.items()}
        return cls(backend, _read_templates(directory, config), variables)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens spelled out in `text` become their ids.

        `add_special_tokens` adds what the tokenizer puts around every text (Qwen3: nothing). Leave
        it off for the output of `apply_chat_template`, which holds them already.
        Raises ValueError for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from error
        # A batch, because only that lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this, which takes no time to know."""
        longest = self._longest_token
        return 0 if longest is None else -(-len(text) // longest)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids without a text give none; an incomplete character gives U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, perhaps a part of a character. b"" for an id without a text."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        return bytes(map(BYTE_OF.__getitem__, token))

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as the model's own template writes it.

        `variables` reach the template as they are (Qwen3 reads enable_thinking). The checkpoint's
        template called "tool_use", if it has one, is taken when there are tools.
        Raises ValueError if the checkpoint has no template or its template rejects the messages.
        """
        template = self._template("tool_use" if tools is not None else "default")
        values = {
            **self._template_variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return template.render(values)
        except Exception as error:  # a template is a program: whatever it trips over, it rejects
            raise ValueError(f"the chat template rejects the messages: {error}") from error

    def _template(self, name: str) -> Template:
        template = self._templates.get(name) or self._templates.get("default")
        if template is not None:
            return template
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise ValueError(f"the model has no default chat template, only: {names}")
        raise ValueError("the model has no chat template")


def _longest_token(backend: tokenizers.Tokenizer) -> int | None:
    """Most characters of a text that one token can stand for; None: nothing is known, for only a
    byte-level BPE surely leaves nothing out."""
    vocabulary = backend.get_vocab()
    splitting = _described(backend.pre_tokenizer)
    steps = splitting.get("pretokenizers", [splitting])
    if (
        any(step.get("behavior") == "Removed" for step in steps)
        or "ByteLevel" not in [step.get("type") for step in steps]
        or not BYTE_OF.keys() <= vocabulary.keys()
        # These take any number of spaces with them.
        or any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )
    ):
        return None
    longest = max(map(len, vocabulary))
    normalising = _described(backend.normalizer).get("type")
    return {None: longest, "NFC": longest * MOST_COMPOSED}.get(normalising)


def _described(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file has it; {} for one that it lacks."""
    made: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return made


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    check_file(file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file}: not a readable tokenizer: {error}") from error
    # Left over from training in some files; a prompt must come through whole and alone.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named_tokens(config_file: Path, config: dict[str, Any]) -> dict[str, AddedToken]:
    """bos_token, eos_token, ... that are set; templates see them under these names."""
    return {
        name: _added_token(config_file, name, value)
        for name, value in config.items()
        # add_bos_token and the like are switches.
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def _added_token(config_file: Path, where: str, value: Any) -> AddedToken:
    """A token given as text, or as the table that `transformers` writes for an AddedToken."""
    if isinstance(value, str):
        value = {"content": value, "special": True}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"{config_file}: {where} must be a text or a table with one in `content`")
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {name: bool(value[name]) for name in names if name in value}
    try:
        return AddedToken(value["content"], **flags)
    except UnicodeError as error:  # JSON can spell half a character
        raise ValueError(f"{config_file}: {where} is not valid Unicode: {error}") from error


def _add_declared_tokens(
    backend: tokenizers.Tokenizer,
    config_file: Path,
    config: dict[str, Any],
    named: dict[str, AddedToken],
) -> None:
    """Tokens that only tokenizer_config.json knows, or that only it calls special."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(map(TOKEN_ID.fullmatch, decoder)):
        raise ValueError(f"{config_file}: added_tokens_decoder must map token ids to tokens")
    for token_id, value in sorted(decoder.items(), key=lambda item: int(item[0])):
        token = _added_token(config_file, f"added_tokens_decoder.{token_id}", value)
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != int(token_id):
                raise ValueError(
                    f"{config_file}: added_tokens_decoder gives {token.content!r} the id "
                    f"{token_id}, which {TOKENIZER_FILE} leaves no room for"
                )
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    older, newer = "additional_special_tokens", "extra_special_tokens"
    name = newer if config.get(newer) else older
    extra = config.get(name) or []
    if not isinstance(extra, list | dict):
        raise ValueError(f"{config_file}: {name} must be a list or a table, got {extra!r}")
    values = extra.values() if isinstance(extra, dict) else extra
    declared = [_added_token(config_file, name, value) for value in values]
    for token in [*named.values(), *declared]:
        if token.content not in special:
            backend.add_special_tokens([token])


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, Template]:
    """Chat templates by name; a single one is called "default"."""
    file = directory / TEMPLATE_FILE
    if is_given(file):
        check_file(file)
        try:
            sources: Any = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: not readable: {error}") from error
    else:
        file = directory / TOKENIZER_CONFIG_FILE
        sources = config.get("chat_template")
    if sources is None:
        return {}
    if isinstance(sources, str):
        sources = [{"name": "default", "template": sources}]
    environment = _environment()
    templates = {}
    try:
        for source in sources:
            templates[str(source["name"])] = environment.from_string(source["template"])
    except Exception as error:  # a compiler at work on anything at all, nested however deep
        raise ValueError(f"{file}: not a usable chat template: {error}") from error
    return templates


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates on the hub are written for: `transformers`' rules and helpers.

    A template is a stranger's program, so it runs in the sandbox and cannot change its arguments.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """{% generation %} marks what the assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
