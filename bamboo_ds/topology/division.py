"""Lending of stages: which blocks the shadows of roles compute, so that the slowest member has least to do.

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
from functools import cache
from heapq import nsmallest

from .costs import Costs, Roster
from .lending import Cuts, Graph, Ground, Lending
from .partition import SLACK
from .plan import Lent, Plan
from .question import Holders, Question
from .room import Room

#: How many roles get other shadows for the sake of speed, how many shadows are tried for each, and how many in all,
#: times the number of members.
_ATTEMPTS, _OPTIONS, _TRIALS = 8, 3, 6144

#: So many members with least to do are considered.
_IDLEST = 128

#: Members that could have so much less to do if work could come to them from others are linked with these.
_APART = 0.01

#: A division that is no faster has to lend less than this share of what is lent.
_LESS = 0.7


def divided(plan: Plan, costs: Costs, cuts: Cuts, min_gain: float) -> tuple[Lent, ...]:
    """The division of stages under ``plan``, whose owners and shadows are settled.

    What ``plan`` lends stays, unless the slowest member gains ``min_gain`` by another division, or loses nothing by one
    that lends much less.
    """
    if plan.layout is None or not plan.shadows or not any(cuts) or plan.world.slices > 1:
        return ()
    return _settled(Graph(Ground(plan, costs, cuts), plan.shadows), plan.lent, min_gain, thorough=True).lent()


def _settled(graph: Graph, lent: Sequence[Lent], min_gain: float, thorough: bool) -> Lending:
    """The best division, or the one that lends ``lent`` if the other is not worth a change."""
    best = Lending(graph)
    best.improve(thorough)
    # Those that lend the same are equal to the last bit, however they were found.
    best = Lending(graph, best.lent())
    if any(each.rank not in graph.ways or each.cut not in graph.ways[each.rank][0].cuts for each in lent):
        return best
    now = Lending(graph, lent)
    gains = best.slowest < now.slowest * (1 - min_gain) * (1 - SLACK)
    as_good = best.slowest <= now.slowest * (1 + SLACK)
    return best if gains or (as_good and best.work < now.work * _LESS) else now


class Divider:
    """Divides the stages of what the planner makes of one plan.

    Args:
        question: what is asked for, whoever holds copies. What its previous plan lends stays where it can.
    """

    def __init__(self, question: Question) -> None:
        self._previous, self._roster, self._costs = question.previous, question.roster, question.costs
        self._policy = question.policy
        #: By owners, shadows and thoroughness: the planner asks about the same ones several times.
        self._known: dict[tuple[tuple[str, ...], tuple[str | None, ...], bool], Lending] = {}

    def divided(self, target: Plan, holders: Holders, room: Room) -> Plan:
        """``target``, in which shadows compute parts of stages.

        Where its shadows do not let all members have about as much to do, some of the slowest member's roles get
        others: a copy of a stage for an iteration that is shorter by ``policy.min_gain``.

        Args:
            target: with owners and shadows for all members.
            holders: valid copies by rank.
            room: for replicas.
        """
        if not any(self._previous.cuts):
            return replace(target, lent=())
        ground = Ground(target, self._costs, self._previous.cuts)
        best = self._settled(ground, target.shadows)
        if self._policy.divides:
            if not best.even:
                # Shadows that serve the division better than nearer ones would stay: copies back and forth help nobody.
                before = _as_before(self._previous, target, self._roster, holders)
                if not room.crowded(target.owners, before):
                    other = self._settled(ground, before)
                    best = other if self._gains(other, best) else best
            linked = self._linked(ground, best, holders, room)
            tried = (self._with_other_shadows(ground, each, holders, room) for each in (best, linked))
            alone, after = (self._settled(ground, each.shadows, thorough=True) for each in tried)
            best = after if self._gains(after, alone) else alone
        else:
            best = self._settled(ground, best.shadows, thorough=True)
        return replace(target, shadows=tuple(best.shadows), lent=best.lent())

    def _gains(self, other: Lending, best: Lending) -> bool:
        return other.slowest <= best.slowest * (1 - self._policy.min_gain) * (1 + SLACK)

    def _settled(self, ground: Ground, shadows: Sequence[str | None], thorough: bool = False) -> Lending:
        key = ground.owners, tuple(shadows), thorough
        if key not in self._known:
            lent = still_lent(self._previous, ground.owners, shadows)
            self._known[key] = _settled(Graph(ground, shadows), lent, self._policy.min_gain, thorough)
        return self._known[key]

    def _linked(self, ground: Ground, best: Lending, holders: Holders, room: Room) -> Lending:
        """``best``, or what gains over it with shadows that let work come to members to whom none can come so far.

        Members between whom work can go along owners and shadows are together. One role after the other of those that
        have most to do gets a shadow among those that have least, as long as these are faster; work can go on
        among its own members without it.
        """
        now = best
        for _ in best.together()[1:]:  # each link makes them one fewer
            # A role that was linked is the only way to those of its shadow.
            ranks = [rank for rank, shadow in enumerate(now.shadows) if shadow == best.shadows[rank]]
            shadows = self._link(ground, now, ranks, holders, room)
            if shadows is None:
                break
            now = Lending(Graph(ground, shadows))  # as much is to be done by those that are together, however divided
        linked, alone = (self._settled(ground, each.shadows, thorough=True) for each in (now, best))
        return self._settled(ground, now.shadows) if self._gains(linked, alone) else best

    def _link(
        self, ground: Ground, now: Lending, ranks: Sequence[int], holders: Holders, room: Room
    ) -> list[str | None] | None:
        together = sorted(now.together(), key=lambda found: found.share)
        most, loads, left = together[-1], now.loads.by_member, self._left(ground, now, room)
        for least in together[:-1] if most.share > now.even_share * (1 + _APART) else ():
            options = [
                (member not in holders.get(rank, ()), -loads[owner], loads[member], self._roster.order[member], rank)
                for rank, owner in ((rank, ground.owners[rank]) for rank in ranks)
                if owner in most.members and ground.ways[rank // ground.pipelines]
                for member in least.members
                if self._roster.apart(owner, member) and self._may_hold(rank, member, left, room)
            ]
            spare = cache(now.spare)
            for *_, order, rank in sorted(options):
                if spare(rank):
                    return _with(now.shadows, rank, self._roster.usable[order].id)
        return None

    def _with_other_shadows(self, ground: Ground, best: Lending, holders: Holders, room: Room) -> Lending:
        """``best``, or what gains over it with other shadows: for one role at a time, which slows nobody down.

        Where several members are about as slow, a change that relieves one gains nothing before all are relieved.
        """
        now, trials = best, max(_OPTIONS, _TRIALS // len(ground.members))
        each = max(_OPTIONS, trials // _ATTEMPTS)
        for _ in range(_ATTEMPTS):
            found = now
            for helped in (False, True):
                if now.even or found.better_than(now):
                    break
                options = self._options(ground, now, holders, room, min(trials, each), helped)
                trials -= len(options)
                tried = [self._settled(ground, shadows) for shadows in options]
                found = min(tried, key=lambda division: division.rating, default=now)
            if not found.better_than(now):
                break
            now = found
            best = now if self._gains(now, best) else best
        return best

    def _options(
        self, ground: Ground, now: Lending, holders: Holders, room: Room, count: int, helped: bool
    ) -> list[list[str | None]]:
        """The shadows of ``now``, but another one for a role of the slowest member: the ``count`` most promising ones.

        Its roles are those that it owns, or (``helped``) those of which it computes a part as their shadow.

        That is who holds it already, then who has least to do, then whose stages have their passes at about that time.
        """
        (slowest,) = now.loads.at_least(now.slowest, 1)
        stages: dict[str, list[int]] = {member: [] for member in ground.members}
        for rank, owner in enumerate(ground.owners):
            stages[owner].append(rank // ground.pipelines)
        loads, idlest, options = now.loads.by_member, now.loads.ascending[:_IDLEST], []
        left = self._left(ground, now, room)
        lent = {each.rank for each in now.lent()} if helped else set()
        for rank, owner in enumerate(ground.owners):
            stage = rank // ground.pipelines
            mine = now.shadows[rank] == slowest and rank in lent if helped else owner == slowest
            if not mine or not ground.ways[stage]:
                continue
            held = [member for member in holders.get(rank, ()) if member in loads]
            able = [m for m in {*held, *idlest} if m != now.shadows[rank] and self._roster.apart(owner, m)]
            able = [m for m in able if self._may_hold(rank, m, left, room)]
            rated = ((m not in held, loads[m], _distance(stages[m], stage), self._roster.order[m]) for m in able)
            options += [(rating, rank) for rating in nsmallest(_OPTIONS, rated)]
        usable = self._roster.usable
        return [_with(now.shadows, rank, usable[order].id) for (*_, order), rank in nsmallest(count, options)]

    def _left(self, ground: Ground, now: Lending, room: Room) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes that members with a limit have left, in the end and with all that they hold while copies are made."""
        if not room.limits:
            return {}, {}
        previous = self._previous
        wanted = [pair for row in (ground.owners, now.shadows) for pair in enumerate(row) if pair[1] is not None]
        copied = [(rank, str(member)) for rank, member in wanted]
        return room.left(ground.owners, now.shadows), room.left(previous.owners, previous.shadows, copied)

    def _may_hold(self, rank: int, member: str, left: tuple[dict[str, int], dict[str, int]], room: Room) -> bool:
        """Whether ``member`` has room for a replica, and for its copy unless it has that; ``left``: :meth:`_left`."""
        in_the_end, copying = left
        if member not in in_the_end:
            return True
        held = member in (self._previous.owners[rank], self._previous.shadows[rank])
        return room.shadowed(rank, member) <= in_the_end[member] and (
            held or room.copying(rank, member) <= max(0, copying[member])
        )


def _distance(stages: Sequence[int], stage: int) -> int:
    """The distance from ``stage`` to the nearest of ``stages``; 0 without any."""
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
    """The lendings of ``previous`` where neither owner nor shadow has changed."""
    return tuple(
        each
        for each in previous.lent
        if (owners[each.rank], shadows[each.rank]) == (previous.owners[each.rank], previous.shadows[each.rank])
    )
