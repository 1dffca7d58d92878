"""Runs the model: holds weights, KV pool and sampled ids; turns a batch into a step in flight."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from shared.config import EngineConfig
from shared.engine.batch import Batch
from shared.engine.input_buffers import InputBuffers, InputSizes, StepInputs
from shared.engine.memory import MemoryReport, blocks_for_cpu, blocks_for_gpu, bytes_per_block
from shared.engine.resolve import (
    resolve_backend,
    resolve_block_size,
    resolve_device,
    resolve_dtype,
    resolve_max_length,
)
from shared.engine.result import StepResult
from shared.engine.sampler import LogprobTensors, SampledBatch, Sampler, SamplingRows
from shared.engine.slots import Limits
from shared.layers.attention import ATTENTION_BACKENDS, AttentionMetadata
from shared.layers.tensor_parallel import TensorParallel
from shared.models.config import ModelConfig
from shared.models.loader import initialize_dummy, load_weights
from shared.models.registry import MODELS

logger = logging.getLogger(__name__)

# Hidden states become logits this many at a time when a whole prompt is scored: 1024 rows of a
# vocabulary of 152k take 600 MB in float32.
_SCORED_ROWS = 1024


@dataclass
class StepHandle:
    """A step in flight on the device."""

    sampled: SampledBatch | None  # on the host once `copied` has happened; None: nothing sampled
    scores: dict[int, list[LogprobTensors]]
    copied: torch.cuda.Event | None
    used_graph: bool

    def result(self) -> StepResult:
        """Wait for the copies to the host; nothing else of a step ever waits."""
        if self.copied is not None:
            self.copied.synchronize()
        scores = {
            row: [entry for part in parts for entry in part.to_dicts()]
            for row, parts in self.scores.items()
        }
        if self.sampled is None:
            return StepResult(np.empty(0, np.int32), None, scores)
        logprobs = None if self.sampled.logprobs is None else self.sampled.token_logprobs()
        return StepResult(self.sampled.token_ids.numpy(), logprobs, scores)


class ModelRunner:
    """One model on one device (or one rank's part of it).

    The sampled id of every slot stays on the device, in `sampled`, and decode inputs are always
    read from there: the next step can be submitted before the host has seen this one's ids.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path | None,
        tp: TensorParallel | None = None,
    ) -> None:
        """`directory` holds the weights; None with load_format=dummy. Raises ValueError or OSError
        naming the option or file that is wrong."""
        tp = tp or TensorParallel()
        self.config = config
        self.model_config = model_config
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config, model_config, self.device)
        backend = resolve_backend(config, self.device, self.dtype)
        self.block_size = resolve_block_size(config, backend)
        self.max_model_length = resolve_max_length(config, model_config)
        self.max_num_sequences = min(config.max_num_sequences, config.max_num_batched_tokens)
        self.backend = ATTENTION_BACKENDS[backend]()
        self.model = MODELS[model_config.architecture](
            model_config, self.dtype, self.device, self.backend, self.max_model_length, tp
        ).eval()
        if directory is None:
            initialize_dummy(self.model, config.seed, model_config.initializer_range)
        else:
            load_weights(self.model, directory)
        self._allocate(max(1, model_config.num_key_value_heads // tp.size))

    @torch.inference_mode()
    def submit(self, batch: Batch) -> StepHandle:
        """Start a step. On a GPU everything here is only enqueued."""
        inputs = self._upload(batch)
        metadata = self._metadata(
            inputs,
            batch.num_decode_rows,
            batch.cu_seqlens_q.tolist(),
            batch.seq_lens.tolist(),
        )
        x, residual = self._trunk(inputs, metadata)
        scores = self._score_prompts(batch, x, residual)
        sampled = None
        if len(batch.samples.rows):
            sampled = self._sample(batch, inputs, x, residual)
            self.sampled[inputs.sample_slots] = sampled.token_ids
            sampled = sampled.to_host()
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return StepHandle(sampled, scores, copied, used_graph=False)

    def describe(self) -> dict[str, object]:
        return {
            "model": self.config.model or "bundled tiny checkpoint",
            "architecture": self.model_config.architecture,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "device_name": (
                torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
            ),
            "attention_backend": self.backend.name,
            "kvcache_block_size": self.block_size,
            "num_kvcache_blocks": self.limits.num_blocks,
            "tokens_in_pool": self.limits.num_blocks * self.block_size,
            "max_model_length": self.limits.max_model_length,
            "max_num_sequences": self.limits.max_num_sequences,
            "max_num_batched_tokens": self.limits.max_num_batched_tokens,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "cuda_graphs": False,
            "weights_bytes": self.memory.weights,
            "activations_bytes": self.memory.activations,
            "graphs_bytes": self.memory.graphs,
            "pool_bytes": self.memory.pool,
        }

    def close(self) -> None:
        """Drop everything on the device."""
        self.__dict__.pop("model", None)
        self.__dict__.pop("kv_cache", None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Set-up

    def _allocate(self, num_kv_heads: int) -> None:
        config, size = self.config, self.block_size
        columns = -(-self.max_model_length // size)
        self._make_buffers(columns)
        block_bytes = bytes_per_block(self.model_config, num_kv_heads, size, self.dtype)
        weights = sum(p.numel() * p.element_size() for p in set(self.model.parameters()))
        activations = 0
        most_useful = self.max_num_sequences * columns
        shape = (size, num_kv_heads, self.model_config.head_dim)
        if self.device.type == "cuda":
            activations, peak, budget = self._profile(shape)
            fitting = blocks_for_gpu(block_bytes, most_useful, budget, peak)
        else:
            fitting = blocks_for_cpu(block_bytes, most_useful)
        num_blocks = config.num_kvcache_blocks if config.num_kvcache_blocks > 0 else fitting
        if num_blocks > fitting and num_blocks > most_useful:
            logger.info("num_kvcache_blocks=%d: at most %d are of use", num_blocks, most_useful)
        self._make_pool(num_blocks, shape)
        self.memory = MemoryReport(weights, activations, 0, num_blocks * block_bytes)
        self.limits = Limits(
            vocab_size=self.model_config.vocab_size,
            block_size=size,
            num_blocks=num_blocks,
            max_model_length=min(self.max_model_length, num_blocks * size),
            max_num_sequences=self.max_num_sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        # The table on the device has the host table's columns, so that flat indices agree.
        self.block_tables = self._zeros(
            self.max_num_sequences, -(-self.limits.max_model_length // size)
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def _make_buffers(self, columns: int) -> None:
        rows, tokens = self.max_num_sequences, self.config.max_num_batched_tokens
        # The most blocks a step takes for its new tokens. Long prefix hits can add more: those go
        # by a copy of their own.
        self.max_updates = tokens // self.block_size + 2 * rows
        self.inputs = InputBuffers(
            InputSizes(tokens, rows, rows, self.max_updates), rows, self.device
        )
        # One more than there are slots: padding rows write their ids to the last.
        self.sampled = self._zeros(rows + 1)
        self.block_tables = self._zeros(rows, columns)
        self.sampler = Sampler(
            self.model_config.vocab_size,
            rows,
            self.max_model_length,
            self.device,
            self.model_config.eos_token_ids,
        )

    def _make_pool(self, num_blocks: int, block_shape: tuple[int, int, int]) -> None:
        # Zeros, not uninitialised memory: a masked score times a NaN would still be a NaN.
        layers = self.model_config.num_hidden_layers
        self.kv_cache = self._zeros(layers, 2, num_blocks, *block_shape, dtype=self.dtype)

    @torch.inference_mode()
    def _profile(self, block_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(activation bytes, peak bytes without the pool, budget) of the largest step there is.

        All rows read block 0 and write nothing, so a pool of one block is enough.
        """
        self._make_pool(1, block_shape)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        inputs, metadata = self._largest_step()
        x, residual = self._trunk(inputs, metadata)
        logits = self.model.compute_logits(
            x[: self.max_num_sequences], residual[: self.max_num_sequences]
        )
        self.sampler.warm_up(logits)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        del x, residual, logits, inputs, metadata
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        outside_torch = total - free - torch.cuda.memory_reserved(self.device)
        budget = int(total * self.config.gpu_memory_utilization)
        return peak - before, peak + outside_torch, budget

    def _largest_step(self) -> tuple[StepInputs, AttentionMetadata]:
        tokens, length = self.config.max_num_batched_tokens, self.max_model_length
        lengths = [min(length, tokens - begin) for begin in range(0, tokens, length)]
        lengths = lengths[: self.max_num_sequences]
        rows = len(lengths)
        inputs = self.inputs.static_views(InputSizes(sum(lengths), rows, rows, 0))
        inputs.slot_mapping.fill_(-1)
        inputs.slots.zero_()
        inputs.seq_lens.copy_(torch.tensor(lengths))
        bounds = [0, *np.cumsum(lengths).tolist()]
        inputs.cu_seqlens_q.copy_(torch.tensor(bounds))
        return inputs, self._metadata(inputs, 0, bounds, lengths)

    # A step

    def _upload(self, batch: Batch) -> StepInputs:
        """Send the inputs and bring the device's block tables up to date."""
        updates = batch.block_updates
        if len(updates) > self.max_updates:
            early = torch.from_numpy(updates[self.max_updates :]).to(self.device)
            self._update_block_tables(early[:, 0], early[:, 1])
        inputs = self.inputs.upload(
            batch,
            InputSizes(
                tokens=batch.num_tokens,
                rows=batch.num_rows,
                samples=len(batch.samples.rows),
                updates=min(len(updates), self.max_updates),
            ),
        )
        self._update_block_tables(inputs.update_index, inputs.update_block)
        return inputs

    def _trunk(
        self, inputs: StepInputs, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = inputs.input_ids
        in_flight = self.sampled[(-1 - ids).clamp(min=0)]
        return self.model(
            torch.where(ids < 0, in_flight, ids), inputs.positions, self.kv_cache, metadata
        )

    def _update_block_tables(self, index: torch.Tensor, block: torch.Tensor) -> None:
        if len(index):
            self.block_tables.view(-1)[index] = block

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

    def _sample(
        self, batch: Batch, inputs: StepInputs, x: torch.Tensor, residual: torch.Tensor
    ) -> SampledBatch:
        samples = batch.samples
        logits = self.model.compute_logits(x[inputs.sample_index], residual[inputs.sample_index])
        if samples.plain:
            return SampledBatch(
                self.sampler.sample_plain(
                    logits, inputs.temperature, inputs.seeds, inputs.sample_positions
                )
            )
        sequences = [batch.sequences[row] for row in samples.rows.tolist()]
        rows = SamplingRows(
            slots=samples.slots,
            positions=samples.positions,
            temperature=samples.temperature,
            seeds=samples.seeds,
            params=[sequence.params for sequence in sequences],
            prompt_lengths=np.array([sequence.num_prompt_tokens for sequence in sequences]),
            owners=samples.generations,
            known_tokens=lambda row: sequences[row].token_ids,
        )
        return self.sampler.sample(logits, rows)

    def _score_prompts(
        self, batch: Batch, x: torch.Tensor, residual: torch.Tensor
    ) -> dict[int, list[LogprobTensors]]:
        """Log probabilities of prompt tokens, for the rows that want them: hidden states at
        position p score the token at p + 1."""
        scores: dict[int, list[LogprobTensors]] = {}
        for row in range(batch.num_decode_rows, batch.num_rows):
            sequence = batch.sequences[row]
            num_top = sequence.params.prompt_logprobs
            if sequence.prompt_logprobs is None or num_top is None:
                continue
            begin, end = batch.cu_seqlens_q[row : row + 2].tolist()
            start = int(batch.seq_lens[row]) - (end - begin)
            targets = sequence.token_ids[start + 1 : sequence.num_prompt_tokens][: end - begin]
            scores[row] = [
                self._score(x, residual, begin + done, targets[done : done + _SCORED_ROWS], num_top)
                for done in range(0, len(targets), _SCORED_ROWS)
            ]
        return scores

    def _score(
        self, x: torch.Tensor, residual: torch.Tensor, begin: int, targets: np.ndarray, num_top: int
    ) -> LogprobTensors:
        rows = slice(begin, begin + len(targets))
        logits = self.model.compute_logits(x[rows], residual[rows])
        on_device = torch.from_numpy(targets.copy()).to(self.device)
        return self.sampler.score(logits, on_device, num_top).to_host()
