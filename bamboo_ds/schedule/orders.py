"""Orders of computation: 1F1B of one role, and the global order of all roles from any progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Literal

from ..errors import ProtocolError
from ..topology import Layout, Role
from .progress import Finished, RoleProgress, finished

#: A forward ("F") or backward ("B") pass of one micro-batch.
Kind = Literal["F", "B"]
#: One pass of one role: (role, kind, micro-batch).
Work = tuple[Role, Kind, int]


def one_f_one_b(micro_batches: int, stages: int, stage: int) -> Iterator[tuple[Kind, int]]:
    """Passes of one stage in the order of DeepSpeed's ``TrainSchedule``.

    As many forwards as there are stages from this one on, then a backward and a forward in turn::

        stage 0 of 4:  F0 F1 F2 F3 B0 F4 B1 F5 B2    B3    B4    B5
        stage 3 of 4:  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """
    warm_up = min(stages - stage, micro_batches)
    for m in range(warm_up):
        yield "F", m
    for m in range(micro_batches):
        yield "B", m
        if m + warm_up < micro_batches:
            yield "F", m + warm_up


def compute_order(
    layout: Layout,
    owners: tuple[str, ...],
    micro_batches: int,
    progress: Mapping[Role, RoleProgress] | None = None,
    forward_cost: float = 1,
    backward_cost: float = 2,
) -> Mapping[str, tuple[Work, ...]]:
    """Order of the passes that finish an iteration from ``progress``, for every owner.

    One list-scheduling simulation over all pipelines. Each role keeps its 1F1B order with the finished
    passes removed; dependencies are ``F(s, m) <- F(s-1, m)`` and ``B(s, m) <- F(s, m), B(s+1, m)``; a member
    does one pass at a time. Among the passes that can come next the one with the earliest start does; ties
    go to backwards, then to the lower rank. A member with one role without progress gets exactly 1F1B.

    *The simulation terminates*: 1F1B of all roles together has a linear extension; without the finished
    passes that is still one, so some role's next pass always has its dependencies fulfilled. *It cannot
    deadlock*: the passes, in the order in which the simulation takes them, are one linear extension of the
    dependencies, and each member's order is a part of it. With blocking receives and asynchronous sends, the
    first pass of the extension that is not done yet has all its inputs sent, so its member goes on.

    *Tensor slices* of a stage do each pass together, since their layers block in collectives: it begins when all their
    owners are free, and occupies all of them. So what the simulation takes, one after the other, are such joint passes,
    and each member's order is still a part of the one extension. The first joint pass that is not done yet is the next
    one of *all* its owners (whatever is before it in their orders is before it in the extension, hence done), and all
    its inputs are sent: they meet in it. No member owns two slices of one stage of a pipeline, so none would have to be
    in a pass twice.

    Four stages, two micro-batches; ``c`` (stage 2) was lost after stage 3 had finished everything and stage 1
    F0 F1. Its shadow ``b`` had run F0 redundantly. Stage 3 re-sends two gradients, stage 0 waits
    (a column is one forward; ``2.F1`` is the forward of micro-batch 1 of stage 2)::

        a (0)        .    .    .    .    .    0.B0 0.B0 .    .    0.B1 0.B1
        b (1 and 2)  2.F1 2.B0 2.B0 1.B0 1.B0 2.B1 2.B1 1.B1 1.B1
        d (3)

    Args:
        layout: the logical world.
        owners: owner of every role by rank (``Plan.owners``).
        micro_batches: micro-batches per pipeline and iteration.
        progress: what is finished; ``None``: nothing.
        forward_cost: length of a forward pass, in any unit of time.
        backward_cost: length of a backward pass, in the same unit.

    Returns:
        The passes of every owner, ``()`` for one with nothing left to compute. Cached and read-only.

    Raises:
        ProtocolError: ``progress`` is not one of this layout and number of micro-batches, or differs between slices
            (see :func:`~.progress.settle`).
    """
    done = finished(layout, micro_batches, progress)
    return ordered(layout, tuple(owners), micro_batches, done, forward_cost, backward_cost)


@lru_cache(maxsize=32)
def ordered(
    layout: Layout,
    owners: tuple[str, ...],
    micro_batches: int,
    done: Finished,
    forward_cost: float = 1,
    backward_cost: float = 2,
) -> Mapping[str, tuple[Work, ...]]:
    """:func:`compute_order` with the progress as a hashable value."""
    slices = layout.slices
    width, size = layout.copies, layout.size // slices
    # What goes on together, by joint rank: the slices of a stage, of which there is mostly one.
    roles = [layout.roles[first : first + slices] for first in range(0, layout.size, slices)]
    hosts = [owners[first : first + slices] for first in range(0, layout.size, slices)]
    counters = [done[first] for first in range(0, layout.size, slices)]
    if any(done[rank] != counters[rank // slices] for rank in range(layout.size)):
        raise ProtocolError(f"slices of a stage are at different places of an iteration of {layout}: {done}")
    remaining = [_remaining(micro_batches, layout.stages, roles[rank][0].stage, counters[rank]) for rank in range(size)]
    cursor = [0] * size
    # When each pass ends, by joint rank and micro-batch; finished passes ended at 0, None: not scheduled yet.
    forward_end: list[list[float | None]]
    backward_end: list[list[float | None]]
    forward_end = [[0 if m < f else None for m in range(micro_batches)] for f, _ in counters]
    backward_end = [[0 if m < b else None for m in range(micro_batches)] for _, b in counters]
    free: dict[str, float] = dict.fromkeys(owners, 0)
    orders: dict[str, list[Work]] = {owner: [] for owner in owners}

    def all_free(rank: int) -> float:
        return free[hosts[rank][0]] if slices == 1 else max(free[owner] for owner in hosts[rank])

    def ready(rank: int) -> tuple[float, int, int] | None:
        """Heap entry of the next pass of a joint rank: (earliest start, backward before forward, rank)."""
        if cursor[rank] == len(remaining[rank]):
            return None
        kind, m = remaining[rank][cursor[rank]]
        if kind == "F":
            start = forward_end[rank - width][m] if rank >= width else 0
        else:
            start = backward_end[rank + width][m] if rank + width < size else 0
        # The role's own earlier passes need no look: its member is busy with them until `free`.
        return None if start is None else (max(start, all_free(rank)), int(kind == "F"), rank)

    heap = [entry for rank in range(size) if (entry := ready(rank)) is not None]
    heapify(heap)
    while heap:
        start, is_forward, rank = heappop(heap)
        if all_free(rank) > start:  # a member took another of its roles meanwhile
            heappush(heap, (all_free(rank), is_forward, rank))
            continue
        kind, m = remaining[rank][cursor[rank]]
        cursor[rank] += 1
        if is_forward:
            end = forward_end[rank][m] = start + forward_cost
            dependent = rank + width
        else:
            end = backward_end[rank][m] = start + backward_cost
            dependent = rank - width
        for role, owner in zip(roles[rank], hosts[rank], strict=True):
            orders[owner].append((role, kind, m))
            free[owner] = end
        if (entry := ready(rank)) is not None:
            heappush(heap, entry)
        # A neighbour is in the heap already unless exactly this pass is what it waits for.
        if 0 <= dependent < size and _at(remaining[dependent], cursor[dependent]) == (kind, m):
            heappush(heap, (max(end, all_free(dependent)), is_forward, dependent))
    if any(cursor[rank] != len(remaining[rank]) for rank in range(size)):
        raise ProtocolError(f"no order finishes an iteration of {layout} from {done}")
    return MappingProxyType({owner: tuple(order) for owner, order in orders.items()})


def _remaining(micro_batches: int, stages: int, stage: int, done: tuple[int, int]) -> list[tuple[Kind, int]]:
    """1F1B of one stage without its finished passes."""
    forwards, backwards = done
    return [
        (kind, m)
        for kind, m in one_f_one_b(micro_batches, stages, stage)
        if m >= (forwards if kind == "F" else backwards)
    ]


def _at(passes: list[tuple[Kind, int]], position: int) -> tuple[Kind, int] | None:
    """The pass at ``position``; ``None`` behind the last one."""
    return passes[position] if position < len(passes) else None
