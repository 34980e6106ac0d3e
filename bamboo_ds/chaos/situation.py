"""A job at one moment, as its keys tell it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ..control.leader.boundary import as_told, ready_copies
from ..control.registry.mirror import Mirror
from ..control.registry.records import LeftRecord, MemberRecord
from ..topology import Plan


@dataclass(frozen=True)
class JobSituation:
    """A job at one moment.

    Attributes:
        plan: the newest plan.
        members: registered members by id.
        left: departures by member id.
        entered: the epoch that each member's worker has entered, by member id.
        ready: ranks of the complete replicas by member id.
        built: members whose engines are built.
        leader: id of the leading member.
        step: newest committed step that has been told.
        stopping: the job is being ended.
    """

    plan: Plan | None = None
    members: Mapping[str, MemberRecord] = field(default_factory=dict)
    left: Mapping[str, LeftRecord] = field(default_factory=dict)
    entered: Mapping[str, int] = field(default_factory=dict)
    ready: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    built: frozenset[str] = frozenset()
    leader: str | None = None
    step: int | None = None
    stopping: bool = False

    @classmethod
    def of(cls, mirror: Mirror) -> JobSituation:
        """The situation that ``mirror`` shows."""
        plan, workers = mirror.plan, mirror.workers
        plan = as_told(workers, plan) if plan else None
        return cls(
            plan=plan,
            members=mirror.members,
            left=mirror.left,
            entered={member: state.epoch for member, state in workers.items()},
            ready=ready_copies(workers, plan) if plan else {},
            built=frozenset(mirror.reports),
            leader=mirror.leader,
            step=max((record.step for record in mirror.progress.values()), default=None),
            stopping=mirror.stop is not None,
        )

    @property
    def epoch(self) -> int:
        """The plan's epoch; 0 before the first one."""
        return self.plan.epoch if self.plan else 0

    @property
    def training(self) -> bool:
        """Whether the engines are built and a step is done."""
        return self.plan is not None and self.plan.layout is not None and self.step is not None

    @property
    def over(self) -> bool:
        """Whether every member of the plan has finished, or the job is being ended."""
        if self.stopping:
            return True
        finished = (self.left.get(member) for member in (self.plan.members if self.plan else ()))
        return self.plan is not None and all(left is not None and left.outcome == "finished" for left in finished)

    @property
    def vanished(self) -> frozenset[str]:
        """Members that the plan still lists, but who are not registered any more."""
        return frozenset(m for m in (self.plan.members if self.plan else ()) if m not in self.members)

    def unsettled(self, lost: Collection[str] = ()) -> str | None:
        """The work left before everything is as the leader wants it, or ``None``.

        Args:
            lost: members that are dead, whether or not the leader knows.
        """
        plan = self.plan
        if plan is None or plan.layout is None:
            return "the engines are not built"
        gone = [m for m in plan.members if m in lost or m in self.vanished]
        if gone:
            return f"the plan of epoch {plan.epoch} lists {', '.join(gone)}"
        if plan.builders:
            return f"{len(plan.builders)} copies are being made"
        late = [m for m in plan.members if self.entered.get(m) != plan.epoch]
        if late:
            return f"{', '.join(late)} did not enter epoch {plan.epoch} yet"
        bare = [str(plan.world.role(rank)) for rank, shadow in enumerate(plan.shadows) if shadow is None]
        able = [m for m in plan.members if m not in self.members or not self.members[m].feeder]
        if bare and len(able) > 1:
            return f"nobody shadows {', '.join(bare)}"
        waiting = [m for m in self.members if m in self.built and m not in plan.members and m not in lost]
        if waiting:
            return f"{', '.join(waiting)} wait to be admitted"
        return None
