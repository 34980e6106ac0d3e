"""The model of a job, folded from events: members, plans, steps, losses with their phases, checkpoints, account.

::

    events --> JobModel.fold --> JobModel --+--> Story, Summary       terminal, `bamboo events`
                                            +--> LiveView             page, `bamboo top`, metrics
                                            +--> Verdict              `bamboo chaos`, `bamboo demo`

Every display renders it; none groups losses or accounts for seconds itself. Pure: no I/O, no threads, no clock. An
event costs time in proportion to the members of the job at most. Memory is bounded by the members, by the bounds in
:mod:`.view`, and, slightly, by what has happened: names of members that have come, paths of checkpoints.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from . import events as ev
from .goodput import Accountant
from .grid import Grid
from .losses import Losses
from .series import Series
from .view import (
    CHECKPOINTS,
    GONE,
    MOVES,
    PLANS,
    POINTS,
    RECENT,
    CheckpointView,
    LostMember,
    ToldPlan,
    Totals,
)

#: Newest steps that pace and coverage are taken over.
_NEWEST = 64


@dataclass
class ToldMember:
    """The events' account of a member.

    Attributes:
        script_rank: rank that its script runs as.
        gone: how it went; ``None`` while it is there.
    """

    host: str | None = None
    script_rank: int | None = None
    joined: float | None = None
    notice: str | None = None
    gone: str | None = None


@dataclass(frozen=True)
class Learned:
    """The news of an event.

    Attributes:
        loss: a member was lost, and no other one that no plan has removed yet.
        plan: a plan that the job trains by, or builds its engines by.
        replicas_back: seconds since some role lost its replica, and whether by a ``loss`` or a ``change``, where all
            have one again.
        first_step: the first step since the workers were started.
    """

    loss: bool = False
    plan: ToldPlan | None = None
    replicas_back: tuple[float, str] | None = None
    first_step: bool = False


class JobModel:
    """One job since it was started. It begins anew where the file of events tells of another start.

    Args:
        bounded: keep the newest losses, plans and checkpoints only, and settle the account.

    Attributes:
        newest: time of the newest event, in seconds since 1970.
        members: those that are there, and the newest ones that are gone.
        coming: members that no plan lists yet.
        epoch, grid: of the newest plan; the grid is empty while a restart waits for its plan.
        redundant: roles have had shadows.
        step, number: the newest step, and its number since the workers were started.
        failures: what has failed, by the exit code that it gives the job.
        fatal_loss: the newest one since the workers were started.
    """

    def __init__(self, bounded: bool = True) -> None:
        self._bounded = bounded
        self._reset()

    def _reset(self) -> None:
        limit = (lambda number: number) if self._bounded else (lambda number: None)
        self.started: ev.RunStarted | None = None
        self.finished: ev.RunFinished | None = None
        self.newest: float | None = None
        self.members: dict[str, ToldMember] = {}
        self.coming: set[str] = set()
        self.grid, self.epoch = Grid(), 0
        self.redundant = self.fatal = self.restarting = self.awaited = False
        self.step: ev.Step | None = None
        self.number: int | None = None
        self.steps: deque[ev.Step] = deque(maxlen=_NEWEST)
        self.history, self.recent = Series(POINTS), Series(RECENT, newest=True)
        self.losses = Losses(self._bounded)
        self.accountant = Accountant(self._bounded)
        self.plans: deque[ToldPlan] = deque(maxlen=limit(PLANS))
        self.checkpoints: deque[CheckpointView] = deque(maxlen=limit(CHECKPOINTS))
        self.checkpoint: CheckpointView | None = None
        self.failures: dict[int, ev.MemberFailed] = {}
        self.fatal_loss: ev.Fatal | None = None
        self.changes = 0  # of members
        self._counts: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._samples: int | None = None
        self._names: dict[str, str] = {}
        self._seen: set[object] = set()
        self._gone: deque[str] = deque()
        self._bare: tuple[float, str] | None = None  # since when some role has no replica, and why

    # -- what is asked ------------------------------------------------------------------------------

    def name(self, member: str) -> str:
        """``m2``, or the whole id if another member since the start was called so."""
        short = member.partition("-")[0]
        return self._names.setdefault(member, member if short in self._names.values() else short)

    @property
    def totals(self) -> Totals:
        """Counts since the job was started."""
        losses = self.losses
        return Totals(
            **self._counts,
            samples=self._samples,
            losses=sum(losses.reasons.values()),
            losses_by_reason=dict(losses.reasons),
            notices_by_source=dict(self._sources),
            takeovers=losses.takeovers,
            pause_seconds=losses.pause_seconds,
            passes_redone=losses.passes_redone,
        )

    @property
    def unsettled(self) -> bool:
        """Whether members are likely to be at something that takes long."""
        whole = not self.grid.shadows or self.grid.complete
        return self.number is None or bool(self.coming) or self.losses.recovering or not whole

    # -- events -------------------------------------------------------------------------------------

    def fold(self, event: ev.Event) -> Learned | None:
        """Takes the next event of the file; ``None``: it has told nothing new."""
        if isinstance(event, ev.RunStarted):
            self._reset()
        at = event.time.timestamp()
        self.newest = at if self.newest is None else max(self.newest, at)
        self.accountant.add(event)
        if isinstance(event, ev.NoticeReceived):
            self._sources[event.source] += 1
        happening = _happening(event)
        if happening is not None:
            if happening in self._seen:
                return None
            self._seen.add(happening)
        match event:
            case ev.RunStarted():
                self.started = event
            case ev.RunFinished():
                self.finished = event
            case ev.MemberJoined():
                self._join(event, at)
            case ev.MemberLost():
                return self._lose(event)
            case ev.MemberLeft():
                self._counts["left"] += 1
                self._depart(event.member_id, f"left ({event.reason}, {event.detail})")
            case ev.MemberCorrupt():
                self._counts["corrupt"] += 1
            case ev.MemberFailed():
                self.failures.setdefault(event.exit_code, event)
            case ev.NoticeReceived():
                if event.member in self.members:
                    self.members[event.member].notice = f"{event.kind}, {event.source}: {event.detail}"
                self.changes += 1
            case ev.PlanWritten():
                return self._plan(event, at)
            case ev.Recovered():
                self.awaited = False
                self.losses.recover(event, self.name(event.member or "-"))
            case ev.TakeoverDone():
                self.losses.take_over(event)
            case ev.Reconfigured():
                self.awaited = False
                self._enter(event, at)
            case ev.MembersAwaited():
                self.awaited = True
            case ev.Step():
                return self._step(event, at)
            case ev.CheckpointSaved() | ev.CheckpointFailed():
                self._save(event, at)
            case ev.Fatal():
                self.fatal, self.fatal_loss = True, event
                self.losses.end(fatal=True)
            case ev.Restart():
                self._restart()
        return Learned()

    def _join(self, event: ev.MemberJoined, at: float) -> None:
        self.members[event.member_id] = ToldMember(event.host, event.rank, at)
        self.coming.add(event.member_id)
        self._counts["joined"] += bool(self.grid.members)
        self.changes += 1

    def _depart(self, member: str, how: str) -> None:
        self.members.setdefault(member, ToldMember()).gone = how
        self._gone.append(member)
        while len(self._gone) > GONE:
            self.members.pop(self._gone.popleft(), None)
        self.changes += 1

    def _lose(self, event: ev.MemberLost) -> Learned:
        known = self.members.get(event.member_id, ToldMember())
        how = event.model_dump(include={"reason", "detail", "detection_seconds"})
        name = self.name(event.member_id)
        lost = LostMember(id=event.member_id, name=name, host=known.host, script_rank=known.script_rank, **how)
        begins = self.losses.lose(event, lost, len(self.grid.members))
        self._depart(event.member_id, f"lost ({event.reason} {event.detail})")
        return Learned(loss=begins)

    def _plan(self, event: ev.PlanWritten, at: float) -> Learned | None:
        old, new = self.grid, Grid.of_event(event)
        if event.epoch <= self.epoch:
            return None
        begins = not old.members or (new.pipelines is not None and old.pipelines is None)
        moved = [] if begins else new.moved(old)
        loss = self.losses.follow(event, new, moved)
        self.redundant |= new.redundant
        bare = new.unshadowed(self.redundant)
        plan = ToldPlan(
            epoch=event.epoch,
            time=at,
            kind="loss" if loss is not None else "start" if begins else "change",
            reason=event.reason,
            members=len(new.members),
            joined=tuple(member for member in new.members if member not in set(old.members)),
            gone=tuple(sorted(set(old.members).difference(new.members))),
            moved=tuple(moved[:MOVES]),
            moved_count=len(moved),
            unshadowed=None if bare is None else len(bare),
            lent=len(new.lent),
        )
        self.plans.append(plan)
        self.grid, self.epoch, self.restarting = new, event.epoch, False
        self.coming.clear()
        self.changes += 1
        if not old.members and not set(new.owners) <= set(new.members):
            return Learned()  # a restart that has failed
        back = None
        if new.complete and self._bare is not None:
            back = max(0.0, at - self._bare[0]), self._bare[1]
            self._bare = None
        elif not new.complete and loss is not None:
            self._bare = loss.time, "loss"
        elif not new.complete and old.complete:
            self._bare = at, "change"
        return Learned(plan=plan, replicas_back=back)

    def _enter(self, event: ev.Reconfigured, at: float) -> None:
        for back, plan in enumerate(reversed(self.plans), 1):
            if plan.epoch == event.epoch:
                longest = max(event.pause_seconds, plan.pause_seconds or 0.0)
                self.plans[-back] = plan.model_copy(update={"pause_seconds": longest, "entered": at})
                return

    def _step(self, event: ev.Step, at: float) -> Learned | None:
        before, self.number = self.number, event.step
        self.awaited = self.fatal = False
        self.step = event
        self.losses.step(event)
        if before == event.step:  # emitted twice
            return None
        committed = 1 if before is None or event.step < before else event.step - before
        self._counts["steps"] += committed
        if event.samples is not None:
            self._samples = (self._samples or 0) + committed * event.samples
        self.steps.append(event)
        for series in (self.history, self.recent):
            series.add(event.step, at, event.loss, event.seconds)
        return Learned(first_step=before is None)

    def _save(self, event: ev.CheckpointSaved | ev.CheckpointFailed, at: float) -> None:
        told = event.model_dump(include={"step", "global_step", "path", "own"})
        if isinstance(event, ev.CheckpointFailed):
            self._counts["checkpoints_failed"] += 1
            self.checkpoints.append(CheckpointView(time=at, failed=event.reason, **told))
            return
        self._counts["checkpoints"] += 1
        self.checkpoint = CheckpointView(time=at, seconds=event.seconds, bytes=event.bytes, **told)
        self.checkpoints.append(self.checkpoint)

    def _restart(self) -> None:
        self._counts["restarts"] += 1
        self.restarting, self.fatal, self.number, self.fatal_loss = True, False, None, None
        for member in self.grid.members:
            if self.members.get(member, ToldMember()).gone is None:
                self._depart(member, "restarted")
        self.losses.end()
        self.grid, self._bare = Grid(), None
        self.coming.clear()
        self._names.clear()
        self.changes += 1


def _happening(event: ev.Event) -> tuple[object, ...] | None:
    """The key of a happening of which several events may come; ``None``: one comes."""
    match event:
        case ev.MemberJoined() | ev.MemberLost() | ev.MemberLeft() | ev.MemberFailed():
            return event.event, event.member_id
        case ev.NoticeReceived():
            return event.event, event.member, event.kind, event.source, event.detail
        case ev.CheckpointSaved() | ev.CheckpointFailed():
            return event.event, event.path, event.step
        case ev.ReplicaMismatch():
            return event.event, event.role, event.step
        case ev.MemberCorrupt():
            return event.event, event.member_id, event.role, event.copy_of
        case ev.ExactMismatch():
            return event.event, event.role, event.found
        case ev.MemoryShort() | ev.Fatal():
            return event.event, event.epoch
        case ev.Restart():
            return event.event, event.number
    return None
