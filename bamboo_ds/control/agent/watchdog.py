"""Whether a worker hangs: its interpreter stands still, or its main thread does not get on."""

from __future__ import annotations

import logging
import time
from typing import Literal

from ...config import MembershipConfig
from ..messages import Heartbeat

logger = logging.getLogger("bamboo_ds.control.watchdog")


class Watchdog:
    """Judges one worker by its heartbeats.

    Args:
        settings: ``heartbeat_limit_s`` holds from the first step on. Before it the worker loads libraries, which holds
            Python's global lock for as long as a cold file system takes. Before its first heartbeat its script may
            prepare data, for as long as that takes, unless ``start_timeout_s`` is set.

    Attributes:
        limit_s: seconds without a heartbeat after which it hangs now.
        hung: the way in which it hangs, and the monotonic seconds since when, or ``None``. Stays once it is set.
    """

    def __init__(self, settings: MembershipConfig) -> None:
        self._born, self._settings = time.monotonic(), settings
        self.limit_s = max(settings.heartbeat_limit_s, settings.start_limit_s)
        self._stuck_since: float | None = None
        self._beats = 0
        self.hung: tuple[Literal["heartbeat", "hang"], float] | None = None

    def excuse(self, seconds: float) -> None:
        """Allows the first heartbeat to come later by the seconds for which the worker was not listened to."""
        self._born += seconds

    def due(self, last_sign_of_life: float | None, closed: bool = False) -> float | None:
        """Monotonic seconds at which it will have been without heartbeat for too long, or ``None``.

        Args:
            last_sign_of_life: its newest heartbeat, or ``None`` if there was none yet or none is expected any more.
            closed: none is.
        """
        if self.hung is not None or closed:
            return None
        if last_sign_of_life is not None:
            return last_sign_of_life + self.limit_s
        first_s = self._settings.start_timeout_s
        return None if first_s is None else self._born + first_s

    def silent(self, last_sign_of_life: float | None, closed: bool = False) -> bool:
        """Whether it has just been found to be without heartbeat. Arguments as of :meth:`due`."""
        now, due = time.monotonic(), self.due(last_sign_of_life, closed)
        if due is None or now < due:
            return False
        since = self._born if last_sign_of_life is None else last_sign_of_life
        self.hung = "heartbeat", since
        logger.error("no heartbeat of the worker for %.1f s", now - since)
        return True

    def stuck(self, heartbeat: Heartbeat) -> bool:
        """Whether it has just been found to compute without doing anything new."""
        if heartbeat.step:
            self.limit_s = self._settings.heartbeat_limit_s
        limit = self._settings.hang_timeout_s or heartbeat.hang_after_s
        if not heartbeat.computing or heartbeat.beats != self._beats or limit is None:
            self._beats, self._stuck_since = heartbeat.beats, None
            return False
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= limit and self.hung is None:
            self.hung = "hang", self._stuck_since
            logger.error("no progress of the worker for %.1f s", now - self._stuck_since)
            return True
        return False
