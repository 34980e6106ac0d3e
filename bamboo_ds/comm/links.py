"""One epoch of this member: the messages that go and arrive in it.

Sends are eager: a message is out when the kernel has taken it. What arrives is sorted by key.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from ..devices.staging import Copy, StreamMark
from ..errors import EpochChanged, PeerLost, ProtocolError
from . import wire
from .connection import Connection
from .hub import Hub
from .lifetime import Lifetime
from .standing import ASK_AFTER_S, Stand, Standings
from .wire.payloads import Payload, PeerMessage, Staged, copied

#: What a message raises that is not of the form that its service reads.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)

#: Takes messages of certain keys as they arrive, on whichever thread has read them.
Service = Callable[[PeerMessage], None]


class Ticket(NamedTuple):
    """A frame that was sent."""

    connection: Connection
    number: int

    @property
    def written(self) -> bool:
        """Whether its memory may be changed."""
        return self.connection.has_written(self.number)


class Links:
    """This member's messages to and from the others in one epoch.

    Args:
        life: the epoch's.
        hub: this worker's connections.
        members: all of the epoch, in the plan's order, and ``member``: this one.
        places: the address of each.
        stand: tells where this member's script is; see :class:`.standing.Standings`.

    Attributes:
        life: the epoch's, and its number.
        member: this one.
        changed: the hub's.
        heard: members of which something has arrived in the epoch.
        waiting: the number of threads that wait, guarded by ``changed``.
        services: by key, what takes messages instead of the inbox.
    """

    def __init__(
        self,
        life: Lifetime,
        hub: Hub,
        members: Sequence[str],
        member: str,
        places: Sequence[str],
        stand: Callable[[], Stand | None] = lambda: None,
    ) -> None:
        self.life, self.number = life, life.number
        self.changed: threading.Condition = hub.changed
        self.waiting = 0
        self._hub, self._members, self.member = hub, members, member
        self._places = {**dict.fromkeys(members, ""), **dict(zip(members, places, strict=False))}
        self._failures: dict[str, EpochChanged] = {}
        self.heard: set[str] = set()
        self._inbox: dict[bytes, deque[PeerMessage]] = {}
        self._standings = Standings(stand)
        life.call_on_abort(self._leave)
        self.services: dict[bytes, Service] = {
            Standings.ASK: self._answer,
            Standings.ANSWER: self._hear,
        }

    def enter(self) -> None:
        """Takes what arrives for this epoch from now on."""
        self._hub.enter(self, self._members)

    # -- messages ----------------------------------------------------------------------------------------
    def deliver(self, key: bytes, message: PeerMessage) -> None:
        """Puts a message into the inbox (of this member's own roles, too)."""
        if self.life.aborted is not None:
            return
        with self.changed:
            self.heard.add(message.source)
            service = self.services.get(key)
            if service is not None:
                try:
                    service(message)
                except _NONSENSE as error:
                    raise ProtocolError(f"nonsense for {key!r}: {type(error).__name__}: {error}") from error
            else:
                self._inbox.setdefault(key, deque()).append(message)
            self.changed.notify_all()

    def left(self, member: str, over: bool) -> None:
        """See :class:`.hub.Receiver`."""
        self._note_failure(member, EpochChanged(f"member {member} has left epoch {self.number}"))
        if over:
            self.life.abort(f"it is over, says {member}")

    def failed(self, member: str, reason: str) -> None:
        """See :class:`.hub.Receiver`. Whatever the control plane makes of it, this epoch is over."""
        if member not in self._places or member in self._failures or self.life.aborted is not None:
            return
        failure = self.life.lost(member, reason)
        self._note_failure(member, failure)
        self.life.abort(str(failure), failure)

    def _note_failure(self, member: str, failure: EpochChanged) -> None:
        with self.changed:
            if member in self._places:
                self._failures.setdefault(member, failure)
            self.changed.notify_all()

    def _leave(self) -> None:
        """Wakes those that wait here, and tells the others."""
        with self.changed:
            self.changed.notify_all()
        self._hub.leave(self.number, not self.life.orderly)

    def keep(self, key: bytes, sequence: int, payload: Payload | Staged) -> None:
        """Delivers a message of this member to itself, with a copy of ``payload``."""
        self.deliver(key, PeerMessage(self.member, sequence, *copied(payload), arrival=time.monotonic()))

    def drop(self, key: bytes) -> None:
        """Nothing more comes for ``key``. Hold :attr:`changed`."""
        del self._inbox[key]

    def inbox(self, key: bytes, newest: int | None = None) -> deque[PeerMessage]:
        """The messages for ``key``, oldest first, at most the ``newest``. Hold :attr:`changed` to look or take."""
        messages = self._inbox.setdefault(key, deque(maxlen=newest))
        if messages.maxlen != newest:  # some came before it was known how many are wanted
            messages = self._inbox[key] = deque(messages, newest)
        return messages

    def send(self, member: str, key: bytes, sequence: int, payload: Payload | Staged, yields: bool = False) -> Ticket:
        """Sends a message to another member; returns at once.

        Args:
            yields: it lets later ones pass that do not; see :meth:`.connection.Connection.send`.

        Raises:
            EpochChanged, PeerLost: the epoch, or the connection, has ended.
            TypeError: ``payload`` cannot be sent.
        """
        copy = payload.copy if isinstance(payload, Staged) else None
        return self._send(member, wire.encode(key, sequence, payload, self.number), copy, yields)

    def _send(self, member: str, frame: wire.Segments, copy: Copy | None = None, yields: bool = False) -> Ticket:
        self.life.check("send")
        self._check(member)
        try:
            connection = self._hub.reach(member, self._places[member])
        except OSError as error:  # no descriptor is left, say
            self.failed(member, f"connecting failed: {error}")
            self.life.check("send")
            self._check(member)
            raise
        if copy is not None:
            self._hub.flush_after(copy, connection)
        return Ticket(connection, connection.send(self.number, frame, copy, yields))

    def _check(self, member: str) -> None:
        """Raises the error that nothing more will come from ``member``, if so."""
        failure = self._failures.get(member)
        if failure is not None:
            raise _again(failure)

    def rate(self, member: str) -> float | None:
        """See :attr:`.connection.Connection.rate`."""
        connection = self._hub.known(member)
        return None if connection is None else connection.rate

    # -- waiting -----------------------------------------------------------------------------------------
    def notify_at(self, mark: StreamMark) -> None:
        """Has those that wait look again once ``mark`` is reached."""
        self._hub.notify_at(mark)

    def failure(self, member: str) -> EpochChanged | None:
        """The reason why nothing more will come from ``member``, or ``None``."""
        return self._failures.get(member)

    def await_failure(self, members: Iterable[str], timeout: float) -> EpochChanged | None:
        """The reason why the first failed one of ``members`` is gone; waits up to ``timeout`` seconds."""
        asked = tuple(members)

        def first() -> EpochChanged | None:
            return next((found for member in asked if (found := self._failures.get(member)) is not None), None)

        with self.changed:
            failure = self.changed.wait_for(first, timeout)
        return None if failure is None else _again(failure)

    def wait(
        self, operation: str, ready: Callable[[], bool], members: Iterable[str], timeout: timedelta | None = None
    ) -> bool:
        """Waits until ``ready()``; the caller holds :attr:`changed`.

        Args:
            operation: for messages.
            members: that it depends on.
            timeout: of the wait.

        Returns:
            Whether it is ready; ``False`` after ``timeout``.

        Raises:
            EpochChanged: the epoch was aborted, or one of ``members`` left it.
            PeerLost: the connection to one of ``members`` broke.
            CallsDiffer: it would not end, since another member's script makes other calls.
        """
        others = [member for member in members if member in self._places and member != self.member]
        failures = self._failures

        def over() -> bool:
            ended = self.life.aborted is not None or self._standings.difference is not None
            return ended or ready() or (bool(failures) and any(member in failures for member in others))

        if not over():
            self.waiting += 1
            try:
                self._await(over, others, math.inf if timeout is None else timeout.total_seconds())
            finally:
                self.waiting -= 1
        self.life.check(operation)
        if ready():
            return True
        self._standings.check()
        for member in others:
            self._check(member)
        return False

    def _await(self, over: Callable[[], bool], members: Sequence[str], seconds: float) -> None:
        """Waits until ``over()``; after a while, and then more and more rarely, asks ``members`` where they are."""
        left, pause = seconds, ASK_AFTER_S
        while not self._hub.wait_for(over, members, min(left, pause)) and left > pause:
            left, pause = left - pause, 2 * pause
            for member in members:
                self.tell(Standings.ASK, member, self._standings.tell())

    def tell(self, key: bytes, member: str, payload: Payload) -> None:
        """Sends a message, unless that is not possible any more."""
        with suppress(EpochChanged):  # found by the wait itself
            self.send(member, key, 0, payload)

    def _answer(self, asking: PeerMessage) -> None:
        self.tell(Standings.ANSWER, asking.source, self._standings.tell())
        self._hear(asking)

    def _hear(self, told: PeerMessage) -> None:
        standing = told.payload()
        if standing is not None:
            self._standings.hear(standing)

    def flush(self) -> None:
        """Waits until every member has read everything that was sent to it.

        Raises:
            EpochChanged, PeerLost: a member has not, and never will.
        """
        self.life.check("flush")
        unsure: list[tuple[str, Connection, int]] = []
        for member in self._places:
            connection = self._hub.known(member)
            if connection is not None and connection.sent > connection.asked:
                self._check(member)
                sent = connection.sent + 1
                self._send(member, wire.control(wire.FLUSH, sent, self.number), yields=True)  # it passes nothing
                connection.asked = sent  # not before: the next epoch would wait for the answer
            if connection is not None and connection.asked > connection.confirmed:
                unsure.append((member, connection, connection.asked))
        with self.changed:
            for member, connection, number in unsure:
                self.wait("flush", partial(connection.has_confirmed, number), [member])

    # -- end ---------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Forgets what has arrived; the epoch has been aborted."""
        self._inbox.clear()
        self.services.clear()


def _again(failure: EpochChanged) -> EpochChanged:
    """A fresh copy of a thread's failure, to be raised in another."""
    again = PeerLost(str(failure), failure.member) if isinstance(failure, PeerLost) else EpochChanged(str(failure))
    again.__cause__ = failure
    return again
