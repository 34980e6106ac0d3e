"""The newest spans of a worker in memory that its agent shares, so that they outlive the worker.

The worker only stores into memory: no disk, no call into the kernel, nothing that could block. Its agent reads, and
writes files. Where the worker is killed the agent still has what it did until then::

    head      mode | written | keep_from | keep_to     of the worker
              done                                     of the agent: records before it need not be kept any more
    records   number modulo CAPACITY: number, step, kind, marks, role, part, micro-batch, begin, end
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
_HEAD = struct.Struct("<QQQQ")
_RECORDS_AT = 64
_RECORD = struct.Struct("<IIBBhhHidd")
_WORD = struct.Struct("<Q")
_WRITTEN_AT, _KEEP_AT, _DONE_AT = 8, 16, 32
_KEEP = struct.Struct("<QQ")
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
        ring._memory[: _HEAD.size] = _HEAD.pack(0, 0, _NEVER, _NEVER)
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
        self._memory.close()
        if self.fd != _NONE:
            os.close(self.fd)
            self.fd = _NONE

    # -- the worker's side --------------------------------------------------------------------------------

    def switch(self, mode: str) -> None:
        """Say which spans are wanted, one of :data:`MODES`."""
        _WORD.pack_into(self._memory, 0, MODES.index(mode))

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
        _WORD.pack_into(self._memory, _WRITTEN_AT, number + 1)

    def keep(self, begin: int, end: int) -> None:
        """Records ``begin`` to ``end`` are wanted; if these are equal, all from there on, but not yet."""
        _KEEP.pack_into(self._memory, _KEEP_AT, begin, end)

    # -- both sides ---------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """Which spans are wanted."""
        return MODES[_WORD.unpack_from(self._memory, 0)[0]]

    @property
    def written(self) -> int:
        """Records so far."""
        return int(_WORD.unpack_from(self._memory, _WRITTEN_AT)[0])

    @property
    def done(self) -> int:
        """The agent has written, or passed over, the records before this one."""
        return int(_WORD.unpack_from(self._memory, _DONE_AT)[0])

    # -- the agent's side ---------------------------------------------------------------------------------

    @done.setter
    def done(self, number: int) -> None:
        _WORD.pack_into(self._memory, _DONE_AT, number)

    def wanted(self, ended: bool = False) -> tuple[int, int]:
        """The records to write next (an empty range: none).

        Args:
            ended: there are no more records to come.
        """
        done = self.done
        mode, written, begin, end = _HEAD.unpack_from(self._memory, 0)
        if mode == MODES.index("all"):
            return done, written
        if mode == MODES.index("off") or begin == _NEVER:
            return done, done
        if begin == end and ended:
            end = written
        return max(done, begin), max(done, end)

    def read(self, begin: int, end: int) -> tuple[list[Span], int]:
        """Records ``begin`` to ``end``, and how many of them are missing since newer ones have taken their place."""
        first = max(begin, self.written - self._capacity)
        data = {number: self._raw(number) for number in range(first, end)}
        oldest = self.written - self._capacity  # the worker may have gone on
        spans = [_span(raw) for number, raw in data.items() if number >= oldest and raw[0] == number & 0xFFFFFFFF]
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
