"""What is told at the end of a job, for people: its summary, goodput, and what the worker that failed wrote last."""

from __future__ import annotations

import os

from .goodput import account
from .logfiles import last_lines
from .summary import Summary
from .tail import EventTail

#: Bytes of events that are read again for the goodput: what that takes must not keep anybody waiting.
_QUICK_BYTES = 16 << 20
#: Of a log.
_LINES = 20


class Ending:
    """The end of a job.

    Args:
        events: its file of events.
        begin: bytes of that which are of earlier jobs.
        job: its name; ``None``: all in the file count.
    """

    def __init__(self, events: str, begin: int, job: str | None) -> None:
        self._events, self._begin, self._job = events, begin, job

    def lines(self, summary: Summary) -> list[str]:
        """The summary, one thing a line. Raises as :meth:`.tail.EventTail.read`."""
        return [*summary.lines(), self._goodput(), *self._failure(summary)]

    def _goodput(self) -> str:
        if os.path.getsize(self._events) - self._begin > _QUICK_BYTES:
            return f"goodput: bamboo goodput {self._events}"
        found = EventTail(self._events, self._begin).read()
        report = account(event for _, event in found if self._job in (None, event.job))
        return "goodput: " + ("unknown" if report.goodput is None else f"{report.goodput:.0%} of the member-seconds")

    def _failure(self, summary: Summary) -> list[str]:
        failure = summary.failure
        if failure is None:
            return []
        lines = [f"first failure: {failure.text}"]
        if failure.log is None:
            return lines
        last = last_lines(failure.log, _LINES) if os.path.exists(failure.log) else []
        return [*lines, f"its output: {failure.log}", *(f"  | {line}" for line in last)]
