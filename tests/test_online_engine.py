"""An engine behind an asyncio front end: streams, and every way in which one can end.

The engine runs in a thread here; test_online_process.py has it in a process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import steps
from shared import SamplingParams
from shared.outputs import Logprob, StepOutput
from tests.fakes import VOCABULARY, expected_output
from tests.online import (
    SECONDS,
    Dying,
    Failing,
    FakeEngine,
    Fussy,
    Slow,
    broken,
    config,
    online,
    unreadable,
    unusable,
)

messages = online("messages")
async_engine = online("async_engine")
client_module = online("client")
AsyncEngine, EngineDeadError = async_engine.AsyncEngine, async_engine.EngineDeadError


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 3 * SECONDS))


def with_engine(
    build: Any, use: Callable[[Any, Any], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run `use(front end, engine behind it)`; the pool must be whole afterwards."""
    behind: list[Any] = []

    def made(given: dict[str, Any], end: Any) -> Any:
        behind.append(build(given))
        return behind[0]

    async def main() -> None:
        engine = await AsyncEngine.start(config(), in_process=True, build=made, **options)
        try:
            await use(engine, behind[0])
            if engine.is_alive:
                await idle(engine, behind[0])
                assert behind[0].block_manager.num_free_blocks == engine.info.limits.num_blocks
                assert behind[0].table.num_free == engine.info.limits.max_num_sequences
        finally:
            await engine.close()

    run(main())


async def idle(engine: Any, behind: Any) -> None:
    """Until the engine holds nothing, and has said so."""
    while (
        behind.has_unfinished_requests()
        or engine.stats.running
        or engine.stats.waiting
        or engine.stats.used_blocks
    ):
        await asyncio.sleep(0.002)
    assert engine.num_unfinished == 0


async def tokens_of(stream: Any, index: int = 0) -> list[int]:
    return [
        token
        async for outputs in stream
        for output in outputs
        if output.index == index
        for token in output.new_token_ids
    ]


def test_streams_are_complete_and_end() -> None:
    async def use(engine: Any, behind: Any) -> None:
        prompts = [[i, i + 1, 2] for i in range(30)]
        streams = [engine.generate(f"r{i}", p, params(20)) for i, p in enumerate(prompts)]
        several = engine.generate("several", [7, 7], params(9, n=3))
        assert engine.num_unfinished == 31
        got = await asyncio.gather(*map(tokens_of, streams))
        assert got == [expected_output(p, 20, VOCABULARY) for p in prompts]
        ends: dict[int, str] = {}
        async for outputs in several:
            ends |= {o.index: o.finish_reason for o in outputs if o.finish_reason is not None}
        assert ends == dict.fromkeys(range(3), "length")
        assert engine.stats.counters.generation_tokens == 30 * 20 + 3 * 9
        assert engine.stats.serving_seconds > 0
        assert engine.stats.step_seconds > 0

    with_engine(FakeEngine, use)


def test_who_leaves_ends_alone() -> None:
    async def use(engine: Any, behind: Any) -> None:
        stays = engine.generate("stays", [1, 2], params(60))
        leaves = engine.generate("leaves", [3, 4], params(8000))
        never_read = engine.generate("never read", [5, 6], params(8000))
        await anext(leaves)
        await leaves.aclose()
        await leaves.aclose()
        never_read.abort()
        assert [outputs async for outputs in leaves] == []
        assert await tokens_of(stays) == expected_output([1, 2], 60, VOCABULARY)

    with_engine(Slow, use)


def test_one_completion_can_be_dropped() -> None:
    async def use(engine: Any, behind: Any) -> None:
        stream = engine.generate("a", [1, 2], params(40, n=3))
        seen: dict[int, int] = {0: 0, 1: 0, 2: 0}
        async for outputs in stream:
            for output in outputs:
                seen[output.index] += len(output.new_token_ids)
            if seen[1] and min(seen.values()) < 20:
                stream.abort_sequence(1)
                stream.abort_sequence(1)
        assert seen[0] == seen[2] == 40
        assert seen[1] < 20
        last = engine.generate("b", [1, 2], params(4000, n=2))
        await anext(last)
        last.abort_sequence(0)
        last.abort_sequence(1)
        assert [outputs async for outputs in last] == []

    with_engine(Slow, use)


