"""The standard input of workers: the launcher's, as with ``deepspeed`` and ``torchrun``.

All workers share it, like the processes of those launchers: what one has read no other one gets. What a pipe or a
terminal has given is gone; a file can be read again.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .settings import AgentSettings


def inherited() -> int | None:
    """The ``stdin`` for ``subprocess.Popen`` of a process that is to share this one's standard input.

    That process gets none where this one has none, or is in the background of the terminal that it is. A process of
    another session is not stopped there when it reads (SIGTTIN), but would take what is typed for others.
    """
    if not _is_there():
        return subprocess.DEVNULL
    try:
        foreground = os.tcgetpgrp(0)
    except OSError:  # no terminal; or one of another session, whose process has let this one have it
        return None
    return None if foreground == os.getpgrp() else subprocess.DEVNULL


@contextmanager
def of_worker(settings: AgentSettings) -> Iterator[int | None]:
    """The same for the worker of an agent, open in the body.

    A worker may come after others that have read: it joins, the job has started again, or the command line runs for
    the second time under another launcher. That one gets a file from its beginning.
    """
    later = settings.joins or bool(settings.generation) or settings.launched
    if not (later and _is_there() and stat.S_ISREG(os.fstat(0).st_mode)):
        yield inherited()
        return
    try:
        file = os.open("/proc/self/fd/0", os.O_RDONLY)
    except OSError:  # this user may not
        yield inherited()
        return
    try:
        yield file
    finally:
        os.close(file)


def _is_there() -> bool:
    """Whether descriptor 0 is this process's standard input: where that was closed, another file may have got it."""
    try:
        return os.get_inheritable(0)
    except OSError:
        return False
