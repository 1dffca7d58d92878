"""The live page and its feed."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import itertools
import json
import random
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared import SamplingParams
from shared.engine.batch import Batch
from tests.fakes import FakeHandle, fake_engine
from tests.online_server import TIMEOUT, ServerThread, fake_server, raw_request, wait_until

online = importlib.import_module("steps.03_online.config")
live = importlib.import_module("steps.03_online.live")

PAGE = Path(live.__file__).with_name("page.html").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Viewer:
    """Reads a feed in a thread of its own until it leaves, or the feed ends."""

    def __init__(self, server: ServerThread, headers: dict[str, str] | None = None) -> None:
        self.hello: dict[str, Any] = {}
        self.updates: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
        self._connection.request("GET", "/debug/live", headers=headers or {})
        self._socket = self._connection.sock
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.headers["content-type"].startswith("text/event-stream")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: bool(self.updates), "no update")

    def _read(self) -> None:
        for line in self._response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["kind"] == "hello":
                    self.hello = event
                else:
                    self.updates.append(event)
                    self.times.append(time.monotonic())

    @property
    def bars(self) -> list[list[Any]]:
        return [bar for update in self.updates for bar in update["steps"]]

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT)
        self._connection.close()


def complete(server: ServerThread, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


def expand(runs: list[int]) -> list[int]:
    return [
        value for length, value in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)
    ]


# The page


def test_page_is_whole_and_asks_nobody_else() -> None:
    assert not re.search(r"https?:|[\"'(]//|@import|url\(|\bimport\b", PAGE)
    assert "style=" not in PAGE  # the policy forbids what the hashes do not name
    assert not re.search(r"\son[a-z]+=", PAGE)


def test_page_needs_no_key_but_its_feed_does() -> None:
    with ServerThread(api_key="sesame") as server:
        response = httpx.get(server.url)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "tiny" not in response.text
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.get(f"{server.url}/debug/live", headers=headers).status_code == 401
        assert server.api.lives[0].num_viewers == 0
        viewer = Viewer(server, {"Authorization": "Bearer sesame"})
        assert viewer.hello["model"] == "tiny"
        viewer.leave()


# The feed


@pytest.mark.parametrize("stage", ["00_baseline", "01_chunked_prefill", "05_async_scheduling"])
def test_feed_tells_what_the_engine_did(stage: str) -> None:
    config = {"engine": stage, "max_num_batched_tokens": 64, "max_num_sequences": 8}
    with ServerThread(config) as server:
        viewer = Viewer(server)
        assert viewer.hello["stage"] == stage
        assert viewer.hello["talks"] == "chat"
        assert viewer.hello["num_blocks"] == 200
        answer = complete(server, prompt_of(60), 20)
        server.wait_idle()
        wait_until(lambda: viewer.updates[-1]["stats"]["running"] == 0 and viewer.bars != [])
        numbers = [bar[0] for bar in viewer.bars]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert sum(length for bar in viewer.bars for _, length in bar[5]) == 60
        assert sum(bar[4] for bar in viewer.bars) == 19
        (number, name), *more = [
            item for update in viewer.updates for item in update["names"].items()
        ]
        assert not more
        assert name == f"{answer['id']}-0"
        assert {request for bar in viewer.bars for request, _ in bar[5]} == {int(number)}
        latency = viewer.updates[-1]["latency"]
        assert latency["ttft"][0] == pytest.approx(answer["metrics"]["ttft"] * 1e3, abs=0.01)
        assert latency["tpot"][1] == pytest.approx(answer["metrics"]["tpot"] * 1e3, abs=0.01)
        cells = expand(viewer.updates[-1]["cells"]["owners"])
        assert len(cells) == 200
        assert not any(cell > 0 for cell in cells)
        viewer.leave()


def test_no_work_without_viewers() -> None:
    with fake_server() as server:
        complete(server, prompt_of(20), 20)
        page, recorder = server.api.lives[0], server.engine_in_thread.recorder
        assert not page.is_running
        assert not recorder.is_recording
        viewers = [Viewer(server) for _ in range(3)]
        wait_until(lambda: recorder.is_recording)
        assert page.num_viewers == 3
        complete(server, prompt_of(20, 1), 20)
        wait_until(lambda: all(viewer.bars for viewer in viewers))
        for viewer in viewers:
            assert page.is_running
            viewer.leave()
        wait_until(lambda: not page.is_running and not page.num_viewers)
        wait_until(lambda: not recorder.is_recording)
        complete(server, prompt_of(20, 2), 20)
        again = Viewer(server)  # starts afresh
        assert again.bars == []
        assert again.updates[0]["latency"] == {"ttft": None, "tpot": None}
        again.leave()


def test_updates_are_few_and_bounded_however_fast_the_engine_is() -> None:
    with fake_server() as server:
        viewer = Viewer(server)
        begin = time.monotonic()
        while time.monotonic() < begin + 2:
            complete(server, prompt_of(8), 200)
        viewer.leave()
        assert 5 <= len(viewer.updates) <= 10 * (time.monotonic() - begin) + 2
        assert len(viewer.bars) > 200
        assert max(len(update["steps"]) for update in viewer.updates) <= live.MAX_STEPS


def test_a_viewer_who_does_not_read_costs_nobody_anything() -> None:
    with fake_server() as server:
        reader = Viewer(server)
        asleep = raw_request(server.port, "GET /debug/live HTTP/1.1", receive_buffer=1024)
        wait_until(lambda: server.api.lives[0].num_viewers == 2)
        for seed in range(30):
            complete(server, prompt_of(30, seed), 200)
        for viewer in server.api.lives[0]._viewers:
            assert len(viewer._unread) <= live.MAX_UNREAD
        assert sum(len(update["steps"]) for update in reader.updates) > 200
        asleep.close()
        wait_until(lambda: server.api.lives[0].num_viewers == 1)
        reader.leave()


def test_who_is_behind_misses_the_oldest() -> None:
    async def read() -> list[bytes]:
        viewer = live._Viewer()
        for number in range(100):
            viewer.put(b"%d" % number)
        viewer.end()
        return [event async for event in viewer]

    assert asyncio.run(read()) == [b"%d" % n for n in range(100 - live.MAX_UNREAD, 100)]


def test_idle_engine_sends_nothing() -> None:
    with ServerThread() as server:
        viewer = Viewer(server)
        time.sleep(0.4)
        assert len(viewer.updates) == 1
        late = Viewer(server)
        assert late.updates == viewer.updates
        viewer.leave()
        late.leave()


def test_the_feed_ends_with_the_server_and_does_not_delay_it() -> None:
    with fake_server() as server:
        viewer = Viewer(server)
        begin = time.monotonic()
        server.stop()
        server.join()
        assert time.monotonic() - begin < 10
        wait_until(lambda: viewer.has_ended)
        viewer.leave()


def test_aborted_requests_leave_the_grid() -> None:
    with ServerThread() as server:
        viewer = Viewer(server)
        body = {"prompt": prompt_of(100), "max_tokens": 2000, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as response:
            texts = response.iter_text()
            next(texts)
            wait_until(lambda: viewer.updates[-1]["running"] != [])
        server.wait_idle()
        wait_until(lambda: viewer.updates[-1]["stats"]["running"] == 0)
        last = viewer.updates[-1]
        assert last["running"] == last["waiting"] == []
        assert max(expand(last["cells"]["owners"])) <= 0
        viewer.leave()


# What is made of step records


def owners_of(scene: Any) -> np.ndarray:
    owners: np.ndarray = scene._blocks._owners
    return owners


@pytest.mark.parametrize("stage", ["00_baseline", "01_chunked_prefill", "05_async_scheduling"])
@pytest.mark.parametrize("caching", [False, True])
def test_grid_is_the_block_tables(stage: str, caching: bool) -> None:
    """With shared prefixes, several completions and preemptions, after every look."""
    draw = random.Random(0)
    engine = fake_engine(stage, num_blocks=40, enable_prefix_caching=caching)
    for number in range(3):  # before anybody looks
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request(f"before{number}", prompt_of(40, number % 2), params)
        engine.step()
    engine.listen(True)
    scene = live.Scene(40, caching)
    num_cached = num_preempted = num_shared = 0
    for number in range(60):
        length = draw.randint(1, 40)
        params = SamplingParams(max_tokens=draw.randint(1, 30), n=draw.choice((1, 1, 3)))
        engine.add_request(f"r{number}", prompt_of(40, draw.randrange(3))[:length], params)
        for _ in range(draw.randint(1, 8)):
            if engine.has_unfinished_requests():
                engine.step()
        records = engine.take_step_records()
        num_preempted += sum(len(record.preemptions) for record in records)
        scene.take(records)
        holders: dict[int, set[str]] = {}
        for sequence in engine.queues.running:
            for block in engine.table.blocks_of(sequence.slot):
                holders.setdefault(block, set()).add(sequence.request_id)
        num_shared += sum(len(requests) > 1 for requests in holders.values())
        names = {n: name for name, n in scene._numbers.items()}
        owners = owners_of(scene)
        for block in range(40):
            if block in holders:
                assert names[int(owners[block])] in holders[block]
            else:
                assert owners[block] <= 0
        num_cached += int((owners == live.CACHED).sum())
        assert scene._blocks.num_held == len(holders)
        update = scene.update(engine.stats())
        assert update.unplaced == 0
        assert expand(update.cells.owners) == owners.tolist()
    assert num_preempted
    assert (num_cached > 0) == (num_shared > 0) == caching


def test_missed_records_do_no_lasting_harm() -> None:
    draw = random.Random(1)
    engine = fake_engine("01_chunked_prefill", num_blocks=40)
    engine.listen(True)
    scene = live.Scene(40, True)
    for number in range(80):
        params = SamplingParams(max_tokens=draw.randint(1, 20))
        engine.add_request(f"r{number}", prompt_of(draw.randint(1, 40), number % 4), params)
        for _ in range(draw.randint(1, 6)):
            if engine.has_unfinished_requests():
                engine.step()
        records = [record for record in engine.take_step_records() if draw.random() < 0.6]
        if records:
            scene.take(records)
    while engine.has_unfinished_requests():
        engine.step()
    scene.take(engine.take_step_records())
    assert scene._blocks.num_held == 0
    assert owners_of(scene).max() <= 0
    assert scene._numbers == {}


class Device:
    """Takes 10 ms for a step and 2 ms more for each prompt token, by a clock that only it moves."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self._end = time.perf_counter()
        self._submit = engine.runner.submit
        engine.runner.submit = self.submit
        monkeypatch.setattr("shared.engine.trace.time", self)

    def perf_counter(self) -> float:
        return self.now

    def submit(self, batch: Batch) -> FakeHandle:
        handle: FakeHandle = self._submit(batch)
        read = handle.result
        num_prompt_tokens = batch.num_tokens - int(batch.decoding.sum())
        end = self._end = max(self.now, self._end) + 0.01 + 0.002 * num_prompt_tokens

        def result() -> Any:
            self.now = max(self.now, end)
            return read()

        handle.result = result  # type: ignore[method-assign]
        return handle


