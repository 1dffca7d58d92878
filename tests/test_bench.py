"""The offline half of the benchmark package, on a fake engine whose clock only it moves."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from bench import cli, compare, decode_profile, diff, gpu, plots, result, rounds, sweep, tables
from bench.call import call
from bench.cli import BenchOptions
from bench.floor import Limits, ModelCost, Rates, measure_rates, num_devices, physical_floor
from bench.host import host_engine, measure_host
from bench.offline import Driver
from bench.result import Floor, Hardware, Result, WorkloadInfo
from bench.rounds import Attempt, Contender
from bench.workloads import (
    SCALES,
    WARMUP,
    WORKLOADS,
    Request,
    Workload,
    auto_scale,
    build_workload,
)
from shared import EngineConfig, SamplingParams
from shared.models.config import ModelConfig, real_model_config
from shared.outputs import StepOutput
from steps import engines, load

QWEN_VOCABULARY = 151_936
TINY_VOCABULARY = 4096

# A changed hash is a changed workload: its results cannot be compared with older ones.
FROZEN = {
    ("nano", "cpu", TINY_VOCABULARY): (
        "d24cd3d54bc1eee49653278d2fbd9b67e2e14630f74814423d576957296fdfd5"
    ),
    ("nano", "full", QWEN_VOCABULARY): (
        "fdbf09f441c0d8bdfe18000b57476e347532ce43b4931d81c2a5b390a3a463e0"
    ),
    ("nano", "full_large", QWEN_VOCABULARY): (
        "fdbf09f441c0d8bdfe18000b57476e347532ce43b4931d81c2a5b390a3a463e0"
    ),
    ("nano_double", "cpu", TINY_VOCABULARY): (
        "614167b8e38dfc179aa7dc3db63a6d44550041a4260871dba8a30f2641ab2503"
    ),
    ("nano_double", "full", QWEN_VOCABULARY): (
        "92c5e8e722d23410256084d687679a99d73e3a77a4b770afc449d45e9b004726"
    ),
    ("nano_double", "full_large", QWEN_VOCABULARY): (
        "92c5e8e722d23410256084d687679a99d73e3a77a4b770afc449d45e9b004726"
    ),
    ("decode_gap", "cpu", TINY_VOCABULARY): (
        "42a51a48b9c5164fd933dd91de7afb569ad1897e74aac6f4d3fda52b6f710556"
    ),
    ("decode_gap", "full", QWEN_VOCABULARY): (
        "5fe04d36a59c706119ff4e0266c6ded6e10e3aee02860651ee7e98b267238c85"
    ),
    ("decode_gap", "full_large", QWEN_VOCABULARY): (
        "d059112c330d16ea1cd02b76f644d5a3fe330835b390d3b3cda9d85eebeaebad"
    ),
    ("decode_gap_busy", "cpu", TINY_VOCABULARY): (
        "fc7c8aaa8bf9944c978d2e440f625d82d89bc56e6d4ac1506f6b228e59ddbd4a"
    ),
    ("decode_gap_busy", "full", QWEN_VOCABULARY): (
        "cd4da9b8c5f7ae53c9335a7b5471f4cad100d2d828741966745459c061dea8f6"
    ),
    ("decode_gap_busy", "full_large", QWEN_VOCABULARY): (
        "f7c4687f92a35e3b192b4b103c33363ca41a14ae4b340e0dfbe4c1827b40751e"
    ),
    ("decode_gap_many", "cpu", TINY_VOCABULARY): (
        "39593fa2201ec71510ca68ca66b76c6521338fa021d210608e88246ffac3890a"
    ),
    ("decode_gap_many", "full", QWEN_VOCABULARY): (
        "79a3ef0583fb611815b5377fba740d346cb8d96b23186ab2af8bf95a428c272e"
    ),
    ("decode_gap_many", "full_large", QWEN_VOCABULARY): (
        "d0c8374eedd71b483f417467d4032049a29d04455c6481f3d87474abd9caa125"
    ),
    ("decode_gap_few", "cpu", TINY_VOCABULARY): (
        "7a7d59d441478c131de5134cda1ec748e77ac2fcd6bdbc68433f335b3be44745"
    ),
    ("decode_gap_few", "full", QWEN_VOCABULARY): (
        "7cf11e4962c2ce6b9e7968b7e1ae9eb9968b25a6bdc8d2dd0f6bf8db4bd287ff"
    ),
    ("decode_gap_few", "full_large", QWEN_VOCABULARY): (
        "6daee0b054c904ea326bd91e7a67f99f53fcca52452da7d64bd6ca460776e227"
    ),
    ("decode_gap_long", "cpu", TINY_VOCABULARY): (
        "8d7a9567f1bbf7b2fce880e3e1a36bdccfb26ab646b92b654bb96ec340905c72"
    ),
    ("decode_gap_long", "full", QWEN_VOCABULARY): (
        "a92f6f89acaea90815a27b641c66186471a88a1eb951028038e81e8d9cd19e2d"
    ),
    ("decode_gap_long", "full_large", QWEN_VOCABULARY): (
        "b1d35c431283be2c9d0334ec7d91fcca06dee831a85e8f15b50ce6f164024117"
    ),
    ("shared_prefix", "cpu", TINY_VOCABULARY): (
        "48a6bd65eb5378358c40c42beaf49f1316212b8a8c831eac5de4efd533ab0bc2"
    ),
    ("shared_prefix", "full", QWEN_VOCABULARY): (
        "aff921c005c64c340c388b69fe78acfcedb2541068d1b2404cd468404a7c726d"
    ),
    ("shared_prefix", "full_large", QWEN_VOCABULARY): (
        "aff921c005c64c340c388b69fe78acfcedb2541068d1b2404cd468404a7c726d"
    ),
    ("batch1", "cpu", TINY_VOCABULARY): (
        "516b403bc87e840631e063635db48a64743d848e04226320407e3e205219ff67"
    ),
    ("batch1", "full", QWEN_VOCABULARY): (
        "6476bc2377c76c6b3f35d0444e4b8e940d7848eaa4d503ca6757c48fd619e961"
    ),
    ("batch1", "full_large", QWEN_VOCABULARY): (
        "6476bc2377c76c6b3f35d0444e4b8e940d7848eaa4d503ca6757c48fd619e961"
    ),
    ("batch8", "cpu", TINY_VOCABULARY): (
        "fb85a5e71e3346fb4ac00eaeb974c16f7a3ea05942a009fd43db1d4073490b56"
    ),
    ("batch8", "full", QWEN_VOCABULARY): (
        "0dc069648cfc369fc65e60f121e0936358bb0e812a479913aa085b29855e3579"
    ),
    ("batch8", "full_large", QWEN_VOCABULARY): (
        "0dc069648cfc369fc65e60f121e0936358bb0e812a479913aa085b29855e3579"
    ),
}


class FakeEngine:
    """Prefill first: 1 ms per prompt token, 10 ms per decode step. Time passes only in `step`."""

    def __init__(self, config: EngineConfig | None = None, max_model_length: int = 1000) -> None:
        self.config = config
        self.now = 100.0
        self.max_model_length = max_model_length
        self.waiting: list[tuple[str, int, int]] = []
        self.running: dict[str, int] = {}
        self.seen: list[tuple[str, float]] = []
        self.refuse: Callable[[str], bool] = lambda request_id: False
        self.spoil: dict[str, StepOutput] = {}
        self.closed = False

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        if self.refuse(request_id):
            raise ValueError("prompt_token_ids is too long")
        self.seen.append((request_id, self.now))
        self.waiting.append((request_id, len(prompt_token_ids), params.max_tokens))

    def abort_request(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting = [w for w in self.waiting if w[0] != request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[StepOutput]:
        if self.waiting:
            self.now += sum(tokens for _, tokens, _ in self.waiting) / 1000
            rows = [request_id for request_id, _, _ in self.waiting]
            self.running.update((request_id, left) for request_id, _, left in self.waiting)
            self.waiting = []
        else:
            self.now += 0.010
            rows = list(self.running)
        return [self._advance(request_id) for request_id in rows]

    def _advance(self, request_id: str) -> StepOutput:
        if (spoiled := self.spoil.get(request_id)) is not None:
            del self.running[request_id]
            return spoiled
        self.running[request_id] -= 1
        done = self.running[request_id] == 0
        if done:
            del self.running[request_id]
        return StepOutput(
            request_id, 0, [7], finish_reason="length" if done else None, num_cached_tokens=3
        )

    def describe(self) -> dict[str, object]:
        return {
            "device": "cpu", "dtype": "float32", "attention_backend": "torch",
            "kvcache_block_size": 16, "tokens_in_pool": 100_000, "max_model_length": 1000,
            "max_num_sequences": 64, "max_num_batched_tokens": 4096,
            "enable_prefix_caching": True,
        }  # fmt: skip

    def close(self) -> None:
        self.closed = True


def drive(engine: FakeEngine, workload: Workload) -> result.RunMetrics:
    return Driver(engine, engine.clock, engine.sleep).run(workload)


def made(*requests: Request, window: float | None = None) -> Workload:
    return Workload("nano", "cpu", 100, 0, requests, window)


# --- workloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name,scale,vocab_size", list(FROZEN))
def test_workload_content_is_frozen(name: Any, scale: Any, vocab_size: int) -> None:
    assert build_workload(name, scale, vocab_size).sha256 == FROZEN[name, scale, vocab_size]


def test_nano_has_the_lengths_of_nano_vllms_benchmark() -> None:
    workload = build_workload("nano", "full", QWEN_VOCABULARY)
    outputs = [r.max_tokens or 0 for r in workload.requests]
    assert len(outputs) == 256
    assert sum(outputs) == 133_966  # what its script prints
    for lengths in (outputs, [len(r.prompt) for r in workload.requests]):
        assert 100 <= min(lengths) <= 110
        assert 1014 <= max(lengths) <= 1024
    params = workload.requests[0].sampling_params(4096)
    assert (params.temperature, params.ignore_eos) == (0.6, True)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", SCALES)
def test_repeats_are_equal_work_on_prompts_that_share_nothing(name: Any, scale: Any) -> None:
    built = [build_workload(name, scale, TINY_VOCABULARY, r) for r in (WARMUP, 0, 1, 2)]
    shapes = [
        [(len(r.prompt), r.max_tokens, r.arrival, r.wave, r.shared_tokens) for r in w.requests]
        for w in built
    ]
    assert all(shape == shapes[0] for shape in shapes)
    assert len({w.sha256 for w in built}) == len(built)
    # Not even the first four tokens are equal, and a hit needs a whole first block.
    starts = [{r.prompt[:4] for r in w.requests} for w in built]
    assert sum(map(len, starts)) == len(set.union(*starts))


@pytest.mark.parametrize("vocab_size,limit", [(TINY_VOCABULARY, 4096), (QWEN_VOCABULARY, 10_000)])
def test_token_ids_stay_below_the_vocabulary_and_below_10000(vocab_size: int, limit: int) -> None:
    for name in WORKLOADS:
        workload = build_workload(name, "cpu", vocab_size)
        top = max(max(r.prompt) for r in workload.requests)
        assert limit * 0.8 < top < limit == workload.id_limit


@pytest.mark.parametrize("scale", SCALES)
def test_shared_prefixes_return_after_their_owners_have_gone(scale: Any) -> None:
    requests = build_workload("shared_prefix", scale, QWEN_VOCABULARY).requests
    assert {r.wave for r in requests} == {0, 1}
    for index, request in enumerate(requests):
        shared = request.shared_tokens
        earlier = requests[:index]
        assert bool(shared) == any(e.prompt[:16] == request.prompt[:16] for e in earlier)
        if shared:
            assert any(e.prompt[:shared] == request.prompt[:shared] for e in earlier)
            # Only the prefix is shared, so hits can be predicted.
            longer = request.prompt[: shared + 4]
            assert not any(e.prompt[: shared + 4] == longer for e in earlier)
    assert all(r.shared_tokens for r in requests if r.wave == 1)


def test_decode_gap_is_steady_decodes_and_prompts_on_a_schedule() -> None:
    for scale, steady, prompt, interval in (
        ("full", 32, 4096, 0.4), ("full_large", 32, 4096, 1.0), ("cpu", 4, 1024, 1.0),
    ):  # fmt: skip
        workload = build_workload("decode_gap", scale, QWEN_VOCABULARY)  # type: ignore[arg-type]
        timed = [r for r in workload.requests if r.arrival is not None]
        assert sum(r.max_tokens is None for r in workload.requests) == steady
        assert {len(r.prompt) for r in timed} == {prompt}
        assert [r.arrival for r in timed[:3]] == pytest.approx([0, interval, 2 * interval])
        assert workload.window is not None
        assert len(timed) == round(workload.window / interval)
        short = workload.shortened(0.2)
        assert short.window == pytest.approx(0.2 * workload.window)
        assert len(short.requests) == steady + round(0.2 * workload.window / interval)


def test_a_warm_up_meets_all_sizes_where_kernels_are_compiled() -> None:
    on_cpu = build_workload("nano", "cpu", TINY_VOCABULARY)
    assert on_cpu.shortened(0.2).requests == on_cpu.requests[:13]
    on_gpu = build_workload("nano", "full", QWEN_VOCABULARY)
    assert on_gpu.shortened(0.2) is on_gpu


def test_scale_follows_device_and_model() -> None:
    small, large = real_model_config("qwen3-0.6b"), real_model_config("qwen3-8b")
    assert auto_scale("cpu", large) == "cpu"
    assert auto_scale("cuda", small) == "full"
    assert auto_scale("cuda", large) == "full_large"


def test_unknown_workload_and_scale_are_named() -> None:
    with pytest.raises(ValueError, match="'nope'"):
        build_workload("nope", "cpu", 100)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'huge'"):
        build_workload("nano", "huge", 100)  # type: ignore[arg-type]


# --- driving -------------------------------------------------------------------------------------


def test_closed_workload_is_measured_by_hand_checkable_numbers() -> None:
    engine = FakeEngine()
    metrics = drive(engine, made(Request((1,) * 100, 3), Request((2,) * 300, 1)))
    # One prefill of 400 tokens gives both their first token; two decode steps follow.
    assert metrics.seconds == pytest.approx(0.420)
    assert metrics.output_tokens == 4
    assert metrics.tokens_per_second == pytest.approx(4 / 0.420)
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.p50 == pytest.approx(400)
    assert metrics.tpot_ms is not None
    # The request of one token has no time per token.
    assert (metrics.tpot_ms.count, metrics.tpot_ms.p50) == (1, pytest.approx(10))
    assert metrics.gap_ms is not None
    assert (metrics.gap_ms.count, metrics.gap_ms.max) == (2, pytest.approx(10))
    assert metrics.prefix_hit_tokens == 6
    assert (metrics.requests, metrics.failed, metrics.failures) == (2, 0, [])


def test_second_wave_starts_when_the_first_has_finished() -> None:
    engine = FakeEngine()
    metrics = drive(engine, made(Request((1,), 50), Request((2,), 5), Request((3,), 5, wave=1)))
    assert [at for _, at in engine.seen] == pytest.approx([100, 100, 100.492])
    assert metrics.wave_prefix_hit_tokens == [6, 3]
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.max == pytest.approx(2)  # from its own wave's start


def test_failed_requests_are_counted_apart() -> None:
    good = [Request((1,) * 10, 4), Request((2,) * 10, 4)]
    clean = drive(FakeEngine(), made(*good))
    engine = FakeEngine()
    engine.refuse = lambda request_id: request_id.endswith("-2")
    engine.spoil = {
        "nano-0-3": StepOutput("nano-0-3", 0, [], error="no room"),
        "nano-0-4": StepOutput("nano-0-4", 0, [], finish_reason="abort"),
        "nano-0-5": StepOutput("nano-0-5", 0, [9], finish_reason="length"),
    }
    bad = [Request((3,), 4) for _ in range(4)]
    metrics = drive(engine, made(*good, *bad))
    assert (metrics.requests, metrics.failed) == (6, 4)
    assert metrics.failures == [
        "prompt_token_ids is too long", "no room", "aborted by the engine",
        "ended after 1 of 4 tokens",
    ]  # fmt: skip
    assert metrics.output_tokens == clean.output_tokens == 8
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.count == 2
    assert metrics.tpot_ms == clean.tpot_ms


def test_a_request_the_engine_forgets_has_failed() -> None:
    engine = FakeEngine()
    engine.has_unfinished_requests = lambda: False  # type: ignore[method-assign]
    metrics = drive(engine, made(Request((1,), 4)))
    assert metrics.failures == ["the engine forgot it"]
    assert metrics.ttft_ms is metrics.tpot_ms is metrics.gap_ms is None
    assert metrics.tokens_per_second == 0


def steady_and(*arrivals: Request, window: float = 2.0) -> Workload:
    return made(Request((1,) * 50, None), Request((2,) * 50, None), *arrivals, window=window)


def test_a_prompt_shows_as_a_gap_of_the_steady_decodes() -> None:
    arrivals = [Request((3,) * 250, 2, arrival=t) for t in (0.0, 0.5)]
    engine = FakeEngine()
    metrics = drive(engine, steady_and(*arrivals))
    assert metrics.gap_ms is not None
    assert metrics.gap_ms.p50 == pytest.approx(10)
    assert metrics.gap_ms.max == pytest.approx(260)  # the prefill and the decode step after it
    # Only the prompts count here: the steady decodes started before the window.
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.count == 2
    assert metrics.seconds == 2.0
    # 1.5 s are left for 10 ms steps of two rows, and each prompt brings two tokens.
    assert metrics.output_tokens == pytest.approx(2 * 150 + 4, abs=4)
    assert metrics.tokens_per_second == metrics.output_tokens / 2.0
    assert not engine.has_unfinished_requests()


def test_ttft_counts_from_when_the_prompt_was_due() -> None:
    # The second is due while the first is being computed, and can only be added 400 ms later.
    arrivals = [Request((3,) * 500, 2, arrival=0.0), Request((4,) * 100, 2, arrival=0.1)]
    metrics = drive(FakeEngine(), steady_and(*arrivals))
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.p50 == pytest.approx(500, abs=11)
    assert metrics.ttft_ms.max == pytest.approx(500, abs=11)


class StarvingEngine(FakeEngine):
    """Serves nobody from some time on."""

    last = 0.0

    def step(self) -> list[StepOutput]:
        if self.now < self.last:
            return super().step()
        self.now += 0.010
        return []


@pytest.mark.parametrize("last", [100.15, 100.25])  # before and after the window opens
def test_starvation_to_the_very_end_is_a_gap_and_a_failed_prompt(last: float) -> None:
    engine = StarvingEngine()
    engine.last = last
    metrics = drive(engine, steady_and(Request((3,) * 10, 2, arrival=0.3)))
    assert metrics.gap_ms is not None
    assert metrics.gap_ms.max > 3800  # window and drain
    assert metrics.failures == ["not served by the end of the drain"]
    assert metrics.ttft_ms is None
    assert not engine.has_unfinished_requests()


def test_window_goes_on_without_steady_decodes() -> None:
    engine = FakeEngine(max_model_length=60)  # they end after ten tokens
    metrics = drive(engine, steady_and(Request((3,) * 10, 2, arrival=1.0)))
    assert metrics.failed == 0
    # One token each was left for the window; the prompt brings two.
    assert metrics.output_tokens == 4
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.p50 == pytest.approx(10)


def test_a_real_engine_runs_the_workload_of_the_cpu() -> None:
    engine = host_engine("00_baseline", rows=64, prompt=128, steps=128)
    metrics = Driver(engine).run(build_workload("nano", "cpu", 10_000))
    assert (metrics.requests, metrics.failed, metrics.prefix_hit_tokens) == (64, 0, 0)
    shared = Driver(engine).run(build_workload("shared_prefix", "cpu", 10_000))
    assert shared.failed == 0
    # Every prompt of the second wave finds its prefix, though all its owners have ended.
    assert shared.wave_prefix_hit_tokens[1] == 16 * 128
    engine.close()


@pytest.mark.parametrize("stage", engines())
def test_host_time_of_a_decode_step(stage: str) -> None:
    measured = measure_host(stage, rows=4, prompt=8, steps=20)
    assert measured.count == 19
    assert 0 < measured.p50 < 0.1


# --- floor ---------------------------------------------------------------------------------------

H200 = Rates(bandwidth=4.3e12, matmul=790e12)
ROOMY = Limits(512, 16_384, 10**9, 40_960)


def floor_of(model: str, workload: Any, limits: Limits = ROOMY, devices: int = 1) -> Floor:
    shape = real_model_config(model)
    scale = auto_scale("cuda", shape)
    built = build_workload(workload, scale, shape.vocab_size)
    return physical_floor(built, ModelCost.of(shape, 2), H200, limits, devices)


@pytest.mark.parametrize(
    "model,workload,tokens_per_second,tolerance",
    # Computed independently; prefill passes and KV writes are counted slightly differently.
    [("qwen3-0.6b", "nano", 36_000, 0.02), ("qwen3-8b", "nano", 13_100, 0.02)],
)
def test_floor_agrees_with_the_reference_table(
    model: str, workload: str, tokens_per_second: float, tolerance: float
) -> None:
    floor = floor_of(model, workload)
    assert floor.tokens_per_second == pytest.approx(tokens_per_second, rel=tolerance)


@pytest.mark.parametrize(
    "model,workload,milliseconds,tolerance",
    [
        ("qwen3-0.6b", "batch1", 0.28, 0.02),
        # The table's 0.44 is what the last step takes (contexts of 768 tokens); the mean over 256
        # outputs, contexts of 640 in the middle, is 0.414. Its row for 8B does agree with the mean.
        ("qwen3-0.6b", "batch8", 0.44, 0.07),
        ("qwen3-8b", "batch1", 3.52, 0.01),
        ("qwen3-8b", "batch8", 3.70, 0.01),
    ],
)
def test_floor_per_token_agrees_with_the_reference_table(
    model: str, workload: str, milliseconds: float, tolerance: float
) -> None:
    assert floor_of(model, workload).tpot_ms == pytest.approx(milliseconds, rel=tolerance)


def test_floor_follows_from_the_schedule_by_hand() -> None:
    cost = ModelCost(
        weight_bytes=1000, kv_bytes=10, trunk_flops=50, head_flops=5, attention_flops=1
    )
    workload = made(Request((1,) * 4, 3))
    floor = physical_floor(workload, cost, Rates(1000, 100), Limits(8, 64, 1000, 100))
    # Prefill: 1040 bytes, 4 * 50 + 5 + 10 FLOPs. Decodes: 1050 and 1060 bytes, 60 and 61 FLOPs.
    assert floor.bytes_moved == 1040 + 1050 + 1060
    assert floor.flops == 215 + 60 + 61
    assert floor.seconds == pytest.approx(2.15 + 1.05 + 1.06)
    assert floor.tpot_ms == pytest.approx(1055)
    assert floor.tokens_per_second == pytest.approx(3 / 4.26)


def test_replicas_have_their_limits_together() -> None:
    settings = {
        "max_num_sequences": 8,
        "max_num_batched_tokens": 100,
        "tokens_in_pool": 1000,
        "max_model_length": 64,
        "enable_prefix_caching": True,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
    }
    assert Limits.of(settings) == Limits(24, 300, 3000, 64)
    assert Limits.of(settings, concurrency=5).sequences == 5
    assert num_devices(settings) == 6


def test_floor_knows_limits_hits_and_devices() -> None:
    free = floor_of("qwen3-0.6b", "nano")
    narrow = floor_of("qwen3-0.6b", "nano", Limits(32, 16_384, 10**9, 40_960))
    small = floor_of("qwen3-0.6b", "nano", Limits(512, 16_384, 32_768, 40_960))
    assert free.seconds < narrow.seconds
    assert free.seconds < small.seconds
    assert floor_of("qwen3-0.6b", "nano", devices=2).seconds == pytest.approx(free.seconds / 2)
    cached = floor_of("qwen3-0.6b", "shared_prefix")
    uncached = floor_of(
        "qwen3-0.6b", "shared_prefix", Limits(512, 16_384, 10**9, 40_960, prefix_caching=False)
    )
    assert cached.compute_seconds < 0.5 * uncached.compute_seconds
    assert max(free.memory_seconds, free.compute_seconds) < free.seconds


def test_floor_of_a_window_lasts_as_long_as_the_window() -> None:
    floor = floor_of("qwen3-0.6b", "decode_gap")
    assert floor.seconds == pytest.approx(30, rel=0.001)
    assert floor.tokens_per_second > 5000


def test_rates_are_measured() -> None:
    rates = measure_rates("cpu", torch.float32, working_set=1 << 20)
    assert 1e8 < rates.bandwidth < 1e13
    assert 1e8 < rates.matmul < 1e14


# --- results -------------------------------------------------------------------------------------


def row(stage: str = "00_baseline", speed: float = 100.0, **changes: Any) -> Result:
    metrics = drive(FakeEngine(), made(Request((1,) * 100, 3)))
    runs = [
        msgspec.structs.replace(metrics, tokens_per_second=speed * factor, repeat=i)
        for i, factor in enumerate((0.9, 1.0, 1.2))
    ]
    medians, spread = result.summarise(runs)
    made_row = Result(
        stage=stage,
        workload=WorkloadInfo("nano", "cpu", 4096, "ab" * 32),
        created=result.now(),
        commit="c0ffee" * 6,
        dirty=True,
        hardware=Hardware("some CPU", 2),
        versions={"python": "3.11", "torch": "2.13"},
        config={"attention_backend": "torch", "kvcache_block_size": 16, "dtype": "float32"},
        runs=runs,
        medians=medians,
        spread=spread,
        percent_of_floor=12.5,
    )
    return msgspec.structs.replace(made_row, **changes)


def test_rows_accumulate_and_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    result.append_results(path, [row("a")])
    result.append_results(path, [row("b", error="it broke")])
    read = result.read_results(path)
    assert [r.stage for r in read] == ["a", "b"]
    assert read[0].runs == row("a").runs
    raw = json.loads(path.read_text())
    for name in ("commit", "dirty", "hardware", "versions", "config", "runs", "medians", "spread"):
        assert name in raw[0], name
    assert raw[0]["workload"]["sha256"] == "ab" * 32
    assert sorted(p.name for p in path.parent.iterdir()) == ["out.json"]


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text('{"not": "rows"}')
    with pytest.raises(ValueError, match=r"out\.json"):
        result.append_results(path, [row()])
    assert path.read_text() == '{"not": "rows"}'
    result.append_results(tmp_path / "new.json", [row(schema_version=99)])
    with pytest.raises(ValueError, match="schema_version 99"):
        result.read_results(tmp_path / "new.json")


def test_medians_and_spread_over_repeats() -> None:
    summary = row(speed=100)
    assert summary.medians["tokens_per_second"] == 100
    assert summary.spread["tokens_per_second"] == pytest.approx((90, 120))
    assert "repeat" not in summary.medians
    assert summary.medians["ttft_ms.p50"] == pytest.approx(100)


def test_tables_keep_losing_and_failing_rows() -> None:
    failed = row("02_c", runs=[], medians={}, spread={}, percent_of_floor=None, error="a | b")
    text = tables.markdown([row("00_a", 100), row("01_b", 50), failed])
    lines = [line for line in text.splitlines() if line.startswith("| 0")]
    assert [line.split(" | ")[0] for line in lines] == ["| 00_a", "| 01_b", "| 02_c"]
    assert "100.0 (90.0-120.0)" in lines[0]
    assert " 1.00 " in lines[0]
    assert " 0.50 " in lines[1]
    assert "0; a / b" in lines[2]
    assert "c0ffeec0ff+changes" in lines[0]
    assert "some CPU, 2 cores" in text
    assert "sha256 abababababab" in text
    assert "torch 2.13" in text
    header = next(line for line in text.splitlines() if line.startswith("| stage"))
    assert {line.count("|") for line in lines} == {header.count("|")}


def test_ratios_are_to_the_first_stage_of_the_same_comparison() -> None:
    rows = [row("00_a", 100), row("01_b", 150), row("00_a", 200), row("01_b", 150)]
    ((_, headers, cells),) = tables.tables(rows)
    ratios = [line[headers.index("ratio")] for line in cells]
    assert ratios == ["1.00", "1.50", "1.00", "0.75"]


def test_ratios_of_a_sweep_are_to_its_first_point() -> None:
    points = [{"max_prefill_tokens_per_step": tokens} for tokens in (128, 512, 2048)]
    speeds = [100, 150, 200]
    rows = [row("01_b", v, config=c) for v, c in zip(speeds, points, strict=True)]
    ((_, headers, cells),) = tables.tables(rows)
    assert [line[headers.index("ratio")] for line in cells] == ["1.00", "1.50", "2.00"]
    assert cells[0][headers.index("config")] == "prefill 128"


def test_the_terminal_shows_once_what_all_rows_have_in_common() -> None:
    (table,) = tables.rich_tables([row("00_a", 100), row("01_b", 50)])
    headers = [column.header for column in table.columns]
    assert headers[:2] == ["stage", "tokens/s"]
    assert headers[-2:] == ["% of floor", "ratio"]
    assert list(table.columns[1].cells) == ["100.0\n(90.0-120.0)", "50.0\n(45.0-60.0)"]
    assert "; runs 3; commit c0ffeec0ff+changes" in str(table.title)
    (single,) = tables.rich_tables([row("00_a")])
    assert "commit" in [column.header for column in single.columns]


def test_other_machines_and_other_work_get_tables_of_their_own() -> None:
    other = row("00_a", hardware=Hardware("other CPU", 8))
    changed = row("00_a", workload=WorkloadInfo("nano", "cpu", 4096, "cd" * 32))
    assert len(tables.tables([row("00_a"), other, changed, row("01_b")])) == 3


def test_micro_workloads_compare_time_per_token() -> None:
    floor = Floor(1000, 2.0, 1, 1, 1, 1, 1, 1, 1, 1, "")
    medians = {"tokens_per_second": 100.0, "tpot_ms.p50": 8.0}
    assert result.percent_of_floor("nano", medians, floor) == pytest.approx(10)
    assert result.percent_of_floor("batch8", medians, floor) == pytest.approx(25)
    assert result.percent_of_floor("nano", {}, floor) is None


def test_commit_is_told_by_git_or_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv(result.COMMIT_VARIABLE, raising=False)
    assert result.git_state(tmp_path) == (None, None)
    monkeypatch.setenv(result.COMMIT_VARIABLE, "abc123-dirty")
    assert result.git_state(tmp_path) == ("abc123", True)

    def git(*args: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    monkeypatch.delenv(result.COMMIT_VARIABLE)
    git("init")
    (tmp_path / "code.py").write_text("")
    git("add", ".")
    git("commit", "-m", "one")
    commit, dirty = result.git_state(tmp_path)
    assert commit is not None
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "new.json").write_text("[]")
    assert result.git_state(tmp_path)[1] is False
    (tmp_path / "code.py").write_text("changed")
    assert result.git_state(tmp_path)[1] is True


# --- comparing -----------------------------------------------------------------------------------


def test_stages_alternate() -> None:
    order = rounds.alternate(["A", "B", "C"], rounds=2)
    assert "".join(name for _, name in order) == "ABCCBA"
    assert [number for number, _ in order] == [0, 0, 0, 1, 1, 1]


def test_stages_are_found_not_listed() -> None:
    assert "00_baseline" in compare.stage_names(["all"])
    assert compare.stage_names(["00_baseline"]) == ["00_baseline"]
    with pytest.raises(ValueError, match="99_none"):
        compare.stage_names(["99_none"])


def test_flags_go_to_the_stages_that_have_them() -> None:
    names = ["00_baseline", "01_chunked_prefill", "02_batch_reorder"]
    flags = [
        "--model", "x", "--max-prefill-chunk-size=64", "--mixed-batch", "separate",
        "--max_prefill_defer", "0", "--enforce-eager", "--nonsense", "1",
    ]  # fmt: skip
    everywhere = ["--model", "x", "--enforce-eager", "--nonsense", "1"]
    assert compare.flags_for(names[0], names, flags) == everywhere
    assert compare.flags_for(names[1], names, flags) == flags[:5] + flags[7:]
    assert compare.flags_for(names[2], names, flags) == flags[:3] + flags[5:]
    # Alone, a stage is told of everything, and refuses what it does not know.
    assert compare.flags_for(names[0], names[:1], flags) == flags


def of(workload: str, made_row: Result) -> Result:
    info = msgspec.structs.replace(made_row.workload, name=workload)
    return msgspec.structs.replace(made_row, workload=info)


CONTENDERS = [Contender("A"), Contender("B", ("--fast",)), Contender("C")]


def test_comparison_keeps_stages_that_fail() -> None:
    seen: list[tuple[str, int]] = []

    def run(contender: Contender, number: int, rows: Sequence[Result]) -> Attempt:
        assert len(rows) == sum(name != "B" for name, _ in seen) * 2
        seen.append((contender.name, number))
        name = contender.name
        if name == "B":
            return Attempt([], "out of memory")
        failed = "RuntimeError: half way" if name == "C" and number == 1 else None
        first = of("nano", row(name, 100 + number))
        second = of("shared_prefix", row(name, 200, error=failed))
        return Attempt([first, second], failed)

    merged = rounds.compare(CONTENDERS, ["nano", "shared_prefix"], 2, run)
    assert "".join(name for name, _ in seen) == "ABCCBA"
    assert [(m.workload.name, m.stage) for m in merged] == [
        (work, name) for work in ("nano", "shared_prefix") for name in "ABC"
    ]
    assert [len(m.runs) for m in merged] == [6, 0, 6] * 2
    # What never ran has no settings, and shows no others'.
    assert merged[1].config == {"dtype": "float32", "flags": "--fast"}
    # An error of one workload is not one of another that the same process ran.
    half_way = [None, "out of memory", "RuntimeError: half way"]
    assert [m.error for m in merged] == [None, "out of memory", None, *half_way]
    assert len(tables.tables(merged)) == 2


def test_a_workload_that_a_process_did_not_reach_says_why() -> None:
    def run(contender: Contender, number: int, rows: Sequence[Result]) -> Attempt:
        done = [of("nano", row(contender.name))]
        if contender.name == "A":
            return Attempt([*done, of("batch1", row("A"))])
        return Attempt(done, "no result after 9 s")

    merged = rounds.compare(CONTENDERS[:2], ["nano", "batch1"], 1, run)
    assert [m.error for m in merged] == [None, None, None, "no result after 9 s"]
    assert [len(m.runs) for m in merged] == [3, 3, 3, 0]


def test_a_wrong_flag_of_a_comparison_is_named() -> None:
    command = [sys.executable, "-m", "steps.00_baseline.bench", "--nonsense", "3"]
    assert call(command, timeout=60) == "Unrecognized options: --nonsense, 3"


def test_comparison_in_which_nothing_ran_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        rounds.compare([Contender("A")], ["nano"], 1, lambda c, n, s: Attempt([], "no such model"))


def test_a_stage_that_cannot_start_reports_its_last_words() -> None:
    contender = Contender("00_baseline", ("--model", "/nonexistent/model"))
    attempt = rounds.run_stage(contender, ["nano"], 0, timeout=120)
    assert attempt.rows == []
    assert attempt.problem is not None
    assert "/nonexistent/model" in attempt.problem


def test_rows_are_kept_as_they_come_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeouts: list[float] = []

    def run_stage(contender: Contender, workloads: Any, number: int, timeout: float) -> Attempt:
        timeouts.append(timeout)
        return Attempt([row(contender.name)])

    monkeypatch.setattr(rounds, "run_stage", run_stage)
    caplog.set_level("INFO")
    options = rounds.RunOptions(tmp_path, rounds=3, timeout=60, time_limit=100)
    processes = rounds.Processes(["nano"], options, count=6)
    processes.announce()
    assert "6 processes, each with nano; at most 2 min together" in caplog.text
    assert processes(Contender("A"), 0, []).problem is None
    processes.started -= 70
    assert processes(Contender("A"), 0, []).problem is None
    processes.started -= 31
    assert processes(Contender("A"), 0, []).problem == "the 100 s were over"
    assert [round(timeout, -1) for timeout in timeouts] == [60, 30]
    assert len(result.read_results(tmp_path / "runs.json")) == 2


@pytest.mark.parametrize(
    "flags, dummy",
    [
        (["--model", "qwen3-0.6b"], True),
        (["--model=qwen3-8b", "--enforce-eager"], True),
        (["--model", "qwen3-0.6b", "--load-format", "auto"], False),
        (["--model", "some/directory"], False),
        (["--enforce-eager"], False),
        ([], False),
    ],
)
def test_a_real_size_by_its_name_has_random_weights(flags: list[str], dummy: bool) -> None:
    added = ["--load-format", "dummy"] if dummy else []
    assert compare.with_weights(flags) == flags + added


def test_a_whole_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Contender] = []

    def run_stage(contender: Contender, workloads: Any, number: int, timeout: float) -> Attempt:
        started.append(contender)
        return Attempt([of(work, row(contender.name, 100)) for work in workloads])

    monkeypatch.setattr(rounds, "run_stage", run_stage)
    stages = ["--steps", "00_baseline", "01_chunked_prefill", "--output", str(tmp_path)]
    compare.main([*stages, "--model", "qwen3-0.6b", "--max-prefill-chunk-size", "64"])
    random = ("--model", "qwen3-0.6b")
    cut = ("--max-prefill-chunk-size", "64")
    expected = [
        Contender("00_baseline", (*random, "--load-format", "dummy")),
        Contender("01_chunked_prefill", (*random, *cut, "--load-format", "dummy")),
    ]
    assert started == [*expected, *reversed(expected)]
    merged = result.read_results(tmp_path / "results.json")
    default = ["nano", "decode_gap", "shared_prefix"]
    assert [row.workload.name for row in merged] == [name for name in default for _ in range(2)]
    assert len(result.read_results(tmp_path / "runs.json")) == 12
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "gaps_decode_gap.svg", "throughput_decode_gap.svg", "throughput_nano.svg",
        "throughput_shared_prefix.svg", "tradeoff_decode_gap.svg",
    ]  # fmt: skip
    assert "01_chunked_prefill" in (tmp_path / "results.md").read_text()
    assert "% of floor" in capsys.readouterr().out


# --- command line --------------------------------------------------------------------------------


def test_flags_of_benchmark_and_config_stand_side_by_side() -> None:
    options, config = cli.parse(
        EngineConfig,
        "bench",
        ["--workload", "batch8", "--json", "x.json", "--repeats", "5", "--no-warmup",
         "--max-model-len", "77", "--device", "cpu", "--enforce-eager"],
    )  # fmt: skip
    assert options == BenchOptions(("batch8",), Path("x.json"), repeats=5, warmup=False)
    assert (config.max_model_length, config.device, config.enforce_eager) == (77, "cpu", True)
    with pytest.raises(ValueError, match="num_kvcache_blocks"):
        cli.parse(EngineConfig, "bench", ["--num-kvcache-blocks", "0"])
    with pytest.raises(SystemExit):
        cli.parse(EngineConfig, "bench", ["--no-such-flag", "1"])


@pytest.mark.parametrize(
    "args, expected",
    [
        ([], 128),  # what the workload wants
        (["--max-prefill-tokens-per-step", "32"], 32),
        (["--max-prefill-tokens-per-step=8192"], 8192),  # the default, but asked for
        (["--workload", "nano"], 8192),
    ],
)
def test_a_workload_s_options_give_way_to_flags(
    fake_stage: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, args: list[str], expected: int
) -> None:
    config_class = load("01_chunked_prefill").Config
    monkeypatch.setattr(cli.load("01"), "Config", config_class)
    flags = ["--workload", "decode_gap", "--repeats", "1", "--no-warmup", "--device", "cpu"]
    options, config = cli.parse(config_class, "bench", [*flags, *args])
    (row,) = cli.measure("01", options, config)
    assert row.config["max_prefill_tokens_per_step"] == expected


@pytest.fixture
def fake_stage(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The benchmark runs on FakeEngine, on its clock, with a shape and rates made up."""
    engines: list[FakeEngine] = []

    def start(config: EngineConfig) -> FakeEngine:
        engines.append(FakeEngine(config))
        return engines[-1]

    shape = ModelConfig(
        "Qwen3ForCausalLM", 4096, 64, 128, 2, 4, 2, 16, 1e-6, 1e4, 1000, True, "float32", ()
    )
    files = SimpleNamespace(find=lambda model, load_format: SimpleNamespace(config=shape))
    stage = SimpleNamespace(Config=EngineConfig, Engine=start)
    monkeypatch.setattr(cli, "load", lambda name: stage)
    monkeypatch.setattr(cli, "ModelFiles", files)
    monkeypatch.setattr(cli, "measure_rates", lambda *args: Rates(1e12, 1e13))
    monkeypatch.setattr(cli, "Driver", lambda engine: Driver(engine, engine.clock, engine.sleep))
    return engines


