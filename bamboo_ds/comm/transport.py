"""Pipeline transport: ordered streams of messages between roles."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..errors import BambooError, EpochChanged, PeerLost, ProtocolError
from . import wire
from .epoch import FIRST_STREAM, Epoch
from .failures import ended, translate
from .session import Session
from .wire import Payload

__all__ = ["Lane", "Payload", "Transport"]

logger = logging.getLogger(__name__)

#: Receivers wait for as long as the epoch lasts.
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Lane:
    """One directed stream of messages between two roles.

    Attributes:
        tag: unique among all lanes of the epoch, 0 <= tag < 2**24.
        source: member that sends.
        destination: member that receives; equal to ``source`` for a mailbox.
        name: for messages and thread names, e.g. ``"act (0,1)->(0,2)"``.
    """

    tag: int
    source: str
    destination: str
    name: str


@dataclass
class _Incoming:
    """The receiving end of a lane. Guarded by the transport's condition."""

    lane: Lane
    messages: deque[tuple[int, Callable[[], Payload], float]] = field(default_factory=deque)
    failure: Exception | None = None
    thread: threading.Thread | None = None


class Transport:
    """Streams between the roles of one epoch, over the epoch's gloo mesh of all living members.

    Sends are asynchronous; receives are posted early by one thread per incoming lane. Every blocking call
    raises ``EpochChanged`` when the session aborts and ``PeerLost`` when the lane's peer fails before that.
    All methods are for one thread at a time, the main thread.
    """

    def __init__(self, epoch: Epoch, lanes: Sequence[Lane]) -> None:
        self._epoch = epoch
        self._ranks = {member: rank for rank, member in enumerate(epoch.plan.members)}
        self._changed = threading.Condition()
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, Lane] = {}
        self._unsent: deque[tuple[Lane, list[Any]]] = deque()
        self._undelivered = 0
        self._send_failure: Exception | None = None
        self._closing = False
        self._closed = False
        self._reaper: threading.Thread | None = None
        self._check_lanes(lanes)
        epoch.call_on_abort(self._wake)
        for end in self._incoming.values():
            if end.lane.source != end.lane.destination:
                end.thread = self._start(self._receive, f"recv {end.lane.name}", end)
        if any(lane.destination != epoch.member for lane in self._outgoing.values()):
            self._reaper = self._start(self._reap, "sends")

    @classmethod
    def open(cls, session: Session, lanes: Sequence[Lane]) -> Transport:
        """Start receiving on the session's current epoch. Local: the mesh exists since ``attach``.

        At most one transport may be open at a time.

        Args:
            lanes: all lanes of the world, or a superset of those that concern this member.

        Raises:
            EpochChanged: the epoch is aborted, or none is attached.
            ValueError: two lanes have one tag, or a lane names a member that is not in the plan.
        """
        return cls(session.current, lanes)

    def _check_lanes(self, lanes: Sequence[Lane]) -> None:
        member = self._epoch.member
        tags: set[int] = set()
        for lane in lanes:
            if not 0 <= lane.tag < FIRST_STREAM or lane.tag in tags:
                raise ValueError(f"lane {lane.name}: tag {lane.tag} is used twice or not in 0..{FIRST_STREAM - 1}")
            tags.add(lane.tag)
            for end in (lane.source, lane.destination):
                if end not in self._ranks:
                    raise ValueError(f"lane {lane.name}: {end} is no member of epoch {self._epoch.number}")
            if lane.destination == member:
                self._incoming[lane.tag] = _Incoming(lane)
            if lane.source == member:
                self._outgoing[lane.tag] = lane

    def _start(self, target: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=f"bamboo-{name}", daemon=True)
        thread.start()
        return thread

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- sending -----------------------------------------------------------------------------------------
    def send(self, lane: Lane, sequence: int, payload: Payload) -> None:
        """Queue ``payload`` as message ``sequence`` of ``lane``; returns at once.

        The tensors are detached and kept alive until delivered. Large contiguous host tensors are not copied:
        they must not be changed until :meth:`drain`. (Others, and payloads of mailboxes, are copied.)

        Raises:
            EpochChanged, PeerLost: see the class.
            ValueError: ``lane`` does not start at this member.
            TypeError: ``payload`` cannot be sent.
        """
        self._check("send", lane)
        if lane.tag not in self._outgoing:
            raise ValueError(f"lane {lane.name} does not start at member {self._epoch.member}")
        if lane.destination == self._epoch.member:
            copy = wire.copy_payload(payload)
            self._deliver(self._incoming[lane.tag], sequence, lambda: copy)
            return
        self._post(lane, wire.encode(sequence, payload))

    def _post(self, lane: Lane, messages: list[torch.Tensor]) -> None:
        peer = self._ranks[lane.destination]
        mesh = self._epoch.mesh
        works = []
        try:
            with self._epoch.blocking():
                for message in messages:
                    works.append(mesh.send([message], peer, lane.tag))
        except RuntimeError as error:
            raised = translate(error, self._epoch, f"send on lane {lane.name}", lane.destination)
            raise raised from (None if raised is error else error)
        with self._changed:
            self._unsent.append((lane, works))
            self._undelivered += 1
            self._changed.notify_all()

    def _reap(self) -> None:
        """Release sends as they complete, in order."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closing or self._epoch.aborted is not None)
                if self._epoch.aborted is not None or not self._unsent:
                    self._unsent.clear()
                    return
                lane, works = self._unsent.popleft()
            failure = None
            try:
                for work in works:
                    with self._epoch.blocking():
                        work.wait(_FOREVER)
            except Exception as error:  # raised by the next call of the main thread
                failure = translate(error, self._epoch, f"send on lane {lane.name}", lane.destination)
            works.clear()
            with self._changed:
                self._undelivered -= 1
                if failure is not None:
                    self._send_failure = self._send_failure or failure
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all messages that this member sent have been taken up by the receiving process.

        Raises:
            EpochChanged, PeerLost: see the class; ``PeerLost`` if any of them can no longer be delivered.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._undelivered or self._send_failure or self._epoch.aborted is not None
            )
            self._check("drain")
            if self._send_failure is not None:
                raise self._again(self._send_failure)

    # -- receiving ---------------------------------------------------------------------------------------
    def _receive(self, end: _Incoming) -> None:
        """Take up the messages of one lane, until its end or the epoch's."""
        lane, epoch = end.lane, self._epoch
        try:
            self._receive_all(end, self._ranks[lane.source], epoch.mesh)
        except Exception as error:  # raised by the main thread's next receive
            failure = translate(error, epoch, f"receive on lane {lane.name}", lane.source)
            if not isinstance(failure, BambooError):
                logger.error("lane %s: %r", lane.name, failure)
            with self._changed:
                end.failure = failure
                self._changed.notify_all()

    def _receive_all(self, end: _Incoming, peer: int, mesh: Any) -> None:
        tag = end.lane.tag
        packet = torch.empty(wire.PACKET, dtype=torch.uint8)

        def take(buffer: torch.Tensor) -> None:
            with self._epoch.blocking():
                mesh.recv([buffer], peer, tag).wait(_FOREVER)

        while True:
            take(packet)
            head = wire.decode_head(packet)
            if head.structure == wire.END:
                return
            if head.extension:
                extension = torch.empty(head.extension, dtype=torch.uint8)
                take(extension)
                head = wire.decode_extension(head, extension)
            parts = wire.decode_parts(head, packet)
            with self._epoch.blocking():
                works = [mesh.recv([part.data], peer, tag) for part in parts if part.own_message]
                for work in works:
                    work.wait(_FOREVER)
            self._deliver(end, head.sequence, _Assembly(head.structure, parts))

    def _deliver(self, end: _Incoming, sequence: int, payload: Callable[[], Payload]) -> None:
        with self._changed:
            end.messages.append((sequence, payload, time.monotonic()))
            self._changed.notify_all()

    def recv(self, lane: Lane, sequence: int, timeout: timedelta | None = None) -> Payload:
        """The next message of ``lane``; blocks abortably.

        Raises:
            ProtocolError: the next message is not number ``sequence``; it is not consumed.
            TimeoutError: nothing arrived within ``timeout``; nothing is consumed.
            EpochChanged, PeerLost: see the class. What arrived before the peer failed is delivered first.
            ValueError: ``lane`` does not end at this member.
        """
        end = self._end(lane)
        with self._changed:
            self._changed.wait_for(
                lambda: end.messages or end.failure is not None or self._epoch.aborted is not None,
                None if timeout is None else timeout.total_seconds(),
            )
            self._check("receive", lane)
            if not end.messages:
                if end.failure is not None:
                    raise self._again(end.failure)
                raise TimeoutError(f"no message on lane {lane.name} from {lane.source} within {timeout}")
            found, payload, _ = end.messages[0]
            if found != sequence:
                raise ProtocolError(f"lane {lane.name}: expected message {sequence}, got {found}")
            end.messages.popleft()
        return payload()

    def ready(self, lane: Lane) -> bool:
        """Whether :meth:`recv` would return at once (an undelivered message is there)."""
        return bool(self._end(lane).messages)

    def arrival(self, lane: Lane) -> float | None:
        """``time.monotonic()`` at which the next undelivered message of ``lane`` arrived, if it has."""
        with self._changed:
            messages = self._end(lane).messages
            return messages[0][2] if messages else None

    def _end(self, lane: Lane) -> _Incoming:
        end = self._incoming.get(lane.tag)
        if end is None:
            raise ValueError(f"lane {lane.name} does not end at member {self._epoch.member}")
        return end

    # -- all members -------------------------------------------------------------------------------------
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` (float64, CPU) over all living members, in place; returns it. Bit-equal on all."""
        self._collective("all_reduce", lambda mesh: mesh.allreduce([tensor]))
        return tensor

    def barrier(self) -> None:
        """Wait for all living members."""
        self._collective("barrier", lambda mesh: mesh.barrier())

    def exchange(self, value: str) -> dict[str, str]:
        """Every living member's ``value``, by member. Collective."""
        members = self._epoch.plan.members
        data = torch.frombuffer(bytearray(value.encode() + b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in members]
        sizes[self._ranks[self._epoch.member]][0] = data.numel()
        size = torch.tensor([data.numel()])
        self._collective("exchange", lambda mesh: mesh.allgather([sizes], [size]))
        longest = max(int(each) for each in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        values = [padded.clone() for _ in members]
        self._collective("exchange", lambda mesh: mesh.allgather([values], [padded]))
        return {
            member: bytes(values[rank][: int(sizes[rank]) - 1].numpy()).decode() for member, rank in self._ranks.items()
        }

    def _collective(self, operation: str, start: Callable[[Any], Any]) -> None:
        self._check(operation)
        if len(self._ranks) == 1:
            return
        try:
            with self._epoch.blocking():
                start(self._epoch.mesh).wait()
        except RuntimeError as error:
            raised = translate(error, self._epoch, operation)
            raise raised from (None if raised is error else error)

    # -- end ---------------------------------------------------------------------------------------------
    def _check(self, operation: str, lane: Lane | None = None) -> None:
        where = operation if lane is None else f"{operation} on lane {lane.name}"
        if self._epoch.aborted is not None:
            raise ended(self._epoch, where)
        if self._closed:
            raise EpochChanged(f"{where}: the transport is closed")

    def _again(self, failure: Exception) -> Exception:
        """A fresh copy of a thread's failure, for the main thread to raise."""
        if isinstance(failure, PeerLost):
            again: Exception = PeerLost(str(failure), failure.member)
        elif isinstance(failure, BambooError):
            again = type(failure)(str(failure))
        else:
            return failure
        again.__cause__ = failure
        return again

    def close(self) -> None:
        """Join the transport's threads. After an abort, or as a clean end. Idempotent.

        A clean end is collective: each side tells the others that its streams end. It blocks (abortably)
        until all members have. If a lane failed, the epoch is aborted instead.

        Raises:
            EpochChanged, PeerLost: a clean end was interrupted; everything is closed nevertheless.
        """
        if self._closed:
            return
        try:
            with self._changed:
                failed = self._send_failure is not None or any(end.failure for end in self._incoming.values())
            if failed:
                self._epoch.abort("the transport was closed after a failure")
            if self._epoch.aborted is None:
                self._finish()
        finally:
            self._closed = True
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._join()

    def _finish(self) -> None:
        """End our streams and wait for the others' ends."""
        try:
            for lane in self._outgoing.values():
                if lane.destination != self._epoch.member:
                    self._post(lane, wire.encode(0, None, end=True))
            self.drain()
            for end in self._incoming.values():
                if end.thread is not None:
                    end.thread.join()
                    if end.failure is not None:
                        raise self._again(end.failure)
        except BaseException:
            self._epoch.abort("a transport's end was interrupted")
            raise

    def _join(self) -> None:
        for end in self._incoming.values():
            if end.thread is not None:
                end.thread.join()
        if self._reaper is not None:
            self._reaper.join()
        self._unsent.clear()


@dataclass(frozen=True)
class _Assembly:
    """Makes a payload when it is consumed, in the main thread (CUDA copies belong there)."""

    structure: int
    parts: list[wire.Part]

    def __call__(self) -> Payload:
        return wire.assemble(self.structure, self.parts)
