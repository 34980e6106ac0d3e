"""The job as the leader sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...job_settings import JobSettings
from ...topology import Candidate, Plan
from ..registry.mirror import Mirror
from ..registry.records import (
    HealthReply,
    HealthRequest,
    LayoutRecord,
    LeftRecord,
    MemberRecord,
    ProgressRecord,
    RestartRecord,
    SuspicionRecord,
    WorkerState,
)

#: Share of a device's memory that members leave to temporary tensors, contexts and libraries, and to gaps.
RESERVE = 0.1


def limits_of(reports: Collection[LayoutRecord]) -> dict[str, int]:
    """Bytes that members may hold of roles, by id; those that may hold any number are left out.

    The members of one device have equal parts of it, less what each holds besides.

    Args:
        reports: of all members that live.
    """
    sharing = Counter(report.device.name for report in reports if report.device is not None)
    found = {report.id: report.memory for report in reports if report.memory is not None}
    for report in reports:
        device = report.device
        if report.memory is None and device is not None:
            part = device.total * (1 - RESERVE) / sharing[device.name]
            found[report.id] = max(0, int(part) - device.besides)
    return found


@dataclass(frozen=True)
class View:
    """The job as the leader sees it.

    Attributes:
        world_size: number of ranks.
        starters: members that start a job whose members come one by one.
        plan: the newest plan.
        members: living members by id.
        known: members by id, living or gone, as they were last.
        left: departures by member id.
        reports: layout reports by member id.
        workers: the epoch that each worker has entered and the replicas that it holds, by member id.
        suspicions: by the id of the member that accuses, of any epoch; only the current one's count.
        asked, healthy: by member id the newest question whether its worker lives, and the newest answer.
        trusted_from: monotonic time in seconds from which on the absence of a member without a
            departure record means its loss. It lies in the future for a while after etcd could not be
            reached, when leases have run out of members that are alive and about to return.
        stopping: the job is being ended; nothing is planned any more.
        near_deadline: members that are going to vanish and have little time left.
        progress: newest progress by member id, also of members that are gone.
        restart: the newest restart.
        settings: the job's, as etcd has them.
    """

    world_size: int
    plan: Plan | None = None
    members: Mapping[str, MemberRecord] = field(default_factory=dict)
    known: Mapping[str, MemberRecord] = field(default_factory=dict)
    left: Mapping[str, LeftRecord] = field(default_factory=dict)
    reports: Mapping[str, LayoutRecord] = field(default_factory=dict)
    workers: Mapping[str, WorkerState] = field(default_factory=dict)
    suspicions: Mapping[str, SuspicionRecord] = field(default_factory=dict)
    asked: Mapping[str, HealthRequest] = field(default_factory=dict)
    healthy: Mapping[str, HealthReply] = field(default_factory=dict)
    trusted_from: float = 0.0
    stopping: bool = False
    near_deadline: frozenset[str] = frozenset()
    progress: Mapping[str, ProgressRecord] = field(default_factory=dict)
    restart: RestartRecord | None = None
    settings: JobSettings | None = None
    starters: int | None = None

    @classmethod
    def of(
        cls, mirror: Mirror, world_size: int, trusted_from: float = 0.0, near_deadline: frozenset[str] = frozenset()
    ) -> View:
        """The view of ``mirror``'s keys."""
        return cls(
            world_size=world_size,
            plan=mirror.plan,
            members=mirror.members,
            known=mirror.known,
            left=mirror.left,
            reports=mirror.reports,
            workers=mirror.workers,
            suspicions=mirror.suspicions,
            asked=mirror.asked,
            healthy=mirror.healthy,
            trusted_from=trusted_from,
            stopping=mirror.stop is not None,
            near_deadline=near_deadline,
            progress=mirror.progress,
            restart=mirror.restart,
            settings=None if mirror.job is None else mirror.job.settings,
            starters=None if mirror.job is None else mirror.job.starters,
        )

    def candidates(self, plan: Plan, leaving: Collection[str] = ()) -> dict[str, Candidate]:
        """The planner's candidates, living or gone, by id.

        Args:
            plan: the newest one. It says which rank the script of a member runs as that it lists.
            leaving: members that get no role and no replica.
        """
        script_ranks = dict(zip(plan.members, plan.script_ranks, strict=False))
        limits = limits_of([report for name, report in self.reports.items() if name in self.members])
        records = {**self.known, **self.members}.values()
        return {
            record.id: Candidate(
                id=record.id,
                slot=record.slot,
                host=record.host,
                zone=record.zone,
                script_rank=script_ranks.get(record.id, record.script_rank),
                leaving=record.id in leaving,
                memory=limits.get(record.id),
            )
            for record in records
        }

    def finished(self, member: str) -> bool:
        """Whether the worker of ``member`` has done all its work."""
        return member in self.left and self.left[member].outcome == "finished"
