"""Host time of a decode step: schedule, batch building and commit, with no model behind them.

The GPU waits for this whenever a step's kernels are shorter. A fake runner hands back token ids
at once, so whatever time passes is Python's and numpy's.

    python -m bench.host --stage 00_baseline --rows 512
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

from bench.offline import percentiles
from bench.result import Percentiles
from shared import SamplingParams
from shared.engine.batch import Batch
from shared.engine.result import StepResult
from shared.engine.slots import Limits
from steps import load

BLOCK_SIZE = 16
MICROSECONDS = 1e6


@dataclass
class FakeHandle:
    token_ids: np.ndarray
    used_graph: bool = False

    def result(self) -> StepResult:
        return StepResult(self.token_ids)


class FakeRunner:
    """Answers every step at once: the same token for every row, nothing computed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def submit(self, batch: Batch) -> FakeHandle:
        return FakeHandle(np.ones(len(batch.samples.rows), np.int32))

    def describe(self) -> dict[str, object]:
        # What the start-up banner prints; none of it is real.
        limits = self.limits
        names = ("weights", "activations", "graphs", "pool")
        return {
            "model": "none (host time only)",
            "architecture": "none",
            "dtype": "none",
            "device": "cpu",
            "device_name": "none",
            "attention_backend": "none",
            "kvcache_block_size": limits.block_size,
            "num_kvcache_blocks": limits.num_blocks,
            "tokens_in_pool": limits.num_blocks * limits.block_size,
            "max_model_length": limits.max_model_length,
            "max_num_sequences": limits.max_num_sequences,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "enable_prefix_caching": True,
            "cuda_graphs": False,
            **{f"{name}_bytes": 0 for name in names},
        }

    def close(self) -> None:
        pass


def host_engine(stage: str, rows: int, prompt: int, steps: int) -> Any:
    """A stage's engine over a fake runner, with room for `rows` sequences."""
    module = load(stage)
    length = prompt + BLOCK_SIZE + steps
    # All prompts in one step: whoever began to decode earlier would also end earlier.
    budget = rows * (prompt + BLOCK_SIZE)
    own = ("max_prefill_tokens_per_step", "max_prefill_chunk_size")
    options = {name: budget for name in own if name in module.Config.model_fields}
    limits = Limits(
        vocab_size=10_000,
        block_size=BLOCK_SIZE,
        num_blocks=rows * -(-length // BLOCK_SIZE),
        max_model_length=length,
        max_num_sequences=rows,
        max_num_batched_tokens=budget,
    )
    config = module.Config(
        model="qwen3-0.6b",  # a shape that needs no files; it is never built
        load_format="dummy",
        device="cpu",
        max_num_sequences=rows,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_length=length,
        **options,
    )
    return module.Engine(config, runner=FakeRunner(limits))


def measure_host(stage: str, rows: int = 512, prompt: int = 512, steps: int = 256) -> Percentiles:
    """Seconds of `engine.step()` while `rows` sequences decode; prefills are not counted.

    Prompts differ in length by up to a block, so that every step has its share of sequences that
    cross into a new one: allocation and registering prefixes are paid for evenly.
    """
    engine = host_engine(stage, rows, prompt, steps)
    rng = np.random.default_rng(0)
    try:
        for row in range(rows):
            ids = rng.integers(0, 10_000, prompt + row % BLOCK_SIZE).tolist()
            params = SamplingParams(temperature=0.6, max_tokens=steps + 1, ignore_eos=True)
            engine.add_request(str(row), ids, params)
        engine.step()
        times = []
        # The last step also ends every request; it would be an outlier of another kind.
        for _ in range(steps - 1):
            begin = time.perf_counter()
            outputs = engine.step()
            times.append(time.perf_counter() - begin)
            if len(outputs) != rows:
                raise RuntimeError(f"a step advanced {len(outputs)} of {rows} sequences")
    finally:
        engine.close()
    measured = percentiles(times)
    assert measured is not None
    return measured


def main(stage: str = "00_baseline", rows: int = 512, prompt: int = 512, steps: int = 256) -> None:
    """Print the host time of a decode step of a stage's engine."""
    measured = measure_host(stage, rows, prompt, steps)
    print(f"{stage}: host time of a step with {rows} decoding sequences, {measured.count} steps")
    for name in ("p50", "p95", "p99", "max"):
        print(f"  {name:4} {getattr(measured, name) * MICROSECONDS:9,.0f} us")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m bench.host")
