"""A model of a model: it keeps a KV pool of (token, position) pairs and reads it back through the
block tables, so that any fault in scheduling, paging or caching becomes a wrong token or an
assertion, in microseconds and without torch."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import steps
from shared.engine.batch import Batch, Schedule
from shared.engine.result import StepResult
from shared.engine.slots import Limits

EMPTY = -1
VOCABULARY = 50


def cuts_prompts(stage: ModuleType) -> bool:
    """Can the stage compute a prompt in several steps? One that cannot refuses prompts longer than
    the token budget."""
    return "max_prefill_chunk_size" in stage.Config.model_fields


def next_token(tokens: np.ndarray, vocab_size: int) -> int:
    """What the fake model says after `tokens`."""
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes()) % vocab_size


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(np.array(tokens), vocab_size))
    return tokens[len(prompt) :]


class FakeHandle:
    used_graph = False

    def __init__(self, result: StepResult, runner: FakeRunner) -> None:
        self._result = result
        self._runner = runner

    def result(self) -> StepResult:
        self._runner.num_results += 1
        return self._result


class FakeRunner:
    """Implements `shared.engine.result.Runner`; always greedy."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        columns = -(-limits.max_model_length // limits.block_size)
        self.pool = np.full((limits.num_blocks * limits.block_size, 2), EMPTY, np.int64)
        self.block_tables = np.zeros((limits.max_num_sequences, columns), np.int32)
        self.sampled = np.full(limits.max_num_sequences, EMPTY, np.int64)
        self.batches: list[Batch] = []
        self.num_results = 0  # that somebody has read

    def submit(self, batch: Batch) -> FakeHandle:
        limits = self.limits
        assert batch.num_tokens > 0
        self.block_tables.reshape(-1)[batch.block_updates[:, 0]] = batch.block_updates[:, 1]
        in_flight = batch.input_ids < 0
        ids = np.where(
            in_flight, self.sampled[-1 - np.minimum(batch.input_ids, -1)], batch.input_ids
        )
        assert ((ids >= 0) & (ids < limits.vocab_size)).all()
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "two tokens, one place"
        self.pool[batch.slot_mapping] = np.stack((ids, batch.positions), axis=1)
        lengths = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        assert (lengths[: batch.num_decode_rows] == 1).all()
        said = np.empty(len(batch.samples.rows), np.int32)
        for sample, row in enumerate(batch.samples.rows.tolist()):
            said[sample] = next_token(self._read(batch, row), limits.vocab_size)
        self.sampled[batch.samples.slots] = said
        for row in range(batch.num_rows):
            self._read(batch, row)
        self.batches.append(batch)
        return FakeHandle(StepResult(said), self)

    def _read(self, batch: Batch, row: int) -> np.ndarray:
        """The row's tokens, from the pool: all of them written, each at its own position."""
        length, size = int(batch.seq_lens[row]), self.limits.block_size
        blocks = self.block_tables[batch.slots[row], : -(-length // size)]
        places = (blocks[:, None] * size + np.arange(size)).reshape(-1)[:length]
        content = self.pool[places]
        assert (content[:, 1] == np.arange(length)).all(), "a token is missing or out of place"
        return content[:, 0]

    def describe(self) -> dict[str, object]:
        return {
            "model": "fake",
            "architecture": "fake",
            "dtype": "int64",
            "device": "cpu",
            "device_name": "cpu",
            "attention_backend": "none",
            "kvcache_block_size": self.limits.block_size,
            "num_kvcache_blocks": self.limits.num_blocks,
            "tokens_in_pool": self.limits.num_blocks * self.limits.block_size,
            "max_model_length": self.limits.max_model_length,
            "max_num_sequences": self.limits.max_num_sequences,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "enable_prefix_caching": True,
            "cuda_graphs": False,
            "weights_bytes": 0,
            "activations_bytes": 0,
            "graphs_bytes": 0,
            "pool_bytes": 0,
        }

    def close(self) -> None: ...


def fake_engine(
    stage: str,
    *,
    block_size: int = 4,
    num_blocks: int = 100,
    max_num_sequences: int = 8,
    budget: int = 64,
    **options: Any,
) -> Any:
    """A stage's engine over a FakeRunner. `budget`: max_num_batched_tokens."""
    module = steps.load(stage)
    config = module.Config(
        model="qwen3-0.6b",
        load_format="dummy",
        max_num_batched_tokens=budget,
        max_num_sequences=max_num_sequences,
        **options,
    )
    limits = Limits(
        vocab_size=VOCABULARY,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_length=num_blocks * block_size,
        max_num_sequences=min(max_num_sequences, budget),
        max_num_batched_tokens=budget,
    )
    return module.Engine(config, runner=FakeRunner(limits))


@dataclass
class Step:
    """What a scheduler decided; sequences by name."""

    decodes: list[str]
    chunks: list[tuple[str, int, int]]  # (sequence, first token, number of tokens)
    preempted: list[str]
    num_decode_rows: int
    order: list[str]  # of the batch
    decoding: list[str]  # what could decode when it was decided


def watch(engine: Any) -> list[Step]:
    """Every decision from now on is appended to the list that this returns; one to wait for the
    step in flight is none."""
    taken: list[Step] = []
    schedule = engine.scheduler.schedule

    def watched() -> Schedule:
        decoding, _ = engine.queues.by_phase()
        made: Schedule = schedule()
        order, names = [s.name for s in made.sequences], [s.name for s in decoding]
        step = Step([], [], [], made.num_decode_rows, order, names)
        step.preempted += [s.name for s in made.preempted]
        for sequence, length in zip(made.sequences, made.num_new_tokens, strict=True):
            if sequence in decoding:
                assert length == 1
                step.decodes.append(sequence.name)
            else:
                step.chunks.append((sequence.name, sequence.num_computed_tokens, length))
        if made.sequences:
            taken.append(step)
        return made

    engine.scheduler.schedule = watched
    return taken


def run_to_end(engine: Any) -> dict[str, list[int]]:
    """Tokens of every sequence, by name (`id#index` for completions after the first)."""
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = f"{output.request_id}#{output.index}" if output.index else output.request_id
            tokens.setdefault(name, []).extend(output.new_token_ids)
        engine.block_manager.check()
    return tokens
