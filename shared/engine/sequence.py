"""One completion in progress: a request with n > 1 is n sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shared.outputs import TokenLogprobs
from shared.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shared.engine.slots import SlotTable

NO_SLOT = -1


class Sequence:
    """Tokens and identity of one completion.

    While it runs, its numbers live in its slot of the SlotTable; while it waits, it carries only
    its tokens, and nothing of it is computed.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        seed: int,
        max_model_length: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.finish_length = min(self.num_prompt_tokens + params.max_tokens, max_model_length)
        self.slot = NO_SLOT
        # The identity of the last registered block, parent of the next one in the prefix cache.
        self.last_registered = 0
        # Prompt tokens found in the cache when the sequence was first admitted.
        self.num_cached_tokens: int | None = None
        # Filled chunk by chunk. None once handed out, so that a recomputation does not repeat it.
        wanted = params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wanted else None
        self._table: SlotTable | None = None
        self._token_ids = prompt_token_ids

    @property
    def name(self) -> str:
        """The request id; completions after the first are `id#index`."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens so far, [num_tokens] int32; the last is unset while its step is in flight."""
        if self._table is None:
            return self._token_ids
        return self._table.token_ids[self.slot, : self._table.num_tokens[self.slot]]

    @property
    def num_tokens(self) -> int:
        if self._table is None:
            return len(self._token_ids)
        return int(self._table.num_tokens[self.slot])

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self._table is None else int(self._table.num_computed_tokens[self.slot])

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without KV. A decode has one; so may the rest of a prompt."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_running(self) -> bool:
        return self._table is not None

    def enter(self, table: SlotTable, slot: int) -> None:
        """Called by SlotTable.acquire."""
        self._table, self.slot = table, slot

    def leave(self) -> None:
        """Called by SlotTable.release."""
        self._token_ids = self.token_ids.copy()
        self._table, self.slot = None, NO_SLOT
        self.last_registered = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.name!r}, slot={self.slot}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens})"
        )
