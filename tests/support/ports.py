"""Ports for servers that are started later, or again."""

from __future__ import annotations

import contextlib
import os
import random
import socket

#: Below Linux's range of ephemeral ports; each process of pytest-xdist has a part of it, so that none takes what
#: another has been given and does not listen at yet.
_FIRST, _SIZE, _PARTS = 20000, 1500, 8
_issued: set[int] = set()


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any; another one each time."""
    part = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
    while True:
        port = _FIRST + part * _SIZE + random.SystemRandom().randrange(_SIZE)
        if port in _issued:
            continue
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            _issued.add(port)
            return port
