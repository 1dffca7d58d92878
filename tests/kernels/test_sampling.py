"""Gumbel-max sampling: the noise's quality, the reference, and the Triton kernel against it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.engine.seeds import sequence_seed
from shared.kernels.sampling import (
    gumbel_argmax,
    gumbel_argmax_reference,
    gumbel_argmax_triton,
    gumbel_candidates,
    gumbel_candidates_reference,
    gumbel_candidates_triton,
    gumbel_choice,
    gumbel_choice_reference,
    gumbel_choice_triton,
    gumbel_reference,
    hash_reference,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def _seeds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _positions(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bits(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> np.ndarray:
    ids = torch.arange(num_tokens, dtype=torch.int32)
    return hash_reference(seeds, positions, ids).numpy().view(np.uint32)


def _exact_hash(seed: int, position: int, token_id: int) -> int:
    """The hash in Python integers."""
    m = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & m
        x = (x ^ (x >> 15)) * 0x846CA68B & m
        return x ^ (x >> 16)

    low, high = seed & m, (seed >> 32) & m
    first = mix(mix(mix(low ^ 0x3C6EF372) ^ high) ^ position)
    second = mix(mix(mix(high ^ 0x1B873593) ^ position) ^ low)
    x = (token_id + first) & m
    x = (x ^ (x >> 16)) * 0x7FEB352D & m
    x = ((x ^ (x >> 15)) + second) * 0x846CA68B & m
    return x ^ (x >> 16)


def _chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> None:
    """Within 4.5 standard deviations of the statistic, by the Wilson-Hilferty approximation."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4.5, (statistic, freedom)


class TestSequenceSeed:
    def test_is_a_signed_64_bit_integer_and_differs_by_seed_and_index(self) -> None:
        seeds = [*range(-50, 50), 2**63 - 1, -(2**63), 2**40, 2**40 + 2**32]
        values = {sequence_seed(seed, index) for seed in seeds for index in range(128)}
        assert len(values) == len(seeds) * 128
        assert all(-(2**63) <= value < 2**63 for value in values)

    def test_never_changes(self) -> None:
        # A request with a seed gives the same text in the next release, too.
        assert sequence_seed(0, 0) == -6411193824288604561
        assert sequence_seed(-1, 3) == 209967342931450243


class TestHash:
    def test_equals_the_hash_in_python_integers(self) -> None:
        rng = np.random.default_rng(0)
        seeds = rng.integers(-(2**63), 2**63 - 1, 8)
        positions = rng.integers(0, 2**20, 8)
        ids = rng.integers(0, 2**18, 50)
        hashed = hash_reference(
            torch.from_numpy(seeds),
            torch.from_numpy(positions.astype(np.int32)),
            torch.from_numpy(ids.astype(np.int32)),
        )
        exact = [
            [_exact_hash(int(s), int(p), int(t)) for t in ids]
            for s, p in zip(seeds, positions, strict=True)
        ]
        assert (hashed.numpy().view(np.uint32) == np.array(exact)).all()

    @pytest.mark.parametrize("varied", ["token", "position", "seed", "high half of the seed"])
    def test_is_uniform_in_every_byte(self, varied: str) -> None:
        n = 1 << 18
        counter = torch.arange(n)
        match varied:
            case "token":
                bits = _bits(_seeds(7), _positions(3), n)
            case "position":
                bits = _bits(torch.full((n,), 7), counter.int(), 1)
            case "seed":
                bits = _bits(counter, torch.full((n,), 3, dtype=torch.int32), 1)
            case _:
                bits = _bits(counter << 32, torch.full((n,), 3, dtype=torch.int32), 1)
        for shift in (0, 8, 16, 24):
            counts = np.bincount((bits.ravel() >> shift) & 255, minlength=256)
            _chi_square_is_plausible(counts, np.full(256, n / 256))

    def test_neighbours_are_not_correlated(self) -> None:
        bits = _bits(torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64).int(), 64)
        noise = (bits.astype(np.float64) / 2**32).reshape(64, 64, 64)  # seed, position, token
        for axis in range(3):
            for distance in (1, 2, 8):
                a = np.take(noise, range(64 - distance), axis).ravel()
                b = np.take(noise, range(distance, 64), axis).ravel()
                assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(a.size) < 4.5, (axis, distance)
                cells = np.bincount((a * 16).astype(int) * 16 + (b * 16).astype(int), minlength=256)
                _chi_square_is_plausible(cells, np.full(256, a.size / 256))

    def test_one_changed_input_bit_changes_half_of_the_output_bits(self) -> None:
        rng = np.random.default_rng(1)
        seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 4000))
        positions = torch.from_numpy(rng.integers(0, 2**17, 4000).astype(np.int32))
        before = _bits(seeds, positions, 1)
        changed = {f"seed {b}": (seeds ^ (1 << b), positions) for b in range(0, 63, 3)}
        changed |= {f"position {b}": (seeds, positions ^ (1 << b)) for b in range(17)}
        for name, inputs in changed.items():
            flipped = np.bitwise_count(before ^ _bits(*inputs, 1)).mean()
            assert abs(flipped - 16) < 0.25, (name, flipped)


