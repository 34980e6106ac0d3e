"""Measured costs: how long blocks of stages take, and how slow members are.

Every member measures the blocks that it computes. A block costs what the fastest one has taken for it, so a block that
takes one member longer than it takes another says that the member is slow, not that the block is dear::

    block      0     1     2     3          costs      10    10    40    10 ms
    a         10    10
    b               30   120                slowness of b: 3
    c                     40    10

The optimizer's step is no part of a cost: owner and shadow perform it for the whole stage, however it is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median_low

from .roles import Layout

#: Members that differ by less than this factor count as equally fast, and one that has become slower or faster by less
#: as unchanged: what scatters moves nothing.
TOLERANCE = 1.3

#: What the busiest member computes has to be this share of an iteration for costs to count, and this share for them to
#: go on counting: where iterations consist of other things, times of passes scatter, and dividing them gains nothing.
_ENOUGH, _STILL_ENOUGH = 0.3, 0.2

#: Costs are multiples of this share of the usual block's, so that blocks which are alike cost the same: divisions, and
#: orders of passes, decide between equal ones by rules, which do better than whatever scatter would have them do.
_STEP = 0.05


@dataclass(frozen=True)
class BlockSeconds:
    """A member's measurement of a block: its passes of all micro-batches of an iteration, in seconds.

    Attributes:
        stage: the stage.
        block: its number in the stage.
        least: the shortest time so far.
        latest: the time of late; ``None`` where the member computes the block no more, or has only just begun to.
    """

    stage: int
    block: int
    least: float
    latest: float | None = None


@dataclass(frozen=True)
class BlockCosts:
    """The measurements of all members.

    Attributes:
        seconds: cost of the passes of an iteration, by stage and block.
        slowness: of members that are slower or faster than most: how many times as long as these they take.
    """

    seconds: tuple[tuple[float, ...], ...]
    slowness: tuple[tuple[str, float], ...] = ()

    def part(self, stage: int, begin: int, end: int) -> float:
        """Seconds of the blocks from ``begin`` to before ``end``."""
        return sum(self.seconds[stage][begin:end])

    def slow(self, member: str) -> float:
        """The slowness of ``member``: how many times as long as most it takes."""
        return self._slowness.get(member, 1.0)

    @cached_property
    def _slowness(self) -> dict[str, float]:
        return dict(self.slowness)


def settled(
    previous: BlockCosts | None,
    layout: Layout,
    told: Mapping[str, Sequence[BlockSeconds]],
    computing: Collection[str],
    iteration_s: float,
) -> BlockCosts | None:
    """The costs after ``previous``; ``None`` while nothing is known, or where passes are little of an iteration.

    Costs are rounded, so that blocks which are alike cost the same. They stay as they are until all that are
    ``computing`` have told how long that takes of late.

    What nobody has measured costs what it did before, else what other blocks of its stage cost on average, else what
    all other ones do.

    Args:
        previous: the costs until now.
        layout: the logical world.
        told: what each member has measured.
        computing: the members that compute something.
        iteration_s: how long an iteration takes.
    """
    if not layout.blocks:
        return None
    latest = {member: [row.latest for row in rows if row.latest is not None] for member, rows in told.items()}
    if not all(latest.get(member) for member in computing):
        return previous
    busiest = max((sum(seconds) for seconds in latest.values()), default=0.0)
    if busiest < iteration_s * (_ENOUGH if previous is None else _STILL_ENOUGH):
        return None
    least: dict[tuple[int, int], float] = {}
    if previous is not None:
        before = {(s, b): cost for s, costs in enumerate(previous.seconds) for b, cost in enumerate(costs)}
        measured = {(each.stage, each.block) for rows in told.values() for each in rows}
        least = {key: cost for key, cost in before.items() if key not in measured}
    for rows in told.values():
        for each in rows:
            key = each.stage, each.block
            least[key] = min(each.least, least.get(key, each.least))
    if not any(least.values()):
        return None
    mean, step = fmean(least.values()), _rounded(median_low(least.values()) * _STEP)

    def cost(seconds: float) -> float:
        return float(f"{max(1, round(seconds / step)) * step:.6g}") if step else _rounded(seconds)

    seconds = []
    for stage, count in enumerate(layout.blocks):
        known = [least[stage, block] for block in range(count) if (stage, block) in least]
        usual = fmean(known) if known else mean
        seconds.append(tuple(cost(least.get((stage, block), usual)) for block in range(count)))
    return BlockCosts(tuple(seconds), _slowness(previous, least, told))


def _slowness(
    previous: BlockCosts | None, least: Mapping[tuple[int, int], float], told: Mapping[str, Sequence[BlockSeconds]]
) -> tuple[tuple[str, float], ...]:
    times = {}
    for member, rows in told.items():
        latest = {(each.stage, each.block): each.latest for each in rows if each.latest is not None}
        cost = sum(least[key] for key in latest)
        if cost > 0:
            times[member] = sum(latest.values()) / cost
    usual = median_low(times.values()) if times else 1.0
    found = []
    for member in sorted(told):
        before = now = previous.slow(member) if previous is not None else 1.0
        if member in times:
            now = times[member] / usual
        if before / TOLERANCE < now < before * TOLERANCE:
            now = before
        elif 1 / TOLERANCE < now < TOLERANCE:
            now = 1.0
        if now != 1:
            found.append((member, _rounded(now)))
    return tuple(found)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
