"""What a member that waits to take part needs to know. Pure."""

from __future__ import annotations

from ...topology.plan import Plan
from ..registry.mirror import Mirror
from ..registry.records import PeerAddress
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
