"""All inputs of a step in one block of memory and one copy to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.batch import Batch

# Fields start at multiples of 16 bytes: kernels may load vectors, and Triton, which compiles a
# kernel once more for pointers that are not aligned to 16 bytes, never sees one.
_ALIGN_WORDS = 4


@dataclass(frozen=True)
class InputSizes:
    """Tokens, rows, samples and block-table updates of a step, padding included."""

    tokens: int
    rows: int
    samples: int
    updates: int

    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, length), in 4-byte words."""
        lengths = {
            "input_ids": self.tokens,
            "positions": self.tokens,
            "slot_mapping": self.tokens,
            "slots": self.rows,
            "seq_lens": self.rows,
            "cu_seqlens_q": self.rows + 1,
            "sample_index": self.samples,
            "sample_slots": self.samples,
            "sample_positions": self.samples,
            "temperature": self.samples,
            "seeds": 2 * self.samples,
            "update_index": self.updates,
            "update_block": self.updates,
        }
        fields, offset = {}, 0
        for name, length in lengths.items():
            fields[name] = (offset, length)
            offset += -(-length // _ALIGN_WORDS) * _ALIGN_WORDS
        fields["end"] = (offset, 0)
        return fields


@dataclass(frozen=True)
class StepInputs:
    """Views of one step's inputs on the device; names and shapes as in Batch and SampleRows."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sample_index: torch.Tensor  # [K] int32: index among the T tokens of the row's last one
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    update_index: torch.Tensor
    update_block: torch.Tensor


class InputBuffers:
    """Two pinned host buffers, used in turn, and one device buffer.

    A host buffer is written again only after its own copy has ended: with one buffer, batch k + 1
    would be built over the bytes that batch k is still sending. On the CPU the host buffer is the
    device buffer.
    """

    def __init__(self, capacity: InputSizes, scratch_slot: int, device: torch.device) -> None:
        words, _ = capacity.fields()["end"]
        on_gpu = device.type == "cuda"
        self._scratch_slot = scratch_slot
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else None
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if on_gpu else None
        self._turn = 0

    def upload(self, batch: Batch, sizes: InputSizes) -> StepInputs:
        """Pack a batch, padded to `sizes`, and start its copy."""
        self._turn ^= 1
        host = self._host[self._turn]
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        fields = sizes.fields()
        self._pack(batch, sizes, fields, host.numpy())
        if self._copied is None or self._device is None:
            return _views(host, fields)
        used, _ = fields["end"]
        self._device[:used].copy_(host[:used], non_blocking=True)
        self._copied[self._turn].record()
        return _views(self._device, fields)

    def static_views(self, sizes: InputSizes) -> StepInputs:
        """Where `upload` will put inputs of these sizes: what a CUDA graph reads."""
        buffer = self._host[0] if self._device is None else self._device
        return _views(buffer, sizes.fields())

    def _pack(
        self, batch: Batch, sizes: InputSizes, fields: dict[str, tuple[int, int]], out: np.ndarray
    ) -> None:
        def put(name: str, values: np.ndarray, padding: int = 0) -> None:
            offset, length = fields[name]
            count = len(values)
            out[offset : offset + count] = values
            out[offset + count : offset + length] = padding

        samples = batch.samples
        put("input_ids", batch.input_ids)
        put("positions", batch.positions)
        put("slot_mapping", batch.slot_mapping, padding=-1)
        put("slots", batch.slots)
        put("seq_lens", batch.seq_lens)
        put("cu_seqlens_q", batch.cu_seqlens_q, padding=batch.num_tokens)
        put("sample_index", batch.cu_seqlens_q[1:][samples.rows] - 1)
        put("sample_slots", samples.slots, padding=self._scratch_slot)
        put("sample_positions", samples.positions)
        put("temperature", samples.temperature.view(np.int32))
        put("seeds", samples.seeds.view(np.int32))
        put("update_index", batch.block_updates[: sizes.updates, 0])
        put("update_block", batch.block_updates[: sizes.updates, 1])


def _views(buffer: torch.Tensor, fields: dict[str, tuple[int, int]]) -> StepInputs:
    views = {
        name: buffer[offset : offset + length]
        for name, (offset, length) in fields.items()
        if name != "end"
    }
    views["temperature"] = views["temperature"].view(torch.float32)
    views["seeds"] = views["seeds"].view(torch.int64)
    return StepInputs(**views)
