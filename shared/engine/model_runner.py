"""Runs the model: holds weights, KV pool and sampled ids; turns a batch into a step in flight."""

from __future__ import annotations

import atexit
import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from shared.config import EngineConfig
from shared.engine.batch import MAX_SCORED, Batch
from shared.engine.cuda_graphs import (
    CHUNK_ROWS,
    MAX_GRAPH_TOKENS,
    GraphedFunction,
    StepShape,
    StepShapes,
    capture_all,
    estimate_bytes,
    graph_sizes,
)
from shared.engine.input_buffers import InputBuffers, InputSizes, SampleInputs, StepInputs
from shared.engine.memory import MemoryReport, bytes_per_block, fitting_blocks
from shared.engine.resolve import (
    resolve_backend,
    resolve_block_size,
    resolve_device,
    resolve_dtype,
    resolve_max_length,
)
from shared.engine.result import StepResult
from shared.engine.sampler import LogprobTensors, SampledBatch, Sampler
from shared.engine.slots import Limits
from shared.engine.step_plan import StepPlan
from shared.engine.transfer import HostCopies, HostCopy, upload
from shared.kernels.gather_rows import gather_rows
from shared.kernels.step_inputs import resolve_step_inputs
from shared.layers.attention import ATTENTION_BACKENDS, AttentionMetadata, AttentionShape
from shared.layers.tensor_parallel import TensorParallel
from shared.models.config import ModelConfig
from shared.models.files import BUNDLED
from shared.models.loader import initialize_dummy, load_weights
from shared.models.registry import MODELS

# Sends a step to the other ranks: its plan and its packed inputs [n] int32.
Publish = Callable[[StepPlan, np.ndarray], None]


@dataclass
class StepHandle:
    """A step in flight on the device."""

    ids: HostCopy
    sampled: SampledBatch | None  # on the host once `ids` is; None: nothing sampled
    scores: dict[int, list[LogprobTensors]]
    used_graph: bool

    def result(self) -> StepResult:
        """Wait for the copies to the host; nothing else of a step ever waits."""
        token_ids = self.ids.read()
        scores = {
            row: [entry for part in parts for entry in part.to_dicts()]
            for row, parts in self.scores.items()
        }
        logprobs = None
        if self.sampled is not None and self.sampled.logprobs is not None:
            logprobs = self.sampled.token_logprobs()
        return StepResult(token_ids, logprobs, scores)


