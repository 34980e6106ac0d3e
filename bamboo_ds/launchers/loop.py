"""The main loop of a process with children: descriptors, signals, ends of processes, threads in the background."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import IO

from ..control.agent.reexec import handle_signals

#: What can be read.
LogSource = int | socket.socket | IO[bytes]


class Loop:
    """Use it in the main thread.

    Attributes:
        signals: that have come and are not handled yet, with the monotonic seconds at which they came.
        child_died: whether a child has died since this was set to false.
    """

    def __init__(self) -> None:
        self.signals: list[tuple[int, float]] = []
        self.child_died = False
        self._selector = selectors.DefaultSelector()
        self._waker: socket.socket | None = None
        self._background: list[threading.Thread] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In the body signals are handled by :attr:`signals`, and end a :meth:`turn`."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        before = handle_signals(self.receive)
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._on_child)
        wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self.when_readable(reading, lambda: _drain(reading))
        self._waker = writing
        try:
            yield
        finally:
            self._waker = None
            signal.set_wakeup_fd(wakeup_before)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            reading.close()
            writing.close()
            self._selector.close()

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Take a signal in."""
        self.signals.append((signum, time.monotonic()))

    def _on_child(self, signum: int, frame: FrameType | None) -> None:
        self.child_died = True

    def wake(self) -> None:
        """End a :meth:`turn` that waits. Callable from any thread."""
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(OSError):  # it is full, or it has just been closed
                waker.send(b"\0")

    def when_readable(self, source: LogSource, action: Callable[[], object]) -> None:
        """Have ``action`` called whenever ``source`` can be read, until :meth:`forget`."""
        self._selector.register(source, selectors.EVENT_READ, action)

    def forget(self, source: LogSource) -> None:
        """Look at ``source`` no longer."""
        self._selector.unregister(source)

    def watch_process(self, pid: int, on_end: Callable[[], None], stack: ExitStack) -> None:
        """Have ``on_end`` called once when the process ``pid``, which need not be a child, is dead.

        Raises:
            ProcessLookupError: it is already.
        """
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)

        def ended() -> None:
            self.forget(pidfd)
            on_end()

        self.when_readable(pidfd, ended)

    def turn(self, timeout_s: float | None) -> None:
        """Handle what can be read within ``timeout_s`` seconds, if anything."""
        ready: list[Callable[[], object]] = [key.data for key, _ in self._selector.select(timeout_s)]
        for action in ready:
            action()

    def in_background(self, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread."""
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        self._background.append(thread)

    def join_background(self, timeout_s: float) -> None:
        """Wait for each of the threads, up to ``timeout_s`` seconds."""
        for thread in self._background:
            thread.join(timeout_s)


def _drain(reading: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        reading.recv(4096)
