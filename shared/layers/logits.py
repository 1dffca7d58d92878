"""What sampling options do to logits, in place, between the model and the noise.

`work` [rows, vocab_size] float32; the other arguments are tensors on its device, one entry per
row of `work` that is changed, which `rows` numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What the most probable token of a row weighs in top_p's sums. 2**18 such tokens fit in int64.
_WEIGHT_OF_BEST = float(1 << 44)


def add_bias(
    work: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> None:
    work[rows, ids] += values  # the ids of a row are the keys of a dict: no pair comes twice


def forbid(work: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    # Not work[rows, ids] = -inf: the value would be copied to the device, and waited for.
    work.view(-1).index_fill_(0, rows * work.shape[1] + ids, -torch.inf)


def penalise(
    history: torch.Tensor,
    new_slots: Sequence[int],
    longest: int,
    work: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    *new_tokens: torch.Tensor,
) -> None:
    """Reads and writes only the logits of tokens in the histories [R, longest]. A token that
    occurs several times is computed as often, always to the same value."""
    for slot, of_slot in zip(new_slots, new_tokens, strict=True):
        history[slot, : len(of_slot)] = of_slot
    column = torch.arange(longest, device=work.device)
    tokens = history[:, :longest].index_select(0, slots).long()
    # Shorter rows are padded with their own first token, which only repeats its computation.
    tokens = torch.where(column < lengths[:, None], tokens, tokens[:, :1])
    is_output = (column >= prompt_lengths[:, None]) & (column < lengths[:, None])
    table = torch.zeros(len(rows), work.shape[1], dtype=torch.int32, device=work.device)
    count = table.scatter_add_(1, tokens, is_output.int()).gather(1, tokens)
    logits = work[rows[:, None], tokens]
    repetition = repetition[:, None]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= frequency[:, None] * count
    logits -= presence[:, None] * (count > 0)
    work[rows[:, None], tokens] = logits


def mask_min_p(work: torch.Tensor, rows: torch.Tensor, distance: torch.Tensor) -> None:
    """p < min_p * p_best, said of the logits: distance [R] = temperature * log(min_p) below 0."""
    logits = work[rows]
    best = logits.amax(1, keepdim=True)
    work[rows] = logits.masked_fill_(logits - best < distance[:, None], -torch.inf)


def mask_top_k(most: int, work: torch.Tensor, rows: torch.Tensor, k: torch.Tensor) -> None:
    """Everything smaller than the k-th largest logit goes: its equals stay, as in vLLM."""
    logits = work[rows]
    threshold = logits.topk(most).values.gather(1, k[:, None] - 1)
    work[rows] = logits.masked_fill_(logits < threshold, -torch.inf)


def mask_top_p(
    most: int,
    work: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """A token stays if the tokens before it, larger logits first and of equal ones lower ids
    first, have less than p of the probability: the smallest set with p or more, never empty.

    `most`: at least as many as the rows have different logits above -inf. top_p [R] float64.
    Probabilities are whole numbers of 2**-44 of the best one's: their sums do not depend on the
    order of summation, which on a GPU depends on the number of rows.
    """
    logits = work[rows]
    ordered = logits.topk(most).values if most < logits.shape[1] else _descending(logits)
    best = ordered[:, :1]

    def weigh(x: torch.Tensor) -> torch.Tensor:
        return (((x - best) / temperature[:, None]).exp() * _WEIGHT_OF_BEST).long()

    weights = weigh(ordered)
    total = weigh(logits).sum(1, keepdim=True)
    quota = top_p[:, None] * total
    before = weights.cumsum(1) - weights
    last = ((before < quota).sum(1, keepdim=True) - 1).clamp_(min=0)
    threshold = ordered.gather(1, last)
    # Equals of the last token: as many stay as fit. Some may be beyond `most`.
    larger = (weights * (ordered > threshold)).sum(1, keepdim=True)
    fitting = ((quota - larger) / weights.gather(1, last)).ceil()
    equal = logits == threshold
    surplus = equal & (equal.cumsum(1, dtype=torch.int32) > fitting)
    work[rows] = logits.masked_fill_((logits < threshold) | surplus, -torch.inf)


def _descending(logits: torch.Tensor) -> torch.Tensor:
    return logits.sort(1, descending=True).values
