"""The end of a step: sampled values enter their sequences, full blocks become findable, and what
is finished leaves."""

from __future__ import annotations

import numpy as np

from shared.engine.batch import Batch
from shared.engine.block_manager import BlockManager
from shared.engine.queues import Queues
from shared.engine.result import StepResult
from shared.engine.sequence import Sequence
from shared.engine.slots import SlotTable
from shared.outputs import FinishReason, StepOutput


def commit(
    batch: Batch,
    result: StepResult,
    table: SlotTable,
    block_manager: BlockManager,
    queues: Queues,
) -> list[StepOutput]:
    """One StepOutput per row that got a token or finished, in batch order."""
    samples = batch.samples
    table.token_ids[samples.slots, samples.positions] = result.token_ids
    _register_full_blocks(batch, table, block_manager)

    outputs = []
    finished: list[Sequence] = []
    at_limit = samples.positions + 1 >= table.finish_length[samples.slots]
    for sample, (row, token, is_last) in enumerate(
        zip(samples.rows.tolist(), result.token_ids.tolist(), at_limit.tolist(), strict=True)
    ):
        sequence = batch.sequences[row]
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
        outputs.append(output)

    _complete_prompts(batch, result, outputs, finished)
    if finished:
        queues.finish_all(finished)
    return outputs


def _register_full_blocks(batch: Batch, table: SlotTable, block_manager: BlockManager) -> None:
    full = batch.seq_lens // block_manager.block_size
    for row in np.flatnonzero(full > table.num_registered_blocks[batch.slots]).tolist():
        block_manager.register(batch.sequences[row], int(batch.seq_lens[row]))


def _complete_prompts(
    batch: Batch, result: StepResult, outputs: list[StepOutput], finished: list[Sequence]
) -> None:
    """Add what belongs to the step that completes a prompt to that step's output."""
    prefills = range(batch.num_decode_rows, batch.num_rows)
    if not prefills:
        return
    by_row = dict(zip(batch.samples.rows.tolist(), outputs, strict=True))
    for row in prefills:
        sequence = batch.sequences[row]
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.extend(result.prompt_logprobs.get(row, []))
        if int(batch.seq_lens[row]) < sequence.num_prompt_tokens:
            continue
        output = by_row.get(row)
        if output is None:
            if sequence.params.max_tokens > 0:
                continue  # a recomputation that is not complete yet
            output = StepOutput(sequence.request_id, sequence.index, [], finish_reason="length")
            outputs.append(output)
            finished.append(sequence)
        output.num_cached_tokens = sequence.num_cached_tokens or 0
        output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
