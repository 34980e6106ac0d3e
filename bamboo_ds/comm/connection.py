"""One connection to another worker: frames that go out, and frames that arrive. It outlives epochs.

Point-to-point traffic does not use gloo: a gloo send or receive that is in the middle of its data when the
connection ends is never woken, neither by the end nor by a shutdown (its ``Pair::signalException`` passes over
the operations in ``tx_`` and ``rx_``).
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..devices.staging import Copy
from . import sockets, wire
from .carriers.sharing import Sharing
from .wire.payloads import WireTensor, view

logger = logging.getLogger(__name__)

#: The kernel takes at most so many pieces in one call.
_PIECES = 512
#: Bytes that are made ready for the kernel, and cannot be given up any more then.
_READY = 1 << 21
#: Bytes that one thread writes at most before others may say what is to go first.
_WRITE_AT_MOST = 1 << 25
#: Bytes by which small messages are read, and that one call of :meth:`Connection.read` reads at most.
_BUFFER, _READ_AT_MOST = 1 << 16, 1 << 22
#: Bytes of a frame that tells how fast the network is.
_TIMED = 1 << 20


class Traffic(Protocol):
    """The use of connections of one purpose. Called by whichever thread attends to the connection.

    Attributes:
        purpose: names it in handshakes.
    """

    purpose: str

    def opened(self, connection: Connection) -> None:
        """Both ends have proven who they are."""

    def receive(self, connection: Connection, head: wire.FrameHead, key: bytes, tensors: list[WireTensor]) -> None:
        """A frame has arrived, with its key and what it carries."""

    def closed(self, connection: Connection, reason: str | None) -> None:
        """It has ended, and is none of the hub's any more; ``reason``: none of an orderly end."""


@dataclass(eq=False)
class _Outgoing:
    """A frame, or what of it is not ready yet.

    Attributes:
        number: of the connection's frames.
        head, segments: see :mod:`.wire`.
        copy: brings its data to host memory.
        yields: later frames that do not may go first.
        done: bytes of its data that are ready.
        void: it ends with its next mark.
    """

    number: int
    epoch: int
    head: list[memoryview]
    segments: wire.Segments
    copy: Copy | None
    yields: bool
    done: int = 0
    void: bool = False

    def complete(self) -> bool:
        """Whether its next segment is in host memory."""
        if self.copy is None or self.void or not self.segments:
            return True
        return self.copy.reached(self.done + _size(self.segments[0]))

    def give_up(self) -> None:
        """Sends no more of its data."""
        self.segments, self.void = deque([[wire.VOID]]), True


class Ended(ConnectionError):
    """A connection has, as the kernel or the other end says; no script raises this."""


