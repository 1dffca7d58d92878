"""Serve OpenAI's API: `python -m steps.03_online.serve`, then POST /v1/completions."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import gc
import ipaddress
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

from shared.cli import flags_of, given, run_main
from steps import load

if TYPE_CHECKING:
    from .app import Api

logger = logging.getLogger(__name__)

BUNDLED_NAME = "tiny"


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own wants an --api-key."""
    port: int = 8000
    """0: any that is free."""
    api_key: str | None = None
    """Clients must send it: Authorization: Bearer KEY."""
    served_model_name: str | None = None
    """What clients call the model. Default: --model as given, or "tiny"."""
    max_body_bytes: int | None = None
    """Longer requests are refused (413). Default: 16 for every token that the model can hold, at
    least 512 KiB."""
    max_connections: int = 2048
    """Most open connections; further ones are refused (503)."""
    request_timeout: float = 30.0
    """Seconds for a request to arrive, head and body (408)."""
    max_queued_requests: int = 1024
    """Most unfinished prompts; further ones are refused (429)."""
    max_output_tokens: int | None = None
    """Most tokens that a request may ask for. Default: as many as the model can hold."""
    drain_timeout: float = 30.0
    """Seconds that requests have to end in after SIGTERM or Ctrl-C."""
    allow_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A web origin whose pages may call the server (CORS); may be repeated."""

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0),
            ("max_body_bytes", 1),
            ("max_connections", 1),
            ("request_timeout", 0.001),
            ("max_queued_requests", 1),
            ("max_output_tokens", 1),
            ("drain_timeout", 0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if self.api_key == "":
            raise ValueError("api_key must not be empty")


def main(stage: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Serves until it is asked to stop, then exits. Status 0; 2, with one line on stderr: wrong
    options or files, or a port in use."""
    run_main(lambda: _serve(stage, sys.argv[1:] if argv is None else argv))


def _serve(stage: str, argv: Sequence[str]) -> int:
    options, config = _parse(stage, argv)
    from .app import ApiOptions  # these take a moment, and --help does without
    from .connections import ConnectionLimits, Connections
    from .server import Stop, allow_open_files, listen, serve

    if options.api_key is None and not _is_loopback(options.host):
        logger.warning("everybody who reaches %s may use this server: no --api-key", options.host)
    limits = ConnectionLimits(options.max_connections, options.request_timeout)
    allow_open_files(limits)
    listener = listen(options.host, options.port)
    api_options = ApiOptions(
        model_name=options.served_model_name or config.model or BUNDLED_NAME,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        max_output_tokens=options.max_output_tokens,
        allow_origins=options.allow_origin,
    )

    async def run() -> None:
        stop = Stop()
        with stop.on_signals():
            await serve(
                lambda: load(stage).AsyncEngine.start(
                    config, max_queued_requests=options.max_queued_requests
                ),
                api_options,
                listener,
                stop,
                options.drain_timeout,
                _freeze,
                Connections(limits),
            )

    asyncio.run(run())
    return 0


def _freeze(api: Api) -> None:
    """What start-up made will stay. Looking through it for garbage, now and then, would stop all
    streams for a tenth of a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules want their objects collected at exit


def _parse(stage: str, argv: Sequence[str]) -> tuple[ServeOptions, Any]:
    """The server's flags and those of the stage's Config, side by side."""
    config_class = load(stage).Config
    flat = tyro.conf.OmitArgPrefixes
    engine = flags_of(config_class, "engine")
    arguments = dataclasses.make_dataclass(
        "Arguments",
        [("server", Annotated[ServeOptions, flat]), ("engine", Annotated[engine, flat])],
    )
    parsed: Any = tyro.cli(
        arguments,
        prog=f"python -m steps.{stage}.serve",
        description="Serve OpenAI's HTTP API; without any flag, the bundled model.",
        args=argv,
    )
    return parsed.server, config_class(**given(parsed.engine))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main(Path(__file__).parent.name)
