"""The carrier that every connection has: the bytes follow in the stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import wire


class InStream:
    """See :class:`.carrier.Carrier`. Host memory is not copied before the kernel takes it."""

    def ready(self, size: int) -> bool:
        """Always true: the connection holds back what the kernel does not take."""
        return True

    def send(self, segment: Sequence[memoryview]) -> list[memoryview]:
        """The bytes behind the mark."""
        return [wire.HERE, *segment]

    def receive(self, mark: int, segment: Sequence[memoryview]) -> Iterable[memoryview]:
        """All memory of the segment."""
        return segment

    def abort(self) -> None:
        """Does nothing: there is only the connection's socket."""
