"""The eager sampling path against a slow oracle, field by field and in random mixtures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.batch import SampleRows
from shared.engine.sampler import SampledBatch, Sampler
from shared.engine.seeds import sequence_seed
from shared.kernels.sampling import gumbel_reference, hash_reference
from shared.sampling_params import SamplingParams

VOCAB = 40
EOS = (3, 17)
MAX_LENGTH = 64


def make_sampler(vocab_size: int = VOCAB, max_num_sequences: int = 16) -> Sampler:
    return Sampler(vocab_size, max_num_sequences, MAX_LENGTH, torch.device("cpu"), EOS)


class Row:
    """One sequence: its tokens so far, its logits for the next one, its seed."""

    def __init__(
        self,
        params: SamplingParams,
        logits: Sequence[float] | np.ndarray,
        prompt: Sequence[int] = (1, 2),
        output: Sequence[int] = (),
        seed: int = 0,
        slot: int = 0,
        owner: int = 0,
    ) -> None:
        self.params = params
        self.logits = np.asarray(logits, dtype=np.float32)
        self.prompt, self.output = list(prompt), list(output)
        self.seed, self.slot, self.owner = seed, slot, owner

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def sample(sampler: Sampler, rows: Sequence[Row]) -> SampledBatch:
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    untouched = logits.clone()
    batch = sampler.sample(logits, sampling_rows(rows))
    assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())
    assert batch.token_ids.dtype == torch.int32
    return batch


def sampling_rows(rows: Sequence[Row]) -> SampleRows:
    return SampleRows(
        rows=np.arange(len(rows)),
        slots=np.array([row.slot for row in rows]),
        positions=np.array([len(row.tokens) for row in rows]),
        temperature=np.array([row.params.temperature for row in rows], dtype=np.float32),
        seeds=np.array([row.seed for row in rows], dtype=np.int64),
        params=[row.params for row in rows],
        prompt_lengths=np.array([len(row.prompt) for row in rows]),
        owners=np.array([row.owner for row in rows]),
        known_tokens={i: np.array(row.tokens, np.int32) for i, row in enumerate(rows)},
    )


def oracle_logits(row: Row) -> np.ndarray:
    """[V] float32: all of the processing in plain loops; probabilities in float64."""
    p = row.params
    logits = row.logits.copy()
    for token, bias in (p.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    if len(row.output) < p.min_tokens:
        for token in (*EOS, *p.stop_token_ids):
            logits[token] = -np.inf
    counts = Counter(row.output)
    for token in {*row.tokens}:
        rep = np.float32(p.repetition_penalty)
        logits[token] = logits[token] / rep if logits[token] > 0 else logits[token] * rep
        logits[token] -= np.float32(p.frequency_penalty) * np.float32(counts[token])
        logits[token] -= np.float32(p.presence_penalty) * np.float32(counts[token] > 0)
    if p.temperature == 0:
        return logits

    def probabilities() -> np.ndarray:
        x = np.exp((logits.astype(np.float64) - logits.max()) / p.temperature)
        return x / x.sum()

    if p.min_p > 0:
        probs = probabilities()
        logits[probs < p.min_p * probs.max() * (1 - 1e-6)] = -np.inf
    if 0 < p.top_k < len(logits):
        logits[logits < np.sort(logits)[-p.top_k]] = -np.inf
    if p.top_p < 1:
        probs, mass = probabilities(), 0.0
        for token in sorted(range(len(logits)), key=lambda t: (-logits[t], t)):
            if mass >= p.top_p * (1 - 1e-9):
                logits[token] = -np.inf
            mass += probs[token]
    return logits


def oracle(row: Row) -> int:
    noise = gumbel_reference(
        hash_reference(
            torch.tensor([row.seed]),
            torch.tensor([len(row.tokens)]),
            torch.arange(len(row.logits), dtype=torch.int32),
        )
    )[0].numpy()
    return int(np.argmax(oracle_logits(row) + np.float32(row.params.temperature) * noise))


def random_logits(seed: int, vocab_size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2.5, vocab_size).astype(np.float32)


def random_tokens(seed: int, length: int) -> list[int]:
    # Half of the vocabulary, so that repeats are common.
    return np.random.default_rng(seed).integers(0, VOCAB // 2, length).tolist()


FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_k one": {"top_k": 1},
    "top_k all": {"top_k": VOCAB + 5},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "top_p tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2, "temperature": 0.7},
    "min_p one": {"min_p": 1.0},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition bonus": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": -1.5},
    "greedy penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "presence_penalty": 1.1,
    },
    "bias": {"logit_bias": {0: 4.0, 5: -100.0, VOCAB - 1: 6.0}},
    "greedy bias": {"logit_bias": {11: 50.0}, "temperature": 0.0},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": (1, 4)},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": (1, 4)},
    "ignore_eos": {"min_tokens": 8, "ignore_eos": True},
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_gives_the_oracle_token(name: str) -> None:
    params = SamplingParams(**FIELDS[name])
    likely_ends = np.isin(np.arange(VOCAB), EOS) * 3
    rows = [
        Row(
            params,
            random_logits(i) + likely_ends,
            random_tokens(i, 10),
            random_tokens(i + 99, 6),
            sequence_seed(7, i),
            slot=i,
            owner=i,
        )
        for i in range(60)
    ]
    expected = [oracle(row) for row in rows]
    assert sample(make_sampler(max_num_sequences=60), rows).token_ids.tolist() == expected
    # The oracle is no tautology: the field matters for some row.
    if "all" not in name and "reached" not in name:
        plain = SamplingParams(temperature=params.temperature if "greedy" in name else 1.0)
        without = [oracle(Row(plain, r.logits, r.prompt, r.output, r.seed)) for r in rows]
        assert without != expected or name == "greedy"


def test_min_tokens_forbids_end_of_text_and_stop_tokens_until_it_is_reached() -> None:
    logits = np.zeros(VOCAB)
    logits[[*EOS, 5, 9]] = [9, 8, 7, 6]
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,))
    for output, expected in (([], 9), ([0], 9), ([0, 0], EOS[0])):
        assert sample(make_sampler(), [Row(params, logits, output=output)]).token_ids == expected


def test_top_k_keeps_equals_of_the_last() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    seen = _seen(logits, SamplingParams(top_k=2, temperature=5))
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize("top_k", [0, 2])
def test_top_p_cuts_equals_by_id_and_keeps_at_least_one(top_k: int) -> None:
    # top_k=2 leaves all four: then more are equal than top_k asks for.
    logits = np.array([-50.0, 1.0, 1.0, 1.0, 1.0, -50.0])
    for top_p, kept in ((1e-6, 1), (0.25, 1), (0.5, 2), (0.5001, 3), (0.76, 4)):
        expected = set(range(1, 1 + kept))
        assert _seen(logits, SamplingParams(top_p=top_p, top_k=top_k)) == expected


def _seen(logits: np.ndarray, params: SamplingParams) -> set[int]:
    rows = [Row(params, logits, seed=seed) for seed in range(200)]
    return set(sample(make_sampler(len(logits), 200), rows).token_ids.tolist())


def test_greedy_takes_the_first_of_equals_in_every_kind_of_batch() -> None:
    logits = np.zeros(VOCAB)
    logits[[7, 20, 30]] = 2.0
    greedy = SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9)
    shifted = SamplingParams(temperature=0, logit_bias={7: -1.0})
    others = SamplingParams(top_k=3, presence_penalty=1)
    rows = [Row(greedy, logits), Row(others, logits, slot=1), Row(shifted, logits, slot=2)]
    ids = sample(make_sampler(), rows).token_ids.tolist()
    assert (ids[0], ids[2]) == (7, 20)
    assert sample(make_sampler(), rows[:1]).token_ids.tolist() == [7]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "filters"])
def test_frequencies_follow_the_filtered_distribution(name: str) -> None:
    n, vocab_size = 6000, 12
    logits = np.random.default_rng(5).normal(0, 1, vocab_size)
    params = SamplingParams(**FIELDS[name])
    prompt = [0] * 5
    rows = [Row(params, logits, prompt, seed=sequence_seed(2, i), slot=i) for i in range(n)]
    counts = np.bincount(sample(make_sampler(vocab_size, n), rows).token_ids, minlength=vocab_size)
    kept = oracle_logits(rows[0]).astype(np.float64) / params.temperature
    probs = np.exp(kept - kept.max())
    probs /= probs.sum()
    assert (counts[probs == 0] == 0).all()
    possible = probs > 0
    if possible.sum() > 1:
        expected = n * probs[possible]
        statistic = ((counts[possible] - expected) ** 2 / expected).sum()
        freedom = possible.sum() - 1
        assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_samples_of_one_seed_differ_and_come_back() -> None:
    logits = np.zeros(VOCAB)
    params = SamplingParams(n=8, seed=1234, top_p=0.99)

    def draw() -> list[list[int]]:
        sampler = make_sampler()
        texts: list[list[int]] = [[] for _ in range(8)]
        for _ in range(12):
            rows = [
                Row(params, logits, output=texts[i], seed=sequence_seed(1234, i), slot=i, owner=i)
                for i in range(8)
            ]
            for text, token in zip(texts, sample(sampler, rows).token_ids.tolist(), strict=True):
                text.append(token)
        return texts

    first = draw()
    assert len({tuple(text) for text in first}) == 8
    assert draw() == first


def test_plain_rows_draw_the_same_token_in_an_eager_batch() -> None:
    sampler = make_sampler()
    plain = SamplingParams(temperature=0.8)
    rows = [Row(plain, random_logits(i), seed=i, slot=i, owner=i) for i in range(10)]
    described = sampling_rows(rows)
    logits = torch.from_numpy(np.stack([row.logits for row in rows])).bfloat16()
    expected = sampler.sample_plain(
        logits,
        torch.from_numpy(described.temperature),
        torch.from_numpy(described.seeds),
        torch.from_numpy(described.positions).int(),
    )
    neighbours = [
        Row(SamplingParams(**fields), random_logits(90), slot=10, owner=10)
        for fields in ({"top_k": 3}, {"presence_penalty": 1.0}, {"logprobs": 2})
    ]
    for neighbour in neighbours:
        row = torch.from_numpy(neighbour.logits).bfloat16()[None]
        together = sampler.sample(torch.cat([logits, row]), sampling_rows([*rows, neighbour]))
        assert together.token_ids[:10].tolist() == expected.tolist()
    # Nor does a filter that removes nothing change the noise.
    keep_all = SamplingParams(temperature=0.8, min_p=1e-30, top_k=VOCAB - 1)
    for row_ in rows:
        row_.params = keep_all
    assert sampler.sample(logits, sampling_rows(rows)).token_ids.tolist() == expected.tolist()


def test_penalties_see_tokens_the_host_has_not_read_yet() -> None:
    """Ten steps ahead of the host: only the counts are known, as in an overlapping engine."""
    params = SamplingParams(
        temperature=0.0, frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.1
    )
    prompt = [4, 4, 9]
    steps = [random_logits(i % 2) for i in range(10)]
    sampler = make_sampler()
    hidden: list[torch.Tensor] = []
    for step, logits in enumerate(steps):
        row = Row(params, logits, prompt, [0] * step, slot=2, owner=5)
        described = sampling_rows([row])
        if step:
            described.known_tokens = {}  # nobody may ask for tokens in flight
        hidden.append(sampler.sample(torch.from_numpy(logits)[None], described).token_ids)
    expected: list[int] = []
    for logits in steps:
        expected.append(oracle(Row(params, logits, prompt, expected)))
    assert [int(ids) for ids in hidden] == expected
    assert len(set(expected)) < 10  # some came twice: their count mattered


def test_a_new_owner_of_a_slot_brings_its_own_tokens() -> None:
    sampler = make_sampler()
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=3.0)
    logits = np.linspace(1, 0, VOCAB)
    for owner, (prompt, output) in enumerate((([0, 1], [2]), ([5], []), ([3], [0] * 6))):
        row = Row(params, logits, prompt, output, slot=1, owner=owner)
        assert sample(sampler, [row]).token_ids == oracle(row)
    # The same sequence after a preemption: a new stay.
    row = Row(params, logits, [3], [0] * 6 + [1, 2], slot=1, owner=77)
    assert sample(sampler, [row]).token_ids == oracle(row)


def test_a_plain_neighbour_or_batch_in_between_loses_no_token() -> None:
    """A penalised row sits out while others are sampled, plain and eager, then goes on."""
    sampler = make_sampler()
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    output: list[int] = []
    for step in range(8):
        row = Row(params, random_logits(step % 2), [1], output, slot=3, owner=1)
        expected = oracle(row)
        batch = sample(sampler, [Row(SamplingParams(), row.logits, slot=0, owner=9), row])
        assert batch.token_ids[1] == expected
        output.append(expected)
        sample(sampler, [Row(SamplingParams(top_k=2), row.logits, slot=4, owner=8)])
        ones = torch.ones(1)
        sampler.sample_plain(torch.ones(1, VOCAB), ones, ones.long(), ones.int())


def test_history_is_allocated_by_the_first_penalty_only() -> None:
    sampler = make_sampler()
    sample(sampler, [Row(SamplingParams(top_k=3, logprobs=1, min_tokens=2), random_logits(0))])
    assert sampler._history is None
    sample(sampler, [Row(SamplingParams(presence_penalty=1), random_logits(0))])
    assert sampler._history is not None


def test_unknown_tokens_of_a_new_owner_are_an_error() -> None:
    row = Row(SamplingParams(presence_penalty=1), random_logits(0))
    described = sampling_rows([row])
    described.known_tokens = {0: np.array(row.tokens[:-1], np.int32)}
    with pytest.raises(ValueError, match="slot 0 has a new owner with 2 tokens"):
        make_sampler().sample(torch.from_numpy(row.logits)[None], described)


def test_positions_up_to_the_maximum_length_work_and_no_further() -> None:
    params = SamplingParams(presence_penalty=1)
    row = Row(params, random_logits(0), [1] * MAX_LENGTH)
    assert sample(make_sampler(), [row]).token_ids == oracle(row)
    with pytest.raises(ValueError, match="max_model_length"):
        sample(make_sampler(), [Row(params, random_logits(0), [1] * (MAX_LENGTH + 1))])


class TestLogprobs:
    def test_are_the_models_own(self) -> None:
        logits = random_logits(3)
        exact = logits.astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        changed = {"temperature": 3.0, "presence_penalty": 2.0, "logit_bias": {4: 9.0}, "top_k": 7}
        rows = [
            Row(SamplingParams(logprobs=4), logits),
            Row(SamplingParams(), logits, slot=1),
            Row(SamplingParams(logprobs=2, **changed), logits, [4, 5], slot=2),
            Row(SamplingParams(logprobs=0, temperature=0), logits, slot=3),
        ]
        batch = sample(make_sampler(), rows).logprobs_to_host()
        entries = batch.token_logprobs()
        assert entries[1] is None
        order = np.argsort(-exact)
        for row, token, entry in zip(rows, batch.token_ids.tolist(), entries, strict=True):
            if entry is None:
                continue
            best = order[: row.params.logprobs].tolist()
            assert list(entry) == [token] + [t for t in best if t != token]
            for t, logprob in entry.items():
                assert logprob.logprob == pytest.approx(exact[t], abs=1e-5)
                assert logprob.rank == 1 + (exact > exact[t]).sum()

    def test_equals_share_a_rank(self) -> None:
        logits = np.array([2.0, 1.0, 2.0, 0.0, 2.0])
        params = SamplingParams(temperature=0, logit_bias={3: 50.0}, logprobs=4)
        (entry,) = sample(make_sampler(5), [Row(params, logits)]).token_logprobs()
        assert entry is not None
        assert {t: e.rank for t, e in entry.items()} == {3: 5, 0: 1, 2: 1, 4: 1, 1: 4}
        assert next(iter(entry)) == 3

    def test_more_than_the_vocabulary(self) -> None:
        row = Row(SamplingParams(logprobs=50), [1.0, 2.0, 3.0])
        (entry,) = sample(make_sampler(3), [row]).token_logprobs()
        assert entry is not None
        assert set(entry) == {0, 1, 2}

    @pytest.mark.parametrize("num_top", [0, 3])
    def test_scores_of_given_tokens(self, num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.engine.sampler._GROUP_ELEMENTS", 2 * MAX_LENGTH)
        logits = np.stack([random_logits(i) for i in range(7)])
        targets = np.arange(7) * 5
        scores = make_sampler().score(torch.from_numpy(logits), torch.from_numpy(targets), num_top)
        exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
        for i, entry in enumerate(scores.to_host().to_dicts()):
            assert next(iter(entry)) == targets[i]
            best = np.argsort(-exact[i])[:num_top].tolist()
            assert set(entry) == {targets[i], *best}
            for t, logprob in entry.items():
                assert logprob.logprob == pytest.approx(exact[i, t], abs=1e-5)
                assert logprob.rank == 1 + (exact[i] > exact[i, t]).sum()

    def test_no_tokens_to_score(self) -> None:
        scores = make_sampler().score(torch.empty(0, VOCAB), torch.empty(0).long(), 2)
        assert scores.to_dicts() == []


def test_not_a_number_in_a_row_harms_neither_it_nor_its_neighbours() -> None:
    names = ("filters", "top_p", "greedy penalties", "min_tokens", "bias")
    rows = [Row(SamplingParams(**FIELDS[name]), np.full(VOCAB, np.nan)) for name in names]
    rows += [Row(SamplingParams(**FIELDS[name]), random_logits(1)) for name in names]
    for i, row in enumerate(rows):
        row.slot = row.owner = i
    ids = sample(make_sampler(), rows).token_ids.tolist()
    assert all(0 <= token < VOCAB for token in ids)
    assert ids[len(names) :] == [oracle(row) for row in rows[len(names) :]]


def test_warm_up_leaves_no_history_behind() -> None:
    sampler = make_sampler()
    sampler.warm_up(torch.zeros(16, VOCAB, dtype=torch.bfloat16))
    assert sampler._history is None
    row = Row(SamplingParams(presence_penalty=1), random_logits(0))
    assert sample(sampler, [row]).token_ids == oracle(row)
    sampler.warm_up(torch.zeros(1, VOCAB))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_oracle_tokens_and_is_never_waited_for() -> None:
    device = torch.device("cuda")
    sampler = Sampler(VOCAB, 128, MAX_LENGTH, device, EOS)
    sampler._group = 50
    rows = [
        Row(
            SamplingParams(**fields, logprobs=(None, 0, 3)[i % 3]),
            random_logits(i),
            random_tokens(i, 5),
            random_tokens(i + 99, 6),
            sequence_seed(7, i),
            slot=i,
            owner=i,
        )
        for i, fields in enumerate([*FIELDS.values()] * 6)
    ]
    logits = torch.from_numpy(np.stack([row.logits for row in rows])).to(device)
    targets = torch.arange(len(rows), device=device) % VOCAB
    sampler.warm_up(logits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = sampler.sample(logits, sampling_rows(rows)).logprobs_to_host()
        scores = sampler.score(logits, targets, 2).to_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert batch.token_ids.tolist() == [oracle(row) for row in rows]
    exact = torch.log_softmax(logits.double(), -1).cpu()
    entries = [*enumerate(batch.token_logprobs()), *enumerate(scores.to_dicts())]
    for i, entry in entries:
        for token, logprob in (entry or {}).items():
            assert logprob.logprob == pytest.approx(exact[i, token].item(), abs=1e-4)
            assert logprob.rank == 1 + (exact[i] > exact[i, token]).sum()


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.6, 1.0, 5.0]),
    top_k=st.sampled_from([-1, 0, 0, 1, 3, 10, VOCAB - 1, VOCAB]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.8]),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    logit_bias=st.sampled_from([None, None, {3: 2.0, 8: -5.0}]),
    stop_token_ids=st.sampled_from([(), (6,)]),
)


@given(
    st.lists(st.tuples(params_strategy, st.integers(0, 2**32)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_a_row_in_any_batch_gets_what_it_gets_alone(
    described: list[tuple[SamplingParams, int]], rows_per_group: int, random: Any
) -> None:
    rows = [
        Row(
            params,
            # Coarse logits: many equals, at the cuts of the filters too.
            np.round(random_logits(seed)) if seed % 2 else random_logits(seed),
            random_tokens(seed, 1 + seed % 7),
            random_tokens(seed + 1, seed % 5),
            sequence_seed(seed, 0),
            slot=i,
            owner=i,
        )
        for i, (params, seed) in enumerate(described)
    ]
    sampler = make_sampler()
    sampler._group = rows_per_group
    alone = [int(sample(make_sampler(), [row]).token_ids) for row in rows]
    assert alone == [oracle(row) for row in rows]
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    for order in (range(len(rows)), shuffled):
        ids = sample(sampler, [rows[i] for i in order]).token_ids.tolist()
        assert ids == [alone[i] for i in order]
        sampler = make_sampler()
