"""What CUDA graphs do to a step, rehearsed on the CPU: batches are padded to the shapes that would
be captured, and "replaying" runs the recorded function on whatever the device's buffers hold."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import steps
from shared import EngineConfig, SamplingParams
from shared.engine import model_runner
from shared.engine.batch import Batch, SampleRows
from shared.engine.cuda_graphs import (
    CHUNK_ROWS,
    MAX_GRAPH_TOKENS,
    GraphedFunction,
    StepShape,
    StepShapes,
)
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import StepPlan
from shared.layers.attention import AttentionMetadata, TorchBackend
from shared.layers.tensor_parallel import TensorParallel
from shared.models.files import ModelFiles
from tests.engine_contract import (
    EngineContract,
    assert_idle,
    drive,
    prompt_of,
    requests_of_all_kinds,
    tokens_of,
)
from tests.reference import Reference


class Rehearsed(GraphedFunction[Any]):
    """Runs the function instead of a graph of it, and counts."""

    def __init__(self, function: Any, shapes: Any) -> None:
        super().__init__(function, lambda: None, shapes)
        self.replayed: list[Any] = []

    def replay(self, shape: Any) -> None:
        assert shape in self.shapes
        self.replayed.append(shape)
        self._function(shape)


@pytest.fixture(autouse=True)
def _lengths_come_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph, which knows no length that the host knows."""
    original = TorchBackend.forward

    def forward(
        self: Any, q: Any, k: Any, v: Any, metadata: AttentionMetadata, scale: float
    ) -> Any:
        metadata = replace(
            metadata,
            host_cu_seqlens_q=metadata.cu_seqlens_q.tolist(),
            host_seq_lens=metadata.seq_lens.tolist(),
        )
        return original(self, q, k, v, metadata, scale)

    monkeypatch.setattr(TorchBackend, "forward", forward)


def rehearse(engine: Any, stage: str, with_prefills: bool = True) -> tuple[Rehearsed, Rehearsed]:
    runner = engine.runner
    limits = runner.limits
    runner.shapes = StepShapes(
        limits.max_num_sequences,
        limits.max_num_batched_tokens,
        with_prefills=with_prefills,
        with_boundary=steps.load(stage).Engine.decodes_in_front,
    )
    heads = [*range(1, limits.max_num_sequences, 3), limits.max_num_sequences]
    runner.graphs = (
        Rehearsed(runner._graph_trunk, runner.shapes.all),
        Rehearsed(runner._graph_head, heads),
    )
    graphs: tuple[Rehearsed, Rehearsed] = runner.graphs
    return graphs


@pytest.mark.parametrize("stage", steps.engines())
class TestContractInGraphs(EngineContract):
    @pytest.fixture(autouse=True)
    def _stage(self, stage: str) -> None:
        self.stage = stage

    @contextmanager
    def engine(self, reference: Reference, **config: Any) -> Iterator[Any]:
        with super().engine(reference, **config) as engine:
            rehearse(engine, self.stage)
            yield engine

    def test_most_steps_replay(self, references: Any, stage: str) -> None:
        reference, rng = references("base"), random.Random(2)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        requests = {f"r{n}": (prompt_of(rng, 7 * n + 1), params) for n in range(12)}
        module = steps.load(stage)
        engine = module.Engine(
            module.Config(
                model=str(reference.directory),
                max_model_length=256,
                max_num_batched_tokens=96,
                max_num_sequences=20,
            )
        )
        trunk, head = rehearse(engine, stage)
        drive(engine, requests)
        assert_idle(engine)
        assert any(s.decode_rows == s.rows for s in trunk.replayed)
        assert any(s.decode_rows == 0 for s in trunk.replayed)
        if engine.decodes_in_front:
            assert any(0 < s.decode_rows < s.rows for s in trunk.replayed)
        assert head.replayed
        engine.close()

    def test_many_short_prompts_beside_decodes_replay(self, references: Any) -> None:
        reference, rng = references("base"), random.Random(6)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        requests = {f"r{n}": (prompt_of(rng, 2), params) for n in range(CHUNK_ROWS + 7)}
        late = list(requests.items())[4:]
        with self.engine(
            reference, max_num_batched_tokens=96, max_num_sequences=len(requests)
        ) as engine:

            def then_the_others_come(step: int) -> None:
                while step == 3 and late:
                    key, (prompt, params) = late.pop()
                    engine.add_request(key, prompt, params)

            outputs = drive(engine, dict(list(requests.items())[:4]), then_the_others_come)
            (trunk, _) = engine.runner.graphs
            # The only step of more tokens than the smallest shape: 4 decodes, 2 of each other.
            (shape,) = {shape for shape in trunk.replayed if shape.tokens > 32}
            assert (shape.tokens, shape.rows, shape.decode_rows) == (64, len(requests), 0)
        for key, (prompt, _) in requests.items():
            reference.assert_greedy(prompt, tokens_of(outputs[key, 0]))


