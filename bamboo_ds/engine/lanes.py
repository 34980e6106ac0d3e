"""Which streams exist between members under a plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from ..comm.transport import Lane
from ..topology import Plan, Role


class Stream(IntEnum):
    """What a lane carries. The role of a lane is the one that receives, or whose state it is."""

    #: Outputs of the previous stage, to the role's owner.
    ACTIVATION = 0
    #: Gradients of the role's outputs, to the role's owner.
    GRADIENT = 1
    #: Reduced gradients and buffers of the role, from its owner to its shadow.
    REPLICA = 2
    #: Labels of a last stage, to its owner.
    LABELS = 3
    #: Labels of a last stage, to its shadow.
    SHADOW_LABELS = 4
    #: Gradients of the role's outputs, to its shadow (eager redundant backwards).
    SHADOW_GRADIENT = 5
    #: Full state of the role, from its owner to its shadow.
    STATE = 6


def batch_holders(plan: Plan, homes: Sequence[str], pipeline: int) -> tuple[str | None, str | None]:
    """The living members that have an iterator over the batches of ``pipeline``.

    These are the first owners (``homes``, by rank) of its first and of its last stage: scripts give iterators
    to the ends of a pipeline only.

    Returns:
        The first stage's and the last stage's first owner; ``None`` for one that was lost.
    """
    layout = plan.world
    ends = (Role(pipeline, 0), Role(pipeline, layout.stages - 1))
    first, last = (homes[layout.rank(end)] for end in ends)
    return (first if first in plan.members else None, last if last in plan.members else None)


def lanes(plan: Plan, homes: Sequence[str], shadow_gradients: bool) -> dict[tuple[Stream, Role], Lane]:
    """All lanes of ``plan``'s epoch, by what they carry and the role concerned.

    Args:
        plan: the plan, without unheld roles.
        homes: first owner of every role, by rank.
        shadow_gradients: whether gradients are also sent to shadows.
    """
    layout = plan.world
    table: dict[tuple[Stream, Role], Lane] = {}

    def add(stream: Stream, role: Role, source: str, destination: str) -> None:
        tag = int(stream) * layout.size + layout.rank(role)
        table[stream, role] = Lane(tag, source, destination, f"{stream.name.lower()} {role}")

    for role in layout.roles:
        owner, shadow = plan.owner(role), plan.shadow(role)
        if role.stage > 0:
            add(Stream.ACTIVATION, role, plan.owner(layout.predecessor(role)), owner)
        if role.stage < layout.stages - 1:
            add(Stream.GRADIENT, role, plan.owner(layout.successor(role)), owner)
            if shadow is not None and shadow_gradients:
                add(Stream.SHADOW_GRADIENT, role, plan.owner(layout.successor(role)), shadow)
        if shadow is not None:
            add(Stream.REPLICA, role, owner, shadow)
            add(Stream.STATE, role, owner, shadow)
        if role.stage == layout.stages - 1:
            first, last = batch_holders(plan, homes, role.pipeline)
            source = last or first
            if source is None:
                continue
            if owner not in (first, last):
                add(Stream.LABELS, role, source, owner)
            if shadow is not None and shadow not in (first, last):
                add(Stream.SHADOW_LABELS, role, source, shadow)
    return table
