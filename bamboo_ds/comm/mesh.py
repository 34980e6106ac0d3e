"""Opens the TCP connections between all members of an epoch: each calls those before it in the plan."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta

from ..secret import JobSecret
from . import sockets
from .handshake import Door, Handshake, Talk, calling, hosting
from .lifetime import Lifetime

_PURPOSE = "link"


class Mesh:
    """This member's part in connecting all members.

    Args:
        life: the epoch's.
        members: all of them, in the plan's order, and ``member``: this one.
        secret: the job's.
        silence_s: seconds without any answer of a member's host after which its connection fails.
    """

    def __init__(
        self, life: Lifetime, members: Sequence[str], member: str, secret: JobSecret, silence_s: float
    ) -> None:
        self._life, self._members, self._me = life, members, member
        self._secret, self._silence_s = secret, silence_s
        self._listener: socket.socket | None = None

    def listen(self, host: str) -> str:
        """Open the listening socket at ``host``; returns the peer address that the others must know, as text."""
        listener = self._listener = self._life.own(sockets.listen(host))
        host, port = sockets.endpoint(listener.getsockname())
        return f"{host} {port}"

    def connect(
        self, addresses: Mapping[str, str], timeout: timedelta
    ) -> Generator[tuple[str, socket.socket], None, None]:
        """Every other member with its connection, once it has proven itself; collective.

        Args:
            addresses: all members' results of :meth:`listen`.

        Raises:
            EpochChanged: aborted meanwhile.
            PeerLost: a member refused, or whoever answers in its place is not that member.
            TimeoutError: somebody did not come within ``timeout``.
        """
        own = self._members.index(self._me)
        listener = self._listener
        assert listener is not None
        listener.setblocking(False)
        missing = set(self._members[own + 1 :])
        called: dict[str, Handshake] = {}
        deadline = time.monotonic() + timeout.total_seconds()

        def host() -> Talk:
            return hosting(self._secret, _PURPOSE, self._life.number, self._me, missing.__contains__)

        with selectors.DefaultSelector() as selector:
            door = Door(selector, listener, host, len(missing))
            try:
                for member in self._members[:own]:
                    called[member] = self._call(member, addresses[member], timeout)
                    selector.register(called[member].connection, selectors.EVENT_READ, member)
                while missing or called:
                    self._life.check("connecting")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        late = ", ".join(sorted({*missing, *called}))
                        raise TimeoutError(f"{late} did not connect within {timeout}")
                    grace = door.grace()
                    for key, _ in selector.select(left if grace is None else min(left, grace)):
                        ready: socket.socket = key.fileobj  # type: ignore[assignment]
                        if key.data is not door:
                            if self._answered(key.data, called[key.data]):
                                selector.unregister(ready)
                                yield key.data, self._ready(called.pop(key.data).connection)
                        elif (found := door.attend(ready)) is not None:
                            missing.discard(found[0])
                            yield found[0], self._ready(self._life.own(found[1]))
            finally:
                door.close()
                listener.close()

    def _call(self, member: str, address: str, timeout: timedelta) -> Handshake:
        """Connect to ``member`` and begin to prove ourselves."""
        host, port = address.split(" ")
        family, name = sockets.resolve(host, int(port))
        connection = self._life.own(socket.socket(family, socket.SOCK_STREAM))
        try:
            connection.settimeout(min(timeout.total_seconds(), self._silence_s))
            connection.connect(name)
            connection.setblocking(False)
            return Handshake(connection, calling(self._secret, _PURPOSE, self._life.number, self._me, member))
        except OSError as error:
            connection.close()
            self._life.check("connecting")
            raise self._life.lost(member, f"connecting to {host}:{port} failed: {error}") from error

    def _answered(self, member: str, handshake: Handshake) -> bool:
        """Whether ``member`` has proven itself to us."""
        try:
            return handshake.advance() is not None
        except OSError as error:
            self._life.check("connecting")
            raise self._life.lost(member, f"connecting failed: {error}") from error

    def _ready(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.watch_silence(connection, self._silence_s)
        return connection
