"""Changes of the plan as a script learns of them; see :func:`bamboo_ds.on_plan_change`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..topology import Plan


@dataclass(frozen=True)
class PlanView:
    """The plan that has just come into force.

    Attributes:
        epoch: its number.
        members: the living members, in the order of their slots.
        script_ranks: for every one of ``members`` the rank that its script runs as; a standby shares that of another
            member.
        member: this process's member.
        roles: what this member computes from now on: (pipeline, stage) each. With tensor slices, pipeline
            ``d * slices + m`` is slice ``m`` of data-parallel copy ``d``.
        lost: members that have been lost since the last call.
        left: members that have left in order.
        joined: members that have come.
        reason: the same in words.
        immediate: whether it interrupted what was under way, as a loss does; else it began between two operations.
    """

    epoch: int
    members: tuple[str, ...]
    script_ranks: tuple[int, ...]
    member: str
    roles: tuple[tuple[int, int], ...]
    lost: tuple[str, ...]
    left: tuple[str, ...]
    joined: tuple[str, ...]
    reason: str
    immediate: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that living processes run as: those that the script's own collectives are among."""
        return tuple(sorted(set(self.script_ranks)))


Listener = Callable[[PlanView], object]
_L = TypeVar("_L", bound=Listener)
_listeners: list[Listener] = []
#: The newest plan that listeners know of, or that was there when the engine was built.
_known: Plan | None = None


def listen(listener: _L) -> _L:
    """Calls ``listener`` after each change from now on; returns it."""
    _listeners.append(listener)
    return listener


def begin(plan: Plan) -> None:
    """The engine is built: ``plan`` is no change."""
    global _known
    _known = plan


def tell(plan: Plan, member: str) -> None:
    """``plan`` is in force; called in the main thread of ``member``."""
    global _known
    before, _known = _known, plan
    view = view_of(before, plan, member)
    for listener in list(_listeners):
        listener(view)


def view_of(before: Plan | None, plan: Plan, member: str) -> PlanView:
    """The view of ``plan`` for a script that knew of ``before``; ``None``: this member has just joined."""
    known = before.members if before is not None else plan.members
    gone = [other for other in known if other not in plan.members]
    lost = tuple(other for other in gone if other in plan.lost)
    left = tuple(other for other in gone if other not in plan.lost)
    joined = tuple(other for other in plan.members if other not in known)
    changes = (("lost", lost), ("left", left), ("joined", joined))
    words = [f"{what} {', '.join(who)}" for what, who in changes if who]
    if before is None:
        words.append("this member was admitted")
    return PlanView(
        epoch=plan.epoch,
        members=plan.members,
        script_ranks=plan.script_ranks,
        member=member,
        roles=tuple((role.pipeline, role.stage) for role in plan.owned_by(member)),
        lost=lost,
        left=left,
        joined=joined,
        reason="; ".join(words) or "stages or replicas move",
        immediate=plan.interrupts(),
    )
