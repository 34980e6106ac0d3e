"""The package's one logger, with member, role and epoch in every line."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler, QueueListener

from ..errors import ConfigError
from .logfiles import TIME_FORMAT, LogFile
from .outlet import Outlet

LOGGER = "bamboo_ds"
LEVEL_VARIABLE = "BAMBOO_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
#: Records that wait for a file; what exceeds them is not in it.
_MOST_RECORDS = 10_000
#: Seconds that the end of a process waits for its file.
_FLUSH_S = 1.0
#: Seconds that the end of a process waits for its outlet.
_SHOW_S = 2.0
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s bamboo [%(member)s %(role)s e%(epoch)s] %(name)s: %(message)s"


@dataclass(frozen=True)
class LogContext:
    """Origin of a line: shown in every line of this process."""

    member: str = "-"
    role: str = "-"
    epoch: int | str = "-"


_lock = threading.Lock()
_context = LogContext()


def set_context(*, member: str | None = None, role: str | None = None, epoch: int | None = None) -> None:
    """Changes the context of the following lines; arguments that are not given stay."""
    global _context
    with _lock:
        _context = replace(
            _context,
            member=_context.member if member is None else member,
            role=_context.role if role is None else role,
            epoch=_context.epoch if epoch is None else epoch,
        )


class _ContextFilter(logging.Filter):
    """Adds the context to every record; a record's own ``extra`` wins."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = _context
        for name in ("member", "role", "epoch"):
            if not hasattr(record, name):
                setattr(record, name, getattr(context, name))
        return True


def configure() -> logging.Logger:
    """Sends the package's log to stderr, once per process; later calls change nothing.

    The level is ``BAMBOO_LOG_LEVEL`` if set, else WARNING. Raises :class:`ConfigError` for an unknown level.
    """
    logger = logging.getLogger(LOGGER)
    level = level_from_environment()
    with _lock:
        if any(getattr(handler, "_bamboo", False) for handler in logger.handlers):
            return logger
        _add(logging.StreamHandler(sys.stderr), "%H:%M:%S")
        logger.setLevel(level)
        # DeepSpeed and user scripts put handlers on the root logger: one line must not appear twice.
        logger.propagate = False
    return logger


def _add(handler: logging.Handler, times: str) -> None:
    handler._bamboo = True  # type: ignore[attr-defined]
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt=times))
    handler.addFilter(_ContextFilter())
    logging.getLogger(LOGGER).addHandler(handler)


class _FileHandler(QueueHandler):
    """Leaves records to a thread: who logs must not wait for a file system that hangs, least of all with a lease."""

    def __init__(self, file: LogFile) -> None:
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_RECORDS)
        super().__init__(self._records)
        self._listener = QueueListener(self._records, file)
        self._begun = False
        self.handleError = file.handleError  # type: ignore[method-assign]  # of records that find no room in the queue

    def begin(self) -> None:
        """Starts the thread."""
        with _lock:
            if not self._begun:
                self._begun = True
                self._listener.start()

    def flush(self) -> None:
        """Waits for the file, but not for ever."""
        self.begin()
        with self._records.all_tasks_done:
            self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, _FLUSH_S)


def to_file(file: LogFile) -> None:
    """Sends the package's log, from INFO on, to ``file``, too. Call it after :func:`configure`.

    Nothing is written before :func:`begin_files` or the process's end.
    """
    logger = logging.getLogger(LOGGER)
    with _lock:
        for handler in logger.handlers:
            handler.setLevel(max(handler.level, logger.level))
        logger.setLevel(min(logger.level, logging.INFO))
        _add(_FileHandler(file), TIME_FORMAT)


def begin_files() -> None:
    """Starts to write what :func:`to_file` has asked for, in threads: after the last process has been forked."""
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, _FileHandler):
            handler.begin()


def show_by(stream: Outlet) -> None:
    """Has what goes to stderr written by ``stream``."""
    with _lock:
        for handler in logging.getLogger(LOGGER).handlers:
            if isinstance(handler, logging.StreamHandler) and getattr(handler, "_bamboo", False):
                handler.setStream(stream)


def end() -> None:
    """Brings what was logged and printed to its places, if these take it: this process ends, or becomes another."""
    logging.shutdown()
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, Outlet):
            handler.stream.wait(_SHOW_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it was closed, or has no room
            stream.flush()


def level_from_environment() -> int:
    """The level that ``BAMBOO_LOG_LEVEL`` asks for; raises :class:`ConfigError` for an unknown one."""
    name = os.environ.get(LEVEL_VARIABLE, "").strip().upper()
    if not name:
        return logging.WARNING
    if name not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}={name!r} is no log level; use one of {', '.join(_LEVELS)}")
    return int(getattr(logging, name))