def test_a_name_is_free_again_at_once() -> None:
    """What is still under way from the request that had it before is nobody's."""

    async def use(engine: Any, behind: Any) -> None:
        for turn in range(30):
            first = engine.generate("same", [turn, 1], params(4000))
            await anext(first)
            first.abort()
            again = engine.generate("same", [turn, 2], params(5))
            with pytest.raises(ValueError, match="already running"):
                engine.generate("same", [1], params(5))
            assert await tokens_of(again) == expected_output([turn, 2], 5, VOCABULARY)

    with_engine(FakeEngine, use)


@pytest.mark.parametrize(
    "name, prompt, wanted, named",
    [
        ("r", [], params(1), "prompt_token_ids"),
        ("r", [VOCABULARY], params(1), "prompt_token_ids"),
        ("r", [1] * 9000, params(1), "max_model_length"),
        ("r", [1], params(1, logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        ("r\ud800", [1], params(1), "request_id"),
        ("bad", [1], params(1), "displease"),
    ],
)
def test_a_bad_request_harms_nobody(
    name: str, prompt: list[int], wanted: SamplingParams, named: str
) -> None:
    async def use(engine: Any, behind: Any) -> None:
        good = engine.generate("good", [1, 2], params(30))
        with pytest.raises(ValueError, match=named):
            await tokens_of(engine.generate(name, prompt, wanted))
        assert await tokens_of(good) == expected_output([1, 2], 30, VOCABULARY)
        assert engine.is_alive

    with_engine(Fussy, use)


def test_what_the_engine_alone_refuses() -> None:
    async def use(engine: Any, behind: Any) -> None:
        with pytest.raises(async_engine.RequestRefused, match="displease"):
            await anext(engine.generate("bad", [1], params(5, n=2)))
        assert engine.num_unfinished == 0
        gone = engine.generate("bad", [1], params(5))
        gone.abort()
        assert [outputs async for outputs in gone] == []

    with_engine(Fussy, use)


def test_the_queue_has_an_end() -> None:
    async def use(engine: Any, behind: Any) -> None:
        streams = [engine.generate(f"r{i}", [1], params(3)) for i in range(4)]
        with pytest.raises(async_engine.QueueFull, match="4 requests"):
            engine.generate("one more", [1], params(3))
        await asyncio.gather(*map(tokens_of, streams))
        await tokens_of(engine.generate("one more", [1], params(3)))

    with_engine(FakeEngine, use, max_queued_requests=4)


def test_a_failing_step_ends_its_requests_and_not_the_engine() -> None:
    async def use(engine: Any, behind: Any) -> None:
        stream = engine.generate("a", [1, 2], params(30))
        last: list[StepOutput] = []
        async for outputs in stream:
            last = outputs
        assert (last[0].finish_reason, last[0].error) == ("abort", "MemoryError: no room")
        again = engine.generate("a", [1, 2], params(30))
        assert await tokens_of(again) == expected_output([1, 2], 30, VOCABULARY)

    with_engine(Failing, use)


def test_an_engine_that_dies_fails_every_stream() -> None:
    async def use(engine: Any, behind: Any) -> None:
        streams = [engine.generate(f"r{i}", [i, 1], params(100)) for i in range(10)]
        results = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "RuntimeError: no progress is possible" in str(result)
        await engine.died.wait()
        assert not engine.is_alive
        assert isinstance(engine.error, EngineDeadError)
        assert engine.num_unfinished == 0
        with pytest.raises(EngineDeadError, match="no progress"):
            engine.generate("late", [1], params(1))
        streams[0].abort()

    with_engine(Dying, use)


def test_close_fails_what_is_unfinished() -> None:
    async def use(engine: Any, behind: Any) -> None:
        stream = engine.generate("a", [1, 2], params(8000))
        await anext(stream)
        reading = asyncio.create_task(tokens_of(stream))
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await reading
        with pytest.raises(EngineDeadError, match="closed"):
            engine.generate("b", [1], params(1))
        assert behind.closed

    with_engine(Slow, use)


@pytest.mark.parametrize(
    "build, kind, message",
    [
        (unusable, ValueError, "num_kvcache_blocks=7"),
        (unreadable, OSError, "/nonexistent/model"),
        (broken, EngineDeadError, "ZeroDivisionError: out of luck"),
    ],
)
def test_a_start_that_fails_says_why(build: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(AsyncEngine.start(config(), in_process=True, build=build))


def test_a_reader_that_never_comes_holds_up_nothing_and_loses_nothing() -> None:
    """Thousands of steps are over before the first look; they come as few merged messages."""
    made: list[Any] = []

    def build(options: dict[str, Any], end: Any) -> Any:
        made.append(FakeEngine(options))
        return made[0]

    client = client_module.EngineClient(config(), build, in_process=True)
    try:
        client.wait_until_ready()
        for i in range(3):
            client.add(str(i), [i, 1], params(1500))
        client.flush()
        deadline = time.monotonic() + 6 * SECONDS
        while made[0].num_steps < 1500:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        frames, tokens = 0, {str(i): [] for i in range(3)}  # type: ignore[var-annotated]
        while client.num_unfinished:
            progress = client.receive()
            if progress is None:
                client.wait(SECONDS)
                continue
            frames += 1
            for output in progress.outputs:
                tokens[output.request_id] += output.new_token_ids
        assert frames < 4 * online("transport").MAX_EVENTS_IN_FLIGHT
        for i in range(3):
            assert tokens[str(i)] == expected_output([i, 1], 1500, VOCABULARY)
    finally:
        client.close()


def test_a_stream_that_nobody_reads_holds_one_output() -> None:
    async def use(engine: Any, behind: Any) -> None:
        unread = engine.generate("unread", [1, 2], params(400))
        read = engine.generate("read", [1, 2], params(400))
        await tokens_of(read)
        await idle(engine, behind)
        first = await anext(unread)
        assert [len(output.new_token_ids) for output in first] == [400]
        assert first[0].finish_reason == "length"
        assert [outputs async for outputs in unread] == []

    with_engine(FakeEngine, use)


def test_random_aborts_leave_the_pool_whole() -> None:
    async def use(engine: Any, behind: Any) -> None:
        rng = random.Random(0)

        async def one(number: int) -> None:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 100))]
            n, leaves_after = rng.choice([1, 1, 2]), rng.choice([None, 0, 1, 5, 20])
            await asyncio.sleep(rng.random() / 10)
            stream = engine.generate(f"r{number}", prompt, params(40, n=n))
            got: list[int] = []
            for _ in range(1000 if leaves_after is None else leaves_after):
                outputs = await anext(stream, None)
                if outputs is None:
                    break
                got += [t for o in outputs if o.index == 0 for t in o.new_token_ids]
            expected = expected_output(prompt, 40, VOCABULARY)
            assert got == (expected if leaves_after is None else expected[: len(got)])
            await stream.aclose()

        await asyncio.gather(*(one(number) for number in range(150)))

    with_engine(FakeEngine, use)


