"""Replicas in processes of their own: whichever dies, and however, the others go on, nobody waits,
and nothing is left.

Socket directories of these tests lie under a path of their own (TMPDIR), so that a forgotten one
shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import VOCABULARY, expected_output
from tests.online import SECONDS, online
from tests.online_server import TIMEOUT
from tests.parallel import config, parallel
from tests.test_online_engine import params, run, tokens_of
from tests.test_online_process import ROOT, directory, is_running, wait_until
from tests.test_online_serve import FLAGS, ServeProcess, serving, stream

__all__ = ["directory"]  # a fixture that every test here uses

async_engine = parallel("async_engine")
AsyncEngine = async_engine.AsyncEngine
EngineDeadError = online("client").EngineDeadError


async def start(build: str, **options: Any) -> Any:
    module = "online" if hasattr(__import__("tests.online").online, build) else "parallel"
    return await AsyncEngine.start(config(**options), build=f"tests.{module}:{build}")


def pids_of(engine: Any) -> list[int]:
    return [replica.info.pid for replica in engine.replicas]


def children_of(pid: int) -> list[int]:
    """Of a process, whichever of its threads started them: those that run."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(child for child in map(int, itertools.chain(*lists)) if is_running(child))


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_replica_fails_its_own_streams_and_comes_back(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "FIRST_DELAY", 0.1)

    async def main() -> None:
        engine = await start(build)
        pids = pids_of(engine)
        assert len({*pids, os.getpid()}) == 3
        streams = [engine.generate(f"r{i}", [i, 1], params(400)) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        victims = [tokens_of(s) for s in streams if engine.replicas[1].engine.expects(s.request_id)]
        assert len(victims) == 4
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*victims, return_exceptions=True)
        assert time.monotonic() - killed < 1
        assert {str(result) for result in results} == {"the engine process was killed by SIGKILL"}
        assert [type(result) for result in results] == [EngineDeadError] * 4
        assert engine.is_alive
        assert engine.num_unfinished == 4
        if build == "Slow":
            survivors = await asyncio.gather(
                *(tokens_of(stream) for stream in streams if stream._error is None)
            )
            whole = [expected_output([i, 1], 400, VOCABULARY)[-300:] for i in range(8)]
            assert all(tokens[-300:] in whole for tokens in survivors)
            assert len(survivors) == 4
        while not engine.replicas[1].is_alive:
            await asyncio.sleep(0.01)
        assert pids_of(engine)[0] == pids[0]
        assert not is_running(pids[1])
        assert is_running(pids_of(engine)[1])
        again = [engine.generate(f"again {i}", [1], params(2)) for i in range(2)]
        (served,) = [s for s in again if engine.replicas[1].engine.expects(s.request_id)][:1]
        assert await tokens_of(served) == expected_output([1], 2, VOCABULARY)
        await asyncio.wait_for(engine.close(), SECONDS)
        assert not any(map(is_running, pids_of(engine)))

    run(main())


