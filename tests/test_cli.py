"""The command line over a stage that only pretends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared import cli
from shared.config import EngineConfig
from shared.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from steps import load
from steps import names as stage_names
from tests.test_llm import FakeEngine, FakeLLM, ids_of
from tests.test_output import byte_level_tokenizer

ROOT = Path(__file__).parent.parent


class StageConfig(EngineConfig):
    extra_option: int = 7
    """An option that only this stage has."""
    extra_names: tuple[str, ...] | None = None
    """One of several values."""


class CliEngine(FakeEngine):
    latest: CliEngine

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.model == "nowhere":
            raise FileNotFoundError("nowhere: no such\ndirectory")
        if config.model == "slow":
            self.before_step = lambda number: time.sleep(0.05)
        if config.model == "failing":
            self.before_step = lambda number: self.failing.update({"1": "page fault"})
        type(self).latest = self


class CliLLM(FakeLLM):
    engine_class = CliEngine
    config_class = StageConfig


def load_fake_stage(name: str) -> SimpleNamespace:
    assert name == "99_fake"
    return SimpleNamespace(Config=StageConfig, LLM=CliLLM)


Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("steps.load", load_fake_stage)

    def run(*argv: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as exit_info:
            cli.generate_main("99_fake", argv)
        captured = capsys.readouterr()
        return SimpleNamespace(status=exit_info.value.code, out=captured.out, err=captured.err)

    return run


def test_one_prompt_streams_and_ends_with_a_line_of_numbers(run: Run) -> None:
    result = run("--prompt", "abc 你")
    assert (result.status, result.out) == (0, "abc 你\n")
    num_tokens = len(byte_level_tokenizer().encode("abc 你"))
    assert f"{num_tokens} prompt tokens, {num_tokens} output tokens, " in result.err
    assert "first token after " in result.err
    assert " tokens/s" in result.err


def test_json_lines(run: Run) -> None:
    result = run("--prompt", "abc", "d", "--prompt", "e", "--json", "--max-tokens", "9")
    assert result.status == 0
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [record["text"] for record in records] == ["abc", "d", "e"]
    assert all(
        list(record) == ["prompt_token_ids", "token_ids", "text", "finish_reason"]
        for record in records
    )
    assert records[0]["prompt_token_ids"] == records[0]["token_ids"] == ids_of("abc")
    assert records[0]["finish_reason"] == "length"


def test_json_holds_all_that_was_asked_for(run: Run) -> None:
    result = run("--prompt", "a", "--json", "--n", "2", "--logprobs", "0")
    (record,) = [json.loads(line) for line in result.out.splitlines()]
    assert [completion["text"] for completion in record["outputs"]] == ["a", "a!"]
    (entry,) = record["logprobs"]
    assert entry == {str(ids_of("a")[0]): {"logprob": -0.5, "rank": 1}}
    assert run("--prompt", "a", "--logprobs", "0").status == 2


def test_json_has_null_for_what_is_no_number() -> None:
    odd = [{5: Logprob(float("-inf"), 1), 6: Logprob(float("nan"), 2)}]
    completion = CompletionOutput(0, [5], "é", "stop", odd)
    output = RequestOutput("0", None, [4], [completion], RequestMetrics(0.0), [None, *odd])
    record = json.loads(cli._as_json(output), parse_constant=pytest.fail)
    assert record["logprobs"] == [
        {"5": {"logprob": None, "rank": 1}, "6": {"logprob": None, "rank": 2}}
    ]
    assert record["prompt_logprobs"] == [None, *record["logprobs"]]
    assert record["text"] == "é"


def test_several_prompts_in_words(run: Run) -> None:
    result = run("--prompt", "abc", "--prompt", "d", "--n", "2")
    assert result.out == "=== abc\n--- 0\nabc\n\n--- 1\nabc!\n\n=== d\n--- 0\nd\n\n--- 1\nd!\n\n"


def test_chat(run: Run) -> None:
    for more in ([], ["--json"]):
        result = run("--prompt", "hi", "--chat", *more)
        text = json.loads(result.out)["text"] if more else result.out.rstrip("\n")
        assert text == "user\nhi"


def test_flags_are_the_fields_of_the_stage_s_config(run: Run) -> None:
    run("--prompt", "a", "--extra-option", "3", "--max-model-len", "50", "--no-enforce-eager")
    config = CliEngine.latest.config
    assert isinstance(config, StageConfig)
    assert (config.extra_option, config.max_model_length) == (3, 50)
    run("--prompt", "a", "--max-model-length", "40", "--max-num-sequences", "8", "--enforce-eager")
    config = CliEngine.latest.config
    assert (config.max_model_length, config.max_num_sequences) == (40, 8)
    assert config.enforce_eager
    run("--prompt", "a", "--max-num-seqs", "9", "--kvcache-block-size", "32")
    config = CliEngine.latest.config
    assert (config.max_num_sequences, config.kvcache_block_size) == (9, 32)


def params_of_last_run() -> Any:
    return CliEngine.latest._params["0"]


def test_sampling_flags(run: Run) -> None:
    run("--prompt", "a", "--temperature", "0", "--top-p", "0.5", "--stop", "x", "y")
    params = params_of_last_run()
    assert (params.temperature, params.top_p, params.stop) == (0, 0.5, ("x", "y"))
    assert params.max_tokens == 64
    run("--prompt", "a", "--max-tokens", "64")
    assert (params_of_last_run().stop, params_of_last_run().logit_bias) == ((), None)
    run("--prompt", "a", "--stop-token-ids", "3", "--logit-bias", "5", "1.5", "--ignore-eos")
    params = params_of_last_run()
    assert (params.stop_token_ids, params.logit_bias) == ((3,), {5: 1.5})
    assert params.ignore_eos


def test_repeated_flags_add_up(run: Run) -> None:
    run("--prompt", "a", "--stop", "x", "y", "--stop", "z", "--stop-token-ids", "3")
    assert params_of_last_run().stop == ("x", "y", "z")
    bias = ["--logit-bias", "5", "1.5", "6", "2", "--logit-bias", "7", "-1"]
    run("--prompt", "a", "--stop-token-ids", "3", "--stop-token-ids", "4", *bias)
    params = params_of_last_run()
    assert (params.stop_token_ids, params.logit_bias) == ((3, 4), {5: 1.5, 6: 2, 7: -1})
    run("--prompt", "a", "--extra-names", "u", "--extra-names", "v", "w")
    assert CliEngine.latest.config.extra_names == ("u", "v", "w")  # type: ignore[attr-defined]


def test_seed_is_the_engine_s_and_the_request_s_unless_that_has_its_own(run: Run) -> None:
    run("--prompt", "a", "--seed", "5")
    assert (CliEngine.latest.config.seed, params_of_last_run().seed) == (5, 5)
    run("--prompt", "a", "--seed", "5", "--request-seed", "6")
    assert (CliEngine.latest.config.seed, params_of_last_run().seed) == (5, 6)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "--prompt"),
        (["--prompt"], "--prompt"),
        (["--prompt", ""], "prompt 0: empty"),
        (["--prompt", "a", "--max-model-len", "0"], "max_model_length: "),
        (["--prompt", "a", "--temperature", "-1"], "temperature: "),
        (["--prompt", "a", "--min-tokens", "99"], "min_tokens=99 exceeds max_tokens=64"),
        (["--prompt", "a", "--model", "nowhere"], "nowhere: no such directory"),
        (
            ["--prompt", "a", "--attention-backend", "flash_attn", "--kvcache-block-size", "16"],
            "16",
        ),
    ],
)
def test_expected_errors_are_one_line(run: Run, argv: Sequence[str], message: str) -> None:
    result = run(*argv)
    assert (result.status, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_unknown_flags_are_usage_errors(run: Run) -> None:
    result = run("--prompt", "a", "--no-such-flag", "1")
    assert (result.status, result.out) == (2, "")
    assert "no-such-flag" in result.err
    assert run("--prompt", "a", "--max-tokens", "many").status == 2


def test_unknown_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.generate_main("98_nothing", ["--prompt", "a"])
    assert exit_info.value.code == 2
    assert "no stage '98_nothing'" in capsys.readouterr().err


def test_help_explains_every_field(run: Run) -> None:
    result = run("--help")
    assert result.status == 0
    for expected in (
        "--prompt",
        "--max-num-seqs",
        "--max-tokens",
        "An option that only this stage",
    ):
        assert expected in result.out


def test_a_failed_request_is_told_and_the_others_are_printed(run: Run) -> None:
    result = run("--prompt", "abc", "d", "--json", "--model", "failing")
    assert result.status == 1
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["abc", ""]
    assert "error: prompt 1: page fault" in result.err


def test_the_engine_is_closed(run: Run) -> None:
    run("--prompt", "abc")
    assert CliEngine.latest.is_closed


FAKE_STAGE = (
    "import sys, steps, tests.test_cli as t; steps.load = t.load_fake_stage; "
    "t.cli.generate_main('99_fake', sys.argv[1:])"
)


def start(*argv: str) -> subprocess.Popen[str]:
    """generate_main in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", FAKE_STAGE, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = start("--prompt", "a" * 90, "--model", "slow")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == "a"
    process.stdout.close()
    assert process.wait(30) == cli.EXIT_PIPE_CLOSED
    assert process.stderr.read() == ""
    process.stderr.close()


