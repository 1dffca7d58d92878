"""The flags, and the scenarios that set them together."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import tyro

ScenarioName = Literal["realistic-decode", "realistic-decode-high", "saturation"]
ArrivalPattern = Literal["burst", "stagger", "continuous", "batch", "poisson"]

SCENARIOS: tuple[ScenarioName, ...] = get_args(ScenarioName)
DEFAULT_REQUESTS = 64

# Flags that mean something only where another one has this value.
ONLY_WITH = {
    ("mode", "http"): ("base-url", "api-key", "chunk-usage", "extras", "usage", "wait-ready"),
    ("arrival-pattern", "poisson"): ("rate-rps", "duration"),
    ("arrival-pattern", "stagger"): ("stagger-interval-ms",),
    ("arrival-pattern", "batch"): ("batch-size", "batch-interval"),
    ("workload", "random"): (
        *("min-input-len", "max-input-len"),
        *("min-output-len", "max-output-len"),
    ),
    ("workload", "mixed"): (
        *("prompt-len-distribution", "long-prompt-ratio"),
        *("short-input-len", "long-input-len", "short-output-len", "long-output-len"),
    ),
    ("prompt-len-distribution", "bimodal"): ("long-prompt-ratio",),
    ("stream", True): ("chunk-usage", "usage", "slo-ttft-ms", "slo-tpot-ms"),
}

T = TypeVar("T")
Positive = Annotated[int, tyro.conf.arg(metavar="N")]


def _check_positive(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}")


def _check_not_negative(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {value}")


def _check_range(options: object, low: str, high: str) -> None:
    _check_positive(options, low, high)
    if getattr(options, low) > getattr(options, high):
        flags = [f"--{name.replace('_', '-')}" for name in (low, high)]
        raise ValueError(f"{flags[0]} must be at most {flags[1]}")


@dataclass(frozen=True)
class Target:
    """What is measured."""

    mode: Literal["http", "direct"] = "http"
    """http: a server at --base-url. direct: the engine behind the server's asyncio front end, in
    this process and without HTTP; it takes the flags of that engine as well."""
    base_url: str = "http://127.0.0.1:8000"
    """Of any OpenAI-compatible server; with or without /v1."""
    api_key: str | None = None
    """Sent as a bearer token. Default: the environment's OPENAI_API_KEY."""
    model: str | None = None
    """http: name in the requests; default: the first the server lists. direct: the engine's."""
    stream: bool = True
    """Ask for a stream. Without one there is no time to the first token, and no goodput."""
    extras: bool = True
    """Send ignore_eos, which OpenAI does not know, so that every output has exactly the length
    asked for (a shorter one is a failure). Without it outputs may end early."""
    usage: bool = True
    """Ask for the usage at the end of a stream (stream_options.include_usage)."""
    chunk_usage: bool = False
    """Ask for the usage in every chunk (continuous_usage_stats, vLLM's): tokens per chunk are then
    known, not only on average, at some cost to the server."""
    wait_ready: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 0.0
    """Wait this long for the server to come up."""
    label: str | None = None
    """Name of the row in tables and plots. Default: the engine stage that the server says it runs,
    else --base-url."""

    def __post_init__(self) -> None:
        if self.mode == "direct" and not self.stream:
            raise ValueError("--no-stream is for --mode http")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"--base-url must be http://HOST:PORT, got {self.base_url!r}")
        if self.chunk_usage and not self.usage:
            raise ValueError("--chunk-usage and --no-usage contradict each other")
        _check_not_negative(self, "wait_ready")


@dataclass(frozen=True)
class Work:
    """Prompts and output lengths, in tokens. Prompts are random ids, no two requests share any."""

    workload: Literal["random", "mixed"] = "random"
    """random: prompts and outputs uniform between min and max. mixed: short and long requests."""
    min_input_len: int = 100
    max_input_len: int = 1024
    min_output_len: int = 100
    max_output_len: int = 1024
    prompt_len_distribution: Literal["bimodal", "uniform", "lognormal"] = "bimodal"
    """Of mixed prompts. bimodal: exactly short or long. uniform: between them. lognormal: short and
    long are one standard deviation off the median, cut at half the short and twice the long. The
    last two count as long from the middle (lognormal: from the median) on."""
    long_prompt_ratio: float = 0.5
    """Probability of a long prompt, with bimodal."""
    short_input_len: int = 512
    long_input_len: int = 1536
    short_output_len: int = 128
    """Output of a request with a short prompt."""
    long_output_len: int = 256
    """Output of a request with a long prompt."""
    temperature: float = 0.6
    seed: int = 0
    """Of lengths, arrivals and prompts. In direct mode also the engine's."""
    vocab_size: int | None = None
    """Token ids are below this and below 10,000. Default: what our server says, else 10,000."""

    def __post_init__(self) -> None:
        _check_range(self, "min_input_len", "max_input_len")
        _check_range(self, "min_output_len", "max_output_len")
        _check_range(self, "short_input_len", "long_input_len")
        _check_positive(self, "short_output_len", "long_output_len")
        _check_not_negative(self, "temperature")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise ValueError(
                f"--vocab-size must be at least 2, or all prompts are alike, got {self.vocab_size}"
            )
        if not 0 <= self.long_prompt_ratio <= 1:
            raise ValueError("--long-prompt-ratio must be between 0 and 1")


