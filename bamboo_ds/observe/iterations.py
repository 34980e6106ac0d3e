"""An iteration as a grid of members and time: the 1F1B schedule as it was, with what a loss has made of it.

A row is a member; it has a lane for every stage of which it has computed something::

    m1   stage 1   F0 F1 F2 .. B0 F3 B1 ..
         stage 2      r0 r1       |pause| F2 B0 B1 ..      taken over: redundant passes, then the owner's
    m2   stage 2   F0 F1 .. x                              lost
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from . import events as ev
from .model import JobModel
from .spans import PASSES, PAUSES, REDUNDANT, Kind, Span, Timeline
from .view import LossDetail

#: What is drawn in one colour, by the kind of a span; what is not here is left blank.
STYLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.REDUNDANT_FORWARD: "redundant forward",
    Kind.REDUNDANT_BACKWARD: "redundant backward",
    Kind.RECV_ACTIVATION: "wait for a message",
    Kind.RECV_GRAD: "wait for a message",
    Kind.RECV_REPLICA: "wait for a message",
    Kind.RECV_PART: "wait for a message",
    Kind.RECV_CHANGES: "wait for a message",
    Kind.REDUCE: "reduction, gradients to shadows",
    Kind.REDUCE_TIED: "reduction, gradients to shadows",
    Kind.SEND_SUMS: "reduction, gradients to shadows",
    Kind.SEND_REPLICA: "reduction, gradients to shadows",
    Kind.COMMIT: "commit",
    Kind.STEP: "optimizer step, of replicas too",
    Kind.STEP_REPLICA: "optimizer step, of replicas too",
    Kind.AWAIT_PLAN: "pause: new plan",
    Kind.REBUILD: "pause: new connections",
    Kind.AGREE: "pause: agreement",
    Kind.REHEARSE: "rehearsal",
    Kind.COPY: "copy of state",
}
REDONE = "redone"
LOST = "lost"
_ACROSS = PAUSES | {Kind.COMMIT, Kind.REHEARSE, Kind.COPY}


@dataclass(frozen=True)
class Cell:
    """A rectangle; seconds since the iteration's begin."""

    style: str
    begin: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class StageLane:
    """A member's work on a stage.

    Attributes:
        replica: of which it was the shadow when the iteration began.
    """

    role: tuple[int, int]
    cells: tuple[Cell, ...]
    replica: bool = False


@dataclass(frozen=True)
class MemberRow:
    """A member.

    Attributes:
        across: cells of the member, over all lanes.
        died: when it was lost, if it was.
    """

    member: str
    lanes: tuple[StageLane, ...]
    across: tuple[Cell, ...]
    died: float | None = None


