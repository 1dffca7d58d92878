"""Replicas behind an asyncio front end and an HTTP server: who gets what, who is told of an end,
and that what has ended comes back.

Engines run in threads here; test_replica_processes.py has processes, and kills them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.fakes import VOCABULARY, expected_output
from tests.online import LIMITS, FakeEngine, Slow, online, unusable
from tests.online_server import TIMEOUT, ServerThread, raw_request, wait_until
from tests.parallel import FATAL, Behind, Mortal, config, parallel
from tests.test_online_engine import params, run, tokens_of

async_engine = parallel("async_engine")
AsyncEngine = async_engine.AsyncEngine
EngineDeadError = online("client").EngineDeadError


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "FIRST_DELAY", 0.05)
    monkeypatch.setattr(async_engine, "MAX_DELAY", 0.2)


def with_replicas(
    build: Any, use: Callable[[Any, list[Any]], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run `use(front end, engines behind it)`; what has not died must be idle and whole then."""
    start = {"max_queued_requests": options.pop("max_queued_requests", 1024)}
    behind = Behind(build)

    async def main() -> None:
        engine = await AsyncEngine.start(config(**options), in_process=True, build=behind, **start)
        try:
            await use(engine, behind.engines)
            while engine.stats.running or engine.stats.waiting or engine.stats.used_blocks:
                await asyncio.sleep(0.002)
            assert engine.num_unfinished == 0
            assert [replica.outstanding_tokens for replica in engine.replicas] == [0, 0]
        finally:
            await engine.close()
            await engine.close()

    run(main())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.002)


def test_streams_are_complete_and_both_replicas_work() -> None:
    async def use(engine: Any, behind: list[Any]) -> None:
        prompts = [[i, i + 1, 2] for i in range(30)]
        streams = [engine.generate(f"r{i}", p, params(20)) for i, p in enumerate(prompts)]
        assert engine.num_unfinished == 30
        got = await asyncio.gather(*map(tokens_of, streams))
        assert got == [expected_output(p, 20, VOCABULARY) for p in prompts]
        await until(lambda: engine.stats.counters.generation_tokens == 600)
        assert [one.recorder.counters.generation_tokens for one in behind] == [300, 300]

    with_replicas(FakeEngine, use)


def test_who_leaves_ends_alone() -> None:
    async def use(engine: Any, behind: list[Any]) -> None:
        streams = [
            engine.generate(str(i), [i, 1], params(100 if i < 2 else 8000)) for i in range(4)
        ]
        for stream in streams[2:]:
            await anext(stream)
        assert [len(one.queues.running) for one in behind] == [2, 2]
        await streams[2].aclose()
        streams[3].abort()
        for number in range(2):
            got = await tokens_of(streams[number])
            assert got == expected_output([number, 1], 100, VOCABULARY)

    with_replicas(Slow, use)


def test_what_is_refused() -> None:
    async def use(engine: Any, behind: list[Any]) -> None:
        first = engine.generate("a", [1], params(30))
        second = engine.generate("b", [2], params(30))
        with pytest.raises(async_engine.online("async_engine").QueueFull, match="2 requests"):
            engine.generate("c", [3], params(3))
        first.abort()
        with pytest.raises(ValueError, match="already running"):
            engine.generate("b", [3], params(3))
        with pytest.raises(ValueError, match="max_model_length"):
            engine.generate("c", [3] * 9000, params(3))
        with pytest.raises(ValueError, match="vocabulary"):
            engine.check_request([VOCABULARY], params(3))
        assert await tokens_of(second) == expected_output([2], 30, VOCABULARY)

    with_replicas(FakeEngine, use, max_queued_requests=2)


