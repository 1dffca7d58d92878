"""The end of a step: sampled values enter their sequences, full blocks become findable, and what
is finished leaves."""

from __future__ import annotations

import numpy as np

from shared.engine.batch import Batch, Schedule
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.result import StepResult
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
    samples = batch.samples
    alive = table.generation[batch.slots] == batch.owners
    kept = alive[samples.rows]
    table.token_ids[samples.slots[kept], samples.positions[kept]] = result.token_ids[kept]
    if block_manager.enable_prefix_caching:
        full = batch.seq_lens // block_manager.block_size
        more = alive & (full > table.num_registered_blocks[batch.slots])
        for row in np.flatnonzero(more).tolist():
            block_manager.register(schedule.sequences[row], int(batch.seq_lens[row]))

    outputs: dict[int, StepOutput] = {}
    finished: list[Sequence] = []
    at_limit = samples.positions + 1 >= table.finish_length[samples.slots]
    columns = (samples.rows, result.token_ids, at_limit, kept)
    for sample, (row, token, is_last, is_kept) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if not is_kept:
            continue
        sequence = schedule.sequences[row]
        reason: FinishReason | None = None
        if token in sequence.stop_token_ids:
            reason = "stop"
        elif is_last:
            reason = "length"
        output = StepOutput(sequence.request_id, sequence.index, [token], finish_reason=reason)
        if result.logprobs is not None and (logprobs := result.logprobs[sample]) is not None:
            output.logprobs = [logprobs]
        if reason is not None:
            finished.append(sequence)
        outputs[row] = output

    if not batch.decoding.all():
        in_prompt = alive & (batch.starts < table.num_prompt_tokens[batch.slots])
        for row in np.flatnonzero(in_prompt).tolist():
            _advance_prompt(schedule.sequences[row], row, batch, result, outputs, finished)
    if finished:
        queues.finish(finished)
    return list(outputs.values())


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
    """The forward pass failed: its sequences count tokens as computed that are not, so they end
    here. The others never notice."""
    queues.finish(schedule.sequences)
    text = f"{type(error).__name__}: {error}"
    return [
        StepOutput(s.request_id, s.index, [], finish_reason="abort", error=text)
        for s in schedule.sequences
    ]
