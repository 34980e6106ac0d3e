"""Roles lying on members while a plan is being made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from .partition import SLACK
from .question import Question
from .roles import Layout, Role
from .room import Room


@dataclass
class _Ledger:
    """Bytes of members with a limit, by the sizes of ``room``: ``left`` besides roles, and ``leaving`` with them.

    What is leaving are roles that members have had and are to have no more.
    """

    room: Room
    left: dict[str, int]
    leaving: dict[str, int]

    def copy(self) -> _Ledger:
        return _Ledger(self.room, dict(self.left), dict(self.leaving))


class Board:
    """Roles lying on members while a plan is being made.

    Attributes:
        owners: owner by rank; ``None`` where a role lies nowhere yet.
        loads: seconds per micro-batch by usable member.
        redundant: roles have replicas.
        beside: ranks of the stages before and after each role.
        adjacent: ranks that are well co-hosted with each role: those beside it, and its stage in the pipelines beside.
        limited: members may hold only so much.
        exchanging: whether members may get roles in exchange for others, for which they have room only when those are
            gone; while copies are made they hold both.
    """

    def __init__(self, question: Question) -> None:
        previous, roster, room = question.previous, question.roster, question.room
        self.layout: Layout = previous.world
        self.roster = roster
        self.seconds, self.weights, self.redundant = question.seconds, question.weights, question.policy.redundant
        self.beside = [[self.layout.rank(other) for other in beside(self.layout, role)] for role in self.layout.roles]
        twins = [[p for p in (d - 1, d + 1) if 0 <= p < self.layout.pipelines] for d in range(self.layout.pipelines)]
        self.adjacent = [
            [*self.beside[rank], *(rank - role.pipeline + twin for twin in twins[role.pipeline])]
            for rank, role in enumerate(self.layout.roles)
        ]
        self.owners: list[str | None] = [None] * self.layout.size
        self.loads = {member.id: 0.0 for member in roster.usable}
        self._previous = previous
        self._holders = [question.held(rank) for rank in range(self.layout.size)]
        self._guests: dict[str, tuple[int, ...]] = {}
        self._room = room
        self.exchanging = False
        limits = [member for member in room.limits if member in roster.order]
        self.limited = bool(limits)
        #: Of the ways in which members can hold roles. One has to do.
        self._ledgers = [
            _Ledger(each, {member: each.free(member) for member in limits}, dict.fromkeys(limits, 0))
            for each in dict.fromkeys((room, room.whole))
        ]
        for rank, owner in enumerate(previous.owners):
            if owner in roster.order:
                self.put(rank, owner)
        self._guests.clear()
        for ledger in self._ledgers:
            ledger.leaving = dict.fromkeys(limits, 0)

    def copy(self) -> Board:
        """The same board, to try something on."""
        other = object.__new__(Board)
        other.__dict__.update(self.__dict__)
        other.owners, other.loads, other._guests = list(self.owners), dict(self.loads), dict(self._guests)
        other._ledgers = [ledger.copy() for ledger in self._ledgers]
        return other

    def put(self, rank: int, member: str) -> None:
        """Gives a role that lies nowhere to ``member``."""
        self.owners[rank] = member
        self.loads[member] += self.seconds[rank]
        self._guests[member] = (*self._guests.get(member, ()), rank)
        if self.limited:
            self._hold(rank, member, 1)

    def take(self, rank: int) -> None:
        """Takes a role from its owner."""
        owner = self.owners[rank]
        assert owner is not None
        self.owners[rank] = None
        self.loads[owner] -= self.seconds[rank]
        self._guests[owner] = tuple(guest for guest in self._guests.get(owner, ()) if guest != rank)
        if self.limited:
            self._hold(rank, owner, -1)

    def _hold(self, rank: int, member: str, sign: int) -> None:
        for ledger in self._ledgers if member in self._room.limits else ():
            size = ledger.room.owned(rank, member) * sign
            ledger.left[member] -= size
            if self._previous.owners[rank] == member:
                ledger.leaving[member] -= size

    def fits(self, rank: int, member: str, limit: float) -> bool:
        """Whether ``member`` may hold the role, and could take it without exceeding ``limit`` seconds."""
        fast = self.loads[member] + self.seconds[rank] <= limit * (1 + SLACK)
        return fast and (not self.limited or self.has_room(rank, member))

    def has_room(self, rank: int, member: str) -> bool:
        """Whether ``member`` may hold the role."""
        if member not in self._room.limits:
            return True
        # A role that comes by a copy does so beside what it replaces, unless copies are elsewhere.
        beside = not (self.exchanging or self._room.parked or self._previous.owners[rank] == member)
        return any(
            each.room.owned(rank, member) <= each.left[member] - (each.leaving[member] if beside else 0)
            for each in self._ledgers
        )

    def left(self, member: str) -> tuple[float, ...]:
        """Bytes that ``member`` may hold besides, in each of the ways in which it can hold roles."""
        return tuple(ledger.left.get(member, inf) for ledger in self._ledgers)

    def crowded(self, member: str) -> bool:
        """Whether ``member`` holds more than it may."""
        return max(self.left(member)) < 0

    def size(self, rank: int) -> int:
        """Bytes of the role, as a copy of which a member would hold most."""
        return self._room.size(rank)

    @property
    def within(self) -> bool:
        """Whether no member holds more than it may."""
        return not any(map(self.crowded, self._ledgers[0].left))

    @property
    def slowest(self) -> float:
        """Seconds per micro-batch of the slowest member."""
        return max(self.loads.values())

    @property
    def homeless(self) -> list[int]:
        """Roles that lie nowhere, stage by stage within each pipeline."""
        return in_pipeline_order(self.layout, (rank for rank, owner in enumerate(self.owners) if owner is None))

    def holder(self, rank: int, limit: float, besides: str | None = None) -> str | None:
        """The member that takes the role without a copy: it holds one and has room within ``limit``."""
        return next((m for m in self._holders[rank] if m != besides and self.fits(rank, m, limit)), None)

    def seat(self, rank: int, limit: float, besides: str | None = None) -> bool:
        """Gives a role that lies nowhere to a holder with room within ``limit``; False if that is impossible.

        Roles that have been given to that holder before make room if another holder can take them: an augmenting
        path of bipartite matching.
        """
        return self._seat(rank, limit, set() if besides is None else {besides})

    def _seat(self, rank: int, limit: float, tried: set[str]) -> bool:
        for member in self._holders[rank]:
            if member not in tried and self.fits(rank, member, limit):
                self.put(rank, member)
                return True
        for member in self._holders[rank]:
            if member in tried:
                continue
            tried.add(member)
            for guest in self._guests.get(member, ()):
                self.take(guest)
                if self.fits(rank, member, limit) and self._seat(guest, limit, tried):
                    self.put(rank, member)
                    return True
                self.put(guest, member)
        return False

    def shadowable(self, rank: int, owner: str) -> bool:
        """Whether another member holds a copy that may shadow the role of ``owner``."""
        return any(self.roster.apart(owner, member) for member in self._holders[rank])

    def only_domain(self, rank: int) -> str | None:
        """The failure domain of all copies of the role, if there is one."""
        domains = {self.roster.domain(member) for member in self._holders[rank]}
        return domains.pop() if len(domains) == 1 else None

    def held(self, rank: int) -> Sequence[str]:
        """Usable members with a copy of the role."""
        return self._holders[rank]

    def neighbours(self, rank: int) -> dict[str, int]:
        """Owners of the role's neighbours and how many of them each owns."""
        found: dict[str, int] = {}
        for neighbour in self.adjacent[rank]:
            owner = self.owners[neighbour]
            if owner is not None:
                found[owner] = found.get(owner, 0) + 1
        return found

    def zones_beside(self, rank: int) -> set[str]:
        """Known zones of the owners of the stages before and after the role."""
        owners = (self.owners[other] for other in self.beside[rank])
        return {self.roster.everyone[owner].zone for owner in owners if owner is not None} - {""}


def beside(layout: Layout, role: Role) -> list[Role]:
    """The stages before and after ``role``, without wrapping around."""
    found = []
    if role.stage > 0:
        found.append(layout.predecessor(role))
    if role.stage < layout.stages - 1:
        found.append(layout.successor(role))
    return found


def in_pipeline_order(layout: Layout, ranks: Iterable[int]) -> list[int]:
    """``ranks`` stage by stage within each pipeline."""
    return sorted(ranks, key=lambda rank: (rank % layout.pipelines, rank))
