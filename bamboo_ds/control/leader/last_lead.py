"""The last plan of a leading member that has lost its worker.

Without it another one would have to win the leadership, and to read all keys, before it could plan.
"""

from __future__ import annotations

import math

from ...store.client import Lease
from ..registry.mirror import Mirror
from .leader import Leader


def last_lead(leader: Leader, member: str, mirror: Mirror, lease: Lease, trusted_from: float) -> float | None:
    """Plans the loss of ``member``, whose record has left etcd, and of others until then; tells of the takeovers.

    Args:
        leader: of the member.
        lease, trusted_from: as for :meth:`Leader.step`, which also tells what is raised.

    Returns:
        When to look again at the latest; ``None`` if there is nothing to do for it, or not any more.
    """
    plan, left = mirror.plan, mirror.left
    if plan is None or plan.lost_roles or mirror.leader != member:
        return None
    if mirror.members.keys().isdisjoint(set(plan.members) - {member}):
        return None  # nobody is left for whom to plan
    if member in mirror.members or member not in left:
        return math.inf  # the watch brings what etcd has been told
    lost = [m for m in plan.members if m not in mirror.members and (m not in left or left[m].outcome != "finished")]
    if not lost:
        return math.inf if leader.tell_takeovers(mirror) else None
    wake = leader.step(mirror, lease, trusted_from)
    return math.inf if wake is None else wake
