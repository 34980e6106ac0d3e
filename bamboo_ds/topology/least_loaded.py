"""Finding the least loaded member outside some groups, in logarithmic time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush


class LeastLoaded:
    """Members by load, in groups. Loads only grow.

    Both levels of heaps are cleaned lazily: an entry is a lower bound of what it stands for.

    Args:
        members: whom to choose from; ties go to the one named first.
        loads: load by member.
        groups: group by member.
    """

    def __init__(self, members: Iterable[str], loads: Mapping[str, float], groups: Mapping[str, str]) -> None:
        self._groups = groups
        self._members = list(members)
        self._order = {member: position for position, member in enumerate(self._members)}
        self._loads = [loads[member] for member in self._members]
        self._heaps: dict[str, list[tuple[float, int]]] = {}
        for position, member in enumerate(self._members):
            self._heaps.setdefault(groups[member], []).append((self._loads[position], position))
        for heap in self._heaps.values():
            heapify(heap)
        self._tops = [(heap[0], group) for group, heap in self._heaps.items()]
        heapify(self._tops)

    def __contains__(self, member: str) -> bool:
        return member in self._order

    def update(self, member: str, load: float) -> None:
        """Set the load of ``member``, which must not shrink."""
        position = self._order[member]
        self._loads[position] = load
        heappush(self._heaps[self._groups[member]], (load, position))

    def pick(self, excluded: Collection[str]) -> str | None:
        """The least loaded member whose group is not ``excluded``, if any. Its load stays as it is."""
        found = None
        seen = []
        while self._tops and found is None:
            top, group = heappop(self._tops)
            heap = self._heaps[group]
            while heap[0][0] != self._loads[heap[0][1]]:
                heappop(heap)
            if heap[0] != top:
                heappush(self._tops, (heap[0], group))
                continue
            seen.append((top, group))
            if group not in excluded:
                found = self._members[top[1]]
        for entry in seen:
            heappush(self._tops, entry)
        return found
