"""The activity of a worker's main thread, and its place when it does not get on, for the log."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger("bamboo_ds.control.stalls")

#: Seconds within one instruction until the first report; each next one comes after twice as many.
FIRST_REPORT_S = 60.0
#: The same for what a worker does outside of instructions and can say itself.
FIRST_WORD_S = 3.0


class Activity:
    """The activity of a worker's main thread, for its heartbeats. Written by that thread, read by the channel's.

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
        """The activity that takes long at this moment, in words, or ``None``."""
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


def frame_of(thread: threading.Thread) -> FrameType | None:
    """The frame of ``thread``; ``None`` if it does not run.

    CPython before 3.12.1 holds a lock of the interpreter meanwhile that objects with variables of threads need to end:
    if the collector ends one just then, all threads wait for ever (gh-106883). So there is no collection meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if collects:
            gc.enable()


class Stalls:
    """Logs the stack of the main thread while one instruction lasts long, whatever it waits for.

    It judges nothing: the first iteration may compile for minutes, and a member that waits for another one is well.
    """

    def __init__(self) -> None:
        self._beats = -1
        self._since = 0.0
        self._next_s = FIRST_REPORT_S
        self._doing: Callable[[], str] | None = None
        self._doing_since = 0.0
        self._next_word_s = FIRST_WORD_S

    def look(self, activity: Activity, now: float) -> None:
        """Reports if it is time; is called often, from another thread than the main one.

        Args:
            activity: of the main thread.
            now: ``time.monotonic()``.
        """
        self._say(activity, now)
        if not activity.inside or activity.beats != self._beats:
            self._beats, self._since, self._next_s = activity.beats, now, FIRST_REPORT_S
            return
        if now - self._since < self._next_s:
            return
        self._next_s *= 2
        frame = frame_of(threading.main_thread())
        place = "".join(traceback.format_stack(frame)) if frame is not None else ""
        does = "waits for other members" if activity.waiting() else "is busy"
        logger.warning("one instruction lasts %.0f s by now; the worker %s in\n%s", now - self._since, does, place)

    def _say(self, activity: Activity, now: float) -> None:
        doing = activity.doing
        if doing is not self._doing:
            self._doing, self._doing_since, self._next_word_s, activity.told = doing, now, FIRST_WORD_S, None
        if doing is None or now - self._doing_since < self._next_word_s:
            return
        self._next_word_s *= 2
        activity.told = doing()
        logger.warning("for %.0f s by now the worker %s", now - self._doing_since, activity.told)
