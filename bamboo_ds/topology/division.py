"""Division of stages: which blocks the shadows of roles compute, so that the slowest member has least to do.

Owner and shadow of a role hold all of its state, so work moves between them without a copy. Members and roles are a
graph: a role joins its owner to its shadow, and some of its blocks can go from one of these to the other. The slowest
member passes a block on to a neighbour that has time for it, or that passes one on in turn::

    member   a      b      c                a      b      c
    load     3      3      6       -->      4      4      4
    shadow       <-     <-                 one block of b's stage goes to a, and one of c's to b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

from .board import Holders
from .costs import Costs, Policy, Roster, block_seconds
from .partition import SLACK
from .plan import Lent, Plan, Side
from .roles import Role

#: How many roles get other shadows for the sake of speed, how many shadows are tried for each, and how many in all,
#: times the number of members.
_ATTEMPTS, _OPTIONS, _TRIALS = 8, 3, 4096

#: How many members are tried of those that are about as slow as the slowest.
_TIED = 8

#: A division that is no faster has to lend less than this share of what is lent.
_LESS = 0.7

#: Share of the slowest member's work by which the others have to stay below it: measured costs scatter.
_WORTH = 0.02

#: By stage the blocks before which it may be divided; ``None`` where that is not known yet.
Cuts = Sequence[Sequence[int] | None]


def divided(plan: Plan, costs: Costs, cuts: Cuts, min_gain: float) -> tuple[Lent, ...]:
    """What shadows compute under ``plan``, whose owners and shadows are settled.

    What ``plan`` lends stays, unless the slowest member gains ``min_gain`` by another division, or loses nothing by one
    that lends much less.
    """
    if plan.layout is None or not plan.shadows or not any(cuts) or plan.world.slices > 1:
        return ()
    best = _Division(plan, costs, cuts)
    best.improve()
    allowed = all(_may(plan, each, cuts) for each in plan.lent)
    if allowed:
        now = _Division(plan, costs, cuts, plan.lent)
        gains = best.slowest < now.slowest * (1 - min_gain) * (1 - SLACK)
        as_good = best.slowest <= now.slowest * (1 + SLACK)
        if not gains and not (as_good and best.work < now.work * _LESS):
            return tuple(sorted(plan.lent, key=lambda each: each.rank))
    return best.lent()


def _may(plan: Plan, lent: Lent, cuts: Cuts) -> bool:
    known = cuts[plan.world.role(lent.rank).stage]
    return plan.shadows[lent.rank] in plan.members and known is not None and lent.cut in known


class _Division:
    """Parts of stages at shadows, as they are being moved.

    Args:
        plan: with owners and shadows.
        costs: of the stages.
        cuts: see :data:`Cuts`.
        lent: what shadows compute at first.
    """

    def __init__(self, plan: Plan, costs: Costs, cuts: Cuts, lent: Sequence[Lent] = ()) -> None:
        self._plan, layout = plan, plan.world
        self._blocks = block_seconds(plan, costs)
        alive = frozenset(plan.members)
        self.loads = dict.fromkeys(plan.members, 0.0)
        #: Of the roles that may be divided: how much of them each number of steps lends, and the cuts that make it so.
        self._shares: dict[int, list[float]] = {}
        self._cuts: dict[int, list[int]] = {}
        self._sides: dict[int, Side] = {}
        self._steps: dict[int, int] = {}
        self._beside: dict[str, list[int]] = {member: [] for member in plan.members}
        given = {each.rank: each for each in lent}
        for rank, role in enumerate(layout.roles):
            owner, shadow = plan.owners[rank], plan.shadows[rank]
            if owner in alive:
                whole = self._blocks.part(role.stage, 0, layout.blocks_of(role.stage))
                self.loads[owner] += whole * self._blocks.slow(owner)
            known = cuts[role.stage]
            if shadow not in alive or owner not in alive or shadow is None or not known:
                continue
            kept = given.get(rank)
            side = self._sides[rank] = kept.side if kept is not None else _side(plan, role)
            ordered = self._cuts[rank] = sorted(known, reverse=side == "rear")
            blocks = layout.blocks_of(role.stage)
            parts = [(0, cut) if side == "front" else (cut, blocks) for cut in ordered]
            self._shares[rank] = [0.0, *(self._blocks.part(role.stage, *part) for part in parts)]
            self._steps[rank] = 0
            for member in (owner, shadow):
                self._beside[member].append(rank)
            if kept is not None:
                self._move(rank, ordered.index(kept.cut) + 1)

    @property
    def slowest(self) -> float:
        """Load of the slowest member."""
        return max(self.loads.values())

    @property
    def work(self) -> float:
        """How much shadows compute in all."""
        return sum(self._shares[rank][steps] for rank, steps in self._steps.items())

    @property
    def even(self) -> bool:
        """Whether no other division could be better: the slowest member has less than a step above its even share."""
        steps = (later - sooner for shares in self._shares.values() for sooner, later in pairwise(shares))
        slow = {member: self._blocks.slow(member) for member in self.loads}
        even = sum(load / slow[member] for member, load in self.loads.items()) / sum(1 / each for each in slow.values())
        return self.slowest - even < min(steps, default=0.0) * min(slow.values()) * (1 - SLACK)

    def lent(self) -> tuple[Lent, ...]:
        """What shadows compute."""
        return tuple(
            Lent(rank, self._cuts[rank][steps - 1], self._sides[rank])
            for rank, steps in sorted(self._steps.items())
            if steps
        )

    def improve(self) -> None:
        """Take work from the slowest members as long as that makes nobody as slow as they were."""
        if self.even:
            return
        relieved = True
        while relieved:
            limit = self.slowest * (1 - _WORTH)
            full: set[str] = set()
            # One of several that are about as slow may have to be relieved before it can take something from another.
            slowest = islice([member for member, load in self.loads.items() if load >= limit], _TIED)
            relieved = any(self._relieve(member, full) for member in slowest)

    def _move(self, rank: int, steps: int) -> None:
        shares = self._shares[rank]
        moved = shares[steps] - shares[self._steps[rank]]
        self._steps[rank] = steps
        owner, shadow = self._plan.owners[rank], str(self._plan.shadows[rank])
        self.loads[owner] -= moved * self._blocks.slow(owner)
        self.loads[shadow] += moved * self._blocks.slow(shadow)

    def _relieve(self, slowest: str, full: set[str]) -> bool:
        """Move one step of work from ``slowest`` along the shortest chain of members that can bear it.

        None of ``full`` can; those that were tried in vain are added.
        """
        limit = self.loads[slowest] * (1 - _WORTH)
        queue = deque([(slowest, 0.0)])
        reached: dict[str, tuple[str, int, int] | None] = {slowest: None}
        while queue:
            member, coming = queue.popleft()
            if member != slowest and self.loads[member] + coming < limit:
                while (step := reached[member]) is not None:
                    member, rank, steps = step
                    self._move(rank, steps)
                return True
            for rank in self._beside[member]:
                owner, shadow = self._plan.owners[rank], str(self._plan.shadows[rank])
                other, steps = (shadow, self._steps[rank] + 1) if member == owner else (owner, self._steps[rank] - 1)
                if other in reached or other in full or not 0 <= steps < len(self._shares[rank]):
                    continue
                given = abs(self._shares[rank][steps] - self._shares[rank][self._steps[rank]])
                if self.loads[member] + coming - given * self._blocks.slow(member) < limit or member == slowest:
                    reached[other] = (member, rank, steps)
                    queue.append((other, given * self._blocks.slow(other)))
        full.update(reached)
        return False


def _side(plan: Plan, role: Role) -> Side:
    """The part of ``role`` that its shadow computes: that which is next to what it computes besides."""
    layout, shadow, owner = plan.world, plan.shadow(role), plan.owner(role)
    before = layout.predecessor(role) if role.stage > 0 else None
    after = layout.successor(role) if role.stage < layout.stages - 1 else None
    if before is not None and plan.owner(before) == shadow:
        return "front"
    if after is not None and plan.owner(after) == shadow:
        return "rear"
    # What the owner keeps stays next to what it has besides.
    if after is not None and plan.owner(after) == owner:
        return "front"
    if before is not None and plan.owner(before) == owner:
        return "rear"
    # A standby helps neighbours of each other, where it can: this one's rear and the next one's front.
    if before is not None and plan.shadow(before) == shadow:
        return "front"
    return "rear"


def with_division(previous: Plan, target: Plan, roster: Roster, costs: Costs, policy: Policy, holders: Holders) -> Plan:
    """``target``, in which shadows compute parts of stages.

    Where its shadows do not let all members have about as much to do, some of the slowest member's roles get others: a
    copy of a stage for an iteration that is shorter by ``policy.min_gain``.

    Args:
        previous: the plan before; what it lends stays where it can.
        target: with owners and shadows for ``roster``.
        roster: the members.
        costs: of the stages.
        policy: the user's wishes.
        holders: valid copies by rank.
    """

    def settled(shadows: Sequence[str | None]) -> tuple[Plan, _Division]:
        plan = replace(target, shadows=tuple(shadows), lent=still_lent(previous, target.owners, shadows))
        plan = replace(plan, lent=divided(plan, costs, previous.cuts, policy.min_gain))
        return plan, _Division(plan, costs, previous.cuts, plan.lent)

    best, division = settled(target.shadows)
    if not (policy.divides and any(previous.cuts)):
        return best
    if not division.even:
        # Shadows that serve the division better than nearer ones would stay: copies back and forth help nobody.
        other, found = settled(_as_before(previous, target, roster, holders))
        if found.slowest <= division.slowest * (1 - policy.min_gain) * (1 + SLACK):
            best, division = other, found
    trials = max(1, _TRIALS // len(division.loads))
    stages: dict[str, list[int]] = {member: [] for member in division.loads}
    for rank, owner in enumerate(best.owners):
        stages[owner].append(best.world.role(rank).stage)
    for _ in range(_ATTEMPTS):
        if division.even:
            break
        slowest = max(division.loads, key=lambda member: division.loads[member])
        idlest = sorted(division.loads, key=lambda member: (division.loads[member], roster.order.get(member, 0)))
        options = []
        for rank, owner in enumerate(best.owners):
            stage = best.world.role(rank).stage
            if owner != slowest or not previous.cuts[stage]:
                continue
            able = [m for m in idlest if m != best.shadows[rank] and roster.apart(owner, m)]
            # Who holds it already, then who has least to do, then whose stages have their passes at about that time.
            able.sort(key=lambda m: (m not in holders.get(rank, ()), division.loads[m], _distance(stages[m], stage)))
            options += [(rank, member) for member in able[:_OPTIONS]]
        options = options[:trials]
        trials -= len(options)
        tried = [settled(_with(best.shadows, *option)) for option in options]
        if not tried:
            break
        plan, found = min(tried, key=lambda each: (each[1].slowest, each[1].work))
        if found.slowest > division.slowest * (1 - policy.min_gain) * (1 - SLACK):
            break
        best, division = plan, found
    return best


def _distance(stages: Sequence[int], stage: int) -> int:
    """From ``stage`` to the nearest of ``stages``; 0 without any."""
    return min((abs(each - stage) for each in stages), default=0)


def _as_before(previous: Plan, target: Plan, roster: Roster, holders: Holders) -> list[str | None]:
    """The shadows of ``target``, but those of ``previous`` where they hold a copy and may stay."""
    found = list(target.shadows)
    for rank, (owner, shadow) in enumerate(zip(target.owners, previous.shadows, strict=False)):
        if shadow is not None and shadow in holders.get(rank, ()) and roster.apart(owner, shadow):
            found[rank] = shadow
    return found


def _with(shadows: Sequence[str | None], rank: int, member: str) -> list[str | None]:
    return [member if place == rank else shadow for place, shadow in enumerate(shadows)]


def still_lent(previous: Plan, owners: Sequence[str], shadows: Sequence[str | None]) -> tuple[Lent, ...]:
    """What of ``previous`` is lent where neither owner nor shadow has changed."""
    return tuple(
        each
        for each in previous.lent
        if (owners[each.rank], shadows[each.rank]) == (previous.owners[each.rank], previous.shadows[each.rank])
    )
