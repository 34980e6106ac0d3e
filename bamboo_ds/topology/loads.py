"""Loads of members, sorted at all times."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping


class Loads:
    """The loads of members, in work or memory. Finding those with most or least of it needs no look at most others.

    Args:
        loads: by member. Where members have as much as others, those named first come first.
    """

    def __init__(self, loads: Mapping[str, float]) -> None:
        self._loads = dict(loads)
        self._members = list(loads)
        self._places = {member: place for place, member in enumerate(loads)}
        self._ranking = sorted(zip(loads.values(), range(len(loads)), strict=True))

    def __contains__(self, member: str) -> bool:
        return member in self._loads

    @property
    def by_member(self) -> Mapping[str, float]:
        """All loads. They change with :meth:`add` and :meth:`update`."""
        return self._loads

    @property
    def most(self) -> float:
        """The largest load."""
        return self._ranking[-1][0]

    @property
    def ascending(self) -> list[str]:
        """All members, those with least first."""
        return [self._members[place] for _, place in self._ranking]

    def at_least(self, limit: float, count: int) -> list[str]:
        """The first ``count`` of the members with a load of ``limit`` or more."""
        above = self._ranking[bisect_left(self._ranking, (limit, -1)) :]
        return [self._members[place] for place in sorted([place for _, place in above])[:count]]

    def least(self, groups: Mapping[str, str] | None = None, excluded: Collection[str] = ()) -> str | None:
        """The member with least, of those of ``groups`` that are not ``excluded``, or ``None``."""
        members = (self._members[place] for _, place in self._ranking)
        return next((member for member in members if groups is None or groups[member] not in excluded), None)

    def add(self, member: str, amount: float) -> None:
        """Gives ``member`` more, or less."""
        self.update(member, self._loads[member] + amount)

    def update(self, member: str, load: float) -> None:
        """Sets the load of ``member``."""
        place = self._places[member]
        del self._ranking[bisect_left(self._ranking, (self._loads[member], place))]
        self._loads[member] = load
        insort(self._ranking, (load, place))