def test_an_end_fails_the_replicas_own_requests_alone_and_another_engine_follows() -> None:
    async def use(engine: Any, behind: list[Any]) -> None:
        prompts = [[1], [FATAL], [2], [3]]
        streams = [engine.generate(f"r{i}", p, params(60)) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        for number in (0, 2):
            assert results[number] == expected_output(prompts[number], 60, VOCABULARY)
        for number in (1, 3):
            assert isinstance(results[number], EngineDeadError)
            assert "bad luck" in str(results[number])
        assert engine.is_alive
        await until(lambda: engine.replicas[1].is_alive)
        assert [replica.num_restarts for replica in engine.replicas] == [0, 1]
        assert len(behind) == 3
        again = [engine.generate(f"again {i}", [i], params(5)) for i in range(4)]
        await asyncio.gather(*map(tokens_of, again))
        assert behind[2].recorder.counters.generation_tokens == 10

    with_replicas(Mortal, use)


def test_while_one_is_down_the_other_has_all() -> None:
    async def use(engine: Any, behind: list[Any]) -> None:
        prefix = [5] * 64
        await tokens_of(engine.generate("first", prefix, params(3)))
        await tokens_of(engine.generate("other", [6] * 64, params(3)))
        async_engine.FIRST_DELAY = 60  # restored by the fixture
        with pytest.raises(EngineDeadError):
            await tokens_of(engine.generate("fatal", [FATAL], params(3)))
        assert not engine.replicas[0].is_alive
        streams = [engine.generate(str(i), prefix, params(10)) for i in range(4)]
        await asyncio.gather(*map(tokens_of, streams))
        await until(lambda: engine.replicas[1].stats.counters.generation_tokens == 43)
        with pytest.raises(EngineDeadError):
            await tokens_of(engine.generate("fatal", [FATAL], params(3)))
        assert not engine.is_alive
        for call in (engine.generate, lambda name, *request: engine.check_request(*request)):
            with pytest.raises(EngineDeadError, match="no replica is running"):
                call("late", [1], params(1))
        assert engine.stats.running == 0

    with_replicas(Mortal, use)


def test_close_fails_what_is_unfinished() -> None:
    """As by who stops the server, not by a fault."""
    closed = online("client").EngineClosedError

    async def main() -> None:
        engine = await AsyncEngine.start(config(), in_process=True, build=Behind(Slow))
        streams = [engine.generate(str(i), [i], params(8000)) for i in range(2)]
        reading = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        await engine.close()
        results = await asyncio.gather(*reading, return_exceptions=True)
        assert [type(result) for result in results] == [closed, closed]
        with pytest.raises(closed):
            engine.generate("late", [1], params(1))
        assert isinstance(engine.error, closed)
        assert [replica.num_restarts for replica in engine.replicas] == [0, 0]

    run(main())


def test_starts_that_fail_come_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    builds = 0

    def build(options: dict[str, Any], end: Any = None) -> Any:
        nonlocal builds
        builds += 1
        if 2 < builds < 6:
            raise ValueError(f"no luck at {builds}")
        return Mortal(options)

    async def use(engine: Any, behind: list[Any]) -> None:
        with pytest.raises(EngineDeadError):
            await tokens_of(engine.generate("fatal", [FATAL], params(5)))
        await until(lambda: bool(engine.replicas[0].num_restarts))
        assert engine.replicas[0].num_restarts == 1
        await tokens_of(engine.generate("a", [1], params(5)))

    with caplog.at_level(logging.INFO):
        with_replicas(build, use)
    said = [r.getMessage() for r in caplog.records if r.name == async_engine.logger.name]
    waits = [text.rpartition("in ")[2] for text in said if "is down" in text]
    assert waits == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]
    assert sum("has not started: no luck" in text for text in said) == 3
    assert said[-1] == "replica 0 is back"


def test_a_start_that_fails_says_why_and_ends_the_others() -> None:
    builds = 0
    made: list[Any] = []

    def build(options: dict[str, Any], end: Any = None) -> Any:
        nonlocal builds
        builds += 1
        if builds == 2:
            unusable(options, end)
        made.append(FakeEngine(options))
        return made[0]

    with pytest.raises(ValueError, match="num_kvcache_blocks=7"):
        run(AsyncEngine.start(config(), in_process=True, build=build))
    wait_until(lambda: all(engine.closed for engine in made))


def test_an_engine_that_nobody_waits_for_any_more_is_closed() -> None:
    """It is ready when the start of the other has failed."""
    release = threading.Event()
    made: list[Any] = []
    numbers = itertools.count()

    def build(options: dict[str, Any], end: Any = None) -> Any:
        if next(numbers):
            unusable(options, end)
        release.wait(TIMEOUT)
        made.append(FakeEngine(options))
        return made[0]

    try:
        with pytest.raises(ValueError, match="num_kvcache_blocks=7"):
            run(AsyncEngine.start(config(), in_process=True, build=build))
    finally:
        release.set()
    wait_until(lambda: made and made[0].closed)


