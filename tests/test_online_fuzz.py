"""Whatever is sent, the answer is as the server's own OpenAPI description says, and never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.online_server import TIMEOUT, ServerThread

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(max_output_tokens=4) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def schema(server: ServerThread) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


ROUTES = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/debug/stats": "GET",
    "/health": "GET",
    "/ready": "GET",
    "/version": "GET",
    "/metrics": "GET",
}


def test_every_route_is_described(schema: Any) -> None:
    assert set(schema) == set(ROUTES)


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_as_described(schema: Any, path: str) -> None:
    check_answers(schema[path][ROUTES[path]], GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", [path for path, method in ROUTES.items() if method == "POST"])
def test_a_request_that_is_not(schema: Any, path: str) -> None:
    check_answers(schema[path][ROUTES[path]], GenerationMode.NEGATIVE)


def check_answers(operation: Any, mode: GenerationMode) -> None:

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=TIMEOUT)

    check()
