"""Members of one process, each with a hub of its own, that reach each other over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from bamboo_ds.comm.hub import Hub
from bamboo_ds.comm.places import Listener
from bamboo_ds.comm.wire import payloads
from bamboo_ds.secret import NONE, JobSecret


class Hubs(dict[str, Hub]):
    """The hub of each of ``names``, on the host of ``hosts``; those of one share memory."""

    def __init__(
        self,
        names: Sequence[str],
        secret: JobSecret = NONE,
        silence_s: float = 10.0,
        hosts: Sequence[str | None] | None = None,
    ) -> None:
        places = dict(zip(names, hosts or [None] * len(names), strict=True))
        super().__init__(
            {name: Hub(name, Listener.open("127.0.0.1"), secret, silence_s, host) for name, host in places.items()}
        )

    @property
    def places(self) -> tuple[str, ...]:
        """Of all, in their order."""
        return tuple(hub.place for hub in self.values())

    def close(self) -> None:
        """End all."""
        for hub in self.values():
            hub.close()


class Inbox:
    """Takes what arrives at ``hub`` for one epoch; enters it among ``members``.

    Attributes:
        got: source, key and sequence of every message, in order.
        gone: members that have left the epoch, and whether in the middle of it.
        lost: members whose connection has ended, and why.
    """

    def __init__(self, hub: Hub, number: int, members: Collection[str] = ("a", "b")) -> None:
        self.number, self._hub = number, hub
        self.got: list[tuple[str, bytes, int]] = []
        self.payloads: list[payloads.Payload] = []
        self.gone: list[tuple[str, bool]] = []
        self.lost: list[tuple[str, str]] = []
        hub.enter(self, members)

    def deliver(self, key: bytes, message: payloads.PeerMessage) -> None:
        self.got.append((message.source, key, message.sequence))
        self.payloads.append(message.payload())

    def left(self, member: str, over: bool) -> None:
        self._note(self.gone, (member, over))

    def failed(self, member: str, reason: str) -> None:
        self._note(self.lost, (member, reason))

    def _note(self, found: list, what: tuple) -> None:  # type: ignore[type-arg]
        with self._hub.changed:
            found.append(what)
            self._hub.changed.notify_all()

    def wait(self, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Until ``ready()``; fails after ``timeout_s`` seconds."""
        with self._hub.changed:
            assert self._hub.changed.wait_for(ready, timeout_s), (self.got, self.gone, self.lost)
