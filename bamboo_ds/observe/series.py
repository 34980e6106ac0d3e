"""Committed steps over time in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .view import StepHistory


@dataclass
class _Point:
    """Successive steps as one."""

    count: int
    step: int
    time: float
    loss: float
    losses: int
    seconds: float
    slowest: float

    def take(self, later: _Point) -> None:
        """Stands for the steps of ``later``, too."""
        self.count += later.count
        self.step, self.time = later.step, later.time
        self.loss, self.losses = self.loss + later.loss, self.losses + later.losses
        self.seconds += later.seconds
        self.slowest = max(self.slowest, later.slowest)


class Series:
    """Either all steps, ever more of them to a point, or the newest ones with a point each.

    Args:
        limit: number of points at most; even.
        newest: drop the oldest points rather than merge neighbours.
    """

    def __init__(self, limit: int, newest: bool = False) -> None:
        self._limit, self._newest = limit, newest
        self._stride = 1
        self._points: list[_Point] = []

    def add(self, step: int, time: float, loss: float | None, seconds: float) -> None:
        """Takes the next committed step."""
        known = loss is not None and math.isfinite(loss)
        point = _Point(1, step, time, loss if known and loss is not None else 0.0, int(known), seconds, seconds)
        if self._points and self._points[-1].count < self._stride:
            self._points[-1].take(point)
            return
        if len(self._points) == self._limit:
            self._make_room()
        if self._points and self._points[-1].count < self._stride:
            self._points[-1].take(point)
        else:
            self._points.append(point)

    def _make_room(self) -> None:
        if self._newest:
            del self._points[0]
            return
        self._stride *= 2
        for first, second in zip(self._points[::2], self._points[1::2], strict=True):
            first.take(second)
        del self._points[1::2]

    def history(self) -> StepHistory:
        """The points as columns."""
        points = self._points
        return StepHistory(
            stride=self._stride,
            step=tuple(point.step for point in points),
            time=tuple(point.time for point in points),
            loss=tuple(point.loss / point.losses if point.losses else None for point in points),
            seconds=tuple(point.seconds / point.count for point in points),
            slowest=tuple(point.slowest for point in points),
        )