class Connection:
    """A TCP connection to ``member``. Nothing here waits for the other end.

    Args:
        member: at the other end.
        sock: not blocking.
        traffic: what it is for.
        watch: called whenever :attr:`interest` changes.
        host: name of this one, if the two may share memory with others that have the same.

    Attributes:
        open: both ends have proven who they are; frames wait until then.
        ended: no frame goes out or comes in any more.
        driven: a thread that waits reads, and not the loop.
        reading: held by the thread that reads, or ends the connection.
        sent: frames given to :meth:`send`.
        asked, confirmed: those that it was asked about, and that the other end has said it has read.
        sharing: what carries the data of segments.
        rate: bytes per second at which the last frame of some size went out; ``None`` before the first.
    """

    def __init__(
        self,
        member: str,
        sock: socket.socket,
        traffic: Traffic,
        watch: Callable[[Connection], None],
        host: str | None = None,
    ) -> None:
        self.member, self.socket, self.traffic = member, sock, traffic
        self.open = self.ended = self.driven = False
        self.asked = 0
        self.reading = threading.Lock()
        self.sent = self.confirmed = 0
        self.sharing = Sharing(member, sock, host)
        self.rate: float | None = None
        self._watch = watch
        self._sending = threading.Lock()  # guards what follows
        self._queue: deque[_Outgoing] = deque()
        self._yielding: deque[_Outgoing] = deque()  # frames that let those of the queue pass
        self._begun: _Outgoing | None = None  # whose first segments are ready, or out
        self._interrupted: _Outgoing | None = None  # the same, by that one
        self._left: set[int] = set()  # numbers of frames that are not out
        self._ready: deque[memoryview] = deque()
        self._taken = self._prepared = 0  # bytes: by the kernel, and made ready in all
        self._moved = 0  # bytes of data, whichever carrier has them
        self._ends: deque[tuple[int, int]] = deque()  # where in them frames end that are not out, with their numbers
        self._timed: tuple[int, int, float] | None = None  # a large frame that is on its way: number, size, since when
        self._paused = 0.0  # since when it has been interrupted
        self._blocked = False  # the kernel takes nothing now
        self._failure: OSError | None = None  # of a write: the kernel tells it once
        self._buffer = memoryview(bytearray(_BUFFER))
        self._first = self._last = 0  # of what is in the buffer
        self._budget = 0  # bytes that :meth:`read` may still take
        self._parser = self._parse()
        self._target = next(self._parser)

    @property
    def interest(self) -> int:
        """The events that the loop is to look for, as ``select.epoll`` has them."""
        return (0 if self.driven else select.EPOLLIN) | (select.EPOLLOUT if self._blocked else 0)

    @property
    def written(self) -> int:
        """Frames that the kernel has taken, or that were given up."""
        return self.sent - len(self._left)

    def has_written(self, number: int) -> bool:
        """Whether frame ``number`` is one of them."""
        return number not in self._left

    def has_confirmed(self, number: int) -> bool:
        """Whether the other end has said that it has read frame ``number``."""
        return self.confirmed >= number

    def share(self) -> None:
        """Offers the other end, which this one has called, to share memory."""
        with self._sending:
            offer = None if self.ended else self.sharing.offer()
        if offer is not None:
            self.send(wire.EVERY, offer)

    # -- sending -----------------------------------------------------------------------------------------
    def send(self, epoch: int, frame: wire.Segments, copy: Copy | None = None, yields: bool = False) -> int:
        """Sends a frame as far as the kernel takes it now, and keeps the rest; returns its number.

        Args:
            copy: brings its data to host memory. What is not there yet does not go out, nor do later frames; the caller
                sees to a :meth:`flush` at each of its marks.
            yields: later frames that do not yield go first, also between two of its segments. It never passes others.
        """
        with self._sending:
            self.sent += 1
            number = self.sent
            self._left.add(number)
            if not self.ended:
                (self._yielding if yields else self._queue).append(
                    _Outgoing(number, epoch, frame.popleft(), frame, copy, yields)
                )
            if self.open and not self._blocked:
                self._write()
        return number

    def flush(self) -> bool:
        """Goes on sending, once it is open; returns whether that has ended any frame."""
        with self._sending:
            before = len(self._left)
            if self.open:
                self._write()
            return len(self._left) < before

    def give_up(self, epoch: int) -> None:
        """Sends nothing more of ``epoch`` and those before it; a frame that has begun ends as a void one.

        What is ready for the kernel still goes out, as it is now: its memory may be changed when this returns.
        """
        with self._sending:
            self._ready = deque(memoryview(bytes(piece)) for piece in self._ready)
            for begun in (self._begun, self._interrupted):
                if begun is not None and begun.epoch <= epoch:
                    begun.give_up()
                    if self._timed is not None and self._timed[0] == begun.number:
                        self._timed = None
            self._left.difference_update(each.number for each in (*self._queue, *self._yielding) if each.epoch <= epoch)
            self._queue, self._yielding = (
                deque(each for each in frames if each.epoch > epoch) for frames in (self._queue, self._yielding)
            )

    def _write(self) -> None:
        blocked, most = False, self._moved + _WRITE_AT_MOST
        while not (self.ended or blocked) and self._prepare_some():
            some = [self._ready[index] for index in range(min(len(self._ready), _PIECES))]
            try:
                count = self.socket.sendmsg(some, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                blocked = True
                break
            except OSError as error:
                # The connection is over. The reading thread finds that too, after what the other end has said at last.
                logger.info("writing to %s failed: %s", self.member, error)
                self._failure = self._failure or error.with_traceback(None)  # whose frames keep what was sent
                sockets.shut(self.socket, socket.SHUT_WR)  # where it is not (out of memory): now it is
                self._forget()
                break
            self._note_taken(count)
            blocked = self._moved >= most  # the loop goes on
        if blocked != self._blocked:
            self._blocked = blocked
            self._watch(self)

    def _forget(self) -> None:
        """Nothing goes out any more."""
        for frames in (self._ready, self._queue, self._yielding):
            frames.clear()
        self._begun = self._interrupted = None

    def _prepare_some(self) -> bool:
        """Prepares enough for one call of the kernel; returns whether there is anything."""
        carried = False  # a segment that the other end can take as soon as it has the mark
        while not carried and self._prepared - self._taken < _READY and len(self._ready) < _PIECES:
            self._begin_next()
            frame = self._begun
            if frame is None or not frame.complete():
                break
            if frame.segments:
                segment = frame.segments.popleft()
                size = _size(segment)
                pieces = segment if frame.void else self.sharing.sender(size).send(segment)
                carried = self._prepare(pieces) <= size and not frame.void
                frame.done += size
                self._moved += size
            if not frame.segments:
                self._ends.append((self._prepared, frame.number))
                self._go_on()
        return bool(self._ready)

    def _begin_next(self) -> None:
        """Begins a frame if none is, or one that the one that is lets pass."""
        before = self._begun
        if before is not None and (before.void or not before.yields):
            return
        frame = self._next()
        if frame is None:
            return
        if before is not None:
            self._interrupted, self._paused = before, time.monotonic()
            self._prepare([wire.BETWEEN])
        self._begun = frame
        if self._timed is None:
            size = _size(frame.head) + sum(map(_size, frame.segments))
            if size >= _TIMED:
                self._timed = frame.number, size, time.monotonic()
        self._prepare(frame.head)

    def _go_on(self) -> None:
        """Goes on with the frame that was interrupted, if there is one; what has passed it counts for no rate."""
        self._begun, self._interrupted = self._interrupted, None
        if self._begun is not None and self._timed is not None and self._timed[0] == self._begun.number:
            number, size, since = self._timed
            self._timed = number, size, since + time.monotonic() - self._paused

    def _next(self) -> _Outgoing | None:
        """The frame that may begin now, whose data are in host memory."""
        first = self._queue[0] if self._queue else None
        if first is not None and first.complete():
            return self._queue.popleft()
        if self._begun is not None or not self._yielding:
            return None
        second = self._yielding[0]
        if second.complete() and (first is None or second.number < first.number):
            return self._yielding.popleft()
        return None

    def _prepare(self, pieces: list[memoryview]) -> int:
        self._ready.extend(pieces)
        size = _size(pieces)
        self._prepared += size
        return size

    def _note_taken(self, count: int) -> None:
        self._taken += count
        while self._ends and self._ends[0][0] <= self._taken:
            number = self._ends.popleft()[1]
            self._left.discard(number)
            if self._timed is not None and self._timed[0] == number:
                _, size, since = self._timed
                self.rate, self._timed = size / max(time.monotonic() - since, 1e-6), None
        while count:
            piece = self._ready.popleft()
            if count < piece.nbytes:
                self._ready.appendleft(piece[count:])
            count -= min(count, piece.nbytes)

    # -- reading -----------------------------------------------------------------------------------------
    def read(self) -> None:
        """Takes what has arrived, or some MiB of it, and leaves nothing in the buffer. Hold :attr:`reading`.

        Raises:
            Ended: the connection has.
            Exception: the other end does not keep to the form of frames, or a signal handler of the script has raised
                this. Then it is not known which bytes come next.
        """
        self._budget = _READ_AT_MOST
        while True:
            while len(self._target):
                if self._first < self._last:
                    self._take_from_buffer()
                    continue
                if self._budget <= 0:
                    return  # the rest is in the kernel, which tells of it; of what is in the buffer it would not tell
                direct = len(self._target) if len(self._target) >= _BUFFER else 0
                try:
                    if direct:  # and what comes after it: a mark, or the head of a frame
                        count = self.socket.recvmsg_into([self._target, self._buffer[: wire.HEAD]])[0]
                    else:
                        count = self.socket.recv_into(self._buffer)
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                        raise  # not the kernel's: a signal handler has run as the call returned
                    raise Ended(*error.args) from error
                if not count:
                    raise Ended(*(self._failure.args if self._failure else ["closed by the peer"]))
                self._budget -= count
                self._target = self._target[min(count, direct) :]
                self._first, self._last = 0, max(0, count - direct)
            self._target = next(self._parser)

    def _take_from_buffer(self) -> None:
        count = min(len(self._target), self._last - self._first)
        self._target[:count] = self._buffer[self._first : self._first + count]
        self._first, self._target = self._first + count, self._target[count:]

    def _parse(self) -> Generator[memoryview, None, None]:
        """Memory to be filled with what arrives next."""
        block, mark = memoryview(bytearray(wire.HEAD)), memoryview(bytearray(1))
        while True:
            yield from self._frame(block, mark)

    def _frame(self, block: memoryview, mark: memoryview, between: bool = False) -> Generator[memoryview, None, None]:
        """Does as :meth:`_parse`, for one frame: what it carries is none of the connection's any more once it is taken.

        Args:
            block, mark: memory for these.
            between: it comes between two segments of another one.
        """
        yield block
        head = wire.decode_head(block)
        meta = head.meta
        if head.extension:
            extension = bytearray(head.extension)
            yield memoryview(extension)
            meta = bytes(extension)
        key, tensors = wire.decode_meta(head, meta)
        for segment in wire.segments([view(tensor.data) for tensor in tensors]):
            yield mark
            while mark == wire.BETWEEN and not between:
                yield from self._frame(block, mark, between=True)
                yield mark
            if mark == wire.VOID:
                break
            yield from self._receive(mark[0], segment)
        else:
            self._take(head, key, tensors)

    def _receive(self, mark: int, segment: list[memoryview]) -> Iterable[memoryview]:
        carrier = self.sharing.receiver(mark)
        left = carrier.receive(mark, segment)
        if not left:
            self._budget -= _size(segment)
        return left

    def _take(self, head: wire.FrameHead, key: bytes, tensors: list[WireTensor]) -> None:
        if head.kind != wire.SHARE:
            self.traffic.receive(self, head, key, tensors)
        elif (answer := self.sharing.hear(head.sequence, key)) is not None:
            self.send(wire.EVERY, answer)

    # -- the end -----------------------------------------------------------------------------------------
    def hang_up(self) -> None:
        """Has the loop find that it has ended. From any thread."""
        with self._sending:
            if not self.ended:
                sockets.shut(self.socket)

    def end(self) -> None:
        """Closes the connection. Hold :attr:`reading`, or know that no thread reads."""
        with self._sending:
            self.ended = True
            self.socket.close()
            self._forget()
            self.sharing.end()


def _size(pieces: Iterable[memoryview]) -> int:
    return sum(piece.nbytes for piece in pieces)
