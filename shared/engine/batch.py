"""From a schedule (who computes how many tokens) to the arrays a forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable, slots_of
from shared.sampling_params import SamplingParams

# Hidden states become logits this many at a time when a whole prompt is scored: 1024 rows of a
# vocabulary of 152k take 600 MB in float32.
MAX_SCORED = 1024


@dataclass
class Schedule:
    """What one step does: the scheduler's whole answer.

    `sequences` in batch order. The first `num_decode_rows` have one token each, and attention
    computes them as decodes; which rows a stage puts there is a choice of speed, not of meaning.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_decode_rows: int = 0
    slots: np.ndarray | None = None  # of the sequences, where they are known already
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence, num_new_tokens: int) -> None:
        self.sequences.append(sequence)
        self.num_new_tokens.append(num_new_tokens)


@dataclass
class SampleRows:
    """The K rows of a batch that get a next token."""

    rows: np.ndarray  # [K] row of the batch
    slots: np.ndarray  # [K] int32
    positions: np.ndarray  # [K] int32: tokens before the one sampled, those in flight included
    temperature: np.ndarray  # [K] float32
    seeds: np.ndarray  # [K] int64, from sequence_seed
    owners: np.ndarray  # [K] int64: which of its slot's owners the sequence is
    prompt_lengths: np.ndarray  # [K] int32
    # [K]; empty when nothing but the temperatures matters to any row.
    params: list[SamplingParams] = field(default_factory=list)
    # Sample row -> all tokens before the sampled one, for penalised rows that sample for the first
    # time in their slot. Later tokens are appended on the device, before the host knows them.
    known_tokens: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class ScoredChunk:
    """A part of a prompt whose tokens' log probabilities are wanted; n is at most MAX_SCORED."""

    row: int
    begin: int  # index among the batch's tokens of the first hidden state that scores
    targets: np.ndarray  # [n] int32: the tokens that follow those at begin, begin + 1, ...
    num_top: int


@dataclass
class Batch:
    """R rows, T tokens; row r computes the last cu_seqlens_q[r + 1] - cu_seqlens_q[r] of the
    first seq_lens[r] tokens of its sequence. Plain data: it can be sent to another process."""

    num_decode_rows: int
    slots: np.ndarray  # [R] int32
    owners: np.ndarray  # [R] int64: which of its slot's owners the sequence is
    decoding: np.ndarray  # [R] bool: the row's one token was sampled in its slot
    cu_seqlens_q: np.ndarray  # [R + 1] int32
    seq_lens: np.ndarray  # [R] int32
    input_ids: np.ndarray  # [T] int32; -1 - slot: the token last sampled there, on the device
    positions: np.ndarray  # [T] int32
    slot_mapping: np.ndarray  # [T] int32
    samples: SampleRows
    scored: list[ScoredChunk]
    block_updates: np.ndarray  # [U, 2] int32 (flat index into the block table, block), of its rows

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def starts(self) -> np.ndarray:
        """[R] int32: tokens of each row's sequence that were computed before."""
        return self.seq_lens - np.diff(self.cu_seqlens_q)

    def with_decode_rows(self, count: int) -> Batch:
        """The same work with `count` decode rows: a CUDA graph has the boundary to the other rows
        in one place. Too many decodes are rows like the others, behind the boundary; too few get
        empty rows behind them.

        An empty row has one token of padding: token 0 at position 0, its KV to nowhere. What only
        the commit reads (owners, decoding) stays that of the real rows.
        """
        old, more = self.num_decode_rows, count - self.num_decode_rows
        if not more:
            return self
        if more < 0:
            return replace(self, num_decode_rows=count)

        def pad(values: np.ndarray, value: int = 0) -> np.ndarray:
            return np.insert(values, old, np.full(more, value, values.dtype))

        cu_seqlens_q = np.concatenate(
            (np.arange(count, dtype=np.int32), self.cu_seqlens_q[old:] + np.int32(more))
        )
        rows = self.samples.rows
        return replace(
            self,
            num_decode_rows=count,
            slots=pad(self.slots),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=pad(self.seq_lens),
            input_ids=pad(self.input_ids),
            positions=pad(self.positions),
            slot_mapping=pad(self.slot_mapping, -1),
            samples=replace(self.samples, rows=rows + more * (rows >= old)),
            scored=[replace(chunk, begin=chunk.begin + more) for chunk in self.scored],
        )


