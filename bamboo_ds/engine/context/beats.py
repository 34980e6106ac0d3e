"""Signs of life of the main thread: instructions that end, and how long one may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...worker.activity import Activity
from .records import Progress

#: A worker hangs when an instruction takes so many times as long as the longest so far, and at least so many seconds.
HANG_FACTOR = 10.0
HANG_AT_LEAST_S = 300.0


class Beats:
    """Tells the worker's heartbeats what the main thread does.

    Args:
        activity: of the worker.
        progress: that of the job.
    """

    def __init__(self, activity: Activity, progress: Progress) -> None:
        self._activity, self._progress = activity, progress
        self._last, self._longest = time.monotonic(), 0.0

    def beat(self) -> None:
        """An instruction is done: note how long the longest took."""
        now = time.monotonic()
        self._activity.beats += 1
        if self._activity.busy:
            self._longest = max(self._longest, now - self._last)
        if self._progress.steps:  # the first iteration compiles, allocates, reads
            self._activity.hang_after_s = max(HANG_AT_LEAST_S, HANG_FACTOR * self._longest)
        self._last = now

    @contextmanager
    def busy(self, watched: bool) -> Iterator[None]:
        """The body executes instructions; if ``watched`` each is to end within a time that those before it suggest."""
        self.beat()
        self._activity.busy = watched
        try:
            yield
        finally:
            self._activity.busy = False
