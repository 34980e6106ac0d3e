"""The outlet of a display: a descriptor that other processes share, that may be stopped, full or gone."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading

logger = logging.getLogger("bamboo_ds.observe")

#: Bytes that wait to be shown; what exceeds them is not.
MOST_WAITING = 64 << 20
#: Seconds that the rest of a line may take to come until it is shown without.
_REST_S = 0.05
#: What is written later may find room again.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_SHOWN = "\n[bamboo] %d bytes were not shown\n"


class Sink:
    """Writes all of something, for as long as that takes.

    What finds no room on the disk of a file is left out, which is said once there is room. One that takes nothing any
    more, such as the pipe to a launcher that was killed, is told in the log; then it is not written to.

    Attributes:
        missed: bytes that were left out, until that is said.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self.missed, self._gone = fd, 0, False

    def write(self, data: bytes) -> None:
        """Writes ``data``, after a line on what was left out."""
        if self._gone or not (data or self.missed):
            return
        try:
            self._write((_NOT_SHOWN % self.missed).encode() + data if self.missed else data)
        except OSError as error:
            first, self.missed = not self.missed, self.missed + len(data)
            if error.errno not in _NO_ROOM:
                self._gone = True
                logger.error("nothing is shown any more on descriptor %d: %s", self._fd, error)
            elif first:
                logger.error("nothing is shown on descriptor %d until there is room for it: %s", self._fd, error)
        else:
            self.missed = 0

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has made it so, for all that have it
                select.select([], [self._fd], [])


class Outlet:
    """Shows things through ``sink``, on a thread of its own: who shows something never waits.

    Attributes:
        shown: bytes that were written.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self.shown = sink, 0
        self._waiting, self._missed, self._closed = bytearray(), 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bamboo-outlet", daemon=True)
        self._thread.start()

    def show(self, data: bytes) -> None:
        """Shows ``data`` as soon as possible, if it fits into what may wait."""
        with self._changed:
            # Once something was left out, all is until that can be said.
            if self._missed or len(self._waiting) + len(data) > MOST_WAITING:
                self._missed += len(data)
            else:
                self._waiting += data
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting and not self._missed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.empty or self._closed)
                if self.empty:
                    return
                self._changed.wait_for(self._has_line, _REST_S)
                # Lines of several processes that share a pipe or a terminal stay in one piece if they are short.
                data = bytes(self._waiting[: select.PIPE_BUF])
                data = data[: data.rfind(b"\n") + 1] or data
                missed = 0 if data else self._missed
            self._sink.missed += missed
            self._sink.write(data)
            with self._changed:
                del self._waiting[: len(data)]
                self._missed -= missed
                self.shown += len(data)
                self._changed.notify_all()

    def _has_line(self) -> bool:
        """Whether nothing is gained by waiting for the end of a line."""
        whole = not self._waiting or len(self._waiting) >= select.PIPE_BUF
        return whole or b"\n" in self._waiting or self._closed

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing waits; returns whether that took less than ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.empty, timeout_s)

    def close(self) -> None:
        """Ends when nothing waits, and waits for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # -- as a stream of Python's ``logging`` ----------------------------------------------------------

    def write(self, text: str) -> None:
        """Shows ``text``."""
        self.show(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Does nothing: text is shown as soon as possible."""
