"""Engines of others on the same work: `python -m bench.compare --external "NAME=CMD"`.

CMD is started in every round with two more arguments. The first is a file to read:

    {"format": 1,
     "config": {"model": "qwen3-0.6b", "load_format": "dummy", "dtype": "bfloat16", ...},
     "work": [{"warmup": WORKLOAD, "workload": WORKLOAD}, ...]}

    WORKLOAD: {"name": "nano", "scale": "full", "id_limit": 10000, "repeat": 0, "window": null,
               "requests": [{"prompt": [17, 4, ...], "max_tokens": 128, "temperature": 0.6,
                             "arrival": null, "wave": 0, "shared_tokens": 0}, ...]}

`config` are the effective settings of a stage of ours. A request ends after exactly `max_tokens`
tokens, an end-of-text token or not. Without a window all requests of a wave are there at once, and
the next wave starts when it is done. With a window (seconds) those without `arrival` run first
(`max_tokens` null: until the window ends); once each has a token the window opens, and the others
come `arrival` seconds later. The warm-up is not measured.

The second argument is the file to write:

    {"format": 1,
     "config": {"attention_backend": "flash_attn"}, "versions": {"vllm": "0.24.0"},
     "results": [{"workload": "nano", "seconds": 6.8, "output_tokens": 133966, "failures": [],
                  "ttft_ms": [...], "tpot_ms": [...], "gap_ms": [...]}, ...]}

`seconds` and `output_tokens` are needed (with a window: its length, and the tokens within it), and
`failures` has a message for each request that failed. The three lists have a number for each
request, or gap, and may be left out; so may `config` and `versions`.

`bench.external.vllm` and `bench.external.nano_vllm` are such commands.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import result as results
from bench.call import call
from bench.offline import Samples
from bench.result import Result
from bench.workloads import WARMUP, WARMUP_SHARE, Workload, WorkloadName, build_workload

FORMAT = 1


class Work(msgspec.Struct, frozen=True):
    warmup: Workload
    workload: Workload


class WorkFile(msgspec.Struct, frozen=True):
    config: dict[str, Any]
    work: list[Work]
    format: int = FORMAT


class Measured(Samples, frozen=True, kw_only=True):
    workload: str


class Report(msgspec.Struct, frozen=True):
    results: list[Measured]
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    format: int = FORMAT


def run(
    name: str,
    command: str,
    workloads: Sequence[WorkloadName],
    number: int,
    seen: Sequence[Result],
    timeout: float,
) -> tuple[list[Result], str | None]:
    """(rows, why there are not all). `seen`: rows of stages, which say of what size the work is and
    lend machine, model and floor."""
    likes = {row.workload.name: row for row in reversed(seen) if "external" not in row.config}
    known = [workload for workload in workloads if workload in likes]
    if not known:
        return [], "no stage ran before it"
    work = [_work(likes[workload], workload, number) for workload in known]
    with tempfile.TemporaryDirectory() as directory:
        given, wanted = Path(directory) / "work.json", Path(directory) / "result.json"
        given.write_bytes(msgspec.json.encode(WorkFile(likes[known[0]].config, work)))
        problem = call([*shlex.split(command), str(given), str(wanted)], timeout)
        if not wanted.exists():
            return [], problem or "it wrote no result"
        try:
            report = msgspec.json.decode(wanted.read_bytes(), type=Report)
        except msgspec.DecodeError as error:
            return [], f"its result is not in the format: {error}"
    if report.format != FORMAT:
        return [], f"its result has format {report.format}, this code reads {FORMAT}"
    reported = {measured.workload: measured for measured in report.results}
    rows = []
    for one in work:
        if (measured := reported.get(one.workload.name)) is not None:
            like = likes[one.workload.name]
            rows.append(_row(name, command, one.workload, measured, report, like))
    if len(rows) < len(workloads) and problem is None:
        problem = "no result of this workload"
    return rows, problem


def _work(like: Result, name: WorkloadName, number: int) -> Work:
    scale: Any = like.workload.scale
    warmup, workload = (
        build_workload(name, scale, like.workload.id_limit, repeat) for repeat in (WARMUP, number)
    )
    return Work(warmup.shortened(WARMUP_SHARE), workload)


def _row(
    name: str, command: str, workload: Workload, measured: Measured, report: Report, like: Result
) -> Result:
    run = measured.metrics(workload)
    medians, spread = results.summarise([run])
    return msgspec.structs.replace(
        like,
        stage=name,
        created=results.now(),
        versions=report.versions,
        config={**results.common_config(like), **report.config, "external": command},
        runs=[run],
        medians=medians,
        spread=spread,
        percent_of_floor=results.percent_of_floor(workload.name, medians, like.floor),
        gpu_use=[],
        error=_other_work(workload, measured),
    )


def _other_work(workload: Workload, measured: Measured) -> str | None:
    """What shows that something else was done than asked for."""
    if workload.window is not None:
        late = measured.seconds != workload.window
        return f"measured {measured.seconds:g} s, not {workload.window:g} s" if late else None
    expected = sum(request.max_tokens or 0 for request in workload.requests)
    if measured.failures or measured.output_tokens == expected:
        return None
    return f"{measured.output_tokens} tokens, not {expected}"
