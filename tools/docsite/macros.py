"""Macros that pages may use; each stands for text made from the repository.

    {{ source PATH NAME }}            a function, class or constant; without a name the whole file
    {{ source PATH NAME fold }}       the same, folded
    {{ at PATH NAME }}                a link to it, in a sentence
    {{ changed STAGE }}               files, lines, folded differences, what is reused unchanged
    {{ results STAGE WORKLOAD,... against=STAGE,... without=FILE,... }}
    {{ ladder WORKLOAD,... }}         one number of every stage, newest
    {{ plot gaps|throughput|tradeoff WORKLOAD }}
    {{ plot goodput }}                curves of every online rate sweep
    {{ sweep FILE OPTION METRIC,... }}
    {{ swept NAME }}                  all points of `python -m bench.sweep NAME`
    {{ number FILE STAGE WORKLOAD METRIC FORMAT option=value ... }}
    {{ ratio FILE STAGE OTHER WORKLOAD METRIC FORMAT option=value ... }}
    {{ kernels OPERATION }}           all measured shapes of a kernel
    {{ kernel_row OPERATION SHAPE }}  one of them, or of that one IMPLEMENTATION
    {{ models }}                      sizes of the models in shared/models/configs
    {{ memory }}                      weights, activations, graphs and pool of every GPU result
    {{ roofline MODEL CONTEXT }}      the floor of a decode step by batch size
    {{ small_batch }}                 linear layers of few rows
    {{ decode_profile }}              where the time of a decode step goes; or of files by name
    {{ idle FILE ROWS }}              how much of it no kernel runs, in percent
    {{ all_reduce }}                  sums over ranks
    {{ all_reduced KIB WAY TIMES }}   one of them, in us; so many, in ms
    {{ served SCENARIO,... }}         servers under load
    {{ parallel STAGE NAME,... }}     several GPUs against one, by workload or online scenario
    {{ value PATH NAME }}             a constant's value
    {{ lines PATH NAME }}             how many lines that region has
    {{ figure FILE "description" }}   an SVG of docs/images, in the colours of the page
    {{ step_ms TRACE STEP }}          how long a step of a recorded trace took
    {{ step_count TRACE }}            how many there are
    {{ wait_ms TRACE }}               the longest wait of a decoding request
    {{ traces }}                      the recorded traces of docs/trace_viewer/traces

and two kinds of fenced block, one entry per line:

    ```sourcemap                      what | PATH#NAME
    ```reading                        PATH | why to read it
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from typing import Any

from mkdocs.utils import get_relative_url

from tools.docsite import ROOT, changes, parallel, plots, results, roofline, sources, traces
from tools.docsite.sources import Region

MACRO = re.compile(r"\{\{ (\w+)( [^{}\n]*?)? \}\}")
FENCE = re.compile(r"^```(sourcemap|reading)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Colours that bench/svg.py and its users draw with -> the page's variable for them.
FIGURE_COLOURS = {
    "#ffffff": "paper", "#222222": "ink", "#8a8a8a": "faint", "#555555": "line",
}  # fmt: skip


class PageError(ValueError):
    """A macro cannot be expanded; says on which page and why."""


class Expander:
    """Expands the macros of one page."""

    def __init__(self, page_url: str) -> None:
        self.page_url = page_url
        self._macros: dict[str, Callable[..., str]] = {
            "source": self.source,
            "changed": self.changed,
            "results": self.results,
            "ladder": lambda workloads: results.ladder(workloads.split(",")),
            "sweep": lambda name, option, metrics: results.sweep(name, option, metrics.split(",")),
            "swept": results.swept,
            "number": results.number,
            "ratio": results.ratio,
            "kernels": results.kernel_rows,
            "kernel_row": results.kernel_rows,
            "lines": lambda path, name="": str(sources.region(path, name).num_lines),
            "at": self.at,
            "figure": self.figure,
            "memory": results.memory,
            "models": model_table,
            "plot": plot,
            "roofline": self.roofline,
            "step_ms": lambda name, step: (
                f"{traces.milliseconds(traces.read(name)[int(step)]):.0f}"
            ),
            "step_count": lambda name: str(len(traces.read(name))),
            "wait_ms": lambda name: f"{traces.longest_wait(traces.read(name)):.0f}",
            "traces": self.traces,
            "small_batch": results.small_batch,
            "decode_profile": results.decode_profile,
            "idle": results.idle,
            "all_reduce": results.all_reduce,
            "all_reduced": results.all_reduced,
            "parallel": lambda stage, names: parallel.tables(stage, names.split(",")),
            "served": lambda names: parallel.served(names.split(",")),
            "value": lambda path, name: sources.constant(path, name),
        }

    def expand(self, markdown: str) -> str:
        """Raises PageError for an unknown macro, or one whose source, file or row is not there."""
        markdown = FENCE.sub(self._fence, markdown)
        return MACRO.sub(self._macro, markdown)

    def _macro(self, match: re.Match[str]) -> str:
        name, arguments = match[1], shlex.split(match[2] or "")
        if name not in self._macros:
            raise PageError(f"{self.page_url}: no macro {name!r}")
        named = dict(a.split("=", 1) for a in arguments if re.match(r"\w+=", a))
        positional = [a for a in arguments if not re.match(r"\w+=", a)]
        try:
            return self._macros[name](*positional, **named)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise PageError(f"{self.page_url}: {match[0]}: {error}") from error

    def _fence(self, match: re.Match[str]) -> str:
        lines = [line for line in match[2].splitlines() if line.strip()]
        try:
            make = self.source_map if match[1] == "sourcemap" else self.reading_order
            return make([[part.strip() for part in line.split("|", 1)] for line in lines])
        except ValueError as error:
            raise PageError(f"{self.page_url}: {match[1]}: {error}") from error

    # Sources

    def url_of(self, region: Region) -> str:
        page = get_relative_url(f"source/{region.path}.html", self.page_url)
        return page if region.first == 1 else f"{page}#__codelineno-0-{region.first}"

    def link(self, region: Region, text: str) -> str:
        # Markdown reads on inside inline HTML: `__init__` would come out in bold.
        text = html.escape(text).replace("_", "&#95;")
        return f'<a href="{self.url_of(region)}">{text}</a>'

    def source(self, path: str, name: str = "", fold: str = "") -> str:
        if name == "fold":
            name, fold = "", "fold"
        region = sources.region(path, name)
        where = path if not name else f"{path}, lines {region.first} to {region.last}"
        language = "python" if path.endswith(".py") else path.rsplit(".", 1)[-1]
        code = f'``` {{ .{language} linenums="{region.first}" }}\n{region.text.rstrip()}\n```'
        if not fold:
            return f'<p class="where">{self.link(region, where)}</p>\n\n{code}\n'
        title = f"`{name or path}` ({region.num_lines} lines)"
        inner = f'<p class="where">{self.link(region, where)}</p>\n\n{code}'
        return f'??? quote "{title}"\n\n{_indented(inner)}\n'

    def at(self, path: str, name: str = "") -> str:
        return f"<code>{self.link(sources.region(path, name), name or path)}</code>"

    def source_map(self, entries: list[list[str]]) -> str:
        lines = ["| what | where | lines |", "|---|---|---:|"]
        for what, spot in entries:
            region = sources.parse_spot(spot)
            path, _, name = spot.partition("#")
            label = self.link(region, path) + (f" `{name}`" if name else "")
            lines.append(f"| {what} | {label} | {region.num_lines} |")
        return "\n".join(lines)

    def reading_order(self, entries: list[list[str]]) -> str:
        lines = ["| | file | lines | |", "|---:|---|---:|---|"]
        total = 0
        for number, (path, why) in enumerate(entries, 1):
            region = sources.region(path)
            total += region.num_lines
            link = self.link(region, path)
            lines.append(f"| {number} | {link} | {region.num_lines} | {why} |")
        lines.append(f"| | together | {total:,} | |")
        return "\n".join(lines)

    def changed(self, stage: str) -> str:
        before = changes.before(stage)
        found = changes.changes(stage)
        if before is None:
            lines = ["| file | lines | |", "|---|---:|---|"]
            for change in found:
                path = f"steps/{stage}/{change.name}"
                # Only Python files have a page of their own.
                link = self.link(sources.region(path), path) if path.endswith(".py") else path
                lines.append(f"| {link} | {change.lines} | {sources.summary(path)} |")
            lines.append(f"| together | {sum(c.lines or 0 for c in found):,} | |")
            text = "\n".join(lines)
        else:
            text = self._differences(stage, before, [c for c in found if c.added or c.removed])
            same = [c.name for c in found if not (c.added or c.removed)]
            if same:
                text += (
                    f"\n\nEqual to stage {before[:2]}: " + ", ".join(f"`{n}`" for n in same) + "."
                )
        return f"{text}\n\n{self._reused(stage)}"

    def _differences(self, stage: str, before: str, found: list[changes.FileChange]) -> str:
        lines = [
            f"| file | {before[:2]}: lines | {stage[:2]}: lines | added | removed |",
            "|---|---:|---:|---:|---:|",
        ]
        folded = []
        for change in found:
            label = f"`{change.name}`"
            if change.lines is not None:
                label = self.link(sources.region(f"steps/{stage}/{change.name}"), change.name)
            old = "new" if change.lines_before is None else str(change.lines_before)
            new = "gone" if change.lines is None else str(change.lines)
            lines.append(f"| {label} | {old} | {new} | +{change.added} | -{change.removed} |")
            title = f"`{change.name}`: +{change.added} -{change.removed}"
            folded.append(f'??? quote "{title}"\n\n' + _indented(f"``` diff\n{change.diff}\n```"))
        added, removed = sum(c.added for c in found), sum(c.removed for c in found)
        lines.append(f"| together | | | +{added} | -{removed} |")
        return "\n".join(lines) + "\n\n" + "\n\n".join(folded)

    def _reused(self, stage: str) -> str:
        files = changes.reused(stage)
        total = sum(sources.region(path).num_lines for path in files)
        lines = ["| file | lines | |", "|---|---:|---|"]
        for path in files:
            region = sources.region(path)
            link = self.link(region, path)
            lines.append(f"| {link} | {region.num_lines} | {sources.summary(path)} |")
        title = f"Reused unchanged: {len(files)} files, {total:,} lines"
        return f'??? quote "{title}"\n\n' + _indented("\n".join(lines))

    # Results and pictures

    def results(self, stage: str, workloads: str, against: str = "", without: str = "") -> str:
        return results.stage_tables(
            stage,
            [s for s in against.split(",") if s],
            workloads.split(","),
            [s for s in without.split(",") if s],
        )

    def figure(self, name: str, description: str) -> str:
        return _inline((ROOT / "docs" / "images" / name).read_text(), description)

    def roofline(self, model: str, context: str) -> str:
        svg = roofline.picture(model, context)
        description = f"Floor of a decode step of {model} by batch size"
        figure = _inline(svg, description)
        return f"{roofline.section(model, context)}\n\n{figure}"

    def traces(self) -> str:
        parts = []
        for path in sorted(traces.TRACES.glob("*.jsonl")):
            # "</" would end the script element.
            text = path.read_text().replace("</", "<\\/")
            parts.append(
                f'<a id="{path.stem}"></a>'
                f'<script type="application/jsonl" class="recorded-trace" data-name="{path.stem}">'
                f"\n{text}</script>"
            )
        if not parts:
            raise ValueError("there are no recorded traces")
        return "\n".join(parts)


def plot(kind: str, workload: str = "") -> str:
    """Every context in which at least two stages were measured; or every online rate sweep."""
    found = plots.of_goodput() if kind == "goodput" else plots.of_workload(kind, workload)
    parts = [f"{_inline(svg, caption)}\n\n<small>{caption}</small>" for caption, svg in found]
    if not parts and kind == "goodput":
        return "No online rate sweep in this repository yet."
    return "\n\n".join(parts) or f"No result compares stages on `{workload}` yet."


def model_table() -> str:
    """Numbers of the bundled configs, and the weights that follow from them."""
    lines = [
        "| | layers | hidden | heads / KV heads | head dim | intermediate | tied | parameters |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    paths = [
        *(ROOT / "shared" / "models" / "configs").glob("*.json"),
        ROOT / "shared" / "checkpoints" / "tiny" / "config.json",
    ]
    configs = [(path, json.loads(path.read_text())) for path in paths]
    for path, c in sorted(configs, key=lambda item: _num_parameters(item[1])):
        name = "bundled" if path.parent.name == "tiny" else path.stem
        lines.append(
            f"| {name} | {c['num_hidden_layers']} | {c['hidden_size']:,} | "
            f"{c['num_attention_heads']} / {c['num_key_value_heads']} | {c['head_dim']} | "
            f"{c['intermediate_size']:,} | {'yes' if c['tie_word_embeddings'] else 'no'} | "
            f"{_num_parameters(c) / 1e9:,.3f} billion |"
        )
    return "\n".join(lines)


def _num_parameters(config: dict[str, Any]) -> int:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    matrices = hidden * head_dim * (2 * heads + 2 * kv_heads)
    matrices += 3 * hidden * config["intermediate_size"]
    norms = 2 * hidden + 2 * head_dim
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return config["num_hidden_layers"] * (matrices + norms) + embeddings + hidden


def _inline(svg: str, description: str) -> str:
    """An SVG as a part of the page, in the page's colours."""
    for colour, variable in FIGURE_COLOURS.items():
        svg = svg.replace(f'"{colour}"', f'"var(--figure-{variable}, {colour})"')
    svg = svg.replace("<svg ", f'<svg aria-label="{html.escape(description)}" ', 1)
    return f'<figure class="svg">{"".join(svg.splitlines())}</figure>'


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else "" for line in text.splitlines())
