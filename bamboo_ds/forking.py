"""Processes that a worker's script forks, such as those of a DataLoader, have no part in the job.

They get copies of the worker's sockets. While one of them lives nobody would see by a connection that the worker has
ended, a port of the worker's would seem to be served, and what it does to its copy happens to the worker's connection.
"""

from __future__ import annotations

import gc
import os
import socket
import weakref

_ours: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def only_here(opened: socket.socket) -> socket.socket:
    """Have every process that this one forks close its copy of a socket; returns it."""
    _ours.add(opened)
    return opened


def _leave_to_parent() -> None:
    for opened in list(_ours):
        opened.close()
    # gloo's threads are not here. What gloo has made and a collector finds would wait for them for ever.
    gc.freeze()


os.register_at_fork(after_in_child=_leave_to_parent)
