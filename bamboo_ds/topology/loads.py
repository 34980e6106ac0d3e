"""How much members have to do, sorted at all times."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping


class Loads:
    """What each member has to do. Finding those with most needs no look at the others.

    Args:
        loads: by member. Where members have as much as others, those named first come first.
    """

    def __init__(self, loads: Mapping[str, float]) -> None:
        self._loads = dict(loads)
        self._members = list(loads)
        self._places = {member: place for place, member in enumerate(loads)}
        self._ranking = sorted(zip(loads.values(), range(len(loads)), strict=True))

    @property
    def by_member(self) -> Mapping[str, float]:
        """All loads. They change with :meth:`add`."""
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

    def add(self, member: str, amount: float) -> None:
        """Give ``member`` more to do, or less."""
        place, before = self._places[member], self._loads[member]
        del self._ranking[bisect_left(self._ranking, (before, place))]
        self._loads[member] = before + amount
        insort(self._ranking, (before + amount, place))
