"""Lives of members, divided into intervals of one category each.

A life is ``[begin, end)``. Labels claim parts of it; they may overlap and reach beyond it. :meth:`Life.cut` gives each
moment to the label of the highest rank, and what none claims to :attr:`Category.OTHER`::

    step        |---- 7 ----|---- 8 -----------------------|---- 9 ----|
    recovery                       |detection|redone|
    life         productive        |detection|redone| productive       loss or end

So the intervals of a life follow each other without gap or overlap, whatever the labels say.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import pairwise
from math import inf


class Category(str, Enum):
    """The uses of a member's time; ``docs/reference/goodput.md`` defines each."""

    PRODUCTIVE = "productive"
    REDONE = "redone"
    WASTED = "wasted_progress_from_disruption"
    DETECTION = "detection_and_agreement"
    RECONFIGURATION = "reconfiguration"
    WAITING = "infrastructure_recovery_from_disruption"
    CHECKPOINT = "unproductive_checkpoint_save_time"
    INITIALIZATION = "initialization"
    REDUNDANCY = "redundancy"
    STANDBY = "standby"
    OTHER = "other"


class Rank(IntEnum):
    """The rank of a label: of two that overlap the greater one holds, among equals the later one."""

    START = 0
    GAP = 1
    STEP = 2
    RECOVERY = 3
    AWAITED = 4
    IDLE = 5
    STOPPED = 6


#: What a member does only after its start.
_STARTED = {Category.PRODUCTIVE, Category.REDONE, Category.WASTED, Category.REDUNDANCY, Category.STANDBY}


@dataclass(frozen=True)
class Interval:
    """A part of a life, in seconds."""

    begin: float
    end: float
    category: Category


@dataclass(eq=False)
class Life:
    """One member from its begin to its end, in seconds.

    Attributes:
        end: infinite while it goes on.
        dropped: since when plans do without the member.
        since: begin of the part that is not settled.
    """

    member: str
    begin: float
    end: float = inf
    dropped: float | None = None
    since: float = field(init=False)
    _labels: list[tuple[float, float, Rank, Category]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.since = self.begin

    def label(self, begin: float, end: float, rank: Rank, category: Category) -> None:
        """Claims ``[begin, end)``; without effect if that is empty."""
        self._labels.append((begin, end, rank, category))

    def refine(self, begin: float, end: float, old: Category, new: Category) -> None:
        """Claims for ``new`` what labels so far claim for ``old`` in ``[begin, end)``."""
        for first, last, rank, category in list(self._labels):
            if category is old:
                self.label(max(first, begin), min(last, end), rank, new)

    def close(self, end: float) -> None:
        """Ends the life, if it goes on."""
        if self.end == inf:
            self.end = max(self.since, end)

    def told(self, until: float) -> tuple[object, ...]:
        """The input of :meth:`cut`: equal for lives that are cut equally."""
        labels = [label for label in self._labels if label[0] < until]
        return self.since == self.begin, self.since, self.end, self.dropped, *labels

    def mark(self) -> tuple[float, int]:
        """The state that :meth:`rewind` goes back to."""
        return self.end, len(self._labels)

    def rewind(self, mark: tuple[float, int]) -> None:
        """Forgets what was said of the life since :meth:`mark`."""
        self.end = mark[0]
        del self._labels[mark[1] :]

    def started(self, until: float) -> bool:
        """Whether the member is known to have got beyond its start before ``until``."""
        return self.since > self.begin or any(
            begin < until and category in _STARTED for begin, _, _, category in self._labels
        )

    def settle(self, until: float) -> None:
        """Forgets what is before ``until``: it is accounted for, and later labels do not reach back beyond it."""
        self.since = max(self.since, min(until, self.end))
        self._labels = [label for label in self._labels if label[1] > self.since]

    def cut(self, until: float = inf) -> list[Interval]:
        """Intervals from :attr:`since` to ``until``, by default to the end, in order. The life must have ended by then.

        Where it was settled before, the member has started.
        """
        last = min(until, self.end)
        assert last < inf
        if last <= self.since:
            return []
        ready = min((begin for begin, _, _, category in self._labels if category in _STARTED), default=last)
        if self.since > self.begin:
            ready = self.since
        labels = [*self._labels, (self.begin, ready, Rank.START, Category.INITIALIZATION)]
        if self.dropped is not None:
            labels.append((self.dropped, last, Rank.GAP, Category.RECONFIGURATION))
        coming: deque[tuple[float, int, int, float, Category]] = deque()  # by begin, then the greater one first
        for at, (begin, end, rank, category) in enumerate(labels):
            begin, end = max(begin, self.since), min(end, last)
            if begin < end:
                coming.append((begin, -rank, -at, end, category))
        coming = deque(sorted(coming))
        bounds = sorted({self.since, last, *(label[0] for label in coming), *(label[3] for label in coming)})
        valid: list[tuple[int, int, float, Category]] = []
        found: list[Interval] = []
        for begin, end in pairwise(bounds):
            while coming and coming[0][0] <= begin:
                heapq.heappush(valid, coming.popleft()[1:])
            while valid and valid[0][2] <= begin:
                heapq.heappop(valid)
            category = valid[0][3] if valid else Category.OTHER
            if found and found[-1].category is category:
                begin = found.pop().begin
            found.append(Interval(begin, end, category))
        return found


def divided(lives: Iterable[Life], until: float = inf) -> list[tuple[list[Life], list[Interval]]]:
    """The unsettled part of the lives: of those with equal labels together, the intervals of each.

    Most members do the same: each such group is cut once.
    """
    groups: dict[tuple[object, ...], list[Life]] = {}
    for life in lives:
        groups.setdefault(life.told(until), []).append(life)
    return [(alike, alike[0].cut(until)) for alike in groups.values()]


def spent(groups: Iterable[tuple[Sized, Iterable[Interval]]]) -> dict[Category, float]:
    """Member-seconds by category of members, each of which has the intervals beside them."""
    sums = dict.fromkeys(Category, 0.0)
    for members, intervals in groups:
        for interval in intervals:
            sums[interval.category] += (interval.end - interval.begin) * len(members)
    return sums
