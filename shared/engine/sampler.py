"""From logits to token ids.

Plain rows (greedy or temperature alone) are one kernel, `Sampler.sample_plain`, which the head's
CUDA graph captures. A batch with any row that filters, penalises, biases, has min_tokens or wants
logprobs comes to `Sampler.sample`, eagerly. Per row and in vLLM's order: logprobs of the model's
own logits; logit_bias; min_tokens; repetition, frequency, presence penalty; temperature; min_p;
top_k; top_p; Gumbel-max. Filters only set logits to -inf and the noise is the plain kernel's, so a
row draws the same token on either path, alone or among any neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from shared.engine.batch import SampleRows
from shared.engine.transfer import to_host, upload
from shared.kernels.sampling import gumbel_argmax, gumbel_candidates, gumbel_choice
from shared.layers.logits import add_bias, forbid, mask_min_p, mask_top_k, mask_top_p, penalise
from shared.layers.tensor_parallel import TensorParallel
from shared.outputs import Logprob, TokenLogprobs
from shared.sampling_params import SamplingParams

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.floating]
# A change of the logits [rows, V] in place, and the host arrays it wants to see on the device.
Change = tuple[Callable[..., None], tuple[npt.NDArray[np.generic], ...]]

# Logits processed together: 27 rows of 151936. Bounds the temporaries (top_p takes some 60 bytes
# per logit) to about 250 MB whatever the batch.
_GROUP_ELEMENTS = 1 << 22


@dataclass
class LogprobTensors:
    """Log probabilities of N tokens: the chosen one in column 0, then the most probable ones.

    A rank is one more than the number of tokens with a strictly larger logit: equals share it.
    Which of equals is among the most probable ones, when not all can be, is left open.
    """

    ids: torch.Tensor  # [N, 1 + k] int32
    values: torch.Tensor  # [N, 1 + k] float32
    ranks: torch.Tensor  # [N, 1 + k] int32
    num_top: list[int]  # columns after the first that belong to each row

    def to_host(self) -> LogprobTensors:
        """Enqueues the copies; they may be read once the stream has been synchronised."""
        return LogprobTensors(
            to_host(self.ids), to_host(self.values), to_host(self.ranks), self.num_top
        )

    def to_dicts(self) -> list[TokenLogprobs]:
        dicts: list[TokenLogprobs] = []
        columns = (self.ids.tolist(), self.values.tolist(), self.ranks.tolist())
        for num_top, ids, values, ranks in zip(self.num_top, *columns, strict=True):
            entries: TokenLogprobs = {}
            for token_id, value, rank in zip(ids[: 1 + num_top], values, ranks, strict=False):
                entries.setdefault(token_id, Logprob(value, rank))
            dicts.append(entries)
        return dicts


@dataclass
class SampledBatch:
    """What was sampled, on the device until a commit asks for it."""

    token_ids: torch.Tensor  # [K] int32
    logprobs: LogprobTensors | None = None
    logprob_rows: IntArray | None = None  # which of the K rows `logprobs` describes

    def logprobs_to_host(self) -> SampledBatch:
        """Enqueues the copies; they may be read once the stream has been synchronised."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return SampledBatch(self.token_ids, logprobs, self.logprob_rows)

    def token_logprobs(self) -> list[TokenLogprobs | None]:
        """One entry per row, None for a row that did not ask."""
        entries: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs is not None and self.logprob_rows is not None:
            for row, of_row in zip(self.logprob_rows, self.logprobs.to_dicts(), strict=True):
                entries[row] = of_row
        return entries


class TokenHistory:
    """The tokens of penalised sequences, on the device, one row per slot.

    The host uploads what it knows when a slot has a new owner; each token sampled afterwards is
    appended here, on the device, because the next step may be submitted before the host has read
    it. None is missed, although plain batches do not append: a penalised row makes every batch it
    is in an eager one.
    """

    def __init__(self, num_slots: int, num_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, num_tokens, dtype=torch.int32, device=device)
        self._owners = np.full(num_slots, -1, dtype=np.int64)

    def changed(self, rows: SampleRows, selected: IntArray) -> tuple[list[int], list[IntArray]]:
        """Slots of the selected rows that have a new owner, and the tokens to store there."""
        slots: list[int] = []
        tokens: list[IntArray] = []
        for row in selected[self._owners[rows.slots[selected]] != rows.owners[selected]].tolist():
            slot, length = int(rows.slots[row]), int(rows.positions[row])
            known = rows.known_tokens.get(row, np.empty(0, np.int32))
            if len(known) < length:
                raise ValueError(
                    f"slot {slot} has a new owner with {length} tokens; the host knows only "
                    f"{len(known)}"
                )
            slots.append(slot)
            tokens.append(known[:length])
            self._owners[slot] = rows.owners[row]
        return slots, tokens


