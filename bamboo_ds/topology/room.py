"""Limits of members' memory, and its use under a plan. Pure.

A role takes as much on its shadow as it would on its owner, or more (:class:`~.memory.StageMemory`): what its passes
keep counts on both. So a takeover by a shadow takes no member beyond what it may hold::

    limit 40      owns        shadows     bytes            c is lost: owns        shadows     bytes
    b             stage 1     stage 2     10 + 10          b          stages 1, 2             20

A member keeps the state of the rank that its script runs as, whoever owns that role.

Replicas that can wait in host memory compute ahead of a loss where there is room for what that takes besides, and wait
where there is none: :meth:`Room.waiting` decides that for all, from what a plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf

from .costs import Candidate
from .memory import StageMemory, StateBytes
from .plan import Plan


class Room:
    """The limits of members' memory.

    Args:
        plan: with its layout, and what stages take.
        members: the members that count.

    Attributes:
        limits: bytes, by member of which they are known; empty where nothing is known of stages.
        parked: copies that are being made are in host memory, which has no limit here.
    """

    def __init__(self, plan: Plan, members: Iterable[Candidate]) -> None:
        known = {member.id: member for member in members if member.memory is not None} if plan.memory else {}
        self.limits = {name: member.memory for name, member in known.items() if member.memory is not None}
        self._script_ranks = {name: member.script_rank for name, member in known.items()}
        self._stages = stages = [plan.memory[role.stage] for role in plan.world.roles] if plan.memory else []
        self._state = [stage.own for stage in stages]
        self._own = [stage.owned for stage in stages]
        self._replica = [stage.shadowed for stage in stages]
        self.parked = any(stage.parked for stage in stages)

    def owned(self, rank: int, member: str) -> int:
        """Bytes that a role takes on ``member`` as its owner, besides what is there in any case."""
        return self._own[rank] - (self._state[rank] if self._script_ranks[member] == rank else 0)

    def shadowed(self, rank: int, member: str) -> int:
        """The same as its shadow."""
        return self._replica[rank] - (self._state[rank] if self._script_ranks[member] == rank else 0)

    def copying(self, rank: int, member: str) -> int:
        """The same while it makes a copy."""
        return 0 if self.parked else self.owned(rank, member)

    def size(self, rank: int) -> int:
        """Bytes that a role takes where nothing of it is there."""
        return self._replica[rank]

    def script_rank(self, member: str) -> int | None:
        """The rank that the script of ``member`` runs as, whose state is there in any case; ``None``: of no role."""
        return self._script_ranks[member] if self._script_ranks[member] < len(self._state) else None

    def free(self, member: str) -> int:
        """Bytes that ``member`` has for roles, besides what is there in any case."""
        script_rank = self.script_rank(member)
        return self.limits[member] - (0 if script_rank is None else self._state[script_rank])

    def left(
        self,
        owners: Sequence[str | None],
        shadows: Sequence[str | None] = (),
        builders: Collection[tuple[int, str]] = (),
    ) -> dict[str, int]:
        """Bytes that are left by member with a limit, below 0 where it would hold more than it may.

        A copy that is being made takes as much as an owned role, or nothing (:meth:`copying`).
        """
        found = {member: self.free(member) for member in self.limits}
        script_ranks, state = self._script_ranks, self._state
        # All roles for every question of the planner: without calls of methods.
        for members, sizes in ((owners, self._own), (shadows, self._replica)):
            for rank, member in enumerate(members):
                if member in found:
                    found[member] -= sizes[rank] - (state[rank] if script_ranks[member] == rank else 0)
        for rank, builder in builders:
            if builder in found and builder not in (owners[rank], shadows[rank] if shadows else None):
                found[builder] -= self.copying(rank, builder)
        return found

    def waiting(self, owners: Sequence[str], shadows: Sequence[str | None]) -> dict[str, int | None]:
        """Members whose replicas wait in host memory, and the bytes that they lack for replicas that compute.

        Of a replica that computes ahead of a loss the larger one counts of what it takes before the loss and after it.
        A member with room for some of its replicas alone has all of them wait. ``None``: what redundant passes keep is
        not known of all stages, or there are none.
        """
        if not self.parked:
            return {}
        unknown = any(stage.redundant is None for stage in self._stages)
        left, found = self.left(owners, shadows), dict[str, int | None]()
        for member in sorted({shadow for shadow in shadows if shadow is not None}):
            guests = [stage for stage, shadow in zip(self._stages, shadows, strict=True) if shadow == member]
            lacking = sum(max(0, stage.ahead - stage.shadowed) for stage in guests) - left.get(member, inf)
            if unknown:
                found[member] = None
            elif lacking > 0:
                found[member] = int(lacking)
        return found

    def crowded(self, owners: Sequence[str], shadows: Sequence[str | None]) -> tuple[str, ...]:
        """Members that would hold more than they may."""
        return tuple(member for member, left in self.left(owners, shadows).items() if left < 0)


def while_copying(plan: Plan, target: Plan, builders: Collection[tuple[int, str]], room: Room) -> Sequence[str | None]:
    """The shadows of ``plan`` while ``builders`` make the copies that ``target`` needs.

    Where a member may not hold the copies with all that it has it gives up replicas first that it loses anyway.
    """
    shadows = list(plan.shadows)
    left = room.left(plan.owners, shadows, builders)
    for member in dict.fromkeys(member for _, member in builders) if not room.parked else ():
        missing = -left.get(member, 0)
        lost = [r for r, m in enumerate(shadows) if m == member and member not in (target.owners[r], target.shadows[r])]
        for rank in sorted(lost, key=lambda rank: (-room.shadowed(rank, member), rank)) if missing > 0 else ():
            if missing > 0:
                shadows[rank] = None
                missing -= room.shadowed(rank, member)
    return shadows


def member_bytes(plan: Plan, stages: Sequence[StageMemory]) -> dict[str, tuple[int, int]]:
    """Bytes of the state of the roles that each member owns, and of those that it shadows."""
    owned, shadowed = dict.fromkeys(plan.members, 0), dict.fromkeys(plan.members, 0)
    for role, owner, shadow in zip(plan.world.roles, plan.owners, plan.shadows or plan.owners, strict=True):
        if owner in owned:
            owned[owner] += stages[role.stage].own
        if plan.shadows and shadow in shadowed:
            shadowed[shadow] += stages[role.stage].replica
    return {member: (owned[member], shadowed[member]) for member in plan.members}


def page_locked(plan: Plan, parameters: Sequence[int], state: StateBytes) -> Counter[str]:
    """Bytes of host memory by member that are page-locked while its replicas wait there, at most.

    Gradients and sums: those that its replicas have, and those of its own stages on their way. Boundary tensors and the
    slabs through which a replica's step goes come on top.

    Args:
        plan: with owners and shadows.
        parameters: trainable ones of each stage.
        state: of the job.
    """
    found = Counter[str]()
    for role, owner, shadow in zip(plan.world.roles, plan.owners, plan.shadows, strict=True):
        if shadow is not None:
            for member in (owner, shadow):
                found[member] += parameters[role.stage] * state.sent
    return found
