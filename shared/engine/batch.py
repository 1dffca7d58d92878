"""From a schedule (who computes how many tokens) to the arrays a forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable


@dataclass
class Schedule:
    """What one step does: the scheduler's whole answer.

    `sequences` in batch order, the first `num_decode_rows` with one token each.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_decode_rows: int = 0
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_new_tokens: int) -> None:
        self.sequences.append(sequence)
        self.num_new_tokens.append(num_new_tokens)


@dataclass
class SampleRows:
    """The K rows of a batch that get a next token."""

    rows: np.ndarray  # [K] row of the batch
    slots: np.ndarray  # [K] int32
    positions: np.ndarray  # [K] int32: index in its sequence of the token being sampled
    temperature: np.ndarray  # [K] float32
    seeds: np.ndarray  # [K] int64
    generations: np.ndarray  # [K] int64: which owner of the slot
    plain: bool  # only temperatures: no row filters, penalises, biases or wants logprobs


@dataclass
class Batch:
    """R rows, T tokens; row r computes the last cu_seqlens_q[r + 1] - cu_seqlens_q[r] of the
    first seq_lens[r] tokens of its sequence."""

    sequences: list[Sequence]
    num_decode_rows: int
    slots: np.ndarray  # [R] int32
    cu_seqlens_q: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32
    input_ids: np.ndarray  # [T] int32; -1 - slot: the token last sampled there, on the device
    positions: np.ndarray  # [T] int32
    slot_mapping: np.ndarray  # [T] int32
    samples: SampleRows
    block_updates: np.ndarray  # [U, 2] int32 (flat index into the block table, block)

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def build_batch(schedule: Schedule, table: SlotTable) -> Batch:
    """Build the arrays and advance the table: from here on the step's tokens count as computed,
    and a row that reaches its last known token counts one more, whose value comes later."""
    num_rows = len(schedule.sequences)
    slots = np.fromiter((s.slot for s in schedule.sequences), np.int32, num_rows)
    new = np.array(schedule.num_new_tokens, np.int32)
    starts = table.num_computed_tokens[slots]
    seq_lens = starts + new
    cu_seqlens_q = np.zeros(num_rows + 1, np.int32)
    np.cumsum(new, out=cu_seqlens_q[1:])
    num_tokens = int(cu_seqlens_q[-1])

    row = np.repeat(np.arange(num_rows, dtype=np.int32), new)
    positions = np.arange(num_tokens, dtype=np.int32) - (cu_seqlens_q[:-1] - starts)[row]
    token_slots = slots[row]
    input_ids = table.token_ids[token_slots, positions]
    # A decoding slot's last token may still be in flight: the device has it, the host not yet.
    gathers = table.decoding[slots]
    input_ids[cu_seqlens_q[:-1][gathers]] = -1 - slots[gathers]
    block_size = table.limits.block_size
    blocks = table.block_table[token_slots, positions // block_size]
    slot_mapping = blocks * np.int32(block_size) + positions % block_size

    known = table.num_tokens[slots]
    sampling = np.flatnonzero((seq_lens == known) & (known < table.finish_length[slots]))
    sample_slots = slots[sampling]
    samples = SampleRows(
        rows=sampling,
        slots=sample_slots,
        positions=seq_lens[sampling],
        temperature=table.temperature[sample_slots],
        seeds=table.seed[sample_slots],
        generations=table.generation[sample_slots],
        plain=bool(table.plain[slots].all()),
    )
    table.num_computed_tokens[slots] = seq_lens
    table.num_tokens[sample_slots] += 1
    table.decoding[sample_slots] = True
    return Batch(
        sequences=schedule.sequences,
        num_decode_rows=schedule.num_decode_rows,
        slots=slots,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        samples=samples,
        block_updates=table.take_block_updates(),
    )