class Exchange:
    """What ranks that are threads of one process say to each other."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._said: list[Any] = [None] * size

    def __call__(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, once all have called."""
        self._said[rank] = value
        self._barrier.wait()
        everyones = list(self._said)
        self._barrier.wait()
        return everyones


@dataclass(frozen=True)
class ThreadRank(TensorParallel):
    exchange: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(self.rank, x.clone())).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(self.rank, x))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.exchange(self.rank, x.clone())[0])

    def smallest(self, number: int, device: torch.device) -> int:
        return min(self.exchange(self.rank, number))


def test_the_pool_is_the_one_that_every_rank_has_room_for(
    references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, room = Exchange(2), queue.SimpleQueue[int]()
    config = EngineConfig(model=str(references("base").directory), device="cpu")
    files = ModelFiles.find(config.model, "auto")
    for blocks in (70, 50):
        room.put(blocks)
    monkeypatch.setattr(model_runner, "fitting_blocks", lambda *_, **__: room.get())

    def num_blocks(rank: int) -> tuple[int, int]:
        tp = ThreadRank(rank, 2, exchange=exchange)
        runner = ModelRunner(config, files.config, files.weights, True, tp)
        return runner.limits.num_blocks, runner.kv_cache.shape[2]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(num_blocks, range(2))) == [(50, 50)] * 2


def test_all_ranks_replay_the_same(references: Any) -> None:
    """Two ranks, of which only the first knows batches: the other replays the same graphs, and
    what comes out is what one rank says."""
    stage, reference, exchange = "02_batch_reorder", references("base"), Exchange(2)
    module = steps.load(stage)
    config = module.Config(
        model=str(reference.directory),
        device="cpu",
        max_model_length=256,
        num_kvcache_blocks=60,
        max_num_batched_tokens=96,
        max_num_sequences=20,
    )
    files = ModelFiles.find(config.model, "auto")
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make(rank: int) -> ModelRunner:
        publish = lambda plan, words: messages.put((plan.to_words(), words.copy()))  # noqa: E731
        return ModelRunner(
            config,
            files.config,
            files.weights,
            True,
            ThreadRank(rank, 2, exchange=exchange),
            publish,
        )

    def follow() -> list[Any]:
        runner = make(1)
        graphs = rehearse(SimpleNamespace(runner=runner), stage)
        while (message := messages.get()) is not None:
            runner.follow(StepPlan.from_words(message[0]), message[1])
        return [graph.replayed for graph in graphs]

    requests = requests_of_all_kinds(random.Random(3))
    longest = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)
    requests["plain"] = ([1, 2, 3], longest)  # its last steps are its own
    one = module.Engine(config)
    expected = drive(one, requests)
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(follow)
        two = module.Engine(config, make(0))
        graphs = rehearse(two, stage)
        got = drive(two, requests)
        messages.put(None)
        replayed = worker.result()
    assert got.keys() == expected.keys()
    for key, outputs in expected.items():
        assert tokens_of(got[key]) == tokens_of(outputs)
    assert replayed == [graph.replayed for graph in graphs]
    assert all(replayed)


