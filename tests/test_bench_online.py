"""The online benchmark client: its schedule on a clock that only tests move, its reading of streams
byte by byte, and the whole of it against a stub server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import multiprocessing
import re
import selectors
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from aiohttp import web

import steps
from bench import gpu, result
from bench.floor import ModelCost, Rates
from bench.online import cli, plot, report
from bench.online.ceiling import Ceiling, describe, http_client, measure_ceiling
from bench.online.direct import DirectSender
from bench.online.driver import Driven, LocalClient, ProcessUse, drive
from bench.online.floor import Device, known_shape
from bench.online.metrics import distribution, summarise_run, tpot
from bench.online.observe import EventParser, Observation, StreamReader, error_message, read_body
from bench.online.options import SCENARIOS, Load, Measure, Options, Target, Work, parse, preset
from bench.online.plan import Job, Plan, build_plan, warmup_plan
from bench.online.row import OnlineResult, append_online, read_online
from bench.online.sender import HttpSender, HttpTarget, http_session, plain_url, probe
from shared.models.config import real_model_config
from shared.models.files import BUNDLED, ModelFiles
from shared.outputs import StepOutput
from tests.online_server import ServerThread

T = TypeVar("T")

WORK = Work(workload="mixed", short_input_len=4, long_input_len=12)


def job(max_tokens: int = 3, arrival: float | None = 0.0, prompt: int = 2) -> Job:
    return Job("short", list(range(prompt)), max_tokens, 0.0, arrival)


# --- a clock that jumps ---------------------------------------------------------------------------


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for timers by setting its clock forward; a test of hours takes milliseconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits, and for nothing that has a time"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


class SlowSender:
    """Every request takes as long as the loop's clock says: half of it to the first piece."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.under_way = self.most_under_way = 0

    async def send(self, job: Job) -> Observation:
        clock = asyncio.get_running_loop().time
        seen = Observation(sent=clock())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(2):
            await asyncio.sleep(self.seconds / 2)
            seen.arrivals.append(clock())
            seen.counts.append(1)
        self.under_way -= 1
        seen.ended, seen.output_tokens, seen.token_source = clock(), 2, "usage"
        return seen


def driven_by(sender: SlowSender, plan: Plan, concurrency: int | None) -> Driven:
    return run_jumping(drive(LocalClient(sender), plan, concurrency))


def test_open_loop_arrivals_do_not_wait_for_answers() -> None:
    load = Load("poisson", num_requests=200, rate_rps=(5.0,))
    plan = build_plan(WORK, load, 5.0, None, 0)
    sender = SlowSender(seconds=100.0)
    driven = driven_by(sender, plan, None)
    due = [driven.start + j.arrival for j in plan.jobs if j.arrival is not None]
    assert [o.sent for o in driven.seen] == pytest.approx(due)
    assert driven.scheduled == pytest.approx(due)
    assert sender.most_under_way == 200


def test_a_limit_on_clients_delays_sending_but_not_arrival() -> None:
    plan = Plan([job(arrival=float(second)) for second in range(6)], 10)
    sender = SlowSender(seconds=10.0)
    driven = driven_by(sender, plan, concurrency=2)
    assert sender.most_under_way == 2
    # In order of arrival, whoever is free takes the next.
    assert [o.sent - driven.start for o in driven.seen] == pytest.approx([0, 1, 10, 11, 20, 21])
    assert [s - driven.start for s in driven.scheduled] == pytest.approx([0, 1, 2, 3, 4, 5])
    run = summarise_run(plan, driven, 0, Measure())
    assert run.latencies.ttft_ms is not None
    assert run.latencies.ttft_scheduled_ms is not None
    assert run.latencies.queue_ms is not None
    assert run.latencies.ttft_ms.max == pytest.approx(5_000)
    assert run.latencies.ttft_scheduled_ms.max == pytest.approx(16_000 + 5_000)
    assert run.latencies.queue_ms.max == pytest.approx(16_000)


def test_a_closed_loop_schedules_a_request_when_a_client_is_free() -> None:
    plan = Plan([job(arrival=None) for _ in range(5)], 10)
    driven = driven_by(SlowSender(seconds=10.0), plan, concurrency=2)
    assert [s - driven.start for s in driven.scheduled] == pytest.approx([0, 0, 10, 10, 20])
    assert [o.sent for o in driven.seen] == driven.scheduled


def test_a_client_that_fails_itself_ends_the_run() -> None:
    class Broken(SlowSender):
        async def send(self, job: Job) -> Observation:
            raise RuntimeError("a client process ended")

    with pytest.raises(RuntimeError, match="client process ended"):
        driven_by(Broken(1.0), Plan([job()], 10), None)


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load, expected",
    [
        (Load("burst"), [0, 0, 0, 0]),
        (Load("stagger", stagger_interval_ms=250), [0, 0.25, 0.5, 0.75]),
        (Load("batch", batch_size=2, batch_interval=3), [0, 0, 3, 3]),
        (Load("continuous", concurrency=1), [None] * 4),
    ],
)
def test_arrival_patterns(load: Load, expected: list[float | None]) -> None:
    plan = build_plan(WORK, load, None, None, 0)
    assert len(plan.jobs) == 64
    assert [j.arrival for j in plan.jobs[:4]] == expected


def test_poisson_arrivals_have_their_rate_and_no_pattern() -> None:
    load = Load("poisson", num_requests=4000)
    arrivals = [j.arrival or 0.0 for j in build_plan(WORK, load, 20.0, None, 0).jobs]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Of exponential gaps the standard deviation is the mean.
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_a_higher_rate_has_the_same_requests_closer_together() -> None:
    load = Load("poisson", duration=10.0)
    slow, fast = (build_plan(WORK, load, rate, None, 0) for rate in (2.0, 4.0))
    assert (len(slow.jobs), len(fast.jobs)) == (20, 40)
    for a, b in zip(slow.jobs, fast.jobs, strict=False):
        assert (len(a.prompt), a.max_tokens, a.type) == (len(b.prompt), b.max_tokens, b.type)
        assert a.arrival == pytest.approx(2 * (b.arrival or 0.0), abs=1e-5)
        assert a.prompt != b.prompt


