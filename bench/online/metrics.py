"""From what was seen to numbers. Failed requests are counted, with reasons, and are in no other.

TTFT        first piece - start, twice: from sending, and from scheduled arrival (whatever the
            request waited in the client is in it). Latency: the same to the last byte.
TPOT        (last piece - first piece) / tokens after the first piece; prefill excluded. One token
            comes with the first piece, unless the server says how many.
gaps        between neighbouring pieces of a request, one per piece. A piece of several tokens makes
            one gap and not also zeros: `tokens_per_piece` says how many a gap stands for.
throughput  output tokens of complete requests / time from the first arrival to the last answer,
            failures included. With open-loop arrivals also of the time while requests still came.
goodput     requests within the SLO, by TTFT from scheduled arrival; those that failed are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from bench.online.driver import Driven
from bench.online.observe import Observation
from bench.online.options import Measure
from bench.online.plan import Job, Plan

MAX_REASONS = 10
OTHER_REASONS = "other reasons"
NUMBER = re.compile(r"\d+")
BIN_SECONDS = 1.0


class Distribution(msgspec.Struct, frozen=True):
    count: int
    avg: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Latencies(msgspec.Struct, frozen=True):
    """Of complete requests, in milliseconds; None where nothing was measured."""

    ttft_ms: Distribution | None
    """From sending."""
    ttft_scheduled_ms: Distribution | None
    """From scheduled arrival."""
    tpot_ms: Distribution | None
    gap_ms: Distribution | None
    latency_ms: Distribution | None
    """From sending to the end of the answer."""
    latency_scheduled_ms: Distribution | None
    queue_ms: Distribution | None
    """From scheduled arrival to sending: for a free client, and the client's own lateness."""


class TypeMetrics(msgspec.Struct, frozen=True):
    """The requests of one type."""

    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    latencies: Latencies


class Goodput(msgspec.Struct, frozen=True):
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    requests: int
    """Within the limits."""
    share: float
    """Of all requests, failed ones too."""
    requests_per_second: float
    tokens_per_second: float


class ClientMetrics(msgspec.Struct, frozen=True):
    """Whether the client kept up."""

    processes: int
    busiest_percent: float
    """CPU of the process that was busiest, as a share of one core, over the whole run."""
    pieces_per_second: float
    peak_pieces_per_second: float
    """In the busiest second."""


class Record(msgspec.Struct, frozen=True):
    """One request. Times in seconds after the window opened."""

    type: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    token_source: str
    scheduled: float
    sent: float
    ended: float
    arrivals: list[float]
    counts: list[int]
    counts_are_tokens: bool
    cached_tokens: int | None
    server_times: dict[str, object] | None
    failure: str | None


class OnlineRun(msgspec.Struct, frozen=True):
    """One repeat."""

    repeat: int
    sha256: str
    """Of the requests: lengths, prompts, arrival times."""
    seconds: float
    arrival_seconds: float | None
    """From the first scheduled arrival to the last, in an open loop."""
    offered_rps: float | None
    """Requests that arrived, over that time."""
    requests: int
    completed: int
    failed: int
    failures: dict[str, int]
    """Reason: how often."""
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    arriving_tokens_per_second: float | None
    """While requests still came: without the end, when the load is gone but not all answers."""
    goodput: Goodput | None
    latencies: Latencies
    by_type: dict[str, TypeMetrics]
    pieces: int
    tokens_per_piece: float | None
    largest_piece: int | None
    """In tokens, or events where the server does not count."""
    token_sources: dict[str, int]
    """Where the number of output tokens of complete requests is from; see `observe.Observation`."""
    cached_prompt_tokens: int | None
    """As reported by the server; None if it reports none."""
    client: ClientMetrics
    server: dict[str, float] = {}
    """What the counters of a server of ours have gained."""
    records: list[Record] = []


class _Request(msgspec.Struct):
    job: Job
    seen: Observation
    scheduled: float


