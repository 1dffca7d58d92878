"""Complete prompts: `python -m steps.05_async_scheduling.generate --prompt "Once upon a time"`."""

from __future__ import annotations

from pathlib import Path

from shared.cli import generate_main

if __name__ == "__main__":
    generate_main(Path(__file__).parent.name)