def test_a_replica_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "FIRST_DELAY", 0.1)

    async def main() -> None:
        engine = await start("Slow", step_timeout=3)
        pids = pids_of(engine)
        streams = [engine.generate(f"r{i}", [i, 1], params(200)) for i in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        victims = [s for s in streams if engine.replicas[1].engine.expects(s.request_id)]
        others = [s for s in streams if s not in victims]
        os.kill(pids[1], signal.SIGSTOP)
        results = await asyncio.gather(*map(tokens_of, victims), return_exceptions=True)
        assert all("the engine hangs: it has 2 requests" in str(result) for result in results)
        await asyncio.gather(*map(tokens_of, others))
        while not engine.replicas[1].is_alive:
            await asyncio.sleep(0.01)
        assert pids_of(engine)[0] == pids[0]
        assert not is_running(pids[1])
        await engine.close()

    run(main())


def test_nobody_waits_for_a_process_that_takes_long_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = await start("Slow")
        transports = online("transport").ProcessTransport
        end = transports._end

        def slow_end(transport: Any, in_time: bool) -> Any:
            time.sleep(2)
            return end(transport, in_time)

        streams = [engine.generate(f"r{i}", [i, 1], params(50)) for i in range(2)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        monkeypatch.setattr(transports, "_end", slow_end)
        (victim,) = [s for s in streams if engine.replicas[1].engine.expects(s.request_id)]
        (other,) = [s for s in streams if s is not victim]
        killed = time.monotonic()
        os.kill(pids_of(engine)[1], signal.SIGKILL)
        await tokens_of(other)
        assert time.monotonic() - killed < 2
        assert not engine.replicas[1].is_alive
        late = [engine.generate(f"late {i}", [1], params(2)) for i in range(2)]
        await asyncio.gather(*map(tokens_of, late))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await tokens_of(victim)
        await engine.close()

    run(main())


def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    begun = time.monotonic()
    with pytest.raises(ValueError, match="num_kvcache_blocks=7"):
        run(start("half_unusable", trace=str(tmp_path / "x.jsonl")))
    with pytest.raises(EngineDeadError, match="exit status 7"):
        run(start("vanishing"))
    wanted = config(trace=str(tmp_path / "x.jsonl"))
    launcher = parallel("launch").Launcher(wanted, "tests.parallel:half_unusable")
    with pytest.raises(ValueError, match="num_kvcache_blocks=7"):
        parallel("engine").Engine(wanted, launcher.start_all())
    assert time.monotonic() - begun < 3 * SECONDS
    assert children_of(os.getpid()) == before


def test_a_start_can_be_given_up() -> None:
    before = children_of(os.getpid())

    async def main() -> None:
        starting = asyncio.create_task(start("endless"))
        while len(children_of(os.getpid())) < len(before) + 2:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(main())
    assert children_of(os.getpid()) == before


def test_a_replica_that_is_being_started_again_does_not_outlive_its_front_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(async_engine, "FIRST_DELAY", 0.0)

    async def main() -> None:
        engine = await start("FakeEngine")
        (first, second), launcher = pids_of(engine), engine.replicas[1]._launcher
        launcher._build = "tests.parallel:endless"
        os.kill(second, signal.SIGKILL)
        while not [pid for pid in children_of(os.getpid()) if pid not in (first, second, *before)]:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.close(), SECONDS)

    before = children_of(os.getpid())
    run(main())
    assert children_of(os.getpid()) == before


def test_closing_can_be_given_up_and_asked_for_again() -> None:
    async def main() -> None:
        engine = await start("Slow")
        stream = engine.generate("a", [1], params(4000))
        await anext(stream)
        first = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, engine.close(), engine.close(), return_exceptions=True)
        with pytest.raises(EngineDeadError, match="closed"):
            await tokens_of(stream)
        assert not any(map(is_running, pids_of(engine)))

    run(main())


def test_every_replica_sees_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = parallel("launch")
    monkeypatch.setattr(launch, "visible_devices", lambda environment: ["4", "GPU-x", "7"])

    async def main() -> None:
        engine = await start("FakeEngine", device="auto", device_ids=[2, 1])
        shown = [
            [
                variable
                for variable in Path(f"/proc/{pid}/environ").read_text().split("\0")
                if variable.startswith("CUDA_VISIBLE_DEVICES=")
            ]
            for pid in pids_of(engine)
        ]
        assert shown == [["CUDA_VISIBLE_DEVICES=7"], ["CUDA_VISIBLE_DEVICES=GPU-x"]]
        await engine.close()
        with pytest.raises(ValueError, match=r"data_parallel_size=4 .* 3 GPUs"):
            await start("FakeEngine", num_replicas=4, device="auto")

    run(main())


def test_offline_one_replica_may_die() -> None:
    wanted = config()
    launcher = parallel("launch").Launcher(wanted, "tests.online:Slow")
    engine = parallel("engine").Engine(wanted, launcher.start_all())
    pids = [client.ready_info.pid for client in engine._clients]
    with contextlib.closing(engine):
        for number in range(4):
            engine.add_request(str(number), [number], params(100))
        engine.step()
        os.kill(pids[0], signal.SIGKILL)
        errors: dict[str, str | None] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finish_reason is not None:
                    errors[output.request_id] = output.error
        killed = "the engine process was killed by SIGKILL"
        assert sorted(errors.values(), key=str) == [None, None, killed, killed]
        for number in range(4):  # all of them to the one that lives
            engine.add_request(str(number), [number], params(5))
        while engine.has_unfinished_requests():
            assert all(output.error is None for output in engine.step())
        os.kill(pids[1], signal.SIGKILL)
        select.select([engine._clients[1].transport.lifeline], [], [], SECONDS)
        with pytest.raises(EngineDeadError, match="SIGKILL"):  # before anything is sent to it
            engine.add_request("late", [1], params(5))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.step()
    assert not any(map(is_running, pids))