def test_a_start_can_be_given_up() -> None:
    release = threading.Event()

    def build(options: dict[str, Any], end: Any = None) -> Any:
        release.wait(TIMEOUT)
        return FakeEngine(options)

    async def main() -> None:
        starting = asyncio.create_task(AsyncEngine.start(config(), in_process=True, build=build))
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    try:
        run(main())
    finally:
        release.set()


# --- over HTTP -----------------------------------------------------------------------------------

RUNNING = {"prompt": [1], "max_tokens": 300, "ignore_eos": True, "stream": True}


@contextmanager
def serving(build: Any, **options: Any) -> Iterator[ServerThread]:
    fake = {"model": "qwen3-0.6b", "load_format": "dummy", "data_parallel_size": 2}
    start = {"build": Behind(build)}
    with ServerThread(fake, start=start, stage="04_dp_tp", model_name="fake", **options) as server:
        yield server


def post(server: ServerThread, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)


def get(server: ServerThread, path: str) -> Any:
    response = httpx.get(f"{server.url}{path}", timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    return response.json()


def metrics(server: ServerThread, name: str) -> dict[str, float]:
    """By engine."""
    lines = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{")]
    return {line.split('engine="')[1][0]: float(line.rpartition(" ")[2]) for line in found}


def test_server_shows_every_replica() -> None:
    with serving(Mortal) as server:
        for number in range(4):
            assert post(server, prompt=[number], max_tokens=5).status_code == 200
        server.wait_idle()
        assert get(server, "/health") == {
            "status": "ok",
            "engines": [{"engine": n, "alive": True, "restarts": 0} for n in range(2)],
        }
        wait_until(lambda: metrics(server, "vllm:generation_tokens_total") == {"0": 10, "1": 10})
        assert metrics(server, "baby_vllm:engine_up") == {"0": 1, "1": 1}
        stats = get(server, "/debug/stats")
        assert stats["stats"]["counters"]["generation_tokens"] == 20
        assert stats["settings"]["data_parallel_size"] == 2
        for number, one in enumerate(stats["engines"]):
            assert (one["engine"], one["alive"], one["restarts"]) == (number, True, 0)
            assert one["stats"]["counters"]["generation_tokens"] == 10
            assert one["unfinished_requests"] == one["outstanding_tokens"] == 0


def test_server_goes_on_with_what_lives_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "FIRST_DELAY", 4.0)
    monkeypatch.setattr(async_engine, "MAX_DELAY", 4.0)
    with serving(Mortal) as server:
        assert post(server, prompt=[FATAL], max_tokens=5).json()["error"]["code"] == "engine_dead"
        health = get(server, "/health")
        assert health["status"] == "degraded"
        assert [engine["alive"] for engine in health["engines"]] == [False, True]
        assert get(server, "/ready") == {"status": "ok"}
        assert metrics(server, "baby_vllm:engine_up") == {"0": 0, "1": 1}
        assert metrics(server, "vllm:num_requests_running").keys() == {"1"}
        assert not get(server, "/debug/stats")["engines"][0]["alive"]
        assert httpx.get(f"{server.url}/debug/live?engine=0").status_code == 503
        for _ in range(3):
            assert post(server, prompt=[1], max_tokens=5).status_code == 200
        assert post(server, prompt=[FATAL], max_tokens=5).status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert post(server, prompt=[1]).json()["error"]["code"] == "engine_dead"
        assert metrics(server, "baby_vllm:engine_up") == {"0": 0, "1": 0}
        wait_until(lambda: get_status(server) == "ok")
        assert [engine["restarts"] for engine in get(server, "/health")["engines"]] == [1, 1]
        assert metrics(server, "baby_vllm:engine_restarts_total") == {"0": 1, "1": 1}
        assert post(server, prompt=[1], max_tokens=5).status_code == 200
        server.wait_idle()


def test_a_restarted_replica_may_hold_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, for somebody else uses its GPU by now: what the server says of its limits follows."""
    with serving(Mortal) as server:
        before = get(server, "/debug/stats")
        monkeypatch.setattr(
            "tests.online.LIMITS", replace(LIMITS, num_blocks=10, max_model_length=160)
        )
        assert post(server, prompt=[FATAL], max_tokens=5).status_code == 503
        wait_until(lambda: get_status(server) == "ok")
        after = get(server, "/debug/stats")
        assert before["settings"]["num_kvcache_blocks"] == 1000
        assert after["settings"]["num_kvcache_blocks"] == 10
        assert after["settings"]["max_model_length"] == 160
        assert after["stats"]["num_blocks"] == 1010
        (card,) = get(server, "/v1/models")["data"]
        assert card["max_model_len"] == 160
        for number in range(2):  # whichever replica would get it
            refused = post(server, prompt=[number] * 200, max_tokens=5)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def get_status(server: ServerThread) -> str | None:
    status: str | None = httpx.get(f"{server.url}/health").json().get("status")
    return status


def test_a_stream_of_a_dead_replica_ends_with_an_error_and_the_others_go_on() -> None:
    with serving(Mortal) as server:
        texts: dict[int, str] = {}

        def read(number: int) -> None:
            texts[number] = post(server, **{**RUNNING, "prompt": [number]}).text

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.num_unfinished == 4)
        assert post(server, prompt=[FATAL], max_tokens=5).status_code == 503
        for thread in threads:
            thread.join(TIMEOUT)
        assert sum('"error"' in text for text in texts.values()) == 2
        assert sum('"finish_reason":"length"' in text for text in texts.values()) == 2
        assert all(text.endswith("data: [DONE]\n\n") for text in texts.values())
        wait_until(lambda: get_status(server) == "ok")
        server.wait_idle()


def test_who_leaves_frees_the_replica_that_worked_for_it() -> None:
    with serving(Slow) as server:
        body = json.dumps({**RUNNING, "max_tokens": 8000}).encode()
        connections = [
            raw_request(server.port, "POST /v1/completions HTTP/1.1", body) for _ in range(2)
        ]
        engines = server.start["build"].engines
        wait_until(lambda: [len(engine.queues.running) for engine in engines] == [1, 1])
        for connection in connections:
            assert connection.recv(100)
        connections[0].close()
        wait_until(lambda: sum(len(engine.queues.running) for engine in engines) == 1)
        assert server.engine.num_unfinished == 1
        connections[1].close()
        server.wait_idle()


def test_draining_waits_for_all_replicas() -> None:
    with serving(Slow) as server:
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(post(server, **RUNNING).text))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        engines = server.start["build"].engines
        wait_until(lambda: [len(engine.queues.running) for engine in engines] == [2, 2])
        server.stop()
        wait_until(lambda: server.api.is_draining)
        assert post(server, prompt=[1]).json()["error"]["code"] == "shutting_down"
        for thread in threads:
            thread.join(TIMEOUT)
        assert all('"finish_reason":"length"' in text for text in texts)
        assert len(texts) == 4
        server.join()
        assert all(engine.closed for engine in engines)


def test_a_feed_is_of_one_engine_and_ends_with_it() -> None:
    with serving(Mortal) as server:
        url = f"{server.url}/debug/live"
        assert httpx.get(f"{url}?engine=2").json()["error"]["param"] == "engine"
        assert httpx.get(f"{url}?engine=x").status_code == 400
        with httpx.stream("GET", f"{url}?engine=1", timeout=TIMEOUT) as feed:
            events = (json.loads(line[6:]) for line in feed.iter_lines() if line)
            hello = next(events)
            assert (hello["engine"], hello["num_engines"]) == (1, 2)
            for number in range(2):
                post(server, prompt=[number], max_tokens=5)
            assert post(server, prompt=[1], max_tokens=5).status_code == 200
            assert post(server, prompt=[FATAL], max_tokens=5).status_code == 503
            steps = [bar for event in events for bar in event["steps"]]
        assert {len(bar[5]) for bar in steps if bar[5]} == {1}
        wait_until(lambda: get_status(server) == "ok")
        with httpx.stream("GET", f"{url}?engine=1", timeout=TIMEOUT) as feed:
            assert json.loads(next(feed.iter_lines())[6:])["kind"] == "hello"


def test_openai_client() -> None:
    """The bundled model, twice."""
    with ServerThread({"data_parallel_size": 2}, stage="04_dp_tp") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 12}
        answers = [client.completions.create(prompt="ROMEO:\n", **asked) for _ in range(4)]
        assert len({answer.choices[0].text for answer in answers}) == 1
        several = client.completions.create(prompt=["ROMEO:\n", "JULIET:\n"], **asked)
        assert several.choices[0].text == answers[0].choices[0].text
        messages = [{"role": "user", "content": "Who's there?"}]
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        server.wait_idle()
