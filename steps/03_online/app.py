"""The routes: what each URL answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import prometheus_client
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from shared.version import version

from . import answers, chat, completions
from .answers import ClientGone, EventStream, Format, unless_gone
from .api_types import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
    Status,
    StreamOptions,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from .async_engine import AsyncEngine
from .client import EngineClosedError, dead
from .errors import ApiError, as_api_error, invalid_body, invalid_value
from .generation import Generation, Task
from .live import Live, page
from .metrics import ServerMetrics
from .params import Model

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=GenerationRequest)
T = TypeVar("T")

# Bodies up to this many bytes are tokenised at once; longer ones in a thread, since all streams
# would stand still meanwhile.
SMALL_BODY = 4096
NUM_THREADS = 2
# Bodies from this many bytes on queue for a thread of their own: they would keep all others busy
# for seconds.
HUGE_BODY = 128 * 1024

# A body is read at once, and nobody can look elsewhere meanwhile: all streams wait, some 15 ms for
# 512 KiB. So by default none is taken that is much longer than one prompt that the model can hold.
BYTES_PER_TOKEN = 16
LEAST_BODY = 512 * 1024

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Prepare = Callable[[Body, Model], tuple[Task, Format]]


@dataclass(frozen=True)
class ApiOptions:
    """What the routes are told by the server's flags."""

    model_name: str
    api_key: str | None = None
    max_body_bytes: int | None = None
    """None: by the model's max_model_length."""
    max_output_tokens: int | None = None
    """Most that a request may ask for; None: max_model_length."""
    allow_origins: tuple[str, ...] = ()
    """Of other web pages whose scripts may read the answers."""