def test_repeats_and_warm_up_share_no_prompts() -> None:
    work, load = Work(seed=3), Load()
    first, second = (build_plan(work, load, None, None, repeat) for repeat in (0, 1))
    warm = warmup_plan(work, 8, None)
    assert [len(j.prompt) for j in first.jobs] == [len(j.prompt) for j in second.jobs]
    assert [j.max_tokens for j in first.jobs] == [j.max_tokens for j in second.jobs]
    beginnings = [tuple(j.prompt[:16]) for plan in (first, second, warm) for j in plan.jobs]
    assert len(set(beginnings)) == len(beginnings)
    assert max(j.max_tokens for j in warm.jobs) <= 64
    assert first.sha256 != second.sha256


def test_lengths_are_those_asked_for() -> None:
    load = Load(num_requests=500)
    uniform = build_plan(Work(min_input_len=3, max_input_len=5), load, None, None, 0).jobs
    assert {len(j.prompt) for j in uniform} == {3, 4, 5}
    mixed = Work(workload="mixed", long_prompt_ratio=0.6, short_input_len=10, long_input_len=30)
    jobs = build_plan(mixed, load, None, 50, 0).jobs
    assert {(j.type, len(j.prompt), j.max_tokens) for j in jobs} == {
        ("short", 10, 128),
        ("long", 30, 256),
    }
    assert sum(j.type == "long" for j in jobs) == pytest.approx(300, abs=40)
    assert max(max(j.prompt) for j in jobs) == 49
    for kind in ("uniform", "lognormal"):
        work = Work("mixed", prompt_len_distribution=kind, short_input_len=10, long_input_len=40)  # type: ignore[arg-type]
        lengths = [len(j.prompt) for j in build_plan(work, load, None, None, 0).jobs]
        low, high = (10, 40) if kind == "uniform" else (5, 80)
        assert low <= min(lengths) < max(lengths) <= high
        assert len(set(lengths)) > 20


def test_the_frozen_scenarios_are_unchanged() -> None:
    """A changed hash is a changed workload: its results cannot be compared with older ones."""
    hashes = {}
    for name in SCENARIOS[:2]:
        options = preset(name)
        plan = build_plan(options.work, options.load, options.load.rate_rps[0], None, 0)
        hashes[name] = plan.sha256[:16]
    assert hashes == FROZEN


FROZEN = {"realistic-decode": "4ed8aa2b47362f77", "realistic-decode-high": "ccbb0d875434ae7a"}


# --- flags ----------------------------------------------------------------------------------------


def test_a_flag_overrides_its_scenario() -> None:
    options, _ = parse(["--scenario", "realistic-decode-high"])
    assert options == preset("realistic-decode-high")
    assert (options.load.num_requests, options.load.concurrency) == (128, 16)
    assert options.load.rates() == (1.0,)
    options, _ = parse(["--scenario=realistic-decode", "--concurrency", "3", "--rate-rps", "2"])
    assert (options.load.concurrency, options.load.rate_rps) == (3, (2.0,))
    assert options.work.long_output_len == 4096


def test_number_and_duration_replace_each_other() -> None:
    saturation = preset("saturation").load
    assert len(saturation.rates()) > 3
    assert [saturation.count(rate) for rate in (2.0, 4.0)] == [40, 80]
    options, _ = parse(["--scenario", "saturation", "--num-requests", "7"])
    assert [options.load.count(rate) for rate in options.load.rates()] == [7] * 6
    options, _ = parse(["--scenario", "realistic-decode", "--duration", "10"])
    assert options.load.count(0.5) == 5
    options, _ = parse(["--scenario", "saturation", "--arrival-pattern", "burst"])
    assert (options.load.rates(), options.load.count(None)) == ((None,), 64)
    with pytest.raises(ValueError, match="either --num-requests or --duration"):
        parse(["--num-requests", "7", "--duration", "3"])


