"""What shadows compute for owners, while it is being found out: work on the edges of a graph of members.

A role joins its owner to its shadow. Its blocks go from the one to the other in steps, each to the next block before
which the stage may be divided::

    cuts of the stage          1       3   4            a stage of 5 blocks
    the shadow has the front   |---|-------|---|        0, 1, 3 or 4 blocks in 0 to 3 steps
    the shadow has the rear        |-------|---|---|    0, 1, 2 or 4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .block_costs import BlockCosts
from .costs import Costs, block_seconds
from .loads import Loads
from .partition import SLACK
from .plan import Lent, Plan, Side

#: By stage the blocks before which it may be divided; ``None`` where that is not known yet.
Cuts = Sequence[Sequence[int] | None]

_SIDES: tuple[Side, Side] = ("front", "rear")

#: How many members are tried of those that are about as slow as the slowest.
_TIED = 8

#: Share of the slowest member's work by which the others have to stay below it: measured costs scatter.
_WORTH = 0.02


@dataclass(frozen=True, eq=False)
class Way:
    """How a stage is divided, step by step from one side on.

    Attributes:
        side: the part that the shadow has.
        cuts: where it is divided after each step.
        shares: what the shadow has to do before any step and after each, in seconds.
        step: the least that any step adds.
    """

    side: Side
    cuts: tuple[int, ...]
    shares: tuple[float, ...]
    step: float


class Ground:
    """What all divisions of a plan's stages have in common, whatever members shadow them.

    Args:
        plan: with its owners. Its shadows do not matter.
        costs: of the stages.
        cuts: see :data:`Cuts`.

    Attributes:
        members: of the plan.
        owners: by rank.
        pipelines: number of roles of a stage, whose ranks follow one another.
        whole: what each stage takes in all, in seconds.
        ways: by stage how it is divided from each side; empty where it cannot be.
        slow: how many times as long as most each member takes.
    """

    def __init__(self, plan: Plan, costs: Costs, cuts: Cuts) -> None:
        layout, blocks = plan.world, block_seconds(plan, costs)
        self.members, self.owners, self.pipelines = plan.members, plan.owners, layout.pipelines
        self.slow = {member: blocks.slow(member) for member in plan.members}
        self.whole = [blocks.part(stage, 0, layout.blocks_of(stage)) for stage in range(layout.stages)]
        self.ways: list[dict[Side, Way]] = [
            {side: _way(blocks, stage, layout.blocks_of(stage), side, known) for side in _SIDES} if known else {}
            for stage, known in enumerate(cuts)
        ]


def _way(blocks: BlockCosts, stage: int, count: int, side: Side, cuts: Sequence[int]) -> Way:
    ordered = sorted(cuts, reverse=side == "rear")
    parts = [(0, cut) if side == "front" else (cut, count) for cut in ordered]
    shares = (0.0, *(blocks.part(stage, *part) for part in parts))
    return Way(side, tuple(ordered), shares, min(later - sooner for sooner, later in pairwise(shares)))


class Graph:
    """The roles that may be divided, as edges between their owners and shadows.

    Args:
        ground: what does not depend on the shadows.
        shadows: by rank.

    Attributes:
        ways: by rank of these roles.
        beside: by member the ranks of those that it owns or shadows, in order.
    """

    def __init__(self, ground: Ground, shadows: Sequence[str | None]) -> None:
        self.ground, self.shadows = ground, shadows
        self.ways: dict[int, Way] = {}
        self.beside: dict[str, list[int]] = {member: [] for member in ground.members}
        for rank, (owner, shadow) in enumerate(zip(ground.owners, shadows, strict=True)):
            ways = ground.ways[rank // ground.pipelines]
            if ways and shadow in self.beside and owner in self.beside:
                assert shadow is not None
                self.ways[rank] = ways[self._side(rank, owner, shadow)]
                self.beside[owner].append(rank)
                self.beside[shadow].append(rank)

    def _side(self, rank: int, owner: str, shadow: str) -> Side:
        """The part of a role that its shadow computes: that which is next to what it computes besides."""
        owners, before, after = self.ground.owners, rank - self.ground.pipelines, rank + self.ground.pipelines
        first, last = before < 0, after >= len(owners)
        if not first and owners[before] == shadow:
            return "front"
        if not last and owners[after] == shadow:
            return "rear"
        # What the owner keeps stays next to what it has besides.
        if not last and owners[after] == owner:
            return "front"
        if not first and owners[before] == owner:
            return "rear"
        # A standby helps neighbours of each other, where it can: this one's rear and the next one's front.
        return "front" if not first and self.shadows[before] == shadow else "rear"


class Division:
    """Parts of stages at shadows, as they are being moved.

    Args:
        graph: of the roles that may be divided.
        lent: what shadows compute at first.

    Attributes:
        loads: seconds per micro-batch by member.
    """

    def __init__(self, graph: Graph, lent: Sequence[Lent] = ()) -> None:
        self._ground, self._graph = graph.ground, graph
        self._ways, self._steps = graph.ways, dict.fromkeys(graph.ways, 0)
        given = {each.rank: each for each in lent if each.rank in graph.ways}
        if given:
            ways = {rank: self._ground.ways[rank // self._ground.pipelines][each.side] for rank, each in given.items()}
            self._ways = {**graph.ways, **ways}
        loads, slow = dict.fromkeys(self._ground.members, 0.0), self._ground.slow
        for rank, owner in enumerate(self._ground.owners):
            if owner in loads:
                loads[owner] += self._ground.whole[rank // self._ground.pipelines] * slow[owner]
            if rank in given:
                steps = self._ways[rank].cuts.index(given[rank].cut) + 1
                self._steps[rank] = steps
                shadow, moved = str(graph.shadows[rank]), self._ways[rank].shares[steps]
                loads[owner] -= moved * slow[owner]
                loads[shadow] += moved * slow[shadow]
        self.loads = Loads(loads)

    @property
    def slowest(self) -> float:
        """Load of the slowest member."""
        return self.loads.most

    @property
    def work(self) -> float:
        """How much shadows compute in all."""
        return sum(self._ways[rank].shares[steps] for rank, steps in self._steps.items())

    @property
    def even(self) -> bool:
        """Whether no other division could be better: the slowest member has less than a step above its even share."""
        slow = self._ground.slow
        loads = self.loads.by_member.items()
        even = sum(load / slow[member] for member, load in loads) / sum(1 / each for each in slow.values())
        step = min((way.step for way in set(self._ways.values())), default=0.0)
        return self.slowest - even < step * min(slow.values()) * (1 - SLACK)

    @property
    def shadows(self) -> Sequence[str | None]:
        """By rank."""
        return self._graph.shadows

    def lent(self) -> tuple[Lent, ...]:
        """What shadows compute."""
        return tuple(
            Lent(rank, self._ways[rank].cuts[steps - 1], self._ways[rank].side)
            for rank, steps in sorted(self._steps.items())
            if steps
        )

    def improve(self) -> None:
        """Take work from the slowest members as long as that makes nobody as slow as they were."""
        if self.even:
            return
        relieved = True
        while relieved:
            full: set[str] = set()
            # One of several that are about as slow may have to be relieved before it can take something from another.
            slowest = self.loads.at_least(self.slowest * (1 - _WORTH), _TIED)
            relieved = any(self._relieve(member, full) for member in slowest)

    def _move(self, rank: int, steps: int) -> None:
        shares, slow = self._ways[rank].shares, self._ground.slow
        moved = shares[steps] - shares[self._steps[rank]]
        self._steps[rank] = steps
        owner, shadow = self._ground.owners[rank], str(self.shadows[rank])
        self.loads.add(owner, -moved * slow[owner])
        self.loads.add(shadow, moved * slow[shadow])

    def _relieve(self, slowest: str, full: set[str]) -> bool:
        """Move one step of work from ``slowest`` along the shortest chain of members that can bear it.

        None of ``full`` can; those that were tried in vain are added.
        """
        loads, slow = self.loads.by_member, self._ground.slow
        limit = loads[slowest] * (1 - _WORTH)
        queue = deque([(slowest, 0.0)])
        reached: dict[str, tuple[str, int, int] | None] = {slowest: None}
        while queue:
            member, coming = queue.popleft()
            if member != slowest and loads[member] + coming < limit:
                while (step := reached[member]) is not None:
                    member, rank, steps = step
                    self._move(rank, steps)
                return True
            for rank in self._graph.beside[member]:
                owner, shadow, shares = self._ground.owners[rank], str(self.shadows[rank]), self._ways[rank].shares
                other, steps = (shadow, self._steps[rank] + 1) if member == owner else (owner, self._steps[rank] - 1)
                if other in reached or other in full or not 0 <= steps < len(shares):
                    continue
                given = abs(shares[steps] - shares[self._steps[rank]])
                if loads[member] + coming - given * slow[member] < limit or member == slowest:
                    reached[other] = (member, rank, steps)
                    queue.append((other, given * slow[other]))
        full.update(reached)
        return False
