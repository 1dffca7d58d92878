"""Print what your scheduler does when a long prompt arrives: python -m
exercises.starter_scheduler.watch"""

from __future__ import annotations

import logging

from exercises.starter_scheduler.engine import make_engine
from shared import SamplingParams
from tests.fakes import Step, watch

ARRIVALS = {0: [("a", 6, 24), ("b", 10, 24)], 4: [("long", 60, 4)], 9: [("c", 5, 8)]}


def line(number: int, step: Step) -> str:
    chunks = ", ".join(f"{name} {start}..{start + n}" for name, start, n in step.chunks)
    text = f"step {number:3}  decodes: {' '.join(step.decodes) or '-':12}  prompts: {chunks or '-'}"
    return text + (f"  preempted: {' '.join(step.preempted)}" if step.preempted else "")


def main() -> None:
    logging.disable()
    engine = make_engine(budget=16, num_blocks=40)
    taken = watch(engine)
    step = 0
    while engine.has_unfinished_requests() or step <= max(ARRIVALS):
        for name, prompt, output in ARRIVALS.get(step, []):
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            engine.add_request(name, [ord(name[0]) % 50] * prompt, params)
        engine.step()
        print(line(step, taken[-1]))
        step += 1


if __name__ == "__main__":
    main()
