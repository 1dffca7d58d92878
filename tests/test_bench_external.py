"""Other engines in a comparison: the files that are exchanged, and the adapters on fakes of vLLM
and nano-vllm."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bench import compare, external, result, rounds, tables
from bench.external import adapter, nano_vllm, vllm
from bench.offline import Driver
from bench.result import Hardware, Result, WorkloadInfo
from bench.rounds import Attempt, Contender
from bench.workloads import Workload, WorkloadName, build_workload

CONFIG = {
    "model": None, "load_format": "auto", "dtype": "float32", "device": "cpu",
    "max_model_length": 2048, "max_num_sequences": 64, "gpu_memory_utilization": 0.9,
    "enforce_eager": False, "attention_backend": "torch", "kvcache_block_size": 16,
}  # fmt: skip

# As somebody would write one who has only the documented format.
FOREIGN = """
import json, sys

given = json.load(open(sys.argv[-2]))
assert given["format"] == 1 and given["config"]["dtype"] == "float32"
results = []
for one in given["work"]:
    work = one["workload"]
    assert one["warmup"]["repeat"] == -1 and len(one["warmup"]["requests"][0]["prompt"]) > 0
    tokens = sum(request["max_tokens"] for request in work["requests"])
    if "--lazy" in sys.argv:
        tokens -= 1
    results.append({"workload": work["name"], "seconds": 2.0, "output_tokens": tokens,
                    "ttft_ms": [1.0, 3.0]})
    if "--half" in sys.argv:
        break
report = {"format": 1, "results": results, "versions": {"other": "1.2"}}
json.dump(report, open(sys.argv[-1], "w"))
if "--half" in sys.argv:
    sys.exit("Killed in the second half")
