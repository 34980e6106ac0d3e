"""Deadlines that tests can rely on where whole machines are stopped for a while, as virtual ones are."""

from __future__ import annotations

import time

#: Seconds between two looks that count at most: nobody else could do anything in the rest, either.
_AT_MOST_S = 2.0


class Patience:
    """So many seconds in which this process was awake. Look often.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._last = seconds, time.monotonic()

    def over(self) -> bool:
        """Whether they are over."""
        now = time.monotonic()
        self._left -= min(now - self._last, _AT_MOST_S)
        self._last = now
        return self._left <= 0
