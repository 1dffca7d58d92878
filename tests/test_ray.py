"""Engines on a Ray cluster of two nodes, both on this machine: whoever is lost, nobody waits and
nothing is left. The first node has one CPU and the second two, so that a size of 2 names the node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import steps
from shared import SamplingParams
from tests.fakes import VOCABULARY, expected_output
from tests.online import SECONDS, online
from tests.parallel import config, parallel
from tests.test_online_engine import params
from tests.test_online_process import is_running, wait_until

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EngineDeadError = online("client").EngineDeadError

START_SECONDS = 60.0  # on a busy machine


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Ray's files in a place of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", name)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield patch


@pytest.fixture(scope="module")
def cluster(environment: pytest.MonkeyPatch) -> Iterator[Any]:
    cluster = cluster_utils.Cluster()
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False)
        cluster.add_node(num_cpus=2, num_gpus=2)  # which it believes
        environment.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        environment.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def start(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Starts an engine that is over at the end of the test, with everything that belongs to it."""
    clients: list[Any] = []

    def start(build: str, size: int = 1, **options: Any) -> Any:
        options = {"tensor_parallel_size": size, **options}
        on_ray = config(1, distributed_backend="ray", **options)
        clients.append(parallel("launch").Launcher(on_ray, f"tests.online:{build}").start(0))
        return clients[-1]

    yield start
    for client in clients:
        client.close(0)
        if client.info is not None:
            wait_until(lambda client=client: not is_running(client.info.pid))
    # The resources of a node that is gone are counted until its heartbeats have been missed.
    wait_until(
        lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"],
        START_SECONDS,
    )


def finish(client: Any, seconds: float = SECONDS) -> dict[str, list[int]]:
    """The tokens of every request. Raises EngineDeadError."""
    tokens: dict[str, list[int]] = {}
    deadline = time.monotonic() + seconds
    while client.num_unfinished or not client.is_alive:
        client.check_alive()
        progress = client.receive()
        if progress is None:
            assert time.monotonic() < deadline, "not finished in time"
            client.wait(1)
            continue
        for output in progress.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def run_long(client: Any) -> int:
    """Until two of many tokens have come. Returns the process id of the engine's actor."""
    client.add("long", [1, 2], params(8000))
    client.flush()
    tokens = 0
    while tokens < 2:
        if (progress := client.receive()) is not None:
            tokens += sum(len(output.new_token_ids) for output in progress.outputs)
        else:
            client.wait(SECONDS)
            client.check_alive()
    return parent_of(client.ready_info.pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_engines_on_two_nodes_at_once(start: Callable[..., Any]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    clients = [start("FakeEngine", size=2), start("FakeEngine")]
    pids = [client.wait_until_ready().pid for client in clients]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert len({os.getpid(), *pids, *map(parent_of, pids)}) == 5
    for number, client in enumerate(clients):
        for i in range(20):
            client.add(f"r{i}", [number, i], params(50))
        client.flush()
    for number, client in enumerate(clients):
        assert finish(client) == {
            f"r{i}": expected_output([number, i], 50, VOCABULARY) for i in range(20)
        }
    actor = parent_of(pids[0])
    clients[0].close()
    assert clients[0].transport.close() == "the engine process ended with exit status 0"
    assert not is_running(pids[0])
    wait_until(lambda: not is_running(actor))
    clients[1].add("again", [1], params(5))
    clients[1].flush()
    assert finish(clients[1]) == {"again": expected_output([1], 5, VOCABULARY)}


@pytest.mark.parametrize("data, tensor", [(2, 1), (1, 2)])
def test_tokens_are_those_of_the_engine_in_this_process(
    cluster: Any, data: int, tensor: int
) -> None:
    prompts = ["ROMEO:\n", "To be, or not to be", [1, 2, 3], [4, 5]]
    options: dict[str, Any] = {"num_kvcache_blocks": 100, "dtype": "float32", "device": "cpu"}
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    with steps.load("01_chunked_prefill").LLM(**options) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, sampled)]
    options |= {"data_parallel_size": data, "tensor_parallel_size": tensor}
    with steps.load("04_dp_tp").LLM(**options, distributed_backend="ray") as llm:
        assert [out.token_ids for out in llm.generate(prompts, sampled)] == expected


def test_every_rank_has_a_gpu_where_there_are_some(start: Callable[..., Any]) -> None:
    client = start("FakeEngine", size=2, device="auto")
    pid = client.wait_until_ready().pid
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=0,1" in environment


