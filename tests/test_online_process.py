"""The engine in a process of its own: whoever dies, and however, nobody waits and nothing is left.

Socket directories of these tests lie under a path of their own (TMPDIR), so that a forgotten one
shows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import steps
from shared import SamplingParams
from tests.fakes import VOCABULARY, expected_output
from tests.online import SECONDS, config, online
from tests.test_online_engine import params, run, tokens_of

ROOT = Path(__file__).parent.parent
AsyncEngine = online("async_engine").AsyncEngine
EngineDeadError = online("client").EngineDeadError
EngineStartError = online("client").EngineStartError
EngineClient = online("client").EngineClient


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets lie. A path below tmp_path could be too long for one."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)
        assert list(Path(name).glob("baby-vllm-*")) == []


def is_running(pid: int) -> bool:
    """A zombie is not: it only waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(is_so: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.01)


async def start(build: str, step_timeout: float | None = None, **options: Any) -> Any:
    wanted = config(step_timeout=step_timeout)
    return await AsyncEngine.start(wanted, build=f"tests.online:{build}", **options)


@contextmanager
def front_end(build: str, use: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program of its own, without a `__main__` guard, and its engine's process id. It has a
    session of its own, so that a signal to its group reaches nobody else."""
    script = f"""
        import asyncio, os, signal, sys, time
        from tests.online import config, online
        from tests.test_online_engine import params, tokens_of
        client = online("client").EngineClient(config(), "tests.online:{build}")
        info = client.wait_until_ready()
        print(info.pid, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(use)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        yield process, pid
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()


def test_streams_over_two_processes_at_once() -> None:
    async def main() -> None:
        engines = [await start("FakeEngine") for _ in range(2)]
        assert len({engine.info.pid for engine in engines} | {os.getpid()}) == 3
        streams = [
            engine.generate(f"r{i}", [number, i], params(50))
            for number, engine in enumerate(engines)
            for i in range(20)
        ]
        got = await asyncio.gather(*map(tokens_of, streams))
        assert got == [
            expected_output([number, i], 50, VOCABULARY) for number in range(2) for i in range(20)
        ]
        await engines[0].close()
        assert not is_running(engines[0].info.pid)
        again = engines[1].generate("again", [1], params(5))
        assert await tokens_of(again) == expected_output([1], 5, VOCABULARY)
        await engines[1].close()
        assert not is_running(engines[1].info.pid)

    run(main())


def test_nothing_lies_around_while_it_runs(directory: Path) -> None:
    client = EngineClient(config(), "tests.online:FakeEngine")
    (made,) = directory.glob("baby-vllm-*")
    assert made.stat().st_mode & 0o777 == 0o700
    client.wait_until_ready()
    assert list(directory.iterdir()) == []
    client.close()


def test_a_directory_that_is_too_deep_for_a_socket_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = directory / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match=f"{deep} has .* set TMPDIR to a shorter"):
        EngineClient(config(), "tests.online:FakeEngine")
    assert list(deep.iterdir()) == []
    # The longest that fits.
    length = online("transport").zmq.IPC_PATH_MAX_LEN - len("/baby-vllm-12345678/engine")
    fitting = directory / ("d" * (length - len(f"{directory}/")))
    fitting.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(fitting))
    client = EngineClient(config(), "tests.online:FakeEngine")
    client.wait_until_ready()
    client.close()


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_engine_fails_every_stream_at_once(build: str) -> None:
    async def main() -> None:
        engine = await start(build)
        streams = [engine.generate(f"r{i}", [i, 1], params(8000)) for i in range(8)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        reading = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await asyncio.sleep(0.1)
        os.kill(engine.info.pid, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*reading, return_exceptions=True)
        assert time.monotonic() - killed < 10
        assert [type(result) for result in results] == [EngineDeadError] * 8
        assert {str(result) for result in results} == {"the engine process was killed by SIGKILL"}
        assert engine.died.is_set()
        await engine.close()

    run(main())


@pytest.mark.parametrize("build", ["Dying", "Entangled"])
def test_an_engine_that_dies_of_its_own_error_says_why(build: str) -> None:
    async def main() -> None:
        engine = await start(build)
        with pytest.raises(EngineDeadError, match="RuntimeError: no progress is possible"):
            await tokens_of(engine.generate("a", [1, 2], params(100)))
        assert not is_running(engine.info.pid)
        await engine.close()

    run(main())


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_front_end_takes_its_engine_along(build: str) -> None:
    use = """
        client.add("a", [1, 2], params(8000))
        client.flush()
        time.sleep(0.2)
        print("busy", flush=True)
        time.sleep(60)
    """
    with front_end(build, use) as (process, pid):
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.kill()
        wait_until(lambda: not is_running(pid))


def test_a_front_end_that_forgets_to_close_leaves_nothing_behind() -> None:
    use = """
        client.add("a", [1, 2], params(8000))
        client.flush()
    """
    with front_end("Slow", use) as (process, pid):
        assert process.wait(SECONDS) == 0
        wait_until(lambda: not is_running(pid))


def test_an_engine_that_never_met_its_front_end_removes_the_directory(directory: Path) -> None:
    private = Path(tempfile.mkdtemp(prefix="baby-vllm-", dir=directory))
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-m", "steps.03_online.engine_process"]
    command = [*program, f"ipc://{private}/engine", "x:y", "engine"]
    with theirs:
        process = subprocess.Popen(command, cwd=ROOT, stdin=theirs)
    ours.close()
    assert process.wait(SECONDS) == online("engine_process").EXIT_ORPHANED
    assert not private.exists()


def test_ctrl_c_reaches_the_front_end_alone() -> None:
    """Sent to the whole group, as a terminal does, and even to the engine itself: what happens to
    unfinished requests is for the front end to say."""
    use = """
        signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
        async def main():
            engine = await online("async_engine").AsyncEngine.start(
                config(), build="tests.online:Slow"
            )
            print(engine.info.pid, flush=True)
            tokens = await tokens_of(engine.generate("a", [1, 2], params(100)))
            await engine.close()
            print(len(tokens), flush=True)
        asyncio.run(main())
        client.close()
    """
    with front_end("FakeEngine", use) as (process, _):
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        os.kill(pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.stdout.readline() == "100\n"
        assert process.wait(SECONDS) == 0
        wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    "build, kind, message",
    [
        ("unusable", ValueError, "num_kvcache_blocks=7"),
        ("unreadable", OSError, "/nonexistent/model"),
        ("broken", EngineStartError, "ZeroDivisionError: out of luck"),
        ("vanishing", EngineStartError, "exit status 7"),
        ("no_such_thing", EngineStartError, "no_such_thing"),
    ],
)
def test_a_start_that_fails_says_why(build: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(start(build))
    with pytest.raises(kind, match=message):
        EngineClient(config(), f"tests.online:{build}").wait_until_ready()


def test_a_start_can_be_given_up() -> None:
    async def main() -> None:
        starting = asyncio.create_task(start("FakeEngine"))
        await asyncio.sleep(0.1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    begun = time.monotonic()
    run(main())
    assert time.monotonic() - begun < SECONDS / 2


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_stopped_engine_fails_its_streams(is_idle: bool) -> None:
    """SIGSTOP: nothing of it ends, and nothing comes."""

    async def main() -> None:
        engine = await start("Slow", 3)
        if is_idle:
            os.kill(engine.info.pid, signal.SIGSTOP)
        streams = [engine.generate(f"r{i}", [i, 1], params(8000)) for i in range(3)]
        if not is_idle:
            await asyncio.gather(*(anext(stream) for stream in streams))
            os.kill(engine.info.pid, signal.SIGSTOP)
        results = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        (message,) = {str(result) for result in results}
        assert "the engine hangs: it has 3 requests and has said nothing for 3 s" in message
        assert not is_running(engine.info.pid)
        await engine.close()

    run(main())


def test_a_step_without_end_ends_the_engine() -> None:
    client = EngineClient(config(step_timeout=1), "tests.online:Stuck")
    engine = steps.load("03_online").Engine(config(), client)
    pid = client.ready_info.pid

    def run_to_end() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    engine.add_request("a", [1, 2], params(100))
    with pytest.raises(EngineDeadError, match="the engine hangs"):
        run_to_end()
    assert not is_running(pid)
    engine.close()


def test_a_process_that_cannot_be_killed_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one in the middle of a call of a driver's that does not return."""
    module = online("transport")
    killpg: list[int] = []
    monkeypatch.setattr(module, "KILLED_SECONDS", 0.2)

    async def main() -> None:
        engine = await start("Slow", 3)
        pid = engine.info.pid
        stream = engine.generate("a", [1], params(8000))
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda group, number: killpg.append(group))
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="the engine hangs"):
                await tokens_of(stream)
        assert killpg == [pid]
        os.kill(pid, signal.SIGKILL)
        await engine.close()

    run(main())


def test_an_engine_that_hangs_is_ended_by_force() -> None:
    client = EngineClient(config(), "tests.online:Stuck")
    pid = client.wait_until_ready().pid
    client.add("a", [1, 2], params(100))
    client.flush()
    tokens = 0
    while tokens < 2:
        client.wait(SECONDS)
        if (progress := client.receive()) is not None:
            tokens += sum(len(output.new_token_ids) for output in progress.outputs)
    client.close(timeout=0.2)
    assert not is_running(pid)


@pytest.mark.slow
def test_a_reader_that_stops_costs_a_bounded_amount_of_memory() -> None:
    """What its engine holds is one merged output per sequence, and a bounded number of frames is
    under way."""
    client = EngineClient(config(), "tests.online:FakeEngine")
    pid = client.wait_until_ready().pid
    for i in range(8):
        client.add(str(i), [i, 1], params(2500))
    client.flush()

    def memory() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])  # KiB

    time.sleep(1)
    before = memory()
    deadline = time.monotonic() + 6 * SECONDS
    frames, tokens = 0, {str(i): [] for i in range(8)}  # type: ignore[var-annotated]
    time.sleep(2)
    assert memory() - before < 20_000
    while client.num_unfinished:
        assert time.monotonic() < deadline
        progress = client.receive()
        if progress is None:
            client.wait(SECONDS)
            continue
        frames += 1
        for output in progress.outputs:
            tokens[output.request_id] += output.new_token_ids
    for i in range(8):
        assert tokens[str(i)] == expected_output([i, 1], 2500, VOCABULARY)
    client.close()


