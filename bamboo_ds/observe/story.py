"""The events of a job as plain English lines for people. Pure: no I/O, no threads.

A loss is one line. It waits for the events that complete it, and what happens meanwhile is told after it::

    member_lost   plan    recovered, recovered, ...   (once for each survivor)
    who, why      heirs   how long                --> one line
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo

from .event_base import Role
from .events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    ExactMismatch,
    Fatal,
    MemberFailed,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MembersAwaited,
    MemoryShort,
    NoticeReceived,
    PlanWritten,
    Recovered,
    ReplicaMismatch,
    Restart,
    RunFinished,
    RunStarted,
    Step,
)
from .summary import Summary, counted, duration, how

#: Roles up to which the line about the start names every owner.
_LISTED = 8
#: After which a loss is told without its pause.
_LATE = timedelta(seconds=10)
_MEMBER = re.compile(r"\bm\d+-[0-9a-f]{8}\b")


@dataclass
class _Loss:
    """Members that were lost together.

    Attributes:
        before: number of members before.
        plan: that removes them.
        heirs: who takes which role over.
        recovered: of survivors, by member.
        step: the first one since.
        later: what has happened since, told after it.
        told: it is told already, without the pause.
    """

    members: list[MemberLost]
    before: int
    plan: PlanWritten | None = None
    heirs: list[tuple[Role, str]] = field(default_factory=list)
    recovered: dict[str | None, Recovered] = field(default_factory=dict)
    step: int | None = None
    later: list[str] = field(default_factory=list)
    told: bool = False


@dataclass
class _Start:
    """What is known since all workers were started, or started again.

    Attributes:
        names: of the members as they are printed, by id.
        hosts: of the members.
        joined: members whose first plan has not come.
        plan: the newest one.
        loss: the newest one, while its line waits.
        bare_since: when some stage lost its replica, and how; ``None`` while all have one, or never had.
        stepped: a step was committed.
    """

    names: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    joined: list[str] = field(default_factory=list)
    plan: PlanWritten | None = None
    loss: _Loss | None = None
    bare_since: tuple[datetime, str] | None = None
    stepped: bool = False


class Story:
    """Tells what happens in a job. Begins anew where a job is started that goes on in the same file.

    Args:
        zone: of the times; ``None``: the local one.
        form: of the times, as of :meth:`datetime.datetime.strftime`; a blank and the text follow.
    """

    def __init__(self, zone: tzinfo | None = None, form: str = "%H:%M:%S") -> None:
        self._zone, self._form = zone, form
        self._start = _Start()
        self._told: set[object] = set()
        #: Of all events since the job was started.
        self.summary = Summary()

    def tell(self, event: Event) -> list[str]:
        """The lines that ``event`` completes."""
        if isinstance(event, RunStarted):
            lines = self.end()
            self._start, self._told, self.summary = _Start(), set(), Summary()
            self.summary.add(event)
            return [*lines, self._line(event, f"job {event.job} starts with {counted(event.members, 'member')}")]
        self.summary.add(event)
        loss = self._start.loss
        lines = self._lines(event)
        if loss is not None and loss is self._start.loss and not loss.told:
            loss.later += lines
            return []
        return lines

    def late(self, now: datetime) -> list[str]:
        """The lines that have waited too long by the time ``now``, without what is still missing."""
        loss = self._start.loss
        if loss is None or loss.told or now - loss.members[0].time < _LATE:
            return []
        lines = self._tell_loss()
        self._start.loss, loss.told, loss.later = loss, True, []
        return lines

    def end(self) -> list[str]:
        """The lines that waited for events which do not come any more."""
        return self._tell_loss()

    @property
    def unsettled(self) -> bool:
        """Whether members are likely to be at something that takes long."""
        now = self._start
        whole = now.plan is None or not now.plan.shadows or _complete(now.plan)
        return not now.stepped or bool(now.joined) or now.loss is not None or not whole

    def _line(self, event: Event, text: str) -> str:
        return f"{event.time.astimezone(self._zone).strftime(self._form)} {text}"

    def _lines(self, event: Event) -> list[str]:
        now = self._start
        if isinstance(event, MemberJoined):
            now.hosts[event.member_id] = event.host
            now.joined.append(event.member_id)
        elif isinstance(event, MemberLost):
            return self._lose(event)
        elif isinstance(event, PlanWritten):
            return self._follow_plan(event)
        elif isinstance(event, Recovered):
            return self._recover(event)
        elif isinstance(event, Step):
            return self._step(event)
        elif isinstance(event, RunFinished):
            return self._tell_loss()
        elif isinstance(event, Restart):
            lines = self._tell_loss()
            self._start = _Start()
            since = event.checkpoint or "the beginning"
            slots = ", ".join(map(str, event.slots))
            return [*lines, self._line(event, f"restart {event.number} on slots {slots}, from {since}")]
        elif isinstance(event, Fatal):
            return [*self._tell_loss(), *self._once(event, event.epoch, self._fatal(event))]
        elif isinstance(event, MembersAwaited):
            missing = _listed([self.name(member) for member in event.members])
            text = f"all others wait for {missing}, for {duration(event.seconds)} so far"
            return [*self._tell_loss(), self._line(event, text)]
        else:
            found = self._remark(event)
            return [] if found is None else self._once(event, *found)
        return []

    def _remark(self, event: Event) -> tuple[object, str] | None:
        """What distinguishes a happening from others of its kind, and the text about it."""
        if isinstance(event, NoticeReceived):
            left = "" if event.deadline_seconds is None else f", {duration(event.deadline_seconds)} before its end"
            what = "leaves" if event.leaves else "stays"
            member = self.name(event.member or "-")
            key = event.member, event.kind, event.source, event.detail
            return key, f"{member} got a notice ({event.kind}, {event.source}: {event.detail}){left}: it {what}"
        if isinstance(event, MemberLeft):
            why = f"{event.reason}, {event.detail}"
            text = f"{self._who(event.member_id)} has left ({why}), {duration(event.seconds)} after the notice"
            return event.member_id, text
        if isinstance(event, MemberFailed):
            why = "" if event.error is None else f", {event.error}"
            what = f"worker {self._who(event.member_id)} {how(event.reason, event.detail)}{why}"
            return event.member_id, f"{what}: the job ends"
        if isinstance(event, MemoryShort):
            return event.epoch, self._short(event)
        if isinstance(event, CheckpointSaved):
            text = f"checkpoint of step {event.step} saved in {duration(event.seconds)}: {event.path}"
            return (event.path, event.step), text
        if isinstance(event, CheckpointFailed):
            return (event.path, event.step), f"checkpoint of step {event.step} failed ({event.reason}): {event.path}"
        if isinstance(event, ReplicaMismatch):
            text = f"the replica of {self._stages([event.role])} differs from its owner's state after step {event.step}"
            return (event.role, event.step), text
        if isinstance(event, ExactMismatch):
            differs = f"{event.found} of {self._stages([event.role])} differs: {event.tensors[0]}"
            return (event.role, event.found), f"exactness check: the {differs}"
        return None  # the worker that leads tells itself that the first steps are exact

    def _short(self, event: MemoryShort) -> str:
        parts = [f"no member has room for a replica of {self._stages(event.roles)}"] if event.roles else []
        if event.members:
            names = _listed([self.name(member) for member in event.members])
            parts.append(f"{names} {'holds' if len(event.members) == 1 else 'hold'} more than topology.memory_limit_mb")
        return "; ".join(parts) or "members have room for all that they hold, and for replicas"

    def _once(self, event: Event, key: object, text: str) -> list[str]:
        """The line, unless it was told: several members may emit what happens once."""
        if (event.event, key) in self._told:
            return []
        self._told.add((event.event, key))
        return [self._line(event, text)]

    # -- losses -------------------------------------------------------------------------------------

    def _lose(self, event: MemberLost) -> list[str]:
        now = self._start
        if event.member_id in self._told:
            return []
        self._told.add(event.member_id)
        if now.loss is not None and now.loss.plan is None:
            now.loss.members.append(event)
            return []
        lines = self._tell_loss(interrupted=True)
        now.loss = _Loss([event], before=len(now.plan.members) if now.plan else 0)
        return lines

    def _recover(self, event: Recovered) -> list[str]:
        loss = self._start.loss
        if loss is None or loss.plan is None or event.epoch < loss.plan.epoch:
            return []
        loss.recovered[event.member] = event
        return self._tell_loss() if loss.recovered.keys() >= set(loss.plan.members) else []

    def _step(self, event: Step) -> list[str]:
        now, lines = self._start, []
        loss = now.loss
        if loss is not None and loss.plan is not None and event.epoch >= loss.plan.epoch:
            if loss.step is not None and event.step > loss.step:
                lines = self._tell_loss()  # not all survivors report: some were not disturbed
            loss.step = loss.step or event.step
        if not now.stepped:
            now.stepped = True
            lines.append(self._line(event, f"training: step {event.step} took {duration(event.seconds)}"))
        return lines

    def _tell_loss(self, interrupted: bool = False) -> list[str]:
        """The line of the loss that waits, if any, and what has happened since."""
        loss, self._start.loss = self._start.loss, None
        if loss is None:
            return []
        slowest = max(loss.recovered.values(), key=lambda event: event.pause_seconds, default=None)
        pause = "" if slowest is None else f" in {duration(slowest.pause_seconds)}"
        if loss.told:
            who = " and ".join(self.name(event.member_id) for event in loss.members)
            return [] if slowest is None else [self._line(slowest, f"recovered from the loss of {who}{pause}")]
        parts = [" and ".join(self._how(event) for event in loss.members)]
        heirs: dict[str, list[Role]] = {}
        for role, heir in loss.heirs:
            heirs.setdefault(heir, []).append(role)
        if heirs:
            taken = [f"{self._stages(roles)} taken over by {self.name(heir)}" for heir, roles in heirs.items()]
            parts.append(", ".join(taken) + pause)
        elif pause:
            parts.append(f"no stage moved, recovered{pause}")
        if interrupted:
            parts.append("another loss interrupts the recovery")
        if loss.plan is not None:
            left = len(loss.plan.members)
            parts.append(f"{left} of {loss.before} {'is' if left == 1 else 'are'} left")
        return [self._line(loss.members[0], "; ".join(parts)), *loss.later]

    def _how(self, event: MemberLost) -> str:
        return f"worker {self._who(event.member_id)} {how(event.reason, self._named(event.detail))}"

    def _fatal(self, event: Fatal) -> str:
        plan, newest = self._start.plan, f"; newest checkpoint: {event.checkpoint or 'none'}"
        if not event.stages:
            return "fatal loss before the engines are built" + newest
        if plan is None or len(event.stages) < len(plan.owners):
            return f"fatal loss: no living member holds {self._stages(event.stages)}{newest}"
        return f"fatal loss: {self._named(plan.reason)}{newest}"

    # -- plans --------------------------------------------------------------------------------------

    def _follow_plan(self, plan: PlanWritten) -> list[str]:
        now, old = self._start, self._start.plan
        if old is not None and plan.epoch <= old.epoch:
            return []
        now.plan = plan
        if old is None and not set(plan.owners) <= set(plan.members):
            return []  # a restart that has failed
        joined, now.joined = now.joined, []
        if old is None or (plan.pipelines is not None and old.pipelines is None):
            return [self._line(plan, self._beginning(plan))]
        moved = [
            (self._role(rank), before, after)
            for rank, (before, after) in enumerate(zip(old.owners, plan.owners, strict=True))
            if before != after and after in plan.members
        ]
        loss = now.loss
        if loss is not None and loss.plan is None and plan.lost:
            loss.plan = plan
            loss.heirs = [(role, after) for role, _, after in moved]
            lines = []
        else:
            members = counted(len(plan.members), "member")
            lines = [self._line(plan, f"{self._who(member)} has joined: {members}") for member in joined]
            pairs: dict[tuple[str, str], list[Role]] = {}
            for role, before, after in moved:
                pairs.setdefault((before, after), []).append(role)
            lines += [
                self._line(plan, f"{self._stages(roles)} handed over from {self.name(before)} to {self.name(after)}")
                for (before, after), roles in pairs.items()
            ]
        return lines + self._redundancy(plan, old)

    def _beginning(self, plan: PlanWritten) -> str:
        if plan.pipelines is None:
            hosts = ", ".join(dict.fromkeys(self._start.hosts[m] for m in plan.members if m in self._start.hosts))
            there = f"all {len(plan.members)} members are there" + (f" (hosts: {hosts})" if hosts else "")
            return f"{there} and build their engines"
        size = len(plan.owners)
        stages = counted(size // plan.pipelines, "stage")
        parts = [f"{counted(plan.pipelines, 'pipeline')} of {stages} on {counted(len(plan.members), 'member')}"]
        if size <= _LISTED:
            held: dict[str, list[Role]] = {}
            for rank, owner in enumerate(plan.owners):
                held.setdefault(owner, []).append(self._role(rank))
            parts.append(", ".join(f"{self.name(owner)} owns {self._stages(roles)}" for owner, roles in held.items()))
        parts.append("every stage has a replica" if _complete(plan) else "not every stage has a replica")
        return "; ".join(parts)

    def _redundancy(self, plan: PlanWritten, old: PlanWritten) -> list[str]:
        """A plan names a shadow only once that has reported the whole state of the stage."""
        now = self._start
        if not _complete(plan):
            if plan.lost:
                now.bare_since = plan.time if now.loss is None else now.loss.members[0].time, "loss"
            elif _complete(old):
                now.bare_since = plan.time, "change"
        elif now.bare_since is not None:
            (since, what), now.bare_since = now.bare_since, None
            after = duration(max(0.0, (plan.time - since).total_seconds()))
            return [self._line(plan, f"all stages have replicas again {after} after the {what}")]
        return []

    # -- words --------------------------------------------------------------------------------------

    def name(self, member: str) -> str:
        """``m2``, or the whole id if another member since the start was called so."""
        names, short = self._start.names, member.partition("-")[0]
        return names.setdefault(member, member if short in names.values() else short)

    def _named(self, text: str) -> str:
        """``text`` with members by their names."""
        return _MEMBER.sub(lambda found: self.name(found[0]), text)

    def _who(self, member: str) -> str:
        host = self._start.hosts.get(member)
        return self.name(member) + (f" on host {host}" if host else "")

    def _role(self, rank: int) -> Role:
        pipelines = self._pipelines
        return rank % pipelines, rank // pipelines

    @property
    def _pipelines(self) -> int:
        plan = self._start.plan
        return (plan.pipelines if plan else None) or 1

    def _stages(self, roles: Sequence[Role]) -> str:
        """``stage 1``, ``stages 1 and 2 of pipeline 0``; pipelines are named where there are several."""
        found: dict[int, list[int]] = {}
        for pipeline, stage in roles:
            found.setdefault(pipeline, []).append(stage)
        several = self._pipelines > 1
        return _listed(
            [
                f"stage{'s' * (len(stages) > 1)} {_listed([str(stage) for stage in stages])}"
                + (f" of pipeline {pipeline}" if several else "")
                for pipeline, stages in found.items()
            ]
        )


def _complete(plan: PlanWritten) -> bool:
    return bool(plan.shadows) and None not in plan.shadows


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
