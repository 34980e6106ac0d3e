"""Times for which workers may commit without etcd, and a restart waits without word from them. Pure, but for
the clock. See ``docs/fencing.md``.

A *lineage* is what one start of the job's workers makes. Its workers commit only for so long as etcd has lately said
that it goes on: a linearizable read of the plan, begun less than ``fence_s`` ago, has found one of this lineage that is
not fatal. A restart begins with a fatal plan, which every later read finds. So when more than ``fence_s`` have passed
since that was written, no worker of the old lineage commits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from ..topology.plan import Plan
from .messages import Contact
from .registry.records import LeftRecord, RestartRecord, WorkerState

#: A restart waits longer than the fence by this factor, for clocks that run at different speeds, and by so many
#: seconds, for what is on its way between workers.
_CLOCK_TOLERANCE = 1.1
_IN_FLIGHT_S = 1.0


def now() -> float:
    """Seconds on a clock of this host that goes on while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def may_commit(plan: Plan, contact: Contact | None, at: float) -> bool:
    """Whether a worker that has entered ``plan`` may commit at the time ``at`` (of :func:`now`).

    Args:
        contact: the newest that its agent has told.
    """
    if plan.fence_s is None:
        return True
    known = contact is not None and (contact.origin, contact.generation) == plan.lineage
    return known and contact is not None and at - contact.at <= plan.fence_s


def contact_with(plan: Plan | None, at: float) -> Contact | None:
    """The agent's message to its worker after a read of the plan, begun at ``at``, has found ``plan``."""
    if plan is None or plan.lost_roles:
        return None
    return Contact(origin=plan.origin, generation=plan.generation, at=at)


def restart_wait_s(
    plan: Plan,
    left: Mapping[str, LeftRecord],
    workers: Mapping[str, WorkerState],
    restart: RestartRecord | None,
) -> float:
    """Seconds from the fatal ``plan`` on until no worker of its lineage can commit any more; infinite if never.

    None where it is known that they cannot: all members of a plan take part in its commits, and a worker that has ended
    takes part in none, but for one that it had contributed to before. If it had entered some plan, so had all members
    of that, and none of them goes back; one that had entered none may have just joined, which the commits of the others
    did not need yet.

    Args:
        left, workers: what is known of members.
        restart: the newest one.
    """
    over = restart is not None and restart.generation > plan.generation
    concerned = (*plan.members, *plan.lost)
    ended = [member for member in concerned if member in left and left[member].reaped]
    known = any(member in workers for member in ended) or len(ended) == len(concerned)
    if plan.layout is None or over or known:
        return 0.0
    return math.inf if plan.fence_s is None else plan.fence_s * _CLOCK_TOLERANCE + _IN_FLIGHT_S
