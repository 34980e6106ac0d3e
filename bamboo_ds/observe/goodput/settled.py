"""What an account has added up and forgotten of a job that goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from .lives import Category

#: Stretches of settled steps that a restart can still undo, the newest ones.
_STRETCHES = 1024


@dataclass
class SettledSteps:
    """Successive steps of one run, as far as they count.

    Attributes:
        keys, numbers: the first and the last step's.
        seconds: what was productive of them.
    """

    run: int
    keys: tuple[int, int]
    numbers: tuple[int, int]
    count: int
    seconds: float


class Settled:
    """Sums of what is settled.

    Attributes:
        categories: member-seconds.
        steps, repeated: committed steps that count, and that were done again.
        seconds, ended: how long the members lived that are gone, and when the last of them ended.
    """

    def __init__(self) -> None:
        self.categories = dict.fromkeys(Category, 0.0)
        self.steps = self.repeated = 0
        self.seconds = 0.0
        self.ended: float | None = None
        self._stretches: deque[SettledSteps] = deque(maxlen=_STRETCHES)

    def add(self, categories: Mapping[Category, float]) -> None:
        """Add member-seconds."""
        for category, seconds in categories.items():
            self.categories[category] += seconds

    def end(self, seconds: float, at: float) -> None:
        """A member is gone that lived so long."""
        self.seconds += seconds
        self.ended = at if self.ended is None else max(self.ended, at)

    def move(self, seconds: float, before: Category, after: Category) -> None:
        """What was taken for ``before`` is ``after``."""
        self.categories[before] -= seconds
        self.categories[after] += seconds

    def note(self, stretch: SettledSteps) -> None:
        """Count steps, later ones than those before."""
        self.steps += stretch.count
        self._stretches.append(stretch)

    def undo(self, run: int, key: int | None = None, number: int | None = None) -> None:
        """A run repeats its steps from ``key``, or from ``number``, on; of a stretch in part the mean counts."""
        for stretch in reversed(list(self._stretches)):
            steps = stretch.keys[1] - key + 1 if key is not None else stretch.numbers[1] - (number or 0) + 1
            if stretch.run != run or steps <= 0:
                return
            share = min(1.0, steps / (stretch.keys[1] - stretch.keys[0] + 1))
            count, seconds = round(stretch.count * share), stretch.seconds * share
            self.steps -= count
            self.repeated += count
            self.move(seconds, Category.PRODUCTIVE, Category.WASTED)
            if share == 1.0:
                self._stretches.remove(stretch)
                continue
            stretch.count, stretch.seconds = stretch.count - count, stretch.seconds - seconds
            stretch.keys = stretch.keys[0], stretch.keys[1] - steps
            stretch.numbers = stretch.numbers[0], stretch.numbers[1] - steps
