"""Stage 05: what is different when a step is submitted before the last one's result is read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shared import SamplingParams
from shared.engine.batch import Batch
from tests.fakes import VOCABULARY, FakeHandle, expected_output, fake_engine, run_to_end, watch

STAGE = "05_async_scheduling"


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompt(first: int, length: int) -> list[int]:
    return [first, *(n % VOCABULARY for n in range(length - 1))]


class Log:
    """The order in which a fake runner's steps are submitted and their results read."""

    def __init__(self, engine: Any) -> None:
        self.events: list[tuple[str, int]] = []
        self._submit = engine.runner.submit
        self._count = 0
        engine.runner.submit = self.submit

    def submit(self, batch: Batch) -> FakeHandle:
        number, self._count = self._count, self._count + 1
        handle: FakeHandle = self._submit(batch)
        read = handle.result

        def result() -> Any:
            self.events.append(("read", number))
            return read()

        handle.result = result  # type: ignore[method-assign]
        self.events.append(("submit", number))
        return handle


def test_a_step_is_submitted_before_the_last_ones_result_is_read() -> None:
    engine = fake_engine(STAGE)
    log = Log(engine)
    engine.add_request("a", prompt(1, 5), params(4))
    tokens = run_to_end(engine)
    assert tokens["a"] == expected_output(prompt(1, 5), 4, VOCABULARY)
    order = [("submit", 0), ("submit", 1), ("read", 0), ("submit", 2), ("read", 1)]
    # The length is known beforehand: no step is submitted in vain.
    assert log.events == [*order, ("submit", 3), ("read", 2), ("read", 3)]


def test_a_stop_token_is_seen_one_step_late() -> None:
    """The step in vain comes to nothing, and its blocks go to whoever asks next."""
    expected = expected_output(prompt(1, 3), 8, VOCABULARY)
    stop = next(t for i, t in enumerate(expected) if i >= 2 and t not in expected[:i])
    wanted = expected[: expected.index(stop) + 1]
    engine = fake_engine(STAGE, block_size=2, num_blocks=8)
    engine.add_request("a", prompt(1, 3), params(8, stop_token_ids=(stop,)))
    assert run_to_end(engine)["a"] == wanted
    assert len(engine.runner.batches) == len(wanted) + 1
    assert engine.block_manager.num_free_blocks == 8
    engine.add_request("b", prompt(2, 12), params(3))
    assert run_to_end(engine)["b"] == expected_output(prompt(2, 12), 3, VOCABULARY)


def test_an_abort_while_a_step_is_in_flight() -> None:
    engine = fake_engine(STAGE, block_size=2, num_blocks=8, max_num_sequences=1)
    engine.add_request("a", prompt(1, 4), params(9))
    engine.step()
    assert engine.flight is not None
    engine.abort_request("a")
    assert engine.block_manager.num_free_blocks == 8
    engine.add_request("b", prompt(2, 10), params(4))
    assert run_to_end(engine) == {"b": expected_output(prompt(2, 10), 4, VOCABULARY)}


def test_nobody_is_preempted_with_a_token_in_flight() -> None:
    """When blocks run out, the step in flight is committed first; the one that gives way has all
    its tokens and goes on with them."""
    engine = fake_engine(STAGE, block_size=2, num_blocks=9, enable_prefix_caching=False)
    log, taken = Log(engine), watch(engine)
    for i, name in enumerate("ab"):
        engine.add_request(name, prompt(i, 4), params(10))
    tokens = run_to_end(engine)
    for i, name in enumerate("ab"):
        assert tokens[name] == expected_output(prompt(i, 4), 10, VOCABULARY)
    (step,) = [i for i, step in enumerate(taken) if step.preempted]
    before = log.events[: log.events.index(("submit", step))]
    assert {n for event, n in before if event == "submit"} == set(range(step))
    assert {n for event, n in before if event == "read"} == set(range(step))


