"""The engine in its own process as an engine like any other, for whoever calls `step` in a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from shared.config import EngineConfig
from shared.engine.slots import Limits
from shared.engine.stats import EngineStats
from shared.engine.trace import MAX_UNREAD, StepRecord
from shared.models.files import ModelFiles
from shared.outputs import StepOutput
from shared.sampling_params import SamplingParams

from .client import EngineClient
from .config import OnlineConfig
from .messages import EngineInfo


class Engine:
    """Implements shared.engine.protocol.Engine. The engine behind it does not wait for `step`: it
    goes on by itself as long as it has requests, and `step` gives out what it has produced since.
    """

    def __init__(self, config: OnlineConfig, client: EngineClient | None = None) -> None:
        """`client`: of an engine that was started in another way. Raises ValueError or OSError
        naming the option or file that is wrong."""
        self.config = config
        # First here: what is wrong with the files shows before a process is started for them.
        files = ModelFiles.find(config.model, config.load_format)
        self.tokenizer = files.tokenizer()
        self.client = client or EngineClient(config)
        info = self.client.wait_until_ready()
        self.limits: Limits = info.limits
        self.cuts_prompts = info.cuts_prompts
        self.eos_token_ids = info.eos_token_ids
        self._records: deque[StepRecord] = deque(maxlen=MAX_UNREAD)

    @property
    def max_model_length(self) -> int:
        return self.limits.max_model_length

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    def check_request(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> np.ndarray:
        return self.client.check_request(prompt_token_ids, params)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> None:
        """Sent by the next `step`, with all others since the last one: they start together, as in
        an engine that is called directly."""
        self.client.add(request_id, prompt_token_ids, params)

    def abort_request(self, request_id: str) -> None:
        self.client.abort(request_id)
        self.client.flush()

    def abort_sequence(self, request_id: str, index: int) -> None:
        self.client.abort(request_id, index)
        self.client.flush()

    def has_unfinished_requests(self) -> bool:
        return self.client.num_unfinished > 0

    def step(self) -> list[StepOutput]:
        """Wait for what the engine has done: one step, or several if nobody came for long. Raises
        EngineDeadError if it has ended."""
        client = self.client
        client.check_alive()
        client.flush()
        while client.num_unfinished:
            progress = client.receive()
            if progress is not None:
                self._records.extend(progress.records)
                return progress.outputs + [
                    StepOutput(refused.request_id, 0, [], None, "abort", refused.message)
                    for refused in progress.refused
                ]
            client.wait()
            client.check_alive()
        return []

    def stats(self) -> EngineStats:
        """The newest that has come; up to 50 ms old while the engine is busy."""
        return self.client.stats

    def listen(self, on: bool) -> None:
        self.client.listen(on)
        self.client.flush()

    def take_step_records(self) -> list[StepRecord]:
        records = list(self._records)
        self._records.clear()
        return records

    def describe(self) -> dict[str, object]:
        """The engine's own settings, and which engine it is, with the options of its stage. Options
        that only other engines have are None."""
        return described(self.config, self.client.ready_info)

    def close(self) -> None:
        self.client.close()


def described(config: OnlineConfig, info: EngineInfo) -> dict[str, object]:
    """What `Engine.describe` says of an engine that was started with this config."""
    wrapped = config.wrapped
    fields = type(wrapped).model_fields.keys()
    own = wrapped.model_dump(include=fields - EngineConfig.model_fields.keys())
    foreign = dict.fromkeys(type(config).model_fields.keys() - fields)
    front = {"engine": info.stage, "step_timeout": config.step_timeout}
    return {**foreign, **own, **info.description, **front}
