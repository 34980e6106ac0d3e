"""The sums of an account that has forgotten older steps of a job that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from .lives import Category, Life

#: Stretches of settled steps that a restart can still undo, the newest ones.
_STRETCHES = 1024


@dataclass
class SettledSteps:
    """Successive steps of one run, as far as they count.

    Attributes:
        key: the last step's.
        span: how many they are, with those between them that do not count.
        seconds: what was productive of them.
    """

    run: int
    key: int
    span: int
    count: int
    seconds: float


class Settled:
    """Sums of what is settled.

    Attributes:
        categories: member-seconds.
        steps, repeated: committed steps that count, and that were done again.
        span: when the first one began, and the last one ended, of members that are gone.
    """

    def __init__(self) -> None:
        self.categories = dict.fromkeys(Category, 0.0)
        self.steps = self.repeated = 0
        self.span = inf, -inf
        self._stretches: deque[SettledSteps] = deque(maxlen=_STRETCHES)

    def add(self, categories: Mapping[Category, float]) -> None:
        """Adds member-seconds."""
        for category, seconds in categories.items():
            self.categories[category] += seconds

    def end(self, life: Life) -> None:
        """A member is gone that has lived."""
        if life.begin < life.end:
            self.span = min(self.span[0], life.begin), max(self.span[1], life.end)

    def move(self, seconds: float, before: Category, after: Category) -> None:
        """Moves time from category ``before`` to ``after``."""
        self.categories[before] -= seconds
        self.categories[after] += seconds

    def note(self, stretch: SettledSteps) -> None:
        """Counts steps, later ones than those before."""
        self.steps += stretch.count
        self._stretches.append(stretch)

    def undo(self, run: int, key: int) -> None:
        """A run repeats its steps from ``key`` on; of a stretch in part the mean counts."""
        for stretch in reversed(list(self._stretches)):
            steps = stretch.key - key + 1
            if stretch.run != run or steps <= 0:
                return
            share = min(1.0, steps / stretch.span)
            count, seconds = round(stretch.count * share), stretch.seconds * share
            self.steps -= count
            self.repeated += count
            self.move(seconds, Category.PRODUCTIVE, Category.WASTED)
            if share == 1.0:
                self._stretches.remove(stretch)
                continue
            stretch.count, stretch.seconds = stretch.count - count, stretch.seconds - seconds
            stretch.key, stretch.span = stretch.key - steps, stretch.span - steps