def test_benchmark_warms_up_measures_and_writes(
    fake_stage: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as exit_info:
        cli.main("00_baseline", ["--json", str(path), "--repeats", "2", "--device", "cpu"])
    assert exit_info.value.code == 0
    (engine,) = fake_stage
    assert engine.closed
    prefixes = [request_id.rsplit("-", 1)[0] for request_id, _ in engine.seen]
    assert list(dict.fromkeys(prefixes)) == ["nano--1", "nano-0", "nano-1"]
    (written,) = result.read_results(path)
    assert written.workload.scale == "cpu"
    assert written.workload.sha256 == build_workload("nano", "cpu", 4096).sha256
    assert [run.repeat for run in written.runs] == [0, 1]
    assert written.config["kvcache_block_size"] == 16
    assert written.config["tensor_parallel_size"] == 1
    assert written.floor is not None
    assert written.percent_of_floor is not None
    assert 0 < written.percent_of_floor < 100
    printed = capsys.readouterr().out
    assert "% of floor" in printed
    assert "tokens/s" in printed


def test_workloads_that_want_the_same_options_share_an_engine(
    fake_stage: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class = load("01_chunked_prefill").Config
    monkeypatch.setattr(cli.load("01"), "Config", config_class)
    path = tmp_path / "out.json"
    flags = ["--workload", "nano", "decode_gap", "shared_prefix", "--repeats", "1", "--no-warmup"]
    with pytest.raises(SystemExit) as exit_info:
        cli.main("01_chunked_prefill", [*flags, "--json", str(path), "--device", "cpu"])
    assert exit_info.value.code == 0
    assert [engine.closed for engine in fake_stage] == [True, True]
    written = result.read_results(path)
    # As each engine ends: nobody has to wait for all to see the first.
    assert [row.workload.name for row in written] == ["nano", "shared_prefix", "decode_gap"]
    assert [row.config["max_prefill_tokens_per_step"] for row in written] == [8192, 8192, 128]
    assert all(row.runs[0].failed == 0 for row in written)


def test_a_workload_after_one_that_broke_has_a_new_engine(
    fake_stage: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = FakeEngine.step

    def explode_once(self: FakeEngine) -> list[StepOutput]:
        if len(fake_stage) == 1:
            raise RuntimeError("no progress is possible")
        return step(self)

    monkeypatch.setattr(FakeEngine, "step", explode_once)
    flags = ["--workload", "nano", "shared_prefix", "--repeats", "1", "--device", "cpu"]
    options, config = cli.parse(EngineConfig, "bench", flags)
    rows = list(cli.measure("00", options, config))
    assert [row.error for row in rows] == ["RuntimeError: no progress is possible", None]
    assert len(rows[1].runs) == 1
    assert [engine.closed for engine in fake_stage] == [True, True]


def test_benchmark_that_breaks_leaves_a_row(
    fake_stage: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: FakeEngine) -> list[StepOutput]:
        raise RuntimeError("no progress is possible")

    monkeypatch.setattr(FakeEngine, "step", explode)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as exit_info:
        cli.main("00_baseline", ["--json", str(path), "--device", "cpu"])
    assert exit_info.value.code == 1
    (written,) = result.read_results(path)
    assert written.error == "RuntimeError: no progress is possible"
    assert written.runs == []
    assert fake_stage[0].closed


def test_parallel_sizes_count_only_when_the_engine_confirms_them() -> None:
    config = EngineConfig(tensor_parallel_size=2)
    assert cli.effective_config(config, {})["tensor_parallel_size"] == 1
    assert cli.effective_config(config, {"tensor_parallel_size": 2})["tensor_parallel_size"] == 2


@pytest.mark.slow
def test_stage_measures_the_bundled_model(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "steps.00_baseline.bench", "--workload", "batch1"]
    flags = ["--repeats", "1", "--json", str(path), "--device", "cpu"]
    subprocess.run([*command, *flags], check=True, cwd=result.ROOT, timeout=120)
    (written,) = result.read_results(path)
    assert written.error is None
    assert written.runs[0].failed == 0
    assert written.percent_of_floor is not None


# --- GPUs ----------------------------------------------------------------------------------------


class FakeNvml:
    """Three GPUs, of which index 0 is nobody CUDA shows."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.uuids = ["GPU-a", "GPU-b", "GPU-c"]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise RuntimeError("not found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=1000 * handle)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=10 * handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 100_000 * handle


def test_gpus_are_found_by_uuid_not_by_index() -> None:
    # CUDA_VISIBLE_DEVICES=2,1: CUDA's first device is NVML's last.
    monitor = gpu.GpuMonitor(FakeNvml(), ["GPU-c", "GPU-b", "MIG-x"], interval=0.01)
    with monitor:
        pass
    first, second = monitor.use()
    assert (first.uuid, first.memory_peak_bytes) == ("GPU-c", 2000)
    assert (first.utilization_percent, first.power_watts) == (20, 200)
    assert (second.uuid, second.memory_peak_bytes) == ("GPU-b", 1000)


def test_without_nvml_there_is_no_gpu_use() -> None:
    monitor = gpu.GpuMonitor(None, ["GPU-a"])
    with monitor:
        pass
    assert monitor.use() == []
    assert gpu.hardware("cpu").gpus == []


def test_overlapping_kernels_keep_the_gpu_busy_once() -> None:
    intervals = [(5, 7, "late"), (0, 3, "first"), (1, 2, "inside"), (2, 4, "waits")]
    expected = {"first": 3, "inside": 0, "waits": 1, "late": 2}
    assert decode_profile.shares(intervals) == expected
    assert decode_profile.shares([]) == {}


def test_a_decode_step_reads_at_least_all_weights_and_all_keys() -> None:
    model = real_model_config("qwen3-0.6b")
    floors = decode_profile.floor_bytes(model, rows=8, context=512)
    cost = ModelCost.of(model, 2)
    assert floors["linear"] > cost.weight_bytes
    assert floors["attention"] > 8 * 512 * cost.kv_bytes
    assert floors.keys() == {*decode_profile.PARTS, decode_profile.OTHER}
    assert decode_profile.part_of("_paged_decode_attention_kernel") == "attention"
    assert decode_profile.part_of("nvjet_sm90_tst_64x8_64x16") == "linear"
    assert decode_profile.part_of("Memcpy HtoD") == decode_profile.OTHER


# --- two files -----------------------------------------------------------------------------------


def any_rows(*rows: Result) -> list[diff.AnyRow]:
    return msgspec.convert(msgspec.to_builtins(list(rows)), list[diff.AnyRow], strict=False)


def test_files_are_compared_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    old = row("00_a", 50, created="2026-01-01")
    result.append_results(before, [old, row("00_a", 100), row("01_b", 100)])
    result.append_results(after, [row("00_a", 150), row("01_b", 101), row("02_c", 10)])
    assert diff.main(before, after) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "nano cpu" in line]
    # Runs are at 0.9, 1 and 1.2 times a row's median.
    assert "1.500 (1.125-2.000) *" in lines[0]
    assert "1.010 (0.758-1.347) " in lines[1]
    assert "*" not in lines[1]
    assert "only in the second" in lines[2]


def test_rows_that_differ_in_settings_have_their_own_counterparts() -> None:
    def at(speed: float, budget: int) -> Result:
        return row("01_b", speed, config={"max_prefill_tokens_per_step": budget})

    found = diff.pairs(any_rows(at(100, 128), at(200, 512)), any_rows(at(110, 128), at(100, 512)))
    ratios = [
        diff.ratio(pair.first, pair.second, "tokens_per_second")[:5]
        for pair in found
        if pair.first is not None and pair.second is not None
    ]
    assert ratios == ["1.100", "0.500"]
    # One row each: changed settings may be just what is compared.
    (pair,) = diff.pairs(any_rows(at(100, 128)), any_rows(at(110, 512)))
    assert pair.first is not None
    assert pair.second is not None


def test_a_single_run_has_no_range() -> None:
    once = row("00_a", 110)
    once = msgspec.structs.replace(once, runs=once.runs[:1])
    assert diff.ratio(*any_rows(row("00_a", 100), once), "tokens_per_second") == "1.100"
    assert diff.ratio(*any_rows(row("00_a", 100), once), "nothing") == "-"


def test_different_work_is_not_compared(tmp_path: Path) -> None:
    changed = row("00_a", workload=WorkloadInfo("nano", "cpu", 4096, "cd" * 32))
    with pytest.raises(ValueError, match="sha256 abababababab and cdcdcdcdcdcd"):
        diff.pairs(any_rows(row("00_a")), any_rows(changed))
    with pytest.raises(ValueError, match="no row"):
        diff.pairs(any_rows(row("00_a")), any_rows(row("01_b")))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, made_row in zip(paths, (row("00_a"), changed), strict=True):
        result.append_results(path, [made_row])
    command = [sys.executable, "-m", "bench.diff", *map(str, paths)]
    done = subprocess.run(command, cwd=result.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not the same work" in done.stderr.splitlines()[-1]


# --- sweeps and plots ----------------------------------------------------------------------------

CPU, GPU = sweep.Place(False, ("torch",)), sweep.Place(True, ("triton", "flash_attn"))


@pytest.mark.parametrize("name", list(sweep.SWEEPS))
@pytest.mark.parametrize("place", [CPU, GPU])
def test_every_point_of_a_sweep_is_a_configuration(name: Any, place: sweep.Place) -> None:
    points, workloads = sweep.SWEEPS[name](place, ())
    assert set(workloads) <= set(WORKLOADS)
    configs = []
    for point in points:
        config_class = load(point.name).Config
        _, config = cli.parse(config_class, "bench", ["--workload", *workloads, *point.flags])
        configs.append((point.name, config))
    assert len(set(configs)) == len(points) > 1


def test_a_sweep_runs_its_points_in_alternating_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run_stage(contender: Contender, workloads: Any, number: int, timeout: float) -> Attempt:
        started.append(contender.label)
        assert timeout == 600
        tokens = int(contender.flags[1])
        config = {"max_prefill_tokens_per_step": tokens}
        return Attempt([of(w, row(contender.name, tokens, config=config)) for w in workloads])

    monkeypatch.setattr(rounds, "run_stage", run_stage)
    flags = ["--values", "64", "128", "--output", str(tmp_path), "--device", "cpu"]
    sweep.main(["budget", *flags])
    name = "01_chunked_prefill --max-prefill-tokens-per-step"
    low, high = f"{name} 64 --device cpu", f"{name} 128 --device cpu"
    assert started == [low, high, high, low]
    written = result.read_results(tmp_path / "budget" / "results.json")
    assert [row.medians["tokens_per_second"] for row in written] == [64, 128]
    assert [len(row.runs) for row in written] == [6, 6]
    picture = (tmp_path / "budget" / "tradeoff_decode_gap.svg").read_text()
    assert ">prefill 64<" in picture
    assert ">prefill 128<" in picture
    with pytest.raises(ValueError, match="regimes"):
        sweep.SweepOptions(name="regimes", values=(1,))


def test_a_directory_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "compare", lambda *args: pytest.fail("this is the work"))
    (tmp_path / "file").touch()
    flags = ["--output", str(tmp_path / "file" / "out"), "--device", "cpu"]
    for main in (lambda: compare.main(flags), lambda: sweep.main(["budget", *flags])):
        with pytest.raises(ValueError, match=r"--output: .* cannot be written"):
            main()


@pytest.mark.slow
def test_a_sweep_measures_the_bundled_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.sweep", "mixed-batch", "--workload", "batch1"]
    flags = ["--rounds", "1", "--device", "cpu", "--output", str(tmp_path)]
    subprocess.run([*command, *flags], check=True, cwd=result.ROOT, timeout=200)
    rows = result.read_results(tmp_path / "mixed-batch" / "results.json")
    assert [row.config["mixed_batch"] for row in rows] == ["unified", "separate"]
    assert [row.error for row in rows] == [None, None]
    assert all(row.runs[0].failed == 0 for row in rows)


def test_rows_are_labelled_by_what_tells_them_apart() -> None:
    def made_row(stage: str, **config: Any) -> dict[str, Any]:
        return {"stage": stage, "config": {"mixed_batch": "unified", **config}}

    rows = [made_row("a"), made_row("b", max_prefill_defer=0), made_row("b", max_prefill_defer=3)]
    assert plots.labels(rows) == ["a", "b, defer 0", "b, defer 3"]


def test_axes_end_at_round_numbers() -> None:
    tops = [plots._round_up(value) for value in (0.3, 4, 17.6, 219, 23_390)]
    assert tops == pytest.approx([0.3, 4, 20, 300, 30_000])


def test_pictures_leave_out_rows_without_their_numbers() -> None:
    rows = [row("00_a"), row("01_b"), row("02_c", runs=[], medians={}, spread={}, error="broke")]
    plain: list[dict[str, Any]] = msgspec.to_builtins(rows)
    del plain[1]["medians"]["gap_ms.p99"]
    for kind, shown in (("throughput", "00_a 01_b"), ("gaps", "00_a")):
        picture = plots.KINDS[kind](plain)
        assert picture is not None
        named = [name for name in ("00_a", "01_b", "02_c") if name in picture]
        assert named == shown.split()
    assert plots.tradeoff(plain) is None
    assert plots.throughput(plain[2:]) is plots.gaps(plain[2:]) is plots.goodput([]) is None


def test_a_result_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main("00_baseline", ["--json", str(tmp_path / "file" / "x.json")])
    assert ended.value.code == 2
    assert "error: --json: " in (said := capsys.readouterr().err)
    assert "x.json cannot be written" in said


@pytest.mark.parametrize("name", ["channels", "decode_profile", "kernels", "small_batch"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x.json"
    module = importlib.import_module(f"bench.{name}")
    with pytest.raises(ValueError, match=r"--json: .*x\.json cannot be written"):
        module.main(module.Options(json=path) if name == "decode_profile" else path)
