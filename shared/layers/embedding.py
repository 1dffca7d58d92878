"""Token embedding and LM head, both cut by vocabulary.

A vocabulary that the ranks do not divide is padded: the last ranks hold rows of zeros behind their
own. No token id leads there, and their logits are cut off or passed over.
"""

from __future__ import annotations

import torch
from torch import nn

from shared.kernels.gather_rows import gather_rows
from shared.kernels.small_batch_linear import linear
from shared.layers.linear import Rows, WeightTarget, empty_weight, some_rows
from shared.layers.tensor_parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """[T] token ids -> [T, hidden_size]; each rank holds a range of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows, share = Rows.split_padded(vocab_size, tp)
        self.weight = _padded_weight(self.rows, share, hidden_size, dtype)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: some_rows(self.weight[: self.rows.size], self.rows)}

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(gather_rows(self.weight, token_ids, self.rows.start))


class ParallelLMHead(nn.Module):
    """[K, hidden_size] -> this rank's logits [K, vocab_size / size, padded]; shares the embedding's
    weight when tied."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        tp: TensorParallel,
        tied_to: VocabParallelEmbedding | None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows, share = Rows.split_padded(vocab_size, tp)
        if tied_to is None:
            self.weight = _padded_weight(self.rows, share, hidden_size, dtype)
        else:
            self.weight = tied_to.weight

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: some_rows(self.weight[: self.rows.size], self.rows)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks [K, vocab_size], from each rank's own."""
        shares = self.tp.all_gather(logits)
        return shares.movedim(0, 1).flatten(1)[:, : self.rows.total]


def _padded_weight(rows: Rows, share: int, hidden_size: int, dtype: torch.dtype) -> nn.Parameter:
    weight = empty_weight(share, hidden_size, dtype=dtype)
    weight[rows.size :].zero_()
    return weight