def distribution(values: Sequence[float] | np.ndarray) -> Distribution | None:
    """None without values: nothing was measured, which is not zero."""
    if len(values) == 0:
        return None
    p50, p90, p95, p99 = (float(p) for p in np.percentile(values, (50, 90, 95, 99)))
    return Distribution(
        len(values), float(np.mean(values)), p50, p90, p95, p99, float(np.max(values))
    )


def tpot(seen: Observation) -> float | None:
    """Seconds; None where no token came after the first piece, or there were no pieces."""
    if len(seen.arrivals) < 2:
        return None
    first = seen.counts[0] if seen.counts_are_tokens else 1
    later = seen.output_tokens - first
    return (seen.arrivals[-1] - seen.arrivals[0]) / later if later > 0 else None


def summarise_run(
    plan: Plan,
    driven: Driven,
    repeat: int,
    measure: Measure,
    server: dict[str, float] | None = None,
) -> OnlineRun:
    requests = [
        _Request(*each) for each in zip(plan.jobs, driven.seen, driven.scheduled, strict=True)
    ]
    complete = [r for r in requests if r.seen.failure is None]
    seconds = max(r.seen.ended for r in requests) - driven.start
    output_tokens = sum(r.seen.output_tokens for r in complete)
    pieces = sum(len(r.seen.arrivals) for r in complete)
    cached = [r.seen.cached_tokens for r in complete if r.seen.cached_tokens is not None]
    arriving = plan.arrival_seconds
    return OnlineRun(
        repeat=repeat,
        sha256=plan.sha256,
        seconds=seconds,
        arrival_seconds=arriving,
        offered_rps=(len(requests) - 1) / arriving if arriving else None,
        requests=len(requests),
        completed=len(complete),
        failed=len(requests) - len(complete),
        failures=_reasons(r.seen.failure for r in requests),
        prompt_tokens=sum(len(r.job.prompt) for r in complete),
        output_tokens=output_tokens,
        requests_per_second=len(complete) / seconds,
        tokens_per_second=output_tokens / seconds,
        arriving_tokens_per_second=_while_arriving(complete, driven.start, arriving),
        goodput=_goodput(requests, seconds, measure),
        latencies=_latencies(complete),
        by_type=_by_type(requests),
        pieces=pieces,
        tokens_per_piece=sum(r.seen.output_tokens for r in complete if r.seen.arrivals) / pieces
        if pieces
        else None,
        largest_piece=max((max(r.seen.counts) for r in complete if r.seen.counts), default=None),
        token_sources=dict(Counter(r.seen.token_source for r in complete)),
        cached_prompt_tokens=sum(cached) if cached else None,
        client=_client(requests, driven, seconds),
        server=server or {},
        records=[_record(r, driven.start) for r in requests] if measure.profile else [],
    )


def _reasons(failures: Iterable[str | None]) -> dict[str, int]:
    """The first text of each kind; texts that differ in numbers alone are of one kind."""
    first: dict[tuple[str, str], str] = {}
    counts: Counter[str] = Counter()
    for failure in failures:
        if failure is not None:
            head, _, rest = failure.partition(": ")  # in the head, numbers matter: HTTP 404
            counts[first.setdefault((head, NUMBER.sub("#", rest)), failure)] += 1
    counted = counts.most_common()
    reasons = dict(counted[:MAX_REASONS])
    if rest_count := sum(count for _, count in counted[MAX_REASONS:]):
        reasons[OTHER_REASONS] = rest_count
    return reasons


def _latencies(complete: Sequence[_Request]) -> Latencies:
    streamed = [r for r in complete if r.seen.arrivals]
    gaps = [np.diff(r.seen.arrivals) for r in streamed]
    return Latencies(
        ttft_ms=_milliseconds(r.seen.arrivals[0] - r.seen.sent for r in streamed),
        ttft_scheduled_ms=_milliseconds(r.seen.arrivals[0] - r.scheduled for r in streamed),
        tpot_ms=_milliseconds(t for r in streamed if (t := tpot(r.seen)) is not None),
        gap_ms=distribution(1e3 * np.concatenate(gaps)) if gaps else None,
        latency_ms=_milliseconds(r.seen.ended - r.seen.sent for r in complete),
        latency_scheduled_ms=_milliseconds(r.seen.ended - r.scheduled for r in complete),
        queue_ms=_milliseconds(r.seen.sent - r.scheduled for r in complete),
    )


