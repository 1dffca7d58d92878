"""Token embedding and LM head, both cut by vocabulary."""

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
        self.rows = Rows.split(vocab_size, tp, "vocab_size")
        self.weight = empty_weight(self.rows.size, hidden_size, dtype=dtype)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: some_rows(self.weight, self.rows)}

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(gather_rows(self.weight, token_ids, self.rows.start))


class ParallelLMHead(nn.Module):
    """[K, hidden_size] -> logits [K, vocab_size]; shares the embedding's weight when tied."""

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
        self.rows = Rows.split(vocab_size, tp, "vocab_size")
        if tied_to is None:
            self.weight = empty_weight(self.rows.size, hidden_size, dtype=dtype)
        else:
            self.weight = tied_to.weight

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: some_rows(self.weight, self.rows)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.tp.all_gather(linear(hidden, self.weight))
