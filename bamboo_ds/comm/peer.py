"""The connection to one member: one thread reads everything as it comes, another writes what the kernel did not take.

Point-to-point traffic does not use gloo: a gloo send or receive that is in the middle of its data when the
connection ends is never woken, neither by the end nor by a shutdown (its ``Pair::signalException`` passes over
the operations in ``tx_`` and ``rx_``). These sockets are our own, and shutting them down wakes whoever waits.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import EpochChanged, PeerLost
from . import sockets, wire
from .lifetime import Lifetime

logger = logging.getLogger(__name__)

#: The kernel takes at most so many pieces in one call.
_PIECES = 512


@dataclass(frozen=True)
class PeerMessage:
    """A message that has arrived.

    Attributes:
        source: the member that sent it.
        sequence: its number, as the sender gave it.
        structure, tensors: see :mod:`.wire`.
        arrival: ``time.monotonic()`` when its last byte was there.
    """

    source: str
    sequence: int
    structure: int
    tensors: list[wire.WireTensor]
    arrival: float

    def payload(self) -> wire.Payload:
        """What was sent. CUDA copies happen here: call it in the main thread."""
        return wire.assemble(self.structure, self.tensors)


class Peer:
    """The connection to one member, and the threads that serve it.

    Args:
        life: the epoch's.
        member: at the other end.
        connection: its socket, which ``life`` owns.
        changed: notified whenever something was read or written, or the connection has ended.
        deliver: takes messages by their key.

    Attributes:
        queued, written: pieces. Guarded by ``changed``, like those that follow.
        sent, confirmed: frames, and those known to be read.
        failure: why nothing more will come.
    """

    def __init__(
        self,
        life: Lifetime,
        member: str,
        connection: socket.socket,
        changed: threading.Condition,
        deliver: Callable[[bytes, PeerMessage], None],
    ) -> None:
        self.member = member
        self.queued = self.written = self.sent = self.confirmed = 0
        self.failure: EpochChanged | None = None
        self._life, self._connection, self._changed, self._deliver = life, connection, changed, deliver
        self._left = self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # guards what follows
        self._pending: deque[memoryview] = deque()
        self._writing = False
        self._writer: threading.Thread | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to read."""
        self._start(self._read_all, "from")

    def _start(self, target: Callable[[], None], direction: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"bamboo-{direction}-{self.member}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    # -- reading -----------------------------------------------------------------------------------------
    def _read_all(self) -> None:
        try:
            while True:
                self._read_frame()
        except OSError as error:
            self._end(str(error) or type(error).__name__)
        except Exception as error:  # a broken peer: whoever waits for it must not wait for ever
            logger.exception("epoch %d: messages from %s", self._life.number, self.member)
            self._end(f"{type(error).__name__}: {error}")
            sockets.shut(self._connection)

    def _read_frame(self) -> None:
        block = _read(self._connection, wire.HEAD)
        head = wire.decode_head(block)
        if head.kind == wire.DATA:
            meta = bytes(_read(self._connection, head.extension)) if head.extension else head.meta
            key, tensors = wire.decode_meta(head, meta)
            for tensor in tensors:
                if tensor.data.numel():
                    _read_into(self._connection, wire.view(tensor.data))
            self._deliver(key, PeerMessage(self.member, head.sequence, head.structure, tensors, time.monotonic()))
        elif head.kind == wire.FLUSH:
            self.write([wire.control(wire.ACK, head.sequence)])
        else:
            with self._changed:
                if head.kind == wire.ACK:
                    self.confirmed = head.sequence
                else:
                    self._left = True
                self._changed.notify_all()

    def _end(self, reason: str) -> None:
        """The connection has ended."""
        if self._life.aborted is None and not self._left:
            failure: EpochChanged = self._life.lost(self.member, f"connection ended: {reason}")
        else:
            failure = EpochChanged(f"member {self.member} has left epoch {self._life.number}")
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()
        with self._work:
            self._work.notify_all()

    def check(self) -> None:
        """Raise why nothing more will come, if so."""
        if self.failure is not None:
            raise self.again(self.failure)

    @staticmethod
    def again(failure: EpochChanged) -> EpochChanged:
        """A fresh copy of a thread's failure, to be raised in another."""
        again = PeerLost(str(failure), failure.member) if isinstance(failure, PeerLost) else EpochChanged(str(failure))
        again.__cause__ = failure
        return again

    # -- writing -----------------------------------------------------------------------------------------
    def write(self, pieces: Sequence[memoryview]) -> int:
        """Write pieces of frames, or have them written; returns the number of pieces queued up to the last of them."""
        with self._work:
            left = list(pieces)
            if not self._writing and not self._pending:
                left = _send_now(self._connection, left)
            with self._changed:
                self.queued += len(pieces)
                self.written += len(pieces) - len(left)
                ticket = self.queued
            if left:
                self._pending.extend(left)
                if self._writer is None:
                    self._writer = self._start(self._write_all, "to")
                self._work.notify_all()
        return ticket

    def _write_all(self) -> None:
        while True:
            with self._work:
                self._writing = False
                self._work.wait_for(lambda: self._pending or self.failure is not None or self._closed)
                if self.failure is not None or self._closed:
                    self._pending.clear()
                    return
                piece = self._pending.popleft()
                self._writing = True
            try:
                self._connection.sendall(piece)
            except OSError as error:
                # The connection is over. The reader finds that too, after what the peer has said at last.
                logger.info("epoch %d: writing to %s failed: %s", self._life.number, self.member, error)
                sockets.shut(self._connection, socket.SHUT_WR)  # where it is not (out of memory): now it is
                with self._work:
                    self._pending.clear()
                return
            with self._changed:
                self.written += 1
                self._changed.notify_all()
            del piece

    # -- the end -----------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Tell the peer that we leave on purpose, unless we are in the middle of a frame."""
        self._closed = True
        with self._work:
            if not self._writing and not self._pending and self.failure is None:
                _send_now(self._connection, [wire.control(wire.BYE)])

    def join(self) -> None:
        """Join the threads; the connection has been shut down."""
        with self._work:
            self._work.notify_all()
        for thread in self._threads:
            thread.join()


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
