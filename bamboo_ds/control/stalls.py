"""Where a worker's main thread is when it does not get on, for whoever reads the log."""

from __future__ import annotations

import logging
import sys
import threading
import traceback

from .activity import Activity

logger = logging.getLogger("bamboo_ds.control.stalls")

#: Seconds within one instruction until the first report; each next one comes after twice as many.
FIRST_REPORT_S = 60.0


class Stalls:
    """Logs the stack of the main thread while one instruction lasts long, whatever it waits for.

    It judges nothing: the first iteration may compile for minutes, and a member that waits for another one is well.
    """

    def __init__(self) -> None:
        self._beats = -1
        self._since = 0.0
        self._next_s = FIRST_REPORT_S

    def look(self, activity: Activity, now: float) -> None:
        """Report if it is time; call it often, from another thread than the main one.

        Args:
            activity: of the main thread.
            now: ``time.monotonic()``.
        """
        if not activity.inside or activity.beats != self._beats:
            self._beats, self._since, self._next_s = activity.beats, now, FIRST_REPORT_S
            return
        if now - self._since < self._next_s:
            return
        self._next_s *= 2
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = "".join(traceback.format_stack(frame)) if frame is not None else ""
        does = "waits for other members" if activity.waiting() else "is busy"
        logger.warning("one instruction lasts %.0f s by now; the worker %s in\n%s", now - self._since, does, place)
