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
        telling: by name, what tells how far something is that the main thread, or a thread in the background, is at;
            called often, from another thread.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.inside = False
        self.busy = False
        self.waiting: Callable[[], bool] = lambda: False
        self.hang_after_s: float | None = None
        self.doing: Callable[[], str] | None = None
        self.told: str | None = None
        self.telling: dict[str, Callable[[], str]] = {}

    def words(self) -> str | None:
        """What takes long at this moment, for people; ``None``: nothing."""
        parts = [] if self.told is None else [self.told]
        return "; ".join([*parts, *(tell() for tell in list(self.telling.values()))]) or None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The main thread is in the engine, at something new."""
        self.beats += 1
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
