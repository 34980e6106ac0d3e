"""The end of communicators that have to be told of it (NCCL's), in whatever thread an epoch is aborted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from ..errors import AbortFailed

logger = logging.getLogger(__name__)


class Aborts:
    """Aborts communicators, each on a thread of its own: one may block or fail, and the others are to end all the same.

    The thread that aborts an epoch is often the one that sends heartbeats: it must not wait for a device.
    """

    def __init__(self) -> None:
        self._all: dict[Future[None], str] = {}

    def begin(self, what: str, call: Callable[[], None]) -> None:
        """Call ``call``, which aborts ``what``; returns at once."""
        self._all[_started(what, call)] = what

    def leave_alone(self, what: str, call: Callable[[], None]) -> None:
        """As :meth:`begin`, for what nobody needs the end of."""
        _started(what, call)

    def join(self) -> None:
        """Wait until all have ended, however."""
        wait(list(self._all))

    @property
    def through(self) -> bool:
        """Whether all are done."""
        return all(ended.done() and ended.exception() is None for ended in list(self._all))

    def wait(self, timeout_s: float) -> None:
        """Wait until all are done.

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
