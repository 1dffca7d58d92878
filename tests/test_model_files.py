"""Finding, checking and loading a model's files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared.layers.attention import AttentionBackend
from shared.layers.embedding import VocabParallelEmbedding
from shared.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows, WeightTarget, whole
from shared.layers.rotary import rotary_table
from shared.layers.tensor_parallel import TensorParallel
from shared.models.config import (
    ModelConfig,
    YarnScaling,
    load_model_config,
    real_model_config,
    real_model_names,
)
from shared.models.hub import BUNDLED_CHECKPOINT, resolve_model
from shared.models.loader import initialize_dummy, load_weights
from shared.models.qwen3 import Qwen3ForCausalLM
from tests.hub_server import HubServer

CPU = torch.device("cpu")

HUB_STYLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 5,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 64,
}

SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
SIZES += ["num_attention_heads", "num_key_value_heads", "head_dim"]


def write_config(directory: Path, **changes: Any) -> Path:
    """A hub-style config.json with some fields changed; a field set to `...` is left out."""
    fields = {name: value for name, value in {**HUB_STYLE, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


# ---- config.json


def test_hub_spelling(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path)) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(5,),
    )


def test_transformers_5_spelling_means_the_same(tmp_path: Path) -> None:
    hub = load_model_config(write_config(tmp_path))
    new = write_config(
        tmp_path,
        rope_theta=...,
        rope_scaling=...,
        torch_dtype=...,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        dtype="bfloat16",
        layer_types=["full_attention", "full_attention"],
    )
    assert load_model_config(new) == hub


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ],
)
def test_yarn_in_every_spelling(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load_model_config(write_config(tmp_path, **changes))
    assert config.rope_scaling == YarnScaling(4.0, 128)
    assert config.rope_theta == 1e6
    # The file says 256, the length before scaling; four times the original is what yarn is for.
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.5},
    ],
    ids=["default", "yarn", "yarn-betas", "yarn-attention-factor"],
)
def test_what_transformers_saves_gives_its_rotary_table(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    sizes = {name: HUB_STYLE[name] for name in SIZES}
    theirs = transformers.Qwen3Config(
        **{**sizes, "head_dim": 32},
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 1e4, **rope},
        architectures=["Qwen3ForCausalLM"],
        dtype="float16",
        eos_token_id=[3, 4],
    )
    theirs.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    assert (ours.dtype, ours.eos_token_ids, ours.head_dim) == ("float16", (3, 4), 32)
    assert ours.num_attention_heads == theirs.num_attention_heads
    positions = torch.arange(512)[None]
    cos, sin = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), positions)
    expected = torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1)
    torch.testing.assert_close(rotary_table(ours, 512, CPU), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "in_config,in_generation,expected",
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, {"eos_token_id": 7}, (5, 7)),
        (5, {"eos_token_id": [7, 5]}, (5, 7)),
        (None, {"eos_token_id": [7]}, (7,)),
        (..., {"temperature": 0.6}, ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, eos_token_id=in_config)
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert load_model_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\]"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "architectures .*Qwen3MoeForCausalLM.*supported: Qwen3",
        ),
        ({"architectures": ...}, "architectures None"),
        ({"architectures": [{}]}, "architectures"),
        ({"num_experts": 128}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.rope_type 'llama3'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type 'dynamic'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0}}, "rope_scaling.mscale"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": False}}, "rope_scaling.truncate"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0.5}},
            "rope_scaling.factor must be at least 1",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_theta": "big"}, "rope_theta must be a number"),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_parameters\.rope_theta must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be positive"),
        ({"rope_theta": 1e308}, "rope_theta must be positive, from"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", **YARN}}, "rope_theta must be above 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "rope_scaling.factor must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e30}}, "rope_scaling.factor = 1e.30 gives"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1e308}},
            "rope_scaling.beta_fast must be positive, from",
        ),
        ({"vocab_size": 10**12}, "vocab_size must be at most"),
        ({"hidden_size": 10**30}, "hidden_size must be at most"),
        ({"head_dim": 10**12}, "head_dim must be at most"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 1024"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be at most"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": 64.0}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [5, -1]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 64}, "eos_token_id 64 .*outside vocab_size=64"),
    ],
)
def test_unsupported_or_broken_field_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json: {message}"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"a": \xff}', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["link to nowhere", "link to itself", "pipe", "directory"])
def test_a_file_that_cannot_be_read_is_not_taken_for_absent(
    tmp_path: Path, name: str, kind: str
) -> None:
    write_config(tmp_path)
    block(tmp_path / name, kind)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}: not a regular file"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("kind", ["link to nowhere", "pipe"])
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, kind: str) -> None:
    block(tmp_path / "model.safetensors", kind)
    with pytest.raises(ValueError, match=rf"{tmp_path}/model\.safetensors: not a regular file"):
        load_weights(FlatModel({}), tmp_path)


def block(file: Path, kind: str) -> None:
    """Something that is there and cannot be read as a file."""
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("nowhere" if kind == "link to nowhere" else file.name)


def test_a_directory_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(PermissionError, match=rf"{tmp_path}: no permission"):
        load_model_config(tmp_path)


def test_missing_config_and_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/config\.json: no such file"):
        load_model_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/nowhere: no such directory"):
        load_model_config(tmp_path / "nowhere")


# Published numbers of parameters, a tied head counted once.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_real_sizes(name: str) -> None:
    c = real_model_config(name)
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = c.hidden_size * (2 * q + 2 * kv) + 2 * c.head_dim
    mlp = 3 * c.hidden_size * c.intermediate_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    layers = c.num_hidden_layers * (attention + mlp + 2 * c.hidden_size)
    assert embeddings + layers + c.hidden_size == PARAMETERS[name]
    assert (c.dtype, c.max_position_embeddings, c.rope_theta) == ("bfloat16", 40960, 1e6)


def test_unknown_size_lists_the_known_ones() -> None:
    assert set(real_model_names()) == set(PARAMETERS)
    with pytest.raises(ValueError, match=r"'qwen3-7b'.*qwen3-0\.6b"):
        real_model_config("qwen3-7b")
    with pytest.raises(ValueError, match="is not the name"):
        real_model_config("../configs/qwen3-8b")


# ---- where the files are


def test_no_model_is_the_bundled_checkpoint() -> None:
    assert resolve_model(None) == BUNDLED_CHECKPOINT


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve_model("~/model") == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == Path("model")


@pytest.mark.parametrize("model", ["./x", "../x/y", "/x", "~/no-such-dir", "a/b/c", "~nobody-here"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.models.hub._download", lambda model_id: pytest.fail(model_id))
    with pytest.raises(FileNotFoundError, match=f"{model!r}: no such directory"):
        resolve_model(model)


def test_wrong_models_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors' is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"'qwen3-8b' is the name of a shape.*load_format=dummy"):
        resolve_model("qwen3-8b")
    with pytest.raises(ValueError, match="'not an id' is neither a directory nor"):
        resolve_model("not an id")
    with pytest.raises(ValueError, match="'' is neither"):
        resolve_model("")


RESOLVE = """
import logging, sys
from shared.models import hub
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
hub.HUB_TIMEOUT = float(sys.argv[2])
try:
    print(hub.resolve_model(sys.argv[1]))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def resolve_elsewhere(
    model: str, variables: Mapping[str, str], hub_timeout: float = 10
) -> subprocess.CompletedProcess[str]:
    """`resolve_model` in a process of its own, because the client reads variables on import."""
    proxies = {"http_proxy", "https_proxy", "all_proxy", "hf_token"}
    clean = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, model, str(hub_timeout)],
        env={**clean, **variables},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_hub_id_is_downloaded_once_and_only_what_is_needed(tmp_path: Path) -> None:
    origin, cache = tmp_path / "origin", tmp_path / "cache"
    (origin / "onnx").mkdir(parents=True)
    write_config(origin)
    tensors = example_tensors()
    write_shards(origin, tensors)
    for name in ("pytorch_model.bin", "README.md", "onnx/model.safetensors", "chat_template.jinja"):
        (origin / name).write_text(name)
    with HubServer({"someone/tiny": origin}) as hub:
        first = resolve_elsewhere("someone/tiny", hub.environment(cache))
        assert first.returncode == 0, first.stderr
        downloaded = sum("GET /someone/tiny/resolve" in request for request in hub.requests)
        again = resolve_elsewhere("someone/tiny", hub.environment(cache))
        assert downloaded == sum("GET /someone/tiny/resolve" in request for request in hub.requests)
        environment = hub.environment(cache)
    # The server is gone; the cache still answers.
    offline = resolve_elsewhere("someone/tiny", {**environment, "HF_HUB_OFFLINE": "1"})
    directory = Path(first.stdout.strip())
    assert Path(again.stdout.strip()) == directory == Path(offline.stdout.strip())
    assert cache in directory.parents
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert load_model_config(directory).vocab_size == 64
    model = FlatModel(tensors)
    load_weights(model, directory)
    model.check(tensors)


