"""Fetches of snapshots that another worker offers; :mod:`.offers` has the protocol."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable

import torch

from ...errors import TransferError
from .. import wire
from ..connection import Connection, Traffic
from ..wire import payloads
from ..wire.payloads import WireTensor
from .offers import BULK

#: What a fetch brings: the text, and the tensors.
Fetched = tuple[str, list[torch.Tensor]]


class Fetch:
    """Copies what ``member`` offers under ``key``, from its construction on. Waits for a key that is not offered yet.

    Where the connection breaks after a part has come, it is made anew, and the copy goes on; where it breaks before, or
    is refused, the copy has failed. It is not repeated: the caller knows whether it is still needed.

    Args:
        call: makes a connection, as :meth:`~..hub.Hub.call`.
        member: the one that offers it, and ``place``: its own.
        key: of the offer.
        timeout_s: seconds without progress (an answer, or a piece of it) until it is given up. A copy that moves
            never times out.

    Attributes:
        share: of the snapshot that has arrived, from 0 to 1.
    """

    purpose = BULK

    def __init__(
        self, call: Callable[[str, str, Traffic], Connection], member: str, place: str, key: str, timeout_s: float
    ) -> None:
        self.share = 0.0
        self._make_call, self._member, self._place, self._key, self._timeout_s = call, member, place, key, timeout_s
        self._changed = threading.Condition()  # guards what follows
        self._over: TransferError | bool = False
        self._next, self._offer = 0, 0  # the piece that is due, and the number of the offer that it is of
        self._tensors: list[WireTensor] = []
        self._empty: deque[memoryview] = deque()  # memory that is still to be filled
        self._moved, self._moved_at = False, time.monotonic()  # since the connection was made, and when
        self._connection: Connection | None = None
        with self._changed:
            self._call()

    def done(self) -> bool:
        """Whether :meth:`result` returns, or raises, at once."""
        with self._changed:
            return self._ends_by() is None

    @property
    def complete(self) -> bool:
        """Whether all has arrived. Takes no lock, so that it can be asked while any is held."""
        return self._over is True

    def result(self, timeout_s: float | None = None) -> Fetched:
        """The text, and the tensors with dtype and shape of the originals, each contiguous, with memory of its own.

        Raises:
            TimeoutError: it has not ended within ``timeout_s`` seconds.
            TransferError: no progress for the fetch's own ``timeout_s``, the owner has withdrawn it or is gone, what
                came is not what was sent, or :meth:`cancel` was called.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (until := self._ends_by()) is not None:
                until = until if end is None else min(end, until)
                if until == end and time.monotonic() >= until:
                    raise TimeoutError(f"the copy has not ended within {timeout_s} s")
                self._changed.wait(until - time.monotonic())
            if isinstance(self._over, TransferError):
                raise self._over
        text, *tensors = (each.tensor() for each in self._tensors)
        return bytes(payloads.view(text)).decode(), tensors

    def cancel(self) -> None:
        """Ends the copy, without waiting: :meth:`result` raises ``TransferError`` unless it was done."""
        with self._changed:
            self._fail(f"it was stopped after {self.share:.0%}")

    def _ends_by(self) -> float | None:
        """Monotonic seconds when it is given up without progress; ``None`` once it is over."""
        until = self._moved_at + self._timeout_s
        if not self._over and time.monotonic() >= until:
            self._fail(f"no progress for {self._timeout_s:g} s after {self.share:.0%}")
        return None if self._over else until

    def _fail(self, reason: str) -> None:
        if not self._over:
            self._tensors.clear()
            self._empty.clear()
            self._end(TransferError(f"the copy of {self._key!r} from {self._member} has failed: {reason}"))

    def _end(self, over: TransferError | bool) -> None:
        self._over = over
        if self._connection is not None:
            self._connection.hang_up()
        self._changed.notify_all()

    def _call(self) -> None:
        try:
            self._connection = self._make_call(self._member, self._place, self)
        except (OSError, ValueError) as error:
            self._fail(f"it cannot be reached: {error}")

    # -- the loop's thread -------------------------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        """Asks for the missing pieces."""
        with self._changed:
            asked = torch.tensor(self._offer)
            connection.send(0, wire.encode(self._key.encode(), self._next, asked))

    def closed(self, connection: Connection, reason: str | None) -> None:
        """Calls again, if anything came of the last call."""
        with self._changed:
            if self._over:
                return
            if self._moved:
                self._moved = False
                self._call()
            else:
                self._fail(str(reason))

    def receive(self, connection: Connection, head: wire.FrameHead, key: bytes, tensors: list[WireTensor]) -> None:
        """Takes a piece.

        Raises:
            ConnectionError: it is not what was sent.
            ProtocolError: this version does not understand it.
        """
        with self._changed:
            if self._over:
                return
            if head.structure == payloads.NOTHING:
                self._fail(f"it was withdrawn after {self.share:.0%}")
                return
            data, facts = (each.tensor() for each in tensors)
            crc, offer = facts.tolist()
            piece = payloads.view(data)
            if head.sequence != self._next or zlib.crc32(piece) != crc:
                raise ConnectionError(f"piece {self._next} does not have the checksum of what was sent")
            self._take(piece)
            self._next, self._offer, self._moved, self._moved_at = self._next + 1, offer, True, time.monotonic()
            if not self._empty:
                self._end(True)

    def _take(self, piece: memoryview) -> None:
        if not self._next:
            self._tensors = wire.described(piece)
            self._empty.extend(payloads.view(each.data) for each in self._tensors if each.data.numel())
        else:
            while len(piece):
                target = self._empty.popleft()
                count = min(len(target), len(piece))
                target[:count] = piece[:count]
                piece = piece[count:]
                if count < len(target):
                    self._empty.appendleft(target[count:])
        total, left = sum(each.data.numel() for each in self._tensors), sum(map(len, self._empty))
        self.share = 1.0 - left / total if total else 1.0