def test_offline_closing_may_wait_for_the_end_of_the_program() -> None:
    """When an interpreter starts no threads any more."""
    script = """
        import atexit
        from tests.parallel import config, parallel
        wanted = config()
        launcher = parallel("launch").Launcher(wanted, "tests.online:Slow")
        engine = parallel("engine").Engine(wanted, launcher.start_all())
        atexit.register(engine.close)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert process.stderr == ""


@contextmanager
def front_end(build: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program of its own with two replicas that work, and their process ids."""
    script = f"""
        import asyncio
        from tests.parallel import config, parallel
        from tests.test_online_engine import params
        async def main():
            engine = await parallel("async_engine").AsyncEngine.start(config(), build="{build}")
            streams = [engine.generate(str(i), [i], params(8000)) for i in range(4)]
            await asyncio.gather(*map(anext, streams))
            print(*(replica.info.pid for replica in engine.replicas), flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process, []
    finally:
        process.kill()
        process.wait(SECONDS)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_front_end_takes_its_replicas_along(build: str) -> None:
    with front_end(f"tests.online:{build}") as (process, _):
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_a_front_end_that_is_killed_while_its_replicas_start_leaves_none() -> None:
    with front_end("tests.parallel:endless") as (process, _):
        pids: list[int] = []

        def have_started() -> bool:
            pids[:] = children_of(process.pid)
            return len(pids) == 2

        wait_until(have_started, TIMEOUT)
        process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


# --- the server, with the bundled model ----------------------------------------------------------

REPLICAS = (*FLAGS, "--data-parallel-size", "2", "--routing", "round_robin")
STAGE = "04_dp_tp"


def engines_of(url: str) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = httpx.get(f"{url}/debug/stats", timeout=TIMEOUT).json()[
        "engines"
    ]
    return engines


def last_of(lines: Iterator[str], into: dict[str, Any], name: str) -> None:
    *_, last, done = lines
    assert done == "data: [DONE]"
    into[name] = json.loads(last.removeprefix("data: "))


@pytest.mark.slow
def test_a_server_outlives_a_replica() -> None:
    """Beside another server, which notices nothing."""
    with serving(*REPLICAS, stage=STAGE) as server, serving(*REPLICAS, stage=STAGE) as other:
        url, other_url = server.url(), other.url()
        pids = [engine["pid"] for engine in engines_of(url)]
        ends: dict[str, Any] = {}
        with stream(url, max_tokens=3000) as dies, stream(url, max_tokens=600) as lives:
            reader = threading.Thread(target=last_of, args=(lives, ends, "lives"))
            reader.start()
            os.kill(pids[0], signal.SIGKILL)
            killed = time.monotonic()
            last_of(dies, ends, "dies")
            assert time.monotonic() - killed < 10
            health = httpx.get(f"{url}/health").json()
            assert [engine["alive"] for engine in health["engines"]] == [False, True]
            reader.join(TIMEOUT)
        assert ends["dies"]["error"]["code"] == "engine_dead"
        assert ends["lives"]["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: httpx.get(f"{url}/health").json().get("status") == "ok", seconds=TIMEOUT)
        engines = engines_of(url)
        assert [engine["restarts"] for engine in engines] == [1, 0]
        assert engines[1]["pid"] == pids[1]
        assert 'baby_vllm:engine_restarts_total{engine="0"' in httpx.get(f"{url}/metrics").text
        body = {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}
        texts = {
            httpx.post(f"{base}/v1/completions", json=body, timeout=TIMEOUT).json()["choices"][0][
                "text"
            ]
            for base in (url, url, other_url, other_url)
        }
        assert len(texts) == 1
        assert [engine["restarts"] for engine in engines_of(other_url)] == [0, 0]
        ended(server)
        ended(other)


@pytest.mark.slow
def test_a_server_without_replicas_says_so_until_they_are_back() -> None:
    with serving(*REPLICAS, stage=STAGE) as server:
        url = server.url()
        for engine in engines_of(url):
            os.kill(engine["pid"], signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: httpx.get(f"{url}/health").json().get("status") == "ok", seconds=TIMEOUT)
        with stream(url) as lines:  # and it drains
            server.interrupt()
            ends: dict[str, Any] = {}
            last_of(lines, ends, "last")
        assert ends["last"]["choices"][0]["finish_reason"] == "length"
        ended(server)


def ended(server: ServeProcess) -> None:
    replicas = children_of(server.process.pid)
    server.process.terminate() if server.is_running else None
    assert server.wait() == 0
    assert "Traceback" not in server.log
    assert not any(map(is_running, replicas))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "serving"])
def test_a_killed_server_leaves_nothing(when: str) -> None:
    with serving(*REPLICAS, stage=STAGE) as server:
        if when == "serving":
            server.url()
        wait_until(lambda: len(children_of(server.process.pid)) == 2, TIMEOUT)
        replicas = children_of(server.process.pid)
        server.process.kill()
        wait_until(lambda: not any(map(is_running, replicas)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (("--data-parallel-size", "0"), "data_parallel_size"),
        (("--data-parallel-size", "2", "--device", "cuda"), "makes 2, but 0 GPUs can be seen"),
        (("--device-ids", "0", "1"), "device_ids=[0, 1]"),
        (("--data-parallel-size", "10000"), "data_parallel_size=10000"),
    ],
)
def test_what_cannot_start_says_why(flags: tuple[str, ...], words: str) -> None:
    with serving("--port", "0", *flags, stage=STAGE) as server:
        assert server.wait() == 2
        assert words in server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize("stage", ["03_online", STAGE])
def test_an_engine_that_dies_while_it_starts_is_one_line(stage: str) -> None:
    with serving("--port", "0", "--device", "cpu", stage=stage) as server:
        wait_until(lambda: bool(children_of(server.process.pid)))
        os.kill(children_of(server.process.pid)[0], signal.SIGKILL)
        assert server.wait() == 2
        (error,) = [line for line in server.lines if line.startswith("error: ")]
        assert error.strip() == "error: the engine process was killed by SIGKILL"
        assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["00_baseline", "02_batch_reorder"])
def test_every_engine_can_be_served(engine: str) -> None:
    with serving(*REPLICAS, "--engine", engine, stage=STAGE) as server:
        url = server.url()
        stats = httpx.get(f"{url}/debug/stats", timeout=TIMEOUT).json()
        assert (stats["stage"], stats["settings"]["data_parallel_size"]) == (engine, 2)
        body = {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT).json()
        assert answer["usage"]["completion_tokens"] == 8
        ended(server)


@pytest.mark.slow
def test_replicas_of_several_ranks() -> None:
    """A killed replica takes its ranks along; the next one has its own."""

    def tree(pid: int) -> list[int]:
        return [pid, *(one for child in children_of(pid) for one in tree(child))]

    with serving(*REPLICAS, "--tensor-parallel-size", "2", stage=STAGE) as server:
        url = server.url()
        settings = httpx.get(f"{url}/debug/stats", timeout=TIMEOUT).json()["settings"]
        assert (settings["data_parallel_size"], settings["tensor_parallel_size"]) == (2, 2)
        body = {"prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0}

        def answers() -> set[str]:
            posted = (
                httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT) for _ in range(2)
            )
            return {answer.json()["choices"][0]["text"] for answer in posted}

        before = answers()
        assert len(before) == 1
        killed, kept = (tree(engine["pid"]) for engine in engines_of(url))
        assert len(killed) == len(kept) == 2
        os.kill(killed[0], signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, killed)))
        wait_until(lambda: httpx.get(f"{url}/health").json().get("status") == "ok", seconds=TIMEOUT)
        assert answers() == before
        assert tree(engines_of(url)[1]["pid"]) == kept
        everyone = tree(server.process.pid)[1:]
        assert len(everyone) == 4
        ended(server)
        assert not any(map(is_running, everyone))
