"""A file of events, which several processes append to."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from .event_base import EventBase


class EventWriter(AbstractContextManager["EventWriter"]):
    """Appends events to a file that other processes may be appending to as well. Thread-safe.

    Args:
        path: the file, made if absent (its directory must exist); ``None`` drops every event.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path | str | None) -> None:
        self.path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._fd: int | None = None
        if self.path is not None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, event: EventBase) -> None:
        """Appends one line. A call after :meth:`close` is dropped, like with ``path=None``."""
        line = (event.to_json() + "\n").encode()
        with self._lock:
            if self._fd is None:
                return
            written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"events file {self.path}: wrote {written} of {len(line)} bytes (disk full?)")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def __exit__(self, *_: object) -> None:
        self.close()
