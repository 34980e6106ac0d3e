"""A worker as its agent sees it: spawned, watched by pidfd and heartbeat, killed when it must be."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

import psutil

from ..errors import LaunchError
from .channel import ENV_FD
from .messages import Message
from .wire import LineSocket

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Time that processes which a worker leaves behind get between SIGTERM and SIGKILL, in seconds.
_LEFTOVER_GRACE_S = 0.5
#: Seconds after SIGKILL until a worker counts as dead that does not end: a driver or a file system holds it.
_UNKILLABLE_S = 8.0


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(signum: int, parent_pid: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent's main thread dies.

    The parent may be dead already; then the signal is sent at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parents die."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(own: Collection[int]) -> None:
    """Collect dead children that became ours since their parents had died; those in ``own`` have somebody who does."""
    for child in psutil.Process().children():
        if child.pid in own:
            continue
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue  # somebody has just done so


def end_descendants(spare: Collection[int] = (), grace_s: float = _LEFTOVER_GRACE_S) -> None:
    """End every child of this process, and theirs: SIGTERM, after ``grace_s`` seconds SIGKILL.

    Children with process ids in ``spare`` keep theirs and live.
    """
    children = [child for child in psutil.Process().children() if child.pid not in spare]
    left = [*children, *(grandchild for child in children for grandchild in _below(child))]
    for process in left:
        _signal(process, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=grace_s)
    for process in left:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=grace_s)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []  # its children are ours now: too late for this time


def _signal(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return  # it has ended by itself meanwhile


def _begin_worker(agent_pid: int) -> None:
    """What a worker does before it becomes the script."""
    # Slurm sends it to all processes of a step, where agents take it for a notice; a script may handle it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, agent_pid)


class WorkerProcess:
    """One worker. Spawn it before the process has any other thread.

    Attributes:
        pid: process id.
        pidfd: readable from the moment on that the worker is dead.
        wire: this end of the channel; closed by :meth:`close`.
        last_sign_of_life: monotonic seconds of the newest heartbeat; ``None`` before the first and after
            the worker closed the channel, when none is expected.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Spawn ``argv``; raises :class:`LaunchError` if it cannot be executed."""
        ours, theirs = socket.socketpair()
        agent_pid = os.getpid()
        with theirs:
            try:
                # The worker holds accelerators and ports: without its agent nobody could end it.
                self._process = subprocess.Popen(
                    argv,
                    env={**env, ENV_FD: str(theirs.fileno())},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=lambda: _begin_worker(agent_pid),
                )
            except OSError as error:
                ours.close()
                raise LaunchError(f"cannot start the worker {argv[0]}: {error}") from error
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.wire = LineSocket(ours)
        self.last_sign_of_life: float | None = None
        #: Monotonic seconds from which on it counts as dead, if it has been killed.
        self.dead_at: float | None = None

    def send(self, message: Message) -> None:
        """Send to the worker; never blocks. Callable from any thread."""
        self.wire.send(message.to_line())

    def heard(self) -> None:
        """Note that the worker's interpreter runs."""
        self.last_sign_of_life = time.monotonic()

    def kill(self, signum: int) -> None:
        """Send a signal; a stopped worker is continued so that it can act on it."""
        if signum == signal.SIGKILL and self.dead_at is None:
            self.dead_at = time.monotonic() + _UNKILLABLE_S
        self._process.send_signal(signum)
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            self._process.send_signal(signal.SIGCONT)

    def lingers(self) -> bool:
        """Whether it was killed long ago, which none of its code survives, and still is there."""
        return self.dead_at is not None and time.monotonic() >= self.dead_at

    def reap(self) -> int:
        """Collect the dead worker: its exit code, or the negative number of its signal. One that lingers stays."""
        status = self._process.poll() if self.lingers() else self._process.wait()
        return -signal.SIGKILL if status is None else status

    def close(self) -> None:
        """Close the descriptors."""
        self.wire.close()
        os.close(self.pidfd)
