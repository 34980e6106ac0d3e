"""The interface of carriers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Carrier(Protocol):
    """Gets the data of segments from one end of a connection to the other.

    A connection's stream has heads of frames, and a mark (1 byte) before each segment: by it the other end knows which
    carrier has the segment, and when. Called with the connection's locks held: :meth:`ready` and :meth:`send` by one
    thread at a time, :meth:`receive` by one, :meth:`abort` when there is none left. Nothing here waits or fails for
    what the other end does.
    """

    def ready(self, size: int) -> bool:
        """Whether a segment of ``size`` bytes, 1 to ``wire.SEGMENT``, can be sent now."""

    def send(self, segment: Sequence[memoryview]) -> list[memoryview]:
        """Takes a segment; :meth:`ready` has just said so.

        Returns:
            What the stream gets for it, the mark first. Nothing else refers to the memory of ``segment`` any more.
        """

    def receive(self, mark: int, segment: Sequence[memoryview]) -> Iterable[memoryview]:
        """Fills ``segment`` with the one that ``mark`` tells of.

        Returns:
            The memory that is left to be filled from the stream, in order.

        Raises:
            ProtocolError: there is no such mark.
        """

    def abort(self) -> None:
        """The connection has ended: let go of memory and descriptors. Idempotent."""
