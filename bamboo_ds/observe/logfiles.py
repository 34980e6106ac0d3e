"""The files in a job's folder of logs: one per worker and one per agent, each of bounded size.

Every line begins with the local time at which it was complete, so that the files can be read as one. Names are by slot:
what a slot goes on with after a restart, or after it has rejoined the job, is appended.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

logger = logging.getLogger("bamboo_ds.observe")

#: Bytes of a file, after which it is kept as the one before (``FILE.1``) and a new one is begun.
LARGEST_BYTES = 64 << 20
#: Bytes of a line without an end that are held back.
LONGEST_LINE = 1 << 16
#: Of a line, and of records of Python's ``logging``.
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_STAMP = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ")
_NAME = re.compile(r"(worker|agent)-(\d+)\.log")


def worker_log(folder: Path | str, slot: int) -> Path:
    """The path of the output of the workers of ``slot``."""
    return Path(folder, f"worker-{slot}.log")


def agent_log(folder: Path | str, slot: int) -> Path:
    """The path of the log of the agents of ``slot``."""
    return Path(folder, f"agent-{slot}.log")


class LogFile(RotatingFileHandler):
    """Appends to a file of bounded size. What cannot be written (the disk is full, say) is told once, in the log.

    Args:
        path: the file, and its folder, are made if absent, for their owner alone.
        largest: bytes of it; as many are kept of what was there before.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path | str, largest: int = LARGEST_BYTES) -> None:
        self._complained = False
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What workers write need not be text.
        super().__init__(path, maxBytes=largest, backupCount=1, encoding="utf-8", errors="surrogateescape")

    def _open(self) -> TextIOWrapper:
        opener = partial(os.open, mode=0o600)
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=opener)

    def append(self, data: bytes) -> None:
        """Appends whole lines. They are not divided between two files."""
        if data:
            self.handle(logging.makeLogRecord({"msg": data.decode("utf-8", "surrogateescape").removesuffix("\n")}))

    def close(self) -> None:
        """Closes the file."""
        try:
            super().close()
        except OSError:
            self.handleError()

    def handleError(self, record: logging.LogRecord | None = None) -> None:
        """Handles a ``record`` that could not be written; later ones may find room again."""
        if not self._complained:
            self._complained = True
            logger.warning("%s lacks what could not be written: %s", self.baseFilename, sys.exc_info()[1])


class Lines:
    """Divides a stream of bytes into lines, as a terminal shows them: progress bars write over themselves."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends; ``b""``: the stream has ended."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        lines = [_shown(line) for line in lines]
        self.rest = _shown(self.rest)
        if self.rest and (not data or len(self.rest) > LONGEST_LINE):
            lines, self.rest = [*lines, self.rest], b""
        return lines


def _shown(line: bytes) -> bytes:
    return line[line.rfind(b"\r", 0, -1) + 1 :]


def stamped(lines: list[bytes], now: datetime) -> bytes:
    """The text of ``lines`` for a file."""
    stamp = f"{now:{TIME_FORMAT}}.{now.microsecond // 1000:03d} ".encode()
    return b"".join(stamp + line.removesuffix(b"\r") + b"\n" for line in lines)


# -- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogSource:
    """The process whose output a file of logs has."""

    slot: int
    agent: bool

    @property
    def name(self) -> str:
        """The name in front of its lines."""
        return f"agent {self.slot}" if self.agent else str(self.slot)


#: When a line was complete, which file it is of, and the line itself, stamp and end included.
Entry = tuple[bytes, LogSource, bytes]


def files(folder: Path | str) -> dict[LogSource, Path]:
    """The files in a folder of logs."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found[LogSource(int(match[2]), match[1] == "agent")] = path
    return found


class Following:
    """The complete lines of one file from its beginning on, over the times at which it is begun anew.

    A line without a time, such as the second one of a traceback in an agent's log, has that of the line before it.
    """

    def __init__(self, source: LogSource, path: Path) -> None:
        self._source, self._path = source, path
        self._stamp, self._fd = b"", -1
        self._before = Path(f"{path}.1")

    def read(self) -> Iterator[Entry]:
        """The lines since the last call. Raises ``OSError`` if the file cannot be read."""
        if self._fd < 0:
            for path in (self._before, self._path):
                if self._open(path):
                    yield from self._lines()
            return
        yield from self._lines()
        if self._path.exists() and not self._is(self._path):
            yield from self._lines()  # what was written before another one was begun
            paths = [self._path] if self._is(self._before) else [self._before, self._path]
            for path in paths:
                if self._open(path):
                    yield from self._lines()

    def _open(self, path: Path) -> bool:
        self.close()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self._offset, self._rest = 0, b""
        return True

    def _is(self, path: Path) -> bool:
        """Whether what is read now is at ``path``."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _lines(self) -> Iterator[Entry]:
        while data := os.pread(self._fd, 1 << 20, self._offset):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                stamp = _STAMP.match(line)
                self._stamp = stamp[0] if stamp else self._stamp
                yield self._stamp, self._source, line + b"\n"

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def merged(followed: list[Following]) -> Iterator[Entry]:
    """The lines since the last call of all, by their times."""
    return heapq.merge(*(each.read() for each in followed), key=lambda entry: entry[0])


def last_lines(path: Path | str, count: int) -> list[str]:
    """The last lines of a worker's file, without their times; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LONGEST_LINE))
            found = deque(file.read().splitlines(), maxlen=count)
    except OSError:
        return []
    return [_STAMP.sub(b"", line, count=1).decode(errors="replace") for line in found]
