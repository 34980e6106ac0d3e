"""Reads a file of events while it grows."""

from __future__ import annotations

from pathlib import Path

from .events import Event, parse_line


class EventTail:
    """The lines of a file of events as they are written. A line that is not complete yet is left for later.

    Args:
        path: the file; it need not exist before the first :meth:`read`.
        begin: bytes to pass over, which end with a line.
    """

    def __init__(self, path: Path | str, begin: int = 0) -> None:
        self.path = path
        self._offset, self._number = begin, 0

    def read(self) -> list[tuple[bytes, Event]]:
        """The lines since the last call, with their events.

        Raises:
            OSError: the file cannot be read.
            ProtocolError: a line is no event; it names ``file:line``, lines being counted from ``begin``.
        """
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[:2]
        found = []
        for line in b"".join(complete).splitlines(keepends=True):
            self._number += 1
            found.append((line, parse_line(self.path, self._number, line)))
            self._offset += len(line)
        return found
