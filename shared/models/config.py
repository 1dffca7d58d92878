"""The numbers that define a decoder-only transformer, read from either spelling of config.json."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import LARGEST

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

# One config.json of the hub per real size, so that random weights need no download.
REAL_CONFIGS = Path(__file__).parent / "configs"

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "yarn")
# Layers are built one by one, so a wrong number must end earlier than a wrong size.
MOST_LAYERS = 1024
# Numbers are used in float32; within these, so are their squares' roots and products with a size.
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30

# The rest of YaRN's options in the wild change the tables; ignoring one would be a wrong answer.
YARN_FIELDS = frozenset(
    {"type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "attention_factor"}
)


@dataclass(frozen=True)
class YarnScaling:
    """Context extension by YaRN (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of the model; names as in config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    """Longest sequence. With YaRN at least factor * original_max_position_embeddings, because
    many files keep the unscaled number here."""
    tie_word_embeddings: bool
    dtype: str  # "float32" | "bfloat16" | "float16": what the checkpoint is stored in
    eos_token_ids: tuple[int, ...]
    rope_scaling: YarnScaling | None = None
    initializer_range: float = 0.02


def load_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json and, where there is one, generation_config.json.

    Raises OSError (no directory, one that may not be read, no config.json) or ValueError; both name
    the file, and the field where it is one field's fault.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise PermissionError(f"{directory}: no permission to read this directory")
    eos_token_ids: tuple[int, ...] = ()
    generation = directory / GENERATION_CONFIG_FILE
    if is_given(generation):
        eos_token_ids = Fields(generation, read_json_object(generation)).token_ids("eos_token_id")
    return _read_config(directory / CONFIG_FILE, eos_token_ids)


def real_model_config(name: str) -> ModelConfig:
    """The shape of a published model, "qwen3-0.6b" to "qwen3-32b". ValueError for other names."""
    names = real_model_names()
    if name not in names:
        raise ValueError(f"{name!r} is not the name of a known shape; known: {', '.join(names)}")
    return _read_config(REAL_CONFIGS / f"{name}.json", ())


def real_model_names() -> list[str]:
    """Names that `real_model_config` knows."""
    return sorted(path.stem for path in REAL_CONFIGS.glob("*.json"))


def is_given(path: Path) -> bool:
    """Whether there is an optional file. A link to nowhere is one, and an error once it is read:
    going on without what it stands for would silently be another model."""
    return os.path.lexists(path)


def check_file(path: Path) -> None:
    """Raises FileNotFoundError or ValueError, naming the file, unless it can be opened and read to
    its end: a named pipe would be waited for."""
    if not is_given(path):
        raise FileNotFoundError(f"{path}: no such file")
    if not os.path.isfile(path):
        raise ValueError(f"{path}: not a regular file, or a link that leads to none")


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. FileNotFoundError or ValueError, naming the file."""
    check_file(path)
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """Typed access to a JSON object; every complaint names the file and the field.

    null counts as absent, as `transformers` writes it for fields that are not set.
    """

    def __init__(self, path: Path, values: dict[str, Any], within: str = "") -> None:
        self.path = path
        self.values = values
        self.within = within

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {self.within}{name} {problem}")

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        """A positive integer, at most `most`."""
        value = self._required(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, got {value!r}")
        if value > most:
            raise self.error(name, f"must be at most {most}, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that float32 can hold."""
        value = self._required(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"must be a number, got {value!r}")
        if not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:  # false for NaN too
            raise self.error(
                name,
                f"must be positive, from {SMALLEST_NUMBER} to {LARGEST_NUMBER}, got {value!r}",
            )
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """An object; empty when absent."""
        value = self._required(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._required(name, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise self.error(name, f"must be a token id or a list of them, got {value!r}")
        return tuple(ids)

    def _required(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def _read_config(path: Path, more_eos_token_ids: tuple[int, ...]) -> ModelConfig:
    fields = Fields(path, read_json_object(path))
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    rope = _rope_fields(fields)
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope_scaling = _rope_scaling(fields, rope, max_position_embeddings)
    rope_theta = (fields if rope.get("rope_theta") is None else rope).number("rope_theta")
    if rope_scaling is not None:
        extended = rope_scaling.factor * rope_scaling.original_max_position_embeddings
        if extended > LARGEST:
            raise rope.error("factor", f"= {rope_scaling.factor} gives {extended:.3g} positions")
        if rope_theta <= 1:
            raise fields.error("rope_theta", f"must be above 1 with YaRN, got {rope_theta}")
        max_position_embeddings = max(max_position_embeddings, int(extended))
    vocab_size = fields.integer("vocab_size")
    num_attention_heads = fields.integer("num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=fields.integer("num_key_value_heads", num_attention_heads),
        # Not hidden_size / heads: Qwen3 chooses it freely, and 128 is what an absent one means.
        head_dim=fields.integer("head_dim", 128),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, more_eos_token_ids, vocab_size),
        rope_scaling=rope_scaling,
        initializer_range=fields.number("initializer_range", 0.02),
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise fields.error(
            "num_key_value_heads",
            f"({config.num_key_value_heads}) must divide "
            f"num_attention_heads ({config.num_attention_heads})",
        )
    if config.head_dim % 2:
        raise fields.error("head_dim", f"must be even to be rotated, got {config.head_dim}")
    return config


def _architecture(fields: Fields) -> str:
    # Deferred, because the models import this module.
    from shared.models.registry import MODELS

    names = fields.get("architectures")
    for name in MODELS:
        if names == [name]:
            return name
    raise fields.error(
        "architectures", f"{names!r} is not supported; supported: {', '.join(MODELS)}"
    )


def _refuse_unsupported(fields: Fields) -> None:
    """Options that change the arithmetic and that the models do not implement."""
    if fields.boolean("attention_bias", False):
        raise fields.error("attention_bias", "= true is not supported")
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", "= true is not supported: attention is full")
    layer_types = fields.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.error("layer_types", "other than 'full_attention' are not supported")
    if (activation := fields.get("hidden_act")) not in (None, "silu"):
        raise fields.error("hidden_act", f"{activation!r} is not supported; supported: 'silu'")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            raise fields.error(name, "is not supported: weights must not be quantized")
    for name in ("num_experts", "num_local_experts"):
        if fields.get(name):
            raise fields.error(name, "is not supported: only dense models, no mixture of experts")


def _rope_fields(fields: Fields) -> Fields:
    """The options of rotary embeddings in one table, whichever way it is spelled.

    The hub's files have rope_theta beside rope_scaling (null, or a table whose kind may be called
    `type`); transformers 5 writes one table, rope_parameters, that holds rope_theta too.
    """
    name = "rope_scaling" if fields.get("rope_scaling") is not None else "rope_parameters"
    table = {**fields.table("rope_parameters"), **fields.table("rope_scaling")}
    for key, value in table.items():
        if isinstance(value, dict):
            raise fields.error(
                f"{name}.{key}", "is a table: one rope per layer type is not supported"
            )
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if fields.get(key) is not None:
            table.setdefault(key, fields.get(key))
    if table.pop("partial_rotary_factor", None) not in (None, 1):
        raise fields.error("partial_rotary_factor", "other than 1 is not supported")
    return Fields(fields.path, table, within=f"{name}.")


def _rope_scaling(fields: Fields, rope: Fields, max_positions: int) -> YarnScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise rope.error("rope_type", f"{kind!r} is not supported; supported: {supported}")
    if kind == "default":
        return None
    for name, value in rope.values.items():
        # `truncate: true` is what the tables do anyway.
        if value is not None and name not in YARN_FIELDS and (name, value) != ("truncate", True):
            raise rope.error(name, f"= {value!r} is not supported with rope_type 'yarn'")
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", f"must be at least 1, got {factor}")
    has_attention_factor = rope.get("attention_factor") is not None
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=rope.integer(
            "original_max_position_embeddings", max_positions
        ),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor") if has_attention_factor else None,
    )


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise fields.error(name, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(value)


def _eos_token_ids(fields: Fields, more: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The union of both files: chat models name a second end token in generation_config.json."""
    ids = tuple(dict.fromkeys(fields.token_ids("eos_token_id") + more))
    for token_id in ids:
        if token_id >= vocab_size:
            raise fields.error(
                "eos_token_id",
                f"{token_id} (here or in {GENERATION_CONFIG_FILE}) is outside "
                f"vocab_size={vocab_size}",
            )
    return ids
