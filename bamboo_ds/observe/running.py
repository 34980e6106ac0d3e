"""Goodput of a job that goes on: what is older than the newest steps is added up and forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import events as ev
from .goodput import Accountant, Totals
from .lives import Category, Life

#: Newest steps that are not settled: what is learnt later may still say otherwise of them.
_UNSETTLED = 32
#: Stretches of as many settled steps that a restart can still undo, the newest ones.
_STRETCHES = 1024


@dataclass
class _Stretch:
    """Settled steps of one run, as far as they count.

    Attributes:
        keys, numbers: the first and the last step's.
        seconds: what was productive of them.
    """

    run: int
    keys: tuple[int, int]
    numbers: tuple[int, int]
    count: int
    seconds: float


class RunningAccountant(Accountant):
    """An accountant whose memory is bounded by the members, and that tells the sums at any time.

    A restart from a checkpoint that is older than the newest 32,000 steps leaves those before them productive.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settled = dict.fromkeys(Category, 0.0)
        self._settled_seconds = 0.0
        self._counted = self._repeated = 0  # settled steps
        self._stretches: deque[_Stretch] = deque(maxlen=_STRETCHES)
        self._first: float | None = None  # begin of the first life, and end of the last one that is settled
        self._ended: float | None = None

    @property
    def last_step(self) -> float | None:
        """When the newest step ended: until then nothing is open but what a restart, or a finished copy, may change."""
        return self._steps[-1].end if self._steps else None

    def snapshot(self, until: float | None = None) -> Totals:
        """What the members' time was spent on until the newest event, or until :attr:`last_step`."""
        marks = [(life, life.mark()) for life in self._lives]
        self._end(self._now)
        self._complete()
        sums = _sum(self._lives, until)
        ends = [life.end if until is None else min(life.end, until) for life in self._lives if life.end is not None]
        seconds = sum(max(0.0, end - life.begin) for life, end in zip(self._lives, ends, strict=True))
        seconds += self._settled_seconds
        ends += [] if self._ended is None else [self._ended]
        for life, mark in marks:
            life.rewind(mark)
        categories = {category: self._settled[category] + sums[category] for category in Category}
        kept = sum(step.count for step in self._steps if not step.undone)
        return Totals(
            seconds=seconds,
            goodput=categories[Category.PRODUCTIVE] / seconds if seconds else None,
            categories=categories,
            wall_seconds=max(ends) - self._first if ends and self._first is not None else 0.0,
            steps=self._counted + kept,
            repeated_steps=self._repeated + sum(step.count for step in self._steps) - kept,
        )

    # -- settling -------------------------------------------------------------------------------------

    def _step(self, event: ev.Step, now: float) -> None:
        super()._step(event, now)
        if len(self._steps) >= 2 * _UNSETTLED:
            # By their emitters' clocks a step may end a little after the next one begins.
            self._settle(max(self._steps[-_UNSETTLED].begin, *(step.end for step in self._steps[:-_UNSETTLED])))

    def _settle(self, until: float) -> None:
        """Add up what is before ``until``, between two steps, and forget it."""
        epoch, since = self._entered
        if since < until:
            self._idle(until)
            self._entered = epoch, until
        self._complete(until)
        started = [life for life in self._lives if life.started(until) or (life.end is not None and life.end <= until)]
        sums = _sum(started, until)
        for category, seconds in sums.items():
            self._settled[category] += seconds
        for life in started:
            life.settle(until)
        self._note_steps([step for step in self._steps if step.end <= until], sums[Category.PRODUCTIVE])
        self._steps = [step for step in self._steps if step.end > until]
        self._recoveries = [recovery for recovery in self._recoveries if recovery.end > until]
        self._built = [built for built in self._built if built[2] > until]
        over = {id(life): life for life in started if life.end is not None and life.end <= until}
        for life in over.values():
            self._settled_seconds += life.seconds
            self._ended = max(filter(None, (self._ended, life.end)), default=life.end)
        self._lives = [life for life in self._lives if id(life) not in over]
        self._members = {member: life for member, life in self._members.items() if id(life) not in over}
        for old in [each for each in self._plans if each < epoch]:
            del self._plans[old]

    def _note_steps(self, steps: list[Any], seconds: float) -> None:
        counted = [step for step in steps if not step.undone]
        count = sum(step.count for step in counted)
        self._counted += count
        self._repeated += sum(step.count for step in steps) - count
        if counted:
            first, last = counted[0], counted[-1]
            keys, numbers = (first.key - first.count + 1, last.key), (first.number - first.count + 1, last.number)
            self._stretches.append(_Stretch(last.run, keys, numbers, count, seconds))

    # -- what turns out later to have been otherwise ----------------------------------------------------

    def _join(self, member: str, now: float) -> None:
        super()._join(member, now)
        begin = self._members[member].begin
        self._first = begin if self._first is None else min(self._first, begin)

    def _build(self, event: ev.ReplicaBuilt, now: float) -> None:
        super()._build(event, now)
        plan = self._plans.get(self._entered[0])
        for life in self._of([event.member]):
            if plan is not None and life.member not in (*plan.owners, *plan.shadows):
                early = max(0.0, life.since - max(life.begin, now - event.seconds))
                early = min(early, self._settled[Category.STANDBY])
                self._settled[Category.STANDBY] -= early
                self._settled[Category.RECONFIGURATION] += early

    def _undo(self, key: int) -> bool:
        whole = super()._undo(key)
        if whole:
            self._undo_settled([(stretch, stretch.keys[1] - key + 1) for stretch in reversed(self._stretches)])
        return whole

    def _undo_after(self, number: int) -> None:
        super()._undo_after(number)
        self._undo_settled([(stretch, stretch.numbers[1] - number) for stretch in reversed(self._stretches)])

    def _undo_settled(self, undone: list[tuple[_Stretch, int]]) -> None:
        """Take back so many steps from the ends of stretches, the newest stretch first."""
        for stretch, steps in undone:
            if stretch.run != self._run or steps <= 0:
                return
            length = stretch.keys[1] - stretch.keys[0] + 1
            share = min(1.0, steps / length)
            count, seconds = round(stretch.count * share), stretch.seconds * share
            self._counted -= count
            self._repeated += count
            self._settled[Category.PRODUCTIVE] -= seconds
            self._settled[Category.WASTED] += seconds
            if share == 1.0:
                self._stretches.remove(stretch)
                continue
            stretch.count, stretch.seconds = stretch.count - count, stretch.seconds - seconds
            stretch.keys = stretch.keys[0], stretch.keys[1] - steps
            stretch.numbers = stretch.numbers[0], stretch.numbers[1] - steps


def _sum(lives: Iterable[Life], until: float | None = None) -> dict[Category, float]:
    """Seconds by category that are not settled. Most members do the same: each such group is cut once."""
    groups: dict[tuple[object, ...], list[Life]] = {}
    for life in lives:
        groups.setdefault(life.state, []).append(life)
    sums = dict.fromkeys(Category, 0.0)
    for same in groups.values():
        for interval in same[0].cut(until):
            sums[interval.category] += (interval.end - interval.begin) * len(same)
    return sums
