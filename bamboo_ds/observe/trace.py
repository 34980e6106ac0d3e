"""A job's life as a trace for Perfetto (https://ui.perfetto.dev), from its events and the timelines beside them.

The form is Chrome's JSON, whose rules are those of the `Trace Event Format`_: ``M`` names processes and threads, ``X``
is a span, ``b`` and ``e`` are the ends of one that others may overlap, ``i`` is an instant. Members are processes,
their stages threads; times are microseconds since the first event or span.

.. _Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from . import events as ev
from .spans import PASSES, PAUSES, REDUNDANT, Kind, Span, Timeline

#: Process of what no member does alone.
_JOB = 1
#: Threads of a member; those of stages follow, by rank.
_ITERATIONS, _MEMBER, _RECOVERIES, _COPIES, _STAGES = range(1, 6)
_NAMES = {
    _ITERATIONS: "iterations",
    _MEMBER: "commit, pauses, checkpoints",
    _RECOVERIES: "recoveries (events)",
    _COPIES: "copies of state (events)",
}
_STEPS, _CHANGES, _CHECKPOINTS = range(1, 4)
_JOB_NAMES = {_STEPS: "steps", _CHANGES: "losses and plans", _CHECKPOINTS: "checkpoints"}
#: Spans that belong to no stage although they are recorded with the one that was bound.
_OF_MEMBER = PAUSES | {Kind.COMMIT, Kind.REHEARSE, Kind.SAVE, Kind.COPY}
_SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.REDUNDANT_FORWARD: "rF", Kind.REDUNDANT_BACKWARD: "rB"}


def chrome_trace(events: Sequence[ev.Event], timelines: Sequence[Timeline] = ()) -> dict[str, Any]:
    """The trace as an object for JSON. Without ``timelines`` it has what events tell."""
    trace = _Trace(_origin(events, timelines))
    for timeline in timelines:
        trace.member(timeline.member, timeline.head.host)
    for event in events:
        trace.event(event)
    for timeline in timelines:
        trace.spans(timeline)
    return trace.result()


def _origin(events: Sequence[ev.Event], timelines: Sequence[Timeline]) -> float:
    """Seconds since 1970 before which nothing has begun."""
    told = [event.time.timestamp() - _longest(event) for event in events]
    done = [timeline.utc(span.begin) for timeline in timelines for span in timeline.spans]
    return min([*told, *done], default=0.0)


def _longest(event: ev.Event) -> float:
    """Seconds before an event's emission at which what it tells of may have begun."""
    if isinstance(event, ev.Recovered):
        return event.pause_seconds + event.redo_seconds + (event.detection_seconds or 0.0)
    if isinstance(event, ev.Reconfigured):
        return event.pause_seconds
    if isinstance(event, ev.MemberLost):
        return event.detection_seconds or 0.0
    if isinstance(event, (ev.Step, ev.ReplicaBuilt, ev.CheckpointSaved)):
        return event.seconds
    return 0.0


