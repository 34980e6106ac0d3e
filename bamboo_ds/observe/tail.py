"""Reads a file of events while it grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import ProtocolError
from .events import Event, parse_line


class EventTail:
    """The lines of a file of events as they are written. A line that is not complete yet is left for later.

    Args:
        path: the file; it need not exist before the first :meth:`read`.
        begin: bytes to pass over, which end with a line.
        skip: is told of a line that is no event, which is passed over; by default that is an error.
    """

    def __init__(self, path: Path | str, begin: int = 0, skip: Callable[[ProtocolError], None] | None = None) -> None:
        self.path = path
        self._offset, self._number = begin, 0
        self._skip = skip

    def read(self, limit: int = -1) -> list[tuple[bytes, Event]]:
        """The lines since the last call, with their events.

        Args:
            limit: bytes to read at most, more than a line has; what remains is left for the next call.

        Raises:
            OSError: the file cannot be read.
            ProtocolError: a line is no event; it names ``file:line``, lines being counted from ``begin``.
        """
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            complete = file.read(limit).rpartition(b"\n")[:2]
        found = []
        for line in b"".join(complete).splitlines(keepends=True):
            try:
                found.append((line, parse_line(self.path, self._number + 1, line)))
            except ProtocolError as error:
                if self._skip is None:
                    self._number += 1
                    raise
                self._skip(error)
            self._number += 1
            self._offset += len(line)
        return found
