"""Measure this stage: python -m steps.05_async_scheduling.bench --workload nano --json out.json"""

from __future__ import annotations

from pathlib import Path

from bench.cli import main

if __name__ == "__main__":
    main(Path(__file__).parent.name)
