"""The model of a job as a live display shows it. Pure: no I/O, no threads, no clock.

::

    events ------> LiveJob.add(event)  --+
                                         +--> LiveJob.view(overview) --> LiveView --> page, `bamboo top`, metrics
    etcd's mirror --> Overview ----------+
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from statistics import median

from ..topology.plan import Plan
from . import events as ev
from .goodput.accounted import Accounted
from .goodput.lives import Category
from .grid import Duties, Grid
from .model import JobModel, ToldMember
from .story import Story
from .view import (
    GONE,
    LINES,
    Coverage,
    JobState,
    LiveView,
    LossDetail,
    MemberView,
    Overview,
    StepPace,
    StoryLine,
)


class LiveJob:
    """Renders the model of one job, whose events it takes in the order of their file.

    Args:
        job: its name; events of others are passed over.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._story = Story()
        self._lines: deque[StoryLine] = deque(maxlen=LINES)
        self._accounted: tuple[float, Accounted] | None = None  # when, in time of events, and how
        self._people: tuple[object, tuple[MemberView, ...]] | None = None  # what members were made of, and they
        self._planned: tuple[Plan, Grid] | None = None

    @property
    def model(self) -> JobModel:
        """The model that is rendered."""
        return self._story.job

    def add(self, event: ev.Event) -> None:
        """Takes the next event."""
        if event.job != self.job:
            return
        if isinstance(event, ev.RunStarted):
            self._story.end()
            self._lines.clear()
            self._accounted = self._people = None
        self._lines += self._story.tell(event)

    def late(self, now: datetime) -> None:
        """Tells the story's line of a loss that has waited too long for its pause by the time ``now``."""
        self._lines += self._story.late(now)

    # -- the view -----------------------------------------------------------------------------------

    def loss(self, number: int) -> LossDetail | None:
        """The loss of that number with all that its survivors have told; ``None`` if it is no longer, or not, known."""
        return self.model.losses.detail(number)

    def view(self, overview: Overview | None = None) -> LiveView:
        """The job now.

        Args:
            overview: what etcd tells, where that is asked. Its plan counts if it is no older than the events', its
                members rather than the events', its step if it is a later one: on several hosts the file of events
                may have a part of them only.
        """
        now, step = self.model, self.model.step
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
            losses=now.losses.views,
            plans=tuple(now.plans),
            checkpoints=tuple(now.checkpoints),
            checkpoint=now.checkpoint,
            checkpoint_path=told.checkpoint or (now.checkpoint.path if now.checkpoint else None),
            account=self._account(),
            coverage=self._coverage(),
            totals=now.totals,
            story=tuple(self._lines),
        )

    def _grid(self, overview: Overview | None) -> Grid:
        plan = None if overview is None else overview.plan
        if plan is None or plan.epoch < self.model.grid.epoch:
            return self.model.grid
        if self._planned is None or self._planned[0] is not plan:
            self._planned = plan, Grid.of_plan(plan)
        return self._planned[1]

    def _account(self) -> Accounted | None:
        """The account, made anew with every event of a small job, more rarely for many members."""
        now = self.model
        if now.newest is None:
            return None
        every = len(now.grid.members) / 50.0 if len(now.grid.members) > 64 else 0.0
        before = self._accounted
        if before is None or now.finished is not None or 0.0 < now.newest - before[0] >= every:
            self._accounted = before = now.newest, now.accountant.snapshot()
        return before[1]

    def badput(self) -> dict[str, float]:
        """Member-seconds of each category but ``productive``, until the newest step. What is unfinished is in none, so
        that they hardly ever go back.
        """
        accountant = self.model.accountant
        categories = accountant.snapshot(accountant.last_step).categories
        return {each.value: seconds for each, seconds in categories.items() if each is not Category.PRODUCTIVE}

    def _state(self, grid: Grid, step: int | None) -> JobState:
        now = self.model
        if now.finished is not None:
            return "ended"
        if now.restarting:
            return "restarting"
        if now.fatal or now.awaited:
            return "waiting"
        if grid.pipelines is None:
            return "building" if grid.members else "starting"
        if now.losses.recovering:
            return "recovering"
        return "building" if step is None else "training"

    def _pace(self) -> StepPace:
        steps = self.model.steps
        if not steps:
            return StepPace()
        begin = steps[0].time.timestamp() - steps[0].seconds
        rate = len(steps) / max(1e-9, steps[-1].time.timestamp() - begin)
        samples = [step.samples for step in steps if step.samples is not None]
        return StepPace(
            seconds=steps[-1].seconds,
            median_seconds=median(step.seconds for step in steps),
            steps_per_second=rate,
            samples_per_second=rate * sum(samples) / len(samples) if len(samples) == len(steps) else None,
        )

    def _coverage(self) -> Coverage:
        done = sum(step.frc_done for step in self.model.steps)
        total = sum(step.frc_total for step in self.model.steps)
        return Coverage(done=done, total=total, ratio=done / total if total else None)

    def _members(self, grid: Grid, overview: Overview | None) -> tuple[MemberView, ...]:
        known = None if overview is None else (overview.leader, overview.members, overview.plan)
        made_of = (self.model.changes, grid.epoch, known)
        if self._people is None or self._people[0] != made_of:
            self._people = made_of, tuple(self._made(grid, overview))
        return self._people[1]

    def _made(self, grid: Grid, overview: Overview | None) -> list[MemberView]:
        now = self.model
        people = {member.id: member for member in (overview.members if overview else self._told_of(grid))}
        if overview and grid.epoch > (overview.plan.epoch if overview.plan else 0):
            people = {member.id: _planned(grid, member) for member in people.values()}
        for member, told in now.members.items():
            if member not in people:
                state = told.gone or ("starting" if overview is None else "gone")
                there = overview is None and not told.gone
                people[member] = MemberView(id=member, slot=_slot(member), state=state, present=there)
        found = []
        for each in people.values():
            told, duties = now.members.get(each.id, ToldMember()), grid.duties.get(each.id, Duties(load=None))
            known = {
                "name": now.name(each.id),
                "host": each.host or told.host,
                "leader": overview is not None and each.id == overview.leader,
                "script_rank": told.script_rank if each.script_rank is None else each.script_rank,
                "notice": told.notice,
                "joined": told.joined,
                "load": duties.load,
            }
            parts = {name: tuple(getattr(duties, name)) for name in ("roles", "shadows", "copies", "heirs", "fatal")}
            found.append(each.model_copy(update={**known, **parts}))
        present = sorted((each for each in found if each.present), key=lambda each: (each.slot, each.id))
        return present + [each for each in found if not each.present][-GONE:]

    def _told_of(self, grid: Grid) -> list[MemberView]:
        """The members of the plan, where etcd is not asked."""
        return [MemberView(id=member, slot=_slot(member), state=_working(grid)) for member in grid.members]


def _planned(grid: Grid, member: MemberView) -> MemberView:
    """A member that etcd tells with an older plan than the events, in the state that their plan gives it."""
    if member.state not in ("starting", "building", "running", "evicted"):
        return member
    return member.model_copy(update={"state": _working(grid) if member.id in grid.members else "evicted"})


def _working(grid: Grid) -> str:
    """The state of the members that a plan lists."""
    return "building" if grid.pipelines is None else "running"


def _slot(member: str) -> int:
    """The slot that a member's id was made for."""
    digits = member[1:].partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