"""


def like(name: WorkloadName) -> Result:
    work = build_workload(name, "cpu", 4096)
    return Result(
        stage="00_baseline",
        workload=WorkloadInfo(work.name, work.scale, work.id_limit, work.sha256),
        created=result.now(),
        commit="c0ffee" * 6,
        dirty=False,
        hardware=Hardware("some CPU", 2),
        versions={"python": "3.11"},
        config=CONFIG,
        runs=[],
        medians={},
        spread={},
    )


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    path = tmp_path / "foreign.py"
    path.write_text(FOREIGN)
    return shlex.join([sys.executable, str(path)])


def test_another_engine_gets_the_work_and_becomes_a_row(foreign: str) -> None:
    seen = [like("nano"), like("shared_prefix")]
    rows, problem = external.run("other", foreign, ["nano", "shared_prefix"], 1, seen, 60)
    assert problem is None
    assert [(row.stage, row.workload.name, row.error) for row in rows] == [
        ("other", "nano", None), ("other", "shared_prefix", None),
    ]  # fmt: skip
    work = build_workload("nano", "cpu", 4096, repeat=1)
    (run,) = rows[0].runs
    assert (run.repeat, run.sha256) == (1, work.sha256)
    assert run.output_tokens == sum(request.max_tokens or 0 for request in work.requests)
    assert run.tokens_per_second == run.output_tokens / 2
    assert run.ttft_ms is not None
    assert (run.ttft_ms.p50, run.tpot_ms) == (2.0, None)
    assert rows[0].versions == {"other": "1.2"}
    assert rows[0].config["external"] == foreign
    # It stands in one table with the stages.
    assert rows[0].hardware == seen[0].hardware


@pytest.mark.parametrize(
    "arguments, count, problem",
    [
        ("--half", 1, "Killed in the second half"),
        ("--nothing", 0, "it wrote no result"),
        ("--missing", 0, "FileNotFoundError"),
        ("--text", 0, "not in the format"),
    ],
)
def test_an_engine_that_fails_says_why(
    foreign: str, tmp_path: Path, arguments: str, count: int, problem: str
) -> None:
    command = {
        "--half": f"{foreign} --half",
        "--nothing": f"{sys.executable} -c pass",
        "--missing": str(tmp_path / "nothing"),
        "--text": f"{sys.executable} -c \"import sys; open(sys.argv[-1], 'w').write('fast')\"",
    }[arguments]
    seen = [like("nano"), like("shared_prefix")]
    rows, said = external.run("other", command, ["nano", "shared_prefix"], 0, seen, 60)
    assert len(rows) == count
    assert said is not None
    assert problem in said


def test_an_engine_that_did_other_work_has_an_error(foreign: str) -> None:
    rows, _ = external.run("other", f"{foreign} --lazy", ["nano"], 0, [like("nano")], 60)
    assert rows[0].error == "4140 tokens, not 4141"


def test_another_engine_needs_a_stage_before_it(foreign: str) -> None:
    assert external.run("other", foreign, ["nano"], 0, [], 60)[1] == "no stage ran before it"


def test_another_engine_alternates_with_the_stages(
    foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def run_stage(contender: Contender, workloads: Any, number: int, timeout: float) -> Attempt:
        order.append(contender.name)
        return Attempt([like(workload) for workload in workloads])

    monkeypatch.setattr(rounds, "run_stage", run_stage)
    flags = ["--steps", "00_baseline", "--workload", "nano", "--output", str(tmp_path)]
    compare.main([*flags, "--external", f"other={foreign}"])
    merged = result.read_results(tmp_path / "results.json")
    assert [row.stage for row in merged] == ["00_baseline", "other"]
    assert [run.repeat for run in merged[1].runs] == [0, 1]
    raw = result.read_results(tmp_path / "runs.json")
    assert [row.stage for row in raw] == ["00_baseline", "other", "other", "00_baseline"]


@pytest.mark.slow
def test_a_comparison_of_a_stage_and_another_engine(foreign: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.compare", "--steps", "00_baseline"]
    flags = ["--workload", "batch1", "shared_prefix", "--rounds", "1", "--output", str(tmp_path)]
    engine = ["--device", "cpu", "--dtype", "float32", "--external", f"other={foreign}"]
    done = subprocess.run(
        [*command, *flags, *engine], cwd=result.ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = result.read_results(tmp_path / "results.json")
    works = ("batch1", "shared_prefix")
    assert [(row.workload.name, row.stage) for row in rows] == [
        (work, stage) for work in works for stage in ("00_baseline", "other")
    ]
    assert all(row.error is None and row.runs[0].failed == 0 for row in rows)
    assert len(tables.tables(rows)) == 2  # they stand side by side
    # What the adapters take from a stage is there.
    assert adapter.options(rows[0].config)["max_num_seqs"] == 512


@pytest.mark.parametrize("text", ["vllm", "=command", "name=", "00_baseline=command"])
def test_an_engine_without_a_name_of_its_own_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=CMD"):
        compare.external_engines([text])


# --- adapters ------------------------------------------------------------------------------------


class FakeSequence:
    def __init__(self, prompt: list[int], params: Any) -> None:
        self.token_ids, self.num_prompt_tokens = prompt, len(prompt)
        self.max_tokens, self.is_finished = params.max_tokens, False

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class FakeNano:
    """The parts of nano-vllm's engine that the adapter uses; prompts first."""

    def __init__(self, model: str, **options: Any) -> None:
        self.scheduler = SimpleNamespace(waiting=deque(), running=[])

    def add_request(self, prompt: list[int], params: Any) -> None:
        assert params.ignore_eos
        self.scheduler.waiting.append(FakeSequence(prompt, params))

    def is_finished(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def step(self) -> None:
        s = self.scheduler
        batch, is_prefill = (list(s.waiting), True) if s.waiting else (s.running, False)
        if is_prefill:
            s.waiting.clear()
            s.running += batch
        for sequence in batch:
            sequence.token_ids.append(7)
            sequence.is_finished = sequence.num_completion_tokens == sequence.max_tokens
        s.running = [sequence for sequence in s.running if not sequence.is_finished]


class FakeVllm:
    """Of vLLM's; answers are deltas."""

    model_config = SimpleNamespace(max_model_len=2048)

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    @classmethod
    def from_engine_args(cls, arguments: Any) -> FakeVllm:
        assert arguments.skip_tokenizer_init
        return cls()

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert params.output_kind == "delta"
        assert len(prompt["prompt_token_ids"]) > 0
        self.left[request_id] = params.max_tokens

    def abort_request(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            reason = None
            if not self.left[request_id]:
                del self.left[request_id]
                reason = "length"
            completion = SimpleNamespace(token_ids=[7], finish_reason=reason)
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[completion], num_cached_tokens=None)
            )
        return outputs


