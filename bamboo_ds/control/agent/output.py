"""What a worker writes: into a file of its own, and on to where its agent's output goes.

::

    worker --- terminal or pipe --- agent's thread --- file
                                        |
                                        +------------- the agent's own output: the launcher's, a terminal, a pipe

The worker sees a terminal where the output ends on one. Its agent reads, since a worker ends with its agent anyway,
while a launcher may be stopped or killed. Then the file goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ...observe import logs
from ...observe.logfiles import NO_ROOM, NOT_SHOWN, Lines, LogFile, agent_log, stamped, worker_log
from ..settings import AgentSettings

logger = logging.getLogger("bamboo_ds.control.agent")

#: Bytes that wait to be shown, from which on the worker is read no longer, as if it wrote there itself.
_MOST_WAITING = 4 << 20
#: Bytes that a pipe holds, so that a worker that writes little outlasts an agent that is stopped. The kernel grants a
#: user's pipes 64 MiB.
_PIPE_BYTES = 1 << 18
_READ = 1 << 16
#: Seconds after which a launcher that takes nothing is looked at.
_LOOK_S = 0.1
#: Seconds that an agent which was told to end gives to what is still to be shown.
_LAST_S = 1.0
#: Seconds that the rest of a dead worker's output gets to arrive.
_REST_S = 2.0
_F_SETPIPE_SZ = 1031


@dataclass(frozen=True)
class Screens:
    """What the standard output and error of a worker end on.

    Attributes:
        terminals: which of the two are terminals.
        size: of those, lines and columns.
    """

    terminals: tuple[bool, bool] = (False, False)
    size: tuple[int, int] = (0, 0)

    @classmethod
    def own(cls) -> Screens:
        """Of this process."""
        terminals = os.isatty(1), os.isatty(2)
        size = (0, 0)
        if any(terminals):
            packed = fcntl.ioctl(1 if terminals[0] else 2, termios.TIOCGWINSZ, bytes(8))
            size = struct.unpack("4H", packed)[:2]
        return cls(terminals, size)

    def to_argument(self) -> str:
        """As :meth:`parse` reads it."""
        return ",".join(str(int(each)) for each in (*self.terminals, *self.size))

    @classmethod
    def parse(cls, text: str) -> Screens:
        """From :meth:`to_argument`."""
        out, err, lines, columns = map(int, text.split(","))
        return cls((bool(out), bool(err)), (lines, columns))


@dataclass
class _Channel:
    """One way from the worker to where it is shown.

    Attributes:
        reading: this end of it; -1: at its end.
        worker: the worker's end, until that is started.
        target: where it goes on to.
        waiting: what is still to be shown.
        dropped: bytes that were not shown, as there was none to show them.
    """

    reading: int
    worker: int
    target: _Target
    lines: Lines = field(default_factory=Lines)
    waiting: bytearray = field(default_factory=bytearray)
    dropped: int = 0


class _Target:
    """Writes without waiting to a descriptor that other processes share, and that may be gone."""

    def __init__(self, fd: int) -> None:
        self.gone = False
        self._socket: socket.socket | None = None
        if stat.S_ISREG(os.fstat(fd).st_mode):
            self.fd = os.dup(fd)  # others write to it where they have come to, not at its end
            return
        try:
            # With flags of its own: those of ``fd`` are of all processes that have it.
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            self.fd = os.dup(fd)  # a socket, or a terminal of another user
            try:
                self._socket = socket.socket(fileno=self.fd)
            except OSError:
                self._socket = None

    def write(self, data: bytearray) -> int:
        """How many of the bytes it took; -1: its disk has no room for them."""
        try:
            if self._socket is not None:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            return os.write(self.fd, data[: select.PIPE_BUF])
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno in NO_ROOM:
                return -1
            self.gone = True  # the launcher has been killed, the terminal closed
            return len(data)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self.fd)


class WorkerOutput:
    """The output of one worker. Create it before the worker, start it after.

    Attributes:
        stdout, stderr: what the worker is to be started with; ``None``: what this process has.
        path: of the file; ``None``: there is none.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.stdout: int | None = None
        self.stderr: int | None = None
        self.path: str | None = None
        self._parent = settings.parent_pid
        self._channels: list[_Channel] = []
        self._file: LogFile | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ending = self._complained = False
        self._late = False  # the thread has ended, and left the launcher stopped
        self._look_at = 0.0
        if settings.logs is None or not settings.tee:
            return
        try:
            self._file = LogFile(worker_log(settings.logs, settings.slot))
        except OSError as error:
            logger.warning("the output of this worker is in no file: %s", error)
            return
        self.path = os.path.abspath(self._file.path)
        screens = Screens.own() if settings.screen is None else Screens.parse(settings.screen)
        try:
            self._open(screens)
        except OSError as error:  # there are no terminals left, an output is closed
            logger.warning("the output of this worker is in no file: %s", error)
            self._file.close()
            self._file = self.path = None
            return
        self.stdout, self.stderr = self._channels[0].worker, self._channels[-1].worker

    def _open(self, screens: Screens) -> None:
        one = os.path.samestat(os.fstat(1), os.fstat(2))
        with contextlib.ExitStack() as undo:
            wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for fd in wake:
                undo.callback(os.close, fd)
            for fd, terminal in zip((1, 2)[: 1 if one else 2], screens.terminals, strict=False):
                target = _Target(fd)
                undo.callback(target.close)
                ends = _ends(screens.size if terminal else None)
                for end in ends:
                    undo.callback(os.close, end)
                self._channels.append(_Channel(*ends, target))
            undo.pop_all()
        self._wake, self._waker = wake

    def start(self, member: str, pid: int) -> None:
        """The worker is started."""
        if self._file is None:
            return
        for channel in self._channels:
            os.close(channel.worker)
        begin = f"[bamboo] worker of {member}, process {pid}".encode()
        self._keep([begin])
        logs.show_by(self)
        self._thread = threading.Thread(target=self._run, name="bamboo-output", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Show ``text`` of this process on its standard error, in order with what the worker writes."""
        if self._thread is not None:
            self.write(text)
        else:
            sys.stderr.write(text)
            sys.stderr.flush()

    # -- lines of this process itself, as a stream of Python's ``logging`` ----------------------------

    def write(self, text: str) -> None:
        """Show ``text`` where the worker's standard error is shown; its file does not get it."""
        channel = self._channels[-1]
        with self._lock:
            channel.waiting += text.encode(errors="backslashreplace")
        if self._late:
            self._show(channel)
        else:
            self._stir()

    def flush(self) -> None:
        """It is shown as soon as possible."""

    # -- the thread ---------------------------------------------------------------------------------

    def _stir(self) -> None:
        try:
            os.write(self._waker, b"\0")
        except BlockingIOError:
            return  # it has been stirred already

    def _run(self) -> None:
        while self._pass_on():
            continue

    def _pass_on(self) -> bool:
        """Wait for something and do it; false at the end."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd, waited_for = {}, []
        for channel in self._channels:
            full = len(channel.waiting) >= _MOST_WAITING
            if full or (self._ending and channel.waiting):
                waited_for.append(channel)
            if channel.reading >= 0 and not full:
                poll.register(channel.reading, select.POLLIN)
                by_fd[channel.reading] = channel
            if channel.waiting:
                poll.register(channel.target.fd, select.POLLOUT)
        done = all(channel.reading < 0 and not channel.waiting for channel in self._channels)
        if done and self._ending:
            return False
        ready = dict(poll.poll(1000 * _LOOK_S if waited_for else None))
        if self._wake in ready:
            os.read(self._wake, _READ)
        for fd, channel in by_fd.items():
            if fd in ready:
                self._take(channel)
        for channel in self._channels:
            if channel.target.fd in ready:
                self._show(channel)
        now = time.monotonic()
        if any(channel.target.fd not in ready for channel in waited_for) and now >= self._look_at:
            self._look_at = now + _LOOK_S
            if _is_stopped(self._parent):
                with self._lock:
                    for channel in self._channels:
                        self._drop(channel)
        return True

    def _take(self, channel: _Channel) -> None:
        try:
            data = os.read(channel.reading, _READ)
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal tells that nobody has its other end any more
                raise
            data = b""
        self._keep(channel.lines.feed(data))
        if not data:
            os.close(channel.reading)
            channel.reading = -1
        elif not channel.target.gone:
            with self._lock:
                channel.waiting += data

    def _keep(self, lines: list[bytes]) -> None:
        assert self._file is not None
        try:
            self._file.append(stamped(lines, datetime.now()))
        except OSError as error:  # the disk is full, say; what is written later may find room again
            if not self._complained:
                self._complained = True
                logger.warning("the output of this worker is not in its file: %s", error)

    def _show(self, channel: _Channel) -> None:
        with self._lock:
            data = channel.waiting
            if channel.dropped:
                data = bytearray(f"\n{NOT_SHOWN % channel.dropped}".encode()) + data
            taken = channel.target.write(data)
            if taken < 0:
                self._drop(channel)
            elif taken:
                channel.dropped = 0
                del data[:taken]
                channel.waiting = data

    @staticmethod
    def _drop(channel: _Channel) -> None:
        channel.dropped += len(channel.waiting)
        channel.waiting.clear()

    # -- the end ------------------------------------------------------------------------------------

    def close(self, attend: Callable[[], object], hurried: Callable[[], bool]) -> None:
        """The worker and all that it has started are gone: bring the rest to its places.

        Args:
            attend: does what else there is to do; called often.
            hurried: this process was told to end.
        """
        if self._thread is None:
            return
        self._ending = True
        begin = time.monotonic()
        while self._thread.is_alive():
            self._stir()
            self._thread.join(0.05)
            attend()
            now = time.monotonic()
            unread = any(channel.reading >= 0 for channel in self._channels)
            if (unread and now - begin > _REST_S) or (hurried() and now - begin > _LAST_S):
                logs.show_by(None)
                logger.warning("the end of this worker's output is not shown")
                return  # somebody has the other end, or nobody looks: the thread ends with this process
        assert self._file is not None
        self._file.close()
        self._late = True
        if dropped := sum(channel.dropped for channel in self._channels):
            # A blocking write to a stopped launcher would hold this process up: its log goes on through here.
            logger.warning("%d bytes of this worker's output are in its file alone", dropped)
            return
        logs.show_by(None)
        for fd in (self._wake, self._waker):
            os.close(fd)
        for channel in self._channels:
            self._show(channel)  # what another thread has said at the last moment
            channel.target.close()


def _ends(size: tuple[int, int] | None) -> tuple[int, int]:
    """The two ends of a terminal of ``size`` that changes nothing, or, without a size, of a pipe."""
    if size is None:
        reading, writing = os.pipe()
        with contextlib.suppress(PermissionError):  # this user has many pipes
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
        return reading, writing
    reading, writing = os.openpty()
    attributes = termios.tcgetattr(writing)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(writing, termios.TCSANOW, attributes)
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    return reading, writing


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return True


def log_to_file(settings: AgentSettings) -> None:
    """Have this process's log in a file, too."""
    if settings.logs is None:
        return
    try:
        logs.to_file(LogFile(agent_log(settings.logs, settings.slot)))
    except OSError as error:
        logger.warning("this agent's log is in no file: %s", error)
