"""Division of stages: which blocks the shadows of roles compute, so that the slowest member has least to do.

Owner and shadow of a role hold all of its state, so work moves between them without a copy. Members and roles are a
graph: a role joins its owner to its shadow, and some of its blocks can go from one of these to the other. The slowest
member passes a block on to a neighbour that has time for it, or that passes one on in turn::

    member   a      b      c                a      b      c
    load     3      3      6       -->      4      4      4
    shadow       <-     <-                 one block of b's stage goes to a, and one of c's to b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest

from .board import Holders
from .costs import Costs, Policy, Roster
from .lending import Cuts, Division, Graph, Ground
from .partition import SLACK
from .plan import Lent, Plan

#: How many roles get other shadows for the sake of speed, how many shadows are tried for each, and how many in all,
#: times the number of members.
_ATTEMPTS, _OPTIONS, _TRIALS = 8, 3, 4096

#: A division that is no faster has to lend less than this share of what is lent.
_LESS = 0.7


def divided(plan: Plan, costs: Costs, cuts: Cuts, min_gain: float) -> tuple[Lent, ...]:
    """What shadows compute under ``plan``, whose owners and shadows are settled.

    What ``plan`` lends stays, unless the slowest member gains ``min_gain`` by another division, or loses nothing by one
    that lends much less.
    """
    if plan.layout is None or not plan.shadows or not any(cuts) or plan.world.slices > 1:
        return ()
    return _settled(Graph(Ground(plan, costs, cuts), plan.shadows), plan.lent, min_gain).lent()


def _settled(graph: Graph, lent: Sequence[Lent], min_gain: float) -> Division:
    """The best division, or the one that lends ``lent`` if the other is not worth a change."""
    best = Division(graph)
    best.improve()
    # Those that lend the same are equal to the last bit, however they were found.
    best = Division(graph, best.lent())
    if any(each.rank not in graph.ways or each.cut not in graph.ways[each.rank].cuts for each in lent):
        return best
    now = Division(graph, lent)
    gains = best.slowest < now.slowest * (1 - min_gain) * (1 - SLACK)
    as_good = best.slowest <= now.slowest * (1 + SLACK)
    return best if gains or (as_good and best.work < now.work * _LESS) else now


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

    if not any(previous.cuts):
        return replace(target, lent=())
    best = _Search(previous, target, roster, costs, policy, holders).best()
    return replace(target, shadows=tuple(best.shadows), lent=best.lent())


class _Search:
    """The search for shadows that let all members have about as much to do; see :func:`with_division`."""

    def __init__(
        self, previous: Plan, target: Plan, roster: Roster, costs: Costs, policy: Policy, holders: Holders
    ) -> None:
        self._previous, self._target, self._roster = previous, target, roster
        self._policy, self._holders = policy, holders
        self._ground = Ground(target, costs, previous.cuts)
        self._stages: dict[str, list[int]] = {member: [] for member in target.members}
        for rank, owner in enumerate(target.owners):
            self._stages[owner].append(rank // self._ground.pipelines)

    def best(self) -> Division:
        """The best division that is found."""
        best = self._settled(self._target.shadows)
        if not self._policy.divides:
            return best
        if not best.even:
            # Shadows that serve the division better than nearer ones would stay: copies back and forth help nobody.
            other = self._settled(_as_before(self._previous, self._target, self._roster, self._holders))
            if other.slowest <= best.slowest * (1 - self._policy.min_gain) * (1 + SLACK):
                best = other
        trials = max(1, _TRIALS // len(self._target.members))
        for _ in range(_ATTEMPTS):
            options = [] if best.even else self._options(best)[:trials]
            if not options:
                break
            trials -= len(options)
            found = min((self._settled(each) for each in options), key=lambda each: (each.slowest, each.work))
            if found.slowest > best.slowest * (1 - self._policy.min_gain) * (1 - SLACK):
                break
            best = found
        return best

    def _settled(self, shadows: Sequence[str | None]) -> Division:
        lent = still_lent(self._previous, self._target.owners, shadows)
        return _settled(Graph(self._ground, shadows), lent, self._policy.min_gain)

    def _options(self, best: Division) -> list[list[str | None]]:
        """The shadows of ``best``, but another one for a role of the slowest member."""
        (slowest,) = best.loads.at_least(best.slowest, 1)
        idlest, loads, options = best.loads.ascending, best.loads.by_member, []
        for rank, owner in enumerate(self._target.owners):
            stage = rank // self._ground.pipelines
            if owner != slowest or not self._previous.cuts[stage]:
                continue
            able = [m for m in idlest if m != best.shadows[rank] and self._roster.apart(owner, m)]
            held = self._holders.get(rank, ())
            # Who holds it already, then who has least to do, then whose stages have their passes at about that time.
            able = nsmallest(_OPTIONS, able, key=lambda m: (m not in held, loads[m], _distance(self._stages[m], stage)))
            options += [_with(best.shadows, rank, member) for member in able]
        return options


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