@pytest.fixture(params=["vllm", "nano-vllm"])
def adapted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How an adapter starts its engine, which is a fake."""
    if request.param == "vllm":
        kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
        module = SimpleNamespace(
            SamplingParams=SimpleNamespace, EngineArgs=SimpleNamespace, LLMEngine=FakeVllm
        )
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
        return vllm.Vllm
    module = SimpleNamespace(SamplingParams=SimpleNamespace, LLM=FakeNano)
    monkeypatch.setitem(sys.modules, "nanovllm", module)
    return nano_vllm.NanoVllm


def short(name: WorkloadName) -> Workload:
    return build_workload(name, "cpu", 4096).shortened(0.05)


@pytest.mark.parametrize("name", ["nano", "shared_prefix", "decode_gap"])
def test_an_adapter_runs_a_workload(adapted: Any, name: WorkloadName) -> None:
    engine = adapted("directory", False, adapter.options(CONFIG))
    clock = iter(range(10**9))
    driver = Driver(engine, clock=lambda: next(clock) / 1000, sleep=lambda seconds: None)
    work = short(name)
    metrics = driver.run(work)
    assert metrics.failures == []
    if work.window is None:
        assert metrics.output_tokens == sum(r.max_tokens or 0 for r in work.requests)
    assert metrics.gap_ms is not None
    assert not engine.has_unfinished_requests()


def test_an_adapter_reads_the_work_and_writes_a_report(adapted: Any, tmp_path: Path) -> None:
    given, wanted = tmp_path / "work.json", tmp_path / "result.json"
    work = external.Work(short("shared_prefix"), short("nano"))
    given.write_bytes(msgspec.json.encode(external.WorkFile(CONFIG, [work])))
    seen: list[tuple[str, bool, dict[str, Any]]] = []

    def start(model: str, dummy: bool, options: dict[str, Any]) -> Any:
        seen.append((model, dummy, options))
        return adapted(model, dummy, options)

    with pytest.raises(SystemExit) as exit_info:
        adapter.main("other", start, ["--set", "max_num_seqs", "9", str(given), str(wanted)])
    assert exit_info.value.code == 0
    report = json.loads(wanted.read_text())
    assert report["config"] == {"max_num_seqs": 9}
    (measured,) = report["results"]
    assert measured["workload"] == "nano"
    assert len(measured["ttft_ms"]) == len(work.workload.requests)
    ((model, dummy, options),) = seen
    assert (model, dummy) == (str(adapter.TINY), False)
    assert (options["max_num_seqs"], options["max_model_len"]) == (9, 2048)


def test_a_real_size_without_files_gets_a_directory(tmp_path: Path) -> None:
    config = {"model": "qwen3-0.6b", "load_format": "dummy"}
    assert adapter.model_directory(config, tmp_path) == (str(tmp_path), True)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 1024
    assert (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("module, package", [("vllm", "vllm"), ("nano_vllm", "nano-vllm")])
def test_an_engine_that_is_not_installed_is_named(module: str, package: str) -> None:
    if importlib.util.find_spec(module.replace("_", "")) is not None:
        pytest.skip("it is installed")
    command = f"{sys.executable} -m bench.external.{module}"
    rows, problem = external.run(package, command, ["batch1"], 0, [like("batch1")], 60)
    assert rows == []
    assert problem is not None
    assert problem.startswith(f"{package} is not installed in {sys.executable}")
