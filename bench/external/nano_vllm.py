"""nano-vllm beside our stages, one `step` at a time.

    python -m bench.compare --model qwen3-0.6b \\
        --external "nano-vllm=/opt/nano/bin/python -m bench.external.nano_vllm"

Options of its Config: `--set max_num_batched_tokens 32768`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.external import adapter
from shared import SamplingParams
from shared.outputs import StepOutput

RANDOM_WEIGHTS = 0.02  # standard deviation; a norm's weights are 1 already


class NanoVllm:
    """nano-vllm's engine, as a driver of ours wants it."""

    def __init__(self, model: str, dummy: bool, options: dict[str, Any]) -> None:
        import nanovllm

        self._params = nanovllm.SamplingParams
        self._engine = nanovllm.LLM(model, **options)
        if dummy:  # it found no weight files, and left the matrices as memory happened to be
            for parameter in self._engine.model_runner.model.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(0, RANDOM_WEIGHTS)
        self.max_model_length: int = options["max_model_len"]
        # Unfinished: (sequence, tokens reported so far).
        self._sequences: dict[str, tuple[Any, int]] = {}

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        if len(prompt_token_ids) + params.max_tokens > self.max_model_length:
            raise ValueError(f"more than max_model_len={self.max_model_length} tokens")
        theirs = self._params(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
        )
        self._engine.add_request(list(prompt_token_ids), theirs)
        self._sequences[request_id] = self._engine.scheduler.waiting[-1], 0

    def abort_request(self, request_id: str) -> None:
        """It knows no such thing: the next token is the last."""
        if request_id in self._sequences:
            sequence, _ = self._sequences[request_id]
            sequence.max_tokens = sequence.num_completion_tokens + 1

    def has_unfinished_requests(self) -> bool:
        return not self._engine.is_finished()

    def step(self) -> list[StepOutput]:
        self._engine.step()
        outputs = []
        for request_id, (sequence, reported) in list(self._sequences.items()):
            count = sequence.num_completion_tokens
            if count == reported:
                continue
            tokens = list(sequence.token_ids[reported - count :])
            # Prefix hits are not reported: its count of cached tokens grows with what it computes.
            outputs.append(StepOutput(request_id, 0, tokens))
            if sequence.is_finished:
                outputs[-1].finish_reason = "length"
                del self._sequences[request_id]
            else:
                self._sequences[request_id] = sequence, count
        return outputs


if __name__ == "__main__":
    adapter.main("nano-vllm", NanoVllm)
