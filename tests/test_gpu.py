"""The whole engine on a GPU: graphs against eager steps, backends against each other, bfloat16
against float32, and no compilation once it serves. `pytest -m gpu tests/test_gpu.py`.

The contract itself also runs there: `pytest tests/test_contract.py` uses a GPU when there is one.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import steps
from shared import SamplingParams
from tests.engine_contract import drive, prompt_of, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STAGES = steps.engines()
BACKENDS = [
    "triton",
    pytest.param(
        "flash_attn",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn"
        ),
    ),
]
# Mean absolute difference of log probabilities, bfloat16 against float32, of the bundled model.
TOLERANCE = 0.03


@contextmanager
def engine(stage: str, **options: Any) -> Iterator[Any]:
    module = steps.load(stage)
    # A number of blocks of its own: several processes may test on one GPU.
    defaults = {"max_model_length": 1024, "num_kvcache_blocks": 1000}
    made = module.Engine(module.Config(**{**defaults, **options}))
    try:
        yield made
    finally:
        made.close()


def mixed_requests(count: int, vocabulary: int, seed: int = 0) -> dict[str, Any]:
    """Prompts of all lengths, a third sampled, a third with filters, arriving at once."""
    rng = random.Random(seed)
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "presence_penalty": 0.5},
    ]
    return {
        f"r{i}": (
            [rng.randrange(1, vocabulary) for _ in range(rng.choice([1, 15, 40, 300, 700]))],
            SamplingParams(**kinds[i % 3], max_tokens=rng.randint(1, 40), ignore_eos=True),
        )
        for i in range(count)
    }


@pytest.mark.parametrize("stage", STAGES)
def test_graphs_change_no_token(references: Any, stage: str) -> None:
    requests = mixed_requests(40, 128)
    results = []
    for enforce_eager in (False, True):
        options = {
            "model": str(references("base").directory),
            "dtype": "float32",
            "max_num_batched_tokens": 1024,
            "max_num_sequences": 24,
            "num_kvcache_blocks": 400,
            "enforce_eager": enforce_eager,
        }
        with engine(stage, **options) as one:
            results.append({k: tokens_of(v) for k, v in drive(one, requests).items()})
            assert (one.stats().counters.graph_steps > 0) != enforce_eager
    # Sampled rows as well: the noise is the same, and logits differ by rounding at most.
    same = sum(results[0][key] == results[1][key] for key in results[0])
    assert same >= len(requests) - 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_gpus_say_what_one_says(references: Any, enforce_eager: bool) -> None:
    """With collectives inside the graphs, and without graphs."""
    module, requests = steps.load("02_batch_reorder"), mixed_requests(40, 128)
    config = module.Config(
        model=str(references("base").directory),
        dtype="float32",
        max_model_length=1024,
        max_num_batched_tokens=1024,
        max_num_sequences=24,
        num_kvcache_blocks=400,
        enforce_eager=enforce_eager,
    )
    ends: list[Exception] = []
    results = []
    for size in (1, 2):
        runner = None
        if size > 1:
            wanted = config.replace(tensor_parallel_size=size)
            runner = importlib.import_module("steps.04_dp_tp.runner").start_group(
                wanted, module.Engine.decodes_in_front, ends.append
            )
        one = module.Engine(config, runner)
        results.append({k: tokens_of(v) for k, v in drive(one, requests).items()})
        assert (one.stats().counters.graph_steps > 0) != enforce_eager
        one.close()
    assert ends == []
    same = sum(results[0][key] == results[1][key] for key in results[0])
    assert same >= len(requests) - 2


@pytest.mark.parametrize("replicas, ranks", [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)])
def test_replicas_and_ranks_say_what_one_gpu_says(replicas: int, ranks: int) -> None:
    if torch.cuda.device_count() < replicas * ranks:
        pytest.skip(f"needs {replicas * ranks} CUDA devices")
    rng = random.Random(7)
    prompts = [prompt_of(rng, length) for length in (1, 15, 16, 17, 40, 150, 300, 700)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    options = {"dtype": "float32", "max_model_length": 1024, "num_kvcache_blocks": 1000}

    def answers(stage: str, **sizes: int) -> list[list[int]]:
        with steps.load(stage).LLM(**options, **sizes) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    one = answers("05_async_scheduling")
    several = answers("04_dp_tp", data_parallel_size=replicas, tensor_parallel_size=ranks)
    # Sums in another order may decide between two tokens that are as good as each other.
    assert sum(a == b for a, b in zip(one, several, strict=True)) >= len(prompts) - 1


def prompt_logprobs(one: Any, prompts: list[list[int]]) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    outputs = drive(one, {str(i): (prompt, params) for i, prompt in enumerate(prompts)})
    values = []
    for i in range(len(prompts)):
        (scored,) = [o.prompt_logprobs for o in outputs[str(i), 0] if o.prompt_logprobs]
        values += [next(iter(entry.values())).logprob for entry in scored[1:]]
    return torch.tensor(values)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_is_close_to_float32(stage: str) -> None:
    rng = random.Random(3)
    prompts = [prompt_of(rng, length) for length in (2, 17, 64, 200, 500)]
    scores = []
    for dtype in ("float32", "bfloat16"):
        with engine(stage, dtype=dtype, max_num_batched_tokens=600, max_num_sequences=8) as one:
            scores.append(prompt_logprobs(one, prompts))
    assert (scores[0] - scores[1]).abs().mean() < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree(stage: str, backend: str) -> None:
    """On the true head size, with random weights."""
    rng = random.Random(4)
    prompts = [[rng.randrange(10_000) for _ in range(n)] for n in (3, 130, 256, 257, 700)]
    scores = []
    for name in ("torch", backend):
        options = {
            "model": "qwen3-0.6b",
            "load_format": "dummy",
            "attention_backend": name,
            "max_num_batched_tokens": 1024,
            "max_num_sequences": 8,
        }
        with engine(stage, **options) as one:
            scores.append(prompt_logprobs(one, prompts))
            assert one.describe()["attention_backend"] == name
    assert (scores[0] - scores[1]).abs().mean() < TOLERANCE


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels that are compiled meanwhile."""
    from triton import knobs

    compiled: list[str] = []

    def note(*args: Any, fn: Any = None, **kwargs: Any) -> None:
        compiled.append(getattr(fn, "name", str(fn)))

    knobs.runtime.jit_cache_hook = note
    try:
        yield compiled
    finally:
        knobs.runtime.jit_cache_hook = None


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_compiled_in_service(stage: str, enforce_eager: bool) -> None:
    options = {
        "enforce_eager": enforce_eager,
        "max_num_batched_tokens": 900,
        "max_num_sequences": 70,
    }
    with engine(stage, **options) as one, compilations() as compiled:
        drive(one, mixed_requests(90, 4000, seed=1))
        for count in (1, 2, 7, 17, 33, 65):
            drive(one, mixed_requests(count, 4000, seed=count))
    assert compiled == []


@pytest.mark.parametrize("max_num_sequences", [1, 2, 3, 5])
def test_few_decodes_beside_a_long_chunk_compile_nothing(max_num_sequences: int) -> None:
    """In steps too large for graphs, with a tile of queries that leaves decodes no room."""
    rng = random.Random(9)
    options = {
        "model": "qwen3-0.6b",
        "load_format": "dummy",
        "max_model_length": 8192,
        "max_num_batched_tokens": 5000,
        "max_num_sequences": max_num_sequences,
    }
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = {
        f"r{i}": ([rng.randrange(10_000) for _ in range(length)], params)
        for i, length in enumerate([20, 4500, 4000, 20, 20, 4500])
    }
    with engine("02_batch_reorder", **options) as one, compilations() as compiled:
        drive(one, requests)
    assert compiled == []
