"""Run a small scripted scenario on one stage and keep its step trace, for the pictures of the docs.

    python -m tools.record_trace 00_baseline long_prompt out/00.trace.jsonl

Prompts are random ids, seeded; which step does what is the same on every machine, only the
milliseconds differ. `--set name=value` changes an engine option, for stages that have more of them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shared import SamplingParams
from shared.cli import one_line
from steps import engines, load


@dataclass(frozen=True)
class Arrival:
    step: int  # added before this step
    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[int, int] | None = None
    """(seed, tokens): arrivals of equal seed begin with the same tokens."""

    def prompt(self, random: Random) -> list[int]:
        begin: list[int] = []
        if self.prefix is not None:
            seed, length = self.prefix
            shared = Random(seed)
            begin = [shared.randrange(3, 4096) for _ in range(length)]
        rest = self.num_prompt_tokens - len(begin)
        return begin + [random.randrange(3, 4096) for _ in range(rest)]


@dataclass(frozen=True)
class Scenario:
    config: dict[str, Any]
    arrivals: list[Arrival]


SCENARIOS = {
    # Three short requests are decoding; one long prompt arrives, later two more at once.
    "long_prompt": Scenario(
        # 256 blocks are enough for all of them; the default pool would make a picture of it empty.
        {"max_num_batched_tokens": 1024, "num_kvcache_blocks": 256},
        [
            Arrival(0, "a", 24, 34),
            Arrival(0, "b", 40, 34),
            Arrival(5, "c", 16, 29),
            Arrival(12, "long 1", 900, 6),
            Arrival(24, "long 2", 900, 6),
            Arrival(24, "long 3", 900, 6),
        ],
    ),
    # Three sequences that grow until the pool has no block left.
    "small_pool": Scenario(
        {"num_kvcache_blocks": 11, "kvcache_block_size": 16},
        [Arrival(0, "a", 40, 30), Arrival(0, "b", 40, 30), Arrival(0, "c", 40, 30)],
    ),
    # Two prefixes of three blocks, asked for in turn, in a pool that cannot keep both and what
    # follows them: hits, evictions and a preemption.
    "prefixes": Scenario(
        {"num_kvcache_blocks": 20, "kvcache_block_size": 16, "max_num_batched_tokens": 256},
        [
            Arrival(0, "a1", 60, 12, prefix=(1, 48)),
            Arrival(3, "b1", 60, 12, prefix=(2, 48)),
            Arrival(6, "a2", 66, 20, prefix=(1, 48)),
            Arrival(9, "b2", 58, 30, prefix=(2, 48)),
            Arrival(12, "other", 150, 8),
            Arrival(26, "a3", 60, 8, prefix=(1, 48)),
            Arrival(40, "b3", 60, 8, prefix=(2, 48)),
        ],
    ),
}


def record(stage: str, scenario: Scenario, output: Path, changes: dict[str, Any]) -> int:
    """Returns the number of steps. Raises what the engine raises."""
    output.parent.mkdir(parents=True, exist_ok=True)
    module = load(stage)
    random = Random(0)

    engine = module.Engine(module.Config(**{**scenario.config, **changes}))
    try:
        # Unmeasured: the first steps of a process set up threads and buffers.
        engine.add_request("warm-up", [1] * 64, SamplingParams(max_tokens=8, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        engine.close()

    engine = module.Engine(module.Config(**{**scenario.config, **changes}, trace=str(output)))
    step = 0
    waiting = sorted(scenario.arrivals, key=lambda arrival: arrival.step)
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0].step <= step:
                arrival = waiting.pop(0)
                prompt = arrival.prompt(random)
                params = SamplingParams(
                    temperature=0, max_tokens=arrival.num_output_tokens, ignore_eos=True
                )
                engine.add_request(arrival.name, prompt, params)
            engine.step()
            step += 1
    finally:
        engine.close()
    return step


def _setting(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.record_trace", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("stage", choices=engines())
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("output", type=Path)
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    try:
        steps = record(
            options.stage, SCENARIOS[options.scenario], options.output, dict(options.set)
        )
    except ValueError as error:
        parser.error(one_line(error))
    print(f"{options.output}: {steps} steps")


if __name__ == "__main__":
    main()
