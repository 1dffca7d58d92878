"""Seeds of sequences; without torch, so that whoever only checks requests can do without it too."""

from __future__ import annotations

import numpy as np

from shared.sampling_params import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sample `index` (0..n-1) of a request with `seed`: a signed 64-bit integer.

    splitmix64 (Steele et al., OOPSLA 2014) over both, so that neither seeds that differ in one bit
    nor the n samples of one request have anything in common.
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ (index & _MASK64))
    return mixed - (1 << 64) if mixed >> 63 else mixed


def request_seed(params: SamplingParams, seeds: np.random.Generator) -> int:
    """The request's own, or one drawn for it."""
    return params.seed if params.seed is not None else int(seeds.integers(2**63))


def _splitmix64(x: int) -> int:
    x = (x + _GOLDEN64) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
