"""Members that leave on notice, as the leader sees it. Pure.

A member that is going to vanish gets nothing any more, and what it has goes to others as in any other change of the
plan: copies first, then an exchange of names, in which it is listed no more (see :mod:`.boundary`). Where the
copies would take longer than it has, the exchange comes first: shadows hold the state already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...topology import Candidate, Plan, source_ends
from ...topology.planner import takeover
from ..registry.records import MemberRecord, NoticeRecord
from .view import View

#: A member is near its deadline with no more than so many seconds left, so many iterations, or this share of its time.
_NEAR_S = 2.0
_NEAR_ITERATIONS = 3.0
_NEAR_SHARE = 0.5


@dataclass(frozen=True)
class _Due:
    """A notice, and the monotonic time in seconds from which on its member is near its deadline."""

    record: NoticeRecord
    near_at: float


class Deadlines:
    """The deadlines of members that leave, on this process's clock."""

    def __init__(self) -> None:
        self._due: dict[str, _Due] = {}

    def note(self, notices: Mapping[str, NoticeRecord], now: float) -> None:
        """Takes over what is in etcd; ``now`` is monotonic seconds. A later deadline does not replace a nearer one."""
        self._due = {member: due for member, due in self._due.items() if member in notices}
        for member, record in notices.items():
            known = self._due.get(member)
            if record.deadline_s is None or (known is not None and known.record == record):
                continue
            margin = max(_NEAR_S, _NEAR_SHARE * record.deadline_s, _NEAR_ITERATIONS * (record.iteration_s or 0.0))
            near_at = now + record.deadline_s - margin
            self._due[member] = _Due(record, near_at if known is None else min(near_at, known.near_at))

    def near(self, now: float) -> frozenset[str]:
        """Members that are short of time."""
        return frozenset(member for member, due in self._due.items() if now >= due.near_at)

    def wake(self, now: float) -> float | None:
        """The time at which the next member becomes short of time."""
        return min((due.near_at for due in self._due.values() if due.near_at > now), default=None)


def comes(view: View, plan: Plan, record: MemberRecord) -> bool:
    """Whether it is a joiner that is to be admitted, now or once its engine is built.

    A worker that has entered a plan, and is not listed any more, is registered until it has ended.
    """
    before = record.id in plan.members or record.id in view.workers or record.id in view.left
    return record.joiner and not before and record.state != "leaving"


def waits(view: View, plan: Plan, record: MemberRecord) -> bool:
    """Whether it is a joiner that can be admitted: its engine is built like everybody's."""
    return comes(view, plan, record) and record.id in view.reports


def going(view: View, plan: Plan) -> frozenset[str]:
    """Members that are to get rid of what they have; nobody if there is nobody to take it over."""
    inside = set(plan.members)
    there = [r for r in view.members.values() if r.id in inside or waits(view, plan, r)]
    if all(r.feeder or r.state == "leaving" for r in there):
        return frozenset()
    return frozenset(r.id for r in there if r.state == "leaving")


def needed(view: View, plan: Plan, candidates: Sequence[Candidate]) -> frozenset[str]:
    """Members that leave but must stay as long as they can: the last ones that draw the batches of some end."""
    gone, kept = going(view, plan), set()
    for at in drawing_ends(view, plan):
        sources = [c for c in candidates if c.script_rank in at]
        leaving = [c for c in sources if c.id in gone and c.id in plan.members]
        if leaving and len(leaving) == len(sources):
            kept.add(min(leaving, key=lambda c: (c.id in view.near_deadline, c.slot)).id)
    return frozenset(kept)


def feeding(view: View, plan: Plan, candidates: Sequence[Candidate]) -> frozenset[str]:
    """Members that are there only for the batches of some pipeline, which nobody else draws who stays."""
    gone, kept = going(view, plan), set()
    for at in drawing_ends(view, plan):
        staying = [c for c in candidates if c.script_rank in at and c.id not in gone]
        feeders = [c for c in staying if view.members[c.id].feeder]
        if feeders and len(feeders) == len(staying):
            kept.add(min(feeders, key=lambda c: c.slot).id)
    return frozenset(kept)


def every_rank(view: View) -> bool:
    """Whether scripts compute what only all ranks can, each in a process that has been there from the beginning."""
    return any(report.every_rank for report in view.reports.values())


def wanted_feeder(view: View, plan: Plan) -> int | None:
    """The rank that a worker should run as which takes over drawing batches from a member that leaves, if any."""
    if every_rank(view):
        return None  # it could not replay what all ranks have computed together
    gone, inside = going(view, plan), set(plan.members)
    for at in drawing_ends(view, plan):
        able = [r for r in view.members.values() if r.script_rank in at and (r.id in inside or r.joiner)]
        if able and all(r.id in gone or r.state == "leaving" for r in able) and not gone.isdisjoint(r.id for r in able):
            return at[-1]
    return None


def handover(
    view: View, plan: Plan, candidates: Sequence[Candidate], holders: Mapping[int, Collection[str]]
) -> Plan | None:
    """The boundary plan in which members that are short of time have nothing any more and are gone, if there is one.

    Their roles go to members that hold the state already, which leaves some without a shadow for a while. Members
    whose state nobody else holds are left as they are.
    """
    gone, kept = going(view, plan), needed(view, plan, candidates)
    leaving: list[str] = []
    moved = None
    for member in (m for m in plan.members if m in gone and m in view.near_deadline):
        attempt = takeover(plan, {*leaving, member}, holders, candidates)
        changes = zip(plan.owners, attempt.owners, strict=True)
        held = all(new == old or new in holders.get(rank, ()) for rank, (old, new) in enumerate(changes))
        if held and not attempt.lost_roles:
            leaving.append(member)
            moved = attempt
    if moved is None:
        return None
    pairs = zip(plan.members, plan.script_ranks, strict=True)
    stay = [(member, script_rank) for member, script_rank in pairs if member not in leaving or member in kept]
    moved = replace(
        moved, members=tuple(m for m, _ in stay), script_ranks=tuple(h for _, h in stay), lost=(), when="boundary"
    )
    same = (moved.owners, moved.shadows, moved.members) == (plan.owners, plan.shadows, plan.members)
    return None if same else moved


def vanished(view: View, plan: Plan) -> list[str]:
    """Members whom the boundary plan ``plan`` lists no more, and that were lost before all others had entered it.

    The others still need them where they are, so they must not wait for the boundary.
    """
    entered, inside = [view.workers[m].epoch for m in plan.members if m in view.workers], set(plan.members)
    if plan.interrupts() or not entered or min(entered) == plan.epoch:
        return []
    first = min(entered)
    return [
        member
        for member, state in view.workers.items()
        if state.epoch >= first
        and member not in inside
        and member not in view.members
        and not (member in view.left and view.left[member].outcome in ("left", "finished"))
    ]


def drawing_ends(view: View, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks at the ends of pipelines, from one of each of which the scripts' iterators have to be drawn."""
    if not any(report.iterators for report in view.reports.values()):
        return ()
    return source_ends(plan, any(view.reports[m].apart for m in plan.members if m in view.reports))
