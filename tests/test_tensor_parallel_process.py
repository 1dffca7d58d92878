"""A replica that is several processes: whichever of them ends, and however, so do the others, and
the front end is told why."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steps
from shared import EngineConfig, SamplingParams
from shared.models.files import ModelFiles
from tests.online import SECONDS, online
from tests.parallel import parallel
from tests.test_online_process import is_running, wait_until

ROOT = Path(__file__).parent.parent
BUILD = "steps.04_dp_tp.replica:build_engine"
EngineClient = online("client").EngineClient
EngineDeadError = online("client").EngineDeadError
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


def config(size: int = 2, **options: Any) -> Any:
    return parallel("config").Config(device="cpu", tensor_parallel_size=size, **options)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def replica(size: int = 2, **options: Any) -> Iterator[tuple[Any, list[int]]]:
    """A client of an engine that is ready, and its processes, rank 0 first. None is left."""
    client = EngineClient(config(size, **options), BUILD)
    pids: list[int] = []
    try:
        pid = client.wait_until_ready().pid
        pids += [pid, *children_of(pid)]
        assert len(pids) == size
        yield client, pids
    finally:
        client.close()
        wait_until(lambda: not any(map(is_running, pids)))


def listening_addresses(pid: int) -> set[str]:
    """Of a process's TCP sockets, in the kernel's hexadecimal."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    fields = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {f[1].rpartition(":")[0] for f in fields if f[3] == "0A" and f[9] in own}


def tokens_until(client: Any, count: int) -> list[int]:
    """Of the one request there is. Raises EngineDeadError."""
    tokens: list[int] = []
    while len(tokens) < count:
        client.check_alive()
        progress = client.receive()
        if progress is None:
            client.wait(SECONDS)
        else:
            tokens += [t for output in progress.outputs for t in output.new_token_ids]
    return tokens


def test_a_replica_of_two_ranks_serves_and_ends() -> None:
    with replica() as (client, pids):
        assert client.info.description["tensor_parallel_size"] == 2
        client.add("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        client.flush()
        assert len(tokens_until(client, 30)) == 30
        for pid in pids:
            assert listening_addresses(pid) <= {"0100007F"}  # 127.0.0.1
        time.sleep(0.3)  # idle workers wait
        client.add("b", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        client.flush()
        assert len(tokens_until(client, 5)) == 5


@pytest.mark.parametrize(
    "killed, busy",
    [
        (1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, False), (0, True), (0, False))
        ),
    ],
)
def test_one_killed_rank_ends_all(killed: int, busy: bool) -> None:
    with replica() as (client, pids):
        if busy:
            client.add("a", [1, 2, 3], LONG)
            client.flush()
            tokens_until(client, 3)
        os.kill(pids[killed], signal.SIGKILL)
        begun = time.monotonic()
        name = ("the engine process", "tensor-parallel rank 1")[killed]
        with pytest.raises(EngineDeadError, match=f"{name} was killed by SIGKILL"):
            tokens_until(client, 4000)
        wait_until(lambda: not any(map(is_running, pids)))
        assert time.monotonic() - begun < SECONDS / 2


