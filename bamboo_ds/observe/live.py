"""A job as a live display shows it, folded from its events. Pure: no I/O, no threads, no clock.

::

    events ------> LiveJob.add(event)  --+
                                         +--> LiveJob.view(overview) --> LiveView --> page, `bamboo top`, metrics
    etcd's mirror --> Overview ----------+

An event costs time in proportion to the members of the job at most. Memory is bounded by the members, by the bounds in
:mod:`.view`, and, slightly, by what has happened: names of members that have come, paths of checkpoints.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median

from ..topology.plan import Plan
from . import events as ev
from .goodput import Accountant
from .grid import Grid
from .incidents import Incidents
from .lives import Category
from .series import Series
from .story import Story
from .view import (
    CHECKPOINTS,
    GONE,
    LINES,
    MOVES,
    PLANS,
    POINTS,
    RECENT,
    Accounted,
    CheckpointView,
    Coverage,
    JobState,
    KnownMember,
    LiveView,
    LossDetail,
    MemberView,
    Overview,
    Pace,
    PlanView,
    StoryLine,
    Totals,
)

#: Newest steps that pace and coverage are taken over.
_NEWEST = 64


@dataclass
class _Member:
    """What events tell of a member."""

    host: str | None = None
    home: int | None = None
    joined: float | None = None
    notice: str | None = None
    gone: str | None = None


class _Run:
    """What is known since the job was started."""

    def __init__(self) -> None:
        self.started: ev.RunStarted | None = None
        self.finished: ev.RunFinished | None = None
        self.newest: float | None = None
        self.members: dict[str, _Member] = {}
        self.gone: deque[str] = deque()
        self.grid = Grid()
        self.epoch = 0
        self.redundant = self.fatal = self.restarting = self.awaited = False
        self.step: ev.Step | None = None  # the newest one
        self.number: int | None = None  # its number, since the workers were started
        self.steps: deque[ev.Step] = deque(maxlen=_NEWEST)
        self.history, self.recent = Series(POINTS), Series(RECENT, newest=True)
        self.incidents = Incidents()
        self.accountant = Accountant()
        self.accounted: tuple[float, Accounted] | None = None  # when, in time of events, and how
        self.plans: deque[PlanView] = deque(maxlen=PLANS)
        self.checkpoints: deque[CheckpointView] = deque(maxlen=CHECKPOINTS)
        self.checkpoint: CheckpointView | None = None
        self.saved: set[tuple[str, int]] = set()
        self.totals: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.samples: int | None = None
        self.story = Story(timezone.utc, "%Y-%m-%dT%H:%M:%S+00:00")
        self.lines: deque[StoryLine] = deque(maxlen=LINES)


class LiveJob:
    """Folds the events of one job, in the order of its file, and begins anew where the file tells of another start.

    Args:
        job: its name; events of others are passed over.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._now = _Run()
        self._people: tuple[object, tuple[MemberView, ...]] | None = None  # what members were made of, and they
        self._changes = 0
        self._planned: tuple[Plan, Grid] | None = None

    # -- events -------------------------------------------------------------------------------------

    def add(self, event: ev.Event) -> None:
        """Take the next event."""
        if event.job != self.job:
            return
        if isinstance(event, ev.RunStarted):
            self._now = _Run()
        now, at = self._now, event.time.timestamp()
        now.newest = at if now.newest is None else max(now.newest, at)
        self._told(now.story.tell(event))
        now.accountant.add(event)
        match event:
            case ev.RunStarted():
                now.started = event
            case ev.RunFinished():
                now.finished = event
            case ev.MemberJoined():
                self._join(event, at)
            case ev.MemberLost():
                self._lose(event)
            case ev.MemberLeft():
                now.totals["left"] += 1
                self._depart(event.member_id, f"left ({event.reason}, {event.detail})")
            case ev.NoticeReceived():
                now.sources[event.source] += 1
                if event.member in now.members:
                    now.members[event.member].notice = f"{event.kind}, {event.source}: {event.detail}"
                self._changes += 1
            case ev.PlanWritten():
                self._plan(event, at)
            case ev.Recovered():
                now.awaited = False
                now.incidents.recover(event, now.story.name(event.member or "-"))
            case ev.Reconfigured():
                now.awaited = False
            case ev.MembersAwaited():
                now.awaited = True
            case ev.Step():
                self._step(event, at)
            case ev.CheckpointSaved() | ev.CheckpointFailed():
                self._save(event, at)
            case ev.Fatal():
                now.fatal = True
                now.incidents.end(fatal=True)
            case ev.Restart():
                self._restart(event)

    def late(self, now: datetime) -> None:
        """Tell the story's line of a loss that has waited too long for its pause by the time ``now``."""
        self._told(self._now.story.late(now))

    def _told(self, lines: list[str]) -> None:
        for line in lines:
            at, _, text = line.partition(" ")
            self._now.lines.append(StoryLine(time=datetime.fromisoformat(at).timestamp(), text=text))

    def _join(self, event: ev.MemberJoined, at: float) -> None:
        now = self._now
        now.members[event.member_id] = _Member(event.host, event.rank, at)
        now.totals["joined"] += bool(now.plans)
        self._changes += 1

    def _depart(self, member: str, how: str) -> None:
        now = self._now
        now.members.setdefault(member, _Member()).gone = how
        now.gone.append(member)
        while len(now.gone) > GONE:
            now.members.pop(now.gone.popleft(), None)
        self._changes += 1

    def _lose(self, event: ev.MemberLost) -> None:
        now = self._now
        known = now.members.get(event.member_id, _Member())
        name = now.story.name(event.member_id)
        if now.incidents.lose(event, name, known.host, len(now.grid.members)):
            self._depart(event.member_id, f"lost ({event.reason} {event.detail})")

    def _plan(self, event: ev.PlanWritten, at: float) -> None:
        now, old, new = self._now, self._now.grid, Grid.of_event(event)
        if event.epoch <= now.epoch:
            return
        kind = "start" if old.pipelines is None else "change"
        moved = new.moved(old) if kind == "change" else []
        if now.incidents.follow(event, new, moved):
            kind = "loss"
        now.redundant |= new.redundant
        bare = new.unshadowed(now.redundant)
        now.plans.append(
            PlanView(
                epoch=event.epoch,
                time=at,
                kind=kind,
                reason=event.reason,
                members=len(new.members),
                joined=tuple(sorted(set(new.members).difference(old.members))),
                gone=tuple(sorted(set(old.members).difference(new.members))),
                moved=tuple(moved[:MOVES]),
                moved_count=len(moved),
                unshadowed=None if bare is None else len(bare),
                lent=len(new.lent),
            )
        )
        now.grid, now.epoch, now.restarting = new, event.epoch, False
        self._changes += 1

    def _step(self, event: ev.Step, at: float) -> None:
        now = self._now
        number, now.number = now.number, event.step
        now.awaited = now.fatal = False
        now.step = event
        now.incidents.step(event)
        if number == event.step:  # emitted twice
            return
        committed = 1 if number is None or event.step < number else event.step - number
        now.totals["steps"] += committed
        if event.samples is not None:
            now.samples = (now.samples or 0) + committed * event.samples
        now.steps.append(event)
        for series in (now.history, now.recent):
            series.add(event.step, at, event.loss, event.seconds)

    def _save(self, event: ev.CheckpointSaved | ev.CheckpointFailed, at: float) -> None:
        now = self._now
        told = event.model_dump(include={"step", "global_step", "path"})
        key = event.path, event.step
        if isinstance(event, ev.CheckpointFailed):
            if not (now.checkpoints and (now.checkpoints[-1].path, now.checkpoints[-1].step) == key):
                now.totals["checkpoints_failed"] += 1
                now.checkpoints.append(CheckpointView(time=at, failed=event.reason, **told))
            return
        if key in now.saved:
            return
        now.saved.add(key)
        now.totals["checkpoints"] += 1
        now.checkpoint = CheckpointView(time=at, seconds=event.seconds, bytes=event.bytes, **told)
        now.checkpoints.append(now.checkpoint)

    def _restart(self, event: ev.Restart) -> None:
        now = self._now
        now.totals["restarts"] += 1
        now.restarting, now.fatal, now.number = True, False, None
        for member in now.grid.members:
            if now.members.get(member, _Member()).gone is None:
                self._depart(member, "restarted")
        now.incidents.end()
        now.grid = Grid()
        self._changes += 1

    # -- the view -----------------------------------------------------------------------------------

    def loss(self, number: int) -> LossDetail | None:
        """The loss of that number with all that its survivors have told; ``None`` if it is no longer, or not, known."""
        return self._now.incidents.detail(number)

    def view(self, overview: Overview | None = None) -> LiveView:
        """The job now.

        Args:
            overview: what etcd tells, where that is asked. Its plan counts if it is no older than the events', its
                members rather than the events', its step if it is a later one: on several hosts the file of events
                may have a part of them only.
        """
        now, step = self._now, self._now.step
        grid = self._grid(overview)
        told = overview or Overview()
        newest, count = step.step if step else None, step.global_step if step else None
        if told.step is not None and (newest is None or told.step > newest):
            newest, count = told.step, told.global_step
        return LiveView.model_construct(  # not checked, and not copied: parts stay the same objects
            job=self.job,
            state=self._state(grid, newest),
            time=now.newest,
            started=now.started.time.timestamp() if now.started else None,
            ended=now.finished.time.timestamp() if now.finished else None,
            exit_code=now.finished.exit_code if now.finished else None,
            stopping=told.stopping,
            command=tuple(now.started.command) if now.started else (),
            epoch=max(grid.epoch, now.epoch),
            step=newest,
            global_step=count,
            last_step_time=step.time.timestamp() if step else None,
            pace=self._pace(),
            history=now.history.history(),
            recent=now.recent.history(),
            pipelines=grid.pipelines,
            stages=grid.stages,
            roles=grid.roles,
            unshadowed=grid.unshadowed(now.redundant),
            members=self._members(grid, overview),
            losses=now.incidents.views,
            plans=tuple(now.plans),
            checkpoints=tuple(now.checkpoints),
            checkpoint=now.checkpoint,
            account=self._account(),
            coverage=self._coverage(),
            totals=self.totals,
            story=tuple(now.lines),
        )

    def _grid(self, overview: Overview | None) -> Grid:
        plan = None if overview is None else overview.plan
        if plan is None or plan.epoch < self._now.grid.epoch:
            return self._now.grid
        if self._planned is None or self._planned[0] is not plan:
            self._planned = plan, Grid.of_plan(plan)
        return self._planned[1]

    @property
    def totals(self) -> Totals:
        """Counts since the job was started."""
        now = self._now
        incidents = now.incidents
        return Totals(
            **now.totals,
            samples=now.samples,
            losses=sum(incidents.reasons.values()),
            losses_by_reason=dict(incidents.reasons),
            notices_by_source=dict(now.sources),
            takeovers=incidents.takeovers,
            pause_seconds=incidents.pause_seconds,
            passes_redone=incidents.passes_redone,
        )

    def _account(self) -> Accounted | None:
        """Made anew with every event of a small job, more rarely for many members: adding up takes its time."""
        now = self._now
        if now.newest is None:
            return None
        every = len(now.grid.members) / 50.0 if len(now.grid.members) > 64 else 0.0
        if now.accounted is None or now.finished is not None or 0.0 < now.newest - now.accounted[0] >= every:
            sums = now.accountant.snapshot()
            found = Accounted(
                member_seconds=sums.seconds,
                wall_seconds=sums.wall_seconds,
                goodput=sums.goodput,
                categories={category.value: seconds for category, seconds in sums.categories.items()},
                repeated_steps=sums.repeated_steps,
            )
            now.accounted = now.newest, found
        return now.accounted[1]

    def badput(self) -> dict[str, float]:
        """Member-seconds of each category but ``productive``, until the newest step. What is unfinished is in none, so
        that they hardly ever go back.
        """
        accountant = self._now.accountant
        until = accountant.last_step
        categories = {} if until is None else accountant.snapshot(until).categories
        return {each.value: categories.get(each, 0.0) for each in Category if each is not Category.PRODUCTIVE}

    def _state(self, grid: Grid, step: int | None) -> JobState:
        now = self._now
        if now.finished is not None:
            return "ended"
        if now.restarting:
            return "restarting"
        if now.fatal or now.awaited:
            return "waiting"
        if grid.pipelines is None:
            return "building" if grid.members else "starting"
        if now.incidents.recovering:
            return "recovering"
        return "building" if step is None else "training"

    def _pace(self) -> Pace:
        steps = self._now.steps
        if not steps:
            return Pace()
        begin = steps[0].time.timestamp() - steps[0].seconds
        rate = len(steps) / max(1e-9, steps[-1].time.timestamp() - begin)
        samples = [step.samples for step in steps if step.samples is not None]
        return Pace(
            seconds=steps[-1].seconds,
            median_seconds=median(step.seconds for step in steps),
            steps_per_second=rate,
            samples_per_second=rate * sum(samples) / len(samples) if len(samples) == len(steps) else None,
        )

    def _coverage(self) -> Coverage:
        done = sum(step.frc_done for step in self._now.steps)
        total = sum(step.frc_total for step in self._now.steps)
        return Coverage(done=done, total=total, ratio=done / total if total else None)

    def _members(self, grid: Grid, overview: Overview | None) -> tuple[MemberView, ...]:
        known = None if overview is None else (overview.leader, overview.members, overview.plan)
        made_of = (self._changes, grid.epoch, known)
        if self._people is None or self._people[0] != made_of:
            self._people = made_of, tuple(self._made(grid, overview))
        return self._people[1]

    def _made(self, grid: Grid, overview: Overview | None) -> list[MemberView]:
        now = self._now
        people = {member.id: member for member in (overview.members if overview else self._told_of(grid))}
        for member, told in now.members.items():
            if member not in people:
                state = told.gone or ("starting" if overview is None else "gone")
                people[member] = KnownMember(
                    member, _slot(member), state, registered=overview is None and not told.gone
                )
        found = []
        for each in people.values():
            told, duties = now.members.get(each.id, _Member()), grid.duties.get(each.id)
            found.append(
                MemberView(
                    id=each.id,
                    name=now.story.name(each.id),
                    slot=each.slot,
                    host=each.host or told.host,
                    zone=each.zone or None,
                    state=each.state,
                    present=each.registered,
                    leader=overview is not None and each.id == overview.leader,
                    home=told.home if each.home is None else each.home,
                    doing=each.doing,
                    notice=told.notice,
                    joined=told.joined,
                    roles=tuple(duties.roles) if duties else (),
                    shadows=tuple(duties.shadows) if duties else (),
                    copies=tuple(duties.copies) if duties else (),
                    load=duties.load if duties else None,
                    heirs=tuple(duties.heirs) if duties else (),
                    fatal=tuple(duties.fatal) if duties else (),
                )
            )
        present = sorted((each for each in found if each.present), key=lambda each: (each.slot, each.id))
        return present + [each for each in found if not each.present][-GONE:]

    def _told_of(self, grid: Grid) -> list[KnownMember]:
        """The members of the plan, where etcd is not asked."""
        state = "building" if grid.pipelines is None else "running"
        return [KnownMember(member, _slot(member), state) for member in grid.members]


def _slot(member: str) -> int:
    """The slot that a member's id was made for."""
    digits = member[1:].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
