"""The state of a member in its job, by the plans that its agent has seen, and what it may do there. Pure.

The states are those of :mod:`.states`. :class:`.coordinator.Coordinator` acts on them until it is told to depart, in
whatever state. Whether the member leads is no state of its own: etcd says that, and the
:class:`~bamboo_ds.control.leader.leader.Leader` asks.
"""

from __future__ import annotations

from ...errors import LaunchError
from ...topology.plan import UNSTARTED, Plan
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import MemberRecord
from ..registry.vacancies import some_finished
from .states import Event, State, after, first

_OUTSIDE = (State.WAITING, State.JOINING, State.UNSURE)
#: Prefix of all keys.
EVERYTHING = ("",)
#: What each member is told of, and what it must know from before when it becomes leader: since when notices hold.
_OF_ALL = (Keys.SPEC, Keys.PLAN, Keys.LEADER, Keys.STOP, Keys.RESTART, Keys.EPOCHS, Keys.NOTICES)


class Membership:
    """One member.

    Args:
        record: what it registers as.
        after_epoch: plans up to this one are none of its business.

    Attributes:
        record: as it is now.
        state: see :class:`State`; one on notice is leaving until it has left, although plans go on without it.
        epoch: that of the newest plan that it follows.
    """

    def __init__(self, record: MemberRecord, after_epoch: int = 0) -> None:
        self.record, self.state = record, State.LOOKING
        self.epoch = self._after_epoch = after_epoch

    def _note(self, event: Event) -> None:
        self.state = after(self.state, event)

    def _note_leaving(self) -> None:
        if self.record.state == "leaving":
            self._note(Event.NOTICE)

    @property
    def _first(self) -> State:
        """The state when the plan has been found."""
        return first(self.record.state == "waiting", self.record.joiner)

    @property
    def joins(self) -> bool:
        """Whether it waits for a plan that lists it."""
        return self.state in (State.JOINING, State.UNSURE)

    @property
    def takes_part(self) -> bool:
        """Whether others may need it."""
        return (self._first if self.state is State.LOOKING else self.state) not in _OUTSIDE

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
        return self.state is State.JOINING and not forged and plan.epoch <= self.epoch

    def note_found(self) -> None:
        """The plan, if there is one, has been found."""
        self.state = self._first
        self._note_leaving()

    def note_plan(self, plan: Plan) -> bool:
        """Follows ``plan``; returns whether it is a new one."""
        if plan.epoch <= self.epoch:
            return False
        missed = self._after_epoch < self.epoch < plan.epoch - 1
        self.epoch = plan.epoch
        if self.record.id in plan.members:
            self._note(Event.LISTED)
            self._note_leaving()
        elif missed:
            self._note(Event.MISSED)
        if self.state is not State.LEAVING and self.is_out(plan):
            self._note(Event.OUT)
        return True

    def note_seen(self, lost: bool) -> None:
        """Notes what plans that it has missed have done: they have listed and ``lost`` it, or never listed it."""
        self._note(Event.OUT if lost else Event.ABSENT)

    def note_leaving(self) -> None:
        """The member is on notice."""
        self.record = self.record.model_copy(update={"state": "leaving"})
        self._note_leaving()


# -- what is in etcd for it --------------------------------------------------------------------------------------


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


def peers(mirror: Mirror, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Members that can tell it what the job has done, since they have an engine, and the places of their workers."""
    known = zip(plan.members, plan.places, strict=False)
    return tuple((member, place) for member, place in known if member in mirror.workers and place)


def over_for(member: str, mirror: Mirror, plan: Plan) -> bool:
    """Whether the job has ended without ``member``: it takes no part yet, and all that did are gone, some well.

    The plan may list it already: no member enters a plan after the last operation. Then others wait in vain like it.
    """
    entered = mirror.workers
    if member in entered:
        return False
    return some_finished(mirror, plan) and entered.keys().isdisjoint(mirror.members.keys() & set(plan.members))


def check_start(me: MemberRecord, mirror: Mirror) -> None:
    """Raises :class:`LaunchError` if the job waits for members that start it, and a launcher has started this one."""
    plan, takes_part = mirror.plan, not me.joiner and me.state != "waiting"
    if takes_part and plan is not None and plan.generation == UNSTARTED and mirror.restart is None:
        raise LaunchError(
            "members that come by `bamboo join --start` begin a job of the same name in the same etcd: give one of the "
            "two jobs another name (--job)"
        )