def _milliseconds(values: Iterable[float]) -> Distribution | None:
    return distribution([1e3 * value for value in values])


def _by_type(requests: Sequence[_Request]) -> dict[str, TypeMetrics]:
    found: dict[str, TypeMetrics] = {}
    for name in sorted({r.job.type for r in requests}, reverse=True):  # short, long
        own = [r for r in requests if r.job.type == name]
        complete = [r for r in own if r.seen.failure is None]
        found[name] = TypeMetrics(
            requests=len(own),
            failed=len(own) - len(complete),
            prompt_tokens=sum(len(r.job.prompt) for r in complete),
            output_tokens=sum(r.seen.output_tokens for r in complete),
            latencies=_latencies(complete),
        )
    return found


def _goodput(requests: Sequence[_Request], seconds: float, measure: Measure) -> Goodput | None:
    """None without an SLO, or without streams, which alone can be held to it."""
    ttft_limit, tpot_limit = measure.slo_ttft_ms, measure.slo_tpot_ms
    complete = [r for r in requests if r.seen.failure is None]
    if (ttft_limit is None and tpot_limit is None) or any(not r.seen.arrivals for r in complete):
        return None
    good = [
        r
        for r in complete
        if (ttft_limit is None or 1e3 * (r.seen.arrivals[0] - r.scheduled) <= ttft_limit)
        and (tpot_limit is None or 1e3 * (tpot(r.seen) or 0.0) <= tpot_limit)
    ]
    return Goodput(
        slo_ttft_ms=ttft_limit,
        slo_tpot_ms=tpot_limit,
        requests=len(good),
        share=len(good) / len(requests),
        requests_per_second=len(good) / seconds,
        tokens_per_second=sum(r.seen.output_tokens for r in good) / seconds,
    )


def _while_arriving(
    complete: Sequence[_Request], start: float, seconds: float | None
) -> float | None:
    """Output tokens per second until the last request arrived. Where the server does not count,
    tokens are taken to be spread evenly over a request's pieces."""
    streamed = [r.seen for r in complete if r.seen.arrivals]
    if not seconds or not streamed:
        return None
    tokens = 0.0
    for seen in streamed:
        is_early = np.asarray(seen.arrivals) <= start + seconds
        counts = np.asarray(seen.counts)
        tokens += seen.output_tokens * float(counts[is_early].sum() / counts.sum())
    return tokens / seconds


def _client(requests: Sequence[_Request], driven: Driven, seconds: float) -> ClientMetrics:
    times = np.concatenate([np.asarray(r.seen.arrivals, float) for r in requests])
    peak = 0.0
    if len(times):
        bins = np.floor((times - driven.start) / BIN_SECONDS).astype(np.int64)
        peak = float(np.bincount(bins).max()) / BIN_SECONDS
    return ClientMetrics(
        processes=max(1, len(driven.use) - 1),
        busiest_percent=max(use.percent for use in driven.use),
        pieces_per_second=len(times) / seconds,
        peak_pieces_per_second=max(peak, len(times) / seconds),  # of less than a second
    )


def _record(request: _Request, start: float) -> Record:
    job, seen = request.job, request.seen
    return Record(
        type=job.type,
        prompt_tokens=len(job.prompt),
        max_tokens=job.max_tokens,
        output_tokens=seen.output_tokens,
        token_source=seen.token_source,
        scheduled=_relative(request.scheduled, start),
        sent=_relative(seen.sent, start),
        ended=_relative(seen.ended, start),
        arrivals=[_relative(t, start) for t in seen.arrivals],
        counts=seen.counts,
        counts_are_tokens=seen.counts_are_tokens,
        cached_tokens=seen.cached_tokens,
        server_times=seen.server_times,
        failure=seen.failure,
    )


def _relative(time: float, start: float) -> float:
    return round(time - start, 6)
