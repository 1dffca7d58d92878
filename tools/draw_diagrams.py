"""Draw the two diagrams of the docs that do not come from a run.

python -m tools.draw_diagrams docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.svg import DEVICE, FAINT, HOST, STORE, Picture


def request_life() -> str:
    """From a prompt to its text."""
    p = Picture()
    p.box(20, 40, 110, 54, ["prompt", "text or token ids"], STORE)
    p.box(170, 40, 120, 54, ["Tokenizer", "chat template, BPE"], HOST)
    p.box(330, 40, 130, 54, ["check_request", "refuse what can", "never run"], HOST)
    p.box(500, 40, 110, 54, ["waiting", "tokens only"], STORE)
    p.box(720, 34, 150, 66, ["running", "slot + blocks,", "one token a step"], STORE)
    for x1, x2 in ((130, 170), (290, 330), (460, 500)):
        p.arrow([(x1, 67), (x2, 67)])
    p.arrow([(610, 58), (720, 58)])
    p.text(665, 51, "admit", size=11)
    p.arrow([(720, 80), (610, 80)], dashed=True)
    p.text(665, 94, "preempt", size=11)

    p.box(700, 160, 190, 54, ["Engine.step", "schedule, build, submit,", "result, commit"], DEVICE)
    p.arrow([(770, 100), (770, 160)])
    p.arrow([(820, 160), (820, 100)])
    p.text(832, 134, "next token", anchor="start", size=11)
    p.box(440, 160, 190, 54, ["OutputProcessor", "whole characters only,", "stop strings"], HOST)
    p.arrow([(700, 187), (630, 187)])
    p.text(665, 181, "ids", size=11)
    p.box(250, 160, 130, 54, ["text", "and finish reason"], STORE)
    p.arrow([(440, 187), (380, 187)])
    p.arrow([(630, 204), (700, 204)], dashed=True)
    p.text(665, 226, "stop string: abort", size=11)

    lines = ["free list", "full blocks stay findable", "until they are reused"]
    p.box(700, 262, 190, 54, lines, STORE)
    p.arrow([(795, 214), (795, 262)])
    p.text(805, 242, "finished", anchor="start", size=11)
    p.arrow([(890, 289), (912, 289), (912, 67), (870, 67)], dashed=True)
    p.text(920, 176, "prefix hit of", anchor="start", size=11)
    p.text(920, 190, "a later request", anchor="start", size=11)
    return p.svg(1010, 336, "The life of a request")


def step() -> str:
    """One step, on the host and on the device."""
    p = Picture()
    p.text(20, 66, "host", anchor="start", size=13, bold=True)
    p.text(20, 176, "device", anchor="start", size=13, bold=True)
    p.box(80, 36, 130, 56, ["schedule", "who computes how", "many tokens"], HOST)
    p.box(250, 36, 130, 56, ["build", "arrays by fancy", "indexing"], HOST)
    p.box(420, 36, 130, 56, ["submit", "pack one block,", "enqueue all work"], HOST)
    p.box(650, 36, 110, 56, ["result", "wait for the ids"], HOST)
    p.box(800, 36, 140, 56, ["commit", "values, prefix blocks,", "finishes"], HOST)
    for x1, x2 in ((210, 250), (380, 420), (550, 650), (760, 800)):
        p.arrow([(x1, 64), (x2, 64)])
    p.box(420, 146, 90, 56, ["inputs", "one copy"], DEVICE)
    p.box(530, 146, 110, 56, ["trunk", "all T tokens", "-> hidden states"], DEVICE)
    p.box(660, 146, 130, 56, ["head", "K rows -> logits", "-> sampled ids"], DEVICE)
    p.arrow([(465, 92), (465, 146)])
    p.arrow([(510, 174), (530, 174)])
    p.arrow([(640, 174), (660, 174)])
    p.arrow([(705, 146), (705, 92)])
    p.text(713, 124, "ids", anchor="start", size=11)
    p.box(660, 236, 130, 44, ["sampled[slot]", "stays on the device"], STORE)
    p.arrow([(725, 202), (725, 236)])
    p.arrow([(660, 258), (585, 258), (585, 202)], dashed=True)
    p.text(575, 262, "input ids of the next decode", anchor="end", size=11)
    p.text(80, 120, "counts only: no token values are needed here", anchor="start", fill=FAINT)
    return p.svg(960, 296, "One step of the engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in (("request_life", request_life()), ("step", step())):
        (directory / f"{name}.svg").write_text(picture)
        print(directory / f"{name}.svg")


if __name__ == "__main__":
    main()
