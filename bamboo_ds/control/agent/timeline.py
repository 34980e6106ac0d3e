"""The timeline of a worker, which writes spans into a pipe and its agent those that are wanted to a file."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from ...observe.span_pipe import ENV_FD, SpanReader
from ...observe.spans import PAUSES, Kind, Span, SpanFile, path_for

logger = logging.getLogger("bamboo_ds.control.agent")

#: Spans that are written at once: the agent must not be kept from its worker.
_AT_ONCE = 2000
#: Iterations that are wanted before a disturbed one.
BEFORE = 2
#: Spans that are held at most until it is known whether they are wanted.
_HELD = 2**14


class AroundLosses:
    """Chooses the spans around losses and changes of plan: that iteration, two before and one after it.

    A pause (:data:`~bamboo_ds.observe.spans.PAUSES`) tells of such a change. Spans are held until the iteration after
    it is done, so that nothing is written while members recover; the newest 16,384 of them at most.
    """

    def __init__(self) -> None:
        self._held: deque[Span] = deque(maxlen=_HELD)
        self._wanted = False  # those that are held
        self._disturbed = False  # the iteration under way

    def add(self, span: Span) -> Collection[Span]:
        """Takes the next span in the order of their ends; returns those to write now."""
        if not self._wanted:
            while self._held and self._held[0].step < span.step - BEFORE:
                self._held.popleft()
        self._held.append(span)
        if span.kind in PAUSES:
            self._wanted = self._disturbed = True
        elif span.kind is Kind.ITERATION:
            if not self._disturbed:
                return self.end(lost=False)
            self._disturbed = False
        return ()

    def end(self, lost: bool) -> Collection[Span]:
        """Spans to write if there are no more; of a ``lost`` worker these are at least its last three iterations."""
        if not (self._wanted or lost):
            return ()
        wanted, self._held, self._wanted = self._held, deque(maxlen=_HELD), False
        return wanted


class TimelineWriter:
    """Writes the spans that are wanted by the worker's ``observe.timeline`` beside the job's events.

    A failure is logged once, and nothing is written from then on; the worker never hears of it.

    Args:
        events: the job's file of events, or ``None`` without a place for a timeline.
        job, member, rank: whose it is.
    """

    def __init__(self, events: str | None, job: str, member: str, rank: int) -> None:
        self._around_losses = AroundLosses()
        self._due: deque[Span] = deque()
        self._file: SpanFile | None = None
        self._pipe: SpanReader | None = None
        if events is not None:
            self._file = SpanFile(path_for(events, member), job, member, rank)
            self._pipe = SpanReader()

    @property
    def fds(self) -> Collection[int]:
        """Descriptors that the worker inherits."""
        return () if self._pipe is None else (self._pipe.writing,)

    @property
    def environment(self) -> Mapping[str, str]:
        """The timeline's variables in the worker's environment."""
        return {} if self._pipe is None else {ENV_FD: str(self._pipe.writing)}

    def write(self) -> None:
        """Writes what is wanted by now, or the first part of it."""
        if not self._due:  # until then the rest waits in the pipe
            self._read()
        self._write(_AT_ONCE)

    def end(self, lost: bool) -> None:
        """Writes the rest when the worker has ended, and its last iterations if it was ``lost``. Idempotent."""
        if self._pipe is None:
            return
        self._read()
        self._due += self._around_losses.end(lost)
        self._write(len(self._due))
        self._pipe.close()
        self._pipe = None
        if self._file is not None:
            self._file.close()

    def _read(self) -> None:
        """Reads the pipe, and chooses what is wanted of it."""
        if self._pipe is None or self._file is None:
            return
        spans = self._pipe.read()
        if self._pipe.missing:
            logger.warning("the timeline lacks %d spans: they came faster than they were read", self._pipe.missing)
        if self._pipe.all:
            self._due += spans
        else:
            for span in spans:
                self._due += self._around_losses.add(span)

    def _write(self, count: int) -> None:
        """Writes the first ``count`` of the spans that are due."""
        if self._file is None:
            return
        spans = [self._due.popleft() for _ in range(min(count, len(self._due)))]
        try:
            self._file.write(spans)
        except OSError as error:
            logger.warning("there is no timeline of this member from now on: %s", error)
            self._file.close()
            self._file = None
