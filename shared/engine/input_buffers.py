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
    """Tokens, rows, samples and block-table updates of a step, padding included."""

    tokens: int
    rows: int
    samples: int
    updates: int = 0


@dataclass(frozen=True)
class StepInputs:
    """Views of one step's inputs on the device; names and shapes as in Batch and SampleRows."""

    slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sample_index: torch.Tensor  # [K] int32: index among the T tokens of the row's last one
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    update_index: torch.Tensor
    update_block: torch.Tensor


class InputBuffers:
    """Two pinned host buffers, used in turn, and one device buffer.

    A host buffer is written again only after its own copy has ended: with one buffer, batch k + 1
    would be built over the bytes that batch k is still sending. On the CPU the host buffer is the
    device buffer.

        | rows and samples: room for every slot | T tokens, three times | block-table updates |

    Row and sample fields never move, token fields only with T: a CUDA graph for T tokens reads
    the same addresses every time.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, max_updates: int, device: torch.device
    ) -> None:
        self.max_updates = max_updates
        self._max_rows = max_rows
        words = self._layout(InputSizes(max_tokens, max_rows, max_rows, max_updates))["end"][0]
        on_gpu = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_gpu else None
        self._device = torch.zeros(words, dtype=torch.int32, device=device) if on_gpu else None
        self._turn = 0

    def upload(self, batch: Batch, sizes: InputSizes) -> StepInputs:
        """Pack a batch, padded to `sizes`, and start its copy.

        Padding computes nothing that is kept: its tokens go to no KV slot, its rows are empty
        (cu_seqlens_q repeats its last offset), its samples go to one slot past the real ones.
        """
        self._turn ^= 1
        host = self._host[self._turn]
        if self._copied is not None:
            self._copied[self._turn].synchronize()
        layout = self._layout(sizes)
        self._pack(batch, layout, host.numpy())
        if self._copied is None or self._device is None:
            return self._views(host, sizes)
        used = layout["end"][0]
        self._device[:used].copy_(host[:used], non_blocking=True)
        self._copied[self._turn].record()
        return self._views(self._device, sizes)

    def clear(self) -> None:
        """Make the device's inputs harmless for a run without a batch: token 0, empty rows, KV to
        the first place of a pool that nobody uses yet."""
        (self._host[0] if self._device is None else self._device).zero_()

    def static_views(self, sizes: InputSizes) -> StepInputs:
        """Where `upload` puts inputs of these sizes on the device: what a CUDA graph reads."""
        return self._views(self._host[0] if self._device is None else self._device, sizes)

    def _layout(self, sizes: InputSizes) -> dict[str, tuple[int, int]]:
        """Name -> (offset, room), in 4-byte words."""
        rows, tokens, updates = self._max_rows, sizes.tokens, sizes.updates
        room = {
            "slots": rows,
            "seq_lens": rows,
            "cu_seqlens_q": rows + 1,
            "sample_index": rows,
            "sample_slots": rows,
            "sample_positions": rows,
            "temperature": rows,
            "seeds": 2 * rows,
            "input_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "update_index": updates,
            "update_block": updates,
        }
        layout, offset = {}, 0
        for name, words in room.items():
            layout[name] = (offset, words)
            offset += -(-words // _ALIGN_WORDS) * _ALIGN_WORDS
        layout["end"] = (offset, 0)
        return layout

    def _pack(self, batch: Batch, layout: dict[str, tuple[int, int]], out: np.ndarray) -> None:
        def put(name: str, values: np.ndarray, padding: int = 0) -> None:
            offset, room = layout[name]
            count = len(values)
            out[offset : offset + count] = values
            out[offset + count : offset + room] = padding

        samples = batch.samples
        put("slots", batch.slots)
        put("seq_lens", batch.seq_lens)
        put("cu_seqlens_q", batch.cu_seqlens_q, padding=batch.num_tokens)
        put("sample_index", batch.cu_seqlens_q[1:][samples.rows] - 1)
        put("sample_slots", samples.slots, padding=self._max_rows)
        put("sample_positions", samples.positions)
        put("temperature", samples.temperature.view(np.int32))
        put("seeds", samples.seeds.view(np.int32))
        put("input_ids", batch.input_ids)
        put("positions", batch.positions)
        put("slot_mapping", batch.slot_mapping, padding=-1)
        put("update_index", batch.block_updates[: layout["update_index"][1], 0])
        put("update_block", batch.block_updates[: layout["update_block"][1], 1])

    def _views(self, buffer: torch.Tensor, sizes: InputSizes) -> StepInputs:
        layout = self._layout(sizes)

        def view(name: str, length: int) -> torch.Tensor:
            offset, _ = layout[name]
            return buffer[offset : offset + length]

        rows, samples, tokens = sizes.rows, sizes.samples, sizes.tokens
        return StepInputs(
            slots=view("slots", rows),
            seq_lens=view("seq_lens", rows),
            cu_seqlens_q=view("cu_seqlens_q", rows + 1),
            sample_index=view("sample_index", samples),
            sample_slots=view("sample_slots", samples),
            sample_positions=view("sample_positions", samples),
            temperature=view("temperature", samples).view(torch.float32),
            seeds=view("seeds", 2 * samples).view(torch.int64),
            input_ids=view("input_ids", tokens),
            positions=view("positions", tokens),
            slot_mapping=view("slot_mapping", tokens),
            update_index=view("update_index", sizes.updates),
            update_block=view("update_block", sizes.updates),
        )