@pytest.mark.parametrize("when", ["submit", "result"])
def test_a_failure_ends_its_own_requests_once(when: str) -> None:
    """Of two steps in flight with the same sequence the first fails, or the second."""
    engine = fake_engine(STAGE, max_num_sequences=2)
    for name in "abc":
        engine.add_request(name, prompt(1, 3), params(5))
    engine.step()
    submit = engine.runner.submit

    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    def failing(batch: Batch) -> FakeHandle:
        engine.runner.submit = submit
        if when == "submit":
            fail()
        handle: FakeHandle = submit(batch)
        handle.result = fail  # type: ignore[method-assign]
        return handle

    engine.runner.submit = failing
    outputs = [output for _ in range(3) for output in engine.step()]
    ends = [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason]
    assert ends == [("a", "abort"), ("b", "abort")]
    assert run_to_end(engine)["c"][-1] == expected_output(prompt(1, 3), 5, VOCABULARY)[-1]
    assert engine.block_manager.num_free_blocks == engine.limits.num_blocks


def test_what_is_in_flight_lands_although_the_next_step_cannot_start() -> None:
    """It may hold the last token of somebody whom the next step would have computed in vain."""
    expected = expected_output(prompt(1, 3), 6, VOCABULARY)
    stop = next(i for i, t in enumerate(expected) if i >= 2 and t not in expected[:i])
    engine = fake_engine(STAGE)
    engine.add_request("a", prompt(1, 3), params(6, stop_token_ids=(expected[stop],)))
    engine.add_request("b", prompt(2, 3), params(6))
    submit, count = engine.runner.submit, iter(range(100))

    def failing(batch: Batch) -> FakeHandle:
        if next(count) == stop + 1:
            raise MemoryError("no room")
        handle: FakeHandle = submit(batch)
        return handle

    engine.runner.submit = failing
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    tokens = {
        name: [t for o in outputs if o.request_id == name for t in o.new_token_ids] for name in "ab"
    }
    assert tokens["a"] == expected[: stop + 1]
    assert tokens["b"] == expected_output(prompt(2, 3), 6, VOCABULARY)[: stop + 1]
    ends = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {"a": "stop", "b": "abort"}


def test_completions_wait_for_their_prompt_while_an_older_one_goes_on() -> None:
    engine = fake_engine(STAGE, max_prefill_chunk_size=16)
    taken = watch(engine)
    engine.add_request("old", prompt(1, 60), params(2))
    engine.add_request("new", prompt(2, 13), params(2, n=3))
    run_to_end(engine)
    chunks = [chunk for step in taken for chunk in step.chunks if chunk[0] != "old"]
    assert chunks == [("new", 0, 13), ("new#1", 12, 1), ("new#2", 12, 1)]


def test_the_clock_counts_no_time_twice() -> None:
    begin = time.perf_counter()
    engine = fake_engine(STAGE)
    engine.listen(True)
    engine.add_request("a", prompt(1, 5), params(6))
    run_to_end(engine)
    records = engine.take_step_records()
    assert len(records) == 6
    counters = engine.stats().counters
    spent = counters.schedule_seconds + counters.forward_seconds + counters.wait_seconds
    assert spent <= time.perf_counter() - begin


def test_tokens_in_vain_are_not_counted_as_generated() -> None:
    expected = expected_output(prompt(1, 3), 8, VOCABULARY)
    engine = fake_engine(STAGE)
    engine.add_request("a", prompt(1, 3), params(8, stop_token_ids=(expected[2],)))
    got = run_to_end(engine)["a"]
    engine.step()  # what was in flight
    assert engine.stats().counters.generation_tokens == len(got)


def test_steps_start_in_order() -> None:
    engine = fake_engine(STAGE)
    engine.listen(True)
    submit = engine.runner.submit

    def slow_for_prompts(batch: Batch) -> FakeHandle:
        if not batch.decoding.all():
            time.sleep(0.02)
        handle: FakeHandle = submit(batch)
        return handle

    engine.runner.submit = slow_for_prompts
    engine.add_request("a", prompt(1, 5), params(8))
    engine.step()
    engine.step()
    engine.add_request("b", prompt(2, 20), params(2))
    run_to_end(engine)
    starts = [record.time for record in engine.take_step_records()]
    assert starts == sorted(starts)