def build_batch(schedule: Schedule, table: SlotTable) -> Batch:
    """Build the arrays and advance the table: from here on the step's tokens count as computed,
    and a row that reaches its last known token counts one more, whose value comes later."""
    num_rows = len(schedule.sequences)
    slots = slots_of(schedule.sequences) if schedule.slots is None else schedule.slots
    starts = table.num_computed_tokens[slots]
    if schedule.num_decode_rows == num_rows:  # most steps: a token is a row
        cu_seqlens_q = np.arange(num_rows + 1, dtype=np.int32)
        token_slots, positions, seq_lens = slots, starts, starts + np.int32(1)
    else:
        new = np.array(schedule.num_new_tokens, np.int32)
        cu_seqlens_q = np.zeros(num_rows + 1, np.int32)
        np.cumsum(new, out=cu_seqlens_q[1:])
        row = np.repeat(np.arange(num_rows, dtype=np.int32), new)
        positions = np.arange(len(row), dtype=np.int32) - (cu_seqlens_q[:-1] - starts)[row]
        token_slots, seq_lens = slots[row], starts + new
    # A decoding slot's last token may still be in flight: the device has it, the host not yet.
    decoding = table.decoding[slots]
    decode_rows = decoding.nonzero()[0]
    if len(decode_rows) == num_rows:
        input_ids = (-1 - slots).astype(np.int32)
    else:
        input_ids = table.token_ids[token_slots, positions]
        input_ids[cu_seqlens_q[decode_rows]] = -1 - slots[decode_rows]
    block_size = table.limits.block_size
    blocks = table.block_table[token_slots, positions // block_size]
    slot_mapping = blocks * np.int32(block_size) + positions % block_size

    samples = _sample_rows(schedule, table, slots, seq_lens)
    scored = []
    if len(decode_rows) < num_rows:
        scored = _scored_chunks(schedule, cu_seqlens_q, starts)
    table.num_computed_tokens[slots] = seq_lens
    sampled = slots[samples.rows]
    table.num_tokens[sampled] = samples.positions + 1
    table.decoding[sampled] = True
    return Batch(
        num_decode_rows=schedule.num_decode_rows,
        slots=slots.astype(np.int32),
        owners=table.generation[slots],
        decoding=decoding,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        samples=samples,
        scored=scored,
        block_updates=table.take_block_updates(slots),
    )


def _sample_rows(
    schedule: Schedule, table: SlotTable, row_slots: np.ndarray, seq_lens: np.ndarray
) -> SampleRows:
    """Rows that reach their last known token and may have one more."""
    known = table.num_tokens[row_slots]
    rows = ((seq_lens == known) & (known < table.finish_length[row_slots])).nonzero()[0]
    slots, positions = row_slots[rows], seq_lens[rows]
    samples = SampleRows(
        rows=rows,
        slots=slots.astype(np.int32),
        positions=positions,
        temperature=table.temperature[slots],
        seeds=table.seed[slots],
        owners=table.generation[slots],
        prompt_lengths=table.num_prompt_tokens[slots],
    )
    if (positions < table.plain_from[slots]).any():
        sequences = [schedule.sequences[row] for row in rows.tolist()]
        samples.params = [sequence.params for sequence in sequences]
        samples.known_tokens = {
            sample: sequences[sample].token_ids.copy()
            for sample in np.flatnonzero(~table.decoding[slots]).tolist()
            if sequences[sample].params.has_penalties
        }
    return samples


def _scored_chunks(
    schedule: Schedule, cu_seqlens_q: np.ndarray, starts: np.ndarray
) -> list[ScoredChunk]:
    chunks = []
    for row, sequence in enumerate(schedule.sequences):
        num_top = sequence.params.prompt_logprobs
        if sequence.prompt_logprobs is None or num_top is None:
            continue
        begin, num_new, start = int(cu_seqlens_q[row]), schedule.num_new_tokens[row], starts[row]
        # The hidden state at position p scores the token at p + 1.
        targets = sequence.token_ids[start + 1 : sequence.num_prompt_tokens][:num_new]
        for done in range(0, len(targets), MAX_SCORED):
            part = targets[done : done + MAX_SCORED].copy()
            chunks.append(ScoredChunk(row, begin + done, part, num_top))
    return chunks
