"""Shadows in other zones than owners: nodes that vanish at the same moment are mostly of one zone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .loads import Loads
from .question import Question


def zones_apart(question: Question, owners: Sequence[str], shadows: Sequence[str | None]) -> tuple[str | None, ...]:
    """``shadows`` with as many as possible moved out of the zones of their owners, such that no member loses by it.

    Standbys exchange replicas with standbys and owners of roles with owners, so that none holds more bytes than the
    one that holds most did, or does at present. A shadow goes to the present one of the role if that is elsewhere,
    else to another holder, else to the member with the fewest replicas; where all are full two roles exchange their
    shadows. Where a zone is not known, or there is one only, nothing changes.

    Args:
        question: what is asked for; failure domains of owner and shadow stay apart.
        owners, shadows: of the roles, by rank.
    """
    if len({member.zone for member in question.roster.usable} - {""}) < 2:
        return tuple(shadows)
    found, working = list(shadows), frozenset(owners)
    for busy in (True, False):
        members = [member for member in question.roster.order if (member in working) == busy]
        _Exchange(question, owners, found, members).improve()
    return tuple(found)


class _Exchange:
    """Among ``members``, all of which own roles or none of which does. Changes ``shadows``."""

    def __init__(
        self, question: Question, owners: Sequence[str], shadows: list[str | None], members: Sequence[str]
    ) -> None:
        self._question, self._owners, self._shadows = question, owners, shadows
        self._roster, self._weights = question.roster, question.weights
        self._zones = self._roster.zones
        self._members = frozenset(members)
        self._replicas = dict.fromkeys(members, 0.0)
        self._ranks = [rank for rank, shadow in enumerate(shadows) if shadow in self._members]
        for rank in self._ranks:
            self._replicas[str(shadows[rank])] += self._weights[rank]
        present = dict.fromkeys(members, 0.0)
        for rank in range(len(shadows)):
            if (member := question.shadow(rank)) in present:
                present[str(member)] += self._weights[rank]
        #: Also what members hold at present: the plan of a plan is itself.
        self._most = max((*self._replicas.values(), *present.values()), default=0.0)
        self._peaks = dict(self._replicas)
        # A member whose zone is not known is in none of the others'.
        self._places = {member: self._zones[member] or f"\0{member}" for member in members}
        self._least = Loads(self._replicas)
        #: Roles by the zones of owner and shadow.
        self._pairs: dict[tuple[str, str], dict[int, None]] = {}
        for rank in self._ranks:
            self._pairs.setdefault(self._pair(rank), {})[rank] = None

    def improve(self) -> None:
        """Moves what shares its owner's zone, as far as that goes."""
        for rank in self._ranks:
            if self._safe(rank, str(self._shadows[rank])):
                continue
            member = next(self._roomy(rank), None)
            if member is not None:
                self._move(rank, member)
                continue
            other = self._partner(rank)
            if other is not None:
                mine, its = str(self._shadows[rank]), str(self._shadows[other])
                self._move(rank, its)
                self._move(other, mine)

    def _pair(self, rank: int) -> tuple[str, str]:
        return self._zones[self._owners[rank]], self._zones[str(self._shadows[rank])]

    def _safe(self, rank: int, member: str) -> bool:
        """Whether no zone that is known takes ``member`` and the role's owner away."""
        zone = self._zones[self._owners[rank]]
        return not zone or self._zones[member] != zone

    def _roomy(self, rank: int) -> Iterator[str]:
        """Members elsewhere that have room for the replica, the best one first."""
        held = sorted(self._question.able(rank, self._owners[rank]), key=self._roster.order.__getitem__)
        least = self._least.least(self._places, (self._zones[self._owners[rank]],))
        for member in (self._question.shadow(rank), *held, least):
            if member is None or member not in self._members or not self._safe(rank, member):
                continue
            fits = self._replicas[member] + self._weights[rank] <= self._most
            if fits and self._roster.apart(self._owners[rank], member):
                yield member

    def _partner(self, rank: int) -> int | None:
        """A role with which to exchange shadows, by which both are apart; first one that is not apart either."""
        zone = self._zones[self._owners[rank]]
        for owner_zone, shadow_zone in sorted(self._pairs, key=lambda pair: (pair[0] != pair[1], pair)):
            if zone not in (owner_zone, shadow_zone):
                for other in self._pairs[owner_zone, shadow_zone]:
                    if self._exchangeable(rank, other):
                        return other
        return None

    def _exchangeable(self, rank: int, other: int) -> bool:
        apart, owners, shadows = self._roster.apart, self._owners, self._shadows
        mine, its = str(shadows[rank]), str(shadows[other])
        more = self._weights[other] - self._weights[rank]
        fits = self._replicas[mine] + more <= self._most and self._replicas[its] - more <= self._most
        return fits and apart(owners[rank], its) and apart(owners[other], mine)

    def _move(self, rank: int, member: str) -> None:
        former = str(self._shadows[rank])
        del self._pairs[self._pair(rank)][rank]
        self._shadows[rank] = member
        self._pairs.setdefault(self._pair(rank), {})[rank] = None
        self._replicas[former] -= self._weights[rank]
        self._replicas[member] += self._weights[rank]
        # A member that has given replicas away counts as it was.
        self._peaks[member] = max(self._peaks[member], self._replicas[member])
        self._least.update(member, self._peaks[member])
