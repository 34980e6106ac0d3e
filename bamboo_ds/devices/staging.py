"""The way of tensors between a device and host memory, beside what the device computes.

::

    computing        ... writes the tensor |                         | reads the tensor ...
    out-stream                             copies it to the host |   ^
    writer (network)                                             sends |
    in-stream                                                        copies it to the device

No thread of the script waits for a device: a copy to the host begins when the device has computed the tensor, and the
network's writer takes it when its mark is reached; a copy to the device begins when the message is taken, and what the
device computes from it follows its mark. Both ends keep what is copied, and where to, until then.

A host's own tensors go as they are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class StreamMark(Protocol):
    """A point in what a device does; torch's events are such."""

    def query(self) -> bool:
        """Whether the device is through with all before it."""

    def synchronize(self) -> None:
        """Waits until the device is through with all before it."""


class Streams(Protocol):
    """Copies between a device and host memory. Called by the main thread, but :meth:`memory`."""

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on a device."""

    def memory(self, size: int) -> torch.Tensor:
        """Host memory of ``size`` bytes that a device copies to and from by itself, flat, with any content.

        For any thread.
        """

    def copy_out(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> StreamMark:
        """Begins to copy flat bytes to the host, once the device has computed what it was told to so far.

        ``sources`` and ``targets`` have to be there, and stay as they are, until the mark.
        """

    def copy_in(
        self, sources: Sequence[torch.Tensor], after: StreamMark | None
    ) -> tuple[list[torch.Tensor], StreamMark]:
        """Begins to copy flat bytes to this process's device, once ``after`` is reached; as :meth:`copy_out` otherwise.

        They may be the targets of the copy that ``after`` is the end of.
        """

    def order(self, mark: StreamMark) -> None:
        """Makes the device's work from now on follow ``mark``."""

    def mark(self) -> StreamMark:
        """The end of what the device was told to compute so far."""

    def seconds(self, begin: StreamMark, end: StreamMark) -> float:
        """Seconds between two marks that are reached."""


#: Bytes that are copied to the host by one call, if that makes no more than so many calls.
_CHUNK, _CHUNKS = 1 << 21, 64


class Copy:
    """Copies that are under way, in the order of their ``marks``; ``kept`` has to be there until the last one.

    Args:
        marks: with where in a message what comes by each of them begins, in bytes.
    """

    def __init__(self, marks: Sequence[tuple[int, StreamMark]], kept: Any) -> None:
        self.marks = [mark for _, mark in marks]
        self._begins, self._through, self._kept = [begin for begin, _ in marks], 0, kept

    def reached(self, end: int | None = None) -> bool:
        """Whether those of a message's first ``end`` bytes are complete, or all; then what was kept is let go.

        For any thread.
        """
        through = self._through
        while through < len(self.marks) and (end is None or self._begins[through] < end):
            if not self.marks[through].query():
                return False
            through += 1
        self._through = through
        if through == len(self.marks):
            self._kept = None
        return True


class Staging:
    """Copies of this process's tensors between its device and host memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        # Also those that nobody waits for any more, since the epoch of what was to be sent has ended.
        self._leaving: deque[Copy] = deque()
        self._arriving: deque[Copy] = deque()

    def out(self, sources: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[torch.Tensor], Copy]:
        """Begins to copy flat bytes to the host, a chunk at a time, so that the first ones are there soon.

        Args:
            sources: each with where in a message it begins.
        """
        targets = [self.streams.memory(source.numel()) for _, source in sources]
        marks, kept = [], []
        for begin, parts, into in [*_chunks(sources, targets)] or [(0, [], [])]:
            marks.append((begin, self.streams.copy_out(parts, into)))
            kept.append((parts, into))
        copy = Copy(marks, (sources, targets, kept))
        _keep(copy, self._leaving)
        return targets, copy

    def into(self, sources: Sequence[torch.Tensor], after: Copy | None = None) -> list[torch.Tensor]:
        """Flat bytes of the host on the device, for what it is told to compute from now on.

        Args:
            after: brings them to the host.
        """
        found, mark = self.streams.copy_in(sources, None if after is None else after.marks[-1])
        _keep(Copy([(0, mark)], sources), self._arriving)
        self.streams.order(mark)
        return found


_staging: Staging | None = None


def use(streams: Streams | None) -> None:
    """Makes this process's tensors go and come by ``streams``; ``None``: while the host waits, if at all."""
    global _staging
    _staging = None if streams is None else Staging(streams)


def current() -> Staging | None:
    """The streams by which tensors go and come, if this process has a device."""
    return _staging


def _chunks(
    sources: Sequence[tuple[int, torch.Tensor]], targets: Sequence[torch.Tensor]
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    """Parts of ``sources`` and ``targets`` that are copied by one call, with where the first one begins."""
    size = max(_CHUNK, sum(source.numel() for _, source in sources) // _CHUNKS)
    begins: list[int] = []
    parts: list[torch.Tensor] = []
    into: list[torch.Tensor] = []
    filled = 0
    for (begin, source), target in zip(sources, targets, strict=True):
        for first in range(0, source.numel(), size):
            begins.append(begin + first)
            parts.append(source[first : first + size])
            into.append(target[first : first + size])
            filled += parts[-1].numel()
            if filled >= size:
                yield begins[0], parts, into
                begins, parts, into, filled = [], [], [], 0
    if parts:
        yield begins[0], parts, into


def _keep(copy: Copy, under_way: deque[Copy]) -> None:
    """Keeps ``copy`` until it is complete. Those of one stream end in their order."""
    while under_way and under_way[0].reached():
        under_way.popleft()
    under_way.append(copy)


class Waiter:
    """Waits for marks of a device, one after the other, in about the order in which they are reached."""

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[tuple[StreamMark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def when(self, mark: StreamMark, call: Callable[[], None]) -> None:
        """Calls ``call``, on another thread, once ``mark`` is reached."""
        self._awaited.put((mark, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bamboo-staging", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Waits for no more of them. The thread ends when its device is through, which may be never."""
        self._awaited.put(None)

    def _run(self) -> None:
        while (awaited := self._awaited.get()) is not None:
            mark, call = awaited
            try:
                mark.synchronize()
                call()
            except Exception:  # the script's thread finds it, too, in what it tells the device next
                logger.exception("the device has failed")
            del awaited, mark, call
