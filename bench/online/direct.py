"""The engine's asyncio front end without HTTP: what a server costs is the difference."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from bench.online.driver import LocalClient
from bench.online.observe import Observation, failure_text, length_failure, timeout_text
from bench.online.options import MODEL_LENGTHS, Options
from bench.online.plan import Job
from bench.online.sender import ServerInfo
from shared import SamplingParams
from shared.cli import flags_of, given
from steps import load

STAGE = "03_online"
# Flags of the engine that the client has as well; there, they mean both.
SHARED_FLAGS = ("model", "seed")

Stats = Callable[[], Awaitable[dict[str, Any] | None]]


def engine_flags() -> type[Any]:
    """A dataclass of the engine's options, `--engine` among them, for tyro to make flags of."""
    flags = flags_of(load(STAGE).Config, "engine")
    fields = [
        (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
        for f in dataclasses.fields(flags)
        if f.name not in SHARED_FLAGS
    ]
    made = dataclasses.make_dataclass("engine", fields)
    made.__doc__ = ""
    return made


def engine_config(options: Options, flags: Any) -> Any:
    """Raises ValueError for options that the engine refuses."""
    values = {"model": options.target.model, "seed": options.work.seed, **given(flags)}
    values.setdefault("max_model_length", MODEL_LENGTHS.get(options.scenario))
    return load(STAGE).Config(**{name: v for name, v in values.items() if v is not None})


@contextlib.asynccontextmanager
async def direct_engine(
    config: Any, timeout: float
) -> AsyncIterator[tuple[ServerInfo, LocalClient, Stats]]:
    """Raises what the engine's start raises."""
    engine = await load(STAGE).AsyncEngine.start(config)
    try:
        info = engine.info
        described = ServerInfo(
            model=str(info.description.get("model")),
            stage=info.stage,
            vocab_size=info.vocab_size,
            settings=info.description,
        )

        async def stats() -> dict[str, Any]:
            return {"stats": msgspec.to_builtins(engine.stats)}

        yield described, LocalClient(DirectSender(engine, timeout)), stats
    finally:
        await engine.close()


class DirectSender:
    def __init__(self, engine: Any, timeout: float) -> None:
        """`engine`: an AsyncEngine, or what looks like one."""
        self.engine = engine
        self.timeout = timeout
        self._numbers = itertools.count()

    async def send(self, job: Job) -> Observation:
        params = SamplingParams(
            temperature=job.temperature, max_tokens=job.max_tokens, ignore_eos=True
        )
        clock = asyncio.get_running_loop().time
        seen = Observation(sent=clock(), counts_are_tokens=True, token_source="chunks")
        try:
            async with asyncio.timeout(self.timeout):
                stream = self.engine.generate(f"online-{next(self._numbers)}", job.prompt, params)
                async with contextlib.aclosing(stream):
                    async for outputs in stream:
                        self._take(outputs, clock(), seen)
            if seen.failure is None:
                seen.failure = length_failure(seen.output_tokens, job.max_tokens, exact=True)
        except TimeoutError:
            seen.failure = timeout_text(self.timeout)
        except (ValueError, RuntimeError) as error:
            seen.failure = failure_text(error)
        seen.ended = clock()
        return seen

    def _take(self, outputs: list[Any], now: float, seen: Observation) -> None:
        """`outputs`: StepOutputs of the one completion that there is."""
        count = sum(len(output.new_token_ids) for output in outputs)
        if count:
            seen.arrivals.append(now)
            seen.counts.append(count)
            seen.output_tokens += count
        for output in outputs:
            if output.num_cached_tokens or seen.cached_tokens is None:
                seen.cached_tokens = output.num_cached_tokens
            if output.error is not None or output.finish_reason == "abort":
                seen.failure = output.error or "aborted by the engine"
