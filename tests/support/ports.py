"""Ports for servers that are started later, or again."""

from __future__ import annotations

import contextlib
import random
import socket

_issued: set[int] = set()


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any; another one each time."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # below Linux's range of ephemeral ports
        if port in _issued:
            continue
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            _issued.add(port)
            return port