@pytest.mark.parametrize("stage", ["01_chunked_prefill", "05_async_scheduling"])
def test_steps_that_follow_each_other_do_so_on_the_page(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were submitted while the one before them was in flight."""
    engine = fake_engine(stage)
    device = Device(engine, monkeypatch)
    scene = live.Scene(100, True)
    engine.listen(True)

    def work(request_id: str, length: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add_request(request_id, prompt_of(length, seed=length), params)

    work("a", 4)
    engine.step()
    engine.step()
    work("b", 60)
    while engine.has_unfinished_requests():
        engine.step()
    device.now += 0.5
    work("c", 4)
    while engine.has_unfinished_requests():
        engine.step()
    scene.take(engine.take_step_records())
    bars = scene.update(engine.stats()).steps
    pauses = [
        after.time - before.time - before.milliseconds / 1e3
        for before, after in itertools.pairwise(bars)
    ]
    assert [pause for pause in pauses if abs(pause) > 1e-4] == pytest.approx([0.5])
    assert max(bar.milliseconds for bar in bars) == pytest.approx(130)


def test_big_pools_show_several_blocks_in_a_cell() -> None:
    num_blocks = 2 * live.MAX_CELLS + 1
    assert live.blocks_per_cell(live.MAX_CELLS) == 1
    assert live.blocks_per_cell(num_blocks) == 3
    grid = live.BlockMap(num_blocks, True)
    for block, name, request in ((0, "a", 9), (1, "b", 4), (2, "b", 4), (4, "a", 9), (7, "c", 5)):
        grid.take(block, name, request, False)
    cells = grid.cells()
    num_cells = -(-num_blocks // 3)
    assert expand(cells.owners) == [4, 9, 5] + [live.FREE] * (num_cells - 3)
    assert expand(cells.used) == [3, 1, 1] + [0] * (num_cells - 3)
    grid.release("a")
    grid.release("c")
    cells = grid.cells()
    assert expand(cells.owners)[:3] == [4, live.FREE, live.FREE]
    assert expand(cells.used)[:3] == [2, 0, 0]
    assert expand(cells.cached)[:3] == [1, 0, 0]  # all but a sequence's last
    draw = np.random.default_rng(0)
    grid = live.BlockMap(100_001, True)
    grid._owners[:] = draw.integers(-1, 4, 100_001)
    for cell, owner in enumerate(expand(grid.cells().owners)):
        held = grid._owners[cell * 51 : cell * 51 + 51]
        counts = np.bincount(held[held > 0])
        assert counts[owner] == counts.max()


# In a browser


@pytest.mark.slow
def test_in_a_browser() -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs a chromium")
    config = {"max_num_batched_tokens": 64, "max_num_sequences": 8}
    with ServerThread(config, api_key="sesame") as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            complaints: list[str] = []
            foreign: list[str] = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda message: complaints.append(message.text))

            def pass_on(route: Any) -> None:
                if route.request.url.startswith(server.url):
                    route.continue_()
                else:
                    foreign.append(route.request.url)
                    route.abort()

            page.route("**/*", pass_on)
            page.goto(server.url)
            page.wait_for_selector("#key-form:not([hidden])")
            assert all("401" in text for text in complaints)  # the browser's own note of it
            complaints.clear()
            page.fill("#key", "sesame")
            page.press("#key", "Enter")
            title = f"document.title === '{online.DEFAULT_ENGINE}, live'"
            wait_until(lambda: page.evaluate(title))
            before = _colours(page, "#blocks")
            page.fill("#max-tokens", "60")
            page.fill("#prompt", "Who's there?\nStand, and unfold yourself. " * 3)
            page.press("#prompt", "Enter")
            page.wait_for_selector(".message.assistant .text:not(:empty)")
            page.wait_for_selector(".swatch:not([hidden])", timeout=10_000)
            _load(server)
            wait_until(lambda: "TPOT" in page.inner_text(".message.assistant .meta"))
            wait_until(lambda: "steps of decodes alone" in page.inner_text("#step-summary"))
            wait_until(lambda: "ms" in page.inner_text("#n-ttft"))
            assert len(page.inner_text(".message.assistant .text")) > 20
            assert _colours(page, "#steps") > 3
            assert _colours(page, "#blocks") > before
            page.click("#hold")
            page.hover("#blocks", position={"x": 5, "y": 5})
            assert page.inner_text("#tip").startswith("Block 0: ")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.set_viewport_size({"width": 380, "height": 800})
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert complaints == []
            assert foreign == []
            page.close()
            wait_until(lambda: not server.api.lives[0].is_running)
        finally:
            browser.close()


def _load(server: ServerThread) -> None:
    """A few requests at once."""

    def one(seed: int) -> None:
        body = {"prompt": prompt_of(20 * seed, seed), "max_tokens": 10, "ignore_eos": True}
        headers = {"Authorization": "Bearer sesame"}
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=TIMEOUT).status_code == 200

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)


def _colours(page: Any, canvas: str) -> int:
    """How many different ones a canvas shows."""
    count: int = page.eval_on_selector(
        canvas,
        """canvas => {
            const {width, height} = canvas;
            const copy = new OffscreenCanvas(width, height);
            const context = copy.getContext("2d", {willReadFrequently: true});
            context.drawImage(canvas, 0, 0);
            const data = context.getImageData(0, 0, width, height).data;
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
    )
    return count
