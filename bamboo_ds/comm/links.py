"""TCP connections between all members of an epoch, and the messages that arrive over them.

Point-to-point traffic does not use gloo: a gloo send or receive that is in the middle of its data when the
connection ends is never woken, neither by the end nor by a shutdown (its ``Pair::signalException`` passes over
the operations in ``tx_`` and ``rx_``). These sockets are our own, and shutting them down wakes whoever waits.

Sends are eager: a message is out when the kernel has taken it. One thread per peer reads everything as it
comes and sorts it by key; one more writes what the kernel did not take at once.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ..errors import EpochChanged, NotMet, PeerLost
from . import sockets, wire
from .failures import ended
from .handshake import Door, Handshake, Talk, calling, hosting

if TYPE_CHECKING:
    from .epoch import Epoch

logger = logging.getLogger(__name__)

_PURPOSE = "link"
#: The kernel takes at most so many pieces in one call.
_PIECES = 512


@dataclass(frozen=True)
class Message:
    """A message that has arrived.

    Attributes:
        source: the member that sent it.
        sequence: its number, as the sender gave it.
        structure, parts: see :mod:`.wire`.
        arrival: ``time.monotonic()`` when its last byte was there.
    """

    source: str
    sequence: int
    structure: int
    parts: list[wire.Part]
    arrival: float

    def payload(self) -> wire.Payload:
        """What was sent. CUDA copies happen here: call it in the main thread."""
        return wire.assemble(self.structure, self.parts)


@dataclass
class _Peer:
    """The connection to one member; guarded by ``lock``, except where the links' condition is named."""

    member: str
    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    work: threading.Condition = field(init=False)
    pending: deque[memoryview] = field(default_factory=deque)
    writing: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    writer: threading.Thread | None = None
    #: Guarded by the links' condition: pieces queued and written, frames sent and known to be read, the end.
    queued: int = 0
    written: int = 0
    sent: int = 0
    confirmed: int = 0
    left: bool = False
    failure: EpochChanged | None = None

    def __post_init__(self) -> None:
        self.work = threading.Condition(self.lock)


