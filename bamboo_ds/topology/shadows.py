"""Placement of shadows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .board import beside
from .fitting import fitted
from .loads import Loads
from .partition import SLACK
from .question import Question
from .zones import zones_apart


def place_shadows(question: Question, owners: Sequence[str]) -> tuple[str | None, ...]:
    """The shadow of every role; ``None`` where only one member is usable, or no member may hold the replica.

    If standbys are to hold replicas, each shadows as much as it has room for: no more bytes than twice what a member
    owns, which is what an owner with a replica holds, and no more work than twice that of the slowest member, in case
    that it has to take over everything at once. A takeover by a standby computes the whole iteration of the role again,
    but makes no member slower.

    Of the other roles, a shadow that may stay stays. A role whose owner moves is shadowed by a member that holds a
    copy, if any may. Only the others need a new copy: on the owner of the stage before, because that computes the
    role's inputs and redundant forward passes need no message; else on the owner with the fewest replicas (where stages
    are divided, of several that of the stage after); else on the standby with the fewest.

    Then :func:`~.zones.zones_apart` moves shadows out of the zones of their owners, if that is wanted and nobody but
    owner and shadow has the state: owners of the same stage in other pipelines may. Where all that is more than members
    may hold :func:`~.fitting.fitted` has the last word.
    """
    if len(question.roster.usable) < 2:
        return (None,) * len(owners)
    wanted, layout = _Shadows(question, owners).place(), question.previous.world
    if question.policy.zones_apart and not layout.alike:
        wanted = zones_apart(question, owners, wanted)
    return fitted(question, owners, wanted) if question.room.limits else wanted


class _Shadows:
    def __init__(self, question: Question, owners: Sequence[str]) -> None:
        layout, roster = question.previous.world, question.roster
        self._question, self._owners, self._roster, self._policy = question, owners, roster, question.policy
        self._seconds, self._weights = question.seconds, question.weights
        self._after = [owners[layout.rank(layout.successor(role))] for role in layout.roles]
        self._before = [owners[layout.rank(layout.predecessor(role))] for role in layout.roles]
        self._shadows: list[str | None] = [None] * layout.size
        #: By member: bytes of replicas, and seconds per micro-batch that their owners need.
        self._replicas = dict.fromkeys(roster.order, 0.0)
        self._standing = dict.fromkeys(roster.order, 0.0)
        self._domains = roster.domains
        #: What each member has to do, and holds, as an owner.
        self._loads, self._owned = dict.fromkeys(roster.order, 0.0), dict.fromkeys(roster.order, 0.0)
        for rank, owner in enumerate(owners):
            self._loads[owner] += self._seconds[rank]
            self._owned[owner] += self._weights[rank]

    def place(self) -> tuple[str | None, ...]:
        ranks: Sequence[int] = range(len(self._owners))
        if self._policy.standby_replicas:
            ranks = self._place_on_standbys()
        copied = [rank for rank in ranks if not self._give(rank, self._free(rank))]
        distant = [rank for rank in copied if not self._give(rank, self._near(rank))]
        self._place_distant(distant)
        return tuple(self._shadows)

    def _give(self, rank: int, member: str | None) -> bool:
        if member is None:
            return False
        self._shadows[rank] = member
        self._replicas[member] += self._weights[rank]
        self._standing[member] += self._seconds[rank]
        return True

    def _place_on_standbys(self) -> Sequence[int]:
        """Gives standbys the replicas that they have room for, first those that they hold; returns the other roles."""
        ranks, busy = range(len(self._owners)), frozenset(self._owners)
        work: float = 2 * max(self._loads.values()) * (1 + SLACK)
        room: float = 2 * max(self._owned.values())
        idle = [member for member in self._roster.order if member not in busy]
        standbys = Loads({member: self._replicas[member] for member in idle})
        if self._policy.divides:
            room = min(room, max(max(self._weights), sum(self._weights) / max(1, len(idle)) * (1 + SLACK)))

        def place(rank: int, member: str | None) -> bool:
            if member is None or self._shadows[rank] is not None or member not in standbys:
                return False
            fits = self._standing[member] + self._seconds[rank] <= work
            if not (fits and self._replicas[member] + self._weights[rank] <= room):
                return False
            self._give(rank, member)
            standbys.update(member, self._replicas[member])
            return True

        held = [self._question.able(rank, self._owners[rank]) for rank in ranks]
        for rank in ranks:
            if (current := self._question.shadow(rank)) in held[rank]:
                place(rank, current)
        for rank in ranks:
            for member in sorted(held[rank], key=lambda m: (self._replicas[m], self._roster.order[m])):
                place(rank, member)
        for rank in sorted(ranks, key=lambda rank: self._near(rank) is not None):
            if self._shadows[rank] is None:
                least = standbys.least(self._domains, (self._domains[self._owners[rank]],))
                place(rank, self._beside(rank, standbys, room) or least)
        return [rank for rank in ranks if self._shadows[rank] is None]

    def _beside(self, rank: int, standbys: Loads, room: float) -> str | None:
        """A standby with ``room`` that shadows a stage beside this one: what it computes of both goes together."""
        if not self._policy.divides:
            return None
        layout = self._question.previous.world
        for role in beside(layout, layout.role(rank)):
            member = self._shadows[layout.rank(role)]
            if member is None or member not in standbys or not self._roster.apart(self._owners[rank], member):
                continue
            if self._replicas[member] + self._weights[rank] <= room:
                return member
        return None

    def _near(self, rank: int) -> str | None:
        """The owner of the stage before, if it may be the shadow."""
        return self._before[rank] if self._roster.apart(self._owners[rank], self._before[rank]) else None

    def _free(self, rank: int) -> str | None:
        """The best shadow that needs no copy; ``None`` without one, or if a copy is worth it."""
        owner, former = self._owners[rank], self._question.previous.owners[rank]
        current, held = self._question.shadow(rank), self._question.able(rank, owner)
        near = self._near(rank)
        if self._policy.near_shadows and near is not None:
            return near if near in held else None
        wishes = (near, current, former) if owner != former else (current, near)
        for wish in wishes:
            if wish is not None and wish in held:
                return wish
        return min(held, key=lambda m: (self._replicas[m], self._roster.order[m]), default=None)

    def _place_distant(self, ranks: Sequence[int]) -> None:
        """Places replicas where the owner of the stage before may not be the shadow."""
        order, replicas, busy = self._roster.order, self._replicas, frozenset(self._owners)

        def finder(members: Iterable[str]) -> Loads:
            ordered = sorted(members, key=lambda m: (self._loads[m], order[m]))
            return Loads({member: replicas[member] for member in ordered})

        workers = finder(m for m in order if m in busy)
        standbys = finder(m for m in order if m not in busy)
        for rank in ranks:
            excluded = (self._domains[self._owners[rank]],)
            member = workers.least(self._domains, excluded) or standbys.least(self._domains, excluded)
            assert member is not None, "two usable members are in two failure domains"
            after = self._after[rank]
            if self._policy.divides and after in workers and self._roster.apart(self._owners[rank], after):
                # What it computes of the stage is next to its own.
                member = after if replicas[after] <= replicas[member] else member
            self._give(rank, member)
            (workers if member in workers else standbys).update(member, replicas[member])
