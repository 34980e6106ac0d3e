"""The leak gate: what a test has started is gone when it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from .processes import servers


def _state() -> tuple[set[threading.Thread], set[int], int]:
    me = psutil.Process()
    pids, sockets = servers()
    children = {child.pid for child in me.children(recursive=True)} - pids
    return set(threading.enumerate()), children, len(me.net_connections(kind="all")) - sockets


@contextmanager
def no_leaks(timeout_s: float = 20.0) -> Iterator[None]:
    """Fail unless threads, child processes and sockets at the end are no more than at the start.

    gRPC ends its threads in the background, so the end is waited for, up to ``timeout_s`` seconds.
    """
    threads, children, sockets = _state()
    yield
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        now_threads, now_children, now_sockets = _state()
        left = (now_threads - threads, now_children - children, max(0, now_sockets - sockets))
        if not any(left):
            return
        gc.collect()  # aiohttp's server leaves a connection that comes while it ends to the collector
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: threads {left[0]}, processes {left[1]}, {left[2]} sockets")
        pause.wait(0.02)
