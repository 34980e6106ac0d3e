"""The links between all members of an epoch: the messages that go and arrive over their TCP connections.

Sends are eager: a message is out when the kernel has taken it. What arrives is sorted by key.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from ..errors import EpochChanged, NotMet
from . import wire
from .lifetime import Lifetime
from .peer import Peer, PeerMessage
from .standing import ASK_AFTER_S, Stand, Standings


class Links:
    """The connections of this member in one epoch.

    Args:
        life: the epoch's.
        members: all of them, in the plan's order, and ``member``: this one.
        stand: tells where this member's script is; see :class:`.standing.Standings`.

    Attributes:
        life: the epoch's.
        changed: notified whenever a message arrives, something was written, or a peer or the epoch ended.
        waiting: how many threads wait, guarded by ``changed``.
    """

    def __init__(
        self, life: Lifetime, members: Sequence[str], member: str, stand: Callable[[], Stand | None] = lambda: None
    ) -> None:
        self.life = life
        self.changed = threading.Condition()
        self.waiting = 0
        self._members, self._me = members, member
        self._peers: dict[str, Peer] = {}
        self._inbox: dict[bytes, deque[PeerMessage]] = {}
        self._rounds = 0
        self._standings = Standings(stand)
        life.call_on_abort(self._leave)

    def add(self, member: str, connection: socket.socket) -> None:
        """Take a connection into service."""
        peer = self._peers[member] = Peer(self.life, member, connection, self.changed, self.deliver)
        peer.start()

    # -- messages ----------------------------------------------------------------------------------------
    def deliver(self, key: bytes, message: PeerMessage) -> None:
        """Put a message into the inbox (of this member's own roles, too)."""
        if key in (Standings.ASK, Standings.ANSWER):
            self._hear(key, message)
            return
        with self.changed:
            self._inbox.setdefault(key, deque()).append(message)
            self.changed.notify_all()

    def message(self, sequence: int, structure: int, tensors: list[wire.WireTensor]) -> PeerMessage:
        """A message of this member to itself, for :meth:`deliver`."""
        return PeerMessage(self._me, sequence, structure, tensors, time.monotonic())

    def inbox(self, key: bytes) -> deque[PeerMessage]:
        """The messages for ``key``, oldest first. Hold :attr:`changed` to look or take."""
        return self._inbox.setdefault(key, deque())

    def send(self, member: str, pieces: list[memoryview]) -> int:
        """Send a frame to another member; returns at once.

        Returns:
            A ticket for :meth:`written`.

        Raises:
            EpochChanged, PeerLost: the epoch, or the connection, has ended.
        """
        self.life.check("send")
        peer = self._peers[member]
        peer.check()
        with self.changed:
            peer.sent += 1
        return peer.write(pieces)

    def written(self, member: str, ticket: int) -> bool:
        """Whether a frame is out. Hold :attr:`changed`."""
        return self._peers[member].written >= ticket

    # -- waiting -----------------------------------------------------------------------------------------
    def failure(self, member: str) -> EpochChanged | None:
        """Why nothing more will come from ``member``, or ``None``."""
        peer = self._peers.get(member)
        return None if peer is None else peer.failure

    def await_failure(self, members: Iterable[str], timeout: float) -> EpochChanged | None:
        """Why the first of ``members`` whose connection has ended is gone; waits up to ``timeout`` seconds."""
        peers = self._known(members)

        def first() -> EpochChanged | None:
            return next((peer.failure for peer in peers if peer.failure is not None), None)

        with self.changed:
            failure = self.changed.wait_for(first, timeout)
        return None if failure is None else Peer.again(failure)

    def _known(self, members: Iterable[str]) -> list[Peer]:
        return [peer for member in members if (peer := self._peers.get(member)) is not None]

    def wait(
        self, operation: str, ready: Callable[[], bool], members: Iterable[str], timeout: timedelta | None = None
    ) -> bool:
        """Wait until ``ready()``; the caller holds :attr:`changed`.

        Args:
            operation: for messages.
            members: on whom it depends.
            timeout: how long.

        Returns:
            Whether it is ready; ``False`` after ``timeout``.

        Raises:
            EpochChanged: the epoch was aborted, or one of ``members`` left it.
            PeerLost: the connection to one of ``members`` broke.
            CallsDiffer: it would not end, since another member's script makes other calls.
        """
        peers = self._known(members)

        def over() -> bool:
            ended = self.life.aborted is not None or self._standings.difference is not None
            return ended or ready() or any(peer.failure is not None for peer in peers)

        if not over():
            self.waiting += 1
            try:
                self._await(over, math.inf if timeout is None else timeout.total_seconds())
            finally:
                self.waiting -= 1
        self.life.check(operation)
        if ready():
            return True
        self._standings.check()
        for peer in peers:
            peer.check()
        return False

    def _await(self, over: Callable[[], bool], seconds: float) -> None:
        """Wait until ``over()``; after a while, and then more and more rarely, ask all others where they are."""
        left, pause = seconds, ASK_AFTER_S
        while not self.changed.wait_for(over, min(left, pause)) and left > pause:
            left, pause = left - pause, 2 * pause
            self.changed.release()  # a connection takes it while it is being written to
            try:
                for member in self._peers:
                    self._tell(Standings.ASK, member)
            finally:
                self.changed.acquire()

    def _tell(self, key: bytes, member: str) -> None:
        with suppress(EpochChanged):  # found by the wait itself
            self.send(member, wire.encode(key, 0, self._standings.tell()))

    def _hear(self, key: bytes, message: PeerMessage) -> None:
        if key == Standings.ASK:
            self._tell(Standings.ANSWER, message.source)
        self._standings.hear(message.payload())
        with self.changed:
            self.changed.notify_all()

    def flush(self) -> None:
        """Wait until every peer has read everything that was sent to it.

        Raises:
            EpochChanged, PeerLost: somebody has not, and never will.
        """
        self.life.check("flush")
        unsure = [peer for peer in self._peers.values() if peer.sent > peer.confirmed]
        for peer in unsure:
            peer.check()
            peer.write([wire.control(wire.FLUSH, peer.sent)])
        with self.changed:
            for peer in unsure:
                self.wait("flush", partial(_all_read, peer), [peer.member])

    def all_gather(self, operation: str, payload: wire.Payload) -> dict[str, wire.Payload]:
        """Every member's ``payload``, by member in the plan's order. Collective.

        Raises:
            EpochChanged, PeerLost: the epoch ended, or a member is gone.
        """
        self._rounds += 1
        key = f"round/{self._rounds}".encode()
        for member in self._peers:
            self.send(member, wire.encode(key, 0, payload))
        own = self.message(0, *wire.copied_tensors(payload))
        found: dict[str, wire.Payload] = {own.source: own.payload()}
        with self.changed:
            inbox = self.inbox(key)
            for member in self._peers:
                self.wait(operation, partial(_has_from, inbox, member), [member])
            found |= {message.source: message.payload() for message in inbox}
            del self._inbox[key]
        return {member: found[member] for member in self._members}

    def meet(self, operation: str, key: bytes, members: Sequence[str], timeout: timedelta) -> None:
        """Wait until ``members`` meet this one at ``key``, which is used once in an epoch.

        Raises:
            EpochChanged, PeerLost: the epoch ended, or one of ``members`` is gone and had not come.
            NotMet: some of them have not come within the timeout.
        """
        for member in members:
            self.send(member, wire.encode(key, 0, None))
        deadline = time.monotonic() + timeout.total_seconds()
        with self.changed:
            inbox = self.inbox(key)
            for member in members:
                left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
                if not self.wait(operation, partial(_has_from, inbox, member), [member], left):
                    missing = [member for member in members if not _has_from(inbox, member)]
                    raise NotMet(f"Timed out waiting {timeout} for {', '.join(missing)} in {operation}", missing)
            del self._inbox[key]

    # -- end ---------------------------------------------------------------------------------------------
    def _leave(self) -> None:
        """Say farewell and wake everybody who waits, before the connections are shut down. From any thread, once."""
        for peer in list(self._peers.values()):
            peer.leave()
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Join the threads; the connections have been shut down."""
        for peer in self._peers.values():
            peer.join()
        self._peers.clear()
        self._inbox.clear()


def _all_read(peer: Peer) -> bool:
    return peer.confirmed >= peer.sent


def _has_from(inbox: Iterable[PeerMessage], member: str) -> bool:
    return any(message.source == member for message in inbox)