@dataclass(frozen=True)
class IterationGrid:
    """An iteration.

    Attributes:
        seconds: from its first begin to its last end.
        notes: what events tell of it.
    """

    step: int
    seconds: float
    rows: tuple[MemberRow, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _Iteration:
    """The spans of an iteration, by member; that of a step which was done twice is the last one."""

    step: int
    begin: float
    end: float
    spans: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def paused(self) -> bool:
        return any(span.kind in PAUSES for found in self.spans.values() for span in found)


class Recorded:
    """The iterations of a job that its timelines have.

    Args:
        events: the job's.
        timelines: what its workers have recorded.
    """

    def __init__(self, events: Sequence[ev.Event], timelines: Sequence[Timeline]) -> None:
        self._events, self._timelines = events, timelines
        self._lost = list(_losses(events))
        self._spans: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
        whole: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for timeline in timelines:
            for span in timeline.spans:
                if span.kind is Kind.ITERATION:
                    whole[span.step].append((timeline.utc(span.begin), timeline.utc(span.end)))
                elif span.kind in STYLES:
                    self._spans[span.step][timeline.member].append(span)
        self._whole = {step: max(found) for step, found in whole.items()}
        self._times = whole

    def chosen(self) -> list[int]:
        """The newest iteration with a loss, and an undisturbed one before it, which comes first.

        Without a loss: the newest undisturbed one. A file may hold several runs: the newest is the last one in time.

        Raises:
            ConfigError: no iteration is recorded.
        """
        if not self._whole:
            raise ConfigError(
                'there is no recorded iteration beside these events: "bamboo.observe.timeline" is "off", or nothing '
                'has happened that "losses" keeps; "all" keeps every iteration'
            )
        newest_first = [
            self._iteration(step) for step in sorted(self._whole, key=self._whole.__getitem__, reverse=True)
        ]
        hit = next((n for n, each in enumerate(newest_first) if each.paused and self._losses(each)), None)
        before = newest_first if hit is None else newest_first[hit + 1 :]
        calm = [each.step for each in before if not each.paused][:1]
        return [*calm, *([] if hit is None else [newest_first[hit].step])] or [newest_first[0].step]

    def grid(self, step: int) -> IterationGrid:
        """The grid of iteration ``step``; raises :class:`ConfigError` if it is not recorded."""
        if step not in self._whole:
            known = ", ".join(map(str, sorted(self._whole))) or "none"
            raise ConfigError(f"--step {step}: that iteration is not recorded; these are: {known}")
        found = self._iteration(step)
        died = {
            event.member_id: event.time.timestamp() - (event.detection_seconds or 0.0)
            for event in self._events
            if isinstance(event, ev.MemberLost)
        }
        rows = []
        for timeline in self._timelines:
            if timeline.member in found.spans:
                at = died.get(timeline.member)
                lost = None if at is None or at > found.end else _death(timeline, found, self._timelines, at)
                rows.append(_row(timeline, found, None if lost is None else lost - found.begin))
        return IterationGrid(step, found.end - found.begin, tuple(rows), tuple(self._notes(found)))

    def _iteration(self, step: int) -> _Iteration:
        last = self._whole[step]
        # All members do an iteration at the same time; one that repeats the step comes later.
        same = [each for each in self._times[step] if each[0] < last[1] and each[1] > last[0]]
        found = _Iteration(step, min(b for b, _ in same), max(e for _, e in same))
        for t in self._timelines:
            spans = [
                s
                for s in self._spans[step].get(t.member, ())
                if t.utc(s.end) > found.begin and t.utc(s.begin) < found.end
            ]
            if spans:
                found.spans[t.member] = spans
                found.begin = min(found.begin, t.utc(spans[0].begin))
        return found

    def _losses(self, found: _Iteration) -> list[tuple[LossDetail, str]]:
        """The losses that have interrupted it, not of another run in the file, and the plans' reasons."""
        return [
            (each, reason)
            for each, reason in self._lost
            if each.loss.step == found.step and found.spans.keys() & {survivor.id for survivor in each.survivors}
        ]

    def _notes(self, found: _Iteration) -> Iterable[str]:
        losses = [each.loss for each, _ in self._losses(found)]
        if losses:
            yield from (reason for _, reason in self._losses(found))
            yield f"pause {max(loss.pause_seconds or 0.0 for loss in losses) * 1000:.0f} ms"
            backwards = sum(loss.backwards_redone for loss in losses)
            yield f"redone: {sum(loss.forwards_redone for loss in losses)} forward, {backwards} backward"


def _losses(events: Sequence[ev.Event]) -> Iterable[tuple[LossDetail, str]]:
    """The losses of all runs, each with the reason of the plan after it."""
    runs = [JobModel(bounded=False)]
    for event in events:
        if isinstance(event, ev.RunStarted):
            runs.append(JobModel(bounded=False))
        runs[-1].fold(event)
    for run in runs:
        reasons = {plan.epoch: plan.reason for plan in run.plans}
        for loss in run.losses.views:
            detail = run.losses.detail(loss.number)
            if detail is not None and loss.epoch is not None:
                yield detail, reasons[loss.epoch]


def _death(timeline: Timeline, found: _Iteration, timelines: Sequence[Timeline], at: float) -> float:
    """The time of the worker's death, in seconds since 1970; ``at`` is when the leader told of it, less what it knows.

    It was after the last thing that it did, and before the first of the others paused.
    """
    others = [
        t.utc(span.begin)
        for t in timelines
        if t is not timeline
        for span in found.spans.get(t.member, ())
        if span.kind is Kind.AWAIT_PLAN
    ]
    last = timeline.utc(found.spans[timeline.member][-1].end)
    return max(last, min([at, *(begin for begin in others if begin >= last)]))


def _row(timeline: Timeline, found: _Iteration, died: float | None) -> MemberRow:
    spans = found.spans[timeline.member]
    shift = timeline.offset - found.begin
    roles = sorted({s.role for s in spans if s.role is not None and s.kind in PASSES | REDUNDANT}, key=_by_stage)
    own = next((s.role for s in spans if s.kind in PASSES), None)
    roles.sort(key=lambda role: role != own)  # what it had from the start first
    lanes = []
    for role in roles:
        mine = [s for s in spans if s.role == role and s.kind not in _ACROSS]
        first = next(s for s in mine if s.kind in PASSES | REDUNDANT)
        lanes.append(StageLane(role, tuple(_cells(mine, shift)), first.kind in REDUNDANT))
    across = _cells((s for s in spans if s.kind in _ACROSS or s.role not in roles), shift)
    return MemberRow(timeline.member, tuple(lanes), tuple(across), died)


def _by_stage(role: tuple[int, int]) -> tuple[int, int]:
    return role[1], role[0]


def _cells(spans: Iterable[Span], shift: float) -> list[Cell]:
    return [
        Cell(
            REDONE if span.redone else STYLES[span.kind],
            span.begin + shift,
            span.end + shift,
            str(span.micro_batch) if span.kind in PASSES | REDUNDANT else "",
        )
        for span in spans
    ]
