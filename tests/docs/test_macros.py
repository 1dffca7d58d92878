"""What pages take from the repository: regions by name, differences, numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install -e '.[docs]'")

from tools.docsite import changes, results, roofline, sources, traces
from tools.docsite.macros import Expander, PageError
from tools.draw_timelines import recorded
from tools.draw_trace import duration


def expand(text: str) -> str:
    return Expander("stages/page.html").expand(text)


def test_a_region_is_found_by_its_name() -> None:
    found = sources.region("steps/00_baseline/scheduler.py", "Scheduler.schedule")
    assert found.text.startswith("def schedule(self) -> Schedule:")
    assert found.text.rstrip().endswith("self._schedule_decodes()")
    lines = sources.read(found.path).splitlines()
    assert lines[found.first - 1].strip() == found.text.splitlines()[0]


def test_a_region_includes_decorators_and_docstrings_of_fields() -> None:
    decorated = sources.region("shared/engine/batch.py", "Schedule")
    assert decorated.text.startswith("@dataclass")
    field = sources.region("shared/engine/trace.py", "StepRecord.wait_ms")
    assert field.text.endswith('"""Waiting for the sampled ids."""')


@pytest.mark.parametrize(
    "text",
    [
        "{{ source steps/00_baseline/scheduler.py Scheduler.nothing }}",
        "{{ source steps/00_baseline/nothing.py }}",
        "{{ number cpu/decode_gap_stages.json 00_baseline nano gap_ms.p99 .0f }}",
        "{{ number cpu/nothing.json 00_baseline nano gap_ms.p99 .0f }}",
        "{{ nothing }}",
        "{{ changed 99_nothing }}",
        "```sourcemap\nwhat | shared/engine/batch.py#Nothing\n```",
    ],
)
def test_what_is_not_there_stops_the_build(text: str) -> None:
    with pytest.raises(PageError):
        expand(text)


def test_links_lead_to_the_line() -> None:
    region = sources.region("shared/engine/batch.py", "Schedule")
    link = f"../source/shared/engine/batch.py.html#__codelineno-0-{region.first}"
    assert link in expand("{{ at shared/engine/batch.py Schedule }}")


def test_numbers_are_those_of_the_file() -> None:
    name = "cpu/decode_gap_stages.json"
    row = results.rows_of(name)[0]
    assert row["stage"] == "00_baseline"
    text = expand(f"{{{{ number {name} 00_baseline decode_gap gap_ms.p99 .3f }}}}")
    assert text == f"{row['medians']['gap_ms.p99']:.3f}"


def test_differences_add_up() -> None:
    for change in changes.changes("01_chunked_prefill"):
        before, after = change.lines_before or 0, change.lines or 0
        assert after - before == change.added - change.removed, change.name


def test_what_a_stage_reuses_is_not_its_own() -> None:
    reused = changes.reused("02_batch_reorder")
    assert "steps/01_chunked_prefill/scheduler.py" in reused
    assert "shared/engine/block_manager.py" in reused
    assert not any(path.startswith("steps/02_batch_reorder/") for path in reused)


def test_the_roofline_is_that_of_the_benchmarks() -> None:
    from bench.floor import ModelCost
    from shared.models.config import real_model_config, real_model_names

    for name in real_model_names():
        here = roofline.cost_of(name)
        there = ModelCost.of(real_model_config(name), 2)
        assert here.weight_bytes == there.weight_bytes
        assert here.kv_bytes == there.kv_bytes
        assert here.flops == there.trunk_flops + there.head_flops
        assert here.attention_flops == there.attention_flops


def test_the_longest_wait_is_counted_between_tokens_of_one_request() -> None:
    def step(ms: float, decodes: list[str], prefills: list[tuple[str, int, int]]) -> dict:
        return {
            "schedule_ms": 0.0,
            "forward_ms": ms,
            "wait_ms": 0.0,
            "decodes": decodes,
            "prefills": prefills,
        }

    records = [
        step(5, [], [("a", 0, 4)]),
        step(2, ["a"], []),
        step(30, [], [("b", 0, 90)]),
        step(3, ["a", "b"], []),
    ]
    assert traces.longest_wait(records) == 33
    chunked = [step(5, [], [("a", 0, 4)]), step(20, ["a"], [("b", 0, 50)]), step(9, ["a"], [])]
    assert traces.longest_wait(chunked) == 20


def test_recorded_traces_of_one_scenario_have_the_same_arrivals() -> None:
    found = recorded("long_prompt")
    assert list(found) == changes.stages()[: len(found)]
    prompts = []
    for records in found.values():
        assert all(duration(record) > 0 for record in records)
        ends: dict[str, int] = {}
        for record in records:
            ends.update({name: start + length for name, start, length in record.prefills})
        prompts.append(ends)
    assert all(ends == prompts[0] for ends in prompts)


def test_drawings_in_docstrings_become_code() -> None:
    griffe = pytest.importorskip("griffe")
    assert griffe
    from tools.docsite.docstrings import with_code_blocks

    text = "One line.\n\n     in use\n  [ 7 ][ 2 ]\n\nAnother."
    assert with_code_blocks(text) == "One line.\n\n         in use\n      [ 7 ][ 2 ]\n\nAnother."
