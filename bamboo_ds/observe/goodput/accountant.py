"""Goodput: what the seconds of every member were spent on, from the events of a job.

Events count in the order of the file, with the times of their emitters' clocks. Where those differ, what a label would
claim before its begin, or outside of its member's life, is left out (:mod:`.lives`).

One :class:`Accountant` serves jobs that go on and jobs that are over. For the former it settles: what is older than the
newest steps is added up and forgotten, so that its memory is bounded by the members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from statistics import median

from .. import events as ev
from .accounted import Accounted, GoodputReport, MemberAccount
from .lives import Category, Interval, Life, Rank, divided, spent
from .settled import Settled, SettledSteps

#: Undisturbed steps whose median duration is taken for that of an ordinary step.
_ORDINARY_STEPS = 9
#: Newest steps that are not settled: what is learnt later may still say otherwise of them.
_UNSETTLED = 32


@dataclass(eq=False)
class _Step:
    """A committed step, or the ``count`` up to it of which no event tells.

    Attributes:
        key: by which another step repeats it.
        ordinary: seconds that undisturbed steps before it took.
    """

    run: int
    number: int
    key: int
    begin: float
    end: float
    lives: list[Life]
    ordinary: float | None
    count: int = 1
    undone: bool = False

    @property
    def category(self) -> Category:
        return Category.WASTED if self.undone else Category.PRODUCTIVE


@dataclass(eq=False)
class _Recovery:
    """A member's :class:`~.events.Recovered`, emitted at ``end``, and the step that was interrupted, if it was one.

    Attributes:
        fault: when the first of the members was lost that it was without, if that is known.
        planned: nobody was lost: a plan could not wait for the step's end.
    """

    end: float
    told: ev.Recovered
    life: Life
    step: _Step | None
    fault: float | None
    planned: bool

    @property
    def begin(self) -> float:
        """The time at which this member was first without another one, as far as it can tell."""
        begin = self.end - self.told.redo_seconds - self.told.pause_seconds - (self.told.detection_seconds or 0.0)
        # Its pause may have begun before the leader was sure of the loss.
        return begin if self.fault is None else max(begin, self.fault)

    def label(self) -> None:
        """Splits the time from the loss to the end of the interrupted operation.

        Before the loss the member cannot have worked longer than an ordinary step takes. What the step took beyond
        that was waiting until the loss was noticed; beyond an ordinary step's work all was redone.
        """
        noticed, redone = self.begin, self.told.redo_seconds
        agreed = self.end - redone
        step, after = self.step, Category.PRODUCTIVE
        if step is not None and step.begin <= noticed < step.end:
            after = step.category
            if step.ordinary is not None:
                noticed = min(noticed, step.begin + step.ordinary)
                redone = min(redone, max(0.0, noticed - step.begin + redone - step.ordinary))
        self.life.label(
            noticed, agreed, Rank.RECOVERY, Category.RECONFIGURATION if self.planned else Category.DETECTION
        )
        self.life.label(agreed, agreed + redone, Rank.RECOVERY, Category.REDONE)
        self.life.label(agreed + redone, self.end, Rank.RECOVERY, after)


class Accountant:
    """Takes events in order, and adds up at any time.

    Args:
        settles: bound the memory by the members. A restart from a checkpoint that is older than the newest 32,000 steps
            then leaves those before them productive. Otherwise every interval of every member is known to the end.
    """

    def __init__(self, settles: bool = True) -> None:
        self._settles = settles
        self._origin: float | None = None
        self._now = 0.0
        self._lives: list[Life] = []
        self._recoveries: list[_Recovery] = []
        self._steps: list[_Step] = []
        self._built: list[tuple[Life, float, float]] = []  # replicas
        self._run = self._losses = self._leaves = self._restarts = 0
        self._ordinary: deque[float] = deque(maxlen=_ORDINARY_STEPS)
        self._saved: dict[str, int] = {}
        self._settled = Settled()
        self._begin(None)

    def _begin(self, at: float | None) -> None:
        """The workers start, for the first time or again; members of the first plan begin then."""
        self._started = at
        self._stopped: float | None = None
        self._members: dict[str, Life] = {}
        self._plans: dict[int, ev.PlanWritten] = {}
        self._entered: tuple[int, float] = (0, 0.0)  # the current epoch, and since when
        self._lost: list[Life] = []  # since the last step
        self._fault: float | None = None  # the first one before the last step, after the one before it
        self._last: _Step | None = None
        self._open: list[_Recovery] = []  # since the last step

    def add(self, event: ev.Event) -> None:
        """Takes the next event of the file."""
        at = event.time.timestamp()
        self._origin = at if self._origin is None else self._origin
        now = at - self._origin
        match event:
            case ev.RunStarted():
                self._end(self._now)
                self._run += 1
                self._begin(now)
            case ev.RunFinished():
                self._end(now)
            case ev.MemberJoined():
                self._join(event.member_id, now)
            case ev.MemberLost():
                self._losses += 1
                self._lose(event.member_id, now - (event.detection_seconds or 0.0))
            case ev.MemberLeft():
                self._leaves += 1
                for life in self._of([event.member_id]):
                    life.close(now)
            case ev.PlanWritten():
                self._plan(event, now)
            case ev.Recovered():
                self._enter(event.epoch, now - event.redo_seconds)
                for life in self._of([event.member]):
                    own = self._last if self._last is not None and self._last.number == event.step else None
                    fault = self._first_fault() if self._lost or own is None else self._fault
                    plan = self._plans.get(event.epoch)
                    planned = fault is None and plan is not None and not plan.lost
                    self._open.append(_Recovery(now, event, life, own, fault, planned))
                    self._recoveries.append(self._open[-1])
            case ev.Reconfigured():
                self._enter(event.epoch, now)
                for life in self._of([event.member]):
                    life.label(now - event.pause_seconds, now, Rank.RECOVERY, Category.RECONFIGURATION)
            case ev.ReplicaBuilt():
                self._build(event, now)
            case ev.MembersAwaited():
                plan = self._plans.get(event.epoch)
                for life in self._of(set(plan.members).difference(event.members) if plan else ()):
                    life.label(now - event.seconds, now, Rank.AWAITED, Category.WAITING)
            case ev.Step():
                self._step(event, now)
            case ev.CheckpointSaved():
                self._saved[event.path] = _key(event)
                self._save(now if event.waited else now - event.seconds)
            case ev.Fatal():
                self._stop(now)
            case ev.Restart():
                self._restarts += 1
                self._restart(event, now)
        self._now = max(self._now, now)

    # -- members ------------------------------------------------------------------------------------------

    def _of(self, members: Iterable[str | None]) -> list[Life]:
        return [self._members[member] for member in members if member in self._members]

    def _living(self) -> list[Life]:
        return [life for life in self._members.values() if life.end == inf]

    def _join(self, member: str, now: float) -> None:
        if member not in self._members or self._members[member].end < inf:
            earlier = [life.end for life in self._lives if life.member == member and life.end < inf]
            self._members[member] = Life(member, max([now if self._started is None else self._started, *earlier]))
            self._lives.append(self._members[member])

    def _lose(self, member: str, fault: float) -> None:
        for life in self._of([member]):
            if life.end == inf:
                life.close(fault)
                life.dropped = None
                self._lost.append(life)

    def _first_fault(self) -> float | None:
        """The time of the first fault since the last step."""
        return min((life.end for life in self._lost), default=None)

    def _plan(self, plan: ev.PlanWritten, now: float) -> None:
        self._plans[plan.epoch] = plan
        for member in plan.members:
            if member not in self._members:
                self._join(member, now)
        for life in self._living():
            life.dropped = None if life.member in plan.members else life.dropped or now
        self._started = None

    def _enter(self, epoch: int, now: float) -> None:
        """Makes members compute by the plan of ``epoch`` from ``now`` on, if it is a later one."""
        if epoch > self._entered[0] and epoch in self._plans:
            self._idle(now)
            self._entered = epoch, now

    def _idle(self, now: float) -> None:
        """Labels the members that the current plan gives nothing to compute of their own."""
        epoch, since = self._entered
        plan = self._plans.get(epoch)
        if plan is None:
            return
        lent = {plan.shadows[rank] for rank, _, _ in plan.lent if rank < len(plan.shadows)}
        for life in self._of(set(plan.members).difference(plan.owners, lent)):
            category = Category.REDUNDANCY if life.member in plan.shadows else Category.STANDBY
            life.label(since, now, Rank.IDLE, category)

    def _build(self, event: ev.ReplicaBuilt, now: float) -> None:
        plan = self._plans.get(self._entered[0])
        for life in self._of([event.member]):
            self._built.append((life, now - event.seconds, now))
            if plan is not None and life.member not in (*plan.owners, *plan.shadows):
                early = max(0.0, life.since - max(life.begin, now - event.seconds))
                early = min(early, self._settled.categories[Category.STANDBY])
                self._settled.move(early, Category.STANDBY, Category.RECONFIGURATION)

    # -- the job ------------------------------------------------------------------------------------------

    def _step(self, event: ev.Step, now: float) -> None:
        begin, last = now - event.seconds, self._last
        self._enter(event.epoch, begin)
        plan = self._plans.get(event.epoch)
        lives = self._of(plan.members) if plan else self._living()
        key = _key(event)
        for life in lives:
            if life.dropped is not None:  # by a plan that members enter after this step
                life.dropped = max(life.dropped, now)
        ordinary = median(self._ordinary) if self._ordinary else None
        if not self._lost:
            self._ordinary.append(event.seconds)
        for life in self._lost:
            if life not in lives:
                life.label(begin, now, Rank.STEP, Category.WASTED)
        twice = last is not None and last.number == event.step
        if self._lost or not twice:
            self._fault = self._first_fault()
        if last is not None and twice:
            last.begin, last.end = min(last.begin, begin), max(last.end, now)
        else:
            missing = 0 if last is None else max(0, event.step - last.number - 1)
            self._undo(key - missing)
            if last is not None and missing:  # the members that would have emitted them were lost just then
                skipped = _Step(self._run, event.step - 1, key - 1, last.end, begin, lives, ordinary, missing)
                self._steps.append(skipped)
            self._last = _Step(self._run, event.step, key, begin, now, lives, ordinary)
            self._steps.append(self._last)
        for recovery in self._open:
            recovery.step = self._last if recovery.told.step == event.step else recovery.step
        self._lost, self._open = [], []
        if self._settles and len(self._steps) >= 2 * _UNSETTLED:
            # By their emitters' clocks a step may end a little after the next one begins.
            self._settle(max(self._steps[-_UNSETTLED].begin, *(step.end for step in self._steps[:-_UNSETTLED])))

    def _undo(self, key: int) -> None:
        """A job that has loaded a checkpoint repeats its steps from ``key`` on."""
        for step in reversed(self._steps):
            if step.run != self._run or (step.key < key and not step.undone):
                return
            step.undone = True
        self._settled.undo(self._run, key)

    def _save(self, end: float) -> None:
        """A checkpoint was copied, or written, until ``end``: training was held since the step before."""
        before = next((step.end for step in reversed(self._steps) if step.end <= end), end)
        for life in self._living():
            life.label(before, end, Rank.GAP, Category.CHECKPOINT)

    def _stop(self, now: float) -> None:
        """No member holds some stage: the interrupted step is wasted, and members wait from now on."""
        if self._stopped is None:
            self._stopped = now
            fault = min((life.end for life in self._lost), default=now)
            for life in [*self._living(), *self._lost]:
                if self._last is not None:
                    life.label(self._last.end, fault, Rank.STEP, Category.WASTED)
                life.label(fault, now, Rank.RECOVERY, Category.DETECTION)

    def _restart(self, event: ev.Restart, now: float) -> None:
        kept = 0 if event.checkpoint is None else self._saved.get(event.checkpoint)
        if kept is not None:  # else the first step that is repeated tells
            self._undo(kept + 1)
        self._end(now)
        self._begin(now)

    def _end(self, now: float) -> None:
        self._idle(now)
        for life in self._living():
            if self._stopped is not None:
                life.label(self._stopped, now, Rank.STOPPED, Category.WAITING)
            life.close(now if life.dropped is None else life.dropped)

    @contextmanager
    def _labelled(self, until: float, over: bool = True) -> Iterator[None]:
        """Within the body lives have all labels before ``until``, also those that later events may still change.

        Args:
            over: as if the job ended now.
        """
        marks = [(life, life.mark()) for life in self._lives]
        if over:
            self._end(self._now)
        else:
            self._idle(self._now)
        for step in self._steps:
            for life in step.lives if step.begin < until else ():
                life.label(step.begin, step.end, Rank.STEP, step.category)
        for recovery in self._recoveries:
            recovery.label()
        for life, begin, end in self._built:
            life.refine(begin, end, Category.STANDBY, Category.RECONFIGURATION)
        try:
            yield
        finally:
            for life, mark in marks:
                life.rewind(mark)

    # -- settling ----------------------------------------------------------------------------------------------------

    def _settle(self, until: float) -> None:
        """Adds up what is before ``until``, between two steps, and forgets it."""
        with self._labelled(until, over=False):
            started = [life for life in self._lives if life.started(until) or life.end <= until]
            sums = spent(divided(started, until))
        self._settled.add(sums)
        for life in started:
            life.settle(until)
            if life.end <= until:
                self._settled.end(life)
                self._lives.remove(life)
                if self._members.get(life.member) is life:
                    del self._members[life.member]
        self._note_steps([step for step in self._steps if step.end <= until], sums[Category.PRODUCTIVE])
        self._steps = [step for step in self._steps if step.end > until]
        self._recoveries = [recovery for recovery in self._recoveries if recovery.end > until]
        self._built = [built for built in self._built if built[2] > until]
        for old in [each for each in self._plans if each < self._entered[0]]:
            del self._plans[old]

    def _note_steps(self, steps: list[_Step], seconds: float) -> None:
        counted = [step for step in steps if not step.undone]
        count = sum(step.count for step in counted)
        self._settled.repeated += sum(step.count for step in steps) - count
        if counted:
            first, last = counted[0], counted[-1]
            span = last.key - first.key + first.count
            self._settled.note(SettledSteps(last.run, last.key, span, count, seconds))

    # -- sums ----------------------------------------------------------------------------------------

    @property
    def last_step(self) -> float:
        """The end of the newest step, in seconds since the first event; ``-inf`` before the first step.

        Until then nothing is open but what a restart, or a finished copy, may change.
        """
        return self._steps[-1].end if self._steps else -inf

    def snapshot(self, until: float = inf) -> Accounted:
        """The account of the members' time until the newest event, or until :attr:`last_step`."""
        with self._labelled(until):
            return self._added(divided(self._lives, until), until)

    def report(self) -> GoodputReport:
        """The same until the newest event, with every interval of every member. The accountant must not settle."""
        with self._labelled(inf):
            groups = divided(self._lives)
            total = self._added(groups)
        cut = {id(life): each for lives, each in groups for life in lives}
        intervals: dict[str, list[Interval]] = {life.member: [] for life in self._lives}
        for life in self._lives:
            intervals[life.member] += cut[id(life)]
        return GoodputReport(
            **dict(total),
            steps_per_second=total.steps / total.wall_seconds if total.wall_seconds else None,
            losses=self._losses,
            leaves=self._leaves,
            restarts=self._restarts,
            members={member: MemberAccount.of(spent([([member], mine)])) for member, mine in intervals.items()},
            intervals=intervals,
        )

    def _added(self, groups: list[tuple[list[Life], list[Interval]]], until: float = inf) -> Accounted:
        """The account of what is settled and of all lives, which are ``groups`` and have ends for now."""
        settled = self._settled
        sums = spent(groups)
        spans = [settled.span, *((life.begin, min(life.end, until)) for life in self._lives)]
        spans = [(begin, end) for begin, end in spans if begin < end]
        kept = sum(step.count for step in self._steps if not step.undone)
        return Accounted(
            **dict(MemberAccount.of({each: settled.categories[each] + sums[each] for each in Category})),
            wall_seconds=max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0,
            steps=settled.steps + kept,
            repeated_steps=settled.repeated + sum(step.count for step in self._steps) - kept,
        )


def _key(event: ev.Step | ev.CheckpointSaved) -> int:
    return event.step if event.global_step is None else event.global_step


def account(events: Iterable[ev.Event]) -> GoodputReport:
    """Accounts for every second of every member of the job, or of jobs one after the other, that ``events`` tell of."""
    accountant = Accountant(settles=False)
    for event in events:
        accountant.add(event)
    return accountant.report()
