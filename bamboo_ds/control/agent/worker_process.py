"""A worker as its agent sees it: spawned, watched by pidfd and heartbeat, killed when it must be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

from ...errors import LaunchError
from ...processes import die_with_parent
from ...variables import ENV_FD
from ..messages import Message
from ..registry.records import WorkerRecord
from ..wire import LineSocket

#: Seconds after SIGKILL until a worker counts as dead that does not end: a driver or a file system holds it.
_UNKILLABLE_S = 8.0


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

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        fds: Collection[int] = (),
    ) -> None:
        """Spawn ``argv``; raises :class:`LaunchError` if it cannot be executed.

        Args:
            stdout, stderr: its output; ``None``: that of this process.
            fds: what it inherits besides.
        """
        ours, theirs = socket.socketpair()
        agent_pid = os.getpid()
        with theirs:
            try:
                # The worker holds accelerators and ports: without its agent nobody could end it.
                self._process = subprocess.Popen(
                    argv,
                    env={**env, ENV_FD: str(theirs.fileno())},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[theirs.fileno(), *fds],
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

    def send(self, message: Message | WorkerRecord) -> None:
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