def test_hub_failures_name_the_id_and_what_to_do(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    write_config(origin)
    with HubServer({"a/gated": origin}, gated=frozenset({"a/gated"})) as hub:
        environment = hub.environment(tmp_path / "cache")
        gated = resolve_elsewhere("a/gated", environment)
        absent = resolve_elsewhere("a/absent", environment)
    # Nobody listens on the port any more.
    offline = resolve_elsewhere("a/absent", {**environment, "HF_HUB_OFFLINE": "1"})
    for result, hint in (
        (gated, "'a/gated' is gated.*HF_TOKEN"),
        (absent, "'a/absent' is neither a directory here nor on the hub"),
        (offline, "'a/absent' could not be fetched.*HF_HUB_OFFLINE"),
    ):
        assert result.returncode == 1
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("FileNotFoundError: ")
        assert re.search(hint, last), result.stderr


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with HubServer({}) as hub, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        environment = {**hub.environment(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
        result = resolve_elsewhere("a/b", environment, hub_timeout=0.5)
    first, *_, last = result.stderr.strip().splitlines()
    assert first == f"INFO model a/b: fetching from http://127.0.0.1:{port} what is not in " + str(
        tmp_path / "hub"
    )
    assert re.search("FileNotFoundError: model 'a/b' could not be fetched.*timed out", last)


# ---- weights


class FlatModel(nn.Module):
    """One parameter per checkpoint tensor, held whole."""

    def __init__(
        self,
        shapes_of: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        optional: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.names = [name for name in shapes_of if name not in optional]
        self.values = nn.ParameterList(
            nn.Parameter(torch.full(shapes_of[name].shape, -1.0, dtype=dtype), requires_grad=False)
            for name in self.names
        )
        self.optional = optional

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {name: whole(value) for name, value in zip(self.names, self.values, strict=True)}

    def optional_weights(self) -> frozenset[str]:
        return self.optional

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.data for name, value in zip(self.names, self.values, strict=True)}

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        for name, value in self.state().items():
            torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=0, atol=0)

    def untouched(self) -> bool:
        return all(bool((value == -1).all()) for value in self.values)


class ParallelModel(nn.Module):
    """One layer of each kind, cut for one rank."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(8, 6, torch.float32, tp)
        self.qkv = ColumnParallelLinear(
            6, [Rows.split(8, tp, "q"), Rows.split(4, tp, "kv")], torch.float32
        )
        self.out = RowParallelLinear(8, 6, torch.float32, tp)
        self.norm = nn.Parameter(torch.empty(6), requires_grad=False)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return {
            **self.embed.weight_targets("embed"),
            **self.qkv.weight_targets(["q", "k"]),
            **self.out.weight_targets("out"),
            "norm": whole(self.norm),
        }

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


def example_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (8, 6), "q": (8, 6), "k": (4, 6), "out": (6, 8), "norm": (6,)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two shards and their index; returns the weight map."""
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_single(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    file = directory / "model.safetensors"
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
def test_single_and_sharded_files_load_and_convert(
    tmp_path: Path, sharded: bool, dtype: torch.dtype
) -> None:
    tensors = example_tensors()
    (write_shards if sharded else write_single)(tmp_path, tensors)
    model = FlatModel(tensors, dtype)
    load_weights(model, tmp_path)
    model.check(tensors)


@pytest.mark.parametrize("size", [3, 5, 7])
def test_a_padded_vocabulary_ends_in_zeros(tmp_path: Path, size: int) -> None:
    """8 rows for 5 ranks of 2: the last rank holds nothing else."""
    embed = torch.randn(8, 6)
    write_single(tmp_path, {"embed": embed})
    parts = []
    for rank in range(size):
        layer = VocabParallelEmbedding(8, 6, torch.float32, TensorParallel(rank, size))
        targets = layer.weight_targets("embed")
        model = SimpleNamespace(
            weight_targets=lambda targets=targets: targets,
            optional_weights=frozenset,
            parameters=layer.parameters,
        )
        load_weights(model, tmp_path)
        parts.append(layer.weight)
    together = torch.cat(parts)
    assert torch.equal(together[:8], embed)
    assert len(together) % size == 0
    assert together[8:].count_nonzero() == 0


@pytest.mark.parametrize(
    "name, size, named",
    [
        ("qwen3-0.6b", 3, "num_attention_heads=16"),
        ("qwen3-0.6b", 32, "num_attention_heads=16"),
        ("qwen3-8b", 6, "num_attention_heads=32"),
    ],
)
def test_sizes_that_do_not_divide_are_named(name: str, size: int, named: str) -> None:
    config = real_model_config(name)
    for fails in (
        lambda: Qwen3ForCausalLM.check_parallel_size(config, size),
        lambda: build(config, "meta", TensorParallel(0, size)),
    ):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size} .*{named}"):
            fails()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_real_sizes_can_be_cut(name: str, size: int) -> None:
    Qwen3ForCausalLM.check_parallel_size(real_model_config(name), size)


def test_every_rank_gets_its_slice(tmp_path: Path) -> None:
    tensors = example_tensors(torch.float32)
    write_single(tmp_path, tensors)
    ranks = [ParallelModel(TensorParallel(rank, 2)) for rank in range(2)]
    for model in ranks:
        load_weights(model, tmp_path)
    first, second = ranks
    assert torch.equal(torch.cat((first.embed.weight, second.embed.weight)), tensors["embed"])
    assert torch.equal(first.qkv.weight, torch.cat((tensors["q"][:4], tensors["k"][:2])))
    assert torch.equal(second.qkv.weight, torch.cat((tensors["q"][4:], tensors["k"][2:])))
    assert torch.equal(torch.cat((first.out.weight, second.out.weight), dim=1), tensors["out"])
    assert torch.equal(first.norm, tensors["norm"])
    assert torch.equal(second.norm, tensors["norm"])


def test_a_rank_reads_only_its_slice(tmp_path: Path) -> None:
    """Targets get something lazy, never a tensor that has been read whole."""
    tensors = example_tensors()
    write_single(tmp_path, tensors)
    model = FlatModel(tensors)
    seen: list[Any] = []
    targets = {
        name: dataclasses.replace(target, load=seen.append)
        for name, target in model.weight_targets().items()
    }
    model.weight_targets = lambda: targets  # type: ignore[method-assign]
    load_weights(model, tmp_path)
    assert len(seen) == len(tensors)
    assert not any(isinstance(source, torch.Tensor) for source in seen)


def test_tied_head_stored_twice_is_skipped(tmp_path: Path) -> None:
    tensors = {**example_tensors(), "lm_head.weight": torch.zeros(8, 6)}
    write_single(tmp_path, tensors)
    model = FlatModel(tensors, optional=frozenset({"lm_head.weight"}))
    load_weights(model, tmp_path)
    model.check(tensors)


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    tensors = example_tensors()
    write_single(tmp_path, tensors)
    model = FlatModel({**tensors, "lm_head.weight": torch.zeros(8, 6)})
    with pytest.raises(ValueError, match=rf"{tmp_path}: .*missing 1 tensor.*lm_head\.weight"):
        load_weights(model, tmp_path)
    assert model.untouched()


def test_all_missing_and_unexpected_tensors_are_counted(tmp_path: Path) -> None:
    tensors = example_tensors()
    write_single(tmp_path, {**tensors, **{f"extra.{i}": torch.zeros(1) for i in range(9)}})
    model = FlatModel({**tensors, **{f"absent.{i}": torch.zeros(1) for i in range(7)}})
    with pytest.raises(ValueError, match=r"missing 7 tensor\(s\): absent\.0.*and 2 more") as caught:
        load_weights(model, tmp_path)
    assert "unexpected 9 tensor(s): extra.0" in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    assert model.untouched()


@pytest.mark.parametrize("shape", [(8, 5), (6, 8), (48,), (1, 8, 6)])
def test_wrong_shape_names_file_tensor_and_both_shapes(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    tensors = example_tensors()
    file = write_single(tmp_path, {**tensors, "q": torch.zeros(shape)})
    model = FlatModel(tensors)
    with pytest.raises(ValueError, match=rf"{file}: q has shape \[.*needs \[8, 6\]") as caught:
        load_weights(model, tmp_path)
    assert str(list(shape)) in str(caught.value)
    assert model.untouched()


def test_quantized_tensor_is_refused(tmp_path: Path) -> None:
    tensors = example_tensors()
    file = write_single(tmp_path, {**tensors, "q": torch.zeros(8, 6, dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=rf"{file}: q has dtype F8_E4M3"):
        load_weights(FlatModel(tensors), tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_truncated_file_is_named(tmp_path: Path, sharded: bool, keep: int) -> None:
    tensors = example_tensors()
    (write_shards if sharded else write_single)(tmp_path, tensors)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:keep])
    model = FlatModel(tensors)
    with pytest.raises(ValueError, match=f"{file}: not a readable safetensors file"):
        load_weights(model, tmp_path)
    assert model.untouched()


def test_no_weights_at_all(tmp_path: Path) -> None:
    model = FlatModel(example_tensors())
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: neither .*found: nothing"):
        load_weights(model, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"found: pytorch_model\.bin"):
        load_weights(model, tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    tensors = example_tensors()
    write_shards(tmp_path, tensors)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shard}: no such file, but .*index\.json"):
        load_weights(FlatModel(tensors), tmp_path)


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    tensors = example_tensors()
    weight_map = write_shards(tmp_path, tensors)
    write_index(tmp_path, {**weight_map, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors: .*ghost.* does not"):
        load_weights(FlatModel(tensors), tmp_path)


def test_shard_holds_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    tensors = example_tensors()
    weight_map = write_shards(tmp_path, tensors)
    del weight_map["q"]
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors: holds 1 tensor\(s\): q,"):
        load_weights(FlatModel(tensors), tmp_path)


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], {"q": 3}, {"q": "../x.safetensors"}, {"q": ""}, {"q": ".."}]
)
def test_broken_index_is_named(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/model\.safetensors\.index\.json: weight_map"
    ):
        load_weights(FlatModel(example_tensors()), tmp_path)


# ---- the real model


def build(config: ModelConfig, device: str, tp: TensorParallel | None = None) -> Qwen3ForCausalLM:
    backend = cast("AttentionBackend", None)  # no forward pass here
    return Qwen3ForCausalLM(config, torch.float32, torch.device(device), backend, 16, tp)


@pytest.mark.parametrize("name", PARAMETERS)
def test_real_sizes_need_no_download(name: str) -> None:
    targets = build(real_model_config(name), "meta").weight_targets()
    assert sum(math.prod(target.shape) for target in targets.values()) == PARAMETERS[name]


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_transformers_saves_loads_whole(tmp_path: Path, tied: bool, shard_size: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {name: HUB_STYLE[name] for name in SIZES}
    config = transformers.Qwen3Config(**sizes, tie_word_embeddings=tied)
    theirs = transformers.Qwen3ForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "5GB")
    ours = build(load_model_config(tmp_path), "cpu")
    load_weights(ours, tmp_path)
    saved, state = theirs.state_dict(), ours.state_dict()
    for name in ("embed_tokens", "norm"):
        assert torch.equal(state[f"{name}.weight"], saved[f"model.{name}.weight"])
    assert torch.equal(state["lm_head.weight"], saved["lm_head.weight"])
    for layer in ("layers.0", "layers.1"):
        for name in ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj"):
            theirs_of = saved[f"model.{layer}.{name}.weight"]
            assert torch.equal(state[f"{layer}.{name}.weight"], theirs_of)
        for fused, names in (("self_attn.qkv", "q k v"), ("mlp.gate_up", "gate up")):
            block = fused.partition(".")[0]
            parts = [saved[f"model.{layer}.{block}.{part}_proj.weight"] for part in names.split()]
            assert torch.equal(state[f"{layer}.{fused}_proj.weight"], torch.cat(parts))


# ---- random weights


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    tensors = {**example_tensors(), "big": torch.empty(200, 300)}
    models = {name: FlatModel(tensors) for name in ("one", "same", "other")}
    for name, seed in {"one": 1, "same": 1, "other": 2}.items():
        torch.rand(3)  # the global generator moves on: it must not matter
        initialize_dummy(models[name], seed=seed, std=0.02)
    one = models["one"].state()
    models["same"].check(one)
    assert not torch.equal(one["big"], models["other"].state()["big"])
    assert not torch.equal(one["embed"], one["q"])
    assert torch.equal(one["norm"], torch.ones(6))
    assert abs(one["big"].std().item() - 0.02) < 0.001
    assert abs(one["big"].mean().item()) < 0.001


def test_dummy_weights_are_the_same_model_whatever_the_tensor_parallel_size() -> None:
    single = ParallelModel(TensorParallel())
    initialize_dummy(single, seed=3, std=1.0)
    ranks = [ParallelModel(TensorParallel(rank, 2)) for rank in range(2)]
    for model in ranks:
        initialize_dummy(model, seed=3, std=1.0)
    assert torch.equal(torch.cat([m.embed.weight for m in ranks]), single.embed.weight)
    assert torch.equal(torch.cat([m.out.weight for m in ranks], dim=1), single.out.weight)
    assert torch.equal(torch.cat([m.qkv.weight[:4] for m in ranks]), single.qkv.weight[:8])
