"""Where a member stands in its job, by the plans that its agent has seen. Pure.

::

                  looking                    etcd has not answered yet
              /      |       \\
     waiting      joining <--> unsure        takes no part: no plan that was seen has listed it
                     |           |
                     v           |
                  member         |           takes part
                   |   \\         |
                   v    \\        |
               leaving   +--> fenced <-+     the job goes on without it: it writes nothing but its end

:class:`.coordinator.Coordinator` acts on it until it is told to depart, in whatever state; then it has ended. Whether
the member leads is no state of its own: etcd says that, and the :class:`~bamboo_ds.control.leader.leader.Leader` asks.
"""

from __future__ import annotations

from enum import Enum

from ...errors import LaunchError
from ...topology.plan import UNSTARTED, Plan
from ..registry.mirror import Mirror
from ..registry.records import MemberRecord
from ..registry.vacancies import some_finished


class Standing(Enum):
    """What a member is to its job."""

    LOOKING = "looking"  #: for the plan
    WAITING = "waiting"  #: without a worker, until the job's workers are started
    JOINING = "joining"  #: has seen each plan since its first one; none has listed it
    UNSURE = "unsure"  #: the same, but has missed plans, which may have listed and lost it
    MEMBER = "member"
    LEAVING = "leaving"  #: a member on notice: needed until it has left, although plans go on without it
    FENCED = "fenced"


_NEXT = {
    Standing.LOOKING: {Standing.WAITING, Standing.JOINING, Standing.MEMBER, Standing.LEAVING},
    Standing.WAITING: set(),
    Standing.JOINING: {Standing.UNSURE, Standing.MEMBER, Standing.LEAVING},
    Standing.UNSURE: {Standing.JOINING, Standing.MEMBER, Standing.LEAVING, Standing.FENCED},
    Standing.MEMBER: {Standing.LEAVING, Standing.FENCED},
    Standing.LEAVING: set(),
    Standing.FENCED: set(),
}
_OUTSIDE = (Standing.WAITING, Standing.JOINING, Standing.UNSURE)


class Membership:
    """One member.

    Args:
        record: what it registers as.
        after_epoch: plans up to this one are none of its business.

    Attributes:
        record: as it is now.
        standing: see above.
        epoch: that of the newest plan that it follows.
    """

    def __init__(self, record: MemberRecord, after_epoch: int = 0) -> None:
        self.record, self.standing = record, Standing.LOOKING
        self.epoch = self._after_epoch = after_epoch

    def _go(self, standing: Standing) -> None:
        assert standing in _NEXT[self.standing], f"{self.standing} -> {standing}"
        self.standing = standing

    @property
    def _first(self) -> Standing:
        """What follows when the plan has been found."""
        if self.record.state == "waiting":
            return Standing.WAITING
        return Standing.JOINING if self.record.joiner else self._inside

    @property
    def _inside(self) -> Standing:
        return Standing.LEAVING if self.record.state == "leaving" else Standing.MEMBER

    @property
    def joins(self) -> bool:
        """Whether it waits for a plan that lists it."""
        return self.standing in (Standing.JOINING, Standing.UNSURE)

    @property
    def takes_part(self) -> bool:
        """Whether others may need it."""
        return (self._first if self.standing is Standing.LOOKING else self.standing) not in _OUTSIDE

    def is_out(self, plan: Plan | None) -> bool:
        """Whether the job goes on without it by ``plan``."""
        if plan is None or not self.takes_part:
            return False
        return plan.epoch > self._after_epoch and self.record.id not in plan.members

    def may_register(self, plan: Plan | None, forged: bool) -> bool:
        """Whether its record may be put while ``plan`` is the newest one known, and ``forged`` what is in its place.

        A joiner may have been admitted and lost by plans that it has yet to see; not before its first registration.
        """
        if plan is None or not self.joins:
            return not self.is_out(plan)
        return self.standing is Standing.JOINING and not forged and plan.epoch <= self.epoch

    def note_found(self) -> None:
        """The plan, if there is one, has been found."""
        if self.standing is Standing.LOOKING:
            self._go(self._first)

    def note_plan(self, plan: Plan) -> bool:
        """Follow ``plan``; whether it is a new one."""
        if plan.epoch <= self.epoch:
            return False
        missed = self._after_epoch < self.epoch < plan.epoch - 1
        self.epoch = plan.epoch
        if self.joins:
            if self.record.id in plan.members:
                self._go(self._inside)
            elif missed and self.standing is Standing.JOINING:
                self._go(Standing.UNSURE)
        elif self.standing is Standing.MEMBER and self.is_out(plan):
            self._go(Standing.FENCED)
        return True

    def note_seen(self, lost: bool) -> None:
        """What the plans have done that it has missed: they have listed and ``lost`` it, or never listed it."""
        self._go(Standing.FENCED if lost else Standing.JOINING)

    def note_leaving(self) -> None:
        """It is on notice."""
        self.record = self.record.model_copy(update={"state": "leaving"})
        if self.standing is Standing.MEMBER:
            self._go(Standing.LEAVING)


# -- what is in etcd for one that takes no part ------------------------------------------------------------------


def peers(mirror: Mirror, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Members that can tell it what the job has done, since they have an engine, and the places of their workers."""
    known = zip(plan.members, plan.places, strict=False)
    return tuple((member, place) for member, place in known if member in mirror.workers and place)


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