@dataclass(frozen=True)
class Load:
    """When requests come, and how many at a time."""

    arrival_pattern: ArrivalPattern = "burst"
    """burst: all at once. stagger: one every --stagger-interval-ms. batch: --batch-size every
    --batch-interval. poisson: at random, --rate-rps on average. All four are open loop: they come
    whether or not earlier ones are done. continuous: closed loop, --concurrency clients each send
    the next as soon as they have their answer."""
    num_requests: int | None = None
    """Default: 64, or as many as --duration has time for."""
    duration: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """poisson: requests arrive for this long, instead of a number of them."""
    concurrency: int | None = None
    """Clients. A request that is due while all are busy waits in the client: its latency from
    scheduled arrival includes that, its latency from sending does not. Default: no limit."""
    rate_rps: Annotated[tuple[float, ...], tyro.conf.arg(metavar="RATE")] = (1.0,)
    """poisson: requests per second; several rates are run one after the other, a row each."""
    stagger_interval_ms: float = 100.0
    batch_size: int = 8
    batch_interval: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1.0
    timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """For one request, from sending it. One that takes longer is cancelled and has failed."""

    def __post_init__(self) -> None:
        _check_positive(
            self,
            *("num_requests", "duration", "concurrency", "stagger_interval_ms"),
            *("batch_size", "batch_interval", "timeout"),
        )
        if self.arrival_pattern == "continuous" and self.concurrency is None:
            raise ValueError("--arrival-pattern continuous needs --concurrency: its clients")
        if self.arrival_pattern != "poisson":
            if self.duration is not None:
                raise ValueError("--duration is for --arrival-pattern poisson")
            if len(self.rate_rps) > 1:
                raise ValueError("several values of --rate-rps are for --arrival-pattern poisson")
        if not self.rate_rps or not all(math.isfinite(r) and r > 0 for r in self.rate_rps):
            raise ValueError("--rate-rps must be positive")
        if len(set(self.rate_rps)) < len(self.rate_rps):
            raise ValueError("--rate-rps must not name a rate twice: its prompts would be the same")

    def rates(self) -> tuple[float | None, ...]:
        """Load points of a run; None where requests do not come at a rate."""
        return self.rate_rps if self.arrival_pattern == "poisson" else (None,)

    def count(self, rate: float | None) -> int:
        if self.duration is not None and rate is not None:
            return max(1, math.ceil(self.duration * rate))
        return self.num_requests or DEFAULT_REQUESTS


@dataclass(frozen=True)
class Measure:
    """What is measured and written."""

    warmup: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Requests that are sent first and not measured, with prompts of their own and outputs of at
    most 64 tokens: whatever is compiled or allocated at first use."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Runs of every load, with equal lengths and arrivals and other prompts."""
    first_repeat: int = 0
    """Number of the first repeat: a second run against a server that is still up needs prompts
    that it has not seen, or it measures prefix hits."""
    slo_ttft_ms: float | None = None
    """Goodput counts requests whose first token came within this, from scheduled arrival, ..."""
    slo_tpot_ms: float | None = None
    """... and whose further tokens took at most this on average. Default of both: no limit; none
    of them given: no goodput."""
    output: Path | None = None
    """Append the rows to this JSON file."""
    profile: bool = False
    """Keep a record of every request in the JSON: times of all its pieces, and how it ended."""
    client_processes: int = 1
    """Processes that receive streams, for loads that one Python process cannot keep up with."""
    ceiling: bool = True
    """Measure first (about 2 s) what this client can receive from a server that does nothing."""

    def __post_init__(self) -> None:
        _check_positive(self, "repeats", "slo_ttft_ms", "slo_tpot_ms", "client_processes")
        _check_not_negative(self, "warmup", "first_repeat")
        if self.output is not None and self.output.is_dir():
            raise ValueError(f"--output must be a file, and {self.output} is a directory")


