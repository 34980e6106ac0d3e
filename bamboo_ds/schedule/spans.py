"""Spans: the parts of successive stages that the same members compute, and the passes that are left of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from typing import Literal

from ..topology import BlockCosts, Layout, Role
from .progress import Finished, Hosts, PartProgress

#: A forward ("F") or backward ("B") pass of one micro-batch.
Kind = Literal["F", "B"]
KINDS: tuple[Kind, Kind] = ("F", "B")
#: One pass of one role, or of a part of it: (role, kind, micro-batch, first block).
Work = tuple[Role, Kind, int, int]
#: Members, each with the number of micro-batches that its roles may have under way at most; 0: as many as 1F1B has.
Tight = tuple[tuple[str, int], ...]


def one_f_one_b(micro_batches: int, warm_up: int) -> Iterator[tuple[Kind, int]]:
    """Passes of one stage: ``warm_up`` forwards (at least 1), then a backward and a forward in turn.

    So many micro-batches are under way at most. In DeepSpeed's ``TrainSchedule`` a warm-up has as many forwards as
    there are stages from this one on::

        stage 0 of 4:  F0 F1 F2 F3 B0 F4 B1 F5 B2    B3    B4    B5
        stage 3 of 4:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """
    warm_up = min(warm_up, micro_batches)
    for m in range(warm_up):
        yield "F", m
    for m in range(micro_batches):
        yield "B", m
        if m + warm_up < micro_batches:
            yield "F", m + warm_up


@dataclass(frozen=True)
class _SpanPart:
    """A stage, or a part of it; ``roles``: of all its slices; ``cost``: how long its passes take."""

    roles: tuple[Role, ...]
    cost: float
    done: PartProgress


@dataclass(eq=False)
class StageSpan:
    """Parts of successive stages of one pipeline that the same members compute.

    Attributes:
        hosts: one, or of tensor slices one each.
        parts: in the order of their layers.
        micro_batches: of the pipeline in an iteration.
        warm_up: forwards before its first backward, if nothing is finished.
        fed: the span that its forward passes are the input of, and that of its backward passes.
        shared: one of its members computes other spans, too.
        listed: it is among the spans whose next pass can come.
        number: of the span among all that are simulated.
        cursor: how many of ``todo`` are scheduled.
        free: when the last one of these ends.
        inputs: by kind and micro-batch when the input of a pass is there, like ``ends``.
    """

    hosts: tuple[str, ...]
    parts: Sequence[_SpanPart]
    micro_batches: int
    warm_up: int
    fed: dict[Kind, StageSpan] = field(default_factory=dict)
    shared: bool = False
    listed: bool = False
    number: int = 0
    cursor: int = 0
    free: float = 0
    inputs: dict[Kind, list[float | None]] = field(default_factory=dict)
    _lengths: dict[Kind, list[tuple[int, float]]] = field(default_factory=dict)  # first micro-batch, time of each part

    @cached_property
    def todo(self) -> list[tuple[Kind, int]]:
        """Passes that are left, in 1F1B order."""
        passes = one_f_one_b(self.micro_batches, self.warm_up)
        return [(kind, m) for kind, m in passes if m >= self._done[kind]]

    @cached_property
    def ends(self) -> dict[Kind, list[float | None]]:
        """The ends of passes by kind and micro-batch: 0 if finished, ``None`` if not scheduled yet."""
        return {kind: [0 if m < done else None for m in range(self.micro_batches)] for kind, done in self._done.items()}

    @cached_property
    def work(self) -> float:
        """The time that the passes of a micro-batch take."""
        return sum(part.cost for part in self.parts)

    @cached_property
    def _done(self) -> dict[Kind, int]:
        return {kind: min(_counter(part, kind) for part in self.parts) for kind in KINDS}

    def connect(
        self, before: StageSpan | None, after: StageSpan | None, forward_cost: float, backward_cost: float
    ) -> None:
        """Gets ready to be simulated between two spans of its pipeline."""
        beside: dict[Kind, StageSpan | None] = {"F": after, "B": before}
        self.fed = {kind: span for kind, span in beside.items() if span is not None}
        given: list[float | None] = [0] * self.micro_batches
        self.inputs = {"F": before.ends["F"] if before else given, "B": after.ends["B"] if after else given}
        costs: dict[Kind, float] = {"F": forward_cost, "B": backward_cost}
        self._lengths = {
            kind: [(_counter(part, kind), part.cost * cost) for part in self._in_order(kind)]
            for kind, cost in costs.items()
        }

    def take(self, kind: Kind, m: int, start: float) -> None:
        """Schedule the next pass, which begins at ``start``."""
        end = start
        for first, length in self._lengths[kind]:
            if m >= first:
                end += length
        self.ends[kind][m] = self.free = end
        self.cursor += 1

    def run(self) -> None:
        """:meth:`take` passes as far as their inputs are scheduled; for members that compute nothing else."""
        cursor, free, inputs, ends, lengths = self.cursor, self.free, self.inputs, self.ends, self._lengths
        for kind, m in islice(self.todo, cursor, None):
            there = inputs[kind][m]
            if there is None:
                break
            if there > free:
                free = there
            for first, length in lengths[kind]:
                if m >= first:
                    free += length
            ends[kind][m] = free
            cursor += 1
        self.cursor, self.free = cursor, free

    def works(self, member: str, passes: Iterable[tuple[Kind, int]]) -> Iterator[Work]:
        """The work of ``member`` in ``passes``: those of parts that have not finished them."""
        place = self.hosts.index(member)
        for kind, m in passes:
            for part in self._in_order(kind):
                if m >= _counter(part, kind):
                    yield part.roles[place], kind, m, part.done.begin

    def _in_order(self, kind: Kind) -> Iterable[_SpanPart]:
        return self.parts if kind == "F" else reversed(self.parts)


def _counter(part: _SpanPart, kind: Kind) -> int:
    return part.done.forwards if kind == "F" else part.done.backwards


def warm_ups(most: Sequence[int], work: Sequence[float]) -> list[int]:
    """The warm-ups of the spans of a pipeline, none of which is larger than that of the span before.

    They are those of 1F1B, the number of spans from each one on, if none has to be smaller. Here ``a`` is tight, with a
    count of 2, and the others follow::

        a (0)   F0 F1 B0 F2 B1 F3 B2 B3
        b (1)   F0 F1 B0 F2 B1 F3 B2 B3
        c (2)   F0 B0 F1 B1 F2 B2 F3 B3
        d (3)   F0 B0 F1 B1 F2 B2 F3 B3

    *The orders of all spans have a linear extension*, since warm-ups do not increase. Its round ``k`` has the forwards
    that spans do between their backwards ``k - 1`` and ``k``, by micro-batch and then from first span to last; after
    them all backwards ``k``, from last span to first. That keeps the order of each span. A forward ``m`` is in round
    ``max(0, m - warm_up + 1)``: the span before, whose warm-up is not smaller, does it in that round or earlier. The
    backward ``m`` of a span comes after that of the span behind, and after its own forward ``m``, as warm-ups are at
    least 1.

    *Otherwise they have none.* A span with a larger warm-up than ``w``, that of the span before, does its forward ``w``
    before its backward 0. The span before does that forward after its own backward 0: each waits for the other.

    *Spans with equal warm-ups* ``w`` are as slow together as one with all their passes: the last one does forward ``m``
    before backward ``m - w + 1``, which comes to the first one before it does forward ``m + 1``. So a pipeline takes
    the longest of these groups for a micro-batch. Of all divisions into groups those are chosen whose longest is
    shortest, and of these the one with most under way: it begins and ends soonest.

    Args:
        most: the largest warm-ups that spans may have, 1 or more: at most the numbers of spans from them on.
        work: how long their passes of a micro-batch take, in any unit.
    """

    def within(limit: float) -> list[int]:
        """The largest warm-ups of groups that take no longer than ``limit``; 0 or less behind too many groups."""
        found, together = [most[0]], 0.0
        for bound, length in zip(most, work, strict=True):
            bound, together = min(bound, found[-1]), together + length if bound >= found[-1] else length
            if together > limit:
                bound, together = bound - 1, length
            found.append(bound)
        return found[1:]

    least = max(work)
    limits = sorted({each for first in range(len(work)) for each in accumulate(work[first:]) if each >= least})
    return within(limits[bisect_left(limits, True, key=lambda limit: within(limit)[-1] >= 1)])


def spans_of(
    layout: Layout, copy: int, hosts: Hosts, micro_batches: int, done: Finished, costs: BlockCosts | None, tight: Tight
) -> list[StageSpan]:
    """The spans of one copy of the model, in the order of their layers.

    Args:
        layout, hosts, micro_batches, costs, tight: see :func:`~.orders.compute_order`.
        copy: of the model.
        done: what is finished.
    """
    counts = dict(tight)
    runs: list[tuple[tuple[str, ...], list[_SpanPart]]] = []
    for stage in range(layout.stages):
        first = stage * layout.pipelines + copy * layout.slices
        ranks = range(first, first + layout.slices)
        roles, parts, blocks = layout.roles[first : first + layout.slices], done[first], layout.blocks_of(stage)
        ends = [*(part.begin for part in parts[1:]), blocks]
        for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
            members = tuple(hosts[rank][index] for rank in ranks)
            if costs is not None:
                cost = costs.part(stage, part.begin, end) * costs.slow(members[0])
            else:
                cost = 1 if len(parts) == 1 else (end - part.begin) / blocks
            if not runs or runs[-1][0] != members:
                runs.append((members, []))
            runs[-1][1].append(_SpanPart(roles, cost, part))
    most = [
        min(count or len(runs) for count in (len(runs) - index, *(counts.get(member, 0) for member in members)))
        for index, (members, _) in enumerate(runs)
    ]
    found = warm_ups(most, [sum(part.cost for part in successive) for _, successive in runs])
    return [
        StageSpan(members, successive, micro_batches, warm_up)
        for (members, successive), warm_up in zip(runs, found, strict=True)
    ]