def test_ctrl_c_ends_cleanly() -> None:
    process = start("--prompt", "a" * 90, "--model", "slow")
    assert process.stdout is not None
    assert process.stdout.read(1) == "a"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert len(out) < 89
    assert "Traceback" not in err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("prompts", [["abc"], ["abc", "d"]], ids=["stream", "batch"])
def test_closed_output_is_no_failure(closed: str, prompts: list[str]) -> None:
    command = [sys.executable, "-c", FAKE_STAGE, "--prompt", *prompts]
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert ("abc" in result.stdout) == (closed == "2>&-")
    assert "tokens/s" not in result.stdout
    assert ("tokens/s" in result.stderr) == (closed == ">&-")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("stage", stage_names())
def test_help_does_without_what_is_slow_to_import(stage: str) -> None:
    script = (
        f"import sys, shared.cli as c\ntry: c.generate_main({stage!r}, ['--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--max-num-seqs" in result.stdout
    assert result.stderr == "False\n"
    package = load(stage)
    assert package.LLM.engine_class is package.Engine
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = package.LLMs


def test_ctrl_c_while_modules_are_imported_ends_cleanly(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)"
    )
    script = (
        "import signal, shared.cli as c; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "c.generate_main('00_baseline', ['--prompt', 'hi'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (cli.EXIT_INTERRUPTED, "")
