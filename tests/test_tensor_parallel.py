"""One model on several ranks: gloo on the CPU, each rank a process of one thread. The engine is in
this process and so is rank 0; the workers stay for all tests of a class."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import steps
from shared.engine.input_buffers import InputSizes
from shared.engine.step_plan import StepPlan
from shared.models.files import ModelFiles
from shared.models.qwen3 import Qwen3ForCausalLM
from tests.engine_contract import (
    GREEDY,
    EngineContract,
    assert_idle,
    drive,
    prompt_of,
    requests_of_all_kinds,
    tokens_of,
)
from tests.parallel import parallel
from tests.reference import Reference, make_checkpoint

# Divided by 2 and by 3, but for the vocabulary.
PADDED = {
    "vocab_size": 131,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[int], Any]]:
    """Size -> a group of that size, whose workers live on until another is asked for: a process is
    rank 0 of one at a time."""
    ends: list[Exception] = []
    current: list[Any] = []

    def group_of(size: int) -> Any:
        if current and current[0].tp.size != size:
            current.pop().close()
        if not current:
            current.append(parallel("worker_group").WorkerGroup(size, "cpu", ends.append))
        return current[0]

    yield group_of
    for group in current:
        group.close()
    assert ends == []


def parallel_engine(group: Any, module: ModuleType, config: Any) -> Any:
    """A stage's engine, its model on all ranks of the group, which is on the CPU."""
    config = config.replace(device="cpu")
    files = ModelFiles.find(config.model, config.load_format)
    runner = parallel("runner").TensorParallelRunner(
        group, config, files.config, files.weights, module.Engine.decodes_in_front
    )
    return module.Engine(config, runner)


@pytest.mark.parametrize(
    "size, stage",
    [(2, "02_batch_reorder"), pytest.param(4, "01_chunked_prefill", marks=pytest.mark.slow)],
    scope="class",
)
class TestContract(EngineContract):
    """4 ranks share 2 key-value heads."""

    @pytest.fixture(autouse=True)
    def _set_up(self, size: int, stage: str, groups: Callable[[int], Any]) -> None:
        self.stage, self.group = stage, groups(size)

    def make_engine(self, module: ModuleType, config: Any) -> Any:
        return parallel_engine(self.group, module, config)

    @contextmanager
    def engine(self, reference: Reference, **config: Any) -> Iterator[Any]:
        model_config = ModelFiles.find(str(reference.directory), "auto").config
        try:
            Qwen3ForCausalLM.check_parallel_size(model_config, self.group.tp.size)
        except ValueError as error:
            pytest.skip(str(error))
        with super().engine(reference, **config) as engine:
            yield engine


@pytest.mark.parametrize("stage", steps.engines())
@pytest.mark.parametrize("size", [2, 3])
def test_what_one_rank_says(
    tmp_path: Path, groups: Callable[[int], Any], size: int, stage: str
) -> None:
    """Whatever the stage, the rows of a step, and what they ask for. 131 tokens are padded."""
    reference = make_checkpoint(tmp_path, "padded", **PADDED)
    module = steps.load(stage)
    config = module.Config(
        model=str(reference.directory),
        device="cpu",
        max_model_length=256,
        num_kvcache_blocks=30,  # some are preempted
        kvcache_block_size=8,
        max_num_batched_tokens=96,
    )
    requests = requests_of_all_kinds(random.Random(0))
    results = []
    for engine in (module.Engine(config), parallel_engine(groups(size), module, config)):
        results.append(drive(engine, requests))
        assert_idle(engine)
        engine.close()
    one, several = results
    assert one.keys() == several.keys()
    for key, outputs in one.items():
        assert tokens_of(several[key]) == tokens_of(outputs)
        for ours, theirs in zip(several[key], outputs, strict=True):
            for mine, its in (
                *zip(ours.logprobs or [], theirs.logprobs or [], strict=True),
                *zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True),
            ):
                assert (mine or {}).keys() == (its or {}).keys()
                for token, entry in (mine or {}).items():
                    assert entry.logprob == pytest.approx(its[token].logprob, abs=1e-4)


def test_block_tables_that_do_not_fit_a_step(
    references: Callable[[str], Reference], groups: Callable[[int], Any]
) -> None:
    """A prompt of many cached blocks and few new tokens: its blocks travel beside the inputs."""
    reference, prompt = references("base"), prompt_of(random.Random(1), 200)
    module = steps.load("01_chunked_prefill")
    config = module.Config(
        model=str(reference.directory),
        max_model_length=256,
        kvcache_block_size=1,
        max_num_batched_tokens=16,
        max_num_sequences=2,
        num_kvcache_blocks=600,
    )
    engine = parallel_engine(groups(2), module, config)
    for name in "ab":
        outputs = drive(engine, {name: (prompt, GREEDY)})
        reference.assert_greedy(prompt, tokens_of(outputs[name, 0]))
    assert outputs["b", 0][0].num_cached_tokens == 199
    engine.close()


def test_plans_travel_as_words() -> None:
    early = np.arange(200, dtype=np.int32).reshape(-1, 2)
    for plan in (
        StepPlan(InputSizes(7, 3, 2), 2, True, 3, False, [], early[:0]),
        StepPlan(InputSizes(7000, 3, 2), 0, False, 0, True, [(0, 5), (5, 1024)], early),
    ):
        again = StepPlan.from_words(plan.to_words())
        assert again.early_updates.tolist() == plan.early_updates.tolist()
        assert replace(again, early_updates=early) == replace(plan, early_updates=early)
