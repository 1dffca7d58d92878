"""vLLM beside our stages, through its engine's own `add_request` and `step`.

    python -m bench.compare --model qwen3-0.6b \\
        --external "vllm=/opt/vllm/bin/python -m bench.external.vllm"

Options of vLLM's EngineArgs: `--set max_num_batched_tokens 16384 --set async_scheduling true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.external import adapter
from shared import SamplingParams
from shared.outputs import StepOutput


class Vllm:
    """vLLM's engine, as a driver of ours wants it."""

    def __init__(self, model: str, dummy: bool, options: dict[str, Any]) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._params, self._delta = vllm.SamplingParams, RequestOutputKind.DELTA
        arguments = {
            "model": model,
            "load_format": "dummy" if dummy else "auto",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **options,
        }
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self.max_model_length: int = self._engine.model_config.max_model_len

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        theirs = self._params(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            detokenize=False,
            output_kind=self._delta,
        )
        prompt = {"prompt_token_ids": list(prompt_token_ids)}
        self._engine.add_request(request_id, prompt, theirs)

    def abort_request(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def has_unfinished_requests(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[StepOutput]:
        return [
            StepOutput(
                output.request_id,
                0,
                list(output.outputs[0].token_ids),
                finish_reason=output.outputs[0].finish_reason,
                num_cached_tokens=output.num_cached_tokens or 0,
            )
            for output in self._engine.step()
        ]


if __name__ == "__main__":
    adapter.main("vllm", Vllm)