class _Trace:
    """Collects the events of a trace. Times of its methods are seconds since its zero.

    Args:
        origin: seconds since 1970 that are its zero.
    """

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._pids: dict[str, int] = {}
        self._named: dict[tuple[int, int], str] = {}
        self._found: list[dict[str, Any]] = []
        self._about: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._pipelines = 1
        self._ends: dict[tuple[int, int], float] = {}
        self._name_process(_JOB, "job")

    # -- what there is ------------------------------------------------------------------------------------

    def member(self, member: str, host: str | None = None) -> int:
        """The process of a member, which is made where there is none."""
        if member not in self._pids:
            self._pids[member] = pid = _JOB + 1 + len(self._pids)
            self._name_process(pid, member if host is None else f"{member} on {host}")
        return self._pids[member]

    def event(self, event: ev.Event) -> None:
        """Adds what an event tells."""
        now = event.time.timestamp() - self._origin
        match event:
            case ev.Step():
                loss = event.loss if event.loss is None or math.isfinite(event.loss) else str(event.loss)
                told = {"loss": loss, "redundant forwards": f"{event.frc_done} of {event.frc_total}"}
                name, told = f"step {event.step}", {"epoch": event.epoch, **told}
                self._complete(_JOB, _STEPS, name, *self._next(_JOB, _STEPS, now - event.seconds, now), told)
            case ev.PlanWritten():
                self._pipelines = event.pipelines or self._pipelines
                self._instant(f"plan {event.epoch}", now, reason=event.reason, owners=event.owners)
            case ev.MemberLost():
                at = now - (event.detection_seconds or 0.0)
                self._instant(f"loss of {event.member_id}", at, event.member_id, reason=event.reason, why=event.detail)
            case ev.TakeoverDone():
                pipeline, stage = event.role
                told = {"pipeline": pipeline, "former": event.from_, "seconds": event.seconds}
                self._instant(f"takeover of stage {stage}", now, event.to, **told)
            case ev.Recovered() if event.member is not None:
                self._recovered(event, event.member, now)
            case ev.Reconfigured() if event.member is not None:
                told = {"step": event.step, "epoch": event.epoch, "previous": event.previous}
                pid = self.member(event.member)
                times = self._next(pid, _RECOVERIES, now - event.pause_seconds, now)
                self._complete(pid, _RECOVERIES, "change of plan", *times, told)
            case ev.ReplicaBuilt() if event.member is not None:
                told = {"bytes": event.bytes, "step": event.step}
                name = f"copy of stage {event.role[1]} (pipeline {event.role[0]})"
                self._overlapping(self.member(event.member), _COPIES, name, now - event.seconds, now, told)
            case ev.CheckpointSaved():
                told = {"path": event.path, "bytes": event.bytes}
                name = f"{'own ' if event.own else ''}checkpoint of step {event.step}"
                self._overlapping(_JOB, _CHECKPOINTS, name, now - event.seconds, now, told)
            case ev.MemberJoined() | ev.MemberLeft():
                what = "joins" if isinstance(event, ev.MemberJoined) else "leaves"
                self._instant(f"{event.member_id} {what}", now, event.member_id)
            case ev.RunStarted() | ev.RunFinished() | ev.Fatal() | ev.Restart() | ev.NoticeReceived():
                self._instant(event.event.replace("_", " "), now)
            case (
                ev.CheckpointFailed()
                | ev.ReplicaMismatch()
                | ev.MemberCorrupt()
                | ev.ExactMismatch()
                | ev.MembersAwaited()
            ):
                self._instant(event.event.replace("_", " "), now)

    def spans(self, timeline: Timeline) -> None:
        """Adds what a worker has recorded."""
        pid, shift = self.member(timeline.member, timeline.head.host), timeline.offset - self._origin
        for span in timeline.spans:
            told: dict[str, Any] = {"step": span.step}
            if span.micro_batch is not None:
                told["micro-batch"] = span.micro_batch
            if span.part:
                told["first block"] = span.part
            if span.cut:
                told["cut"] = "by a loss"
            begin, end = span.begin + shift, span.end + shift
            self._complete(pid, self._track(pid, span), _title(span), begin, end, told, _category(span))

    def result(self) -> dict[str, Any]:
        """The trace: names first, then everything by its time, longer spans before those that they contain."""
        found = sorted(self._found, key=lambda each: (each["ts"], -each.get("dur", 0)))
        return {"traceEvents": [*self._about, *found], "displayTimeUnit": "ms"}

    # -- parts --------------------------------------------------------------------------------------------

    def _recovered(self, event: ev.Recovered, member: str, now: float) -> None:
        """The parts of a recovery, one after the other; those that are not known are part of the whole alone."""
        pid, agreed = self.member(member), now - event.redo_seconds
        noticed, rebuilt = agreed - event.pause_seconds, agreed - event.rebuild_seconds
        begin, now = self._next(pid, _RECOVERIES, noticed - (event.detection_seconds or 0.0), now)
        redone = {"forwards redone": event.forwards_redone, "backwards redone": event.backwards_redone}
        told = {"step": event.step, "epoch": event.epoch, "mode": event.mode, **redone}
        self._complete(pid, _RECOVERIES, "recovery", begin, now, told)
        names = "detection", "plan", "rebuild", "redone and remaining work"
        borders = [min(max(at, begin), now) for at in (begin, noticed, rebuilt, agreed, now)]
        for name, (first, last) in zip(names, itertools.pairwise(borders), strict=True):
            if last > first:
                self._complete(pid, _RECOVERIES, name, first, last, {})

    def _next(self, pid: int, tid: int, begin: float, end: float) -> tuple[float, float]:
        """The times of the next span of a thread, which begins no earlier than the last one has ended.

        Events have the time at which an agent wrote them, a moment after their durations ended: by that spans that
        follow each other could overlap, which threads cannot have.
        """
        begin = max(begin, self._ends.get((pid, tid), begin))
        self._ends[pid, tid] = end = max(begin, end)
        return begin, end

    def _track(self, pid: int, span: Span) -> int:
        if span.kind is Kind.ITERATION:
            return self._thread(pid, _ITERATIONS)
        if span.role is None or span.kind in _OF_MEMBER:
            return self._thread(pid, _MEMBER)
        pipeline, stage = span.role
        number = _STAGES + stage * 10_000 + pipeline
        name = f"stage {stage}" if self._pipelines == 1 and not pipeline else f"stage {stage} of pipeline {pipeline}"
        return self._thread(pid, number, name)

    def _thread(self, pid: int, tid: int, name: str | None = None) -> int:
        if (pid, tid) not in self._named:
            self._named[pid, tid] = name or (_JOB_NAMES if pid == _JOB else _NAMES)[tid]
            self._meta("thread_name", pid, tid, name=self._named[pid, tid])
            self._meta("thread_sort_index", pid, tid, sort_index=tid)
        return tid

    def _name_process(self, pid: int, name: str) -> None:
        self._meta("process_name", pid, 0, name=name)
        self._meta("process_sort_index", pid, 0, sort_index=pid)

    def _meta(self, what: str, pid: int, tid: int, **values: Any) -> None:
        self._about.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values})

    def _complete(
        self,
        pid: int,
        tid: int,
        name: str,
        begin: float,
        end: float,
        told: dict[str, Any],
        category: str = "event",
    ) -> None:
        place = {"pid": pid, "tid": self._thread(pid, tid)}
        first = _micros(begin)
        times = {"ts": first, "dur": round(_micros(end) - first, 1)}
        self._found.append({"ph": "X", "name": name, "cat": category, **place, **times, "args": told})

    def _overlapping(self, pid: int, tid: int, name: str, begin: float, end: float, told: dict[str, Any]) -> None:
        what = {"name": name, "cat": _NAMES.get(tid, "") if pid != _JOB else _JOB_NAMES[tid], "id": next(self._ids)}
        place = {"pid": pid, "tid": self._thread(pid, tid)}
        self._found.append({"ph": "b", **what, **place, "ts": _micros(begin), "args": told})
        self._found.append({"ph": "e", **what, **place, "ts": _micros(end)})

    def _instant(self, name: str, at: float, member: str | None = None, **told: Any) -> None:
        """A line across the job's own tracks, and across those of ``member``."""
        for pid, tid in [(_JOB, _CHANGES), *([] if member is None else [(self.member(member), _MEMBER)])]:
            place = {"pid": pid, "tid": self._thread(pid, tid), "ts": _micros(at), "s": "p"}
            self._found.append({"ph": "i", "name": name, "cat": "event", **place, "args": told})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _title(span: Span) -> str:
    name = _SHORT.get(span.kind, span.kind.value)
    title = name if span.micro_batch is None else f"{name} {span.micro_batch}"
    if span.kind is Kind.ITERATION:
        title = f"iteration {span.step}"
    return f"{title} (redone)" if span.redone else f"{title} (cut)" if span.cut else title


def _category(span: Span) -> str:
    groups: Iterable[tuple[str, Iterable[Kind]]] = (("pass", PASSES), ("redundant", REDUNDANT), ("pause", PAUSES))
    if span.redone:
        return "redone"
    return next((name for name, kinds in groups if span.kind in kinds), "instruction")
