"""An agent that starts anew in the same process: with another slot, or for another attempt at the job.

Watchers of the process go on watching it: its id, its parent, its output and the pipe for its result stay.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from ...observe import logs
from ..settings import AgentSettings

#: What an agent handles. Blocked until its handlers are there: an early one would kill it.
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_FIRST_PRIVATE_FD = 3


def reexecute(settings: AgentSettings) -> NoReturn:
    """Replaces this process by an agent with ``settings``.

    Of what is open only standard input, output, error and ``settings.result_fd`` are passed on. Call it from the
    main thread when the worker has ended; all other threads end with the call.

    Raises:
        OSError: the interpreter cannot be executed. Then nothing has changed but the signals, which are blocked.
    """
    logs.end()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= _FIRST_PRIVATE_FD:
            _pass_on(fd, fd == settings.result_fd)
    os.execve(sys.executable, settings.agent_command, settings.environment())


def _pass_on(fd: int, inheritable: bool) -> None:
    try:
        os.set_inheritable(fd, inheritable)
    except OSError:
        return  # it was that of the listing, or another thread has closed it: so there is nothing to pass on
