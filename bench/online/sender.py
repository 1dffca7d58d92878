"""One request over HTTP, and what a server says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from typing import Any, Protocol

import aiohttp
import msgspec

from bench.online.observe import (
    Observation,
    StreamReader,
    error_message,
    failure_text,
    read_body,
    shorten,
    timeout_text,
)
from bench.online.plan import Job

JSON = {"Content-Type": "application/json"}
PROBE_SECONDS = 10.0
RETRY_SECONDS = 0.5


class Sender(Protocol):
    """Sends one request and watches its answer. Failures are part of the observation."""

    async def send(self, job: Job) -> Observation: ...


class HttpTarget(msgspec.Struct, frozen=True):
    """Where requests go and what they ask for; see `options.Target`."""

    base_url: str
    """Without /v1 and without a slash at the end."""
    model: str
    api_key: str | None = None
    stream: bool = True
    extras: bool = True
    usage: bool = True
    chunk_usage: bool = False
    timeout: float = 600.0


def plain_url(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@contextlib.asynccontextmanager
async def http_session(api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """Without limits of its own; every request has a connection of its own.

    A kept connection may be closed by the server at the moment it is used again, which would count
    as a failure of that request.
    """
    _allow_many_files()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
    # A compressed stream would arrive in the pieces that the compressor makes.
    headers = {**authorization(api_key), "Accept-Encoding": "identity"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        yield session


def _allow_many_files() -> None:
    """An overload has thousands of connections open; the usual soft limit is 1024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS knows a limit it does not admit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpSender:
    def __init__(self, session: aiohttp.ClientSession, target: HttpTarget) -> None:
        self.session = session
        self.target = target
        self._url = f"{target.base_url}/v1/completions"

    def body(self, job: Job) -> bytes:
        target = self.target
        fields: dict[str, Any] = {
            "model": target.model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "stream": target.stream,
        }
        if target.extras:
            fields["ignore_eos"] = True
        if target.stream and (target.usage or target.chunk_usage):
            fields["stream_options"] = {"include_usage": True}
            if target.chunk_usage:
                fields["stream_options"]["continuous_usage_stats"] = True
        return msgspec.json.encode(fields)

    async def send(self, job: Job) -> Observation:
        body = self.body(job)
        clock = asyncio.get_running_loop().time
        seen = Observation(sent=clock())
        try:
            async with (
                asyncio.timeout(self.target.timeout),
                self.session.post(self._url, data=body, headers=JSON) as response,
            ):
                if response.status != 200:
                    message = error_message(await response.read())
                    seen.failure = f"HTTP {response.status}: {message}"
                elif self.target.stream:
                    await self._read_stream(response, job, seen)
                else:
                    content = await response.read()
                    seen.ended = clock()
                    read_body(seen, content, job.max_tokens, self.target.extras)
        except TimeoutError:
            seen.failure = timeout_text(self.target.timeout)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            # The message of an error in mid-stream is worth more than that of the cut after it.
            seen.failure = seen.failure or failure_text(error)
        seen.ended = seen.ended or clock()
        return seen

    async def _read_stream(
        self, response: aiohttp.ClientResponse, job: Job, seen: Observation
    ) -> None:
        if response.content_type != "text/event-stream":
            seen.failure = shorten(f"not a stream of events but {response.content_type}")
            return
        clock = asyncio.get_running_loop().time
        reader = StreamReader(seen, job.max_tokens, self.target.extras)
        async for content in response.content.iter_any():
            now = clock()
            reader.feed(content, now)
            if reader.is_done:
                seen.ended = now
                break
        reader.end()


class ServerInfo(msgspec.Struct):
    """What a server says of itself before anything is measured."""

    model: str
    stage: str | None = None
    """Of an engine of ours."""
    version: str | None = None
    vocab_size: int | None = None
    settings: dict[str, Any] = {}


async def probe(
    session: aiohttp.ClientSession, base_url: str, model: str | None, wait: float
) -> ServerInfo:
    """Raises OSError if nobody answers within `wait` seconds, ValueError for no such server."""
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        try:
            models = await _get(session, f"{base_url}/v1/models")
            break
        except (OSError, aiohttp.ClientError) as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise OSError(f"no server at {base_url}: {failure_text(error)}") from error
            await asyncio.sleep(RETRY_SECONDS)
    try:
        served = [str(entry["id"]) for entry in models["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{base_url}/v1/models lists no models: {shorten(str(models))}") from error
    if model is None:
        if not served:
            raise ValueError(f"{base_url} lists no model: give --model")
        model = served[0]
    info = ServerInfo(model)
    version = await _get_or_none(session, f"{base_url}/version")
    if version is not None and isinstance(version.get("version"), str):
        info.version = version["version"]
    stats = await server_stats(session, base_url)
    if stats is not None:
        info.stage, info.settings = stats.get("stage"), stats.get("settings") or {}
        info.vocab_size = stats.get("vocab_size") or info.settings.get("vocab_size")
    return info


async def server_stats(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any] | None:
    """/debug/stats of a server of ours, None of others."""
    return await _get_or_none(session, f"{base_url}/debug/stats")


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    """Raises OSError for a server that is not there or not ready, ValueError for another answer."""
    try:
        async with asyncio.timeout(PROBE_SECONDS), session.get(url) as response:
            body = await response.read()
    except TimeoutError as error:
        raise OSError(f"no answer within {PROBE_SECONDS:g} s") from error
    if response.status >= 500:
        raise OSError(f"HTTP {response.status}: {error_message(body)}")
    if response.status != 200:
        raise ValueError(f"{url}: HTTP {response.status}: {error_message(body)}")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{url} answers no JSON: {shorten(body.decode(errors='replace'))}"
        ) from error


async def _get_or_none(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    try:
        content = await _get(session, url)
    except (OSError, ValueError, aiohttp.ClientError):
        return None
    return content if isinstance(content, dict) else None