class Links:
    """The connections of this member in one epoch.

    Attributes:
        changed: notified whenever a message arrives, something was written, or a peer or the epoch ended.
        waiting: how many threads wait, guarded by ``changed``.
    """

    def __init__(self, epoch: Epoch) -> None:
        self.changed = threading.Condition()
        self.waiting = 0
        self._epoch = epoch
        self._peers: dict[str, _Peer] = {}
        self._inbox: dict[bytes, deque[Message]] = {}
        self._listener: socket.socket | None = None
        self._rounds = 0
        self._closed = False

    # -- opening -----------------------------------------------------------------------------------------
    def listen(self, address: str) -> str:
        """Open the listening socket; returns what peers must know, as text."""
        listener = self._listener = self._epoch.own(sockets.listen(address))
        host, port = sockets.endpoint(listener.getsockname())
        return f"{host} {port}"

    def connect(self, places: dict[str, str], timeout: timedelta) -> None:
        """Connect to every member; collective. ``places`` are all members' results of :meth:`listen`.

        Raises:
            EpochChanged: aborted meanwhile.
            PeerLost: a member refused, or whoever answers in its place is not that member.
            TimeoutError: somebody did not come within ``timeout``.
        """
        members, me = self._epoch.plan.members, self._epoch.member
        own = members.index(me)
        listener = self._listener
        assert listener is not None
        listener.setblocking(False)
        missing = set(members[own + 1 :])
        called: dict[str, Handshake] = {}
        deadline = time.monotonic() + timeout.total_seconds()

        def host() -> Talk:
            return hosting(self._epoch.secret, _PURPOSE, self._epoch.number, me, missing.__contains__)

        with selectors.DefaultSelector() as selector:
            door = Door(selector, listener, host, len(missing))
            try:
                for member in members[:own]:
                    called[member] = self._call(member, places[member], timeout)
                    selector.register(called[member].connection, selectors.EVENT_READ, member)
                while missing or called:
                    self._epoch.check("connecting")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        late = ", ".join(sorted({*missing, *called}))
                        raise TimeoutError(f"{late} did not connect within {timeout}")
                    patience = door.patience()
                    for key, _ in selector.select(left if patience is None else min(left, patience)):
                        ready: socket.socket = key.fileobj  # type: ignore[assignment]
                        if key.data is not door:
                            if self._answered(key.data, called[key.data]):
                                selector.unregister(ready)
                                self._add(key.data, called.pop(key.data).connection)
                        elif (found := door.attend(ready)) is not None:
                            missing.discard(found[0])
                            self._add(found[0], self._epoch.own(found[1]))
            finally:
                door.close()
                listener.close()

    def _call(self, member: str, place: str, timeout: timedelta) -> Handshake:
        """Connect to ``member`` and begin to prove ourselves."""
        host, port = place.split(" ")
        family, name = sockets.resolve(host, int(port))
        connection = self._epoch.own(socket.socket(family, socket.SOCK_STREAM))
        epoch = self._epoch
        try:
            connection.settimeout(min(timeout.total_seconds(), epoch.silence_s))
            connection.connect(name)
            connection.setblocking(False)
            return Handshake(connection, calling(epoch.secret, _PURPOSE, epoch.number, epoch.member, member))
        except OSError as error:
            connection.close()
            epoch.check("connecting")
            raise epoch.lost(member, f"connecting to {host}:{port} failed: {error}") from error

    def _answered(self, member: str, handshake: Handshake) -> bool:
        """Whether ``member`` has proven itself to us."""
        try:
            return handshake.advance() is not None
        except OSError as error:
            self._epoch.check("connecting")
            raise self._epoch.lost(member, f"connecting failed: {error}") from error

    def _add(self, member: str, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.watch_silence(connection, self._epoch.silence_s)
        peer = _Peer(member, connection)
        self._peers[member] = peer
        self._start(peer, self._read_all, "from")

    def _start(self, peer: _Peer, target: Callable[[_Peer], None], direction: str) -> threading.Thread:
        name = f"bamboo-{direction}-{peer.member}"
        thread = threading.Thread(target=target, args=(peer,), name=name, daemon=True)
        peer.threads.append(thread)
        thread.start()
        return thread

    # -- reading -----------------------------------------------------------------------------------------
    def _read_all(self, peer: _Peer) -> None:
        try:
            while True:
                self._read_frame(peer)
        except OSError as error:
            self._end(peer, str(error) or type(error).__name__)
        except Exception as error:  # a broken peer: whoever waits for it must not wait for ever
            logger.exception("epoch %d: messages from %s", self._epoch.number, peer.member)
            self._end(peer, f"{type(error).__name__}: {error}")
            sockets.shut(peer.connection)

    def _read_frame(self, peer: _Peer) -> None:
        block = _read(peer.connection, wire.HEAD)
        head = wire.decode_head(block)
        if head.kind == wire.DATA:
            meta = bytes(_read(peer.connection, head.extension)) if head.extension else head.meta
            key, parts = wire.decode_meta(head, meta)
            for part in parts:
                if part.data.numel():
                    _read_into(peer.connection, wire.view(part.data))
            self.deliver(key, Message(peer.member, head.sequence, head.structure, parts, time.monotonic()))
        elif head.kind == wire.FLUSH:
            self._write(peer, [wire.control(wire.ACK, head.sequence)])
        else:
            with self.changed:
                if head.kind == wire.ACK:
                    peer.confirmed = head.sequence
                else:
                    peer.left = True
                self.changed.notify_all()

    def deliver(self, key: bytes, message: Message) -> None:
        """Put a message into the inbox (of this member's own roles, too)."""
        with self.changed:
            self._inbox.setdefault(key, deque()).append(message)
            self.changed.notify_all()

    def message(self, sequence: int, structure: int, parts: list[wire.Part]) -> Message:
        """A message of this member to itself, for :meth:`deliver`."""
        return Message(self._epoch.member, sequence, structure, parts, time.monotonic())

    def inbox(self, key: bytes) -> deque[Message]:
        """The messages for ``key``, oldest first. Hold :attr:`changed` to look or take."""
        return self._inbox.setdefault(key, deque())

    def _end(self, peer: _Peer, reason: str) -> None:
        """The connection to ``peer`` has ended."""
        number = self._epoch.number
        if self._epoch.aborted is None and not peer.left:
            failure: EpochChanged = self._epoch.lost(peer.member, f"connection ended: {reason}")
        else:
            failure = EpochChanged(f"member {peer.member} has left epoch {number}")
        with self.changed:
            peer.failure = peer.failure or failure
            self.changed.notify_all()
        with peer.lock:
            peer.work.notify_all()

    # -- writing -----------------------------------------------------------------------------------------
    def send(self, member: str, pieces: list[memoryview]) -> int:
        """Send a frame to another member; returns at once.

        Returns:
            A ticket for :meth:`written`.

        Raises:
            EpochChanged, PeerLost: the epoch, or the connection, has ended.
        """
        self._epoch.check("send")
        peer = self._peers[member]
        if peer.failure is not None:
            raise _again(peer.failure)
        with self.changed:
            peer.sent += 1
        return self._write(peer, pieces)

    def _write(self, peer: _Peer, pieces: Sequence[memoryview]) -> int:
        with peer.lock:
            left = list(pieces)
            if not peer.writing and not peer.pending:
                left = _send_now(peer.connection, left)
            with self.changed:
                peer.queued += len(pieces)
                peer.written += len(pieces) - len(left)
                ticket = peer.queued
            if left:
                peer.pending.extend(left)
                if peer.writer is None:
                    peer.writer = self._start(peer, self._write_all, "to")
                peer.work.notify_all()
        return ticket

    def _write_all(self, peer: _Peer) -> None:
        while True:
            with peer.lock:
                peer.writing = False
                peer.work.wait_for(lambda: peer.pending or peer.failure is not None or self._closed)
                if peer.failure is not None or self._closed:
                    peer.pending.clear()
                    return
                piece = peer.pending.popleft()
                peer.writing = True
            try:
                peer.connection.sendall(piece)
            except OSError as error:
                # The connection is over. The reader finds that too, after what the peer has said at last.
                logger.info("epoch %d: writing to %s failed: %s", self._epoch.number, peer.member, error)
                sockets.shut(peer.connection, socket.SHUT_WR)  # where it is not (out of memory): now it is
                with peer.lock:
                    peer.pending.clear()
                return
            with self.changed:
                peer.written += 1
                self.changed.notify_all()
            del piece

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
        peers = [peer for member in members if (peer := self._peers.get(member)) is not None]

        def first() -> EpochChanged | None:
            return next((peer.failure for peer in peers if peer.failure is not None), None)

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
        """
        peers = [peer for member in members if (peer := self._peers.get(member)) is not None]

        def over() -> bool:
            return self._epoch.aborted is not None or ready() or any(peer.failure is not None for peer in peers)

        if not over():
            self.waiting += 1
            try:
                self.changed.wait_for(over, None if timeout is None else timeout.total_seconds())
            finally:
                self.waiting -= 1
        if self._epoch.aborted is not None:
            raise ended(self._epoch, operation)
        if ready():
            return True
        for peer in peers:
            if peer.failure is not None:
                raise _again(peer.failure)
        return False

    def flush(self) -> None:
        """Wait until every peer has read everything that was sent to it.

        Raises:
            EpochChanged, PeerLost: somebody has not, and never will.
        """
        self._epoch.check("flush")
        unsure = [peer for peer in self._peers.values() if peer.sent > peer.confirmed]
        for peer in unsure:
            if peer.failure is not None:
                raise _again(peer.failure)
            self._write(peer, [wire.control(wire.FLUSH, peer.sent)])
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
        own = self.message(0, *wire.copy_parts(payload))
        found: dict[str, wire.Payload] = {own.source: own.payload()}
        with self.changed:
            inbox = self.inbox(key)
            for member in self._peers:
                self.wait(operation, partial(_has_from, inbox, member), [member])
            found |= {message.source: message.payload() for message in inbox}
            del self._inbox[key]
        return {member: found[member] for member in self._epoch.plan.members}

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
    def leave(self) -> None:
        """Say farewell and wake everybody who waits, before the connections are shut down. From any thread, once."""
        self._closed = True
        for peer in list(self._peers.values()):
            self._say_bye(peer)
        with self.changed:
            self.changed.notify_all()

    def _say_bye(self, peer: _Peer) -> None:
        """Tell the peer that we leave on purpose, unless we are in the middle of a frame."""
        with peer.lock:
            if not peer.writing and not peer.pending and peer.failure is None:
                _send_now(peer.connection, [wire.control(wire.BYE)])

    def close(self) -> None:
        """Join the threads; the connections have been shut down."""
        for peer in self._peers.values():
            with peer.lock:
                peer.work.notify_all()
            for thread in peer.threads:
                thread.join()
        self._peers.clear()
        self._inbox.clear()


def _send_now(connection: socket.socket, pieces: list[memoryview]) -> list[memoryview]:
    """Give the kernel what it takes without blocking; returns the rest. Errors show when that is written."""
    first = 0
    while first < len(pieces):
        some = pieces[first : first + _PIECES]
        try:
            sent = connection.sendmsg(some, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            break
        for piece in some:
            if sent < piece.nbytes:
                break
            sent -= piece.nbytes
            first += 1
        if sent:
            return [pieces[first][sent:], *pieces[first + 1 :]]
    return pieces[first:]


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    if size:
        _read_into(connection, memoryview(data))
    return data


def _read_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``; raises ``ConnectionError`` at the end of the stream."""
    while target.nbytes:
        count = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("closed by the peer")
        target = target[count:]


def _all_read(peer: _Peer) -> bool:
    return peer.confirmed >= peer.sent


def _has_from(inbox: Iterable[Message], member: str) -> bool:
    return any(message.source == member for message in inbox)


def _again(failure: EpochChanged) -> EpochChanged:
    """A fresh copy of a thread's failure, to be raised in another."""
    again = PeerLost(str(failure), failure.member) if isinstance(failure, PeerLost) else EpochChanged(str(failure))
    again.__cause__ = failure
    return again
