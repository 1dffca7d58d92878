"""Write docs/results.md from the JSON files under bench/results.

python -m tools.write_result_tables            # rewrites the part between the markers
python -m tools.write_result_tables --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.kernels import KernelReport
from bench.online import report
from bench.online.row import read_online
from bench.result import read_results
from bench.tables import markdown
from tools import generated_page

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


def section(path: Path) -> str:
    """A file's tables. Raises ValueError for a file that holds no kind of result."""
    name = path.relative_to(ROOT)
    if path.name.startswith("kernels"):
        try:
            tables = kernels(msgspec.json.decode(path.read_bytes(), type=KernelReport))
        except msgspec.DecodeError as error:
            raise ValueError(f"{name} holds no kernel measurements: {error}") from error
    elif path.name.startswith("online"):
        tables = report.markdown(read_online(path)).strip()
    else:
        tables = markdown(read_results(path)).strip()
    return f"## `{name}`\n\n{tables}"


def rewritten(text: str) -> str:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    parts = [section(path) for path in sorted(RESULTS.rglob("*.json"))]
    body = "\n\n".join(parts) or "There are no results yet."
    return f"{text[:begin]}\n\n{body}\n\n{text[end:]}"


if __name__ == "__main__":
    generated_page.run(PAGE, rewritten, __doc__, "write_result_tables")
