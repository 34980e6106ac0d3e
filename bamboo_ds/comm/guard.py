"""Calls into a communicator, and its abort, one after the other.

A communicator that is being aborted must not be called: a launch may find it freed, and torch's works ask it under a
lock that the abort holds, however long that blocks (with the interpreter's lock, which stops the whole process). So an
abort waits for the calls that are under way, and none begins after the end of the epoch. There is one that an abort
does not wait for: a call that blocks, which nothing but the abort ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .c10d import dist

#: Seconds that an abort waits for calls that are under way. They take microseconds.
_CALL_S = 0.5


class Guard:
    """What calls of one communicator and its abort go by.

    Args:
        check: raises ``EpochChanged`` once the epoch has ended, which is noted before an abort begins.
    """

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check
        self._changed = threading.Condition()
        self._calls = 0

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call ``function``; raises as ``check``."""
        with self._changed:
            self._check(name)
            self._calls += 1
        try:
            return function(*arguments, **named)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def await_calls(self) -> bool:
        """Wait until no call is under way, which began before the end of the epoch; false if one blocks."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls, _CALL_S)


class Guarded:
    """A group of torch, or a work of it, whose methods are called by a guard.

    Args:
        target: the group or the work.
    """

    def __init__(self, target: Any, guard: Guard) -> None:
        self._target, self._guard = target, guard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            result = self._guard.call(name, found, *arguments, **named)
            return Guarded(result, self._guard) if isinstance(result, dist.Work) else result

        return call

    def abort(self) -> None:
        """Abort a group; blocks, and nobody knows for how long."""
        self._guard.await_calls()
        self._target.abort()
