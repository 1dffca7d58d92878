"""Serve OpenAI's API: python -m steps.04_dp_tp.serve --data-parallel-size 2"""

from __future__ import annotations

from pathlib import Path

from .online import online

if __name__ == "__main__":
    online("serve").main(Path(__file__).parent.name)
