"""Engines in processes of their own as one engine, for whoever calls `step` in a loop."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.engine.request import check_request
from shared.engine.seeds import request_seed
from shared.engine.slots import Limits
from shared.engine.stats import EngineStats, total
from shared.engine.trace import MAX_UNREAD, StepRecord
from shared.models.files import ModelFiles
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

from .config import ParallelConfig
from .launch import Launcher, combined
from .online import online
from .router import Router

logger = logging.getLogger(__name__)


class Engine:
    """Implements shared.engine.protocol.Engine over stage 03's EngineClients.

    A replica that ends fails what it was working on; the others go on. Nothing starts it again: a
    batch of work is over sooner, or is started again as a whole.
    """

    def __init__(self, config: ParallelConfig, clients: Sequence[Any] = ()) -> None:
        """`clients`: of engines that were started in another way. Raises ValueError or OSError
        naming the option or file that is wrong."""
        self.config = config
        # First here: what is wrong with the files shows before processes are started for them.
        files = ModelFiles.find(config.model, config.load_format)
        self.tokenizer = files.tokenizer()
        self._clients = list(clients) or Launcher(config).start_all()
        online("client").wait_until_ready(self._clients)
        self._live = dict(enumerate(self._clients))
        self.info = combined(config, [client.ready_info for client in self._clients])
        self.limits: Limits = self.info.limits
        self.cuts_prompts: bool = self.info.cuts_prompts
        self.eos_token_ids: tuple[int, ...] = self.info.eos_token_ids
        self.router = Router(
            len(self._clients), config.routing, self.limits.block_size, self.limits.num_blocks
        )
        # Drawn here and not by the replicas, of which each would draw the same.
        self.seeds = np.random.default_rng(config.seed)
        self._records: deque[StepRecord] = deque(maxlen=MAX_UNREAD)
        self._unreported: list[StepOutput] = []
        """Last outputs of requests whose replica has ended."""

    @property
    def max_model_length(self) -> int:
        return self.limits.max_model_length

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        self.check_alive()
        return check_request(prompt_token_ids, params, self.limits, self.cuts_prompts)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> None:
        """Sent to its replica by the next `step`."""
        if any(client.expects(request_id) for client in self._clients):
            raise ValueError(f"request_id {request_id!r} is already running")
        self._look_for_ends(0)  # one that has ended since the last step gets nothing more
        tokens = self.check_request(prompt_token_ids, params)
        loads = {number: client.outstanding_tokens for number, client in self._live.items()}
        client = self._live[self.router.choose(tokens, loads)]
        seed = request_seed(params, self.seeds)
        client.add(request_id, tokens, params.model_copy(update={"seed": seed}))

    def abort_request(self, request_id: str) -> None:
        self._unreported = [one for one in self._unreported if one.request_id != request_id]
        for client in self._live.values():
            client.abort(request_id)
            client.flush()

    def abort_sequence(self, request_id: str, index: int) -> None:
        for client in self._live.values():
            client.abort(request_id, index)
            client.flush()

    def has_unfinished_requests(self) -> bool:
        return bool(self._unreported) or any(client.num_unfinished for client in self._clients)

    def step(self) -> list[StepOutput]:
        """Wait for what any of the engines has done. Requests of one that has ended end with an
        error. Raises EngineDeadError if none is left."""
        outputs = self._take_unreported()
        while True:
            are_sent = [client.flush() for client in self._live.values()]
            if outputs or not self.has_unfinished_requests():
                return outputs
            for client in self._live.values():
                outputs += self._received(client)
            if not outputs:
                self._look_for_ends(None if all(are_sent) else online("client").RETRY_SECONDS)
                outputs = self._take_unreported()

    def stats(self) -> EngineStats:
        """Of all engines that live; up to 50 ms old while they are busy."""
        return total([client.stats for client in self._live.values()])

    def listen(self, on: bool) -> None:
        for client in self._live.values():
            client.listen(on)
            client.flush()

    def take_step_records(self) -> list[StepRecord]:
        """Those of each engine in order."""
        records = list(self._records)
        self._records.clear()
        return records

    def describe(self) -> dict[str, object]:
        """Settings of a replica (the smallest, where they differ), and how many there are."""
        described: dict[str, object] = online("engine").described(self.config, self.info)
        return described

    def check_alive(self) -> None:
        """Raises EngineDeadError if no replica is left."""
        if not self._live:
            self._clients[-1].check_alive()

    def close(self) -> None:
        self._live.clear()
        # Not in threads: an interpreter that is about to exit starts none.
        for client in self._clients:
            client.stop()
        deadline = time.monotonic() + online("transport").END_SECONDS
        for client in self._clients:
            client.close(max(0.0, deadline - time.monotonic()))

    def _received(self, client: Any) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        while (progress := client.receive()) is not None:
            self._records.extend(progress.records)
            outputs += progress.outputs
            outputs += (failed(one.request_id, one.message) for one in progress.refused)
        return outputs

    def _look_for_ends(self, timeout: float | None) -> None:
        """Wait, in seconds, until something has come or a replica has ended, and note which."""
        online("client").wait_for_any(list(self._live.values()), timeout)
        for number, client in list(self._live.items()):
            if client.error is not None:
                del self._live[number]
                self.router.forget(number)
                logger.error(
                    "replica %d has ended with %d requests: %s",
                    number, len(client.cut_short), client.error,
                )  # fmt: skip
                self._unreported += (failed(one, str(client.error)) for one in client.cut_short)

    def _take_unreported(self) -> list[StepOutput]:
        """Raises EngineDeadError if no replica is left."""
        outputs, self._unreported = self._unreported, []
        self.check_alive()
        return outputs


def failed(request_id: str, error: str) -> StepOutput:
    return StepOutput(request_id, 0, [], None, "abort", error)
