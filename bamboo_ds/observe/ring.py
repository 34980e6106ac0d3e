"""The newest spans of a worker in memory that its agent shares, so that they outlive the worker.

The worker only stores into memory: no disk, no call into the kernel, nothing that could block. Its agent reads, and
writes files. Where the worker is killed the agent still has what it did until then::

    head      mode | written | keep_from | keep_to     of the worker
              done                                     of the agent: records before it need not be kept any more
    records   number modulo CAPACITY: number, step, kind, marks, role, part, micro-batch, begin, end

Each word of the head is stored and loaded whole. A record may be read while it is stored: it counts only if its number
is right before and after it was read, and the worker has not come round to it meanwhile.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import MutableMapping

from .spans import Kind, Span

#: Spans that are kept: some iterations of 500 micro-batches.
CAPACITY = 2**14
#: The variable by which a worker gets the memory's descriptor.
ENV_FD = "BAMBOO_TIMELINE_FD"
#: Values of ``observe.timeline``, by their number in the head.
MODES = ("off", "losses", "all")

_KINDS = tuple(Kind)
NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
REDONE, CUT = 1, 2
_NONE = -1
_RECORDS_AT = 64
_RECORD = struct.Struct("<IIBBhhHidd")
#: Words of the head.
_MODE, _WRITTEN, _KEEP_FROM, _KEEP_TO, _DONE = range(5)
_NEVER = 2**64 - 1


class SpanRing:
    """The memory, as either process has it. Records are numbered from 0 on.

    Args:
        fd: of the memory. The object owns it; -1 where it is mapped alone.
        capacity: records that it holds, equal in both processes.
    """

    def __init__(self, fd: int, capacity: int = CAPACITY) -> None:
        self.fd, self._capacity = fd, capacity
        self._memory = mmap.mmap(fd, _RECORDS_AT + capacity * _RECORD.size)
        self._head = memoryview(self._memory)[:_RECORDS_AT].cast("Q")
        self._next = self.written

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> SpanRing:
        """New memory, of which nothing is wanted yet; raises ``OSError``. Pages that no record is in take no memory."""
        fd = os.memfd_create("bamboo-timeline", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _RECORDS_AT + capacity * _RECORD.size)
            ring = cls(fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        ring._head[_KEEP_FROM] = ring._head[_KEEP_TO] = _NEVER
        return ring

    @classmethod
    def inherited(cls, environ: MutableMapping[str, str]) -> SpanRing | None:
        """The memory that this process has from its agent; takes the variable out of ``environ``."""
        text = environ.pop(ENV_FD, None)
        if text is None:
            return None
        ring = cls(int(text))
        os.close(ring.fd)  # the mapping stays
        ring.fd = _NONE
        return ring

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._head.release()
        self._memory.close()
        if self.fd != _NONE:
            os.close(self.fd)
            self.fd = _NONE

    # -- the worker's side --------------------------------------------------------------------------------

    def switch(self, mode: str) -> None:
        """Say which spans are wanted, one of :data:`MODES`."""
        self._head[_MODE] = MODES.index(mode)

    def record(
        self,
        kind: int,
        step: int,
        begin: float,
        end: float,
        role: tuple[int, int] | None = None,
        part: int = 0,
        micro_batch: int | None = None,
        marks: int = 0,
    ) -> None:
        """Add a span; see :class:`~.spans.Span`. ``kind`` is one of :data:`NUMBERS`, ``marks`` are flags."""
        number = self._next
        pipeline, stage = role or (_NONE, _NONE)
        _RECORD.pack_into(
            self._memory,
            _RECORDS_AT + number % self._capacity * _RECORD.size,
            number & 0xFFFFFFFF,
            step,
            kind,
            marks,
            pipeline,
            stage,
            part,
            _NONE if micro_batch is None else micro_batch,
            begin,
            end,
        )
        self._next = number + 1
        self._head[_WRITTEN] = number + 1

    def keep(self, begin: int, end: int) -> None:
        """Records ``begin`` to ``end`` are wanted; if these are equal, all from there on, but not yet."""
        # A reader between the two finds an end before the begin: nothing.
        self._head[_KEEP_TO] = 0
        self._head[_KEEP_FROM] = begin
        self._head[_KEEP_TO] = end

    # -- both sides ---------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """Which spans are wanted."""
        return MODES[self._head[_MODE]]

    @property
    def written(self) -> int:
        """Records so far."""
        return self._head[_WRITTEN]

    @property
    def done(self) -> int:
        """The agent has written, or passed over, the records before this one."""
        return self._head[_DONE]

    # -- the agent's side ---------------------------------------------------------------------------------

    @done.setter
    def done(self, number: int) -> None:
        self._head[_DONE] = number

    def wanted(self, ended: bool = False) -> tuple[int, int]:
        """The records to write next (an empty range: none).

        Args:
            ended: there are no more records to come.
        """
        done = self.done
        begin, end = self._head[_KEEP_FROM], self._head[_KEEP_TO]
        if self.mode == "all":
            return done, self.written
        if self.mode == "off" or begin == _NEVER:
            return done, done
        if begin == end and ended:
            end = self.written
        return max(done, begin), max(done, end)

    def read(self, begin: int, end: int) -> tuple[list[Span], int]:
        """Records ``begin`` to ``end``, and how many of them are missing since newer ones have taken their place."""
        # The record after the newest one may be under way: it takes the oldest one's place.
        first = max(begin, self.written - self._capacity + 1)
        data = {number: (self._raw(number), self._raw(number)[0]) for number in range(first, end)}
        oldest = self.written - self._capacity + 1  # the worker may have gone on
        spans = [
            _span(raw)
            for number, (raw, again) in data.items()
            if number >= oldest and raw[0] == again == number & 0xFFFFFFFF
        ]
        return spans, max(0, end - begin) - len(spans)

    def _raw(self, number: int) -> tuple[int | float, ...]:
        return _RECORD.unpack_from(self._memory, _RECORDS_AT + number % self._capacity * _RECORD.size)


def _span(raw: tuple[int | float, ...]) -> Span:
    _, step, kind, marks, pipeline, stage, part, micro_batch, begin, end = raw
    return Span(
        _KINDS[int(kind)],
        int(step),
        begin,
        end,
        None if pipeline == _NONE else (int(pipeline), int(stage)),
        int(part),
        None if micro_batch == _NONE else int(micro_batch),
        bool(int(marks) & REDONE),
        bool(int(marks) & CUT),
    )
