"""Addresses of workers for other workers. Without torch, which agents do not load."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from . import sockets


@dataclass(frozen=True)
class Place:
    """The address of a worker for others.

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
    """A listening socket, and the token that callers must know.

    Attributes:
        socket: bound to the advertised address.
        token: random.
    """

    socket: socket.socket
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)

    @classmethod
    def open(cls, address: str) -> Listener:
        """A listener at a free port of ``address``."""
        return cls(sockets.listen(address))

    @property
    def place(self) -> Place:
        """The place at which others reach it."""
        return Place(*sockets.endpoint(self.socket.getsockname()), self.token)

    @classmethod
    def inherited(cls, text: str) -> Listener:
        """The listener that :meth:`handed_on` tells of; not to be inherited any further."""
        descriptor, token = text.split(" ")
        listener = socket.socket(fileno=int(descriptor))
        listener.set_inheritable(False)
        return cls(listener, token)

    def handed_on(self) -> str:
        """Descriptor and token, for a child process that inherits the socket."""
        return f"{self.socket.fileno()} {self.token}"
