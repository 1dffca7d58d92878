"""Drives any stage's engine through a workload and measures what comes out.

The engine is called directly, `add_request` and `step`, with no server in between. All times are
host clock at the return of `step`, which is when a caller can first see a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from bench.result import Percentiles, RunMetrics
from bench.workloads import Request, Workload
from shared import SamplingParams
from shared.outputs import StepOutput

# Steps after the last steady decode has started and before the window opens.
SETTLE_STEPS = 8
# After the window closes, prompts that came late in it get this share of it to be served.
DRAIN_SHARE = 1.0
MAX_FAILURE_TEXTS = 5


class BenchEngine(Protocol):
    """What a driver needs of an engine; every stage has it."""

    @property
    def max_model_length(self) -> int: ...
    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def has_unfinished_requests(self) -> bool: ...


@dataclass
class Observed:
    """What was seen of one request."""

    request: Request
    scheduled: float
    """When it was due (host clock, s); it may have been added later, after a long step."""
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False
    failure: str | None = None

    @property
    def steady(self) -> bool:
        return self.request.max_tokens is None

    @property
    def complete(self) -> bool:
        return self.finished and self.failure is None

    def ttft(self) -> float:
        """Seconds from when it was due to its first token, its wait in the queue included."""
        return self.token_times[0] - self.scheduled

    def tpot(self) -> float | None:
        """Seconds per token after the first; None when there was only one."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a workload left: every latency in milliseconds, not yet summarised."""

    seconds: float
    output_tokens: int
    """Of requests that did not fail; in a workload with a window, those generated within it."""
    failures: list[str] = []
    """A message for each request that failed. It leaves no other trace in the numbers."""
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    gap_ms: list[float] = []
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    wave_prefix_hit_tokens: list[int] = []

    def metrics(self, workload: Workload) -> RunMetrics:
        return RunMetrics(
            repeat=workload.repeat,
            sha256=workload.sha256,
            seconds=self.seconds,
            requests=len(workload.requests),
            failed=len(self.failures),
            failures=self.failures[:MAX_FAILURE_TEXTS],
            output_tokens=self.output_tokens,
            tokens_per_second=self.output_tokens / self.seconds if self.seconds > 0 else 0.0,
            ttft_ms=percentiles(self.ttft_ms),
            tpot_ms=percentiles(self.tpot_ms),
            gap_ms=percentiles(self.gap_ms),
            prompt_tokens=self.prompt_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            wave_prefix_hit_tokens=self.wave_prefix_hit_tokens,
        )