class Api:
    """One server's routes over one engine."""

    def __init__(self, engine: AsyncEngine, options: ApiOptions) -> None:
        self.engine = engine
        self.options = options
        self.metrics = ServerMetrics(engine, options.model_name)
        self.lives = [
            Live(number, engine.replicas, options.model_name)
            for number in range(len(engine.replicas))
        ]
        self.is_draining = False
        self.num_preparing = 0
        """Requests that the engine may not know of yet, or that are not streamed."""
        self._created = int(time.time())
        self._threads = ThreadPoolExecutor(NUM_THREADS, "prepare")
        self._huge_thread = ThreadPoolExecutor(1, "prepare-huge")

    @property
    def _model(self) -> Model:
        """As the engine is now: one that has been restarted may have other limits."""
        limits = self.engine.info.limits
        return Model(
            self.engine.tokenizer,
            limits,
            self.options.max_output_tokens or limits.max_model_length,
            self.engine.check_request,
            self.engine.max_queued_requests,
        )

    @property
    def max_body_bytes(self) -> int:
        if self.options.max_body_bytes is not None:
            return self.options.max_body_bytes
        return max(LEAST_BODY, BYTES_PER_TOKEN * self.engine.info.limits.max_model_length)

    @property
    def is_idle(self) -> bool:
        return not self.num_preparing and not self.engine.num_unfinished

    def close(self) -> None:
        for threads in (self._threads, self._huge_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def check(self, request: Request) -> None:
        """Raises ApiError, before the body is read, if the request is not served at all."""
        key = self.options.api_key
        if key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(given.strip().encode("latin-1"), key.encode())
            if scheme.lower() != "bearer" or not is_right:
                raise ApiError(
                    401,
                    "wrong or missing API key",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        self.check_ready()

    def check_ready(self) -> None:
        self.check_alive()
        if self.is_draining:
            raise as_api_error(EngineClosedError())

    def check_alive(self) -> None:
        if self.engine.error is not None:
            raise as_api_error(dead(self.engine.error))

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or each of several."""
        return await self._answer(body, request, completions.prepare, "cmpl")

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """Say what comes next in a conversation."""
        return await self._answer(body, request, chat.prepare, "chatcmpl")

    async def _answer(
        self, body: Body, request: Request, prepare: Prepare[Body], prefix: str
    ) -> Response:
        arrival = time.perf_counter()
        self._check_model(body.model)
        self.num_preparing += 1
        try:
            work = self._generate(body, request, prepare, prefix, arrival)
            return await unless_gone(request.receive, work)
        except ClientGone:
            return Response(status_code=answers.CLIENT_GONE)
        except ApiError:
            raise
        except Exception as error:
            raise as_api_error(error) from error
        finally:
            self.num_preparing -= 1

    async def _generate(
        self, body: Body, request: Request, prepare: Prepare[Body], prefix: str, arrival: float
    ) -> Response:
        task, format = await self._outside_loop(request, lambda: prepare(body, self._model))
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        head = {"id": request_id, "created": int(time.time()), "model": self.options.model_name}
        generation = Generation(
            self.engine, request_id, task, arrival, self._observe_first, self._observe
        )
        if not body.stream:
            return await answers.body(generation, format, head)
        options = body.stream_options or StreamOptions()
        events = answers.events(generation, format, head, options)
        return EventStream(await anext(events), events)

    def _observe_first(self, ttft: float) -> None:
        self.metrics.observe_first(ttft)
        for live in self.lives:
            live.observe_first(ttft)

    def _observe(self, generation: Generation) -> None:
        self.metrics.observe(generation)
        for live in self.lives:
            live.observe(generation)

    async def _outside_loop(self, request: Request, work: Callable[[], T]) -> T:
        """Run what takes long if the body is long."""
        length = len(await request.body())
        if length <= SMALL_BODY:
            return work()
        threads = self._threads if length < HUGE_BODY else self._huge_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.options.model_name:
            raise ApiError(
                404,
                f"model {name[:80]!r} does not exist; this server has {self.options.model_name!r}",
                "model",
                "model_not_found",
            )

    async def models(self) -> ModelList:
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> ModelCard:
        self._check_model(name)
        return self._card()

    def _card(self) -> ModelCard:
        return {
            "id": self.options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "baby-vllm",
            "max_model_len": self._model.limits.max_model_length,
        }

    async def tokenize(self, body: TokenizeRequest, request: Request) -> TokenizeResponse:
        """Token ids of a text, or of a conversation as the model's template writes it."""
        self._check_model(body.model)
        tokens = await self._outside_loop(request, lambda: _tokenize(body, self._model))
        limit = self._model.limits.max_model_length
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
        """The text of token ids, that of special ones included."""
        self._check_model(body.model)
        text = await self._outside_loop(request, lambda: _detokenize(body, self._model))
        return {"prompt": text}

    async def health(self) -> Health:
        """Is the engine alive, or at least one of several? 503 if not."""
        self.check_alive()
        replicas = self.engine.replicas
        return {
            "status": "ok" if all(replica.is_alive for replica in replicas) else "degraded",
            "engines": [
                {"engine": n, "alive": replica.is_alive, "restarts": replica.num_restarts}
                for n, replica in enumerate(replicas)
            ],
        }

    async def ready(self) -> Status:
        """Are new requests served? 503 while the server shuts down, too."""
        self.check_ready()
        return {"status": "ok"}

    async def version(self) -> Version:
        return {"version": version()}

    async def prometheus(self) -> Response:
        content = prometheus_client.generate_latest(self.metrics.registry)
        return Response(content, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def stats(self) -> dict[str, Any]:
        """The engine's settings and counters."""
        info = self.engine.info
        return {
            "stage": info.stage,
            "pid": info.pid,
            "vocab_size": info.vocab_size,
            "settings": info.description,
            "stats": msgspec.to_builtins(self.engine.stats),
            "unfinished_requests": self.engine.num_unfinished,
            "draining": self.is_draining,
            "engines": [
                {
                    "engine": number,
                    "alive": replica.is_alive,
                    "restarts": replica.num_restarts,
                    "pid": replica.info.pid,
                    "stats": msgspec.to_builtins(replica.stats),
                    "unfinished_requests": replica.num_unfinished,
                    "outstanding_tokens": replica.outstanding_tokens,
                }
                for number, replica in enumerate(self.engine.replicas)
            ],
        }

    async def feed(self, engine: int = 0) -> Response:
        """What the live page shows of one engine."""
        if not 0 <= engine < len(self.lives):
            message = f"engine {engine} does not exist; there are {len(self.lives)}"
            raise ApiError(404, message, "engine")
        if not self.engine.replicas[engine].is_alive:
            raise ApiError(503, f"engine {engine} is not running", code="engine_dead")
        return await self.lives[engine].feed()


def _tokenize(body: TokenizeRequest, model: Model) -> list[int]:
    try:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is not None:
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(body, name) is not None:
                    raise ApiError(400, f"{name} needs messages", name)
            add = body.add_special_tokens is not False
            return model.need_tokenizer("prompt").encode(body.prompt, add)
        text = chat.render(
            body.messages or [],
            model,
            body.chat_template_kwargs,
            body.add_generation_prompt is not False,
        )
        return model.need_tokenizer("messages").encode(text, bool(body.add_special_tokens))
    except ValueError as error:
        default = "prompt" if body.messages is None else "messages"
        raise invalid_value(
            error, TokenizeRequest.model_fields, {"text": default}, default
        ) from error


def _detokenize(body: DetokenizeRequest, model: Model) -> str:
    vocab_size = model.limits.vocab_size
    try:
        tokenizer = model.need_tokenizer("tokens")
        wrong = next((t for t in body.tokens if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"tokens holds {wrong}, outside the vocabulary of {vocab_size} tokens")
    except ValueError as error:
        raise invalid_value(error, DetokenizeRequest.model_fields) from error
    return tokenizer.decode(body.tokens, skip_special_tokens=False)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A body of many small lists would have garbage looked for again and again while it is read,
    which takes several times as long as reading it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _why_not_json(error: Exception, body: bytes) -> str:
    message = f"the body is not valid JSON: {error}"
    if SURROGATE.search(body):
        message += " (escapes from \\ud800 to \\udfff are halves of a character: both or none)"
    return message


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorResponse, "description": "The request is wrong, or one too many."},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve it."},
}


def build_app(api: Api) -> FastAPI:
    """The ASGI application. Closing api and engine is the caller's business."""
    # No page for the docs: FastAPI's loads its scripts from elsewhere.
    app = FastAPI(title="baby-vllm", version=version(), docs_url=None, redoc_url=None)
    app.include_router(_routes(api))
    app.include_router(_open_routes(api))
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(Exception, _fail)
    if api.options.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.options.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _routes(api: Api) -> APIRouter:
    """Where the key is asked for."""
    router = APIRouter(route_class=_served_route(api), responses=ERRORS)
    add = router.add_api_route
    stream: dict[str, Any] = {"text/event-stream": {}}  # OpenAPI 3.1 cannot describe events
    for path, endpoint, answer in (
        ("/v1/completions", api.completions, CompletionResponse),
        ("/v1/chat/completions", api.chat_completions, ChatResponse),
    ):
        responses: Responses = {200: {"model": answer, "content": stream}}
        add(path, endpoint, methods=["POST"], responses=responses)
    add("/tokenize", api.tokenize, methods=["POST"])
    add("/detokenize", api.detokenize, methods=["POST"])
    add("/v1/models", api.models)
    add("/v1/models/{name:path}", api.model)
    add("/debug/stats", api.stats)
    add("/debug/live", api.feed, include_in_schema=False)  # it never ends
    return router


def _open_routes(api: Api) -> APIRouter:
    """What probes and scrapers ask, which bring no key; nothing of any request is in it."""
    router = APIRouter(responses={"5XX": ERRORS["5XX"]})
    for path, answer in (("/health", api.health), ("/ready", api.ready)):
        router.add_api_route(path, answer)
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    router.add_api_route("/version", api.version)
    router.add_api_route("/", page, include_in_schema=False)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    router.add_api_route("/metrics", api.prometheus, response_class=Response, responses=text)
    return router


def _served_route(api: Api) -> type[APIRoute]:
    """Routes that check before they read, and read no more than is allowed."""

    class ServedRequest(Request):
        async def body(self) -> bytes:
            if not hasattr(self, "_body"):
                chunks, size, most = [], 0, api.max_body_bytes
                async for chunk in self.stream():
                    size += len(chunk)
                    if size > most:
                        raise too_large(most)
                    chunks.append(chunk)
                self._body = b"".join(chunks)
            return self._body

        async def json(self) -> Any:
            # Several times as fast as json.loads, which all streams would feel.
            body = await self.body()
            try:
                with _no_collection():
                    return msgspec.json.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ApiError(400, _why_not_json(error, body)) from error

    def too_large(most: int) -> ApiError:
        return ApiError(
            413, f"the body has more than {most} bytes (--max-body-bytes)", code="body_too_large"
        )

    class ServedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                api.check(request)
                length, most = request.headers.get("content-length", ""), api.max_body_bytes
                if length.isdecimal() and int(length) > most:
                    raise too_large(most)
                return await handle(ServedRequest(request.scope, request.receive))

            return checked

    return ServedRoute


def _as_response(error: ApiError) -> Response:
    headers = dict(error.headers or {})
    content = answers.encode(error.body)
    return Response(content, error.status_code, headers, media_type="application/json")


async def _refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _as_response(invalid_body(error.errors()))


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):  # an unknown path, a wrong method
        error = ApiError(error.status_code, error.detail, headers=error.headers)
    return _as_response(error)


async def _fail(request: Request, error: Exception) -> Response:
    # uvicorn logs it.
    return _as_response(ApiError(500, "the server could not complete the request"))
