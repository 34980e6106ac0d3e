"""One thread that attends to all sockets of a worker's data plane. Nothing it calls may block."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

logger = logging.getLogger(__name__)

#: What is called with the events of a socket that is ready, as ``select.epoll`` has them.
Handler = Callable[[int], None]

_T = TypeVar("_T")


class SocketLoop:
    """Calls the handler of every watched socket that is ready. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._turns = 0
        self._handlers: dict[int, tuple[Handler, int]] = {}  # by descriptor, and the turn in which it was given
        #: Asked before each wait: seconds after which they want to be asked again; ``None``: whenever.
        self.timers: list[Callable[[], float | None]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closing = False
        self._told: set[str] = set()  # defects
        self._thread = threading.Thread(target=self._run, name="bamboo-wire", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def watch(self, watched: socket.socket, events: int, handler: Handler) -> None:
        """Calls ``handler`` when ``watched`` is ready."""
        self._handlers[watched.fileno()] = handler, self._turns
        self._epoll.register(watched, events)

    def change(self, watched: socket.socket, events: int) -> None:
        """Looks for other events of a watched socket."""
        self._epoll.modify(watched, events)

    def forget(self, watched: socket.socket) -> None:
        """Stops watching a socket; its handler may be running."""
        self._handlers.pop(watched.fileno(), None)
        self._epoll.unregister(watched)

    def wake(self) -> None:
        """Asks the timers again."""
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Ends the thread."""
        self._closing = True
        self.wake()
        self._thread.join()

    def close(self) -> None:
        """Lets go of descriptors; the thread has ended."""
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            waits = [seconds for timer in self.timers if (seconds := self._guarded(timer)) is not None]
            self._turns += 1
            for descriptor, events in self._epoll.poll(max(0.0, min(waits)) if waits else None):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                handler, since = self._handlers.get(descriptor, (None, 0))
                # What is younger than this turn has a number that was another's, whose event it may be; its own ones
                # come again. What is not there has just been forgotten.
                if handler is not None and since < self._turns:
                    self._guarded(partial(handler, events))

    def _guarded(self, call: Callable[[], _T]) -> _T | None:
        """The result of ``call``; ``None`` after a defect in it: all else must go on."""
        try:
            return call()
        except Exception as error:
            defect = repr(error)  # it may show for ever, and must not fill the log
            logger.log(logging.DEBUG if defect in self._told else logging.ERROR, "a handler failed", exc_info=True)
            self._told.add(defect)
            return None
