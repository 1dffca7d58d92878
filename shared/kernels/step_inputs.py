"""The first thing a step does on the device: bring block tables up to date and find out the token
ids that only the device knows."""

from __future__ import annotations

import torch

from shared.kernels._triton import jit, runs_on_triton, tl

_BLOCK = 256


def resolve_step_inputs_reference(
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
    block_tables: torch.Tensor,
    update_index: torch.Tensor,
    update_block: torch.Tensor,
) -> torch.Tensor:
    real = update_index >= 0
    block_tables.view(-1)[update_index[real]] = update_block[real]
    in_flight = sampled[(-1 - input_ids).clamp(min=0)]
    return torch.where(input_ids < 0, in_flight, input_ids)


def resolve_step_inputs(
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
    block_tables: torch.Tensor,
    update_index: torch.Tensor,
    update_block: torch.Tensor,
) -> torch.Tensor:
    """input_ids [T] int32, where -1 - slot stands for sampled[slot] -> the ids [T] int32.

    Writes update_block [U] int32 to block_tables [S, columns] int32, contiguous, at the flat
    places update_index [U] int32; a negative place is padding. No place is named twice.
    """
    if runs_on_triton(input_ids):
        return resolve_step_inputs_triton(
            input_ids, sampled, block_tables, update_index, update_block
        )
    return resolve_step_inputs_reference(
        input_ids, sampled, block_tables, update_index, update_block
    )


@jit(
    integers=("num_tokens", "num_updates"),
    metadata=("input_ids_ptr", "update_index_ptr", "update_block_ptr"),
)
def _resolve_step_inputs_kernel(
    input_ids_ptr,
    sampled_ptr,
    block_tables_ptr,
    update_index_ptr,
    update_block_ptr,
    ids_ptr,
    num_tokens,
    num_updates,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    token_programs = tl.cdiv(num_tokens, BLOCK)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        inside = token < num_tokens
        ids = tl.load(input_ids_ptr + token, mask=inside, other=0)
        in_flight = tl.load(sampled_ptr + (-1 - ids), mask=inside & (ids < 0), other=0)
        tl.store(ids_ptr + token, tl.where(ids < 0, in_flight, ids), mask=inside)
    else:
        update = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = update < num_updates
        index = tl.load(update_index_ptr + update, mask=inside, other=-1)
        block = tl.load(update_block_ptr + update, mask=inside, other=0)
        tl.store(block_tables_ptr + index, block, mask=index >= 0)


def resolve_step_inputs_triton(
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
    block_tables: torch.Tensor,
    update_index: torch.Tensor,
    update_block: torch.Tensor,
) -> torch.Tensor:
    ids = torch.empty_like(input_ids)
    num_tokens, num_updates = input_ids.shape[0], update_index.shape[0]
    grid = -(-num_tokens // _BLOCK) + -(-num_updates // _BLOCK)
    _resolve_step_inputs_kernel[(grid,)](
        input_ids,
        sampled,
        block_tables,
        update_index,
        update_block,
        ids,
        num_tokens,
        num_updates,
        _BLOCK,
        num_warps=4,
    )
    return ids
