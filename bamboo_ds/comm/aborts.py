"""The end of communicators that have to be told of it (NCCL's), in whatever thread an epoch is aborted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import AbortFailed

logger = logging.getLogger(__name__)


@dataclass
class _Abort:
    what: str
    call: Callable[[], None]
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="bamboo-abort-group", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.call()
        except BaseException as error:  # raised by Aborts.wait
            self.error = error
            logger.exception("%s could not be aborted", self.what)


class Aborts:
    """Aborts communicators, each on a thread of its own: one may block or fail, and the others are to end all the same.

    The thread that aborts an epoch is often the one that sends heartbeats: it must not wait for a device.
    """

    def __init__(self) -> None:
        self._all: list[_Abort] = []

    def begin(self, what: str, call: Callable[[], None]) -> None:
        """Call ``call``, which aborts ``what``; returns at once."""
        self._all.append(_Abort(what, call))

    def join(self) -> None:
        """Wait until all have ended, however."""
        for each in list(self._all):
            each.thread.join()

    def wait(self, timeout_s: float) -> None:
        """Wait until all are done.

        Raises:
            AbortFailed: one has failed, or is not done after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        for each in list(self._all):
            each.thread.join(max(0.0, deadline - time.monotonic()))
            why = f"still blocks after {timeout_s:.0f} s" if each.thread.is_alive() else f"has failed: {each.error}"
            if each.error is not None or each.thread.is_alive():
                raise AbortFailed(
                    f"the abort of {each.what} {why}. Its device may go on writing to what this worker computes with: "
                    "the worker stops, and others take over its stages. Look at the device and its driver's log "
                    "(dmesg, nvidia-smi -q)"
                ) from each.error