def batch_of(num_decodes: int, chunks: list[int]) -> Batch:
    """A batch without any content but its shape."""
    new = np.array([1] * num_decodes + chunks, np.int32)
    rows, tokens = len(new), int(new.sum())
    cu = np.zeros(rows + 1, np.int32)
    np.cumsum(new, out=cu[1:])
    zeros, empty = np.zeros(rows, np.int32), np.empty(0, np.int64)
    samples = SampleRows(
        np.arange(rows), zeros, zeros, zeros.astype(np.float32), empty, empty, zeros
    )
    return Batch(
        num_decode_rows=num_decodes,
        slots=np.arange(1, rows + 1, dtype=np.int32),
        owners=empty,
        decoding=zeros.astype(bool),
        cu_seqlens_q=cu,
        seq_lens=new + 5,
        input_ids=np.arange(100, 100 + tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        slot_mapping=np.arange(tokens, dtype=np.int32),
        samples=samples,
        scored=[],
        block_updates=np.empty((0, 2), np.int32),
    )


@pytest.mark.parametrize("with_boundary", [False, True])
@pytest.mark.parametrize("max_rows, max_tokens", [(1, 1), (5, 40), (64, 512), (512, 16384)])
def test_every_choice_holds_its_batch(max_rows: int, max_tokens: int, with_boundary: bool) -> None:
    shapes, rng = StepShapes(max_rows, max_tokens, True, with_boundary), random.Random(0)
    known = set(shapes.all)
    for _ in range(500):
        decodes = rng.randint(0, max_rows) if with_boundary else 0
        chunks = [rng.randint(1, 300) for _ in range(rng.randint(0, max_rows - decodes))]
        if not decodes + len(chunks):
            continue
        batch = batch_of(decodes, chunks)
        shape = shapes.fit(batch)
        if shape is None:
            assert batch.num_tokens > min(max_tokens, MAX_GRAPH_TOKENS)
            continue
        assert shape in known
        padded = batch.with_decode_rows(shape.decode_rows)
        assert padded.num_tokens <= shape.tokens
        assert padded.num_rows <= shape.rows
        assert padded.num_decode_rows == shape.decode_rows


@pytest.mark.parametrize(
    "decodes, chunks, shape",
    [
        (3, [30] * 2, StepShape(128, 8 + CHUNK_ROWS, 8)),
        (64, [30] * 16, StepShape(640, 128 + CHUNK_ROWS, 128)),
        (40, [30] * 17, StepShape(640, 128, 0)),  # more chunks than a boundary has room for
        (64, [2] * 65, StepShape(256, 512, 0)),
        (130, [1800], StepShape(2048, 128 + CHUNK_ROWS, 128)),  # no tokens left for empty rows
        (127, [1921], StepShape(2048, 128, 0)),
    ],
)
def test_what_fits_behind_no_boundary_takes_a_graph_with_fewer_decodes_in_front(
    decodes: int, chunks: list[int], shape: StepShape
) -> None:
    shapes = StepShapes(512, 16384, with_prefills=True, with_boundary=True)
    assert shapes.fit(batch_of(decodes, chunks)) == shape


def test_decodes_alone_always_have_a_graph() -> None:
    shapes = StepShapes(300, 4096, with_prefills=False, with_boundary=False)
    for rows in range(1, 301):
        shape = shapes.fit(batch_of(rows, []))
        assert shape is not None
        assert shape == StepShape(shape.tokens, shape.tokens, shape.tokens)
        assert rows <= shape.tokens < max(8, rows + 16)
    assert shapes.fit(batch_of(0, [5])) is None


def test_empty_decode_rows_move_nothing_else() -> None:
    batch = batch_of(2, [3, 1])
    padded = batch.with_decode_rows(4)
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 7, 8]
    assert padded.slots.tolist() == [1, 2, 0, 0, 3, 4]
    assert padded.seq_lens.tolist() == [6, 6, 0, 0, 8, 6]
    assert padded.input_ids.tolist() == [100, 101, 0, 0, 102, 103, 104, 105]
    assert padded.slot_mapping.tolist() == [0, 1, -1, -1, 2, 3, 4, 5]
    assert padded.samples.rows.tolist() == [0, 1, 4, 5]
    assert batch.with_decode_rows(2) is batch
    fewer = batch.with_decode_rows(1)
    assert replace(fewer, num_decode_rows=2) == batch
    assert padded.cu_seqlens_q.dtype == np.int32
