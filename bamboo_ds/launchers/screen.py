"""The terminal, pipe or file that a launcher shows things on: output of workers, its own lines, and one line of status.

The status is the last line of a terminal. It is taken away before anything else is shown, and put back once that has
ended with a line; so neither garbles the other.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from rich.cells import set_cell_size

from ..observe.outlet import Sink

#: Takes the current line of a terminal away.
_ERASE = b"\r\x1b[2K"
#: Of a terminal that does not tell.
_COLUMNS = 80
_DIM, _NORMAL = b"\x1b[2m", b"\x1b[0m"


class Screen:
    """Standard output and error of this process. Thread-safe; it may block as long as they do.

    Args:
        alone: nothing but what is shown here gets to the terminal, if standard error is one, so that it can have a
            status.
    """

    def __init__(self, alone: bool) -> None:
        out, err = os.isatty(1), os.isatty(2)
        one = not out or os.fstat(1).st_rdev == os.fstat(2).st_rdev
        self.live = alone and err and one and os.environ.get("TERM", "dumb") != "dumb"
        self._terminal = {2, *((1,) if out else ())}
        self._sinks = {1: Sink(1), 2: Sink(2)}
        self._lock = threading.Lock()
        self._status = b""
        self._shown = False  # the status is on the terminal now
        self._in_line = False  # what was shown last has not ended its line

    def show(self, data: bytes, fd: int = 2) -> None:
        """Write all of ``data`` to descriptor ``fd`` (1 or 2), past Python's buffers."""
        if not data:
            return
        with self._lock:
            before, after = b"", b""
            if self.live and fd in self._terminal:
                before = _ERASE if self._shown else b""
                self._in_line = not data.endswith(b"\n")
                self._shown = bool(self._status) and not self._in_line
                after = self._status if self._shown else b""
            self._sinks[fd].write(before + data + after)

    def say(self, lines: Sequence[str]) -> None:
        """Show lines of our own on standard error."""
        self.show(marked(lines).encode(errors="backslashreplace"))

    def status(self, text: str | None) -> None:
        """Put ``text`` into the last line of the terminal, ``None``: nothing. Without a terminal nothing happens."""
        if not self.live:
            return
        with self._lock:
            width = (os.get_terminal_size(2).columns or _COLUMNS) - 1
            line = "" if text is None else set_cell_size(f"[bamboo] {text}", width).rstrip()
            status = _DIM + line.encode() + _NORMAL if line else b""
            if status == self._status:
                return
            self._status = status
            if self._in_line:
                return
            before = _ERASE if self._shown else b""
            self._shown = bool(status)
            self._sinks[2].write(before + status)

    # -- as a stream of Python's ``logging`` ----------------------------------------------------------

    def write(self, text: str) -> None:
        """Show a record of the log."""
        self.show(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Nothing is held back, but for what others have written to Python's own stream."""
        sys.stderr.flush()


def marked(lines: Sequence[str]) -> str:
    """The text of ``lines`` for stderr, where the script writes, too."""
    return "".join(f"[bamboo] {line}\n" for line in lines)