def test_what_a_reader_did_not_take_waits_merged(start: Callable[..., Any]) -> None:
    client = start("FakeEngine")
    client.wait_until_ready()
    for i in range(4):
        client.add(str(i), [i, 1], params(2500))
    client.flush()
    time.sleep(4)
    frames = 0
    tokens: dict[str, list[int]] = {}
    while client.num_unfinished:
        progress = client.receive()
        if progress is None:
            client.check_alive()
            client.wait(1)
            continue
        frames += 1
        for output in progress.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert tokens == {str(i): expected_output([i, 1], 2500, VOCABULARY) for i in range(4)}
    assert frames < 1000


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_engine_process_is_noticed(start: Callable[..., Any], build: str) -> None:
    client = start(build)
    client.wait_until_ready()
    run_long(client)
    os.kill(client.info.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the engine process was killed by SIGKILL"):
        finish(client)


def test_an_engine_that_dies_of_its_own_error_says_why(start: Callable[..., Any]) -> None:
    client = start("Dying")
    client.wait_until_ready()
    client.add("a", [1, 2], params(100))
    client.flush()
    with pytest.raises(EngineDeadError, match="RuntimeError: no progress is possible"):
        finish(client)


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_actor_is_noticed_and_takes_its_engine_along(
    start: Callable[..., Any], build: str
) -> None:
    client = start(build)
    client.wait_until_ready()
    os.kill(run_long(client), signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDeadError, match="the engine's Ray actor is lost"):
        finish(client)
    wait_until(lambda: not is_running(client.info.pid))
    assert time.monotonic() - killed < SECONDS


def test_a_stopped_actor_is_given_up(start: Callable[..., Any]) -> None:
    """As a node is that nobody reaches any more."""
    client = start("Slow")
    client.wait_until_ready()
    actor = run_long(client)
    os.kill(actor, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="the engine's Ray actor does not answer"):
        finish(client)
    wait_until(lambda: not is_running(actor))


def test_a_lost_node_is_noticed(cluster: Any, start: Callable[..., Any]) -> None:
    node = cluster.add_node(num_cpus=3)
    lost = start("Slow", size=3)
    other = start("Slow", size=2)
    for client in (lost, other):
        client.wait_until_ready()
        run_long(client)
    begun = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    with pytest.raises(EngineDeadError, match="the engine's Ray actor is lost"):
        finish(lost)
    wait_until(lambda: not is_running(lost.info.pid))
    assert time.monotonic() - begun < SECONDS
    other.abort("long")
    other.add("a", [1], params(5))
    other.flush()
    assert finish(other) == {"a": expected_output([1], 5, VOCABULARY)}


@pytest.mark.parametrize(
    "build, kind, message",
    [
        ("unusable", ValueError, "num_kvcache_blocks=7"),
        ("unreadable", OSError, "/nonexistent/model"),
        ("broken", EngineDeadError, "ZeroDivisionError: out of luck"),
        ("vanishing", EngineDeadError, "exit status 7"),
    ],
)
def test_a_start_that_fails_says_why(
    start: Callable[..., Any], build: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        start(build).wait_until_ready()


def test_a_cluster_without_room_says_what_it_lacks(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel("ray_transport"), "PLACEMENT_SECONDS", 2.0)
    message = r"no node with 5 free CPUs .* largest of its 2 nodes has 2 in all, and 3 are free"
    with pytest.raises(OSError, match=message):
        start("FakeEngine", size=5).wait_until_ready()


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(OSError, match="no Ray cluster at RAY_ADDRESS=127"):
        steps.load("04_dp_tp").LLM(distributed_backend="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="distributed_backend='ray' needs Ray: pip install"):
        steps.load("04_dp_tp").LLM(distributed_backend="ray")


def test_waiting_for_room_can_be_given_up_and_ends_when_there_is_some(
    start: Callable[..., Any],
) -> None:
    first = start("FakeEngine", size=2)
    first.wait_until_ready()
    second, third = (start("FakeEngine", size=2) for _ in range(2))
    time.sleep(1)
    begun = time.monotonic()
    third.close(0)
    assert time.monotonic() - begun < SECONDS
    assert second.info is None
    first.close()
    second.wait_until_ready()


def test_an_engine_that_hangs_is_ended_by_force(start: Callable[..., Any]) -> None:
    client = start("Stuck")
    client.wait_until_ready()
    run_long(client)
    begun = time.monotonic()
    client.close(timeout=0.2)
    assert client.transport.close() == "the engine's Ray actor was ended by force"
    wait_until(lambda: not is_running(client.info.pid))
    assert time.monotonic() - begun < SECONDS


def front_end(build: str, use: str) -> tuple[subprocess.Popen[str], int]:
    """A program of its own, and its engine's process id."""
    script = f"""
        import time
        from tests.parallel import config, parallel
        from tests.test_online_engine import params
        on_ray = config(1, distributed_backend="ray")
        client = parallel("launch").Launcher(on_ray, "tests.online:{build}").start(0)
        print(client.wait_until_ready().pid, flush=True)
        client.add("a", [1, 2], params(8000))
        client.flush()
    """
    command = [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(use)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("build", ["Slow", "Stuck"])
def test_a_killed_front_end_takes_its_engine_along(cluster: Any, build: str) -> None:
    process, pid = front_end(build, "time.sleep(60)")
    actor = parent_of(pid)
    time.sleep(0.5)
    process.kill()
    killed = time.monotonic()
    process.wait(SECONDS)
    wait_until(lambda: not (is_running(pid) or is_running(actor)))
    assert time.monotonic() - killed < SECONDS


def test_a_front_end_that_forgets_to_close_leaves_nothing_behind(cluster: Any) -> None:
    process, pid = front_end("Slow", "")
    assert process.wait(START_SECONDS) == 0
    wait_until(lambda: not is_running(pid))


def test_sigterm_is_left_to_the_front_end(cluster: Any) -> None:
    """Ray would end the process at once, or after three seconds."""
    script = """
        import asyncio, signal
        import steps
        from tests.parallel import config
        async def main():
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            engine = await steps.load("04_dp_tp").AsyncEngine.start(
                config(1, distributed_backend="ray"), build="tests.online:FakeEngine"
            )
            print("started", flush=True)
            await stop.wait()
            await asyncio.sleep(5)
            await engine.close()
            print("drained", flush=True)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "drained\n"
        assert process.wait(START_SECONDS) == 0


def test_a_private_cluster_ends_with_its_front_end(
    environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    process, pid = front_end("Slow", "time.sleep(60)")
    raylet = parent_of(parent_of(pid))
    assert parent_of(raylet) == process.pid
    process.kill()
    process.wait(SECONDS)
    wait_until(lambda: not (is_running(pid) or is_running(raylet)))
