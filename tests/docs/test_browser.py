"""Diagrams and the trace viewer in headless Chromium, straight from disk, without a network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steps

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """Its path; skips if there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium) or set CHROMIUM")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api",
        reason="playwright is not installed: pip install -e '.[dev]' -c constraints.txt",
    )
    executable = chromium()
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=executable,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield opened
        opened.close()


@pytest.fixture(params=["light", "dark"])
def tab(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab in which any request to a network, and any error on the console, fails the test."""
    context = browser.new_context(color_scheme=request.param, offline=True)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda r: (
            problems.append(r.url)
            if not r.url.startswith(("file:", "data:", "blob:", "about:"))
            else None
        ),
    )
    page.scheme = request.param
    yield page
    context.close()
    assert not problems, problems


def wait_for_diagrams(tab: Any) -> list[dict[str, Any]]:
    tab.wait_for_function(
        "[...document.querySelectorAll('div.diagram')].every(d => d.dataset.state !== 'waiting')",
        timeout=60_000,
    )
    found: list[dict[str, Any]] = tab.evaluate(
        """() => [...document.querySelectorAll('div.diagram')].map(d => {
             const svg = d.querySelector('svg');
             return {state: d.dataset.state, text: d.textContent.slice(0, 200),
                     shapes: svg ? svg.querySelectorAll('path, rect, line').length : 0,
                     width: svg ? svg.getBoundingClientRect().width : 0};
           })"""
    )
    return found


def test_every_diagram_is_drawn(site: Path, tab: Any) -> None:
    total = 0
    for path in sorted(site.rglob("*.html")):
        count = path.read_text().count('<pre class="diagram">')
        if not count:
            continue
        tab.goto(path.as_uri())
        drawn = wait_for_diagrams(tab)
        assert len(drawn) == count, path
        for diagram in drawn:
            assert diagram["state"] == "drawn", f"{path}: {diagram['text']}"
            assert diagram["shapes"] > 3, path
            assert diagram["width"] > 100, path
        total += count
    assert total >= 20


def test_diagrams_follow_the_palette(site: Path, tab: Any) -> None:
    tab.goto((site / "stages" / "00_baseline.html").as_uri())
    wait_for_diagrams(tab)
    fill = "() => getComputedStyle(document.querySelector('div.diagram .node rect')).fill"
    before = tab.evaluate(fill)
    tab.evaluate(
        "(s) => document.body.setAttribute('data-md-color-scheme', s)",
        "default" if tab.scheme == "dark" else "slate",
    )
    tab.wait_for_function(f"(old) => ({fill})() !== old", arg=before, timeout=30_000)
    accents = tab.evaluate("() => document.querySelectorAll('div.diagram .node.new').length")
    assert accents > 0


def shown(tab: Any) -> dict[str, str]:
    return {
        "step": tab.get_attribute("#trace-steps", "data-step"),
        "facts": tab.text_content(".tv-facts"),
        "pool": tab.text_content(".tv-pool"),
    }


def test_the_trace_viewer_steps(site: Path, tab: Any) -> None:
    tab.goto((site / "trace_viewer" / "index.html").as_uri())
    recorded = tab.evaluate(
        "() => [...document.querySelectorAll('script.recorded-trace')].map(s => s.dataset.name)"
    )
    assert {name.split("__")[0] for name in recorded} == set(steps.engines())
    for name in recorded:
        tab.select_option(".tv-choice", name)
        text = tab.evaluate(
            "(n) => document.querySelector(`script[data-name='${n}']`).textContent", name
        )
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        pool = max(record["free_blocks"] for record in records)
        for index, record in enumerate(records):
            now = shown(tab)
            assert now["step"] == str(index)
            assert f"{len(record['decodes'])} decodes" in now["facts"]
            in_use = pool - record["free_blocks"]
            assert now["pool"].startswith(f"{in_use} of {pool} blocks in use"), (name, index)
            rows = tab.locator(".tv-batch .tv-row").count()
            assert rows == len(record["decodes"]) + len(record["prefills"])
            tab.click(".tv-next")
        assert shown(tab)["step"] == str(len(records) - 1), "it stays at the last step"
        tab.click(".tv-back")
        tab.keyboard.press("ArrowLeft")
        assert shown(tab)["step"] == str(len(records) - 3)
        tab.click(".tv-first")
        assert shown(tab)["step"] == "0"


def test_the_trace_viewer_opens_a_file(site: Path, tab: Any, tmp_path: Path) -> None:
    tab.goto((site / "trace_viewer" / "index.html").as_uri())
    recorded = tab.evaluate("() => document.querySelector('script.recorded-trace').textContent")
    mine = tmp_path / "mine.trace.jsonl"
    mine.write_text("\n".join(recorded.strip().splitlines()[:3]) + "\n")
    tab.set_input_files(".tv-open input", str(mine))
    tab.wait_for_function("document.querySelector('.tv-slider').max === '2'")
    other = tmp_path / "other.jsonl"
    other.write_text('{"version": 99}\n')
    tab.set_input_files(".tv-open input", str(other))
    tab.wait_for_selector(".tv-error:not([hidden])")
    assert "version 1" in tab.text_content(".tv-error")
    assert tab.get_attribute(".tv-slider", "max") == "2", "what was shown stays"


def test_a_link_opens_a_trace(site: Path, tab: Any) -> None:
    name = "01_chunked_prefill__prefixes"
    tab.goto((site / "trace_viewer" / "index.html").as_uri() + f"#{name}")
    assert tab.input_value(".tv-choice") == name


def test_search_works_from_disk(site: Path, tab: Any) -> None:
    tab.set_viewport_size({"width": 1360, "height": 800})
    tab.goto((site / "index.html").as_uri())
    tab.click(".md-search__input")
    tab.keyboard.type("preemption")
    tab.wait_for_selector(".md-search-result__item", state="attached", timeout=30_000)
