"""What a member that comes, or waits to take part, needs to know. Pure."""

from __future__ import annotations

from ...errors import LaunchError
from ...topology.plan import UNSTARTED, Plan
from ..registry.mirror import Mirror
from ..registry.records import MemberRecord, PeerAddress
from ..registry.vacancies import some_finished


def peers(mirror: Mirror, plan: Plan) -> tuple[PeerAddress, ...]:
    """Where it can learn what the job has done."""
    workers = mirror.workers
    found = (workers[member].place for member in plan.members if member in workers)
    return tuple(place for place in found if place is not None)


def over_for(member: str, mirror: Mirror, plan: Plan) -> bool:
    """Whether the job has ended without ``member``: it takes no part yet, and all that did are gone, some well.

    The plan may list it already: nobody enters a plan after the last operation. Then others wait in vain like it.
    """
    entered = mirror.workers
    if member in entered:
        return False
    return some_finished(mirror, plan) and entered.keys().isdisjoint(mirror.members.keys() & set(plan.members))


def check_start(me: MemberRecord, mirror: Mirror) -> None:
    """Raise :class:`LaunchError` if the job waits for members that start it, and a launcher has started this one."""
    plan, takes_part = mirror.plan, not me.joiner and me.state != "waiting"
    if takes_part and plan is not None and plan.generation == UNSTARTED and mirror.restart is None:
        raise LaunchError(
            "members that come by `bamboo join --start` begin a job of the same name in the same etcd: give one of the "
            "two jobs another name (--job)"
        )
