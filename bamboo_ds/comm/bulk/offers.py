"""Offers of a worker to others in bulk: snapshots of state, at a bounded rate, and answers to questions.

A caller has a connection of its own, and sends one data frame: the key, as the frame's sequence the
first piece that it lacks, and the number of the offer that it has pieces of (0: none). The owner answers with pieces in
order, each a data frame for the key with the piece's number, its bytes, their crc32 and the offer's number; or with a
frame that carries nothing: there is nothing, or nothing any more. A key that is not offered yet waits. The first piece
is the head of a frame with all tensors (:func:`~..wire.describe`), the text among them; the others are their bytes.
"""

from __future__ import annotations

import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import torch

from ...errors import TransferError, UnsupportedError
from .. import wire
from ..connection import Connection
from ..loop import SocketLoop
from ..wire import payloads
from ..wire.payloads import WireTensor

#: Purpose of the connections.
BULK = "bulk"
#: Most bytes of a piece.
PIECE = 1 << 20
#: Pieces that may wait for the kernel until another one is made.
_AHEAD = 1


class TokenBucket:
    """Spreads bytes over time: by any time t no more than ``burst + rate * t`` were let through.

    Args:
        rate: bytes per second.
        burst: bytes that may go at once after a pause.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"a rate of {rate} bytes per second transfers nothing; give a positive one, or None")
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = burst, clock()

    def reserve(self, size: int) -> float:
        """Takes ``size`` bytes; they may go in the returned number of seconds. First come, first served."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - size
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class Offer:
    """A text and tensors, in pieces. Contiguous tensors in host memory are not copied before their pieces are made.

    Args:
        number: tells it from others of this worker.
        paced: whether its bytes count for the rate.

    Attributes:
        count: of pieces.

    Raises:
        UnsupportedError: a tensor that cannot be sent.
    """

    def __init__(self, number: int, text: str, tensors: Sequence[torch.Tensor], paced: bool) -> None:
        self.number, self.paced = number, paced
        content = [payloads.tensor_of(text.encode()), *tensors]
        self._views = []
        for place, tensor in enumerate(content):
            try:
                self._views.append(payloads.view(payloads.as_bytes(tensor)))
            except (TypeError, NotImplementedError) as error:
                raise UnsupportedError(f"tensor {place - 1} of a snapshot cannot be sent: {error}") from error
        self._head = wire.describe(content)
        self._ends = list(accumulate(each.nbytes for each in self._views))
        self.count = 1 - (-self._ends[-1] // PIECE)

    def size(self, number: int) -> int:
        """Bytes of a piece, but for the head."""
        return min(PIECE, self._ends[-1] - (number - 1) * PIECE) if number else 0

    def piece(self, number: int) -> torch.Tensor:
        """A copy of the bytes of a piece."""
        if number == 0:
            return payloads.tensor_of(self._head)
        begin = (number - 1) * PIECE
        data = torch.empty(self.size(number), dtype=torch.uint8)
        target = payloads.view(data)
        place = bisect_right(self._ends, begin)
        while len(target):
            view = self._views[place]
            some = view[begin - self._ends[place] + view.nbytes :][: len(target)]
            target[: len(some)] = some
            target, begin, place = target[len(some) :], begin + len(some), place + 1
        return data


@dataclass
class _Request:
    """A request over a connection.

    Attributes:
        key: of the offer.
        piece: the next one.
        number: of the offer that earlier pieces were of; 0: there were none.
        offer: what it gets, once there is something.
        due: monotonic seconds when the next piece may go.
    """

    key: str
    piece: int
    number: int
    offer: Offer | None = None
    due: float | None = None


class Offers:
    """All that this worker offers. Its methods may be called from any thread.

    Args:
        loop: sends the pieces, each when its time has come.
    """

    purpose = BULK

    def __init__(self, loop: SocketLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._bucket: TokenBucket | None = None
        self._answers: Mapping[str, Callable[[str], str]] = {}
        self._offers: dict[str, Offer] = {}
        self._requests: dict[Connection, _Request] = {}  # whose turn it is comes first
        self._closed = False
        loop.timers.append(self._advance)

    def begin(self, rate_mb_per_s: float | None, answers: Mapping[str, Callable[[str], str]]) -> None:
        """Goes by these settings from now on.

        Args:
            rate_mb_per_s: bound on the tensors' bytes of all copies together, in 10^6 bytes per second; ``None``: none.
            answers: functions of a key, by what the keys begin with: a request for such a key gets the text that is
                computed for it. They are called on the loop's thread and must be quick.
        """
        rate = None if rate_mb_per_s is None else rate_mb_per_s * 1e6
        with self._lock:
            # No more at once than in a second.
            self._bucket = None if rate is None else TokenBucket(rate, min(PIECE, rate))
            self._answers = answers
            self._look_again()

    def offer(self, key: str, text: str, tensors: Sequence[torch.Tensor]) -> None:
        """Publishes a snapshot; an earlier one under ``key`` is withdrawn.

        Contiguous tensors in host memory are not copied: none may change until :meth:`withdraw`, or another
        offer for ``key``, has returned.

        Raises:
            UnsupportedError: a tensor that cannot be sent.
            TransferError: this worker offers nothing any more.
        """
        offer = Offer(next(self._numbers), text, tensors, paced=True)
        with self._lock:
            if self._closed:
                raise TransferError(f"{key!r} cannot be offered: this worker offers nothing any more")
            self._withdraw(key)
            self._offers[key] = offer
            self._look_again()

    def withdraw(self, key: str) -> None:
        """Withdraws the offer, if there is one; a worker that is getting it is told. Takes no longer than one piece."""
        with self._lock:
            self._withdraw(key)

    def close(self) -> None:
        """Withdraws everything, for good. Idempotent."""
        with self._lock:
            self._closed, self._answers = True, {}
            for key in list(self._offers):
                self._withdraw(key)
            for connection in list(self._requests):
                self._refuse(connection)

    def _withdraw(self, key: str) -> None:
        offer = self._offers.pop(key, None)
        for connection, request in list(self._requests.items()):
            if offer is not None and request.offer is offer:
                self._refuse(connection)

    def _refuse(self, connection: Connection) -> None:
        request = self._requests.pop(connection)
        connection.send(0, wire.encode(request.key.encode(), request.piece, None))

    # -- who asks ----------------------------------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        """See :class:`~..connection.Traffic`."""

    def receive(self, connection: Connection, head: wire.FrameHead, key: bytes, tensors: list[WireTensor]) -> None:
        """Takes a request."""
        request = _Request(key.decode(), head.sequence, int(tensors[0].tensor()))
        with self._lock:
            self._requests[connection] = request
            self._look(connection, request)

    def closed(self, connection: Connection, reason: str | None) -> None:
        """See :class:`~..connection.Traffic`."""
        with self._lock:
            self._requests.pop(connection, None)

    def _look_again(self) -> None:
        """Has the loop look at all requests again; the calling thread may be another one."""
        for connection, request in list(self._requests.items()):
            if request.offer is None:
                self._look(connection, request)
        self._loop.wake()

    def _look(self, connection: Connection, request: _Request) -> None:
        offer = self._offers.get(request.key)
        if offer is None:
            answer = next((make for prefix, make in self._answers.items() if request.key.startswith(prefix)), None)
            if answer is not None:
                offer = Offer(next(self._numbers), answer(request.key), (), paced=False)
        void = request.number and (offer is None or offer.number != request.number)
        if self._closed or void or (offer is not None and request.piece >= offer.count):
            self._refuse(connection)
        else:
            request.offer = offer

    # -- the loop's thread -------------------------------------------------------------------------------
    def _advance(self) -> float | None:
        """Sends one piece, if one is due; returns the seconds until the next one is."""
        waits, now = [], time.monotonic()
        with self._lock:
            for connection, request in self._requests.items():
                offer = request.offer
                if offer is None or connection.sent - connection.written > _AHEAD:
                    continue  # as soon as the kernel takes more, this is asked again
                if request.due is None:
                    bucket = self._bucket if offer.paced else None
                    request.due = now if bucket is None else now + bucket.reserve(offer.size(request.piece))
                if request.due <= now:
                    self._send(connection, request, offer)
                    return 0.0
                waits.append(request.due - now)
        return min(waits, default=None)

    def _send(self, connection: Connection, request: _Request, offer: Offer) -> None:
        piece = offer.piece(request.piece)
        facts = torch.tensor([zlib.crc32(payloads.view(piece)), offer.number])
        connection.send(0, wire.encode(request.key.encode(), request.piece, (piece, facts)))
        del self._requests[connection]
        request.piece, request.due = request.piece + 1, None
        if request.piece < offer.count:
            self._requests[connection] = request  # after all others
