"""Where workers are reached by other workers. Without torch, which agents do not load."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from . import sockets


@dataclass(frozen=True)
class Place:
    """Where a worker is reached by others.

    Attributes:
        host, port: of its listener.
        token: what callers must know; see :mod:`.handshake`.
    """

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """The place that :func:`str` has written."""
        host, port, token = text.split(" ")
        return cls(host, int(port), token)


@dataclass(frozen=True)
class Listener:
    """A listening socket, and what callers must know.

    Attributes:
        socket: bound to the advertised address.
        token: random.
    """

    socket: socket.socket
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)

    @classmethod
    def open(cls, address: str) -> Listener:
        """One at a free port of ``address``."""
        return cls(sockets.listen(address))

    @property
    def place(self) -> Place:
        """Where others reach it."""
        return Place(*sockets.endpoint(self.socket.getsockname()), self.token)

    @classmethod
    def inherited(cls, text: str) -> Listener:
        """The one that :meth:`handed_on` tells of; not to be inherited any further."""
        descriptor, token = text.split(" ")
        listener = socket.socket(fileno=int(descriptor))
        listener.set_inheritable(False)
        return cls(listener, token)

    def handed_on(self) -> str:
        """What a child process that inherits the socket must know."""
        return f"{self.socket.fileno()} {self.token}"
