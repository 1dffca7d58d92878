"""A progress bar for long offline work."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Self

from shared.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Drawn by hand between steps, a few times a second: what it shows is only counted then."""

    DELAY = 1.0  # seconds; short work shows no bar
    INTERVAL = 0.25

    def __init__(self, outputs: list[RequestOutput], enabled: bool) -> None:
        self._outputs = outputs
        self._started = time.perf_counter()
        # None: the caller has closed it.
        shown = enabled and sys.stderr is not None and sys.stderr.isatty()
        self._next_draw = self._started + self.DELAY if shown else math.inf
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, now: float) -> None:
        if now >= self._next_draw:
            self._next_draw = now + self.INTERVAL
            self._draw(now - self._started)

    def _draw(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = self._make_bar()
            self._bar.start()
        started = [o for o in self._outputs if o.metrics.first_token_time is not None]
        num_input = sum(len(output.prompt_token_ids) for output in started)
        num_output = sum(len(c.token_ids) for output in started for c in output.outputs)
        self._bar.update(
            self._bar.task_ids[0],
            completed=sum(o.metrics.finished_time is not None for o in self._outputs),
            rates=f"in {num_input / seconds:,.0f}, out {num_output / seconds:,.0f} tokens/s",
        )
        self._bar.refresh()

    def _make_bar(self) -> Progress:
        from rich.console import Console  # here: most runs never draw
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        bar.add_task("", total=len(self._outputs), rates="")
        return bar
