"""The connections of a worker to others, for its life: one listener, one thread, one connection per pair that talks.

They are made when a member first has something to say, and outlive epochs. Every frame names its epoch: those of
epochs that are over are dropped, those of epochs that this member has yet to enter wait. Copies of state have
connections of their own (:mod:`.bulk`), whose end is no loss of a member.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import partial
from typing import Protocol

from ..devices.staging import Copy, StreamMark, Waiter
from ..errors import ProtocolError
from ..forking import only_here
from ..secret import JobSecret
from . import sockets, wire
from .bulk.offers import Offers
from .connection import Connection, Ended, Traffic
from .handshake import Door, Handshake, calling, hosting
from .loop import SocketLoop
from .places import Listener, Place
from .wire.payloads import PeerMessage, WireTensor

logger = logging.getLogger(__name__)


class Signal(threading.Condition):
    """A condition that also wakes the one thread that waits in the kernel for what members send."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.reader: int | None = None  #: the thread

    def notify_all(self) -> None:
        super().notify_all()
        if self.reader is not None and self.reader != threading.get_ident():
            os.eventfd_write(self.descriptor, 1)


class Receiver(Protocol):
    """Takes what arrives for one epoch. Called from any thread; :meth:`deliver` with :attr:`Hub.changed` held."""

    number: int

    def deliver(self, key: bytes, message: PeerMessage) -> None:
        """A message has arrived."""

    def left(self, member: str, over: bool) -> None:
        """``member`` has left the epoch; ``over``: in the middle, so that the epoch is over for all."""

    def failed(self, member: str, reason: str) -> None:
        """The connection to ``member`` has ended."""


