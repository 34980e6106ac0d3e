"""Begins and ends of passes: the orders of :mod:`.orders` played with durations. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ProtocolError
from ..topology import BlockCosts, Layout, Role
from .orders import compute_order
from .progress import Hosts, RoleProgress, beside
from .spans import Kind, Tight, Work

#: Seconds that a member takes for a pass of blocks of a role: (role, kind, first block, the one behind, member).
Seconds = Callable[[Role, Kind, int, int, str], float]


@dataclass(frozen=True)
class PassTimeline:
    """The passes of members from the begin of an iteration, or of the rest of one, to their end.

    Attributes:
        spans: begin and end of every pass in seconds, by member in its order.
    """

    spans: Mapping[str, tuple[tuple[float, float, Work], ...]]

    @property
    def seconds(self) -> float:
        """Seconds until the last pass ends; 0 if none is left."""
        return max((spans[-1][1] for spans in self.spans.values() if spans), default=0.0)


def timeline(
    layout: Layout,
    hosts: Hosts,
    micro_batches: int,
    seconds: Seconds,
    progress: Mapping[Role, RoleProgress] | None = None,
    costs: BlockCosts | None = None,
    ratio: tuple[float, float] = (1, 2),
    message_s: float = 0.0,
    tight: Tight = (),
) -> PassTimeline:
    """Plays :func:`~.orders.compute_order`: each member does its next pass as soon as it is free and has the input.

    Args:
        layout: the logical world, without tensor slices.
        hosts: members that compute the parts of every role, by rank.
        micro_batches: micro-batches per pipeline and iteration.
        seconds: how long passes take.
        progress: what is finished; its results count as there.
        costs: by which the order is found, as members do; ``None``: as if all stages took equally long.
        ratio: lengths of forward and backward pass by which the order is found.
        message_s: from the end of a pass to its result on another member.
        tight: members whose roles may have only so many micro-batches under way.

    Raises:
        ProtocolError: ``progress`` does not fit, or a pass waits for one that no member does.
    """
    orders = compute_order(layout, hosts, micro_batches, progress, *ratio, costs, tight)
    begins = [
        [0] if progress is None else [part.begin for part in progress[role].parts] for role in layout.roles
    ]  # of the parts, by rank
    left = {work for order in orders.values() for work in order}
    ends: dict[Work, tuple[float, str]] = {}
    free, cursors = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    spans: dict[str, list[tuple[float, float, Work]]] = {member: [] for member in orders}
    waiting: dict[Work, str] = {}
    able = list(orders)
    while able:
        member = able.pop()
        order = orders[member]
        while cursors[member] < len(order):
            work = order[cursors[member]]
            role, kind, _, begin = work
            before = needed(layout, begins, work)
            start = free[member]
            if before is not None and before in left:
                if before not in ends:
                    waiting[before] = member
                    break
                end, other = ends[before]
                start = max(start, end if other == member else end + message_s)
            bounds = [*begins[layout.rank(role)], layout.blocks_of(role.stage)]
            behind = bounds[bounds.index(begin) + 1]
            free[member] = start + seconds(role, kind, begin, behind, member)
            ends[work] = free[member], member
            spans[member].append((start, free[member], work))
            cursors[member] += 1
            if work in waiting:
                able.append(waiting.pop(work))
    if len(ends) != len(left):
        raise ProtocolError(f"{len(left) - len(ends)} passes wait for passes that no member does")
    return PassTimeline({member: tuple(each) for member, each in spans.items()})


def needed(layout: Layout, begins: Sequence[Sequence[int]], work: Work) -> Work | None:
    """The pass whose result ``work`` needs: of the part or stage before, or in a backward pass behind.

    Args:
        layout: the logical world.
        begins: first blocks of the parts of every role, by rank.
        work: the pass; ``None`` is returned if it needs none.
    """
    role, kind, m, begin = work
    rank = layout.rank(role)
    place = beside(layout, begins, rank, begins[rank].index(begin), 1 if kind == "B" else -1)
    return None if place is None else (layout.roles[place[0]], kind, m, begins[place[0]][place[1]])
