"""Limits of members' memory, and its use under a plan. Pure.

A role takes as much on its shadow as it would on its owner, or more (:class:`~.memory.StageMemory`): what its passes
keep counts on both. So a takeover by a shadow takes no member beyond what it may hold::

    limit 40      owns        shadows     bytes            c is lost: owns        shadows     bytes
    b             stage 1     stage 2     10 + 10          b          stages 1, 2             20

A member keeps the state of the rank that its script runs as, whoever owns that role.

A member that has no room for all of its roles as they are can hold them in less (:class:`Tightness`). Here a role takes
10, of which the optimizer's part is 6 and masters are 2, and the passes of 4 micro-batches are 4; b's script runs as
stage 1::

    b owns stages 1, 2, 3                stage 1     stage 2     stage 3     one step     bytes
    whole                                10 + 4      10 + 4      10 + 4                   42
    lean                                 10 + 4       4 + 4       4 + 4      2            32
    bounded by one micro-batch           10 + 1       4 + 1       4 + 1      2            23

Of a shadowed role one micro-batch counts that way. Where its member takes it over, those of its other roles that are
under way by then go on, and may take it beyond its limit until the iteration ends.

Replicas that can wait in host memory compute ahead of a loss where there is room for what that takes besides, and wait
where there is none: :meth:`Room.waiting` decides that for all, from what a plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from math import inf
from typing import NamedTuple

from .costs import Candidate
from .memory import StageMemory, StateBytes
from .plan import Plan


class Tightness(IntEnum):
    """The ways in which a member can hold its roles, each in less memory than the one before."""

    #: All of it is on the device.
    WHOLE = 0
    #: Optimizers, but for that of its script's own role, are in host memory between steps.
    LEAN = 1
    #: Besides, few micro-batches of a role are under way; one in what has to fit.
    BOUNDED = 2

    def of(self, stage: StageMemory) -> StageMemory:
        """What a role of ``stage`` takes that is not the script's own."""
        if self is Tightness.WHOLE:
            return stage
        return stage.lean if self is Tightness.LEAN else stage.lean.bounded(1)


class _Sizes(NamedTuple):
    """Bytes by rank: on an owner, on a shadow, and what of either is there in any case if the script runs as it."""

    own: list[int]
    replica: list[int]
    home: list[int]


