"""Shadows within what members may hold: as wanted where that goes, else at others, else given up."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from itertools import groupby
from math import inf

from .question import Question

#: How many exchanges of replicas are looked at in all, for roles that find no member with room.
_EXCHANGES = 4_000


def fitted(question: Question, owners: Sequence[str], wanted: Sequence[str | None]) -> tuple[str | None, ...]:
    """The shadow of every role; ``None`` where no member has room for the replica.

    Replicas that are wanted where they are come first, then large ones, which find room least easily; or small ones, of
    which more find room, if that leaves fewer roles without a shadow. Where the owners of a stage in all pipelines have
    the same state, one replica of each stage that a single failure would take away comes before all others, if that
    leaves fewer of these. A copy is made where it is wanted if the member
    may hold it with all that it has; else a member that holds the role remains its shadow, or another one gets the
    copy. What is left gets the room of replicas that their members lose anyway, or that find room elsewhere.

    Args:
        question: what is asked for.
        owners: settled ones; room for what they own is not given away.
        wanted: the shadows that would be best.
    """
    found: list[tuple[str | None, ...]] = []
    first = _alone(question, owners, wanted)
    for urgent in (frozenset[int](), first) if first else (first,):
        for sign in (-1, 1):
            found.append(_Fitting(question, owners).placed(wanted, sign, urgent))
            if None not in found[-1]:
                return found[-1]
    return min(found, key=lambda shadows: (_endangered(question, owners, shadows), shadows.count(None)))


def _in_one_domain(question: Question, owners: Sequence[str], shadows: Sequence[str | None]) -> list[list[int]]:
    """Ranks of each stage whose state a single failure takes away; none where each of its roles has one of its own."""
    layout, domain = question.previous.world, question.roster.domains
    found = []
    for stage in range(layout.stages) if layout.alike else ():
        ranks = list(range(stage * layout.pipelines, (stage + 1) * layout.pipelines))
        holders = {owners[rank] for rank in ranks}.union(s for rank in ranks if (s := shadows[rank]) is not None)
        if len({domain[member] for member in holders}) == 1:
            found.append(ranks)
    return found


def _alone(question: Question, owners: Sequence[str], wanted: Sequence[str | None]) -> frozenset[int]:
    """A role of each stage whose owners one failure takes away, if possible one whose wanted shadow holds it."""
    held = question.holders
    stages = _in_one_domain(question, owners, (None,) * len(owners))
    return frozenset(min(ranks, key=lambda rank: wanted[rank] not in held.get(rank, ())) for ranks in stages)


def _endangered(question: Question, owners: Sequence[str], shadows: Sequence[str | None]) -> int:
    return len(_in_one_domain(question, owners, shadows))


class _Fitting:
    def __init__(self, question: Question, owners: Sequence[str]) -> None:
        previous, roster, room = question.previous, question.roster, question.room
        self._owners, self._roster, self._room = owners, roster, room
        self._question, self._previous = question, previous
        self._shadows: list[str | None] = [None] * len(owners)
        self._guests: dict[str, list[int]] = {}
        before = [*enumerate(previous.owners), *enumerate(previous.shadows)]
        self._held = {(rank, member) for rank, member in before if member is not None}
        #: Bytes that are left by member when all is done, and while copies are made: with all that it has, or without
        #: the replicas that it loses.
        self._left = room.left(owners)
        copied = [(rank, owner) for rank, owner in enumerate(owners) if (rank, owner) not in self._held]
        self._copying = room.left(previous.owners, previous.shadows, copied)
        self._exchanging = room.left(previous.owners, (), copied)
        for rank, owner in enumerate(owners):
            if owner == question.shadow(rank) and owner in self._exchanging:
                self._exchanging[owner] -= room.shadowed(rank, owner)
        self._at_home: dict[int | None, list[str]] = {}
        for member in roster.order:
            if member in self._left:
                self._at_home.setdefault(room.script_rank(member), []).append(member)
        self._smallest = min(map(room.size, range(len(owners))))
        #: Members that have room for some role whatever rank their script runs as, that with most room first.
        self._open = sorted(entry for entry in map(self._entry, roster.order) if -entry[0] >= self._smallest)
        self._exchanges = _EXCHANGES

    def placed(self, wanted: Sequence[str | None], sign: int, urgent: Collection[int] = ()) -> tuple[str | None, ...]:
        """The shadows that find room, ``wanted`` ones where that goes.

        Those of ``urgent`` roles come first, then small ones, or with -1 as their ``sign`` large ones.
        """

        def order(rank: int) -> tuple[bool, bool, int]:
            return rank not in urgent, (rank, wanted[rank]) not in self._held, sign * self._room.size(rank)

        loose = []
        for _, alike in groupby(sorted(range(len(wanted)), key=order), order):
            left = [r for r in alike if not any(self._give(r, member) for member in self._wishes(r, wanted[r]))]
            loose += [rank for rank in left if not any(self._give(rank, member) for member in self._roomy(rank))]
        for rank in loose:
            self._exchange(rank)
        return tuple(self._shadows)

    def _wishes(self, rank: int, wanted: str | None) -> list[str]:
        """Members that are asked first: the wanted one, then those that hold the role."""
        former, order = self._question.shadow(rank), self._roster.order
        held = sorted(self._question.held(rank), key=lambda member: (member != former, order[member]))
        return list(dict.fromkeys((*([wanted] if wanted is not None else []), *held)))

    def _entry(self, member: str) -> tuple[float, int]:
        return -self._left.get(member, inf), self._roster.order[member]

    def _roomy(self, rank: int) -> list[str]:
        """Members that may have room for the role in the end, those with most of it first."""
        count = bisect_right(self._open, (-self._room.size(rank), len(self._roster.order)))
        others = (self._roster.usable[order].id for _, order in self._open[:count])
        return list(dict.fromkeys((*self._at_home.get(rank, ()), *others)))

    def _able(self, rank: int, member: str, exchanging: bool) -> bool:
        if not self._roster.apart(self._owners[rank], member):
            return False
        if member not in self._left:
            return True
        meanwhile = (self._exchanging if exchanging else self._copying)[member]
        copied = (rank, member) in self._held or self._room.copying(rank, member) <= max(0, meanwhile)
        return copied and self._room.shadowed(rank, member) <= self._left[member]

    def _give(self, rank: int, member: str, exchanging: bool = False) -> bool:
        """Makes ``member`` the shadow of the role, if it may be.

        Args:
            exchanging: it has room for a copy only when replicas are gone that it loses.
        """
        able = self._able(rank, member, exchanging)
        if able:
            self._put(rank, member)
        return able

    def _put(self, rank: int, member: str) -> None:
        self._shadows[rank] = member
        self._guests.setdefault(member, []).append(rank)
        self._count(rank, member, 1)

    def _take(self, rank: int, member: str) -> None:
        self._guests[member].remove(rank)
        self._count(rank, member, -1)

    def _count(self, rank: int, member: str, sign: int) -> None:
        if member not in self._left:
            return
        before = self._entry(member)
        size, copy = (each(rank, member) * sign for each in (self._room.shadowed, self._room.copying))
        self._left[member] -= size
        if (rank, member) not in self._held:
            self._copying[member] -= copy
            self._exchanging[member] -= copy
        elif member != self._previous.owners[rank]:
            self._exchanging[member] -= size
        if -before[0] >= self._smallest:
            del self._open[bisect_left(self._open, before)]
        after = self._entry(member)
        if -after[0] >= self._smallest:
            insort(self._open, after)

    def _exchange(self, rank: int) -> None:
        """Gives the role to a member that has room when what it loses is gone, or passes another replica on for it."""
        if any(self._give(rank, member, exchanging=True) for member in self._roomy(rank)):
            return
        most = -self._open[0][0] if self._open else 0
        for member in self._roster.order if most else ():
            guests = self._guests.get(member, ())
            if member not in self._left or not guests or not self._roster.apart(self._owners[rank], member):
                continue
            self._exchanges -= len(guests)
            if self._exchanges < 0:
                return
            missing = self._room.shadowed(rank, member) - self._left[member]
            for guest in [each for each in guests if missing <= self._room.size(each) <= most]:
                self._take(guest, member)
                if self._able(rank, member, True) and any(
                    other != member and self._give(guest, other, exchanging=True) for other in self._roomy(guest)
                ):
                    self._put(rank, member)
                    return
                self._put(guest, member)