class Sampler:
    """vocab_size is the width of the logits, where they are not a rank's own part of them;
    min_tokens forbids eos_token_ids."""

    def __init__(
        self,
        vocab_size: int,
        max_num_sequences: int,
        max_model_length: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        tp: TensorParallel | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_num_sequences = max_num_sequences
        self.max_model_length = max_model_length
        self.device = device
        self.eos_token_ids = tuple(eos_token_ids)
        self.tp = tp or TensorParallel()
        self._group = max(1, _GROUP_ELEMENTS // max(vocab_size, max_model_length))
        # max_num_sequences * max_model_length * 4 bytes; most services never see a penalty.
        self._history: TokenHistory | None = None

    def sample_plain(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `gumbel_argmax`, of this rank's own logits [K, share] and those of the others: the
        same ids on all ranks, and only a few candidates are exchanged. All on the device, and fit
        for capture in a CUDA graph."""
        rows = (temperature, seeds, positions)
        if self.tp.size == 1:
            return gumbel_argmax(logits, *rows, slots, sampled, out)
        first = self.tp.rank * logits.shape[1]
        candidates = gumbel_candidates(logits, *rows, first, self.vocab_size)
        everyones = self.tp.all_gather(candidates)
        return gumbel_choice(everyones, self.vocab_size, slots, sampled, out)

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampledBatch:
        """logits [K, V] of any float dtype, not modified. Never waits for the device."""
        if len(rows.positions) and rows.positions.max() > self.max_model_length:
            raise ValueError(f"a position is beyond max_model_length={self.max_model_length}")
        num_outputs = (rows.positions - rows.prompt_lengths).tolist()
        each = zip(rows.params, rows.temperature.tolist(), num_outputs, strict=True)
        touched = np.flatnonzero([_changes_logits(*row) for row in each])
        asking = np.flatnonzero([params.logprobs is not None for params in rows.params])
        temperature, seeds, positions, slots, touched_rows, asking_rows = upload(
            self.device,
            rows.temperature.astype(np.float32),
            rows.seeds.astype(np.int64),
            rows.positions.astype(np.int32),
            rows.slots.astype(np.int64),
            touched,
            asking,
        )
        if len(touched) < len(rows.params):
            # Touched rows included, to be overwritten: cheaper than to gather the others.
            token_ids = gumbel_argmax(logits, temperature, seeds, positions)
        else:
            token_ids = torch.empty(len(rows.params), dtype=torch.int32, device=self.device)
        for begin in range(0, len(touched), self._group):
            part = slice(begin, begin + self._group)
            index = touched_rows[part]
            work = logits[index].float()  # indexing has copied
            self._apply(self._changes(rows, touched[part]), work)
            sampled = gumbel_argmax(work, temperature[index], seeds[index], positions[index])
            token_ids[index] = sampled
            if self._history is not None:  # unpenalised rows, too: nobody reads theirs
                self._history.tokens[slots[index], positions[index].long()] = sampled
        if not len(asking):
            return SampledBatch(token_ids)
        num_top = [rows.params[row].logprobs or 0 for row in asking.tolist()]
        logprobs = self._logprobs(logits, asking_rows, token_ids[asking_rows], num_top)
        return SampledBatch(token_ids, logprobs, asking)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> LogprobTensors:
        """logits [N, V], targets [N] of any int dtype -> targets' logprobs and the num_top best."""
        rows = torch.arange(len(targets), device=logits.device)
        return self._logprobs(logits, rows, targets, [num_top] * len(targets))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile what service will run and reach its peak of memory, before the KV pool is sized.

        logits [K, V]: as many rows as in service, in its dtype; the values do not matter.
        """
        num_rows = len(logits)
        penalised = SamplingParams(top_k=50, top_p=0.9, min_p=0.1, presence_penalty=1, logprobs=1)
        nucleus = SamplingParams(top_p=0.9, logprobs=1)
        tokens = np.zeros(self.max_model_length, dtype=np.int32)
        integers = np.arange(num_rows)
        rows = SampleRows(
            slots=integers,
            rows=integers,
            positions=np.full(num_rows, len(tokens)),
            temperature=np.ones(num_rows),
            seeds=integers,
            params=[penalised, *[nucleus] * (num_rows - 1)],
            prompt_lengths=np.full(num_rows, len(tokens)),
            owners=integers,
            known_tokens=dict.fromkeys(range(num_rows), tokens),
        )
        dtypes = (np.float32, np.int64, np.int32)
        gumbel_argmax(logits, *upload(self.device, *(integers.astype(d) for d in dtypes)))
        self.sample(logits, rows)
        self._history = None

    def _changes(self, rows: SampleRows, selected: IntArray) -> list[Change]:
        """What happens to the logits of the selected rows before the noise, in order. The row
        numbers in it count the selected rows."""
        params = [rows.params[row] for row in selected.tolist()]
        num_outputs = (rows.positions - rows.prompt_lengths)[selected]
        temperature = rows.temperature[selected].astype(np.float32)
        changes: list[Change] = []

        bias = [
            (row, token_id, value)
            for row, p in enumerate(params)
            for token_id, value in (p.logit_bias or {}).items()
        ]
        if bias:
            row_numbers, ids, values = zip(*bias, strict=True)
            changes.append((add_bias, (_ints(row_numbers), _ints(ids), _floats(values))))

        forbidden = [
            (row, token_id)
            for row, p in enumerate(params)
            if num_outputs[row] < p.min_tokens
            for token_id in {*self.eos_token_ids, *p.stop_token_ids}
            if token_id < self.vocab_size
        ]
        if forbidden:
            row_numbers, ids = zip(*forbidden, strict=True)
            changes.append((forbid, (_ints(row_numbers), _ints(ids))))

        penalised = np.flatnonzero([p.has_penalties for p in params])
        if len(penalised):
            changes.append(self._penalties(rows, selected[penalised], penalised))

        # Filters never remove the largest logit, which is all a greedy row looks at.
        random = temperature > 0
        min_p = _floats([p.min_p for p in params])
        top_k = _ints([p.top_k if 0 < p.top_k < self.vocab_size else 0 for p in params])
        top_p = np.array([p.top_p for p in params])
        chosen = np.flatnonzero(random & (min_p > 0))
        if len(chosen):
            changes.append((mask_min_p, (chosen, temperature[chosen] * np.log(min_p[chosen]))))
        has_top_k, has_top_p = random & (top_k > 0), random & (top_p < 1)
        chosen = np.flatnonzero(has_top_k)
        if len(chosen):
            k = top_k[chosen]
            changes.append((partial(mask_top_k, int(k.max())), (chosen, k)))
        # Few candidates are left of rows that have both, and no sort of the vocabulary is needed.
        for wanted in (has_top_p & has_top_k, has_top_p & ~has_top_k):
            chosen = np.flatnonzero(wanted)
            if len(chosen):
                most = int(top_k[chosen].max()) or self.vocab_size
                arrays = (chosen, temperature[chosen], top_p[chosen])
                changes.append((partial(mask_top_p, most), arrays))
        return changes

    def _penalties(self, rows: SampleRows, selected: IntArray, row_numbers: IntArray) -> Change:
        if self._history is None:
            # One column more than a sequence can have: its last token is never looked at again.
            num_tokens = self.max_model_length + 1
            self._history = TokenHistory(self.max_num_sequences, num_tokens, self.device)
        slots, tokens = self._history.changed(rows, selected)
        params = [rows.params[row] for row in selected.tolist()]
        lengths = _ints(rows.positions[selected])
        arrays = (
            row_numbers,
            _ints(rows.slots[selected]),
            lengths,
            _ints(rows.prompt_lengths[selected]),
            _floats([p.repetition_penalty for p in params]),
            _floats([p.frequency_penalty for p in params]),
            _floats([p.presence_penalty for p in params]),
            *tokens,
        )
        return partial(penalise, self._history.tokens, slots, int(lengths.max())), arrays

    def _apply(self, changes: list[Change], work: torch.Tensor) -> None:
        arrays = (array for _, of_change in changes for array in of_change)
        tensors = iter(upload(self.device, *arrays))
        for change, of_change in changes:
            change(work, *(next(tensors) for _ in of_change))

    def _logprobs(
        self, logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, num_top: list[int]
    ) -> LogprobTensors:
        num_top = [min(n, self.vocab_size) for n in num_top]
        num_columns = 1 + max(num_top, default=0)
        ids = torch.empty(len(rows), num_columns, dtype=torch.int32, device=logits.device)
        values = torch.empty(len(rows), num_columns, dtype=torch.float32, device=logits.device)
        ranks = torch.empty_like(ids)
        for begin in range(0, len(rows), self._group):
            part = slice(begin, begin + self._group)
            raw = logits[rows[part]].float()
            best = raw.topk(num_columns - 1)
            target = targets[part].long().unsqueeze(1)
            chosen = raw.gather(1, target)
            ids[part, :1] = target
            ids[part, 1:] = best.indices
            values[part, :1] = chosen
            values[part, 1:] = best.values
            values[part] -= raw.logsumexp(1, keepdim=True)
            ranks[part, :1] = (raw > chosen).sum(1, keepdim=True) + 1
            ranks[part, 1:] = (best.values[:, None, :] > best.values[:, :, None]).sum(2) + 1
        return LogprobTensors(ids, values, ranks, num_top)


def _changes_logits(params: SamplingParams, temperature: float, num_outputs: int) -> bool:
    filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return (
        (filters and temperature > 0)
        or params.has_penalties
        or bool(params.logit_bias)
        or num_outputs < params.min_tokens
    )


def _ints(values: Sequence[int] | IntArray) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _floats(values: Sequence[float]) -> FloatArray:
    return np.asarray(values, dtype=np.float32)
