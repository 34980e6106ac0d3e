"""The end of communicators that have to be told of it (NCCL's), in whatever thread an epoch is aborted.

A communicator that is being aborted must not be called: a launch may find it freed, and torch's works ask it under a
lock that the abort holds, however long that blocks (with the interpreter's lock, which stops the whole process). So an
abort waits for the calls that are under way, and none begins after the end of the epoch. There is one that an abort
does not wait for: a call that blocks, which nothing but the abort ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from ..errors import AbortFailed
from .c10d import dist

logger = logging.getLogger(__name__)

#: Seconds that an abort waits for calls that are under way. They take microseconds.
_CALL_S = 0.5


class Guard:
    """Keeps calls of one communicator and its abort apart.

    Args:
        check: raises ``EpochChanged`` once the epoch has ended, which is noted before an abort begins.
    """

    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check
        self._changed = threading.Condition()
        self._calls = 0

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls ``function``; raises as ``check``."""
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
        """Waits until no call is under way, which began before the end of the epoch; false if one blocks."""
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
        """Aborts a group; blocks for an unknown time."""
        self._guard.await_calls()
        self._target.abort()


class Aborts:
    """Aborts communicators, each on a thread of its own: one may block or fail, and the others are to end all the same.

    The thread that aborts an epoch is often the one that sends heartbeats: it must not wait for a device.
    """

    def __init__(self) -> None:
        self._all: dict[Future[None], str] = {}

    def begin(self, what: str, call: Callable[[], None]) -> None:
        """Calls ``call``, which aborts ``what``; returns at once."""
        self._all[_started(what, call)] = what

    def leave_alone(self, what: str, call: Callable[[], None]) -> None:
        """Does as :meth:`begin` where the end is not waited for."""
        _started(what, call)

    def join(self) -> None:
        """Waits until all have ended, however."""
        wait(list(self._all))

    @property
    def through(self) -> bool:
        """Whether all are done."""
        return all(ended.done() and ended.exception() is None for ended in list(self._all))

    def wait(self, timeout_s: float) -> None:
        """Waits until all are done.

        Raises:
            AbortFailed: one has failed, or is not done after ``timeout_s`` seconds.
        """
        wait(list(self._all), timeout_s)
        for ended, what in list(self._all.items()):
            done = ended.done()
            error = ended.exception() if done else None
            if error is not None or not done:
                why = f"has failed: {error}" if done else f"still blocks after {timeout_s:.0f} s"
                raise AbortFailed(f"the abort of {what} {why}") from error


def _started(what: str, call: Callable[[], None]) -> Future[None]:
    """The end of ``call``, which runs on a thread of its own."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # raised by Aborts.wait
            logger.exception("%s could not be aborted", what)
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="bamboo-abort-group", daemon=True).start()
    return ended