class TestGumbel:
    def test_is_finite_and_monotone_over_all_of_the_hashes(self) -> None:
        ends = np.concatenate([np.arange(2**16), np.arange(2**32 - 2**16, 2**32)])
        inner = np.arange(0, 2**32, 2**32 // 100_003)
        hashes = np.unique(np.concatenate([ends, inner])).astype(np.uint32)
        noise = gumbel_reference(torch.from_numpy(hashes.view(np.int32))).numpy()
        assert np.isfinite(noise).all()
        assert noise[0] > 22.8
        assert noise[-1] < -3.1
        # Up to rounding, also where the series and the logarithm meet.
        assert (np.diff(noise) < 2e-6).all()
        # No two of the largest are equal: the tail that decides has its full resolution.
        assert (np.diff(noise[:2000]) < 0).all()

    def test_is_minus_log_minus_log(self) -> None:
        hashes = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32)
        exact = -np.log(-np.log1p(-(hashes.astype(np.float64) + 0.5) / 2**32))
        noise = gumbel_reference(torch.from_numpy(hashes.view(np.int32))).numpy()
        assert np.abs(noise - exact).max() < 2e-6


class TestReference:
    def test_temperature_zero_is_argmax_with_the_first_of_equals(self) -> None:
        torch.manual_seed(3)
        logits = torch.randint(-3, 3, (64, 300)).float()
        zeros = torch.zeros(64)
        ids = gumbel_argmax(logits, zeros, torch.arange(64), torch.arange(64).int())
        assert ids.dtype == torch.int32
        assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
        assert ids.tolist() == logits.argmax(-1).tolist()

    def test_greedy_and_random_rows_do_not_mix(self) -> None:
        torch.manual_seed(4)
        logits = torch.randn(40, 5000)
        temperature = torch.tensor([0.0, 1.0] * 20)
        seeds, positions = torch.arange(40), torch.arange(40).int()
        ids = gumbel_argmax(logits, temperature, seeds, positions)
        assert ids[::2].tolist() == logits[::2].argmax(-1).tolist()
        for row in range(40):
            one = slice(row, row + 1)
            alone = gumbel_argmax(logits[one], temperature[one], seeds[one], positions[one])
            assert alone.item() == ids[row].item()

    def test_frequencies_are_softmax(self) -> None:
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
        n = 40_000
        ids = gumbel_argmax(
            logits.expand(n, -1), torch.full((n,), 0.7), torch.full((n,), 5), torch.arange(n).int()
        )
        expected = torch.softmax(logits.double() / 0.7, -1).numpy() * n
        _chi_square_is_plausible(np.bincount(ids.numpy(), minlength=5), expected)

    def test_not_a_number_counts_as_impossible(self) -> None:
        logits = torch.tensor([[math.nan, 1.0, 2.0], [math.nan] * 3, [-math.inf] * 3])
        for temperature in (torch.zeros(3), torch.full((3,), 0.1)):
            ids = gumbel_argmax(logits, temperature, torch.arange(3), torch.zeros(3).int())
            assert ids[0] > 0
            assert ids[1:].tolist() == [0, 0]

    def test_no_rows(self) -> None:
        empty = torch.empty(0)
        ids = gumbel_argmax(torch.empty(0, 7), empty, empty.long(), empty.int())
        assert ids.shape == (0,)


def _batch(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows * 1000 + vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    temperature = torch.tensor([0.0, 0.6, 1.0, 30.0]).repeat(num_rows)[:num_rows]
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**17, (num_rows,), generator=generator, dtype=torch.int32)
    return logits.to(dtype), temperature, seeds, positions


