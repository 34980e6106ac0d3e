"""Pipeline transport: ordered streams of messages between roles."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..devices.accelerators import HOST
from ..devices.staging import StreamMark
from ..errors import EpochChanged, ProtocolError
from . import wire
from .epoch import Epoch
from .links import Ticket
from .session import Session
from .wire import Payload, PeerMessage, Staged

logger = logging.getLogger(__name__)

__all__ = ["Lane", "Payload", "Staged", "Transport"]

_TAGS = 1 << 24


@dataclass(frozen=True)
class Lane:
    """One directed stream of messages between two roles.

    Attributes:
        tag: unique among all lanes of the epoch, 0 <= tag < 2**24.
        source: member that sends.
        destination: member that receives; equal to ``source`` for a mailbox.
        name: for messages, e.g. ``"act (0,1)->(0,2)"``.
        newest: so many messages that have arrived are kept, and older ones dropped; ``None``: all.
        yields: its messages let those of other lanes to the same member pass.
    """

    tag: int
    source: str
    destination: str
    name: str
    newest: int | None = None
    yields: bool = False


class Transport:
    """Streams between the roles of one epoch, over the worker's connections.

    Sends are asynchronous; everything that arrives is read at once. Every blocking call
    raises ``EpochChanged`` when the session aborts, or a member on whom it waits has left the epoch, and
    ``PeerLost`` when one is gone. The methods are for one thread at a time, the main thread.
    """

    def __init__(self, epoch: Epoch, lanes: Sequence[Lane], device: torch.device = HOST) -> None:
        self._epoch, self._device = epoch, device
        self._links, self._life = epoch.links, epoch.life
        self._members = set(epoch.plan.members)
        self._closed = False
        self._incoming: dict[int, deque[PeerMessage]] = {}
        self._outgoing: set[int] = set()
        self._leaving: dict[int, deque[Ticket]] = {}  # by lane that yields
        generation = epoch.next_transport()
        self._prefix = f"lane/{generation}/"
        tags: set[int] = set()
        for lane in lanes:
            if not 0 <= lane.tag < _TAGS or lane.tag in tags:
                raise ValueError(f"lane {lane.name}: tag {lane.tag} is used twice or not in 0..{_TAGS - 1}")
            tags.add(lane.tag)
            for end in (lane.source, lane.destination):
                if end not in self._members:
                    raise ValueError(f"lane {lane.name}: {end} is no member of epoch {epoch.number}")
            if lane.source == epoch.member:
                self._outgoing.add(lane.tag)
            if lane.destination == epoch.member:
                with self._links.changed:
                    self._incoming[lane.tag] = self._links.inbox(self._key(lane), lane.newest)

    @classmethod
    def open(cls, session: Session, lanes: Sequence[Lane], device: torch.device = HOST) -> Transport:
        """Open the lanes in the session's current epoch. Local: members connect when they first have something to send.

        All members open their transports in the same order. What arrived before is not lost.

        Args:
            lanes: all lanes of the world, or a superset of those that concern this member.
            device: of this member; tensors that their senders have on theirs are received on it.

        Raises:
            EpochChanged: the epoch is aborted, or none is attached.
            ValueError: two lanes have one tag, or a lane names a member that is not in the plan.
        """
        return cls(session.current, lanes, device)

    def _key(self, lane: Lane) -> bytes:
        return f"{self._prefix}{lane.tag}".encode()

    # -- lanes -------------------------------------------------------------------------------------------
    def send(self, lane: Lane, sequence: int, payload: Payload | Staged) -> Payload | Staged:
        """Send ``payload`` as message ``sequence`` of ``lane``; returns at once.

        The tensors are detached. Contiguous host tensors are not copied and are kept until the kernel has
        taken them: they must not be changed until :meth:`drain`. Tensors of a device are not copied yet when this
        returns, and the same holds for them. (Other tensors, and payloads of mailboxes, are copied.)

        Returns:
            What can be sent again, and takes no memory of a device unless this member is the receiver.

        Raises:
            EpochChanged, PeerLost: see the class.
            ValueError: ``lane`` does not start at this member.
            TypeError: ``payload`` cannot be sent.
        """
        self._check("send", lane)
        if lane.tag not in self._outgoing:
            raise ValueError(f"lane {lane.name} does not start at member {self._epoch.member}")
        if lane.destination == self._epoch.member:
            kept, payload = payload, payload.payload() if isinstance(payload, Staged) else payload
            self._links.deliver(self._key(lane), self._links.message(sequence, *wire.copied_tensors(payload)))
            return kept
        if not isinstance(payload, Staged):
            payload = wire.staged(payload) or payload
        ticket = self._links.send(lane.destination, self._key(lane), sequence, payload, lane.yields)
        if lane.yields:
            self.leaving(lane)
            self._leaving.setdefault(lane.tag, deque()).append(ticket)
        return payload

    def leaving(self, lane: Lane) -> int:
        """How many messages of ``lane``, which yields, are not out yet: their memory is in use."""
        tickets = self._leaving.get(lane.tag, deque())
        while tickets and tickets[0].written:
            tickets.popleft()
        return len(tickets)

    def put_aside(self, payload: Payload | Staged) -> Payload | Staged:
        """``payload`` in a form that takes no memory of a device, to be sent later."""
        return payload if isinstance(payload, Staged) else wire.staged(payload) or payload

    def drain(self) -> None:
        """Wait until all messages that this member sent are in the memory of the receiving processes.

        Raises:
            EpochChanged, PeerLost: see the class; also if any of them can no longer be delivered.
        """
        self._check("drain")
        self._links.flush()

    def recv(self, lane: Lane, sequence: int, timeout: timedelta | None = None, parked: bool = False) -> Payload:
        """The next message of ``lane``; blocks abortably.

        Args:
            lane: one that ends at this member.
            sequence: number of the message.
            timeout: how long to wait; ``None``: as long as it takes.
            parked: what its sender has on its device stays in host memory here.

        Raises:
            ProtocolError: the next message is not number ``sequence``; it is not consumed.
            TimeoutError: nothing arrived within ``timeout``; nothing is consumed.
            EpochChanged, PeerLost: see the class. What arrived before the peer was lost is delivered first.
            ValueError: ``lane`` does not end at this member.
        """
        messages = self._inbox(lane)
        operation = f"receive on lane {lane.name}"
        self._check(operation)
        with self._links.changed:
            if not self._links.wait(operation, lambda: bool(messages), [lane.source], timeout):
                raise TimeoutError(f"no message on lane {lane.name} from {lane.source} within {timeout}")
            if messages[0].sequence != sequence:
                raise ProtocolError(f"lane {lane.name}: expected message {sequence}, got {messages[0].sequence}")
            message = messages.popleft()
        return message.payload(self._device, parked)

    def take(self, lane: Lane, parked: bool = False) -> list[tuple[int, Payload]]:
        """What of ``lane`` has arrived, each with its number; also after an abort, until :meth:`close`.

        What the device has no room for stays in host memory.

        Args:
            lane: one that ends at this member.
            parked: see :meth:`recv`.
        """
        messages = self._inbox(lane)
        with self._links.changed:
            taken = list(messages)
            messages.clear()
        return [(message.sequence, self._brought(message, parked)) for message in taken]

    def _brought(self, message: PeerMessage, parked: bool) -> Payload:
        try:
            return message.payload(self._device, parked)
        except torch.OutOfMemoryError as error:
            logger.warning("what has arrived stays in host memory: %s", str(error).splitlines()[0])
        return message.payload(self._device, parked=True)

    def discard(self, lane: Lane, below: int) -> bool:
        """Drop what of ``lane`` has arrived with a smaller number than ``below``, without a copy to its device.

        Returns:
            Whether anything is left. A :meth:`ready` after this may be of a message below that has come meanwhile.
        """
        messages = self._inbox(lane)
        with self._links.changed:
            while messages and messages[0].sequence < below:
                messages.popleft()
            return bool(messages)

    def ready(self, lane: Lane) -> bool:
        """Whether :meth:`recv` would return at once (an undelivered message is there)."""
        return bool(self._inbox(lane))

    def await_message(self, lane: Lane, mark: StreamMark) -> None:
        """Wait until a message of ``lane`` is there, or ``mark`` is reached.

        Raises:
            EpochChanged, PeerLost: see the class.
        """
        self._links.notify_at(mark)
        self.await_either(lane, mark.query)

    def await_either(self, lane: Lane, over: Callable[[], bool]) -> None:
        """Wait until a message of ``lane`` is there, or ``over()``.

        That is asked anew whenever a message has arrived or a connection has ended, as that of a copy does.

        Raises:
            EpochChanged, PeerLost: see the class.
        """
        messages = self._inbox(lane)
        operation = f"wait for a message on lane {lane.name}"
        self._check(operation)
        with self._links.changed:
            self._links.wait(operation, lambda: bool(messages) or over(), [lane.source])

    def arrival(self, lane: Lane) -> float | None:
        """``time.monotonic()`` at which the next undelivered message of ``lane`` arrived, if it has."""
        messages = self._inbox(lane)
        with self._links.changed:
            return messages[0].arrival if messages else None

    def rate(self, member: str) -> float | None:
        """Bytes per second that a large message to ``member`` has taken last; ``None``: there was none."""
        return self._links.rate(member)

    def _inbox(self, lane: Lane) -> deque[PeerMessage]:
        messages = self._incoming.get(lane.tag)
        if messages is None:
            raise ValueError(f"lane {lane.name} does not end at member {self._epoch.member}")
        return messages

    # -- all members -------------------------------------------------------------------------------------
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over all members, as a new tensor. Bit-equal on all.

        For small CPU tensors of one dtype and shape. Members are summed up as they are in the tree of the plan's
        members: exact in any order where each element comes from one member and is zero on the others. ``tensor`` may
        still be on its way then, as what :meth:`send` gets: it must not be changed until :meth:`drain`.
        """
        self._check("all_reduce")
        total = self._links.all_gather("all_reduce", tensor, _sum)
        assert isinstance(total, torch.Tensor)
        return total.clone()  # others may still get it

    def barrier(self) -> None:
        """Wait for all members."""
        self._check("barrier")
        self._links.all_gather("barrier", None, lambda _: None)

    def exchange(self, value: str) -> dict[str, str]:
        """Every member's ``value``, by member in the plan's order. Collective."""
        self._check("exchange")
        payload = self._links.all_gather("exchange", wire.written({self._epoch.member: value}), _join)
        found = _as_texts(payload)
        return {member: found[member] for member in self._epoch.plan.members}

    # -- end ---------------------------------------------------------------------------------------------
    def _check(self, operation: str, lane: Lane | None = None) -> None:
        if self._life.aborted is not None or self._closed:
            where = operation if lane is None else f"{operation} on lane {lane.name}"
            if self._life.aborted is None:
                raise EpochChanged(f"{where}: the transport is closed")
            raise self._life.ended(where)

    def close(self) -> None:
        """Close the lanes. After an abort, or as a clean end. Idempotent.

        A clean end is collective: it waits (abortably) until all messages are delivered and all members close.
        If a connection failed before, the epoch is aborted instead. The connections end with the epoch.

        Raises:
            EpochChanged, PeerLost: a clean end was interrupted; the transport is closed nevertheless.
        """
        if self._closed:
            return
        try:
            if any(self._links.failure(member) is not None for member in self._members):
                self._life.abort("the transport was closed after a failure")
            if self._life.aborted is None:
                self._links.flush()
                self._links.all_gather("close", None, lambda _: None)
        finally:
            self._closed = True
            self._incoming = {tag: deque() for tag in self._incoming}


def _sum(payloads: list[Payload]) -> Payload:
    total, *others = payloads
    assert isinstance(total, torch.Tensor)
    for other in others:
        assert isinstance(other, torch.Tensor)
        if other.shape != total.shape or other.dtype != total.dtype:
            raise ProtocolError(f"all_reduce of {total.shape} {total.dtype} and {other.shape} {other.dtype}")
        total = total + other  # what this member was given stays as it is
    return total


def _join(payloads: list[Payload]) -> Payload:
    return wire.written({member: text for payload in payloads for member, text in _as_texts(payload).items()})


def _as_texts(payload: Payload) -> dict[str, str]:
    assert isinstance(payload, torch.Tensor)
    found: dict[str, str] = wire.read(payload)
    return found
