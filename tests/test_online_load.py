"""Hundreds of streams at once, of which many leave and some hardly read."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

import steps
from shared import SamplingParams
from tests.online_server import TIMEOUT, ServerThread, wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS = 200
BLOCKS = 40  # not enough for all that run: some are preempted


async def read_stream(
    port: int, body: dict[str, Any], leave_after: int | None, pause: float
) -> str:
    """The text of a stream, however slowly it is read. `leave_after` events: go away, no text."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    # A small buffer, so that a slow reader is felt in the server.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    await writer.drain()
    text, num_events = "", 0
    try:
        while leave_after is None or num_events < leave_after:
            line = await reader.readline()
            assert line, "the stream was cut"
            if line.startswith(b"HTTP/1.1"):
                assert line.startswith(b"HTTP/1.1 200"), line
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return text
            num_events += 1
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            await asyncio.sleep(pause)
        return ""
    finally:
        writer.close()


def test_survivors_are_complete_and_the_pool_is_whole() -> None:
    draw = random.Random(0)
    prompts = [f"Act {number}. ROMEO:\n" * draw.randint(1, 6) for number in range(NUM_STREAMS)]
    lengths = [draw.randint(10, 60) for _ in prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    leaving = [draw.randint(0, n // 2) if draw.random() < 0.4 else None for n in lengths]
    pauses = [draw.choice((0, 0, 0, 0.05)) for _ in prompts]
    config = {"num_kvcache_blocks": BLOCKS, "max_num_sequences": 64}
    with steps.load("01_chunked_prefill").LLM(dtype="float32", num_kvcache_blocks=400) as llm:
        expected = [output.text for output in llm.generate(prompts, params)]

    async def run(port: int) -> list[str]:
        async with asyncio.timeout(3 * TIMEOUT):
            return await asyncio.gather(
                *(
                    read_stream(port, body(prompt, n), leave, pause)
                    for prompt, n, leave, pause in zip(
                        prompts, lengths, leaving, pauses, strict=True
                    )
                )
            )

    with ServerThread(config) as server:
        texts = asyncio.run(run(server.port))
        for text, said, leave in zip(texts, expected, leaving, strict=True):
            assert text == ("" if leave is not None else said)
        server.wait_idle()
        assert server.engine.stats.preemptions > 0


def body(prompt: str, num_tokens: int) -> dict[str, Any]:
    fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"prompt": prompt, **fields}


def test_no_request_leaves_anything_behind() -> None:
    """What each request left, or each whose client goes away, would be there once for each of them:
    allocations of one line are counted, since sizes hide that under caches that fill up."""
    num_streams, num_rounds = 50, 8
    leaving = num_streams // 2

    async def run(port: int, count: int) -> None:
        for _ in range(count):
            streams = (
                read_stream(port, body(f"{n}:", 6), 3 if n < leaving else None, 0)
                for n in range(num_streams)
            )
            await asyncio.gather(*streams)
        # Alone, so that the engine's last step holds one sequence and not any number of them.
        await read_stream(port, body("last:", 6), None, 0)

    def allocations(server: ServerThread) -> Counter[str]:
        wait_until(lambda: server.api.is_idle and not connections(), "connections are open")
        kernels = tracemalloc.Filter(False, "*/shared/kernels/*")  # torch keeps objects for reuse
        taken = tracemalloc.take_snapshot().filter_traces([kernels])
        return Counter({str(line.traceback): line.count for line in taken.statistics("lineno")})

    with ServerThread({"num_kvcache_blocks": BLOCKS}) as server:
        asyncio.run(run(server.port, 2))
        tracemalloc.start()
        try:
            asyncio.run(run(server.port, 5))
            before = allocations(server)
            asyncio.run(run(server.port, num_rounds))
            grown = allocations(server) - before
        finally:
            tracemalloc.stop()
    assert grown.most_common(1)[0][1] < num_rounds * leaving, grown.most_common(5)


def connections() -> list[H11Protocol]:
    """Of servers in this process, also those that have been closed and not let go."""
    gc.collect()
    return [made for made in gc.get_objects() if isinstance(made, H11Protocol)]
