"""What MkDocs calls while it builds the site: see `hooks` in mkdocs.yml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# MkDocs runs this file by its path, from wherever it was started.
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

from tools.docsite import results, sources, traces
from tools.docsite.macros import Expander, PageError

SOURCE = "source/"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for every source file, so that links to lines work without a network."""
    sources.read.cache_clear()  # `mkdocs serve` builds again and again
    sources._names.cache_clear()
    results.rows_of.cache_clear()
    traces.read.cache_clear()
    paths = sources.python_files()
    for path in paths:
        files.append(File.generated(config, f"{SOURCE}{path}.md", content=source_page(path)))
    files.append(File.generated(config, f"{SOURCE}index.md", content=source_index(paths)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith(SOURCE):
        return markdown
    try:
        return Expander(page.url).expand(markdown)
    except PageError as error:
        raise PluginError(str(error)) from error


# The theme's `offline` plugin names a script on a content network; a copy lies in assets.
ELSEWHERE, WORKER = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(ELSEWHERE, get_relative_url(WORKER, page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    return output_content.replace(ELSEWHERE, f"/{WORKER}")  # 404.html is shown at any address


def source_page(path: str) -> str:
    text = sources.read(path).rstrip()
    up = "../" * path.count("/")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if not text:
        return f"{head}[All files]({up}index.md). This file is empty.\n"
    number = len(text.splitlines())
    return (
        f"{head}{number} lines. [All files]({up}index.md)\n\n"
        f'~~~~ {{ .python linenums="1" }}\n{text}\n~~~~\n'
    )


def source_index(paths: list[str]) -> str:
    lines = [
        "# Source",
        "",
        "Every Python file of the packages, as it was when this site was built.",
        "",
        "| file | lines | |",
        "|---|---:|---|",
    ]
    for path in paths:
        count = len(sources.read(path).splitlines())
        lines.append(f"| [{path}]({path}.md) | {count} | {sources.summary(path)} |")
    return "\n".join(lines) + "\n"
