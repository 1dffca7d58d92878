"""What pages take from the repository: regions by name, differences, numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steps

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
    assert list(found) == steps.engines()
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


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of results instead of the repository's."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    results.rows_of.cache_clear()
    yield tmp_path
    results.rows_of.cache_clear()


def stored_row(stage: str, speed: float = 100.0, **config: Any) -> dict[str, Any]:
    medians = {"tokens_per_second": speed, "ttft_ms.p50": 5.0}
    medians |= {f"gap_ms.{name}": 10.0 * (i + 1) for i, name in enumerate(("p50", "p95", "p99"))}
    medians["gap_ms.max"] = 90.0
    return {
        "stage": stage,
        "workload": {"name": "decode_gap", "scale": "cpu", "sha256": "ab" * 32},
        "created": "2026-01-01",
        "hardware": {"cpu": "some CPU", "cpu_count": 2, "gpus": []},
        "config": {"attention_backend": "torch", "kvcache_block_size": 16, **config},
        "runs": [{}],
        "medians": medians,
        "spread": {name: (value, value) for name, value in medians.items()},
        "percent_of_floor": 12.5,
    }


def failed_row(stage: str, **config: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"medians": {}, "spread": {}, "runs": [], "percent_of_floor": None}
    return {**stored_row(stage, **config), **empty, "error": "out of memory"}


def online_row(label: str, rate: float | None, reached: float | None) -> dict[str, Any]:
    medians = {} if reached is None else {"goodput.requests_per_second": reached}
    hardware = {"cpu": "some CPU", "cpu_count": 2}
    known = {"scenario": "saturation", "model": "m", "hardware": hardware}
    return {"label": label, "rate_rps": rate, "medians": medians, **known}


PICTURES = (
    "{{ plot gaps decode_gap }} {{ plot throughput decode_gap }} {{ plot goodput }} "
    "{{ ladder decode_gap,nano }} {{ swept budget }} {{ results 01_b decode_gap against=00_a }}"
)


def test_pages_do_without_results(stored: Path) -> None:
    text = expand(PICTURES)
    assert "<svg" not in text
    assert "No online rate sweep in this repository yet." in text
    assert "No result of `python -m bench.sweep budget` in this repository yet." in text


def test_rows_without_numbers_stay_out_of_pictures(stored: Path) -> None:
    (stored / "stages.json").write_text(json.dumps([failed_row("00_a"), failed_row("01_b")]))
    (stored / "online_x.json").write_text(json.dumps([online_row("a", 2.0, None)]))
    (stored / "sweep_budget.json").write_text(json.dumps([failed_row("01_b")]))
    text = expand(PICTURES)
    assert "<svg" not in text
    assert "0; out of memory" in text  # in the tables, they stay

    partly = stored_row("00_a")
    del partly["medians"]["gap_ms.p99"]
    (stored / "stages.json").write_text(json.dumps([partly, stored_row("01_b")]))
    results.rows_of.cache_clear()
    assert expand("{{ plot gaps decode_gap }}").count(">01_b<") == 1
    assert ">00_a<" not in expand("{{ plot gaps decode_gap }}")
    assert ">00_a<" in expand("{{ plot throughput decode_gap }}")


def test_goodput_has_a_curve_for_each_engine(stored: Path) -> None:
    rows = [online_row(label, rate, rate / 2) for label in ("00_a", "01_b") for rate in (2.0, 8.0)]
    rows += [online_row("02_c", None, 1.0), online_row("03_d", 4.0, None)]
    (stored / "online_saturation.json").write_text(json.dumps(rows))
    text = expand("{{ plot goodput }}")
    assert text.count("<svg") == 1
    assert ">00_a<" in text
    assert ">01_b<" in text
    assert ">02_c<" not in text
    assert "From `bench/results/online_saturation.json`" in text


def test_a_table_says_what_its_numbers_leave_out(stored: Path) -> None:
    row = stored_row("00_a") | {"runs": [{"failed": 0}, {"failed": 3}], "error": "round 3: killed"}
    (stored / "stages.json").write_text(json.dumps([row, stored_row("01_b")]))
    table = expand("{{ results 00_a decode_gap against=01_b }}")
    assert "| 2; 3 requests failed; round 3: killed |" in table
    assert "| 1 |" in table


def test_no_point_of_a_sweep_stands_for_its_stage(stored: Path) -> None:
    points = [stored_row("01_b", 7.0 * n, max_prefill_tokens_per_step=n) for n in (11, 13)]
    (stored / "sweep_budget_cpu.json").write_text(json.dumps(points))
    (stored / "stages.json").write_text(json.dumps([stored_row("00_a"), stored_row("01_b")]))
    table = expand("{{ swept budget }}")
    assert "| 01_b | 77 |" in table
    assert "prefill 13" in table
    for macro in ("{{ ladder decode_gap }}", "{{ results 01_b decode_gap }}"):
        assert "prefill" not in expand(macro)
    option = "max_prefill_tokens_per_step tokens_per_second"
    (stored / "sweep_budget_cpu.json").write_text(json.dumps([*points, failed_row("01_b")]))
    results.rows_of.cache_clear()
    lines = expand(f"{{{{ sweep sweep_budget_cpu.json {option} }}}}").splitlines()
    assert lines[2:4] == ["| 11 | 77 |", "| 13 | 91 |"]


def test_several_gpus_are_compared_with_one(stored: Path) -> None:
    text = "{{ parallel 04_p decode_gap,saturation }}"
    assert expand(text) == "Not measured yet on several GPUs: `decode_gap`, `saturation`."
    rows = [
        stored_row("04_p", speed, data_parallel_size=data, tensor_parallel_size=tensor)
        for data, tensor, speed in ((2, 1, 190.0), (1, 1, 90.0), (1, 1, 100.0), (1, 2, 150.0))
    ]
    (stored / "sweep_parallel.json").write_text(json.dumps(rows))
    (stored / "online.json").write_text(
        json.dumps([served("04_p", 1, 30.0), served("04_p", 2, 55.0)])
    )
    found = expand(text)
    assert "| 1 | 1 | 100 | 1.00 | - |" in found
    assert "| 1 | 2 | 150 | 1.50 | - |" in found
    assert "| 2 | 1 | 190 | 1.90 | - |" in found
    assert "| 2 | 1 | 55 | 5.50 | 50 | 1.83 | below saturation | - |" in found
    assert "model: m; engine: 04_p; offered, requests/s: 8." in found
    assert "Most goodput" not in found


def served(
    engine: str,
    size: int,
    speed: float,
    rate: float = 8.0,
    share: float = 1.0,
    clients: int | None = None,
    requests: int = 0,
) -> dict[str, Any]:
    """With a limit on clients, the requests wait for one."""
    row = online_row(engine, rate, speed / 10)
    row["medians"] |= {"tokens_per_second": speed, "goodput.share": share, "requests": requests}
    row["medians"] |= {"latencies.queue_ms.avg": 60.0, "latencies.ttft_ms.avg": 50.0}
    return {
        **row,
        "stage": engine,
        "sha256": f"{rate} {requests}",
        "config": {"data_parallel_size": size},
        "options": {"load": {"concurrency": clients}},
        "spread": {name: (value, value) for name, value in row["medians"].items()},
    }


def test_a_gain_says_whether_one_gpu_is_saturated(stored: Path) -> None:
    def write(*rows: dict[str, Any]) -> str:
        (stored / "online.json").write_text(json.dumps(rows))
        return expand("{{ parallel 04_p saturation }}")

    found = write(
        served("01_b", 1, 50.0, rate=2.0),
        served("01_b", 1, 90.0, share=0.5),
        served("01_b", 2, 120.0),
        served("01_b", 2, 150.0, rate=9.0),
        served("05_c", 1, 77.0),  # served by one GPU alone
    )
    assert "| 2 | 1 | 1 | 50 | 5.00 | 50 | 1.00 | below saturation | - |" in found
    assert "| 8 | 2 | 1 | 120 | 12.00 | 50 | 1.33 | saturated | - |" in found
    assert "| 9 | 2 | 1 | 150 | 15.00 | 50 | - | saturated | - |" in found  # one was at 8 already
    assert "77" not in found
    assert "DP 2, TP 1: 15.00 (1.67 times one)" in found  # at different rates

    found = write(
        served("05_c", 1, 50.0, clients=4, requests=12),
        served("05_c", 1, 70.0, clients=4, requests=16),  # other requests
        served("05_c", 2, 60.0, clients=4, requests=12),
    )
    assert "| 12 | 2 | 1 | 60 | 6.00 | 50 | 1.20 | below saturation, 4 clients busy | - |" in found


def test_what_serving_costs_is_a_share_of_the_steps(stored: Path) -> None:
    counts = [{"step_seconds": 10.0, "serving_seconds": part} for part in (0.1, 0.3, 0.2)]
    row = {**served("05_c", 1, 50.0), "runs": [{"server": count} for count in counts]}
    others = {**served("05_c", 1, 60.0, rate=9.0), "runs": [{"server": {}}, {}]}
    (stored / "online.json").write_text(json.dumps([row, others]))
    number = "{{ number online.json 05_c saturation serving_percent .1f rate_rps=%s }}"
    assert expand(number % 8) == "2.0"
    with pytest.raises(ValueError, match="no serving_percent"):
        expand(number % 9)
    table = expand("{{ served saturation }}")
    assert "| serving, % of steps |" in table
    assert "| 2.0 | - |" in table
    assert "| - | - |" in table


def test_numbers_of_servers_are_found_by_size_and_rate(stored: Path) -> None:
    rows = [served("05_c", 1, 50.0), served("05_c", 2, 60.0), served("05_c", 2, 70.0, rate=9.0)]
    del rows[0]["config"]["data_parallel_size"]
    (stored / "online.json").write_text(json.dumps(rows))
    number = "{{ number online.json 05_c saturation tokens_per_second .0f"
    assert expand(f"{number} data_parallel_size=1 }}}}") == "50"
    assert expand(f"{number} data_parallel_size=2 rate_rps=8 }}}}") == "60"
    assert expand(f"{number} data_parallel_size=2 rate_rps=9 }}}}") == "70"


def profile(ranks: int, busy: float) -> dict[str, Any]:
    part = {"part": "linear", "launches": 3.0, "microseconds": busy, "floor": 10.0}
    return {
        "steps": [{"rows": 8, "context": 512.0, "step": 50.0, "busy": busy, "parts": [part]}],
        "config": {
            "model": "m",
            "dtype": "bfloat16",
            "device_name": "some GPU",
            "tensor_parallel_size": ranks,
        },
        "copy_gb_per_second": 4000.0,
    }


def test_profiles_are_those_of_one_device_or_those_named(stored: Path) -> None:
    (stored / "decode_profile_a.json").write_text(json.dumps(profile(2, 22.0)))
    (stored / "decode_profile_b.json").write_text(json.dumps(profile(1, 41.0)))
    alone = expand("{{ decode_profile }}")
    assert "| m, µs | 8 x 512 tokens |" in alone
    assert "ranks" not in alone
    both = expand("{{ decode_profile decode_profile_b.json decode_profile_a.json }}")
    assert both.startswith(alone)  # in the order of the names
    assert "| m, one of 2 ranks, µs | 8 x 512 tokens |" in both
    assert "| linear, 3 launches | 22 (10) |" in both
    with pytest.raises(PageError):
        expand("{{ decode_profile decode_profile_b.json decode_profile_c.json }}")


def test_two_comparisons_of_one_work_stand_in_two_columns(stored: Path) -> None:
    def write(name: str, created: str, speeds: dict[str, int]) -> None:
        rows = [stored_row(stage, speed) for stage, speed in speeds.items()]
        for row in rows:
            row["workload"]["name"] = "nano"
            row["created"] = created
        (stored / name).write_text(json.dumps(rows))
        results.rows_of.cache_clear()

    def lines() -> list[str]:
        return [line for line in expand("{{ ladder nano }}").splitlines() if line[:3] == "| 0"]

    write("a.json", "2026-01-01", {"00": 10, "01": 11, "02": 12})
    write("b.json", "2026-01-02", {"00": 20, "01": 21, "05": 25})
    write("c.json", "2026-01-03", {"00": 30})  # a stage alone is compared with nobody
    assert lines() == ["| 00 | 10 | 20 |", "| 01 | 11 | 21 |", "| 02 | 12 | - |", "| 05 | - | 25 |"]
    assert expand("{{ plot throughput nano }}").count("<svg") == 2
    # All that b.json has, and newer.
    write("a.json", "2026-01-04", {"00": 10, "01": 11, "02": 12, "05": 15})
    assert lines() == ["| 00 | 10 |", "| 01 | 11 |", "| 02 | 12 |", "| 05 | 15 |"]
    assert expand("{{ plot throughput nano }}").count("<svg") == 1


def test_engines_behind_a_server_have_lines_of_their_own(stored: Path) -> None:
    def write(*rows: dict[str, Any]) -> tuple[str, str]:
        (stored / "online.json").write_text(json.dumps(rows))
        return expand("{{ served saturation }}"), expand("{{ parallel 04_p saturation }}")

    of_01 = [served("01_b", 1, 50.0), served("01_b", 2, 80.0)]
    alone, sizes = write(*of_01)
    assert "| 50 | 5.00 | 50 | - |" in alone
    assert "engine: 01_b" in alone
    assert "| 80 |" not in alone  # of several GPUs: with the other macro
    both, sizes = write(*of_01, served("05_c", 1, 60.0), served("05_c", 2, 120.0))
    assert "| 01_b | 50 | 5.00 | 50 | - |" in both
    assert "| 05_c | 60 | 6.00 | 50 | - |" in both
    # Times its own engine's one.
    assert "| 01_b | 2 | 1 | 80 | 8.00 | 50 | 1.60 | below saturation | - |" in sizes
    assert "| 05_c | 2 | 1 | 120 | 12.00 | 50 | 2.00 | below saturation | - |" in sizes
