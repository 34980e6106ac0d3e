"""Whether a worker hangs: its interpreter stands still, or its main thread does not get on."""

from __future__ import annotations

import logging
import time
from typing import Literal

from .messages import Heartbeat

logger = logging.getLogger("bamboo_ds.control.watchdog")


class Watchdog:
    """Judges one worker by its heartbeats.

    Args:
        heartbeat_timeout_s: seconds without a heartbeat after which it hangs.
        start_timeout_s: the same for a worker that has not committed a step yet. It loads libraries, which holds
            Python's global lock, for as long as a cold file system takes.
        hang_timeout_s: seconds without progress after which it hangs; ``None``: as the heartbeats suggest.

    Attributes:
        patience_s: seconds without a heartbeat after which it hangs now.
        hung: how it hangs, and since when in monotonic seconds; ``None``: it does not. Stays once it is set.
    """

    def __init__(self, heartbeat_timeout_s: float, start_timeout_s: float, hang_timeout_s: float | None) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.patience_s = max(heartbeat_timeout_s, start_timeout_s)
        self._hang_timeout_s = hang_timeout_s
        self._stuck_since: float | None = None
        self._beats = 0
        self.hung: tuple[Literal["heartbeat", "hang"], float] | None = None

    def silent(self, last_sign_of_life: float | None) -> bool:
        """Whether it has just been found to be without heartbeat."""
        now = time.monotonic()
        if self.hung is not None or last_sign_of_life is None or now - last_sign_of_life < self.patience_s:
            return False
        self.hung = "heartbeat", last_sign_of_life
        logger.error("no heartbeat of the worker for %.1f s", now - last_sign_of_life)
        return True

    def stuck(self, heartbeat: Heartbeat) -> bool:
        """Whether it has just been found to compute without doing anything new."""
        if heartbeat.step:
            self.patience_s = self._heartbeat_timeout_s
        limit = self._hang_timeout_s or heartbeat.hang_after_s
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
