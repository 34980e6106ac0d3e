"""Dividing roles among equal members from scratch: the least load of the slowest one.

Minimising the makespan on identical machines: longest processing time first (Graham 1969), improved by MULTIFIT
(Coffman, Garey, Johnson 1978) where the lower bound does not show it to be optimal already. With equal costs the
result is optimal; in general it is at most 13/11 of the optimum.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate

#: Relative slack when sums of the same numbers in different orders are compared.
SLACK = 1e-9
_ROUNDS = 12


def fast_enough(best: float, min_gain: float) -> float:
    """The load from which on ``best`` is no gain of ``min_gain``; sums within the slack of it are as good."""
    return max(best, best / (1 - min_gain) * (1 - 2 * SLACK))


def partition(costs: Sequence[float], bins: int) -> tuple[float, list[int]]:
    """Divides items of ``costs`` among ``bins`` bins.

    Returns:
        The load of the fullest bin, and the bin of every item.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    if len(order) <= bins:
        result = [0] * len(order)
        for position, item in enumerate(order):
            result[item] = position
        return max(costs), result
    best, chosen = _longest_first(costs, order, bins)
    low = _lower_bound([costs[item] for item in order], bins)
    for _ in range(_ROUNDS):
        if best <= low * (1 + SLACK):
            break
        limit = (low + best) / 2
        packed = _best_fit(costs, order, bins, limit)
        if packed is None:
            low = limit
        else:
            best, chosen = packed
    return best, chosen


def _lower_bound(costs: Sequence[float], bins: int) -> float:
    """No division of ``costs`` (descending, more than ``bins``) has a lower load of the fullest bin."""
    sums = [0.0, *accumulate(costs)]
    bound = max(costs[0], sums[-1] / bins)
    for k in range(1, (len(costs) - 1) // bins + 1):
        # Of the first k * bins + 1 items some bin gets k + 1, which are at least the smallest of them.
        bound = max(bound, sums[k * bins + 1] - sums[k * bins - k])
    return bound


def _longest_first(costs: Sequence[float], order: Sequence[int], bins: int) -> tuple[float, list[int]]:
    heap = [(0.0, position) for position in range(bins)]
    result = [0] * len(costs)
    for item in order:
        load, position = heap[0]
        result[item] = position
        heapreplace(heap, (load + costs[item], position))
    return max(heap)[0], result


def _best_fit(costs: Sequence[float], order: Sequence[int], bins: int, limit: float) -> tuple[float, list[int]] | None:
    room = [(limit, position) for position in range(bins)]
    result = [0] * len(costs)
    for item in order:
        index = bisect_left(room, (costs[item], -1))
        if index == bins:
            return None
        left, position = room.pop(index)
        result[item] = position
        insort(room, (left - costs[item], position))
    return limit - room[0][0], result