def test_step_records_are_there_for_who_listens() -> None:
    async def use(engine: Any, behind: Any) -> None:
        await tokens_of(engine.generate("unheard", [1, 2], params(10)))
        assert not behind.recorder.is_recording
        seen: list[Any] = []

        async def listen() -> None:
            async for records in engine.step_records():
                seen.extend(records)
                if records[-1].running == []:
                    return

        listeners = [asyncio.create_task(listen()) for _ in range(2)]
        while not behind.recorder.is_recording:
            await asyncio.sleep(0.002)
        await tokens_of(engine.generate("heard", [1, 2, 3], params(40)))
        await asyncio.gather(*listeners)
        numbers = sorted({record.step for record in seen})
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all("unheard" not in record.running for record in seen)
        assert sum(len(record.decodes) for record in seen) == 2 * 39
        await idle(engine, behind)
        await asyncio.sleep(0)
        while behind.recorder.is_recording:
            await asyncio.sleep(0.002)

    with_engine(Slow, use)


# --- called in a loop ----------------------------------------------------------------------------


@contextmanager
def engine_over(build: Any) -> Iterator[Any]:
    client = client_module.EngineClient(config(), build, in_process=True)
    engine = online("engine").Engine(config(), client)
    try:
        yield engine
    finally:
        engine.close()


def test_requests_that_are_added_together_start_together() -> None:
    with engine_over(FakeEngine) as engine:
        engine.listen(True)
        for i in range(40):
            engine.add_request(str(i), [i, 1], params(10))
        records: list[Any] = []
        while engine.has_unfinished_requests():
            engine.step()
            records += engine.take_step_records()
        assert len(records) == 10
        assert len(records[0].prefills) == 40
        assert engine.stats().counters.generation_tokens == 400
        assert engine.step() == []


