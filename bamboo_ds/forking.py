"""Processes that a worker's script forks, such as those of a DataLoader, have no part in the job.

They get copies of the worker's sockets. While one of them lives nobody would see by a connection that the worker has
ended, a port of the worker's would seem to be served, and what it does to its copy happens to the worker's connection.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import weakref

logger = logging.getLogger("bamboo_ds")

#: Seconds for a child to come out of the interpreter's own part of a fork, which takes some milliseconds.
TIMEOUT_S = 20.0

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_fork = os.fork


def only_here(opened: socket.socket) -> socket.socket:
    """Has every process that this one forks close its copy of a socket; returns it."""
    _ours.add(opened)
    return opened


def _leave_to_parent() -> None:
    for opened in list(_ours):
        opened.close()
    # gloo's threads are not here. What gloo has made and a collector finds would wait for them for ever.
    gc.freeze()


os.register_at_fork(after_in_child=_leave_to_parent)


def make_forks_sure() -> None:
    """Has this process's ``os.fork`` be :func:`sure_fork` where the interpreter needs it. Idempotent.

    CPython before 3.12.1 has a lock that other threads hold for a microsecond without holding the interpreter's, when
    they call Python for the first time. A child that is forked just then waits for it for ever (gh-112275): gloo's
    threads do so after collectives, and a DataLoader waits for ever for a process that hangs.
    """
    if sys.version_info < (3, 12, 1):
        os.fork = sure_fork


def sure_fork() -> int:
    """``os.fork``, but a child that hangs before it has come to run any code is killed, and another one forked."""
    while True:
        reading, writing = os.pipe()
        try:
            pid = _fork()
            if pid == 0:
                os.write(writing, b"\0")
                return 0
            os.close(writing)
            writing = -1
            if _readable(reading):
                return pid
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
        logger.warning("process %d hangs since it was forked (CPython gh-112275): beginning again", pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(TIMEOUT_S * 1000))  # also when the other end is closed
