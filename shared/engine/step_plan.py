"""What the launches of a step depend on: with the packed inputs it is all that a rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.engine.input_buffers import InputSizes


@dataclass(frozen=True)
class StepPlan:
    """The same on all ranks of a tensor-parallel group, so that each meets the others in the same
    collectives."""

    sizes: InputSizes
    decode_rows: int
    graphed: bool
    num_samples: int
    plain: bool
    """Only temperatures matter to the rows that get a token."""
    scored: Sequence[tuple[int, int]]
    """(begin, length) of the hidden states that get logits for prompt log probabilities."""
    early_updates: np.ndarray
    """[E, 2] int32: block-table updates that the packed inputs have no room for."""

    def to_words(self) -> np.ndarray:
        """[n] int32."""
        s = self.sizes
        fixed = (s.tokens, s.rows, s.updates, self.decode_rows, self.graphed, self.num_samples)
        lengths = (self.plain, len(self.scored), len(self.early_updates))
        numbers = [*fixed, *lengths, *(number for part in self.scored for number in part)]
        return np.concatenate((np.array(numbers, np.int32), self.early_updates.reshape(-1)))

    @classmethod
    def from_words(cls, words: np.ndarray) -> StepPlan:
        numbers = words[:9].tolist()
        tokens, rows, updates, decode_rows, graphed, samples, plain, num_scored, num_early = numbers
        scored = words[9 : 9 + 2 * num_scored].reshape(-1, 2)
        early = words[9 + 2 * num_scored :][: 2 * num_early].reshape(-1, 2)
        return cls(
            sizes=InputSizes(tokens, rows, updates),
            decode_rows=decode_rows,
            graphed=bool(graphed),
            num_samples=samples,
            plain=bool(plain),
            scored=[(begin, length) for begin, length in scored.tolist()],
            early_updates=early,
        )