@pytest.mark.parametrize(
    "args, message",
    [
        (["--arrival-pattern", "continuous"], "concurrency"),
        (["--rate-rps", "1", "2"], "poisson"),
        (["--arrival-pattern", "poisson", "--rate-rps", "0"], "positive"),
        (["--min-input-len", "9", "--max-input-len", "8"], "at most"),
        (["--long-prompt-ratio", "1.5"], "between 0 and 1"),
        (["--duration", "5"], "poisson"),
        (["--timeout", "nan"], "positive"),
        (["--repeats", "0"], "positive"),
        (["--temperature", "nan"], "--temperature must be 0 or more"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--temperature", "inf"], "--temperature must be 0 or more"),
        (["--vocab-size", "1"], "--vocab-size must be at least 2"),
        (["--wait-ready", "nan"], "--wait-ready"),
        (["--base-url", "localhost:8000"], "--base-url must be http://HOST:PORT"),
        (["--no-usage", "--chunk-usage"], "--chunk-usage and --no-usage"),
        (["--output", "/"], "--output must be a file"),
        (["--rate-rps", "3"], "--rate-rps is for --arrival-pattern poisson"),
        (["--rate_rps=3"], "--rate-rps is for --arrival-pattern poisson"),
        (["--arrival-pattern", "poisson", "--rate-rps", "1", "1"], "--rate-rps must not"),
        (["--batch-size", "3"], "--batch-size is for --arrival-pattern batch"),
        (["--stagger-interval-ms", "3"], "--stagger-interval-ms is for"),
        (["--long-prompt-ratio", "0.1"], "--long-prompt-ratio is for --workload mixed"),
        (["--workload", "mixed", "--max-input-len", "9999"], "--max-input-len is for"),
        (
            [
                *("--workload", "mixed", "--prompt-len-distribution", "uniform"),
                *("--long-prompt-ratio", "0.1"),
            ],
            "--long-prompt-ratio is for --prompt-len-distribution bimodal",
        ),
        (["--mode", "direct", "--base-url", "http://h:1"], "--base-url is for --mode http"),
        (["--mode", "direct", "--no-extras"], "--extras is for --mode http"),
        (["--no-stream", "--slo-ttft-ms", "9"], "--slo-ttft-ms is for --stream"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # tyro reports a ValueError of a dataclass itself, and exits.
    with pytest.raises((SystemExit, ValueError)) as caught:
        parse(args)
    text = str(caught.value) + "".join(capsys.readouterr())
    assert message in " ".join(text.replace("│", " ").split())


def test_direct_mode_has_the_engines_flags() -> None:
    args = ["--mode", "direct", "--engine", "00_baseline", "--max-model-len", "99", "--seed", "7"]
    options, config = parse(args)
    assert options.target.mode == "direct"
    assert (config.engine, config.max_model_length, config.seed) == ("00_baseline", 99, 7)
    with pytest.raises(SystemExit):
        parse(["--engine", "00_baseline"])  # a server has its own


def test_a_scenario_limits_the_length_that_the_engine_sees() -> None:
    args = ["--mode", "direct", "--scenario", "realistic-decode"]
    assert parse(args)[1].max_model_length == 8192
    assert parse([*args, "--max-model-len", "7000"])[1].max_model_length == 7000
    assert parse(["--mode", "direct", "--scenario", "saturation"])[1].max_model_length is None


# --- streams --------------------------------------------------------------------------------------


def event(text: str = "x", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    if "token_ids" in more:
        choice["token_ids"] = more.pop("token_ids")
    return b"data: " + msgspec.json.encode({"id": "a", "choices": [choice], **more}) + b"\n\n"


def usage_event(tokens: int, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    content = {"choices": [], "usage": usage, "metrics": {"ttft": 0.5}}
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def read(pieces: Sequence[bytes], max_tokens: int = 3, exact: bool = True) -> Observation:
    """Piece i arrives at second i."""
    reader = StreamReader(Observation(sent=0.0), max_tokens, exact)
    for now, piece in enumerate(pieces):
        reader.feed(piece, float(now))
    reader.end()
    return reader.observation


def test_events_are_found_wherever_the_stream_is_cut() -> None:
    stream = b': ping\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\n'
    expected = [b'{"a": 1}', b'{"b":2}', b"[DONE]"]
    for cut in range(len(stream)):
        parser = EventParser()
        assert parser.feed(stream[:cut]) + parser.feed(stream[cut:]) == expected
    parser = EventParser()
    assert [e for byte in stream for e in parser.feed(bytes([byte]))] == expected


def test_every_piece_has_the_time_at_which_it_came() -> None:
    seen = read([event(), event(), event(finish="length"), usage_event(3, cached=1) + DONE])
    assert seen.failure is None
    assert (seen.arrivals, seen.counts) == ([0.0, 1.0, 2.0], [1, 1, 1])
    assert (seen.output_tokens, seen.token_source, seen.cached_tokens) == (3, "usage", 1)
    assert seen.server_times == {"ttft": 0.5}
    assert tpot(seen) == 1.0


def test_what_is_read_at_once_arrived_at_once() -> None:
    seen = read([event(), event() + event(), event(finish="length") + usage_event(4) + DONE], 4)
    assert (seen.arrivals, seen.counts) == ([0.0, 1.0, 2.0], [1, 2, 1])
    assert tpot(seen) == pytest.approx(2 / 3)


def test_an_event_of_several_tokens_counts_as_many_where_the_server_says_so() -> None:
    for pieces in (
        [event(usage={"completion_tokens": 2}), event(usage={"completion_tokens": 5})],
        [event(token_ids=[7, 8]), event(token_ids=[1, 2, 3])],
    ):
        seen = read([*pieces, event("", "length", usage={"completion_tokens": 5}), DONE], 5)
        assert seen.failure is None
        assert (seen.counts, seen.counts_are_tokens) == ([2, 3], True)
        assert (seen.output_tokens, seen.token_source) == (5, "chunks")
        assert tpot(seen) == pytest.approx(1 / 3)  # two tokens came with the first piece


def test_an_event_of_several_tokens_counts_once_where_nobody_says_so() -> None:
    seen = read([event("some words"), event("and more", "length"), usage_event(6), DONE], 6)
    assert (seen.failure, seen.counts, seen.output_tokens) == (None, [1, 1], 6)
    assert tpot(seen) == pytest.approx(1 / 5)


def test_tokens_without_text_are_tokens() -> None:
    seen = read([event(""), event(""), event("", "length"), DONE])
    assert (seen.failure, seen.counts) == (None, [1, 1, 1])


def test_a_last_event_with_a_reason_and_no_token_is_no_piece() -> None:
    seen = read([event(), event(), event(), event("", "length"), DONE])
    assert (seen.failure, seen.arrivals) == (None, [0.0, 1.0, 2.0])


def test_without_usage_the_reason_tells_the_number() -> None:
    seen = read([event("ab"), event("c", "length"), DONE])
    assert (seen.failure, seen.output_tokens, seen.token_source) == (None, 3, "length")
    seen = read([event(), event(finish="stop"), DONE], exact=False)
    assert (seen.failure, seen.output_tokens, seen.token_source) == (None, 2, "events")


@pytest.mark.parametrize(
    "pieces, failure",
    [
        ([event(), event(finish="stop"), usage_event(2) + DONE], "fewer tokens"),
        ([event(), event(finish="length"), usage_event(4) + DONE], "more tokens"),
        ([event(), event(finish="stop"), DONE], "fewer tokens"),
        ([event(), event(), event(finish="length"), usage_event(3)], r"without \[DONE\]"),
        ([event(), event(), event(), DONE], "without a finish_reason"),
        ([event(), b'data: {"error": {"message": "engine died"}}\n\n', DONE], "engine died"),
        ([b'data: {"object": "error", "message": "old shape"}\n\n', DONE], "old shape"),
    ],
)
def test_streams_that_do_not_deliver_are_failures(pieces: list[bytes], failure: str) -> None:
    seen = read(pieces)
    assert seen.failure is not None
    assert re.search(failure, seen.failure)


def test_an_answer_that_is_not_streamed() -> None:
    seen = Observation(sent=0.0)
    answer = {"choices": [{"text": "abc", "finish_reason": "length"}]}
    read_body(seen, msgspec.json.encode({**answer, "usage": {"completion_tokens": 3}}), 3, True)
    assert (seen.failure, seen.output_tokens, seen.token_source) == (None, 3, "usage")
    read_body(seen, msgspec.json.encode(answer), 3, True)
    assert (seen.failure, seen.token_source) == (None, "length")
    read_body(seen, b'{"choices": []}', 3, True)
    assert seen.failure is not None


def test_error_messages_of_several_shapes() -> None:
    assert error_message(b'{"error": {"message": "no", "code": 1}}') == "no"
    assert error_message(b'{"message": "no"}') == "no"
    assert error_message(b'{"detail": "no"}') == "no"
    assert error_message(b"<html>\n  502") == "<html> 502"
    assert len(error_message(b"x" * 1000)) == 200


# --- numbers --------------------------------------------------------------------------------------


def seen_at(sent: float, arrivals: list[float], **more: Any) -> Observation:
    values = {
        "counts": [1] * len(arrivals),
        "output_tokens": len(arrivals),
        "token_source": "usage",
        "ended": arrivals[-1],
    }
    return Observation(sent=sent, arrivals=arrivals, **{**values, **more})


def example() -> tuple[Plan, Driven]:
    """Window opens at second 100. Long requests are those of 9 prompt tokens."""
    jobs = [
        Job("short", [1] * 3, 3, 0.0, 0.0),
        Job("long", [1] * 9, 2, 0.0, 1.0),
        Job("short", [1] * 3, 3, 0.0, 2.0),
        Job("long", [1] * 9, 2, 0.0, 4.0),
    ]
    seen = [
        seen_at(100.0, [100.5, 100.6, 100.7]),
        seen_at(101.2, [102.0, 104.5]),
        Observation(sent=102.0, ended=110.0, arrivals=[102.1], counts=[1], failure="cut"),
        seen_at(104.0, [104.1, 104.2]),
    ]
    use = [ProcessUse(1.0, 10.0)]
    return Plan(jobs, 10), Driven(100.0, [100.0, 101.0, 102.0, 104.0], seen, use)


def test_the_numbers_of_a_run() -> None:
    plan, driven = example()
    run = summarise_run(plan, driven, 0, Measure(slo_ttft_ms=800.0, slo_tpot_ms=200.0))
    assert (run.requests, run.completed, run.failed) == (4, 3, 1)
    assert run.failures == {"cut": 1}
    assert run.seconds == pytest.approx(10.0)  # a failure takes time as well
    assert (run.prompt_tokens, run.output_tokens) == (21, 7)
    assert run.tokens_per_second == pytest.approx(0.7)
    assert run.requests_per_second == pytest.approx(0.3)
    assert (run.arrival_seconds, run.offered_rps) == (4.0, 0.75)
    # Up to second 104: three tokens of the first, one of the second.
    assert run.arriving_tokens_per_second == pytest.approx(1.0)
    latencies = run.latencies
    assert latencies.ttft_ms is not None
    assert latencies.ttft_ms.count == 3  # the failed request had a first piece; it does not count
    assert latencies.ttft_ms.avg == pytest.approx((500 + 800 + 100) / 3)
    assert latencies.ttft_scheduled_ms is not None
    assert latencies.ttft_scheduled_ms.max == pytest.approx(1000)
    assert latencies.tpot_ms is not None
    assert latencies.tpot_ms.max == pytest.approx(2500)
    assert latencies.gap_ms is not None
    assert latencies.gap_ms.count == 4
    assert latencies.latency_ms is not None
    assert latencies.latency_ms.max == pytest.approx(3300)
    # The second is too late by both, but is in time from sending.
    assert run.goodput is not None
    assert (run.goodput.requests, run.goodput.share) == (2, 0.5)
    assert run.goodput.requests_per_second == pytest.approx(0.2)
    assert run.goodput.tokens_per_second == pytest.approx(0.5)
    assert [(name, g.requests, g.failed, g.output_tokens) for name, g in run.by_type.items()] == [
        ("short", 2, 1, 3),
        ("long", 2, 0, 4),
    ]
    assert run.client.busiest_percent == 10.0
    assert run.client.peak_pieces_per_second == 3.0  # in the first second
    assert run.records == []


def test_records_are_kept_on_request() -> None:
    plan, driven = example()
    records = summarise_run(plan, driven, 0, Measure(profile=True)).records
    assert [r.failure for r in records] == [None, None, "cut", None]
    assert (records[1].scheduled, records[1].sent) == (1.0, 1.2)
    assert records[1].arrivals == [2.0, 4.5]


def test_when_all_requests_fail_nothing_is_measured_and_nothing_is_zero() -> None:
    seen = [Observation(sent=0.0, ended=1.0, failure=f"{chr(65 + i)}: 5") for i in range(30)]
    plan = Plan([job() for _ in seen], 10)
    run = summarise_run(
        plan, Driven(0.0, [0.0] * 30, seen, [ProcessUse(0, 1)]), 0, Measure(slo_ttft_ms=1.0)
    )
    assert (run.completed, run.failed, run.goodput and run.goodput.share) == (0, 30, 0.0)
    assert sum(run.failures.values()) == 30
    assert len(run.failures) == 11
    assert run.latencies.ttft_ms is None
    assert run.tokens_per_piece is None


def test_failures_that_differ_in_numbers_alone_are_counted_together() -> None:
    texts = ["HTTP 400: 17 is too long", "HTTP 400: 18 is too long", "HTTP 413: 18 is too long"]
    seen = [Observation(sent=0.0, ended=1.0, failure=text) for text in texts]
    driven = Driven(0.0, [0.0] * 3, seen, [ProcessUse(0, 1)])
    run = summarise_run(Plan([job()] * 3, 10), driven, 0, Measure())
    assert run.failures == {texts[0]: 2, texts[2]: 1}


def test_percentiles() -> None:
    made = distribution(list(range(101)))
    assert made is not None
    assert (made.count, made.avg, made.p50, made.p90, made.p99, made.max) == (
        *(101, 50, 50, 90, 99, 100),
    )
    assert distribution([]) is None


def test_a_single_token_has_no_time_per_token() -> None:
    assert tpot(seen_at(0.0, [1.0])) is None
    bundled = seen_at(0.0, [1.0, 2.0], counts=[3, 0], output_tokens=3, counts_are_tokens=True)
    assert tpot(bundled) is None


# --- against a server -----------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stub:
    """An OpenAI-compatible server of the least kind; `answer` may be replaced."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.answer: Handler = self.stream
        self.stats: dict[str, Any] | None = None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        return await self.answer(request)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub-model"}, {"id": "other"}]})

    async def debug(self, request: web.Request) -> web.Response:
        if self.stats is None:
            raise web.HTTPNotFound
        return web.json_response(self.stats)

    async def begin(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    async def stream(self, request: web.Request) -> web.StreamResponse:
        tokens = self.bodies[-1]["max_tokens"]
        response = await self.begin(request)
        for index in range(tokens):
            await response.write(event(finish="length" if index == tokens - 1 else None))
            await asyncio.sleep(0)
        await response.write(usage_event(tokens) + DONE)
        return response

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/debug/stats", self.debug)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def send_one(stub: Stub, max_tokens: int = 3, **target: Any) -> Observation:
    async def work() -> Observation:
        async with stub.serving() as url, http_session(target.get("api_key")) as session:
            sender = HttpSender(session, HttpTarget(url, "stub-model", **target))
            return await sender.send(job(max_tokens))

    return asyncio.run(work())


def test_a_request_asks_for_ids_an_exact_length_and_its_usage() -> None:
    stub = Stub()
    seen = send_one(stub, api_key="secret", chunk_usage=True)
    assert seen.failure is None
    assert seen.sent <= seen.arrivals[0] <= seen.arrivals[-1] <= seen.ended
    assert stub.bodies == [
        {
            "model": "stub-model",
            "prompt": [0, 1],
            "max_tokens": 3,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]
    assert stub.headers[0]["Authorization"] == "Bearer secret"


def test_extras_and_usage_can_be_left_out() -> None:
    stub = Stub()
    assert send_one(stub, extras=False, usage=False).failure is None
    assert set(stub.bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream"}


def test_a_refusal_is_a_failure_with_its_reason() -> None:
    stub = Stub()

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "ignore_eos: unknown"}}, status=400)

    stub.answer = refuse
    assert send_one(stub).failure == "HTTP 400: ignore_eos: unknown"


def test_a_server_that_dies_in_mid_stream_is_a_failure() -> None:
    stub = Stub()

    async def die(request: web.Request) -> web.StreamResponse:
        response = await stub.begin(request)
        await response.write(event())
        assert request.transport is not None
        request.transport.abort()
        return response

    stub.answer = die
    seen = send_one(stub)
    assert seen.failure is not None
    assert "Error" in seen.failure
    assert seen.output_tokens == 0


def test_a_stream_that_stalls_ends_at_the_timeout() -> None:
    stub = Stub()

    async def stall(request: web.Request) -> web.StreamResponse:
        response = await stub.begin(request)
        await response.write(event())
        await asyncio.sleep(60)
        return response

    stub.answer = stall
    seen = send_one(stub, timeout=0.3)
    assert seen.failure == "timeout: not complete 0.3 s after it was sent"
    assert len(seen.arrivals) == 1


def test_something_that_is_no_stream_is_a_failure() -> None:
    stub = Stub()

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    stub.answer = page
    assert send_one(stub).failure == "not a stream of events but text/html"


def test_without_stream_there_is_a_latency_and_no_first_token() -> None:
    stub = Stub()

    async def whole(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "choices": [{"text": "abc", "finish_reason": "length"}],
                "usage": {"completion_tokens": 3},
            }
        )

    stub.answer = whole
    seen = send_one(stub, stream=False)
    assert (seen.failure, seen.output_tokens, seen.arrivals) == (None, 3, [])
    assert seen.ended >= seen.sent
    assert "stream_options" not in stub.bodies[0]
    run = summarise_run(
        Plan([job()], 10),
        Driven(seen.sent, [seen.sent], [seen], [ProcessUse(0, 1)]),
        0,
        Measure(slo_ttft_ms=1000.0),
    )
    assert (run.goodput, run.latencies.ttft_ms, run.latencies.tpot_ms) == (None, None, None)
    assert run.latencies.latency_ms is not None


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def work() -> None:
        async with http_session(None) as session:
            await probe(session, "http://127.0.0.1:9", None, wait=0.0)

    with pytest.raises(OSError, match="no server at"):
        asyncio.run(work())


def test_the_base_url_is_taken_in_all_its_spellings() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert plain_url(url) == "http://h:1"


def measured(stub: Stub, **groups: Any) -> list[OnlineResult]:
    """What the command does, without its process."""

    async def work() -> list[OnlineResult]:
        async with stub.serving() as url:
            target = groups.pop("target", {})
            options = Options(target=Target(base_url=url, **target), **groups)
            return await cli._run(options, None)

    return asyncio.run(work())


FEW = Measure(warmup=2, slo_ttft_ms=60_000.0, slo_tpot_ms=60_000.0, ceiling=False)
SHORT = Work(min_input_len=3, max_input_len=9, min_output_len=2, max_output_len=6, vocab_size=50)


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub()
    settings = {"attention_backend": "torch", "kvcache_block_size": 16, "dtype": "float32"}
    counters = {"decode_steps": 5, "prefill_tokens": 7}
    stub.stats = {
        "stage": "01_chunked_prefill",
        "settings": settings,
        "vocab_size": 30,
        "stats": {"running": 3, "preemptions": 1, "prefix_hit_tokens": 0, "counters": counters},
    }
    output = tmp_path / "online.json"
    measure = Measure(
        warmup=2, repeats=2, slo_ttft_ms=60_000.0, ceiling=False, output=output, profile=True
    )
    work = Work(min_input_len=3, max_input_len=9, min_output_len=2, max_output_len=6)
    (row,) = measured(
        stub, work=work, load=Load("continuous", num_requests=10, concurrency=3), measure=measure
    )
    assert row.error is None
    assert (row.label, row.model, row.config) == ("01_chunked_prefill", "stub-model", settings)
    assert row.target_is_local
    assert row.id_limit == 30
    assert max(max(body["prompt"]) for body in stub.bodies) < 30
    assert len(stub.bodies) == 2 + 2 * 10
    assert [(run.completed, run.failed) for run in row.runs] == [(10, 0)] * 2
    asked = sum(body["max_tokens"] for body in stub.bodies[2:12])
    assert [run.output_tokens for run in row.runs] == [asked] * 2
    assert row.runs[0].server == {
        "preemptions": 0,
        "prefix_hit_tokens": 0,
        "decode_steps": 0,
        "prefill_tokens": 0,
    }
    assert row.runs[0].sha256 == row.sha256 != row.runs[1].sha256
    assert row.medians["goodput.share"] == 1.0
    assert "latencies.ttft_ms.p90" in row.medians
    assert "by_type.long.latencies.tpot_ms.avg" in row.medians
    assert len(row.runs[0].records) == 10
    assert read_online(output) == [row]
    append_online(output, [row])
    assert len(read_online(output)) == 2
    assert "api_key" not in output.read_text()
    shown = capsys.readouterr().out
    assert "TTFT from sending" in shown
    assert "short: TPOT" in shown


def test_a_sweep_has_a_row_for_each_rate() -> None:
    stub = Stub()
    load = Load("poisson", duration=0.1, rate_rps=(40.0, 80.0))
    rows = measured(stub, work=SHORT, load=load, measure=FEW)
    assert [(row.rate_rps, row.runs[0].requests) for row in rows] == [(40.0, 4), (80.0, 8)]
    assert rows[0].sha256 != rows[1].sha256
    assert rows[0].label.startswith("http://127.0.0.1:")
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(prompts) == 14


def test_failures_are_counted_apart() -> None:
    stub = Stub()

    async def sometimes(request: web.Request) -> web.StreamResponse:
        if len(stub.bodies) % 2:
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        return await stub.stream(request)

    stub.answer = sometimes
    (row,) = measured(stub, work=SHORT, load=Load("stagger", num_requests=8, stagger_interval_ms=5),
                      measure=FEW)  # fmt: skip
    (run,) = row.runs
    assert (run.completed, run.failed) == (4, 4)
    assert run.failures == {"HTTP 429: queue full": 4}
    assert run.latencies.ttft_ms is not None
    assert run.latencies.ttft_ms.count == 4
    assert run.goodput is not None
    assert run.goodput.share == 0.5


def test_a_sweep_ends_when_nothing_is_answered_and_keeps_the_row() -> None:
    stub = Stub()

    async def down(request: web.Request) -> web.Response:
        return web.Response(status=503, text="going away")

    stub.answer = down
    load = Load("poisson", num_requests=3, rate_rps=(100.0, 200.0))
    with pytest.raises(ValueError, match="not one warm-up request was answered: HTTP 503"):
        measured(stub, work=SHORT, load=load, measure=FEW)
    (row,) = measured(stub, work=SHORT, load=load, measure=Measure(warmup=0, ceiling=False))
    assert row.error is not None
    assert "HTTP 503: going away" in row.error
    assert "none of 3" in report.markdown([row])


def test_hits_of_the_prefix_cache_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub()

    async def cached(request: web.Request) -> web.StreamResponse:
        tokens = stub.bodies[-1]["max_tokens"]
        response = await stub.begin(request)
        await response.write(event() * tokens + event("", "length") + usage_event(tokens, 2) + DONE)
        return response

    stub.answer = cached
    (row,) = measured(stub, work=SHORT, load=Load(num_requests=3), measure=FEW)
    assert row.runs[0].cached_prompt_tokens == 6
    assert "prefix cache" in caplog.text


def test_an_output_file_of_something_else_is_refused_before_the_work(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="holds no benchmark results"):
        cli._main(["--output", str(path)])


def test_an_output_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output: .*x\.json cannot be written"):
        cli._main(["--output", str(tmp_path / "file" / "x.json")])


def test_the_output_files_directory_is_made_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "new" / "too"

    async def run(options: Options, config: Any) -> list[OnlineResult]:
        assert list(directory.iterdir()) == []
        return []

    monkeypatch.setattr(cli, "_run", run)
    assert cli._main(["--output", str(directory / "x.json")]) == 0


def test_a_row_that_cannot_be_written_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, rows: Sequence[OnlineResult]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(cli, "append_online", full)
    measure = dataclasses.replace(FEW, output=tmp_path / "x.json")
    with pytest.raises(OSError, match="no space left"):
        measured(Stub(), work=SHORT, load=Load(num_requests=3), measure=measure)
    assert "TTFT from sending" in capsys.readouterr().out


def test_a_row_that_cannot_be_shown_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(row: OnlineResult) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(report, "terminal", closed)
    measure = dataclasses.replace(FEW, output=tmp_path / "x.json")
    with pytest.raises(BrokenPipeError):
        measured(Stub(), work=SHORT, load=Load(num_requests=3), measure=measure)
    assert len(read_online(tmp_path / "x.json")) == 1


def test_client_processes_share_the_requests_and_one_limit() -> None:
    stub = Stub()
    under_way = most = 0

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        response = await stub.stream(request)
        under_way -= 1
        return response

    stub.answer = counted

    async def work() -> tuple[Plan, Driven]:
        plan = Plan([job(arrival=None, prompt=n + 1) for n in range(12)], 10)
        async with (
            stub.serving() as url,
            http_client(HttpTarget(url, "m", timeout=30.0), 2) as client,
        ):
            return plan, await drive(client, plan, 4)

    plan, driven = asyncio.run(work())
    assert [o.failure for o in driven.seen] == [None] * 12
    assert most <= 4
    assert sorted(len(body["prompt"]) for body in stub.bodies) == list(range(1, 13))
    assert len(driven.use) == 3  # and the parent
    # All processes are on one clock.
    for scheduled, seen in zip(driven.scheduled, driven.seen, strict=True):
        assert driven.start <= scheduled <= seen.sent <= seen.arrivals[0] <= seen.ended
    assert summarise_run(plan, driven, 0, Measure()).client.processes == 2


def test_a_client_process_that_dies_ends_the_run() -> None:
    stub = Stub()

    async def work() -> None:
        async with (
            stub.serving() as url,
            http_client(HttpTarget(url, "m", timeout=30.0), 2) as client,
        ):

            async def kill(request: web.Request) -> web.StreamResponse:
                for process in multiprocessing.active_children():
                    process.kill()
                await asyncio.sleep(30)
                raise web.HTTPNotFound

            stub.answer = kill
            await drive(client, Plan([job()] * 4, 10))

    with pytest.raises(RuntimeError, match="a client process ended"):
        asyncio.run(work())


def test_the_client_knows_its_own_ceiling() -> None:
    ceiling = asyncio.run(measure_ceiling(1, seconds=0.2))
    assert ceiling.pieces_per_second > 100
    assert ceiling.tokens_per_second > 100
    assert "1 process" in describe(ceiling)


# --- the engine without a server ------------------------------------------------------------------


class FakeEngine:
    """An AsyncEngine that gives two tokens at a time."""

    def __init__(self, error: str | None = None, stall: bool = False) -> None:
        self.error = error
        self.stall = stall
        self.closed = 0
        self.asked: list[tuple[str, list[int], Any]] = []

    async def generate(
        self, request_id: str, prompt: list[int], params: Any
    ) -> AsyncIterator[list[StepOutput]]:
        self.asked.append((request_id, prompt, params))
        try:
            for made in range(2, params.max_tokens + 2, 2):
                await asyncio.sleep(1000.0 if self.stall else 0.5)
                done = made >= params.max_tokens
                reason = ("abort" if self.error else "length") if done else None
                error = self.error if done else None
                yield [StepOutput(request_id, 0, [1, 2], finish_reason=reason, error=error)]  # type: ignore[arg-type]
        finally:
            self.closed += 1


def test_direct_mode_counts_every_token() -> None:
    engine = FakeEngine()
    seen = run_jumping(DirectSender(engine, timeout=60.0).send(job(4)))
    assert (seen.failure, seen.output_tokens, seen.counts) == (None, 4, [2, 2])
    assert [t - seen.sent for t in seen.arrivals] == pytest.approx([0.5, 1.0])
    assert tpot(seen) == pytest.approx(0.25)
    ((_, prompt, params),) = engine.asked
    assert (prompt, params.max_tokens, params.ignore_eos) == ([0, 1], 4, True)


def test_direct_mode_reports_failures() -> None:
    assert run_jumping(DirectSender(FakeEngine("boom"), 60.0).send(job(4))).failure == "boom"
    stalled = FakeEngine(stall=True)
    seen = run_jumping(DirectSender(stalled, 5.0).send(job(4)))
    assert seen.failure == "timeout: not complete 5 s after it was sent"
    assert stalled.closed == 1  # left early: the engine can forget the request


# --- the physical floor ---------------------------------------------------------------------------

SETTINGS = {
    "model": "qwen3-0.6b",
    "dtype": "bfloat16",
    "device": "cuda",
    "max_num_sequences": 4,
    "max_num_batched_tokens": 1000,
    "tokens_in_pool": 10_000,
    "max_model_length": 500,
    "enable_prefix_caching": True,
}


def test_the_floor_of_a_load_counts_clients_and_arrivals() -> None:
    cost = ModelCost.of(real_model_config("qwen3-0.6b"), 2)
    device = Device(SETTINGS, cost, Rates(1e12, 1e15))
    plan = Plan([job(11) for _ in range(8)], 10)
    four, one = device.floor(plan, None), device.floor(plan, 1)
    assert four.tpot_ms is not None
    assert four.tpot_ms == pytest.approx(1e3 * cost.weight_bytes / 1e12, rel=0.01)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second, rel=0.01)
    assert device.floor(plan, 100) == four
    late = Plan([job(11, arrival=float(n)) for n in range(8)], 10)
    assert device.floor(late, None).seconds > 7.0
    two = Device({**SETTINGS, "tensor_parallel_size": 2}, cost, Rates(1e12, 1e15))
    assert two.floor(plan, None).tokens_per_second == pytest.approx(2 * four.tokens_per_second)


def test_the_shape_of_a_model_is_known_or_not(tmp_path: Path) -> None:
    def known(model: str) -> bool:
        return known_shape({**SETTINGS, "model": model}) is not None

    assert known("qwen3-8b")
    assert known("Qwen/Qwen3-8B")
    assert known(BUNDLED)
    assert known(str(ModelFiles.find(None, "auto").directory))
    assert not known("someone/elses-model")
    assert known_shape({}) is None
    assert known_shape({"model": "qwen3-8b"}) is None


# --- tables, plots --------------------------------------------------------------------------------


def row_at(rate: float, label: str = "a") -> OnlineResult:
    plan, driven = example()
    measure = Measure(slo_ttft_ms=800.0, slo_tpot_ms=200.0)
    run = summarise_run(plan, driven, 0, measure)
    options = Options(load=Load("poisson", duration=4.0, rate_rps=(rate,)), measure=measure)
    medians, spread = result.summarise([run])
    return OnlineResult(
        label=label,
        scenario="saturation",
        rate_rps=rate,
        sha256="0" * 64,
        id_limit=10,
        options=cli._public(options),
        created="2026-01-01T00:00:00+00:00",
        commit="0123456789abcdef",
        dirty=True,
        hardware=result.Hardware("some CPU", 2),
        target_is_local=True,
        versions={"python": "3"},
        model="m",
        target_version=None,
        stage=None,
        config={},
        ceiling=Ceiling(1, 30.0, 100.0),
        runs=[run],
        medians=medians,
        spread=spread,
    )


def test_a_table_has_its_context_and_a_line_for_each_row() -> None:
    text = report.markdown([row_at(1.0), row_at(2.0), row_at(1.0, "b")])
    assert text.count("**saturation") == 1
    assert "| a | 1 |" in text
    assert "| b | 1 |" in text
    assert "466.7 / 740.0" in text  # TTFT from sending: average and p90
    assert "0123456789+changes" in text
    assert "TTFT from arrival within 800 ms and TPOT within 200 ms" in text
    assert "30 pieces/s" in text
    assert "% of floor" not in text


def test_a_known_floor_stands_beside_the_throughput() -> None:
    floor = result.Floor(1000.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, "")
    row = msgspec.structs.replace(row_at(1.0), floor=floor, percent_of_floor=12.34)
    assert "| % of floor |" in (text := report.markdown([row, row_at(2.0)]))
    assert "| 12.3 |" in text
    assert "12.3% of the physical floor of 1,000.0" in report._throughput(row)


def test_the_plot_is_made_of_rows_alone_and_the_same_every_time(tmp_path: Path) -> None:
    source, target = tmp_path / "rows.json", tmp_path / "plot.svg"
    append_online(source, [row_at(r, name) for name in "ab" for r in (4.0, 1.0, 2.0)])
    drawn = []
    for _ in range(2):
        plot.main((source,), target)
        drawn.append(target.read_bytes())
    assert drawn[0] == drawn[1]
    assert b"Goodput" in drawn[0]
    assert b"0123456789+" in drawn[0]
    assert [row.rate_rps for row in plot.curves(read_online(source))["a"]] == [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw([msgspec.structs.replace(row_at(1.0), rate_rps=None)])


def test_the_plot_says_in_a_line_what_it_cannot_draw(tmp_path: Path) -> None:
    none, mixed, good = (tmp_path / f"{name}.json" for name in ("none", "mixed", "good"))
    without = msgspec.structs.replace(row_at(1.0), rate_rps=None)
    append_online(none, [without])
    append_online(mixed, [row_at(1.0), msgspec.structs.replace(row_at(2.0, "b"), model="m2")])
    append_online(good, [row_at(1.0), without])

    def plotted(*files: Path) -> tuple[int, list[str]]:
        command = [sys.executable, "-m", "bench.online.plot", *map(str, files)]
        done = subprocess.run(
            [*command, "--output", str(tmp_path / "plot.svg")],
            cwd=result.ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr.splitlines()

    for files, message in (
        ([tmp_path / "nope.json"], "No such file or directory"),
        ([good, none], f"{none} has no rows at a rate, and only sweeps over rates are drawn"),
        ([mixed], "these rows are of different work"),
    ):
        status, (line,) = plotted(*files)
        assert status == 2
        assert line.startswith("error: ")
        assert message in line
        assert not (tmp_path / "plot.svg").exists()
    assert plotted(good) == (0, [])


# --- GPUs without CUDA ----------------------------------------------------------------------------


class FakeNvml:
    def __init__(self, *names: str) -> None:
        self.names = names

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "abc"),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, "ca"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, "b"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-x"}, "abc"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_visible_gpus_are_found_without_cuda(environment: dict[str, str], expected: str) -> None:
    found = gpu.installed_gpus(FakeNvml("H200", "H200", "H200"), environment)
    assert [g.uuid for g in found] == [f"GPU-{letter}" for letter in expected]


def test_an_index_that_may_mean_another_gpu_is_not_trusted() -> None:
    nvml = FakeNvml("H200", "T4", "H200")
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    assert len(gpu.installed_gpus(nvml, environment)) == 3
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert [g.name for g in gpu.installed_gpus(nvml, environment)] == ["T4"]


# --- against our own server -----------------------------------------------------------------------


def test_our_server_delivers_what_the_client_counts() -> None:
    work = Work(min_input_len=17, max_input_len=40, min_output_len=5, max_output_len=12)
    load = Load("poisson", num_requests=8, rate_rps=(200.0,), concurrency=6)
    measure = Measure(warmup=2, ceiling=False, slo_ttft_ms=60_000.0, profile=True)
    with ServerThread() as server:
        options = Options(target=Target(base_url=server.url), work=work, load=load, measure=measure)
        (row,) = asyncio.run(cli._run(options, None))
        chunked = dataclasses.replace(options.target, chunk_usage=True)
        # The same prompts again: now they are in the prefix cache, and that is noticed.
        (again,) = asyncio.run(cli._run(dataclasses.replace(options, target=chunked), None))
    (run,), (second,) = row.runs, again.runs
    assert (run.completed, run.failures) == (8, {})
    assert (row.stage, row.id_limit) == (steps.load("03_online").Config().engine, 4096)
    assert row.floor is not None
    assert row.percent_of_floor is not None
    assert 0 < row.percent_of_floor < 100
    assert run.server["generation_tokens"] == run.output_tokens
    assert run.server["prefill_tokens"] == run.prompt_tokens
    assert (run.cached_prompt_tokens, run.server["prefix_hit_tokens"]) == (0, 0)
    assert all(record.server_times for record in run.records)
    assert run.token_sources == {"usage": 8}
    assert (second.output_tokens, second.token_sources) == (run.output_tokens, {"chunks": 8})
    assert all(sum(record.counts) == record.output_tokens for record in second.records)
    assert second.cached_prompt_tokens == second.server["prefix_hit_tokens"] > 0


def test_direct_mode_drives_the_engine_behind_it() -> None:
    args = "--mode direct --dtype float32 --num-kvcache-blocks 200 --num-requests 6 --warmup 2"
    lengths = "--min-input-len 9 --max-input-len 20 --min-output-len 3 --max-output-len 8"
    options, config = parse([*args.split(), *lengths.split()])
    (row,) = asyncio.run(cli._run(options, config))
    (run,) = row.runs
    assert (run.completed, run.failures, run.token_sources) == (6, {}, {"chunks": 6})
    assert run.server["generation_tokens"] == run.output_tokens
    assert row.config["num_kvcache_blocks"] == 200
    assert row.id_limit == 4096
