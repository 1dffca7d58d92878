"""The scheduler of stage 02, one step ahead: what the step in flight samples is not known yet, only
that it samples it."""

from __future__ import annotations

from shared.engine.batch import Schedule
from shared.engine.sequence import Sequence
from steps import load

BatchReorderScheduler = load("02_batch_reorder").Scheduler


class ResultsNeeded(Exception):
    """The next step depends on the results of the one in flight."""


class Scheduler(BatchReorderScheduler):  # type: ignore[misc, valid-type]
    """Budget, chunks, order, admission and preemption are those of stage 02."""

    # Sequences whose prompts the step in flight computes; None: nothing is in flight.
    _in_flight: list[Sequence] | None = None

    def schedule_ahead(self, in_flight: list[Sequence] | None) -> Schedule:
        """The step after one that computes these prompts, and whatever else. Empty when all that is
        unfinished waits for its last results. Raises ResultsNeeded if somebody must give blocks
        back: blocks taken so far stay with their sequences, which will need them."""
        self._in_flight = in_flight
        schedule: Schedule = self.schedule()
        return schedule

    def _computing(self, schedule: Schedule) -> list[Sequence]:
        # The last one counts: completions of a request are admitted one after the other.
        in_flight = self._in_flight or []
        return in_flight if in_flight[-1:] == self.queues.running[-1:] else schedule.sequences

    def _preempt(self, victim: Sequence, schedule: Schedule) -> None:
        # It would leave with a token that has no value yet, and whoever ends with this step's
        # results may give back blocks enough.
        if self._in_flight is not None:
            raise ResultsNeeded
        super()._preempt(victim, schedule)
