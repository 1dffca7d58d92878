"""Prometheus metrics, under vLLM's names, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.engine.stats import EngineStats

from .async_engine import AsyncEngine
from .generation import Generation

# vLLM's, seconds.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

LABELS = ("model_name",)
ENGINE_LABELS = (*LABELS, "engine")

Values = tuple[tuple[str, str, Callable[[EngineStats], float]], ...]

GAUGES: Values = (
    ("num_requests_running", "Sequences that have a slot.", lambda s: s.running),
    ("num_requests_waiting", "Sequences that wait for one.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda s: s.used_blocks / s.num_blocks,
    ),
)
COUNTERS: Values = (
    ("num_preemptions", "Sequences that had to start again.", lambda s: s.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prefix_queried_tokens),
    ("prefix_cache_hits", "Prompt tokens found.", lambda s: s.prefix_hit_tokens),
    ("prompt_tokens", "Prompt tokens computed.", lambda s: s.counters.prefill_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.counters.generation_tokens),
)


class ServerMetrics:
    """Of one server: its registry holds nothing of another one in the same process."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From request to first token.", TTFT_BUCKETS
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            TPOT_BUCKETS,
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "From request to last token.", LATENCY_BUCKETS
        )
        self._model_name = model_name
        self._success = Counter(
            "vllm:request_success",
            "Completions that ended, by reason; abort: failed, or the client left.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort"):
            self._success.labels(model_name, reason)

    def observe_first(self, ttft: float) -> None:
        """A request's first token has come; seconds. Whatever follows may take minutes."""
        self._ttft.observe(ttft)

    def observe(self, generation: Generation) -> None:
        """Count a request that has ended, however it did."""
        for choice in generation.choices:
            reason = choice.processor.finish_reason or "abort"
            self._success.labels(self._model_name, reason).inc()
        times = generation.times()
        if generation.num_unfinished:
            return  # what was cut short says nothing about how long requests take
        if times["tpot"] is not None:
            self._tpot.observe(times["tpot"])
        self._latency.observe(times["total_time"])


class _EngineCollector(Collector):
    """What each engine counts itself, as of its newest statistics."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        replicas = dict(enumerate(self._engine.replicas))
        is_up = {number: replica.is_alive for number, replica in replicas.items()}
        restarts = {number: replica.num_restarts for number, replica in replicas.items()}
        yield self._gauge("baby_vllm:engine_up", "Is the engine running? 1 or 0.", is_up)
        yield self._counter("baby_vllm:engine_restarts", "Starts after an end.", restarts)
        # What is gone holds nothing and counts nothing; when it is back it starts from nothing.
        stats = {number: replicas[number].stats for number in replicas if is_up[number]}
        for name, text, value in GAUGES:
            yield self._gauge(f"vllm:{name}", text, {n: value(s) for n, s in stats.items()})
        for name, text, value in COUNTERS:
            yield self._counter(f"vllm:{name}", text, {n: value(s) for n, s in stats.items()})

    def _gauge(self, name: str, text: str, values: Mapping[int, float]) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=ENGINE_LABELS), values)

    def _counter(self, name: str, text: str, values: Mapping[int, float]) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=ENGINE_LABELS), values)

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[int, float]
    ) -> Metric:
        for number, value in values.items():
            family.add_metric((self._model_name, str(number)), value)
        return family
