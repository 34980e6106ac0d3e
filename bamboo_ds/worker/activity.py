"""What a worker's main thread does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """What a worker's main thread does, for its heartbeats. Written by that thread, read by the channel's.

    Attributes:
        beats: instructions done so far.
        inside: whether the main thread is in an operation of the engine, or recovers or changes the plan around it.
        busy: whether the main thread executes instructions; else it is in the script, or recovers.
        waiting: whether it waits for another member at this moment.
        hang_after_s: see :class:`~bamboo_ds.control.messages.Heartbeat`.
        doing: tells what else it does that may take long, for people; ``None``: nothing.
        told: what was said of that.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.inside = False
        self.busy = False
        self.waiting: Callable[[], bool] = lambda: False
        self.hang_after_s: float | None = None
        self.doing: Callable[[], str] | None = None
        self.told: str | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The main thread is in the engine, at something new."""
        self.beats += 1
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
