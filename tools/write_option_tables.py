"""Write the tables of options in docs/using.md from the classes that define them.

python -m tools.write_option_tables            # rewrites the parts between the markers
python -m tools.write_option_tables --check    # exit status 1 if they are out of date
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic

from shared import EngineConfig, SamplingParams
from steps import engines, load, names
from tools import generated_page

PAGE = Path(__file__).parent.parent / "docs" / "using.md"
SHORT_FLAGS = {"max_model_length": "--max-model-len", "max_num_sequences": "--max-num-seqs"}
# On the command line the engine's seed has the name, because it seeds the requests as well.
RENAMED_FLAGS = {"seed": "--request-seed"}


def spelled(kind: Any) -> str:
    """A type as a reader writes it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spelled(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {spelled(parts[0])}"
    if origin is dict:
        return f"{spelled(parts[0])} to {spelled(parts[1])}"
    if parts:  # a union
        return " or ".join(spelled(part) for part in parts)
    return {type(None): "None", str: "text", int: "int", float: "float", bool: "bool"}[kind]


def table(model: type[pydantic.BaseModel], skip: set[str], flags: dict[str, str]) -> str:
    lines = ["| field | flag | type | default | meaning |", "|---|---|---|---|---|"]
    for name, info in model.model_fields.items():
        if name in skip:
            continue
        flag = flags.get(name, f"--{name.replace('_', '-')}")
        if info.annotation is bool:
            flag += f"`, `--no-{name.replace('_', '-')}"
        meaning = " ".join((info.description or "").split()).replace("|", "\\|")
        default = info.get_default()
        shown = "none" if default == () else f"`{default}`"
        lines.append(f"| `{name}` | `{flag}` | {spelled(info.annotation)} | {shown} | {meaning} |")
    return "\n".join(lines)


def sections() -> Iterator[tuple[str, str]]:
    """(name of the marker, text between its two ends)."""
    yield "engine", table(EngineConfig, set(), SHORT_FLAGS)
    yield "sampling", table(SamplingParams, set(), RENAMED_FLAGS)
    parts = []
    of_engines = {name for stage in engines() for name in load(stage).Config.model_fields}
    for stage in names():
        config = load(stage).Config
        # A stage that wraps an engine has the options of all of them besides its own.
        known = set(EngineConfig.model_fields) if stage in engines() else of_engines
        if config.model_fields.keys() - known:
            title = f"`{stage}`" if stage in engines() else f"`{stage}`, besides its engine's"
            parts.append(f"{title}:\n\n{table(config, known, {})}")
    yield "stages", "\n\n".join(parts) or "No stage adds options yet."


def rewritten(text: str) -> str:
    """The page with fresh tables. Raises ValueError for a missing marker."""
    for name, content in sections():
        begin, end = f"<!-- {name} options: generated -->", f"<!-- end of {name} options -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE} has no markers for the {name} options")
        block = f"{begin}\n\n{content}\n\n{end}"
        text = pattern.sub(block.replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    generated_page.run(PAGE, rewritten, __doc__, "write_option_tables")
