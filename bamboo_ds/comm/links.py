"""One epoch of this member: the messages that go and arrive in it, and what its members do all together.

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
from ..errors import EpochChanged, NotMet, PeerLost, ProtocolError
from . import wire
from .connection import Connection
from .hub import Hub
from .lifetime import Lifetime
from .standing import ASK_AFTER_S, Stand, Standings
from .tree import Tree
from .wire import PeerMessage

#: What a member tells those who might wait for it as it enters the epoch.
_ENTERED = b"entered"
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
    """What this member has of the others in one epoch.

    Args:
        life: the epoch's.
        hub: this worker's connections.
        members: all of the epoch, in the plan's order, and ``member``: this one.
        places: where each is reached.
        timeout: for all to come to what they do together first; ``None``: any.
        stand: tells where this member's script is; see :class:`.standing.Standings`.
        awaited: called with members that have not entered the epoch, and for how many seconds they have been waited
            for: after ``tell_after_s``, then after twice as long each time.

    Attributes:
        life: the epoch's, and its number.
        member: this one.
        changed: the hub's.
        waiting: how many threads wait, guarded by ``changed``.
        services: by key, what takes messages instead of the inbox.
    """

    def __init__(
        self,
        life: Lifetime,
        hub: Hub,
        members: Sequence[str],
        member: str,
        places: Sequence[str],
        timeout: timedelta | None = None,
        stand: Callable[[], Stand | None] = lambda: None,
        awaited: Callable[[Sequence[str], float], None] = lambda members, seconds: None,
        tell_after_s: float = math.inf,
    ) -> None:
        self.life, self.number = life, life.number
        self.changed: threading.Condition = hub.changed
        self.waiting = 0
        self._hub, self._members, self.member = hub, members, member
        self._places = {**dict.fromkeys(members, ""), **dict(zip(members, places, strict=False))}
        self._timeout, self._awaited, self._tell_after_s = timeout, awaited, tell_after_s
        self._tree = Tree(members, member)
        self._failures: dict[str, EpochChanged] = {}
        self._heard: set[str] = set()  # those that have entered the epoch
        self._inbox: dict[bytes, deque[PeerMessage]] = {}
        self._rounds = 0
        self._standings = Standings(stand)
        life.call_on_abort(self._leave)
        self.services: dict[bytes, Service] = {
            _ENTERED: self._welcome,
            Standings.ASK: self._answer,
            Standings.ANSWER: self._hear,
        }

    def enter(self) -> None:
        """Have what arrives for this epoch from now on, and tell the tree's parent, which waits for this member."""
        self._hub.enter(self, self._members)
        if self._tree.parent is not None:
            self.send(self._tree.parent, _ENTERED, 0, None)

    # -- messages ----------------------------------------------------------------------------------------
    def deliver(self, key: bytes, message: PeerMessage) -> None:
        """Put a message into the inbox (of this member's own roles, too)."""
        if self.life.aborted is not None:
            return
        with self.changed:
            self._heard.add(message.source)
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
        """Wake those that wait here, and have the others know."""
        with self.changed:
            self.changed.notify_all()
        self._hub.leave(self.number, not self.life.orderly)

    def message(self, sequence: int, structure: int, tensors: list[wire.WireTensor]) -> PeerMessage:
        """A message of this member to itself, for :meth:`deliver`."""
        return PeerMessage(self.member, sequence, structure, tensors, time.monotonic())

    def inbox(self, key: bytes, newest: int | None = None) -> deque[PeerMessage]:
        """The messages for ``key``, oldest first, at most the ``newest``. Hold :attr:`changed` to look or take."""
        found = self._inbox.setdefault(key, deque(maxlen=newest))
        if found.maxlen != newest:  # some came before it was known how many are wanted
            found = self._inbox[key] = deque(found, newest)
        return found

    def send(
        self, member: str, key: bytes, sequence: int, payload: wire.Payload | wire.Staged, yields: bool = False
    ) -> Ticket:
        """Send a message to another member; returns at once.

        Args:
            yields: it lets later ones pass that do not; see :meth:`.connection.Connection.send`.

        Raises:
            EpochChanged, PeerLost: the epoch, or the connection, has ended.
            TypeError: ``payload`` cannot be sent.
        """
        copy = payload.copy if isinstance(payload, wire.Staged) else None
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
        """Raise why nothing more will come from ``member``, if so."""
        failure = self._failures.get(member)
        if failure is not None:
            raise _again(failure)

    def rate(self, member: str) -> float | None:
        """See :attr:`.connection.Connection.rate`."""
        connection = self._hub.known(member)
        return None if connection is None else connection.rate

    # -- waiting -----------------------------------------------------------------------------------------
    def notify_at(self, mark: StreamMark) -> None:
        """Have those that wait look again once ``mark`` is reached."""
        self._hub.notify_at(mark)

    def failure(self, member: str) -> EpochChanged | None:
        """Why nothing more will come from ``member``, or ``None``."""
        return self._failures.get(member)

    def await_failure(self, members: Iterable[str], timeout: float) -> EpochChanged | None:
        """Why the first of ``members`` that has failed is gone; waits up to ``timeout`` seconds."""
        asked = tuple(members)

        def first() -> EpochChanged | None:
            return next((found for member in asked if (found := self._failures.get(member)) is not None), None)

        with self.changed:
            failure = self.changed.wait_for(first, timeout)
        return None if failure is None else _again(failure)

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
        """Wait until ``over()``; after a while, and then more and more rarely, ask ``members`` where they are."""
        left, pause = seconds, ASK_AFTER_S
        while not self._hub.wait_for(over, members, min(left, pause)) and left > pause:
            left, pause = left - pause, 2 * pause
            for member in members:
                self._tell(Standings.ASK, member, self._standings.tell())

    def _tell(self, key: bytes, member: str, payload: wire.Payload) -> None:
        with suppress(EpochChanged):  # found by the wait itself
            self.send(member, key, 0, payload)

    def _welcome(self, entered: PeerMessage) -> None:
        """Children in the tree, whom their parent tells nothing else for now, know thereby that it has entered, too."""
        if entered.source in self._tree.children:
            self._tell(_ENTERED, entered.source, None)

    def _answer(self, asking: PeerMessage) -> None:
        self._tell(Standings.ANSWER, asking.source, self._standings.tell())
        self._hear(asking)

    def _hear(self, told: PeerMessage) -> None:
        if told.tensors:
            self._standings.hear(told.tensors[0].data)

    def flush(self) -> None:
        """Wait until every member has read everything that was sent to it.

        Raises:
            EpochChanged, PeerLost: somebody has not, and never will.
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

    # -- all together ------------------------------------------------------------------------------------
    def all_gather(
        self, operation: str, payload: wire.Payload, merge: Callable[[list[wire.Payload]], wire.Payload]
    ) -> wire.Payload:
        """What all members' ``payload`` are together, equal on all. Collective.

        The members are a tree: each merges its own with those of its children, and passes that on.

        Args:
            merge: of payloads, in the plan's order of whom they come from first.

        Raises:
            EpochChanged, PeerLost: the epoch ended, or a member is gone.
            NotMet: somebody has not come to the first time.
        """
        self._rounds += 1
        timeout = self._timeout if self._rounds == 1 else None
        return self._combine(operation, f"round/{self._rounds}".encode(), self._tree, payload, merge, timeout)

    def meet(self, operation: str, key: bytes, members: Sequence[str], timeout: timedelta, flat: bool = False) -> None:
        """Wait until ``members`` meet at ``key``, which is used once in an epoch.

        Args:
            members: this one and others, in an order that is equal on all.
            flat: the first one hears of all itself, and so can say who has not come.

        Raises:
            EpochChanged, PeerLost: the epoch ended, or one of ``members`` is gone and had not come.
            NotMet: some of them have not come within the timeout.
        """
        tree = Tree(members, self.member, len(members) if flat else None)
        self._combine(operation, key, tree, None, lambda _: None, timeout)

    def _combine(
        self,
        operation: str,
        key: bytes,
        tree: Tree,
        payload: wire.Payload,
        merge: Callable[[list[wire.Payload]], wire.Payload],
        timeout: timedelta | None,
    ) -> wire.Payload:
        up, down = key + b"/up", key + b"/down"
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if tree.children:
            found = self._collect(operation, up, tree, tree.children, deadline, timeout)
            payload = merge([payload, *found])
        if tree.parent is not None:
            self.send(tree.parent, up, 0, payload)
            (payload,) = self._collect(operation, down, tree, [tree.parent], deadline, timeout)
        for child in tree.children:
            self.send(child, down, 0, payload)
        return payload

    def _collect(
        self,
        operation: str,
        key: bytes,
        tree: Tree,
        members: Sequence[str],
        deadline: float | None,
        timeout: timedelta | None,
    ) -> list[wire.Payload]:
        """What each of ``members``, neighbours in ``tree``, sends for ``key``, in their order."""
        with self.changed:
            inbox = self.inbox(key)
            for member in members:
                missing = self._await_from(operation, inbox, member, members, deadline)
                if missing:
                    who = ", ".join(tree.told(each) for each in missing)
                    raise NotMet(f"Timed out waiting {timeout} in {operation} for {who}", missing)
            found = {message.source: message for message in inbox}
            del self._inbox[key]
        return [found[member].payload() for member in members]

    def _await_from(
        self, operation: str, inbox: deque[PeerMessage], member: str, members: Sequence[str], deadline: float | None
    ) -> list[str]:
        """Wait for ``member``'s message; those of ``members`` that have sent none, if it does not come in time.

        Tells, more and more rarely, who of them has not even entered the epoch.
        """
        begin, pause, ready = time.monotonic(), self._tell_after_s, partial(_has_from, inbox, member)
        while True:
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            seconds = left if member in self._heard else min(left, pause)
            limit = None if math.isinf(seconds) else timedelta(seconds=seconds)
            if self.wait(operation, ready, [member], limit):
                return []
            if seconds == left:
                return [other for other in members if not _has_from(inbox, other)]
            absent = [other for other in members if other not in self._heard]
            if absent:
                self._awaited(absent, time.monotonic() - begin)
            pause *= 2

    # -- end ---------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Forget what has arrived; the epoch has been aborted."""
        self._inbox.clear()
        self.services.clear()


def _again(failure: EpochChanged) -> EpochChanged:
    """A fresh copy of a thread's failure, to be raised in another."""
    again = PeerLost(str(failure), failure.member) if isinstance(failure, PeerLost) else EpochChanged(str(failure))
    again.__cause__ = failure
    return again


def _has_from(inbox: Iterable[PeerMessage], member: str) -> bool:
    return any(message.source == member for message in inbox)
