"""OpenAI's error shape, and what becomes of every exception.

    {"error": {"message": ..., "type": ..., "param": the field that is wrong or null, "code": ...}}

What the client did wrong is explained to it; what the server did wrong is logged, and the client
only learns that.
"""

from __future__ import annotations

import itertools
import logging
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic
from starlette.exceptions import HTTPException

from shared.sampling_params import SamplingParams

from .api_types import ErrorResponse
from .async_engine import EngineClosedError, EngineDeadError, QueueFull, RequestRefused

logger = logging.getLogger(__name__)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

# More of a wrong value than this tells nobody more.
MAX_SHOWN = 80
MAX_ERRORS = 3

FIELD = re.compile(r"[a-z_]+")


class ApiError(HTTPException):
    """Anything that is answered with another status than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorResponse:
        kind = TYPES.get(self.status_code, "invalid_request_error")
        return {
            "error": {
                "message": self.detail,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid_body(errors: Sequence[Any]) -> ApiError:
    """From the errors of a pydantic model that was read from a request's body."""
    details = []
    for error in errors[:MAX_ERRORS]:
        where = _path(error["loc"])
        if not where and error["type"] != "value_error":
            details.append("the body must be a JSON object with Content-Type: application/json")
        elif error["type"] == "extra_forbidden":
            details.append(f"{where} is not supported")
        elif error["type"] == "missing":
            details.append(f"{where} is missing")
        else:
            what = error["msg"].removeprefix("Value error, ")
            details.append(f"{where or 'the body'}: {what}, got {_shown(error['input'])}")
    return ApiError(400, "; ".join(details), _path(errors[0]["loc"]) or None)


def invalid_value(
    error: ValueError,
    fields: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    default: str | None = None,
) -> ApiError:
    """From a ValueError of the engine, the tokenizer or SamplingParams. Most begin with a field.

    `fields`: the request's. `names`: what it calls a field of which the error has another name.
    `default`: the field to blame where the message names none.
    """
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            message = f"{first['loc'][0]}: {message}, got {_shown(first['input'])}"
    else:
        message = " ".join(str(error).split())
    match = FIELD.match(message)
    names = names or {}
    if match is None or match[0] not in {*names, *fields, *SamplingParams.model_fields}:
        return ApiError(400, message, default)
    field = names.get(match[0], match[0])
    return ApiError(400, field + message[match.end() :], field)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. One that is nobody's answer is logged and hidden."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine is not running", code="engine_dead")
    if isinstance(error, RequestRefused):
        return invalid_value(error)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server could not complete the request")


def _path(loc: Sequence[int | str]) -> str:
    """("body", "messages", 0, "role") -> "messages.0.role"."""
    parts = loc[1:] if loc and loc[0] == "body" else loc
    return ".".join(str(part)[:MAX_SHOWN] for part in parts)


def _shown(value: object) -> str:
    text = _short.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class _Short(reprlib.Repr):
    """Spells the beginning of a value, however large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxdict = MAX_SHOWN // 4
        self.maxstring = self.maxlong = 2 * MAX_SHOWN

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        # The original would sort all keys first.
        first = dict(itertools.islice(value.items(), self.maxdict + 1))
        return super().repr_dict(first, level)


_short = _Short()
