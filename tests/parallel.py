"""Replicas for tests: fake ones in threads, and stage 04's modules."""

from __future__ import annotations

import importlib
import random
from typing import Any

from shared import SamplingParams
from tests.engine_contract import prompt_of


def parallel(module: str) -> Any:
    """A module of stage 04."""
    return importlib.import_module(f"steps.04_dp_tp.{module}")


def config(num_replicas: int = 2, **options: Any) -> Any:
    """Of a model without files; the fake engines look at nothing in it."""
    given = {"model": "qwen3-0.6b", "load_format": "dummy", "device": "cpu", **options}
    return parallel("config").Config(data_parallel_size=num_replicas, **given)


def requests_of_all_kinds(rng: random.Random) -> dict[str, tuple[list[int], SamplingParams]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "seed": 7, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0, "logit_bias": {126: 5.0}, "min_tokens": 4},
    ]
    return {
        f"r{number}": (
            prompt_of(rng, length),
            SamplingParams(**kinds[number % len(kinds)], max_tokens=12, ignore_eos=True),
        )
        for number, length in enumerate([1, 16, 17, 33, 90, 5, 40, 64, 2, 31, 70, 8])
    }