def _in_shards(
    num_ranks: int,
    batch: tuple[torch.Tensor, ...],
    find: Callable[..., torch.Tensor] = gumbel_candidates,
    choose: Callable[..., torch.Tensor] = gumbel_choice,
) -> list[int]:
    """As tensor-parallel ranks do it, with something tempting in the padding."""
    logits, *rows = batch
    vocab_size = logits.shape[1]
    share = -(-vocab_size // num_ranks)
    padded = torch.nn.functional.pad(logits, (0, num_ranks * share - vocab_size), value=1e9)
    candidates = torch.stack(
        [
            find(part.contiguous(), *rows, rank * share, vocab_size)
            for rank, part in enumerate(padded.split(share, dim=1))
        ]
    )
    ids: list[int] = choose(candidates, vocab_size).tolist()
    return ids


# The last: 9 tokens for 4 ranks of 3 leave the fourth rank with nothing but padding.
SHARDS = [(2, 3000), (3, 128), (4, 4096), (7, 3001), (8, 9001), (4, 9)]


class TestShards:
    @pytest.mark.parametrize("num_ranks, vocab_size", SHARDS)
    def test_ranks_together_choose_what_one_would(self, num_ranks: int, vocab_size: int) -> None:
        batch = _batch(12, vocab_size, torch.float32)
        assert _in_shards(num_ranks, batch) == gumbel_argmax(*batch).tolist()

    def test_first_of_equals_across_ranks(self) -> None:
        assert _in_shards(4, _ties()) == FIRST_OF_EQUALS

    def test_rows_of_nothing_possible(self) -> None:
        logits = torch.full((3, 1001), -math.inf)
        logits[1] = math.nan
        logits[2, 1000] = -1e30
        for temperature in (torch.zeros(3), torch.ones(3)):
            batch = (logits, temperature, torch.arange(3), torch.arange(3).int())
            assert _in_shards(4, batch) == [0, 0, 1000]


FIRST_OF_EQUALS = [5, 900, 3999, 0, 999, 2048]


def _ties() -> tuple[torch.Tensor, ...]:
    logits = torch.zeros(6, 4000)
    for row, ids in enumerate(([5, 6], [900, 1100], [3999], [0, 3999], [999, 1000], [2048])):
        logits[row, ids] = 1.0
    return logits, torch.zeros(6), torch.arange(6), torch.arange(6).int()


@needs_interpreter
class TestInterpreted:
    @pytest.mark.parametrize("num_ranks, vocab_size", SHARDS)
    def test_shards_equal_the_reference(self, num_ranks: int, vocab_size: int) -> None:
        batch = _batch(4, vocab_size, torch.bfloat16)
        triton = (gumbel_candidates_triton, gumbel_choice_triton)
        reference = (gumbel_candidates_reference, gumbel_choice_reference)
        assert _in_shards(num_ranks, batch, *triton) == _in_shards(num_ranks, batch, *reference)

    def test_first_of_equals_across_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.kernels.sampling._BLOCK", 128)  # several parts a rank
        triton = (gumbel_candidates_triton, gumbel_choice_triton)
        assert _in_shards(4, _ties(), *triton) == FIRST_OF_EQUALS

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "num_rows, vocab_size", [(1, 1), (4, 5), (2, 1024), (3, 1025), (4, 3000), (2, 9001)]
    )
    def test_equals_the_reference(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        batch = _batch(num_rows, vocab_size, dtype)
        assert gumbel_argmax_triton(*batch).tolist() == gumbel_argmax_reference(*batch).tolist()

    def test_writes_to_the_slots_as_well(self) -> None:
        batch = _batch(4, 3000, torch.float32)
        expected = gumbel_argmax_reference(*batch)
        slots = torch.tensor([7, 2, 9, 0], dtype=torch.int32)
        for sample in (gumbel_argmax, gumbel_argmax_triton):
            sampled, out = torch.zeros(10, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
            assert sample(*batch, slots, sampled, out) is out
            assert torch.equal(out, expected)
            assert torch.equal(sampled[slots.long()], expected)
            assert sampled.count_nonzero() == expected.count_nonzero()

    def test_several_blocks_per_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.kernels.sampling._TARGET_PROGRAMS", 6)
        batch = _batch(3, 5000, torch.float32)
        assert gumbel_argmax_triton(*batch).tolist() == gumbel_argmax_reference(*batch).tolist()

    def test_first_of_equals_within_and_across_blocks(self) -> None:
        logits = torch.zeros(6, 4000)
        for row, ids in enumerate(([5, 6], [900, 1100], [3999], [0, 3999], [1023, 1024], [2048])):
            logits[row, ids] = 1.0
        rest = (torch.zeros(6), torch.arange(6), torch.arange(6).int())
        assert gumbel_argmax_triton(logits, *rest).tolist() == [5, 900, 3999, 0, 1023, 2048]

    def test_impossible_rows_stay_within_the_vocabulary(self) -> None:
        logits = torch.full((4, 2500), -math.inf)
        logits[1] = math.nan
        logits[2, 2400] = -1.0
        logits[3, ::2] = math.nan
        for temperature in (torch.zeros(4), torch.ones(4)):
            batch = (logits, temperature, torch.arange(4), torch.arange(4).int())
            ids = gumbel_argmax_triton(*batch).tolist()
            assert ids == gumbel_argmax_reference(*batch).tolist()
            assert ids[:3] == [0, 0, 2400]

    def test_rows_that_are_not_contiguous(self) -> None:
        logits, *rest = _batch(4, 1200, torch.float32)
        wide = torch.full((4, 1300), 1e6)
        wide[:, :1200] = logits
        expected = gumbel_argmax_reference(logits, *rest)
        assert gumbel_argmax_triton(wide[:, :1200], *rest).tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 129, 512])
    def test_agrees_with_the_reference(self, num_rows: int, dtype: torch.dtype) -> None:
        """Equal, but for scores closer than the GPU's logarithm is exact."""
        logits, temperature, seeds, positions = (x.cuda() for x in _batch(num_rows, 151936, dtype))
        ids = gumbel_argmax(logits, temperature, seeds, positions).long()
        expected = gumbel_argmax_reference(logits, temperature, seeds, positions).long()
        greedy = temperature == 0
        assert torch.equal(ids[greedy], expected[greedy])
        for row in torch.nonzero(ids != expected).flatten().tolist():
            pair = torch.stack([ids[row], expected[row]])
            hashed = hash_reference(seeds[row, None], positions[row, None], pair.int())[0]
            scores = logits[row, pair].float() + temperature[row] * gumbel_reference(hashed)
            assert (scores[1] - scores[0]).item() <= 2e-5 * max(1.0, temperature[row].item())

    @pytest.mark.parametrize("num_ranks", [2, 3, 8])
    def test_ranks_together_choose_what_one_would(self, num_ranks: int) -> None:
        for num_rows in (1, 64):
            batch = tuple(x.cuda() for x in _batch(num_rows, 151936, torch.bfloat16))
            assert _in_shards(num_ranks, batch) == gumbel_argmax(*batch).tolist()

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        batch = [x.cuda() for x in _batch(64, 151936, torch.bfloat16)]
        ids = gumbel_argmax(*batch).tolist()
        for rows in (slice(3, 4), slice(10, 31), slice(63, 64)):
            assert gumbel_argmax(*(x[rows] for x in batch)).tolist() == ids[rows]
        # The eager path's float32 copies of the same logits choose the same tokens.
        assert gumbel_argmax(batch[0].float(), *batch[1:]).tolist() == ids

    def test_frequencies_are_softmax(self) -> None:
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5], device="cuda")
        n = 200_000
        ids = gumbel_argmax(
            logits.expand(n, -1).contiguous(),
            torch.full((n,), 0.7, device="cuda"),
            torch.full((n,), 5, device="cuda"),
            torch.arange(n, dtype=torch.int32, device="cuda"),
        )
        expected = torch.softmax(logits.double() / 0.7, -1).cpu().numpy() * n
        _chi_square_is_plausible(np.bincount(ids.cpu().numpy(), minlength=5), expected)

    def test_impossible_rows_stay_within_the_vocabulary(self) -> None:
        logits = torch.full((3, 151936), math.nan, device="cuda")
        logits[1] = -math.inf
        logits[2, 151935] = 0.0
        rest = (torch.ones(3), torch.arange(3), torch.arange(3).int())
        assert gumbel_argmax(logits, *(x.cuda() for x in rest)).tolist() == [0, 0, 151935]

    def test_replays_in_a_graph_with_new_inputs(self) -> None:
        batch = [x.cuda() for x in _batch(16, 151936, torch.bfloat16)]
        gumbel_argmax(*batch)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gumbel_argmax(*batch)
        for step in range(3):
            batch[0].copy_(torch.randn_like(batch[0]))
            batch[3].add_(step)
            graph.replay()
            assert captured.tolist() == gumbel_argmax(*batch).tolist()

    def test_compiles_once_for_all_numbers_of_rows(self) -> None:
        from shared.kernels import sampling

        logits, temperature, seeds, positions = (
            x.cuda() for x in _batch(512, 151936, torch.bfloat16)
        )
        gumbel_argmax(logits, temperature, seeds, positions)
        kernels = (sampling._split_kernel, sampling._combine_kernel)
        before = [len(kernel.device_caches[0][0]) for kernel in kernels]
        for begin, end in ((0, 1), (1, 2), (3, 20), (0, 16), (5, 512)):
            rows = slice(begin, end)
            gumbel_argmax(logits[rows], temperature[rows], seeds[rows], positions[rows])
        assert [len(kernel.device_caches[0][0]) for kernel in kernels] == before
