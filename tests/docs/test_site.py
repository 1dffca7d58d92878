"""The site as it was built: links, anchors, tables, and nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import steps
from tests.docs.conftest import ROOT

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Links, ids and resources of one page, and the rows of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.resources: list[str] = []
        self.rows: list[list[str]] = []
        self._cell: list[str] | None = None
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.resources.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.resources.append(found["href"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self._cell = []

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append("".join(self._cell).strip())
            self._cell = None


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute: it is shown at any address
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                known = pages[target].ids
                # Line anchors of a code block are on its links.
                if unquote(parts.fragment) not in known:
                    broken.append(f"{path.relative_to(site)}: {link} (no such anchor)")
    assert not broken, "\n".join(broken[:20])


def test_no_page_takes_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    foreign = {
        f"{path.relative_to(site)}: {resource}"
        for path, page in pages.items()
        for resource in page.resources
        if urlsplit(resource).netloc
    }
    assert not foreign
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:", style.read_text()), style


def test_no_macro_is_left_over(site: Path) -> None:
    for path in site.rglob("*.html"):
        if "source" not in path.relative_to(site).parts:
            assert not re.search(r"\{\{ [a-z_]+ ", path.read_text()), path


@pytest.mark.parametrize("stage", steps.names())
def test_stage_pages_have_one_form(stage: str) -> None:
    text = (ROOT / "docs" / "stages" / f"{stage}.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        *("Pain", "Idea", "What changed", "The code", "Invariants", "Run it", "Measured"),
        *("Where it loses", "Exercises", "Next pain"),
    ]
    assert "flowchart" in text
    assert re.search("sequenceDiagram|stateDiagram", text)


def test_tables_equal_the_json_they_cite(pages: dict[Path, Page]) -> None:
    """Every cell of a table of results is in the JSON, and every row of the file in a table."""
    from bench.result import read_results
    from tools.docsite import results

    rows = {
        (row.stage, cell)
        for file in results.files()
        if results.rows_of(file)  # other kinds of results have tables of their own
        for row in read_results(results.RESULTS / file)
        for name, value in row.medians.items()
        for cell in _spellings(name, value, row.spread[name])
    }
    checked = 0
    for path, page in pages.items():
        if "stages" not in path.parts and path.name != "index.html":
            continue
        header: list[str] = []
        for cells in page.rows:
            if cells and cells[0] == "stage":
                header = cells
            elif header and "settings" in header and len(cells) == len(header):
                for name, cell in zip(header, cells, strict=True):
                    if name.endswith((" ms", "tokens/s", "prefix hits")) and cell != "-":
                        assert (cells[0], cell) in rows, f"{path}: {cells[0]} {name} {cell}"
                        checked += 1
            else:
                header = header if len(cells) == len(header) else []
    assert checked > 20


def _spellings(name: str, value: float, spread: tuple[float, float]) -> list[str]:
    texts = []
    for form in (",.0f", ",.1f", ",.2f"):
        text, low, high = format(value, form), format(spread[0], form), format(spread[1], form)
        texts.append(text if low == high else f"{text} ({low}-{high})")
    return texts


@pytest.mark.parametrize("tool", ["write_option_tables", "write_result_tables", "draw_timelines"])
def test_generated_files_are_up_to_date(tool: str) -> None:
    command = [sys.executable, "-m", f"tools.{tool}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_source_pages_show_the_source(site: Path) -> None:
    for path in ("steps/00_baseline/scheduler.py", "shared/engine/block_manager.py"):
        page = (site / "source" / f"{path}.html").read_text()
        text = re.sub(r"<[^>]+>", "", page)
        for line in (ROOT / path).read_text().splitlines()[:40]:
            plain = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            assert plain.strip() in text.replace("&quot;", '"').replace("&#39;", "'"), line
