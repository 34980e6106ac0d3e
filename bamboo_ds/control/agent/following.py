"""Which of the job's keys a member follows: the leader all, so that a change costs others nothing. Pure."""

from __future__ import annotations

from ...topology.plan import Plan
from ..registry.keys import Keys
from .membership import Membership

#: All keys.
EVERYTHING = ("",)
#: What each member is told of, and what it must know from before when it becomes leader: since when notices hold.
_OF_ALL = (Keys.SPEC, Keys.PLAN, Keys.LEADER, Keys.STOP, Keys.RESTART, Keys.EPOCHS, Keys.NOTICES)


def followed(membership: Membership, plan: Plan | None, leads: bool) -> tuple[str, ...]:
    """Prefixes of the keys that a member needs.

    Args:
        plan: the newest one that it knows.
        leads: it holds the leadership.
    """
    if leads:
        return EVERYTHING
    me, more = membership.record, []
    if me.process_space:
        more.append(Keys.host(me.process_space))
    waits = me.state == "waiting"
    if not membership.takes_part and not waits:
        more.append(Keys.WORKERS)  # where it learns what the job has done
    if me.state == "leaving" or (waits and plan is not None and not plan.lost_roles):
        more.append(Keys.MEMBERS)  # whether another one can lead; whether the job is whole
    return (*_OF_ALL, Keys.leave(me.id), Keys.asked(me.id), *more)
