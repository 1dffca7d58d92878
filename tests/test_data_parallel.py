"""Replicas behind one engine for a loop: the contract, who gets what, and what one's end ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import steps
from shared import SamplingParams
from shared.engine.stats import EngineStats, StepCounters, total
from shared.outputs import StepOutput
from tests.engine_contract import EngineContract
from tests.fakes import VOCABULARY, expected_output
from tests.online import Busy, Dying, FakeEngine, Fussy, Slow, engine_in_thread, online, unusable
from tests.parallel import FATAL, Behind, Mortal, config, parallel
from tests.reference import Reference
from tests.test_online_engine import params

EngineDeadError = online("client").EngineDeadError
launch = parallel("launch")


class TestContract(EngineContract):
    """With two replicas. With one, tests/test_contract.py has it."""

    stage = "04_dp_tp"

    def engine(self, reference: Reference, **config: Any) -> AbstractContextManager[Any]:
        return super().engine(reference, **{"data_parallel_size": 2, **config})

    def make_engine(self, module: ModuleType, config: Any) -> Any:
        return engine_in_thread(module, config)


@contextmanager
def replicas(build: Any, num: int = 2, **options: Any) -> Iterator[Any]:
    """An Engine over fake ones in threads, which are in its `behind`."""
    behind, wanted = Behind(build), config(num, **options)
    engine = parallel("engine").Engine(wanted, launch.Launcher(wanted, behind, True).start_all())
    engine.behind = behind.engines
    try:
        yield engine
    finally:
        engine.close()


def finish(engine: Any) -> dict[str, StepOutput]:
    """All outputs of each request, as one."""
    merged: dict[str, StepOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id in merged:
                online("messages").merge(merged[output.request_id], output)
            else:
                merged[output.request_id] = output
    return merged


def test_every_request_is_served_and_both_replicas_work() -> None:
    with replicas(FakeEngine) as engine:
        prompts = {f"r{i}": [i, i + 1] for i in range(40)}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params(10))
        assert engine.has_unfinished_requests()
        outputs = finish(engine)
        assert {name: output.new_token_ids for name, output in outputs.items()} == {
            name: expected_output(prompt, 10, VOCABULARY) for name, prompt in prompts.items()
        }
        done = [one.recorder.counters.generation_tokens for one in engine.behind]
        assert done == [200, 200]
        assert engine.stats().counters.generation_tokens == 400
        assert engine.stats().num_blocks == 2000
        assert engine.step() == []


def test_work_left_is_counted() -> None:
    """What the router goes by: from the whole of a request down to nothing."""
    with replicas(Slow) as engine:
        engine.add_request("a", [1] * 100, params(20, n=2))
        engine.add_request("b", [2] * 50, params(30))
        engine.add_request("c", [3] * 8000, params(10**6))
        one, other = engine._clients
        assert (one.outstanding_tokens, other.outstanding_tokens) == (100 + 40, 50 + 30 + 8192)
        engine.abort_request("c")
        engine.abort_sequence("a", 1)
        assert (one.outstanding_tokens, other.outstanding_tokens) == (100 + 20, 50 + 30)
        left = 20 + 30
        while engine.has_unfinished_requests():
            left -= sum(len(output.new_token_ids) for output in engine.step())
            prompts = 100 * (one.outstanding_tokens > 20) + 50 * (other.outstanding_tokens > 30)
            assert one.outstanding_tokens + other.outstanding_tokens == left + prompts
        assert left == 0


def test_prefixes_hit_where_they_are() -> None:
    with replicas(FakeEngine) as engine:
        prefixes = [[n] * 64 for n in range(4)]
        for turn in range(3):
            for number, prefix in enumerate(prefixes):
                engine.add_request(f"{turn}.{number}", [*prefix, turn], params(5))
            outputs = finish(engine)
            hits = {output.num_cached_tokens for output in outputs.values()}
            assert hits == {64 if turn else 0}


@pytest.mark.parametrize("routing", ["least_tokens", "round_robin"])
def test_other_ways_to_choose(routing: str) -> None:
    with replicas(FakeEngine, routing=routing) as engine:
        assert engine.describe()["routing"] == routing
        for number in range(6):
            engine.add_request(str(number), [1] * 64, params(5))
        finish(engine)
        assert [one.recorder.counters.generation_tokens for one in engine.behind] == [15, 15]


def test_an_end_fails_the_replicas_own_requests_alone() -> None:
    with replicas(Mortal) as engine:
        for name, first in (("a", 1), ("fatal", FATAL), ("b", 2), ("with it", 3)):
            engine.add_request(name, [first], params(30))
        outputs = finish(engine)
        for name, first in (("a", 1), ("b", 2)):
            assert outputs[name].new_token_ids[:5] == expected_output([first], 5, VOCABULARY)
            assert outputs[name].finish_reason == "length"
        for name in ("fatal", "with it"):
            assert outputs[name].finish_reason == "abort"
            assert "RuntimeError: bad luck" in (outputs[name].error or "")
        for number in range(4):  # the rest goes on
            engine.add_request(f"again {number}", [number], params(5))
        assert all(output.error is None for output in finish(engine).values())
        engine.add_request("fatal", [FATAL], params(5))
        with pytest.raises(EngineDeadError, match="bad luck"):
            finish(engine)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="bad luck"):
                engine.step()
            with pytest.raises(EngineDeadError, match="bad luck"):
                engine.add_request("more", [1], params(5))
        assert not engine.has_unfinished_requests()
        engine.abort_request("more")


def test_what_came_before_an_end_is_given_out() -> None:
    with replicas(Dying, 1) as engine:
        engine.add_request("done", [1], params(1))
        engine.add_request("cut short", [2], params(30))
        (client,) = engine._clients
        client.flush()
        client.transport._thread.join()
        online("client").wait_for_any([client])  # both have come
        assert [output.finish_reason for output in engine.step()[:1]] == ["length"]
        with pytest.raises(EngineDeadError, match="no progress is possible"):
            finish(engine)


def test_refusals_name_the_request() -> None:
    with replicas(Fussy) as engine:
        engine.add_request("bad", [1], params(5))
        engine.add_request("good", [1], params(5))
        with pytest.raises(ValueError, match="already running"):
            engine.add_request("good", [2], params(5))
        with pytest.raises(ValueError, match="max_model_length"):
            engine.add_request("long", [1] * 9000, params(5))
        outputs = finish(engine)
        assert outputs["bad"].error == "prompt_token_ids displease me"
        assert outputs["good"].finish_reason == "length"


def test_a_closed_engine_says_so() -> None:
    with replicas(Slow) as engine:
        engine.add_request("a", [1], params(100))
        engine.step()
        engine.close()
        for call in (engine.step, lambda: engine.add_request("b", [1], params(5))):
            with pytest.raises(EngineDeadError, match="closed"):
                call()
        engine.abort_request("a")
        assert not engine.has_unfinished_requests()


def test_a_start_that_fails_leaves_nothing() -> None:
    clients = launch.Launcher(config(), unusable, True).start_all()
    with pytest.raises(ValueError, match="num_kvcache_blocks=7"):
        parallel("engine").Engine(config(), clients)
    assert not any(client.is_alive for client in clients)


def test_the_smallest_replica_says_what_is_possible() -> None:
    sizes = iter((100, 40))

    def build(options: dict[str, Any], end: Any = None) -> Any:
        engine = FakeEngine(options)
        size = next(sizes)
        engine.limits = type(engine.limits)(50, 16, size, 16 * size, 64, 2000)
        return engine

    wanted = config(engine="00_baseline")
    clients = launch.Launcher(wanted, build, True).start_all()
    engine = parallel("engine").Engine(wanted, clients)
    described = engine.describe()
    assert engine.max_model_length == described["max_model_length"] == 640
    assert described["num_kvcache_blocks"] == 40
    assert (described["engine"], described["data_parallel_size"]) == ("00_baseline", 2)
    with pytest.raises(ValueError, match="max_model_length=640"):
        engine.check_request([1] * 700, params(5))
    engine.close()


def test_what_found_no_room_is_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online("transport"), "MAX_COMMANDS_IN_FLIGHT", 1)
    with replicas(Busy, 1) as engine:
        for i in range(9):
            engine.add_request(str(i), [1], params(100))
        engine.step()
        for i in range(9):
            engine.abort_request(str(i))
        engine.add_request("late", [1], params(5))
        assert finish(engine)["late"].new_token_ids == expected_output([1], 5, VOCABULARY)


def test_statistics_add_up() -> None:
    def stats(running: int, num_blocks: int, steps: int) -> EngineStats:
        counters = StepCounters(mixed_steps=steps)
        return EngineStats(running=running, num_blocks=num_blocks, block_size=16, counters=counters)

    assert total([stats(1, 10, 2), stats(2, 5, 3)]) == stats(3, 15, 5)
    assert total([]) == EngineStats()


# --- config and devices --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data_parallel_size": 0}, ["data_parallel_size"]),
        ({"tensor_parallel_size": -1}, ["tensor_parallel_size"]),
        ({"data_parallel_size": 2, "device_ids": [0]}, ["device_ids", "1 GPUs", "makes 2"]),
        ({"data_parallel_size": 2, "device_ids": [3, 3]}, ["device_ids", "[3, 3]", "twice"]),
        ({"device_ids": [-1]}, ["device_ids"]),
        ({"device_ids": [0], "device": "cpu"}, ["device_ids", "cpu"]),
        ({"device_ids": [0], "distributed_backend": "ray"}, ["device_ids", "ray"]),
        ({"routing": "random"}, ["routing", "round_robin"]),
        ({"engine": "00_baseline", "max_prefill_defer": 1}, ["00_baseline", "max_prefill_defer"]),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parallel("config").Config(**options)
    assert all(word in str(raised.value) for word in words)


def test_a_replica_is_told_its_own_part() -> None:
    whole = config(
        3, engine="02_batch_reorder", max_prefill_defer=1, routing="round_robin", seed=4,
        tensor_parallel_size=2, trace="traces/run.jsonl",
    )  # fmt: skip
    part = whole.of_replica(2)
    assert part.model_fields_set == {
        "model", "load_format", "device", "engine", "max_prefill_defer", "seed",
        "tensor_parallel_size", "trace",
    }  # fmt: skip
    assert (part.tensor_parallel_size, part.data_parallel_size) == (2, 1)
    assert part.trace == "traces/run.2.jsonl"
    assert type(part.wrapped) is steps.load("02_batch_reorder").Config
    assert config(1, trace="run.jsonl").of_replica(0).trace == "run.jsonl"


def gpus(num_replicas: int, size: int, device: str = "auto", ids: list[int] | None = None) -> Any:
    return config(num_replicas, tensor_parallel_size=size, device=device, device_ids=ids or ())


def test_devices_are_dealt_out() -> None:
    deal = launch.assign_devices
    four = ["0", "1", "2", "3"]
    assert deal(gpus(2, 2), four) == ["0,1", "2,3"]
    assert deal(gpus(2, 1, "cuda"), four) == ["0", "1"]
    assert deal(gpus(2, 2, ids=[3, 0, 1, 2]), four) == ["3,0", "1,2"]
    assert deal(gpus(2, 1, ids=[2, 0]), ["5", "GPU-a", "GPU-b"]) == ["GPU-b", "5"]
    assert deal(gpus(4, 2), []) == []  # a machine without


@pytest.mark.parametrize(
    "wanted, num_visible, words",
    [
        (gpus(2, 2), 3, ["data_parallel_size=2", "tensor_parallel_size=2 makes 4", "3 GPUs"]),
        (gpus(2, 1, "cuda"), 0, ["makes 2", "0 GPUs"]),
        (gpus(2, 1, ids=[0, 4]), 4, ["[0, 4]", "GPU 4", "4 GPUs"]),
        (gpus(1, 1, ids=[0]), 0, ["[0]", "0 GPUs"]),
    ],
)
def test_more_devices_than_there_are(wanted: Any, num_visible: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        launch.assign_devices(wanted, [str(device) for device in range(num_visible)])
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_runs_so_many_ranks_and_no_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "visible_devices", lambda environment: [])
    launch.Launcher(gpus(32, 2, device))
    for num_replicas, size in ((10000, 1), (65, 1), (33, 2)):
        with pytest.raises(ValueError, match=f"data_parallel_size={num_replicas} .* 64 ranks"):
            launch.Launcher(gpus(num_replicas, size, device))


def test_visible_devices_are_named_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launch.visible_devices({}) == ["0", "1"]
    assert launch.visible_devices({"CUDA_VISIBLE_DEVICES": "4, GPU-x,9"}) == ["4", "GPU-x"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert launch.visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


# --- with the bundled model ----------------------------------------------------------------------

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 200}


@pytest.mark.slow
@pytest.mark.parametrize("engine", steps.engines())
def test_answers_are_those_of_one_engine(engine: str, tmp_path: Path) -> None:
    """In order, also without seeds: what is drawn does not depend on who draws it."""
    prompts: list[Any] = ["ROMEO:\n", "To be, or not to be", [1, 2, 3], "KING LEAR:\nBlow, winds"]
    wanted = [
        SamplingParams(temperature=0, max_tokens=30, stop=["the"]),
        SamplingParams(temperature=0.9, n=2, max_tokens=20),
        SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=20),
        SamplingParams(max_tokens=10, ignore_eos=True),
    ] * 2  # fmt: skip
    with steps.load(engine).LLM(**OPTIONS, seed=5) as llm:
        expected = llm.generate(prompts * 2, wanted)
    trace = tmp_path / "trace.jsonl"
    with steps.load("04_dp_tp").LLM(
        **OPTIONS, seed=5, engine=engine, data_parallel_size=2, trace=str(trace)
    ) as llm:
        got = llm.generate(prompts * 2, wanted)
        assert len({client.ready_info.pid for client in llm.engine._clients}) == 2
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
        assert [c.text for c in ours.outputs] == [c.text for c in theirs.outputs]
        assert [c.finish_reason for c in ours.outputs] == [c.finish_reason for c in theirs.outputs]
    assert not trace.exists()
    assert all((tmp_path / f"trace.{number}.jsonl").stat().st_size for number in range(2))


@pytest.mark.slow
def test_without_seeds_equal_prompts_get_different_answers() -> None:
    with steps.load("04_dp_tp").LLM(**OPTIONS, data_parallel_size=2, routing="round_robin") as llm:
        outputs = llm.generate([[1, 2]] * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in outputs}) == 4
    assert np.unique([len(output.token_ids) for output in outputs]).tolist() == [12]