@dataclass(frozen=True)
class Options:
    scenario: ScenarioName | None = None
    """Sets the flags for a known load; any of them that is given as well has precedence."""
    target: Target = field(default_factory=Target)
    work: Work = field(default_factory=Work)
    load: Load = field(default_factory=Load)
    measure: Measure = field(default_factory=Measure)

    def __post_init__(self) -> None:
        if self.target.mode == "direct" and self.measure.client_processes > 1:
            raise ValueError("--client-processes is for --mode http: the engine has one front end")


# Forty tokens a second are more than anybody reads.
_SLO = Measure(slo_ttft_ms=500.0, slo_tpot_ms=25.0)
_REALISTIC_WORK = Work(
    workload="mixed", long_prompt_ratio=0.6, short_output_len=2048, long_output_len=4096
)
_PRESETS: dict[ScenarioName, Options] = {
    "realistic-decode": Options(
        scenario="realistic-decode",
        work=_REALISTIC_WORK,
        load=Load("poisson", num_requests=64, concurrency=8, rate_rps=(0.5,)),
        measure=_SLO,
    ),
    "realistic-decode-high": Options(
        scenario="realistic-decode-high",
        work=_REALISTIC_WORK,
        load=Load("poisson", num_requests=128, concurrency=16, rate_rps=(1.0,)),
        measure=_SLO,
    ),
    # No limit on clients, or the loop would close just where it gets interesting. Outputs are short
    # enough for requests to come and go many times within the duration.
    "saturation": Options(
        scenario="saturation",
        work=Work(workload="mixed"),
        load=Load("poisson", duration=20.0, rate_rps=(2.0, 4.0, 8.0, 16.0, 32.0, 64.0)),
        measure=_SLO,
    ),
}

# What the longest request of a scenario fits into; of the engine in direct mode, unless it is told
# another. A server has its own flag for it.
MODEL_LENGTHS: dict[ScenarioName | None, int] = {
    "realistic-decode": 8192,
    "realistic-decode-high": 8192,
}


def preset(scenario: ScenarioName | None) -> Options:
    return Options() if scenario is None else _PRESETS[scenario]


def parse(args: Sequence[str]) -> tuple[Options, Any]:
    """(options, config of the engine in direct mode, else None). Wrong flags exit with status 2.

    Raises ValueError for values that do not go together.
    """
    first = _first_look(args)
    defaults = preset(first.scenario)
    if first.duration is not None and first.num_requests is not None:
        raise ValueError("give either --num-requests or --duration")
    # Of the two, the preset's gives way to the other if that one is meant.
    if first.duration is not None:
        defaults = _with_load(defaults, num_requests=None)
    elif first.num_requests is not None:
        defaults = _with_load(defaults, duration=None)
    if first.arrival_pattern not in (None, "poisson"):
        defaults = _with_load(defaults, duration=None, rate_rps=Load.rate_rps)
    if first.mode != "direct":
        options = _read(Options, defaults, args)
        _check_given(options, args)
        return options, None
    from bench.online.direct import engine_config, engine_flags

    flags = engine_flags()
    with_engine = dataclasses.make_dataclass(
        "Arguments", [("engine", flags)], bases=(Options,), frozen=True, kw_only=True
    )
    groups = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(Options)}
    parsed = _read(with_engine, with_engine(**groups, engine=flags()), args)
    options = Options(**{name: getattr(parsed, name) for name in groups})
    _check_given(options, args)
    return options, engine_config(options, parsed.engine)


def _check_given(options: Options, args: Sequence[str]) -> None:
    """Raises ValueError for a flag that would change nothing: who gave it expects that it does."""
    given = {
        arg[2:].split("=", 1)[0].replace("_", "-").removeprefix("no-")
        for arg in args
        if arg.startswith("--")
    }
    values = {
        field.name: getattr(group, field.name)
        for group in (options.target, options.work, options.load, options.measure)
        for field in dataclasses.fields(group)
    }
    for (condition, value), flags in ONLY_WITH.items():
        useless = [flag for flag in flags if flag in given]
        if useless and values[condition.replace("-", "_")] != value:
            needed = f"--{condition}" if value is True else f"--{condition} {value}"
            raise ValueError(f"--{useless[0]} is for {needed}")


def _read(kind: type[T], defaults: T, args: Sequence[str]) -> T:
    return tyro.cli(
        kind,
        default=defaults,
        prog="python -m bench.online",
        description="Measure a server, or an engine, under load.",
        args=args,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _with_load(options: Options, **values: Any) -> Options:
    return dataclasses.replace(options, load=dataclasses.replace(options.load, **values))


def _first_look(args: Sequence[str]) -> argparse.Namespace:
    """The flags on which others depend; None where they are not given or not understood."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("scenario", "mode", "duration", "num-requests", "arrival-pattern"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="?")
    found, _ = parser.parse_known_args(list(args))
    if found.scenario not in SCENARIOS:
        found.scenario = None
    return found
