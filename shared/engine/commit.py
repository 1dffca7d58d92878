"""The end of a step: sampled values enter their sequences, full blocks become findable, and what
is finished leaves."""

from __future__ import annotations

import numpy as np

from shared.engine.batch import Batch, Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.result import RunnerLost, StepResult
from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable
from shared.outputs import FinishReason, StepOutput


def commit(
    schedule: Schedule,
    batch: Batch,
    result: StepResult,
    table: SlotTable,
    block_manager: BlockManager,
    queues: Queues,
) -> list[StepOutput]:
    """One StepOutput per row that got a token or finished, in batch order.

    A row whose sequence has left its slot while the step was in flight comes to nothing.
    """
    samples, slots = batch.samples, batch.slots.astype(np.intp)
    alive = table.generation[slots] == batch.owners
    kept = alive[samples.rows].nonzero()[0]
    rows, positions, sampled = samples.rows[kept], samples.positions[kept], result.token_ids[kept]
    table.token_ids[slots[rows], positions] = sampled
    block_manager.register(schedule.sequences, slots, batch.seq_lens * alive)

    tokens, sequences = sampled.tolist(), schedule.sequences
    if len(rows) < len(sequences):
        sequences = [sequences[row] for row in rows.tolist()]
    outputs = [
        StepOutput(s.request_id, s.index, [token])
        for s, token in zip(sequences, tokens, strict=True)
    ]
    if result.logprobs is not None:
        for output, sample in zip(outputs, kept.tolist(), strict=True):
            if (logprobs := result.logprobs[sample]) is not None:
                output.logprobs = [logprobs]

    at_limit = (positions + 1 >= table.finish_length[slots[rows]]).nonzero()[0]
    reasons: dict[int, FinishReason] = dict.fromkeys(at_limit.tolist(), "length")
    if not table.stop_token_ids.isdisjoint(tokens):
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if token in sequence.stop_token_ids:
                reasons[i] = "stop"
    for i, reason in reasons.items():
        outputs[i].finish_reason = reason
    finished = [sequences[i] for i in sorted(reasons)]

    if not batch.decoding.all():
        by_row = dict(zip(rows.tolist(), outputs, strict=True))
        in_prompt = alive & (batch.starts < table.num_prompt_tokens[slots])
        for row in in_prompt.nonzero()[0].tolist():
            _advance_prompt(schedule.sequences[row], row, batch, result, by_row, finished)
        outputs = list(by_row.values())
    if finished:
        queues.finish(finished)
    return outputs


def _advance_prompt(
    sequence: Sequence,
    row: int,
    batch: Batch,
    result: StepResult,
    outputs: dict[int, StepOutput],
    finished: list[Sequence],
) -> None:
    """What belongs to the step that completes a prompt goes into that step's output."""
    if sequence.prompt_logprobs is not None:
        sequence.prompt_logprobs.extend(result.prompt_logprobs.get(row, []))
    if batch.seq_lens[row] < sequence.num_prompt_tokens:
        return
    if row not in outputs and sequence.params.max_tokens == 0:
        outputs[row] = StepOutput(sequence.request_id, sequence.index, [], finish_reason="length")
        finished.append(sequence)
    if (output := outputs.get(row)) is not None:
        output.num_cached_tokens = sequence.num_cached_tokens or 0
        output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None


def abandon(schedule: Schedule, error: Exception, queues: Queues) -> list[StepOutput]:
    """The forward pass failed: its sequences count tokens as computed that are not, so those that
    have not left meanwhile end here. The others never notice. Raises `error` if it is RunnerLost:
    nothing can go on then."""
    if isinstance(error, RunnerLost):
        raise error
    sequences = [s for s in schedule.sequences if s.is_running]
    queues.finish(sequences)
    text = f"{type(error).__name__}: {error}"
    return [
        StepOutput(s.request_id, s.index, [], finish_reason="abort", error=text) for s in sequences
    ]
