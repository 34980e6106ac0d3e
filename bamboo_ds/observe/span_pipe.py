"""A kernel pipe by which an agent has the spans of its worker, those of a killed one included.

The worker writes a record for each span into the pipe, which outlives it; the agent reads the pipe and writes files.
Neither a disk nor an agent that does not read blocks the worker: a record that the pipe has no room for is dropped.
Records are numbered, so that the agent knows how many it lacks.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import MutableMapping
from contextlib import suppress

from .spans import Kind, Span

logger = logging.getLogger("bamboo_ds.observe")

#: Bytes of the pipe, room for 26,000 spans: what Linux allows to all users. It takes memory only for spans in it.
CAPACITY = 2**20
#: The variable by which a worker gets the pipe's descriptor.
ENV_FD = "BAMBOO_TIMELINE_FD"

_KINDS = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_REDONE, _CUT, _ALL = 1, 2, 4
_NONE = -1
#: Number, step, kind, marks, pipeline, stage, part, micro-batch, begin, end. The kernel writes so few bytes as a whole.
_RECORD = struct.Struct("<QIBBhhHidd")


class SpanWriter:
    """The worker's end. It belongs to the main thread.

    Attributes:
        all: the agent is to write every span to the file, not only those around losses.
    """

    def __init__(self, fd: int) -> None:
        self.all = False
        self._fd: int | None = fd
        self._number = 0

    @classmethod
    def inherited(cls, environ: MutableMapping[str, str]) -> SpanWriter | None:
        """The pipe that this process has from its agent; takes the variable out of ``environ``."""
        text = environ.pop(ENV_FD, None)
        if text is None:
            return None
        os.set_inheritable(int(text), False)
        return cls(int(text))

    def write(self, span: Span) -> None:
        """Hands a span to the agent. Never blocks, and raises nothing: a failure is logged once, and ends it."""
        if self._fd is None:
            return
        pipeline, stage = span.role or (_NONE, _NONE)
        record = _RECORD.pack(
            self._number,
            span.step,
            _NUMBERS[span.kind],
            _REDONE * span.redone | _CUT * span.cut | _ALL * self.all,
            pipeline,
            stage,
            span.part,
            _NONE if span.micro_batch is None else span.micro_batch,
            span.begin,
            span.end,
        )
        self._number += 1
        try:
            os.write(self._fd, record)
        except BlockingIOError:
            pass  # there is no room: the agent finds the gap
        except OSError as error:
            logger.warning("there is no timeline of this member from now on: %s", error)
            self._fd = None


class SpanReader:
    """The agent's end, which makes the pipe.

    Attributes:
        writing: the descriptor that the worker inherits. It stays open here too.
        all: see :class:`SpanWriter`; false until the worker has written.
        missing: spans before those read last that had no room.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.all = False
        self.missing = 0
        self._next = 0
        with suppress(OSError):  # the system allows less: spans that have no room are counted
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, capacity)

    def read(self) -> list[Span]:
        """The spans since the last call, in the order of their ends."""
        self.missing = 0
        try:
            data = os.read(self._reading, CAPACITY // _RECORD.size * _RECORD.size)
        except BlockingIOError:
            return []  # there are none
        spans = []
        for number, step, kind, marks, pipeline, stage, part, micro_batch, begin, end in _RECORD.iter_unpack(data):
            self.missing += number - self._next
            self._next = number + 1
            self.all = bool(marks & _ALL)
            role = None if pipeline == _NONE else (pipeline, stage)
            m = None if micro_batch == _NONE else micro_batch
            marked = bool(marks & _REDONE), bool(marks & _CUT)
            spans.append(Span(_KINDS[kind], step, begin, end, role, part, m, *marked))
        return spans

    def close(self) -> None:
        """Gives the pipe back."""
        os.close(self._reading)
        os.close(self.writing)