class Hub:
    """This worker's connections.

    Args:
        member: this one.
        listener: this worker's.
        secret: the job's.
        silence_s: seconds without any answer of a member's host after which its connection fails.
        host: name of this member's; it shares memory with members of the same.

    Attributes:
        changed: notified whenever a message arrives, something was written, or a connection or an epoch ended.
        ended: the newest epoch that this member has left.
        place: where others reach it, as plans have it.
        offers: what others may copy.
    """

    purpose = "wire"

    def __init__(
        self, member: str, listener: Listener, secret: JobSecret, silence_s: float, host: str | None = None
    ) -> None:
        self.changed = Signal()
        self.ended = 0
        self._me, self._secret, self._silence_s, self._host = member, secret, silence_s, host
        self._listener = only_here(listener.socket)
        self._listener.setblocking(False)
        self.place = str(listener.place)
        self._connections: dict[tuple[str, str], list[Connection]] = {}  # by purpose and member
        self._receiver: Receiver | None = None
        self._early: dict[int, list[tuple[bytes, PeerMessage]]] = defaultdict(list)
        self._left: dict[str, int] = {}  # the newest epoch that each member has left
        self._watching = threading.Lock()
        self._loop = SocketLoop()
        self._calls: dict[Connection, float] = {}  # until when they must be through
        self._closed = False
        self._marks = Waiter()
        self.offers = Offers(self._loop)
        self._traffic: dict[str, Traffic] = {each.purpose: each for each in (self, self.offers)}
        self._door = Door(
            self._loop, self._listener, lambda: hosting(secret, self._traffic, listener.token, member), self._admit
        )
        self._loop.timers.append(self._end_slow_calls)
        self._loop.start()

    # -- epochs ------------------------------------------------------------------------------------------
    def enter(self, receiver: Receiver, members: Collection[str]) -> None:
        """Gives what arrives for an epoch to ``receiver`` from now on, what has arrived already first."""
        with self.changed:
            self._receiver = receiver
            self._door.expected = len(members)
            for key, message in self._early.pop(receiver.number, []):
                receiver.deliver(key, message)
            for number in [number for number in self._early if number < receiver.number]:
                del self._early[number]
            gone = [member for member, epoch in self._left.items() if epoch >= receiver.number]
        for member in gone:
            receiver.left(member, False)

    def leave(self, epoch: int, over: bool) -> None:
        """Tells all others that this member has left ``epoch``, and sends nothing more of it. From any thread.

        Args:
            over: it has ended in the middle, and the others are to leave it as well.
        """
        with self.changed:
            self.ended = max(self.ended, epoch)
            connections = self._all()
        for connection in [each for each in connections if each.traffic is self]:
            connection.give_up(epoch)
            connection.send(epoch, wire.control(wire.LEFT, over, epoch))

    def drop(self, members: Iterable[str]) -> None:
        """Ends the connections to members that have no part in the job any more."""
        for member in members:
            for connection in self._all_to(member):
                self._end(connection, None)
            with self.changed:
                self._connections.pop((self.purpose, member), None)
                self._left.pop(member, None)

    # -- connections -------------------------------------------------------------------------------------
    def _all(self) -> list[Connection]:
        return [each for several in self._connections.values() for each in several]

    def known(self, member: str) -> Connection | None:
        """The connection to ``member`` that frames go out by, if there is one."""
        several = self._connections.get((self.purpose, member))
        return several[0] if several else None

    def _all_to(self, member: str) -> list[Connection]:
        """The connections that frames of ``member`` may come by."""
        return list(self._connections.get((self.purpose, member), ()))

    def reach(self, member: str, place: str) -> Connection:
        """The connection to ``member``; one is begun if there is none. Returns at once."""
        connection = self.known(member)
        if connection is not None:
            return connection
        with self.changed:
            connection = self.known(member)
            return self.call(member, place, self) if connection is None else connection

    def call(self, member: str, place: str, traffic: Traffic) -> Connection:
        """A new connection to ``member``, which ``traffic`` hears of from now on. Returns at once.

        Raises:
            OSError: there is no way to ``place``, or this worker ends.
            ValueError: it is no place.
        """
        if self._closed:
            raise ConnectionError("this worker ends")
        host = Place.parse(place)
        family, name = sockets.resolve(host.host, host.port)
        opened = only_here(socket.socket(family, socket.SOCK_STREAM))
        opened.setblocking(False)
        connection = self._made(member, opened, traffic)
        at_once = opened.connect_ex(name)  # else what is wrong shows when it is ready
        self._calls[connection] = time.monotonic() + self._silence_s
        self._loop.watch(opened, select.EPOLLOUT, lambda _: self._introduce(connection, host.token, at_once))
        self._loop.wake()
        return connection

    def _introduce(self, connection: Connection, token: str, at_once: int) -> None:
        """Begins to prove ourselves to the other end, which may be there, unless an error has shown at once."""
        if connection.ended:
            return  # it has been dropped meanwhile
        self._calls.pop(connection, None)
        opened = connection.socket
        try:
            error = 0 if at_once == errno.EINPROGRESS else at_once
            error = error or opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            sockets.watch_silence(opened, self._silence_s)
            purpose = connection.traffic.purpose
            handshake = Handshake(opened, calling(self._secret, purpose, token, self._me, connection.member))
        except OSError as failure:
            self._end(connection, f"connecting failed: {failure}")
            return
        self._loop.forget(opened)
        self._loop.watch(opened, select.EPOLLIN, lambda _: self._go_on(connection, handshake))

    def _go_on(self, connection: Connection, handshake: Handshake) -> None:
        try:
            proven = handshake.advance() is not None
        except OSError as failure:
            self._end(connection, f"connecting failed: {failure}")
            return
        if proven and not connection.ended:
            self._loop.forget(connection.socket)
            self._open(connection)
            connection.share()

    def _end_slow_calls(self) -> float | None:
        now = time.monotonic()
        for connection in [each for each, until in list(self._calls.items()) if until <= now]:
            self._end(connection, f"connecting failed: no answer for {self._silence_s:g} s")
        return min((until - now for until in list(self._calls.values())), default=None)

    def _admit(self, member: str, opened: socket.socket, purpose: str) -> None:
        """A member has called, and proven itself."""
        sockets.watch_silence(opened, self._silence_s)
        self._open(self._made(member, opened, self._traffic[purpose]))

    def _made(self, member: str, opened: socket.socket, traffic: Traffic) -> Connection:
        connection = Connection(member, opened, traffic, self._watch, self._host)
        with self.changed:
            self._connections.setdefault((traffic.purpose, member), []).append(connection)
        return connection

    def _open(self, connection: Connection) -> None:
        """Both ends have proven themselves."""
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._watching:
            if connection.ended:
                return
            self._loop.watch(connection.socket, connection.interest, lambda events: self._attend(connection, events))
            connection.open = True
        connection.traffic.opened(connection)

    def _watch(self, connection: Connection) -> None:
        with self._watching:
            if connection.open and not connection.ended:
                self._loop.change(connection.socket, connection.interest)

    def _attend(self, connection: Connection, events: int) -> None:
        """A connection is ready, on the loop's thread."""
        if events & select.EPOLLOUT:
            self._flush(connection)
        if events & ~select.EPOLLOUT and connection.reading.acquire(blocking=False):  # else another thread reads it
            try:
                self._read(connection)
            finally:
                connection.reading.release()

    def _flush(self, connection: Connection) -> None:
        if connection.flush() and connection.traffic is self:
            self._notify()

    def flush_after(self, copy: Copy, connection: Connection) -> None:
        """Has ``connection`` go on at each mark of ``copy``."""
        for mark in copy.marks:
            self._marks.when(mark, partial(self._flush, connection))

    def notify_at(self, mark: StreamMark) -> None:
        """Has those that wait look again once ``mark`` is reached."""
        self._marks.when(mark, self._notify)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _read(self, connection: Connection) -> None:
        """Reads what there is; the caller holds ``connection.reading``.

        What a signal handler of the script raises meanwhile is the script's, and ends the connection.
        """
        if connection.ended:
            return
        try:
            connection.read()
        except Ended as error:
            self._close(connection, f"connection ended: {error or type(error).__name__}")
        except BaseException as error:  # a broken peer: threads that wait for it must not do so for ever
            self._close(connection, f"connection ended: {type(error).__name__}: {error}")
            if threading.current_thread() is threading.main_thread() and not isinstance(error, ProtocolError):
                raise
            logger.exception("messages from %s", connection.member)

    def _end(self, connection: Connection, reason: str | None) -> None:
        with connection.reading:
            self._close(connection, reason)

    def _close(self, connection: Connection, reason: str | None) -> None:
        """Ends a connection, whose reader the caller is; ``reason``: none of an orderly end."""
        if connection.ended:
            return
        with self._watching:
            connection.ended = True
            self._calls.pop(connection, None)
            with contextlib.suppress(OSError):  # it is between two things to look for
                self._loop.forget(connection.socket)
        connection.end()
        with self.changed:
            self._connections.get((connection.traffic.purpose, connection.member), [connection]).remove(connection)
            self.changed.notify_all()
        connection.traffic.closed(connection, reason)

    # -- messages ----------------------------------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        """Tells the member, which may wait in an epoch that this one has left."""
        connection.send(self.ended, wire.control(wire.LEFT, epoch=self.ended))

    def closed(self, connection: Connection, reason: str | None) -> None:
        """See :class:`.connection.Traffic`."""
        receiver = self._receiver
        if reason is not None and receiver is not None:
            receiver.failed(connection.member, reason)

    def receive(self, connection: Connection, head: wire.FrameHead, key: bytes, tensors: list[WireTensor]) -> None:
        """See :class:`.connection.Traffic`."""
        if head.kind == wire.FLUSH:
            connection.send(wire.EVERY, wire.control(wire.ACK, head.sequence, head.epoch))  # also when it is left
            return
        with self.changed:
            receiver, member = self._receiver, connection.member
            if head.kind == wire.ACK:
                connection.confirmed = max(connection.confirmed, head.sequence)
            elif head.kind == wire.LEFT:
                self._left[member] = max(head.epoch, self._left.get(member, 0))
            else:
                message = PeerMessage(member, head.sequence, head.structure, tensors, time.monotonic())
                if receiver is None or head.epoch > receiver.number:
                    self._early[head.epoch].append((key, message))
                elif head.epoch == receiver.number:
                    receiver.deliver(key, message)
            self.changed.notify_all()
        if head.kind == wire.LEFT and receiver is not None and head.epoch >= receiver.number:
            receiver.left(member, head.epoch == receiver.number and bool(head.sequence))

    # -- waiting -----------------------------------------------------------------------------------------
    def wait_for(self, over: Callable[[], bool], members: Sequence[str], timeout_s: float) -> bool:
        """Waits until ``over()``, at most ``timeout_s`` seconds; the caller holds :attr:`changed`. Whether it is over.

        What ``members`` send is read here, which spares their messages the way through another thread.
        """
        if self.changed.reader is not None:
            return self.changed.wait_for(over, timeout_s)
        self.changed.reader = threading.get_ident()
        self.changed.release()
        try:
            with self._driven(members) as driven:
                return self._read_until(over, driven, time.monotonic() + timeout_s)
        finally:
            self.changed.acquire()
            self.changed.reader = None

    @contextlib.contextmanager
    def _driven(self, members: Sequence[str]) -> Generator[dict[int, Connection], None, None]:
        """The open connections to ``members``, by descriptor, which the calling thread reads in the body."""
        taken: dict[int, Connection] = {}
        try:
            for member in members:
                for connection in self._all_to(member):
                    connection.reading.acquire()
                    if connection.ended or not connection.open:
                        connection.reading.release()
                        continue
                    taken[connection.socket.fileno()] = connection
                    connection.driven = True
                    self._watch(connection)
            yield taken
        finally:
            for connection in taken.values():
                connection.driven = False
                self._watch(connection)
                connection.reading.release()

    def _read_until(self, over: Callable[[], bool], driven: dict[int, Connection], deadline: float) -> bool:
        ready = select.poll()
        ready.register(self.changed.descriptor, select.POLLIN)
        for descriptor in driven:
            ready.register(descriptor, select.POLLIN)
        while True:
            with self.changed:
                if over():
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for descriptor, _ in ready.poll(min(left, 1e6) * 1000):
                if descriptor == self.changed.descriptor:
                    os.eventfd_read(descriptor)
                    continue
                self._read(driven[descriptor])
                if driven[descriptor].ended:
                    ready.unregister(descriptor)

    # -- the end -----------------------------------------------------------------------------------------
    def close(self) -> None:
        """Ends all connections and the thread."""
        self._closed = True
        self._marks.stop()
        self._loop.stop()
        self._receiver = None
        self.offers.close()
        for connection in self._all():
            connection.end()
            connection.traffic.closed(connection, "this worker ends")
        self._connections.clear()
        self._door.close()
        self._loop.close()
        self._listener.close()
        os.close(self.changed.descriptor)
