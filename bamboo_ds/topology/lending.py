"""The search for what shadows compute for owners: work on the edges of a graph of members.

A role joins its owner to its shadow. Its blocks go from the one to the other in steps, each to the next block before
which the stage may be divided::

    cuts of the stage          1       3   4            a stage of 5 blocks
    the shadow has the front   |---|-------|---|        0, 1, 3 or 4 blocks in 0 to 3 steps
    the shadow has the rear        |-------|---|---|    0, 1, 2 or 4
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

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

#: How often the distance between the slowest member and an even share is halved.
_HALVINGS = 6

#: Share of the slowest member's work by which the others have to stay below it: measured costs scatter.
_WORTH = 0.02


@dataclass(frozen=True, eq=False)
class Way:
    """The division of a stage, step by step from one side on.

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
    """The part that all divisions of a plan's stages have in common, whatever members shadow them.

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
        ways: by rank of these roles how they may be divided, first from the side that is next to what the shadow has.
        beside: by member the ranks of those that it owns or shadows, in order.
    """

    def __init__(self, ground: Ground, shadows: Sequence[str | None]) -> None:
        self.ground, self.shadows = ground, shadows
        self.ways: dict[int, tuple[Way, Way]] = {}
        self.beside: dict[str, list[int]] = {member: [] for member in ground.members}
        for rank, (owner, shadow) in enumerate(zip(ground.owners, shadows, strict=True)):
            ways = ground.ways[rank // ground.pipelines]
            if ways and shadow in self.beside and owner in self.beside:
                assert shadow is not None
                side = self._side(rank, owner, shadow)
                self.ways[rank] = (ways[side], ways["rear" if side == "front" else "front"])
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


class Together(NamedTuple):
    """Members between whom work can go, and what each would have to do if it did."""

    members: frozenset[str]
    share: float


class Lending:
    """Parts of stages at shadows, as they are being moved.

    Args:
        graph: of the roles that may be divided.
        lent: what shadows compute at first.

    Attributes:
        loads: seconds per micro-batch by member.
    """

    def __init__(self, graph: Graph, lent: Sequence[Lent] = ()) -> None:
        self._ground, self._graph = graph.ground, graph
        self._ways, self._steps = {rank: ways[0] for rank, ways in graph.ways.items()}, dict.fromkeys(graph.ways, 0)
        given = {each.rank: each for each in lent if each.rank in graph.ways}
        for rank, each in given.items():
            self._ways[rank] = self._ground.ways[rank // self._ground.pipelines][each.side]
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
        """The amount of work that shadows compute in all."""
        return sum(self._ways[rank].shares[steps] for rank, steps in self._steps.items())

    @property
    def even(self) -> bool:
        """Whether no other division could be better: the slowest member has less than a step above its even share."""
        step = min((way.step for ways in set(self._graph.ways.values()) for way in ways), default=0.0)
        return self.slowest - self.even_share < step * min(self._ground.slow.values()) * (1 - SLACK)

    @property
    def even_share(self) -> float:
        """What the slowest member had to do if work could go from every member to every other."""
        return self._share(self._ground.members)

    def better_than(self, other: Lending) -> bool:
        """Whether the slowest member is faster than in ``other``, or as fast with fewer that are about as slow."""
        if self.slowest < other.slowest * (1 - _WORTH):
            return True
        return self.slowest <= other.slowest * (1 + SLACK) and self._tied < other._tied

    @property
    def rating(self) -> tuple[float, int, int, float]:
        """The rating of the division, the smaller the better: slowest member, number of such, spans, work."""
        return round(self.slowest, 9), self._tied, self._spans, self.work

    @property
    def _tied(self) -> int:
        """Number of members that are about as slow as the slowest."""
        return len(self.loads.at_least(self.slowest * (1 - _WORTH), len(self._ground.members)))

    @property
    def _spans(self) -> int:
        """Number of spans: what a member computes of successive stages of a pipeline is one."""
        owners, count = self._ground.owners, 0
        for pipeline in range(self._ground.pipelines):
            parts: list[str | None] = []
            for rank in range(pipeline, len(owners), self._ground.pipelines):
                lent = [self.shadows[rank]] if self._steps.get(rank) else []
                rear = bool(lent) and self._ways[rank].side == "rear"
                parts += [owners[rank], *lent] if rear else [*lent, owners[rank]]
            count += sum(1 for _ in groupby(parts))
        return count

    @property
    def shadows(self) -> Sequence[str | None]:
        """The shadows by rank."""
        return self._graph.shadows

    def together(self) -> list[Together]:
        """The members between whom work can go, along owners and shadows."""
        found, met = [], set[str]()
        for member in self._ground.members:
            if member not in met:
                members = self._reached(member)
                met |= members
                found.append(Together(frozenset(members), self._share(members)))
        return found

    def spare(self, rank: int) -> bool:
        """Whether its owner and shadow are together without this role, or nothing of it could go to the shadow."""
        return rank not in self._graph.ways or self._other(rank, self._ground.owners[rank]) in self._reached(
            self._ground.owners[rank], without=rank
        )

    def _reached(self, member: str, without: int | None = None) -> set[str]:
        met, left = {member}, [member]
        for one in left:
            for rank in self._graph.beside[one]:
                other = self._other(rank, one)
                if rank != without and other not in met:
                    met.add(other)
                    left.append(other)
        return met

    def _share(self, members: Collection[str]) -> float:
        slow, loads = self._ground.slow, self.loads.by_member
        return sum(loads[each] / slow[each] for each in members) / sum(1 / slow[each] for each in members)

    def lent(self) -> tuple[Lent, ...]:
        """The lendings to shadows."""
        return tuple(
            Lent(rank, self._ways[rank].cuts[steps - 1], self._ways[rank].side)
            for rank, steps in sorted(self._steps.items())
            if steps
        )

    def improve(self, thorough: bool = True) -> None:
        """Gives the slowest members as little to do as is found: in small steps; ``thorough``: or by halving."""
        halved = self._copied()
        self._lower()
        if thorough:
            halved._halve()
            self._become(min((self, halved), key=lambda division: division.rating))

    def _lower(self) -> None:
        """Takes work from the slowest members, step by step, as long as that makes nobody as slow as they were."""
        loads, relieved = self.loads.by_member, not self.even
        while relieved:
            offered: dict[str, float] = {}
            # One of several that are about as slow may have to be relieved before it can take something from another.
            slowest = self.loads.at_least(self.slowest * (1 - _WORTH), _TIED)
            relieved = any(self._relieve(m, loads[m] * (1 - _WORTH), offered, 1) for m in slowest)

    def _halve(self) -> None:
        """Halves what is between the slowest member and an even share, as often as that goes."""
        least = self.even_share
        for _ in range(_HALVINGS):
            if self.even:
                return
            limit, attempt = (least + self.slowest) / 2, self._copied()
            levelled = attempt._levelled(limit)
            if levelled or attempt.better_than(self):
                self._become(attempt)
            if not levelled:
                least = limit

    def _become(self, other: Lending) -> None:
        self.loads, self._ways, self._steps = other.loads, other._ways, other._steps

    def _copied(self) -> Lending:
        copied = copy(self)
        copied.loads, copied._ways, copied._steps = Loads(self.loads.by_member), dict(self._ways), dict(self._steps)
        return copied

    def _levelled(self, limit: float) -> bool:
        """Takes work from members that have ``limit`` or more to do; whether none is left."""
        stuck: set[str] = set()
        while above := [m for m in self.loads.at_least(limit, len(self._ground.members)) if m not in stuck][:_TIED]:
            offered: tuple[dict[str, float], dict[str, float]] = {}, {}
            # One of several may have to be relieved before it can take something from another.
            relieved = any(
                self._relieve(member, limit, of, steps)
                for steps, of in zip((1, None), offered, strict=True)
                for member in above
            )
            stuck = set() if relieved else stuck.union(above)
        return not stuck

    def _relieve(self, slow_one: str, limit: float, offered: dict[str, float], most: int | None) -> bool:
        """Moves some work from ``slow_one`` along the shortest chain of members that stay, or come, below ``limit``.

        Args:
            slow_one: a member.
            limit: seconds per micro-batch.
            offered: by member the least that it was offered in vain; what is offered now is added.
            most: steps of a role that go from one member to the next; ``None``: any number.
        """
        loads, slow = self.loads.by_member, self._ground.slow
        queue = deque([_Link(slow_one)])
        offered[slow_one] = 0.0
        while queue:
            link = queue.popleft()
            member = link.member
            if link.before is not None and loads[member] + link.coming < limit:
                for each in link.chain:
                    self._move(each)
                return True
            excess = 0.0 if link.before is None else (loads[member] + link.coming - limit) / slow[member]
            for rank in self._graph.beside[member]:
                other = self._other(rank, member)
                for way, steps, given in self._next(rank, member, excess, most):
                    coming = given * slow[other]
                    if coming < offered.get(other, inf) * (1 - SLACK) and not link.passes(other):
                        offered[other] = coming
                        queue.append(_Link(other, coming, link, rank, way, steps))
        return False

    def _next(self, rank: int, member: str, least: float, most: int | None) -> Iterator[tuple[Way, int, float]]:
        """How more than ``least`` seconds of a role can go from ``member`` to the other one that holds it.

        Yields each way to divide the role, the fewest of its steps, and what goes.
        """
        way, now = self._ways[rank], self._steps[rank]
        share = way.shares[now]
        # From either side, if all of it is at its owner.
        ways = (way,) if now else self._graph.ways[rank]
        for each in ways:
            owned = member == self._ground.owners[rank]
            for steps in (range(now + 1, len(each.shares)) if owned else range(now - 1, -1, -1))[:most]:
                given = abs(each.shares[steps] - share)
                if given > least:
                    yield each, steps, given
                    break

    def _other(self, rank: int, member: str) -> str:
        owner = self._ground.owners[rank]
        return str(self.shadows[rank]) if member == owner else owner

    def _move(self, link: _Link) -> None:
        rank, slow = link.rank, self._ground.slow
        assert link.way is not None
        moved = link.way.shares[link.steps] - self._ways[rank].shares[self._steps[rank]]
        self._ways[rank], self._steps[rank] = link.way, link.steps
        owner, shadow = self._ground.owners[rank], str(self.shadows[rank])
        self.loads.add(owner, -moved * slow[owner])
        self.loads.add(shadow, moved * slow[shadow])


@dataclass(frozen=True, eq=False)
class _Link:
    """A member in a chain along which work is passed on, and what it gets.

    Attributes:
        member: the member.
        coming: what it would get to do, in seconds.
        before: the one that it gets it from; ``None`` for the first one.
        rank: of the role that it is of.
        way: how that is divided.
        steps: the step that it is divided by then.
    """

    member: str
    coming: float = 0.0
    before: _Link | None = None
    rank: int = -1
    way: Way | None = None
    steps: int = 0

    @property
    def chain(self) -> Iterator[_Link]:
        """This one and those before it, but the first."""
        link = self
        while link.before is not None:
            yield link
            link = link.before

    def passes(self, member: str) -> bool:
        """Whether ``member`` is in the chain, at whose begin it cannot be."""
        return any(member == link.member for link in self.chain)