# --- with the bundled model ----------------------------------------------------------------------

PROMPTS = ["ROMEO:\n", "To be, or not to be", [1, 2, 3], "KING LEAR:\nBlow, winds, and"]
SAMPLED = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=30, logprobs=2)
GREEDY = SamplingParams(temperature=0, max_tokens=40, stop=["the"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", steps.engines())
def test_tokens_are_those_of_the_engine_in_this_process(engine: str) -> None:
    options: dict[str, Any] = {
        "num_kvcache_blocks": 200,
        "dtype": "float32",
        "max_num_batched_tokens": 1000,
    }
    wanted = [GREEDY, SAMPLED, SAMPLED, GREEDY]
    with steps.load(engine).LLM(**options) as llm:
        expected = llm.generate(PROMPTS, wanted)
    with steps.load("03_online").LLM(engine=engine, **options) as llm:
        got = llm.generate(PROMPTS, wanted)
        described = llm.engine.describe()
        with pytest.raises(ValueError, match=r"prompt 0.*max_model_length"):
            llm.generate([[1] * 9000])
        if not llm.engine.cuts_prompts:
            with pytest.raises(ValueError, match="max_num_batched_tokens"):
                llm.generate([[1] * 1500])
    assert described["engine"] == engine
    for ours, theirs in zip(got, expected, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
        assert [c.text for c in ours.outputs] == [c.text for c in theirs.outputs]
        assert [c.finish_reason for c in ours.outputs] == [c.finish_reason for c in theirs.outputs]
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            # Requests arrive one by one there: other batches, and rounding differs.
            for mine, its in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine.keys() == its.keys()
                for token, entry in mine.items():
                    assert entry.logprob == pytest.approx(its[token].logprob, abs=1e-4)


@pytest.mark.slow
def test_what_is_wrong_with_the_model_is_said_by_whoever_finds_it() -> None:
    LLM = steps.load("03_online").LLM
    with pytest.raises(OSError, match="/nonexistent/model"):
        LLM("/nonexistent/model")
    with pytest.raises(ValueError, match="max_num_batched_tokens"):  # found in the other process
        LLM(max_num_batched_tokens=2**31 - 1)