def test_a_stopped_rank_ends_all() -> None:
    with replica(step_timeout=5) as (client, pids):
        client.add("a", [1, 2, 3], LONG)
        client.flush()
        tokens_until(client, 3)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="the engine, or one of its 2 ranks, hangs"):
            tokens_until(client, 4000)
        wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_one_of_four_ranks_killed() -> None:
    with replica(4) as (client, pids):
        client.add("a", [1, 2, 3], LONG)
        client.flush()
        tokens_until(client, 3)
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="tensor-parallel rank"):
            tokens_until(client, 4000)


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlive_its_front_end() -> None:
    """SIGSTOP: it hangs, and rank 0 in its collectives with it."""
    with replica() as (client, pids):
        client.add("a", [1, 2, 3], LONG)
        client.flush()
        tokens_until(client, 3)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.2)
        client.close(timeout=0.5)


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlive_rank_0() -> None:
    with replica() as (client, pids):
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="engine process was killed by SIGKILL"):
            tokens_until(client, 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_killed_front_end_takes_all_ranks_along(is_stopped: bool) -> None:
    script = f"""
        import time
        from tests.test_tensor_parallel_process import BUILD, LONG, EngineClient, config
        from tests.test_tensor_parallel_process import children_of, tokens_until
        client = EngineClient(config(), BUILD)
        pid = client.wait_until_ready().pid
        client.add("a", [1, 2], LONG)
        client.flush()
        tokens_until(client, 3)
        print([pid, *children_of(pid)], flush=True)
        time.sleep({6 * SECONDS})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 2
        assert all(map(is_running, pids))
        if is_stopped:
            os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        process.wait(SECONDS)
    wait_until(lambda: not any(map(is_running, pids)))


def starting() -> tuple[Any, list[int]]:
    """A client, and the processes of an engine that has just started its worker."""
    client = EngineClient(config(), BUILD)
    pid = client.transport.pid

    def has_worker() -> bool:
        client.receive()
        return bool(children_of(pid))

    wait_until(has_worker, 6 * SECONDS)
    return client, [pid, *children_of(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_while_it_starts(killed: int) -> None:
    client, pids = starting()
    os.kill(pids[killed], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        client.wait_until_ready()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_a_start_that_is_given_up_leaves_no_rank() -> None:
    client, pids = starting()
    client.close(0)
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    "size, options, named",
    [
        (3, {}, "tensor_parallel_size=3 does not divide num_attention_heads=8"),
        (16, {}, "tensor_parallel_size=16 does not divide num_attention_heads=8"),
        (2, {"max_num_batched_tokens": 2**31 - 1}, "max_num_batched_tokens=2147483647"),
    ],
)
def test_what_is_wrong_is_named(size: int, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineClient(config(size, **options), BUILD).wait_until_ready()


# --- rank 0 in this process -----------------------------------------------------------------------


def test_a_worker_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Exception] = []
    worker_group = parallel("worker_group")
    monkeypatch.setattr(worker_group, "__package__", "no.such")
    with pytest.raises(RuntimeError, match="rank 1 ended with exit status 1"):
        worker_group.WorkerGroup(2, "cpu", ends.append)
    assert len(ends) == 1


def test_a_worker_that_hangs_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group = parallel("worker_group")
    start = worker_group.WorkerGroup._start
    pids: list[int] = []

    def stopped(group: Any, arguments: Any) -> None:
        start(group, arguments)
        pids.extend(group.pids)
        os.kill(group.pids[0], signal.SIGSTOP)

    monkeypatch.setattr(worker_group.WorkerGroup, "_start", stopped)
    monkeypatch.setattr(worker_group, "PATIENCE", timedelta(seconds=0.2))
    ends: list[Exception] = []
    with pytest.raises(TimeoutError, match="rank 1 has not become ready"):
        worker_group.WorkerGroup(2, "cpu", ends.append)
    assert len(ends) == 1
    assert not is_running(pids[0])


def test_a_start_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits where it cannot look at anything else."""
    worker_group, runner = parallel("worker_group"), parallel("runner")
    ends: list[Exception] = []
    has_ended = threading.Event()

    def end(error: Exception) -> None:
        ends.append(error)
        has_ended.set()

    def wait(*_: Any) -> None:
        assert has_ended.wait(60)
        raise RuntimeError("interrupted")

    group = worker_group.WorkerGroup(2, "cpu", end)
    monkeypatch.setattr(worker_group, "PATIENCE", timedelta(seconds=0.2))
    monkeypatch.setattr(runner, "ModelRunner", wait)
    files = ModelFiles.find(None, "auto")
    with pytest.raises(TimeoutError, match="no runner within"):
        runner.TensorParallelRunner(group, EngineConfig(device="cpu"), files.config, files.weights)
    assert [type(error) for error in ends] == [TimeoutError]
    group.close()


def test_a_worker_that_cannot_read_its_weights_says_so() -> None:
    ends: list[Exception] = []
    group = parallel("worker_group").WorkerGroup(2, "cpu", ends.append)
    pids, make = group.pids, group.make
    group.make = lambda config, model, directory, *rest: make(config, model, Path("/no"), *rest)
    wanted = EngineConfig(device="cpu", num_kvcache_blocks=20)
    files = ModelFiles.find(None, "auto")
    with pytest.raises(OSError, match="rank 1: /no"):
        parallel("runner").TensorParallelRunner(group, wanted, files.config, files.weights)
    assert len(ends) == 1
    group.close()
    assert not any(map(is_running, pids))


def test_an_error_in_a_step_ends_the_group(caplog: pytest.LogCaptureFixture) -> None:
    """Any: that of one rank leaves the others in the middle of something."""
    ends: list[Exception] = []
    module = steps.load("01_chunked_prefill")
    wanted = module.Config(tensor_parallel_size=2, device="cpu", num_kvcache_blocks=20)
    runner = parallel("runner").start_group(wanted, False, ends.append)
    engine = module.Engine(wanted, runner)
    pids = runner._group.pids
    engine.add_request("a", [1, 2, 3], LONG)
    assert engine.step()
    runner._first.sampler.sample_plain = None  # not callable
    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeError, match="TypeError"):
        engine.step()
    assert len(ends) == 1
    wait_until(lambda: not any(map(is_running, pids)))
    with pytest.raises(RuntimeError, match="TypeError"):
        engine.step()
    engine.close()


# --- the channel ----------------------------------------------------------------------------------


def test_words_arrive_whatever_their_size() -> None:
    channel = parallel("channel")
    (ours, theirs), (ours_too, theirs_too) = socket.socketpair(), socket.socketpair()
    memory = channel.open_memory()
    sender = channel.Sender([ours, ours_too], memory)
    receivers = [channel.Receiver(sock, memory, 0.001) for sock in (theirs, theirs_too)]
    rng = np.random.default_rng(0)
    sizes = [(3, 10), (61, 0), (62, 7), (5000, 100_000), (0, 1), (3, 200_001), (1, 5)]
    sent = []
    for number, (header, words) in enumerate(sizes):
        message = [rng.integers(0, 2**31 - 1, n).astype(np.int32) for n in (header, words)]
        sender.send(*message)
        sent.append(message)
        if number % 2 or number == len(sizes) - 1:  # two under way
            for receiver in receivers:
                for expected in sent:
                    received = receiver.receive()
                    for got, wanted in zip(received, expected, strict=True):
                        assert np.array_equal(got, wanted)
            sent.clear()
    ours.close()
    assert receivers[0].receive() is None
    for sock in (theirs, ours_too, theirs_too):
        sock.close()
    os.close(memory)
