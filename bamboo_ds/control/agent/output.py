"""The output of a worker: into a file of its own, and on to where its agent's output goes.

::

    worker --- terminal or pipe --- a thread --- file
                                        |
                                     outlet --- the agent's own output, which is the launcher's: a terminal, a pipe

The worker sees a terminal where the output ends on one. Its agent reads, since a worker ends with its agent anyway,
while a launcher may be stopped or killed. Where nothing is taken the file goes on: an
:class:`~bamboo_ds.observe.outlet.Outlet` does not wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from ...observe import logs
from ...observe.logfiles import Lines, LogFile, agent_log, stamped, worker_log
from ...observe.outlet import Outlet, Sink
from ..settings import AgentSettings

logger = logging.getLogger("bamboo_ds.control.agent")

#: Bytes that a pipe holds, so that a worker that writes little outlasts an agent that is stopped. The kernel grants a
#: user's pipes 64 MiB.
_PIPE_BYTES = 1 << 18
_READ = 1 << 16
#: Seconds after the worker's end in which nothing has been read or shown, or in which this process is waited for,
#: until no more is waited for.
_STUCK_S = 2.0
_LOOK_S = 0.05
_F_SETPIPE_SZ = 1031


@dataclass
class _Descriptor:
    """The output of a worker to one of its descriptors.

    Attributes:
        reading: this end of it.
        worker: the worker's end, until that is started.
        target: the descriptor of this process that it is shown on.
        read: bytes that have come.
    """

    reading: int
    worker: int
    target: int
    read: int = 0


class WorkerOutput:
    """The output of one worker. Create it before the worker, start it after.

    Attributes:
        stdout, stderr: what the worker is to be started with; ``None``: what this process has.
        path: of the file, or ``None``.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.stdout: int | None = None
        self.stderr: int | None = None
        self.path: str | None = None
        self._streams: list[_Descriptor] = []
        self._outlets: list[Outlet] = []
        #: Shows what this process writes, from the start on until the process ends: it never waits for a terminal.
        self._log: Outlet | None = None
        self._readers: list[threading.Thread] = []
        self._prefix = f"[{settings.slot}] ".encode() if settings.prefix else None
        self._file = _file_of(settings)
        if self._file is None and self._prefix is None:
            return
        try:
            with contextlib.ExitStack() as undo:
                if self._file is not None:
                    undo.callback(self._file.close)
                one = os.path.samestat(os.fstat(1), os.fstat(2))
                for target in (1, 2)[: 1 if one else 2]:
                    ends = _ends(target if os.isatty(target) and not settings.prefix else None)
                    for end in ends:
                        undo.callback(os.close, end)
                    self._streams.append(_Descriptor(*ends, target))
                undo.pop_all()
        except OSError as error:  # there are no terminals left, an output is closed
            logger.warning("the output of this worker is in no file: %s", error)
            self._streams.clear()
            return
        self.path = None if self._file is None else self._file.baseFilename
        self.stdout, self.stderr = self._streams[0].worker, self._streams[-1].worker

    def start(self, member: str, pid: int) -> None:
        """The worker is started."""
        if not self._streams:
            self._log = Outlet(Sink(2))
            logs.show_by(self._log)
            return
        self._keep([f"[bamboo] worker of {member}, process {pid}".encode()])
        for stream in self._streams:
            os.close(stream.worker)
            self._outlets.append(Outlet(Sink(stream.target)))
            reader = threading.Thread(
                target=self._read, args=(stream, self._outlets[-1]), name="bamboo-output", daemon=True
            )
            self._readers.append(reader)
            reader.start()
        self._log = self._outlets[-1]
        logs.show_by(self._log)

    def say(self, text: str) -> None:
        """Shows ``text`` of this process on its standard error, in order with what the worker writes."""
        assert self._log is not None, "it is started"
        self._log.write(text)

    def _keep(self, lines: list[bytes]) -> None:
        if self._file is not None:
            self._file.append(stamped(lines, datetime.now()))

    def _read(self, stream: _Descriptor, outlet: Outlet) -> None:
        lines, data = Lines(), b" "
        while data:
            try:
                data = os.read(stream.reading, _READ)
            except OSError as error:
                if error.errno != errno.EIO:  # how a terminal tells that its other end is closed
                    raise
                data = b""
            whole = lines.feed(data)
            outlet.show(data if self._prefix is None else b"".join(self._prefix + line + b"\n" for line in whole))
            stream.read += len(data)
            self._keep(whole)
        os.close(stream.reading)

    def close(self, attend: Callable[[float], object], hurried: Callable[[], bool]) -> None:
        """Brings the rest of the output to its places: the worker and all that it has started are gone.

        Args:
            attend: does for so many seconds what else there is to do.
            hurried: whether this process is waited for, so that what a slow terminal lacks is in the file only.
        """
        begun = time.monotonic()
        before, since, stuck = -1, 0.0, False
        while not stuck and not self._is_through:
            attend(_LOOK_S)
            done = sum(stream.read for stream in self._streams) + sum(outlet.shown for outlet in self._outlets)
            now = time.monotonic()
            if done != before:
                before, since = done, now
            # A process elsewhere holds the worker's end, the launcher is stopped, or a terminal is slow.
            stuck = now - (begun if hurried() else since) > _STUCK_S
        for outlet in self._outlets:
            if outlet.empty and outlet is not self._log:  # one that is stuck ends with this process
                outlet.close()
        if stuck:
            logger.warning("the end of this worker's output is not shown")
        elif self._file is not None and self._streams:
            self._file.close()

    @property
    def _is_through(self) -> bool:
        return not any(reader.is_alive() for reader in self._readers) and all(each.empty for each in self._outlets)


def _file_of(settings: AgentSettings) -> LogFile | None:
    """The file of the worker's output, if that is to be kept, and can be."""
    if settings.logs is None or not settings.tee:
        return None
    try:
        return LogFile(worker_log(settings.logs, settings.slot))
    except OSError as error:
        logger.warning("the output of this worker is in no file: %s", error)
        return None


def _ends(terminal: int | None) -> tuple[int, int]:
    """The two ends of a terminal of the size of ``terminal`` that changes nothing; without that, of a pipe."""
    if terminal is None:
        reading, writing = os.pipe()
        with contextlib.suppress(PermissionError):  # this user has many pipes
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
        return reading, writing
    reading, writing = os.openpty()
    attributes = termios.tcgetattr(writing)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(writing, termios.TCSANOW, attributes)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(terminal, termios.TIOCGWINSZ, bytes(8)))
    return reading, writing


def log_to_file(settings: AgentSettings) -> None:
    """Writes this process's log to a file, too."""
    if settings.logs is None:
        return
    try:
        logs.to_file(LogFile(agent_log(settings.logs, settings.slot)))
    except OSError as error:
        logger.warning("this agent's log is in no file: %s", error)