class Driver:
    """Feeds requests to an engine and notes when their tokens appear."""

    def __init__(
        self,
        engine: BenchEngine,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.sleep = sleep
        self.observed: dict[str, Observed] = {}

    def run(self, workload: Workload) -> RunMetrics:
        """Runs the whole workload once. Errors of `step` itself are not caught."""
        return self.samples(workload).metrics(workload)

    def samples(self, workload: Workload) -> Samples:
        """The same, unsummarised."""
        self.observed = {}
        if workload.window is None:
            start = self._run_waves(workload)
            return _samples(self.observed.values(), self.clock() - start, None)
        start = self._run_window(workload, workload.window)
        return _samples(self.observed.values(), workload.window, start)

    def _run_waves(self, workload: Workload) -> float:
        start = self.clock()
        for wave in sorted({request.wave for request in workload.requests}):
            now = self.clock()
            for index, request in enumerate(workload.requests):
                if request.wave == wave:
                    self._add(workload, index, now)
            while self.engine.has_unfinished_requests():
                self._step()
        return start

    def _run_window(self, workload: Workload, window: float) -> float:
        timed = [(r.arrival, i) for i, r in enumerate(workload.requests) if r.arrival is not None]
        for index, request in enumerate(workload.requests):
            if request.arrival is None:
                self._add(workload, index, self.clock())
        steady = list(self.observed.values())
        while self._waiting(o for o in steady if not o.token_times):
            self._step()
        for _ in range(SETTLE_STEPS):
            self._step()

        start = self.clock()
        pending = sorted(timed)
        while (now := self.clock()) < start + window:
            while pending and start + pending[0][0] <= now:
                arrival, index = pending.pop(0)
                # Due when the schedule says so: an engine that is late in a step pays for it.
                self._add(workload, index, start + arrival)
            if self.engine.has_unfinished_requests():
                self._step()
            else:
                due = start + (pending[0][0] if pending else window)
                self.sleep(max(0.0, min(due, start + window) - now))
        for arrival, index in pending:  # due within the last step of the window
            self._add(workload, index, start + arrival)

        deadline = self.clock() + window * DRAIN_SHARE
        late = [o for o in self.observed.values() if not o.steady]
        while self._waiting(late) and self.clock() < deadline:
            self._step()
        self._close_open_gaps(steady)
        for request_id, observed in self.observed.items():
            if not observed.finished:
                self.engine.abort_request(request_id)
                if not observed.steady:
                    observed.failure = "not served by the end of the drain"
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return start

    def _waiting(self, observed: Iterable[Observed]) -> bool:
        return self.engine.has_unfinished_requests() and any(not o.finished for o in observed)

    def _close_open_gaps(self, steady: Iterable[Observed]) -> None:
        # A decode that is starved to the very end would otherwise show no gap at all.
        now = self.clock()
        for observed in steady:
            if observed.token_times and not observed.finished:
                observed.token_times.append(now)

    def _add(self, workload: Workload, index: int, scheduled: float) -> None:
        request = workload.requests[index]
        request_id = f"{workload.name}-{workload.repeat}-{index}"
        observed = self.observed[request_id] = Observed(request, scheduled)
        params = request.sampling_params(self.engine.max_model_length)
        try:
            self.engine.add_request(request_id, request.prompt, params)
        except ValueError as error:
            observed.finished, observed.failure = True, str(error)

    def _step(self) -> None:
        outputs = self.engine.step()
        now = self.clock()
        find = self.observed.get
        for output in outputs:
            if (observed := find(output.request_id)) is None:  # a leftover of an earlier run
                continue
            times = observed.token_times
            if output.new_token_ids and not times:
                observed.cached_tokens = output.num_cached_tokens
            for _ in output.new_token_ids:
                times.append(now)
            if output.finish_reason is None and output.error is None:
                continue
            if output.error is not None or output.finish_reason == "abort":
                observed.finished = True
                observed.failure = output.error or "aborted by the engine"
            else:
                observed.finished = True
                wanted, got = observed.request.max_tokens, len(observed.token_times)
                if wanted is not None and got != wanted:
                    observed.failure = f"ended after {got} of {wanted} tokens"


def _samples(observed: Iterable[Observed], seconds: float, window_start: float | None) -> Samples:
    """Failed requests are counted and leave no other trace in the numbers."""
    everything = list(observed)
    for o in everything:
        if not o.finished and not o.steady and o.failure is None:
            o.failure = "the engine forgot it"
    steady = [o for o in everything if o.steady and o.failure is None]
    ended = [o for o in everything if o.complete and not o.steady]
    failures = [o.failure for o in everything if o.failure is not None]

    if window_start is None:
        tokens = sum(len(o.token_times) for o in ended)
        gaps = _gaps(ended, -np.inf, np.inf)
    else:
        end = window_start + seconds
        # The last time of a steady decode that was cut off closes its gap; it is no token.
        times = [o.token_times if o.finished else o.token_times[:-1] for o in steady]
        times += [o.token_times for o in ended]
        tokens = sum(window_start < t <= end for series in times for t in series)
        gaps = _gaps(steady, window_start, end)
    waves = sorted({o.request.wave for o in everything})
    return Samples(
        seconds=seconds,
        output_tokens=tokens,
        failures=failures,
        ttft_ms=[1e3 * o.ttft() for o in ended],
        tpot_ms=[1e3 * t for o in ended if (t := o.tpot()) is not None],
        gap_ms=(1e3 * gaps).tolist(),
        prompt_tokens=sum(len(o.request.prompt) for o in ended),
        prefix_hit_tokens=sum(o.cached_tokens for o in ended),
        wave_prefix_hit_tokens=[
            sum(o.cached_tokens for o in ended if o.request.wave == wave) for wave in waves
        ],
    )


def _gaps(observed: Sequence[Observed], start: float, end: float) -> np.ndarray:
    """Seconds between neighbouring tokens of a request, for gaps that overlap (start, end)."""
    parts = []
    for o in observed:
        times = np.asarray(o.token_times)
        parts.append(np.diff(times)[(times[1:] > start) & (times[:-1] < end)])
    return np.concatenate(parts) if parts else np.empty(0)


def percentiles(values: Sequence[float] | np.ndarray) -> Percentiles | None:
    """None without values: nothing was measured, which is not zero."""
    if len(values) == 0:
        return None
    p50, p95, p99 = (float(p) for p in np.percentile(values, (50, 95, 99)))
    return Percentiles(count=len(values), p50=p50, p95=p95, p99=p99, max=float(np.max(values)))
