"""All inputs of a step in one block of memory and one copy to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.batch import Batch

# Fields start at multiples of 16 bytes, so that kernels may load vectors.
_ALIGN_WORDS = 4


@dataclass(frozen=True)
class InputSizes:
    """Tokens, rows and block-table updates of a step, padding included."""

    tokens: int
    rows: int
    updates: int


@dataclass(frozen=True)
class StepInputs:
    """Views of one step's inputs on the device; names and shapes as in Batch and SampleRows."""

    slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    update_index: torch.Tensor
    update_block: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class SampleInputs:
    """The same for the K tokens to sample."""

    index: torch.Tensor  # [K] int32: index among the T tokens of the row's last one
    slots: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class InputBuffers:
    """Two pinned host buffers, used in turn, and one device buffer.

    A host buffer is written again only after its own copy has ended: with one buffer, batch k + 1
    would be built over the bytes that batch k is still sending. On the CPU the host buffer is the
    device buffer.

        | rows, samples, block-table updates: room for the most | T tokens, three times |

    Only the token fields move, and only with T: a CUDA graph for T tokens reads the same addresses
    every time.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_samples: int,
        max_updates: int,
        device: torch.device,
    ) -> None:
        self._max_samples = max_samples
        rooms = {
            "slots": max_rows,
            "seq_lens": max_rows,
            "cu_seqlens_q": max_rows + 1,
            "sample_index": max_samples,
            "sample_slots": max_samples,
            "sample_positions": max_samples,
            "temperature": max_samples,
            "seeds": 2 * max_samples,
            "update_index": max_updates,
            "update_block": max_updates,
        }
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, words in rooms.items():
            self._offsets[name] = offset
            offset += _aligned(words)
        self._first_token = offset
        words = offset + 3 * _aligned(max_tokens)
        on_gpu = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._host_arrays = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else None
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if on_gpu else None
        self._turn = 0

    def pack(self, batch: Batch, sizes: InputSizes) -> np.ndarray:
        """Fill a host buffer with a batch, padded to `sizes`; returns its words [n] int32.

        Padding computes nothing that is kept: its tokens go to no KV slot, its rows are empty
        (cu_seqlens_q repeats its last offset), its samples go to one slot past the real ones, its
        updates to no place.
        """
        words = self._next_host_buffer()[: self._num_words(sizes)]
        self._pack(batch, sizes, words)
        return words

    def load(self, words: np.ndarray) -> None:
        """In place of `pack`: what another rank has packed, in buffers of the same sizes."""
        self._next_host_buffer()[: len(words)] = words

    def upload(self, sizes: InputSizes) -> None:
        """Start the copy of what has been packed."""
        if self._copied is not None and self._device is not None:
            end = self._num_words(sizes)
            self._device[:end].copy_(self._host[self._turn][:end], non_blocking=True)
            self._copied[self._turn].record()

    def lengths_on_host(self, sizes: InputSizes) -> tuple[list[int], list[int]]:
        """cu_seqlens_q and seq_lens of what has been packed."""
        words = self._host_arrays[self._turn]
        bounds, lengths = self._offsets["cu_seqlens_q"], self._offsets["seq_lens"]
        return (
            words[bounds : bounds + sizes.rows + 1].tolist(),
            words[lengths : lengths + sizes.rows].tolist(),
        )

    def clear(self) -> None:
        """Make the device's inputs harmless for a run without a batch: token 0, empty rows, KV to
        the first place of a pool that nobody uses yet, block 0 in the first place of its table."""
        self._on_device.zero_()

    def step_inputs(self, sizes: InputSizes) -> StepInputs:
        """Where inputs of these sizes lie on the device."""
        tokens = _aligned(sizes.tokens)
        view = self._view
        return StepInputs(
            slots=view(self._offsets["slots"], sizes.rows),
            seq_lens=view(self._offsets["seq_lens"], sizes.rows),
            cu_seqlens_q=view(self._offsets["cu_seqlens_q"], sizes.rows + 1),
            update_index=view(self._offsets["update_index"], sizes.updates),
            update_block=view(self._offsets["update_block"], sizes.updates),
            input_ids=view(self._first_token, sizes.tokens),
            positions=view(self._first_token + tokens, sizes.tokens),
            slot_mapping=view(self._first_token + 2 * tokens, sizes.tokens),
        )

    def sample_inputs(self, count: int) -> SampleInputs:
        """Where the first `count` samples lie on the device."""
        view = self._view
        return SampleInputs(
            index=view(self._offsets["sample_index"], count),
            slots=view(self._offsets["sample_slots"], count),
            positions=view(self._offsets["sample_positions"], count),
            temperature=view(self._offsets["temperature"], count).view(torch.float32),
            seeds=view(self._offsets["seeds"], 2 * count).view(torch.int64),
        )

    def _next_host_buffer(self) -> np.ndarray:
        """Once its last copy has ended."""
        self._turn ^= 1
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        return self._host_arrays[self._turn]

    def _num_words(self, sizes: InputSizes) -> int:
        return self._first_token + 3 * _aligned(sizes.tokens)

    @property
    def _on_device(self) -> torch.Tensor:
        return self._host[self._turn] if self._device is None else self._device

    def _view(self, offset: int, length: int) -> torch.Tensor:
        return self._on_device[offset : offset + length]

    def _pack(self, batch: Batch, sizes: InputSizes, out: np.ndarray) -> None:
        def put(offset: int, values: np.ndarray, room: int, padding: int = 0) -> None:
            end = offset + len(values)
            out[offset:end] = values
            if len(values) < room:
                out[end : offset + room] = padding

        at, most, tokens = self._offsets, self._max_samples, sizes.tokens
        put(at["slots"], batch.slots, sizes.rows)
        put(at["seq_lens"], batch.seq_lens, sizes.rows)
        put(at["cu_seqlens_q"], batch.cu_seqlens_q, sizes.rows + 1, padding=batch.num_tokens)
        samples = batch.samples
        put(at["sample_index"], batch.cu_seqlens_q[1:][samples.rows] - 1, most)
        put(at["sample_slots"], samples.slots, most, padding=most)
        put(at["sample_positions"], samples.positions, most)
        put(at["temperature"], samples.temperature.view(np.int32), most)
        put(at["seeds"], samples.seeds.view(np.int32), 2 * most)
        updates = batch.block_updates[: sizes.updates]
        put(at["update_index"], updates[:, 0], sizes.updates, padding=-1)
        put(at["update_block"], updates[:, 1], len(updates))
        first, step = self._first_token, _aligned(tokens)
        put(first, batch.input_ids, tokens)
        put(first + step, batch.positions, tokens)
        put(first + 2 * step, batch.slot_mapping, tokens, padding=-1)


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS
