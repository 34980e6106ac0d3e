"""The timeline of a worker, which the worker records in memory and its agent writes to a file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from ...observe.ring import ENV_FD, SpanRing
from ...observe.spans import Span, SpanFile, path_for

logger = logging.getLogger("bamboo_ds.control.agent")

#: Spans that are written at once: the agent must not be kept from its worker.
_AT_ONCE = 2000
#: Of a worker that is lost the spans of so many iterations are kept.
_LAST_STEPS = 3


class TimelineWriter:
    """Writes the spans that the worker has said are wanted (``observe.timeline``) beside the job's events.

    A failure is logged once, and nothing is written from then on; the worker never hears of it.

    Args:
        events: the job's file of events; ``None``: there is no place for a timeline.
        job, member, rank: whose it is.
    """

    def __init__(self, events: str | None, job: str, member: str, rank: int) -> None:
        self._ring: SpanRing | None = None
        if events is None:
            return
        self._file = SpanFile(path_for(events, member), job, member, rank)
        try:
            self._ring = SpanRing.create()
        except (OSError, AttributeError) as error:  # some builds of Python lack memfd_create
            self._tell(error)

    @property
    def fds(self) -> Collection[int]:
        """What the worker inherits."""
        return () if self._ring is None else (self._ring.fd,)

    @property
    def environment(self) -> Mapping[str, str]:
        """What the worker's environment says of it."""
        return {} if self._ring is None else {ENV_FD: str(self._ring.fd)}

    def write(self) -> None:
        """Write what is wanted by now, or the first part of it."""
        if self._ring is not None:
            begin, end = self._ring.wanted()
            self._write(begin, min(end, begin + _AT_ONCE))

    def end(self, lost: bool) -> None:
        """The worker has ended: write the rest, and its last iterations if it was ``lost``. Idempotent."""
        if self._ring is None:
            return
        self._write(*self._ring.wanted(ended=True))
        if self._ring is not None and lost and self._ring.mode == "losses":
            self._write(self._ring.done, self._ring.written, _LAST_STEPS)
        if self._ring is not None:
            self._stop()

    def _write(self, begin: int, end: int, last_steps: int | None = None) -> None:
        """Write records ``begin`` to ``end``; if ``last_steps`` is given, only those of so many iterations."""
        if begin >= end or self._ring is None:
            return
        spans, missed = self._ring.read(begin, end)
        self._ring.done = end
        if last_steps is not None:
            spans = _newest(spans, last_steps)
        elif missed:
            logger.warning("the timeline lacks %d spans: newer ones came before they were written", missed)
        try:
            self._file.write(spans)
        except OSError as error:
            self._tell(error)
            self._stop()

    def _stop(self) -> None:
        assert self._ring is not None
        self._ring.close()
        self._ring = None
        self._file.close()

    def _tell(self, error: Exception) -> None:
        logger.warning("there is no timeline of this member from now on: %s", error)


def _newest(spans: list[Span], steps: int) -> list[Span]:
    """Those of the last ``steps`` iterations."""
    first = spans[-1].step - steps + 1 if spans else 0
    return [span for span in spans if span.step >= first]
