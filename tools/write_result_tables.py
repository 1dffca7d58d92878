"""Write docs/results.md from the JSON files under bench/results.

python -m tools.write_result_tables            # rewrites the part between the markers
python -m tools.write_result_tables --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.all_reduce import Report as AllReduceReport
from bench.channels import Report as ChannelReport
from bench.decode_profile import ProfileReport
from bench.kernels import KernelReport
from bench.online import report
from bench.online.row import read_online
from bench.result import read_results
from bench.small_batch import Report as SmallBatchReport
from bench.tables import markdown
from tools import generated_page
from tools.docsite.results import all_reduce_lines, profile_lines

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results: generated -->", "<!-- end of results -->"


def kernels(report: KernelReport) -> str:
    where = ", ".join(gpu.name for gpu in report.hardware.gpus) or report.hardware.cpu
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    title = (
        f"**Kernels, bfloat16; {where}; a copy reaches {report.copy_gb_per_second:,.0f} GB/s, a "
        f"matrix product {report.matmul_tflop_per_second:,.0f} TFLOP/s**"
    )
    lines = [
        title,
        "",
        "| operation | shape | implementation | µs | rate | % of ceiling |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in report.rows:
        lines.append(
            f"| {row.operation} | {row.shape} | {row.implementation} | {row.microseconds:,.1f} | "
            f"{row.rate:,.0f} {row.unit} | {row.percent_of_ceiling:.0f} |"
        )
    commit = f"{(report.commit or 'unknown')[:10]}{'+changes' if report.dirty else ''}"
    return "\n".join([*lines, "", f"Median of one call. Commit {commit}; {versions}."])


def decode_profile(report: ProfileReport) -> str:
    where = ", ".join(gpu.name for gpu in report.hardware.gpus) or report.hardware.cpu
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    rows = [f"{step.rows} x {step.context:.0f} tokens" for step in report.steps]
    title = (
        f"**A decode step of {report.config['model']}, {report.config['dtype']}, {where}, "
        f"microseconds (floor: bytes at {report.copy_gb_per_second:,.0f} GB/s)**"
    )
    lines = [
        title,
        "",
        f"| part | {' | '.join(rows)} |",
        f"|---|{'---:|' * len(rows)}",
    ]
    lines += profile_lines(msgspec.to_builtins(report.steps))
    commit = f"{(report.commit or 'unknown')[:10]}{'+changes' if report.dirty else ''}"
    return "\n".join([*lines, "", f"Floor in brackets. Commit {commit}; {versions}."])


def small_batch(report: SmallBatchReport) -> str:
    where = ", ".join(gpu.name for gpu in report.hardware.gpus) or report.hardware.cpu
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    title = (
        f"**Linear layers of few rows, bfloat16; {where}; floor: the weights' bytes at "
        f"{report.copy_gb_per_second:,.0f} GB/s**"
    )
    lines = [
        title,
        "",
        "| model | operation | rows | floor, µs | library | kernel | taken |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in report.rows:
        lines.append(
            f"| {row.model} | {row.operation} | {row.rows} | {row.floor_us:,.1f} | "
            f"{row.library_us:,.1f} | {row.kernel_us:,.1f} | {row.route} |"
        )
    commit = f"{(report.commit or 'unknown')[:10]}{'+changes' if report.dirty else ''}"
    return "\n".join([*lines, "", f"Norm and activation included. Commit {commit}; {versions}."])


def channels(report: ChannelReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    where = f"{report.hardware.cpu}, {report.hardware.cpu_count} CPUs"
    lines = [
        f"**A step's message from rank 0 to its workers; {where}**",
        "",
        "| workers | message | channel | arrival, µs | p99 | sending, µs |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for row in report.rows:
        lines.append(
            f"| {row.workers} | {row.message} | {row.channel} | {row.arrival_us:,.0f} | "
            f"{row.arrival_p99_us:,.0f} | {row.sending_us:,.0f} |"
        )
    commit = f"{(report.commit or 'unknown')[:10]}{'+changes' if report.dirty else ''}"
    medians = "Medians: until the last worker has the words, and until rank 0 has sent them."
    return "\n".join([*lines, "", f"{medians} Commit {commit}; {versions}."])


def all_reduce(report: AllReduceReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    title = (
        f"**Sums over {report.ranks} ranks, bfloat16; {report.hardware.gpus[0].name}; floor: the "
        f"bytes a rank receives at {report.gb_per_second:,.0f} GB/s**"
    )
    commit = f"{(report.commit or 'unknown')[:10]}{'+changes' if report.dirty else ''}"
    lines = all_reduce_lines(msgspec.to_builtins(report.rows))
    return "\n".join([title, "", *lines, "", f"Median of one sum. Commit {commit}; {versions}."])


def _decoded(kind: type[Any], table: Callable[[Any], str]) -> Callable[[Path], str]:
    return lambda path: table(msgspec.json.decode(path.read_bytes(), type=kind))


# How a file's name begins -> the tables made of the file. Others hold rows of offline workloads.
TABLES: dict[str, Callable[[Path], str]] = {
    "all_reduce": _decoded(AllReduceReport, all_reduce),
    "channels": _decoded(ChannelReport, channels),
    "kernels": _decoded(KernelReport, kernels),
    "decode_profile": _decoded(ProfileReport, decode_profile),
    "small_batch": _decoded(SmallBatchReport, small_batch),
    "online": lambda path: report.markdown(read_online(path)),
    "": lambda path: markdown(read_results(path)),
}


def section(path: Path) -> str:
    """A file's tables. Raises ValueError for a file that does not hold what its name says."""
    name = path.relative_to(ROOT)
    make = next(make for begin, make in TABLES.items() if path.name.startswith(begin))
    try:
        return f"## `{name}`\n\n{make(path).strip()}"
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} does not hold what its name says: {error}") from error


def rewritten(text: str) -> str:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    parts = [section(path) for path in sorted(RESULTS.rglob("*.json"))]
    body = "\n\n".join(parts) or "There are no results yet."
    return f"{text[:begin]}\n\n{body}\n\n{text[end:]}"


if __name__ == "__main__":
    generated_page.run(PAGE, rewritten, __doc__, "write_result_tables")