def test_a_late_refusal_is_an_output() -> None:
    with engine_over(Fussy) as engine:
        engine.add_request("bad", [1], params(5, n=2))
        outputs: list[StepOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [(o.finish_reason, o.error) for o in outputs] == [
            ("abort", "prompt_token_ids displease me")
        ]


def test_a_loop_over_a_dead_engine_ends() -> None:
    with engine_over(Dying) as engine:
        engine.add_request("a", [1], params(100))
        got = [engine.step(), engine.step()]
        assert all(got)
        with pytest.raises(EngineDeadError, match="no progress is possible"):
            engine.step()
        assert not engine.has_unfinished_requests()
        engine.abort_request("a")
        with pytest.raises(EngineDeadError, match="no progress is possible"):
            engine.step()


# --- messages ------------------------------------------------------------------------------------


def test_requests_and_outputs_arrive_as_they_were() -> None:
    wanted = SamplingParams(
        n=3, temperature=0.5, top_k=4, seed=-(2**63), stop=["a"], stop_token_ids=[1, 2],
        logit_bias={3: -1.5}, logprobs=2, min_tokens=1,
    )  # fmt: skip
    add = messages.Add.of("r", online("client").np.array([1, 2**31 - 1]), wanted)
    (got,) = messages.decode_commands(messages.encode_commands([messages.encode(add)]))
    assert got.tokens().tolist() == [1, 2**31 - 1]
    assert SamplingParams(**got.params) == wanted.model_copy(update={"stop": ()})
    output = StepOutput(
        "r", 2, [5], [{5: Logprob(-0.5, 1), 7: Logprob(float("-inf"), 9)}], "stop", None,
        [None, {1: Logprob(-2.0, 3)}], 16,
    )  # fmt: skip
    event = messages.decode_event(messages.encode(messages.Progress(3, [output])))
    assert (event.taken, event.outputs) == (3, [output])


def test_merged_outputs_are_as_if_one_step_had_made_them() -> None:
    merged = messages.Merged()
    merged.add([StepOutput("a", 0, [1], num_cached_tokens=8), StepOutput("a", 1, [9])])
    merged.add([StepOutput("a", 0, [2], [{2: Logprob(-1.0, 1)}])])
    merged.add(
        [StepOutput("a", 0, [3], [{3: Logprob(-2.0, 1)}], "length"), StepOutput("b", 0, [4])]
    )
    merged.discard("a", 1)
    logprobs = [{2: Logprob(-1.0, 1)}, {3: Logprob(-2.0, 1)}]
    first = StepOutput("a", 0, [1, 2, 3], logprobs, "length", num_cached_tokens=8)
    assert merged.take() == [first, StepOutput("b", 0, [4])]
    assert not merged


# --- config --------------------------------------------------------------------------------------


def test_an_engine_has_its_own_options_and_no_others() -> None:
    made = config(engine="02_batch_reorder", max_prefill_defer=1, max_num_batched_tokens=64)
    assert type(made.wrapped) is steps.load("02_batch_reorder").Config
    assert (made.wrapped.max_prefill_defer, made.wrapped.max_prefill_chunk_size) == (1, 64)
    assert made.replace(seed=5).wrapped.seed == 5
    with pytest.raises(ValueError, match="00_baseline has no option max_prefill_defer"):
        config(engine="00_baseline", max_prefill_defer=1)
    with pytest.raises(ValueError, match=r"03_online.*00_baseline"):
        config(engine="03_online")
    with pytest.raises(ValueError, match="max_prefill_defer"):
        config(max_prefill_defer=-1)


def test_only_time_that_was_waited_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that has been stopped, or busy, for an hour does not take it for its engine's."""
    clock = [1000.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    client = client_module.EngineClient(config(), FakeEngine, in_process=True)

    def hangs(seconds: float) -> bool:
        clock[0] += seconds
        return bool(client.notes_hang())

    assert client.look_seconds is None
    assert not hangs(9000)  # it starts
    client.wait_until_ready()
    assert (client.step_seconds, client.look_seconds) == (600, 10)
    assert not hangs(9000)  # it has nothing to do
    client.add("a", [1], params(1))
    assert not any(hangs(3600) for _ in range(99))  # it has not heard of it
    client.flush()
    assert [hangs(3600) for _ in range(59)] == [False] * 59
    assert hangs(3600)
    client.listen_for_end()
    with pytest.raises(EngineDeadError, match="the engine hangs: it has 1 requests"):
        client.check_alive()


def test_how_long_a_step_may_take() -> None:
    client = client_module.EngineClient(config(), FakeEngine, in_process=True)
    client.wait_until_ready()
    client.info.description["device"] = "cuda:0"
    assert client.step_seconds == 60
    client.close()
    client = client_module.EngineClient(config(step_timeout=7), FakeEngine, in_process=True)
    client.wait_until_ready()
    assert client.step_seconds == 7
    client.close()
    with pytest.raises(ValueError, match="step_timeout"):
        config(step_timeout=0)
