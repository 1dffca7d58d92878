"""The rate sweep over servers of all engines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import steps
from bench import diff, plots
from bench.online import plot, saturation
from bench.online.row import OnlineResult, append_online, read_online
from bench.result import Floor, read_rows
from tests.test_bench_online import row_at


def test_flags_go_to_the_client_or_to_the_servers() -> None:
    flags = [
        "--model", "qwen3-0.6b", "--rate-rps", "1", "2", "--enforce-eager", "--no-ceiling",
        "--max-model-len=77", "--duration", "3", "--max-prefill-tokens-per-step", "64",
    ]  # fmt: skip
    client, server = saturation.split_flags(flags)
    assert client == ["--rate-rps", "1", "2", "--no-ceiling", "--duration", "3"]
    assert server == [
        "--model", "qwen3-0.6b", "--enforce-eager", "--max-model-len=77",
        "--max-prefill-tokens-per-step", "64",
    ]  # fmt: skip


def test_only_engines_can_be_named() -> None:
    assert "00_baseline" in saturation.engine_names(["all"])
    with pytest.raises(ValueError, match="03_online"):
        saturation.engine_names(["03_online"])
    with pytest.raises(ValueError, match="02_batch_reorder"):
        saturation.SaturationOptions(server="02_batch_reorder")


def test_rounds_become_one_row_for_each_engine_and_rate() -> None:
    rows = [row_at(rate, name) for name in "abba" for rate in (1.0, 2.0)]
    merged = saturation.merge(rows)
    points = [(row.label, row.rate_rps, len(row.runs)) for row in merged]
    assert points == [("a", 1.0, 2), ("a", 2.0, 2), ("b", 1.0, 2), ("b", 2.0, 2)]
    failed = msgspec.structs.replace(rows[0], runs=[], medians={}, spread={}, error="it died")
    (half,) = saturation.merge([rows[0], failed])
    assert (half.error, half.medians) == ("it died", rows[0].medians)


def test_what_differs_is_not_merged_whatever_its_label() -> None:
    def row(stage: str = "00_baseline", sha256: str = "0" * 64, **settings: int) -> OnlineResult:
        return msgspec.structs.replace(
            row_at(1.0, "mine"), stage=stage, sha256=sha256, config=settings
        )

    alike = [row(max_num_sequences=8, num_kvcache_blocks=number) for number in (100, 101)]
    others = [row(max_num_sequences=9), row("01_chunked_prefill"), row(sha256="1" * 64)]
    merged = saturation.merge([*alike, *others, alike[0]])
    assert [len(row.runs) for row in merged] == [3, 1, 1, 1]
    slower = msgspec.structs.replace(others[0], rate_rps=0.5)
    with pytest.raises(ValueError, match="'mine' is of several engines"):
        plot.curves([alike[0], slower])
    assert [row.rate_rps for row in plot.curves([*others, *alike])["mine"]] == [1.0]


def test_a_label_is_of_one_engine(tmp_path: Path) -> None:
    command = ["--output", str(tmp_path), "--label", "mine"]
    with pytest.raises(ValueError, match="--label names one engine"):
        saturation.main(command)
    with pytest.raises(ValueError, match="--label names one engine"):
        saturation.main([*command[:2], "--engines", "00_baseline", "02_batch_reorder", "--label=a"])


def test_a_directory_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output: .* cannot be written"):
        saturation.main(["--output", str(tmp_path / "file" / "out")])


def test_the_share_of_the_floor_is_that_of_all_rounds() -> None:
    row = msgspec.structs.replace(row_at(1.0, "a"), percent_of_floor=99.0)
    floor = Floor(2 * row.medians["tokens_per_second"], *[0.0] * 8, 1, "")
    (merged,) = saturation.merge([row, msgspec.structs.replace(row, floor=floor)])
    assert merged.floor == floor
    assert merged.percent_of_floor == 50.0


def test_engines_alternate_and_one_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[tuple[str, int]] = []

    def measure(options, engine: str, number: int, client, flags, limit: float):  # type: ignore[no-untyped-def]
        assert options.server == "03_online"
        order.append((engine, number))
        assert client == ["--rate-rps", "1"]
        has_chunks = engine != "00_baseline"
        assert flags == (["--max-prefill-tokens-per-step", "64"] if has_chunks else [])
        if engine == "02_batch_reorder":
            raise RuntimeError("out of memory")
        return [row_at(1.0, engine), row_at(2.0, engine)]

    monkeypatch.setattr(saturation, "measure", measure)
    flags = ["--rate-rps", "1", "--max-prefill-tokens-per-step", "64"]
    assert saturation.main(["--output", str(tmp_path), *flags]) == 1
    engines = steps.engines()
    assert [name for name, _ in order] == [*engines, *reversed(engines)]
    assert [number for _, number in order] == [0] * len(engines) + [1] * len(engines)
    assert "02_batch_reorder: out of memory" in caplog.text
    written = read_online(tmp_path / "results.json")
    assert [(row.label, row.rate_rps) for row in written] == [
        (name, rate) for name in engines if name != "02_batch_reorder" for rate in (1.0, 2.0)
    ]
    assert "Goodput" in (tmp_path / "saturation.svg").read_text()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    flags = ["--model", "/nonexistent/model"]
    with (
        pytest.raises(RuntimeError, match="/nonexistent/model"),
        saturation.serving("03_online", "00_baseline", flags, tmp_path / "log"),
    ):
        pass


@pytest.mark.slow
def test_servers_are_started_measured_and_stopped(tmp_path: Path) -> None:
    command = ["--output", str(tmp_path), "--rounds", "1", "--engines", "00_baseline"]
    engine = ["01_chunked_prefill", "--device", "cpu", "--num-kvcache-blocks", "200"]
    load = ["--rate-rps", "4", "8", "--num-requests", "4", "--warmup", "1", "--no-ceiling"]
    lengths = ["--short-input-len", "8", "--long-input-len", "32"]
    outputs = ["--short-output-len", "4", "--long-output-len", "8"]
    assert saturation.main([*command, *engine, *load, *lengths, *outputs]) == 0
    rows = read_online(tmp_path / "results.json")
    assert [(row.label, row.stage, row.rate_rps) for row in rows] == [
        (name, name, rate) for name in ("00_baseline", "01_chunked_prefill") for rate in (4.0, 8.0)
    ]
    assert all(row.error is None and row.runs[0].completed == 4 for row in rows)
    assert all("goodput.requests_per_second" in row.medians for row in rows)
    picture = (tmp_path / "saturation.svg").read_text()
    assert "00_baseline" in picture
    assert "01_chunked_prefill" in picture
    for name in ("00_baseline", "01_chunked_prefill"):
        assert "serving" in (tmp_path / f"{name}_0.log").read_text()


def test_goodput_is_drawn_with_the_standard_library_alone(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    append_online(path, [row_at(rate, name) for name in "ab" for rate in (4.0, 1.0)])
    rows = msgspec.json.decode(path.read_bytes())
    picture = plots.goodput(rows)
    assert picture is not None
    assert picture.count("<polyline") >= 2
    del rows[0]["medians"]["goodput.requests_per_second"]
    rows[1]["rate_rps"] = None
    assert plots.goodput(rows) is not None
    assert plots.goodput(rows[:2]) is None


def test_online_files_are_compared_by_rate(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    append_online(path, [row_at(1.0, "a"), row_at(2.0, "a")])
    rows = read_rows(path, list[diff.AnyRow], 1)
    (same, other) = diff.pairs(rows, [*rows[:1], msgspec.structs.replace(rows[1], label="b")])[:2]
    assert same.first is not None
    assert same.second is not None
    assert same.name == "saturation 1 requests/s a m"
    assert other.second is None
    assert diff.ratio(same.first, same.second, "goodput.requests_per_second") == "1.000"
    with pytest.raises(ValueError, match="saturation 2 requests/s is not the same work"):
        diff.pairs(rows, [rows[0], msgspec.structs.replace(rows[1], sha256="f" * 64)])
