"""A job's model as plain English lines for people, while it is folded. Pure: no I/O, no threads.

A loss is one line. It waits until the loss is complete, and what happens meanwhile is told after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, tzinfo

from . import events as ev
from .event_base import Role
from .model import JobModel, Learned
from .view import LossView, LostMember, Moved, StoryLine, ToldPlan
from .words import counted, duration, how, listed, numbered, stages

#: Roles up to which the line about the start names every owner.
_LISTED = 8
#: Seconds after which a loss is told without its pause.
_LATE_S = 10.0
_MEMBER = re.compile(r"\bm\d+-[0-9a-f]{8}\b")
#: What ends the wait for the rest of a loss.
_ENDS = (ev.RunStarted, ev.RunFinished, ev.Restart, ev.Fatal, ev.MembersAwaited)


def printed(line: StoryLine, zone: tzinfo | None = None) -> str:
    """A line for a terminal, with its time in ``zone``; ``None``: the local one."""
    return f"{datetime.fromtimestamp(line.time, zone):%H:%M:%S} {line.text}"


class Story:
    """Folds events into a model, and tells what they have added to it.

    Attributes:
        job: the model.
    """

    def __init__(self) -> None:
        self.job = JobModel()
        self._waits: int | None = None  # number of the loss whose line waits
        self._told = False  # that is told already, without the pause
        self._later: list[StoryLine] = []  # what has happened since, told after it

    def tell(self, event: ev.Event) -> list[StoryLine]:
        """The lines that ``event`` completes."""
        time = event.time.timestamp()
        lines = self._tell_loss(time) if isinstance(event, _ENDS) else []
        news = self.job.fold(event)
        if news is not None and news.loss:
            lines += self._tell_loss(time, interrupted=True)
            newest = self.job.losses.newest
            self._waits = newest.number if newest is not None else None
        elif self._waits is not None and not self.job.losses.recovering:
            lines += self._tell_loss(time)
        told = [] if news is None else [StoryLine(time=time, text=text) for text in self._texts(event, news)]
        if self._waits is not None and not self._told:
            self._later += told
            return lines
        return [*lines, *told]

    def late(self, now: datetime) -> list[StoryLine]:
        """The lines that have waited too long by the time ``now``, without what is still missing."""
        loss = self._waiting()
        if loss is None or self._told or now.timestamp() - loss.time < _LATE_S:
            return []
        lines, self._later, self._told = [*self._of_loss(loss), *self._later], [], True
        return lines

    def end(self) -> list[StoryLine]:
        """The lines that waited for events which do not come any more."""
        return self._tell_loss(None)

    # -- losses -------------------------------------------------------------------------------------

    def _waiting(self) -> LossView | None:
        detail = None if self._waits is None else self.job.losses.detail(self._waits)
        return None if detail is None else detail.loss

    def _tell_loss(self, time: float | None, interrupted: bool = False) -> list[StoryLine]:
        """The line of the loss that waits, if any, and what has happened since."""
        loss, told, later = self._waiting(), self._told, self._later
        self._waits, self._told, self._later = None, False, []
        if loss is None:
            return []
        if not told:
            return [*self._of_loss(loss, interrupted), *later]
        if loss.pause_seconds is None or time is None:
            return []
        who = " and ".join(each.name for each in loss.members)
        return [StoryLine(time=time, text=f"recovered from the loss of {who} in {duration(loss.pause_seconds)}")]

    def _of_loss(self, loss: LossView, interrupted: bool = False) -> list[StoryLine]:
        pause = "" if loss.pause_seconds is None else f" in {duration(loss.pause_seconds)}"
        parts = [
            " and ".join(f"worker {_at(each)} {how(each.reason, self._named(each.detail))}" for each in loss.members)
        ]
        if loss.moved:
            taken = [
                f"{self._stages(roles)} taken over by {self.job.name(heir)}" for heir, roles in _by_heir(loss.moved)
            ]
            parts.append(", ".join(taken) + pause)
        elif pause:
            parts.append(f"no stage moved, recovered{pause}")
        if interrupted:
            parts.append("another loss interrupts the recovery")
        if loss.left is not None:
            parts.append(f"{loss.left} of {loss.before} {'is' if loss.left == 1 else 'are'} left")
        return [StoryLine(time=loss.time, text="; ".join(parts))]

    # -- everything else ----------------------------------------------------------------------------

    def _texts(self, event: ev.Event, news: Learned) -> Iterable[str]:
        """Lines on what has happened but losses. The leading worker itself tells that the first steps are exact."""
        name = self.job.name
        match event:
            case ev.RunStarted():
                yield f"job {event.job} starts with {counted(event.members, 'member')}"
            case ev.PlanWritten() if news.plan is not None:
                yield from self._plan(news.plan)
                if news.replicas_back is not None:
                    seconds, what = news.replicas_back
                    yield f"all stages have replicas again {duration(seconds)} after the {what}"
            case ev.Step() if news.first_step:
                yield f"training: {_step(event)} took {duration(event.seconds)}"
            case ev.Restart():
                slots = ", ".join(map(str, event.slots))
                yield f"restart {event.number} on slots {slots}, from {event.checkpoint or 'the beginning'}"
            case ev.Fatal():
                yield f"fatal loss{self._fatal(event)}; newest checkpoint: {event.checkpoint or 'none'}"
            case ev.MembersAwaited():
                missing = listed(list(map(name, event.members)))
                yield f"all others wait for {missing}, for {duration(event.seconds)} so far"
            case ev.NoticeReceived():
                left = "" if event.deadline_seconds is None else f", {duration(event.deadline_seconds)} before its end"
                notice = f"({event.kind}, {event.source}: {event.detail}){left}"
                yield f"{name(event.member or '-')} got a notice {notice}: it {'leaves' if event.leaves else 'stays'}"
            case ev.MemberLeft():
                why = f"{event.reason}, {event.detail}"
                yield f"{self._who(event.member_id)} has left ({why}), {duration(event.seconds)} after the notice"
            case ev.MemberFailed():
                why = "" if event.error is None else f", {event.error}"
                yield f"worker {self._who(event.member_id)} {how(event.reason, event.detail)}{why}: the job ends"
            case ev.MemoryShort():
                parts = [f"no member has room for a replica of {self._stages(event.roles)}"] if event.roles else []
                if event.members:
                    names, holds = listed(list(map(name, event.members))), "holds more than it may"
                    holds = holds if len(event.members) == 1 else "hold more than they may"
                    parts.append(f"{names} {holds} (topology.memory_limit_mb)")
                if event.resting:
                    names = listed(list(map(name, event.resting)))
                    parts.append(f"optimizers on {names} are in host memory between steps for lack of room")
                for member, count in event.under_way:
                    batches = counted(count, "micro-batch", "micro-batches")
                    parts.append(f"{name(member)} has {batches} of a role under way at most")
                yield "; ".join(parts) or "members have room for all that they hold, and for replicas"
            case ev.CheckpointSaved() if not event.own:  # those of the job's own come all the time
                yield f"checkpoint of {_step(event)} saved in {duration(event.seconds)}: {event.path}"
            case ev.CheckpointFailed():
                what = "own checkpoint" if event.own else "checkpoint"
                yield f"{what} of {_step(event)} failed ({event.reason}): {event.path}"
            case ev.ReplicaMismatch():
                role = self._stages([event.role])
                yield f"the replica of {role} differs from its owner's state after step {event.step}"
            case ev.MemberCorrupt():
                role, which = self._stages([event.role]), ", ".join(event.tensors[:3]) or "unknown tensors"
                yield f"{name(event.member_id)} has a wrong copy ({event.copy_of}) of {role}: {which}"
            case ev.ExactMismatch():
                role = self._stages([event.role])
                yield f"exactness check: the {event.found} of {role} differs: {event.tensors[0]}"

    def _fatal(self, event: ev.Fatal) -> str:
        job = self.job
        if not event.stages:
            return " before the engines are built"
        if not job.grid.members or len(event.stages) < len(job.grid.owners):
            return f": no living member holds {self._stages(event.stages)}"
        return f": {self._named(job.plans[-1].reason)}"

    def _plan(self, plan: ToldPlan) -> Iterable[str]:
        if plan.kind == "start":
            yield self._beginning()
        elif plan.kind == "change":
            for member in plan.joined:
                yield f"{self._who(member)} has joined: {counted(plan.members, 'member')}"
            pairs: dict[tuple[str, str], list[Role]] = {}
            for each in plan.moved:
                pairs.setdefault((each.before, each.after), []).append(each.role)
            for (before, after), roles in pairs.items():
                yield f"{self._stages(roles)} handed over from {self.job.name(before)} to {self.job.name(after)}"

    def _beginning(self) -> str:
        grid, members = self.job.grid, self.job.members
        if grid.pipelines is None:
            hosts = ", ".join(dict.fromkeys(members[m].host or "-" for m in grid.members if m in members))
            there = f"all {len(grid.members)} members are there" + (f" (hosts: {hosts})" if hosts else "")
            return f"{there} and build their engines"
        several = counted(grid.stages or 0, "stage")
        parts = [f"{counted(grid.pipelines, 'pipeline')} of {several} on {counted(len(grid.members), 'member')}"]
        if len(grid.owners) <= _LISTED:
            held: dict[str, list[Role]] = {}
            for rank, owner in enumerate(grid.owners):
                held.setdefault(owner, []).append(grid.role(rank))
            owned = [f"{self.job.name(owner)} owns {self._stages(roles)}" for owner, roles in held.items()]
            parts.append(", ".join(owned))
        parts.append("every stage has a replica" if grid.complete else "not every stage has a replica")
        return "; ".join(parts)

    # -- words --------------------------------------------------------------------------------------

    def _named(self, text: str) -> str:
        """``text`` with members by their names."""
        return _MEMBER.sub(lambda found: self.job.name(found[0]), text)

    def _who(self, member: str) -> str:
        known = self.job.members.get(member)
        return self.job.name(member) + (f" on host {known.host}" if known is not None and known.host else "")

    def _stages(self, roles: Iterable[Role]) -> str:
        return stages(list(roles), self.job.grid.pipelines or 1)


def _at(member: LostMember) -> str:
    return member.name + (f" on host {member.host}" if member.host else "")


def _by_heir(moved: Iterable[Moved]) -> Iterable[tuple[str, list[Role]]]:
    found: dict[str, list[Role]] = {}
    for each in moved:
        found.setdefault(each.after, []).append(each.role)
    return found.items()


def _step(event: ev.Step | ev.CheckpointSaved | ev.CheckpointFailed) -> str:
    return f"step {numbered(event.step, event.global_step)}"
