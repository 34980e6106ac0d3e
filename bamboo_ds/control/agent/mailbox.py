"""Actions for a thread of an agent, or of a launcher, posted by other threads and by signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue

from .reexec import HANDLED_SIGNALS

#: Seconds that one wait for descriptors takes at most: ``poll`` takes no more than some weeks.
_LONGEST_S = 86_400.0


class Mailbox:
    """Actions, in the order in which they were posted. One thread alone takes them out."""

    def __init__(self) -> None:
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that is readable when there is an action."""
        return self._reading.fileno()

    def take_signals(self, handler: Callable[[signal.Signals, float], None]) -> Callable[[], None]:
        """Has :data:`HANDLED_SIGNALS` handled like actions, by the main thread alone.

        The parent of the process may have blocked them. SIGHUP stays ignored where it was (``nohup``).

        Args:
            handler: called with each signal, and the monotonic seconds at which it came.

        Returns:
            A function that has them handled as before.
        """

        def note(signum: int, _: object) -> None:
            self._actions.put(partial(handler, signal.Signals(signum), time.monotonic()))

        descriptor = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [signum for signum in HANDLED_SIGNALS if signum != signal.SIGHUP or not ignored]
        before = {signum: signal.signal(signum, note) for signum in handled}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

        def give_back() -> None:
            signal.set_wakeup_fd(descriptor)
            for signum, answer in before.items():
                signal.signal(signum, answer)

        return give_back

    def post(self, action: Callable[[], object]) -> None:
        """Has ``action`` called; callable from any thread."""
        self._actions.put(action)
        with contextlib.suppress(OSError):  # it is full of wake-ups, or closed
            self._writing.send(b"\0")

    def handle_all(self) -> None:
        """Calls what has been posted."""
        self._clear()
        while self.handle_next(0.0):
            continue

    def handle_next(self, timeout_s: float | None = None, others: Sequence[int] = ()) -> bool:
        """Calls the next action, waiting for it for so many seconds; false if none comes.

        Args:
            others: descriptors of which none is readable while it waits.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                action = self._actions.get_nowait()
                break
            except Empty:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                # Not in `get`, which before Python 3.11 waits for ever if its timeout passes at the wrong moment.
                longest = None if left is None else min(left, _LONGEST_S)
                if not {*wait([self._reading, *others], longest)}.isdisjoint(others):
                    return False
                self._clear()
        action()
        return True

    def handle_until(self, over: Callable[[], bool], seconds: float) -> bool:
        """Calls what is posted until ``over`` is true, for so many seconds at most; returns whether it is."""
        until = time.monotonic() + seconds
        while not over():
            if not self.handle_next(max(0.0, until - time.monotonic())):
                return over()
        return True

    def close(self) -> None:
        """Wakes no thread any more. Idempotent."""
        self._reading.close()
        self._writing.close()

    def _clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # several wake-ups may have been read together
            self._reading.recv(4096)