class Room:
    """The limits of members' memory.

    Args:
        plan: with its layout, and what stages take.
        members: the members that count.
        tightness: in which they hold their roles: of all, or by member, :attr:`Tightness.WHOLE` where none is given.

    Attributes:
        limits: bytes, by member of which they are known; empty where nothing is known of stages.
        parked: copies that are being made are in host memory, which has no limit here.
    """

    def __init__(
        self,
        plan: Plan,
        members: Iterable[Candidate],
        tightness: Tightness | Mapping[str, Tightness] = Tightness.WHOLE,
    ) -> None:
        known = {member.id: member for member in members if member.memory is not None} if plan.memory else {}
        self.limits = {name: member.memory for name, member in known.items() if member.memory is not None}
        self._plan, self._members = plan, known.values()
        self._script_ranks = {name: member.script_rank for name, member in known.items()}
        self._stages = [plan.memory[role.stage] for role in plan.world.roles] if plan.memory else []
        self._state = [stage.own for stage in self._stages]
        self.parked = any(stage.parked for stage in self._stages)
        all_, by_member = (tightness, {}) if isinstance(tightness, Tightness) else (Tightness.WHOLE, tightness)
        self._tightness = {name: by_member.get(name, all_) for name in known}
        sizes = {each: self._sizes_of(each) for each in {all_, *self._tightness.values()}}
        self._sizes = {name: sizes[self._tightness[name]] for name in known}
        self._least = sizes[max(sizes)]
        self._step = max((stage.masters for stage in plan.memory if stage.resting), default=0)

    def _sizes_of(self, tightness: Tightness) -> _Sizes:
        plan = self._plan
        stages = [tightness.of(stage) for stage in plan.memory]
        found = [stages[role.stage] for role in plan.world.roles] if stages else []
        return _Sizes(*([getattr(stage, name) for stage in found] for name in ("owned", "shadowed", "own")))

    def owned(self, rank: int, member: str) -> int:
        """Bytes that a role takes on ``member`` as its owner, besides what is there in any case."""
        sizes = self._sizes[member]
        return sizes.own[rank] - (sizes.home[rank] if self._script_ranks[member] == rank else 0)

    def shadowed(self, rank: int, member: str) -> int:
        """The same as its shadow."""
        sizes = self._sizes[member]
        return sizes.replica[rank] - (sizes.home[rank] if self._script_ranks[member] == rank else 0)

    def copying(self, rank: int, member: str) -> int:
        """The same while it makes a copy."""
        return 0 if self.parked else self.owned(rank, member)

    def size(self, rank: int) -> int:
        """Bytes that a role takes where nothing of it is there, on members that hold it in least."""
        return self._least.replica[rank]

    def script_rank(self, member: str) -> int | None:
        """The rank that the script of ``member`` runs as, whose state is there in any case; ``None``: of no role."""
        return self._script_ranks[member] if self._script_ranks[member] < len(self._state) else None

    def free(self, member: str) -> int:
        """Bytes that ``member`` has for roles, besides what is there in any case and what one step at a time needs."""
        script_rank = self.script_rank(member)
        there = 0 if script_rank is None else self._state[script_rank]
        return self.limits[member] - there - (self._step if self._tightness[member] else 0)

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
        script_ranks, by_member = self._script_ranks, self._sizes
        # All roles for every question of the planner: without calls of methods.
        for kind, members in enumerate((owners, shadows)):
            for rank, member in enumerate(members):
                if member in found:
                    sizes = by_member[member]
                    found[member] -= sizes[kind][rank] - (sizes.home[rank] if script_ranks[member] == rank else 0)
        for rank, builder in builders:
            if builder in found and builder not in (owners[rank], shadows[rank] if shadows else None):
                found[builder] -= self.copying(rank, builder)
        return found

    def waiting(self, owners: Sequence[str], shadows: Sequence[str | None]) -> dict[str, int | None]:
        """Members whose replicas wait in host memory, and the bytes that they lack for replicas that compute.

        Of a replica that computes ahead of a loss the larger one counts of what it takes before the loss and after it,
        as it is. A member with room for some of its replicas alone has all of them wait. ``None``: what redundant
        passes keep is not known of all stages, or there are none.
        """
        if not self.parked:
            return {}
        unknown = any(stage.redundant is None for stage in self._stages)
        left, found = self.whole.left(owners, shadows), dict[str, int | None]()
        for member in sorted({shadow for shadow in shadows if shadow is not None}):
            guests = [stage for stage, shadow in zip(self._stages, shadows, strict=True) if shadow == member]
            lacking = sum(max(0, stage.ahead - stage.shadowed) for stage in guests) - left.get(member, inf)
            if unknown:
                found[member] = None
            elif lacking > 0:
                found[member] = int(lacking)
        return found

    def crowded(
        self, owners: Sequence[str], shadows: Sequence[str | None], builders: Collection[tuple[int, str]] = ()
    ) -> tuple[str, ...]:
        """Members that would hold more than they may, also with all of it on the device."""
        lefts = [room.left(owners, shadows, builders) for room in dict.fromkeys((self, self.whole))]
        return tuple(member for member in self.limits if all(left[member] < 0 for left in lefts))

    # -- less memory --------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Room:
        """The same where members hold their roles as they are."""
        return self.at(Tightness.WHOLE) if any(self._tightness.values()) else self

    def at(self, tightness: Tightness | Mapping[str, Tightness]) -> Room:
        """The same where members hold their roles otherwise."""
        return Room(self._plan, self._members, tightness)

    def gains(self, tightness: Tightness) -> bool:
        """Whether some role takes less than with the tightness before."""
        if not self.limits:
            return False
        if tightness is Tightness.LEAN:
            return any(stage.resting for stage in self._plan.memory)
        return any(stage.bounded(1).passes < stage.passes for stage in self._plan.memory)

    def eased(self, owners: Sequence[str]) -> Room:
        """The same for replicas, once owners are settled: members bound no role for the sake of replicas alone."""
        if Tightness.BOUNDED not in self._tightness.values():
            return self
        lean = self.at(Tightness.LEAN)
        short = lean.crowded(owners, ())
        return self.at({m: Tightness.BOUNDED if m in short else Tightness.LEAN for m in self.limits})

    def tight(
        self, owners: Sequence[str], shadows: Sequence[str | None], builders: Collection[tuple[int, str]] = ()
    ) -> tuple[tuple[str, int], ...]:
        """What :attr:`~.plan.Plan.tight` is: members without room for all of it as it is, with micro-batches.

        That is the largest number with which all fits that a member owns; one where none does. Of what it shadows one
        micro-batch counts then.
        """
        whole = self.whole.left(owners, shadows, builders)
        if all(left >= 0 for left in whole.values()):
            return ()
        lean, bounded = (self.at(t).left(owners, shadows, builders) for t in (Tightness.LEAN, Tightness.BOUNDED))
        found = []
        for member in [member for member, left in whole.items() if left < 0]:
            mine = [stage for stage, owner in zip(self._stages, owners, strict=True) if owner == member]
            count = 0 if lean[member] >= 0 else _most_under_way(mine, bounded[member])
            found.append((member, count))
        return tuple(found)

    def held(self, plan: Plan) -> dict[str, int]:
        """Bytes that members with a limit hold under ``plan``, in the ways that it tells."""
        left = self.at(tightness_of(plan)).left(plan.owners, plan.shadows)
        found, counts = {member: self.limits[member] - left[member] for member in left}, dict(plan.tight)
        for stage, owner in zip(self._stages, plan.owners, strict=True) if found else ():
            if owner in found and counts.get(owner):
                found[owner] += stage.bounded(counts[owner]).passes - stage.bounded(1).passes
        return found


def _most_under_way(stages: Sequence[StageMemory], left: int) -> int:
    """How many micro-batches of roles of ``stages`` may be under way; 0: all of 1F1B.

    Args:
        stages: of the roles that a member owns.
        left: bytes that it has if it is one of each.
    """
    natural = max((stage.under_way for stage in stages), default=1)
    for count in range(natural, 1, -1):
        more = sum(stage.bounded(count).passes - stage.bounded(1).passes for stage in stages)
        if more <= max(0, left):
            return count if count < natural else 0
    return 1 if natural > 1 else 0


def tightness_of(*plans: Plan) -> dict[str, Tightness]:
    """The tightness in which members of ``plans`` hold their roles, other than whole; the larger one of several."""
    found: dict[str, Tightness] = {}
    for member, count in (pair for plan in plans for pair in plan.tight):
        tightness = Tightness.BOUNDED if count else Tightness.LEAN
        found[member] = max(tightness, found.get(member, tightness))
    return found


def rests(plan: Plan, rank: int, member: str) -> bool:
    """Whether ``member``, which holds the role, has its optimizer in host memory between steps."""
    if member not in dict(plan.tight):
        return False
    return dict(zip(plan.members, plan.script_ranks, strict=False)).get(member) != rank


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
