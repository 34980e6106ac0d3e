"""A worker as its agent sees it: spawned, watched by pidfd and heartbeat, killed when it must be."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from ...errors import LaunchError
from ...processes import ENV_TETHER, Tether, die_with_parent, exit_of
from ...variables import ENV_FD
from ..messages import Message
from ..registry.records import WorkerRecord
from ..wire import LineSocket

logger = logging.getLogger("bamboo_ds.control.agent")

#: Seconds after SIGKILL until a worker counts as dead that does not end: a driver or a file system holds it.
_UNKILLABLE_S = 8.0
#: Seconds that the kernel gets to give back what a dead worker had: some for each 100 GB, and for each device.
_TEARDOWN_S = 15.0


def _begin_worker(agent_pid: int) -> None:
    """The work of a worker's process before it becomes the script."""
    # Slurm sends it to all processes of a step, where agents take it for a notice; a script may handle it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL, agent_pid)


def _make_tether() -> Tether | None:
    try:
        return Tether()
    except (OSError, AttributeError) as error:
        logger.warning("the worker's death will be known when the kernel has taken it apart: %s", error)
        return None


class WorkerProcess:
    """One worker. Spawn it before the process has any other thread.

    Attributes:
        pid: process id.
        pidfd: readable from the moment on that the kernel has taken the dead worker apart.
        wire: this end of the channel; closed by :meth:`close`.
        last_sign_of_life: monotonic seconds of the newest heartbeat; ``None`` before the first and after
            the worker closed the channel, when none is expected.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        fds: Collection[int] = (),
        stdin: int | None = subprocess.DEVNULL,
    ) -> None:
        """Spawns ``argv``; raises :class:`LaunchError` if it cannot be executed.

        Args:
            stdout, stderr: its output; ``None``: that of this process.
            fds: what it inherits besides.
            stdin: its input; ``None``: that of this process.
        """
        ours, theirs = socket.socketpair()
        agent_pid = os.getpid()
        self._tether = _make_tether()
        variables, tied = {ENV_FD: str(theirs.fileno())}, list[int]()
        if self._tether is not None:
            variables[ENV_TETHER] = str(self._tether.fd)
            tied.append(self._tether.fd)
        with theirs, self._tether or contextlib.nullcontext():
            try:
                # The worker holds accelerators and ports: without its agent it could not be ended.
                self._process = subprocess.Popen(
                    argv,
                    env={**env, **variables},
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[theirs.fileno(), *tied, *fds],
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
        self._code: int | None = None
        self._watched = False

    def watch(self, on_death: Callable[[], None]) -> None:
        """Has a thread call ``on_death`` once the worker is :attr:`dead`. It must have said something already."""
        if self._tether is not None and not self._watched:
            self._watched = True
            death = threading.Thread(target=self._await_death, args=[self._tether, on_death], daemon=True)
            death.name = "bamboo-death"
            death.start()

    def _await_death(self, tether: Tether, on_death: Callable[[], None]) -> None:
        tether.await_death()
        self._code = exit_of(self.pid)
        if self.dead:
            on_death()

    @property
    def dead(self) -> bool:
        """Whether it is known to have ended, although the kernel may still take it apart."""
        return self._code is not None

    def send(self, message: Message | WorkerRecord) -> None:
        """Sends to the worker; never blocks. Callable from any thread."""
        self.wire.send(message.to_line())

    def heard(self) -> None:
        """Notes that the worker's interpreter runs."""
        self.last_sign_of_life = time.monotonic()

    def kill(self, signum: int) -> None:
        """Sends a signal; a stopped worker is continued so that it can act on it."""
        if signum == signal.SIGKILL and self.dead_at is None:
            self.dead_at = time.monotonic() + _UNKILLABLE_S
        self._process.send_signal(signum)
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            self._process.send_signal(signal.SIGCONT)

    def lingers(self) -> bool:
        """Whether it was killed long ago, which none of its code survives, and still is there."""
        return self.dead_at is not None and time.monotonic() >= self.dead_at

    def reap(self) -> int:
        """Collects the dead worker, if the kernel lets it: its exit code, or the negative number of its signal."""
        status = self._process.poll() if self.dead or self.lingers() else self._process.wait()
        return (self._code or -signal.SIGKILL) if status is None else status

    def await_teardown(self, wait: Callable[[float], object]) -> None:
        """Waits until the kernel has given back what the dead worker had: a successor may need it.

        Args:
            wait: waits so many seconds at most, and no longer than until :attr:`pidfd` is readable.
        """
        until = time.monotonic() + _TEARDOWN_S
        while self.dead and self._process.poll() is None:
            if (left := until - time.monotonic()) <= 0:
                logger.error("worker %d has died, and the kernel still holds its memory or its devices", self.pid)
                break
            wait(left)

    def close(self) -> None:
        """Closes the descriptors."""
        self.wire.close()
        os.close(self.pidfd)