class ModelRunner:
    """One model on one device (or one rank's part of it).

    The sampled id of every slot stays on the device, in `sampled`, and decode inputs are always
    read from there: the next step can be submitted before the host has seen this one's ids.

    On a GPU most steps replay two CUDA graphs: the trunk by the shape of the batch, and, when all
    rows are plain, the head (logits and sampling) by the number of rows that get a token.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path | None,
        decodes_in_front: bool = False,
        tp: TensorParallel | None = None,
        publish: Publish | None = None,
    ) -> None:
        """`directory` holds the weights; None: random ones. `decodes_in_front`: mixed batches will
        have decode rows before the others. `publish`: on rank 0 of several. Raises ValueError or
        OSError naming the option or file that is wrong."""
        self.tp = tp = tp or TensorParallel()
        self.publish = publish
        self.config = config
        self.model_config = model_config
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, model_config, self.device)
        backend = resolve_backend(config, model_config, self.device, self.dtype)
        self.block_size = resolve_block_size(config, backend)
        self.max_model_length = resolve_max_length(config, model_config)
        self.max_num_sequences = min(config.max_num_sequences, config.max_num_batched_tokens)
        self.num_kv_heads = max(1, model_config.num_key_value_heads // tp.size)
        self.backend = ATTENTION_BACKENDS[backend](
            AttentionShape(
                num_heads=model_config.num_attention_heads // tp.size,
                num_kv_heads=self.num_kv_heads,
                head_dim=model_config.head_dim,
                max_rows=self.max_num_sequences,
                device=self.device,
            )
        )
        try:
            self.model = MODELS[model_config.architecture](
                model_config, self.dtype, self.device, self.backend, self.max_model_length, tp
            ).eval()
        except RuntimeError as error:  # torch's, when memory ends
            raise ValueError(f"the model does not fit on {self.device}: {error}") from error
        if directory is None:
            initialize_dummy(self.model, config.seed, model_config.initializer_range)
        else:
            load_weights(self.model, directory)
        self._make_buffers()
        self.shapes: StepShapes | None = None
        self.graphs: tuple[GraphedFunction[StepShape], GraphedFunction[int]] | None = None
        if self.device.type == "cuda" and self.backend.graphs and not config.enforce_eager:
            self.shapes = StepShapes(
                self.max_num_sequences,
                config.max_num_batched_tokens,
                with_prefills=self.backend.graphs == "all",
                with_boundary=decodes_in_front,
            )
            clear = self.inputs.clear
            self.graphs = (
                GraphedFunction(self._graph_trunk, clear, self.shapes.all),
                GraphedFunction(self._graph_head, clear, graph_sizes(self.max_num_sequences)),
            )
        self._make_pool(decodes_in_front)
        self._description = self._describe()
        # What exists by now lives as long as the runner. A full collection that visits all of it
        # (torch alone brings some 200,000 objects) stops the step it falls into for 100 ms.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules want their objects collected at exit

    @torch.inference_mode()
    def submit(self, batch: Batch) -> StepHandle:
        """Start a step. On a GPU everything here is only enqueued."""
        shape = self.shapes.fit(batch) if self.shapes is not None else None
        if shape is not None:
            batch = batch.with_decode_rows(shape.decode_rows)
        plan = self._plan(batch, shape)
        words = self.inputs.pack(batch, plan.sizes)
        if self.publish is not None:
            self.publish(plan, words)
        sampled, scores = self._run(plan, batch)
        if sampled is not None:
            sampled = sampled.logprobs_to_host()
        ids = self.host_copies.start(None if sampled is None else sampled.token_ids)
        return StepHandle(ids, sampled, scores, plan.graphed)

    @torch.inference_mode()
    def follow(self, plan: StepPlan, words: np.ndarray) -> None:
        """`submit` on the other ranks: their part of what rank 0 has published."""
        self.inputs.load(words)
        self._run(plan, batch=None)

    def describe(self) -> dict[str, object]:
        return self._description

    def close(self) -> None:
        """Drop everything on the device. Idempotent."""
        for name in vars(self).keys() - {"limits", "device", "_description"}:
            delattr(self, name)
        gc.unfreeze()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Set-up

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_buffers(self) -> None:
        rows, tokens = self.max_num_sequences, self.config.max_num_batched_tokens
        try:
            self.inputs = InputBuffers(
                tokens,
                rows + CHUNK_ROWS,
                max_samples=rows,
                max_updates=self._most_updates(tokens, rows + CHUNK_ROWS),
                device=self.device,
            )
        except (RuntimeError, MemoryError) as error:
            raise ValueError(f"max_num_batched_tokens={tokens} do not fit: {error}") from error
        # One more than there are slots: padding samples write their ids to the last.
        self.sampled = self._zeros(rows + 1)
        # Where graphs leave the hidden states of their rows, and the ids that they sample.
        graph_tokens = max(rows, min(tokens, MAX_GRAPH_TOKENS))
        self.hidden = self._zeros(graph_tokens, self.model_config.hidden_size, dtype=self.dtype)
        self.sampled_rows = self._zeros(rows)
        self.host_copies = HostCopies(rows, self.device)
        self.sampler = Sampler(
            self.model_config.vocab_size,
            rows,
            self.max_model_length,
            self.device,
            self.model_config.eos_token_ids,
            self.tp,
        )

    @torch.inference_mode()
    def _make_pool(self, decodes_in_front: bool) -> None:
        """Size the KV pool by what everything else needs, allocate it, and capture the graphs."""
        config, size = self.config, self.block_size
        columns = -(-self.max_model_length // size)
        block_shape = (size, self.num_kv_heads, self.model_config.head_dim)
        graphed = self.graphs or ()
        activations = graph_bytes = 0
        if self.device.type == "cuda":
            # One block is enough to try: all rows read and write block 0.
            self._allocate_pool(1, block_shape, columns)
            activations = self._warm_up(decodes_in_front)
            graph_bytes = estimate_bytes(graphed)
        block_bytes = bytes_per_block(self.model_config, self.num_kv_heads, size, self.dtype)
        num_blocks = config.num_kvcache_blocks
        if num_blocks < 1:
            num_blocks = fitting_blocks(
                block_bytes,
                self.device,
                config.gpu_memory_utilization,
                reserved=activations + graph_bytes,
            )
        # What one rank lacks, none can use.
        num_blocks = self.tp.smallest(num_blocks, self.device)
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            block_size=size,
            num_blocks=num_blocks,
            max_model_length=min(self.max_model_length, num_blocks * size),
            max_num_sequences=self.max_num_sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._allocate_pool(num_blocks, block_shape, -(-self.limits.max_model_length // size))
        graph_bytes = capture_all(graphed) if graphed else 0
        weights = sum(p.numel() * p.element_size() for p in set(self.model.parameters()))
        self.memory = MemoryReport(weights, activations, graph_bytes, num_blocks * block_bytes)

    def _allocate_pool(
        self, num_blocks: int, block_shape: tuple[int, int, int], columns: int
    ) -> None:
        # Zeros, not uninitialised memory: a masked score times a NaN would still be a NaN.
        layers = self.model_config.num_hidden_layers
        try:
            self.kv_cache = self._zeros(layers, 2, num_blocks, *block_shape, dtype=self.dtype)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise ValueError(f"num_kvcache_blocks={num_blocks} do not fit: {error}") from error
        # The host's table has the same columns, so that flat indices agree.
        self.block_tables = self._zeros(self.max_num_sequences, columns)

    def _warm_up(self, decodes_in_front: bool) -> int:
        """Compile every kernel that serving can meet, so that none is compiled in the middle of
        it; returns the bytes that the largest possible step takes beside weights and buffers."""
        most_tokens, length = self.config.max_num_batched_tokens, self.max_model_length
        longest = [min(length, most_tokens - done) for done in range(0, most_tokens, length)]
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        hidden = self._trunk_of_zeros(longest[: self.max_num_sequences], num_decode_rows=0)
        logits = self.model.compute_logits(hidden[: max(self.max_num_sequences, MAX_SCORED)])
        self.sampler.score(logits, logits.argmax(-1), num_top=1)
        logits = logits[: self.max_num_sequences]
        self.sampler.warm_up(logits)
        self._sample_plain(hidden[: self.max_num_sequences], self.inputs.sample_inputs(len(logits)))
        self.tp.broadcast(self.sampled_rows)  # its first use takes memory
        del hidden, logits
        for length in (1, 8, 16, 128):  # linear layers have kernels for few rows
            self.model.compute_logits(
                self._trunk_of_zeros([min(length, longest[0])], num_decode_rows=0)
            )
        most_rows = self.max_num_sequences
        if decodes_in_front and min(most_rows, most_tokens) > 1:
            # Beside a long chunk decodes are a launch of their own, however few.
            self._trunk_of_zeros([1, min(longest[0], most_tokens - 1)], num_decode_rows=1)
        decodes = {min(rows, most_rows) for rows in (1, 2, *self.backend.rows_to_warm_up())}
        for rows in sorted(decodes | {most_rows}):
            self._trunk_of_zeros([1] * rows, num_decode_rows=rows)
            boundary = min(rows, most_rows - 1)
            if decodes_in_front and boundary:
                self._trunk_of_zeros([1] * (boundary + 1), num_decode_rows=boundary)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def _trunk_of_zeros(self, lengths: list[int], num_decode_rows: int) -> torch.Tensor:
        """Run prompts of these lengths, all of token 0."""
        sizes = InputSizes(tokens=sum(lengths), rows=len(lengths), updates=1)
        bounds = [0, *np.cumsum(lengths).tolist()]
        self.inputs.clear()
        inputs = self.inputs.step_inputs(sizes)
        inputs.seq_lens.copy_(torch.tensor(lengths))
        inputs.cu_seqlens_q.copy_(torch.tensor(bounds))
        return self._trunk(inputs, self._metadata(inputs, num_decode_rows, bounds, lengths))

    def _describe(self) -> dict[str, object]:
        on_gpu = self.device.type == "cuda"
        return {
            "model": self.config.model or BUNDLED,
            "architecture": self.model_config.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "attention_backend": self.backend.name,
            "kvcache_block_size": self.block_size,
            "num_kvcache_blocks": self.limits.num_blocks,
            "tokens_in_pool": self.limits.num_blocks * self.block_size,
            "max_model_length": self.limits.max_model_length,
            "max_num_sequences": self.limits.max_num_sequences,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "tensor_parallel_size": self.tp.size,
            "cuda_graphs": self.shapes.describe() if self.shapes else None,
            "weights_bytes": self.memory.weights,
            "activations_bytes": self.memory.activations,
            "graphs_bytes": self.memory.graphs,
            "pool_bytes": self.memory.pool,
        }

    # A step

    def _most_updates(self, tokens: int, rows: int) -> int:
        """Blocks that a step takes for its new tokens. Long prefix hits can add more: those are
        sent by a copy of their own."""
        return tokens // self.block_size + 2 * rows

    def _plan(self, batch: Batch, shape: StepShape | None) -> StepPlan:
        """What the ranks need to know beside the inputs, which are padded to a graph's shape."""
        tokens, rows = batch.num_tokens, batch.num_rows
        if shape is not None:
            tokens, rows = shape.tokens, shape.rows
        most, updates = self._most_updates(tokens, rows), batch.block_updates
        num_updates = most if shape is not None else min(len(updates), most)
        return StepPlan(
            sizes=InputSizes(tokens, rows, num_updates),
            decode_rows=batch.num_decode_rows,
            graphed=shape is not None,
            num_samples=len(batch.samples.rows),
            plain=not batch.samples.params,
            scored=[(chunk.begin, len(chunk.targets)) for chunk in batch.scored],
            early_updates=updates[most:],
        )

    def _run(
        self, plan: StepPlan, batch: Batch | None
    ) -> tuple[SampledBatch | None, dict[int, list[LogprobTensors]]]:
        """Everything after the inputs are packed, the same on all ranks; `batch` is there on
        rank 0, which alone has sampling parameters and alone scores prompts."""
        hidden = self._run_trunk(plan)
        scores = self._score_prompts(plan, hidden, batch)
        sampled = None
        if plan.num_samples:
            sampled = self._head(plan, hidden, batch)
        return sampled, scores

    def _run_trunk(self, plan: StepPlan) -> torch.Tensor:
        """Send the inputs to the device, and run the model on them."""
        if len(plan.early_updates):
            early = np.ascontiguousarray(plan.early_updates.T)
            index, block = upload(self.device, early[0], early[1])
            self.block_tables.view(-1)[index] = block
        sizes = plan.sizes
        self.inputs.upload(sizes)
        if self.graphs is not None and plan.graphed:
            self.graphs[0].replay(StepShape(sizes.tokens, sizes.rows, plan.decode_rows))
            return self.hidden
        inputs = self.inputs.step_inputs(sizes)
        lengths = self.inputs.lengths_on_host(sizes)
        return self._trunk(inputs, self._metadata(inputs, plan.decode_rows, *lengths))

    def _trunk(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """[T, hidden_size]."""
        ids = resolve_step_inputs(
            inputs.input_ids,
            self.sampled,
            self.block_tables,
            inputs.update_index,
            inputs.update_block,
        )
        # Not before: a backend may copy the rows' lines of the block tables.
        metadata = self.backend.prepare(metadata)
        hidden: torch.Tensor = self.model(ids, inputs.positions, self.kv_cache, metadata)
        return hidden

    def _graph_trunk(self, shape: StepShape) -> None:
        """What a trunk graph records. Some of the tokens, rows and updates will be padding."""
        updates = self._most_updates(shape.tokens, shape.rows)
        inputs = self.inputs.step_inputs(InputSizes(shape.tokens, shape.rows, updates))
        # Bounds for whatever the graph meets later: no sequence is longer than its block table.
        longest = self.block_tables.shape[1] * self.block_size
        bounds = [*range(shape.decode_rows + 1)]
        if shape.rows > shape.decode_rows:
            bounds.append(shape.tokens)
        metadata = self._metadata(inputs, shape.decode_rows, bounds, [longest])
        self.hidden[: shape.tokens] = self._trunk(inputs, metadata)

    def _head(self, plan: StepPlan, hidden: torch.Tensor, batch: Batch | None) -> SampledBatch:
        """Sample the rows that complete their known tokens, and keep the ids for the next step."""
        count = plan.num_samples
        if plan.plain and self.graphs is not None and plan.graphed:
            sizes = self.graphs[1].shapes
            self.graphs[1].replay(sizes[bisect_left(sizes, count)])
            return SampledBatch(self.sampled_rows[:count])
        inputs = self.inputs.sample_inputs(count)
        hidden = gather_rows(hidden, inputs.index)
        if plan.plain:
            return SampledBatch(self._sample_plain(hidden, inputs))
        logits = self.model.compute_logits(hidden)
        if batch is None:
            sampled = SampledBatch(torch.empty_like(inputs.slots))
        else:
            sampled = self.sampler.sample(logits, batch.samples)
        self.sampled[inputs.slots] = self.tp.broadcast(sampled.token_ids)
        return sampled

    def _graph_head(self, size: int) -> None:
        """What a head graph records."""
        inputs = self.inputs.sample_inputs(size)
        self._sample_plain(gather_rows(self.hidden, inputs.index), inputs, self.sampled_rows[:size])

    def _sample_plain(
        self, hidden: torch.Tensor, inputs: SampleInputs, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.sampler.sample_plain(
            self.model.compute_own_logits(hidden),
            inputs.temperature,
            inputs.seeds,
            inputs.positions,
            inputs.slots,
            self.sampled,
            out,
        )

    def _metadata(
        self,
        inputs: StepInputs,
        num_decode_rows: int,
        cu_seqlens_q: list[int],
        seq_lens: list[int],
    ) -> AttentionMetadata:
        query_lens = (end - begin for begin, end in pairwise(cu_seqlens_q))
        return AttentionMetadata(
            slot_mapping=inputs.slot_mapping,
            slots=inputs.slots,
            cu_seqlens_q=inputs.cu_seqlens_q,
            seq_lens=inputs.seq_lens,
            block_tables=self.block_tables,
            num_decode_rows=num_decode_rows,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            host_cu_seqlens_q=cu_seqlens_q,
            host_seq_lens=seq_lens,
        )

    def _score_prompts(
        self, plan: StepPlan, hidden: torch.Tensor, batch: Batch | None
    ) -> dict[int, list[LogprobTensors]]:
        """Log probabilities of prompt tokens, for the rows that want them."""
        scores: dict[int, list[LogprobTensors]] = {}
        for number, (begin, length) in enumerate(plan.scored):
            logits = self.model.compute_logits(hidden[begin : begin + length])
            if batch is not None:
                chunk = batch.scored[number]
                (targets,) = upload(self.device, chunk.targets)
                of_chunk = self.sampler.score(logits, targets, chunk.num_top)
                scores.setdefault(chunk.row, []).append(of_chunk.to_host())
        return scores
