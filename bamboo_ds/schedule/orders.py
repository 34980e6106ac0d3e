"""Orders of computation: of all members, or of one, from any progress."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from types import MappingProxyType

from ..errors import ProtocolError
from ..topology import BlockCosts, Layout, Role
from .progress import Finished, Hosts, RoleProgress, finished
from .spans import Kind, StageSpan, Tight, Work, spans_of

#: A pass that may come next: earliest start, less what its span has left, backward before forward, work, and number.
_Entry = tuple[float, int, int, float, int]


def compute_order(
    layout: Layout,
    hosts: Hosts,
    micro_batches: int,
    progress: Mapping[Role, RoleProgress] | None = None,
    forward_cost: float = 1,
    backward_cost: float = 2,
    costs: BlockCosts | None = None,
    tight: Tight = (),
) -> Mapping[str, tuple[Work, ...]]:
    """Order of the passes that finish an iteration from ``progress``, for every member that computes.

    What a member computes of successive stages is one *span*: it does the passes of all of it one after the other, as
    if it were one stage. Pipelines are 1F1B over their spans. A role of a member that is ``tight`` has no more
    micro-batches under way than the member's count, or than by ``progress``. One list-scheduling simulation goes over
    all pipelines. Each span keeps its 1F1B order with the finished passes removed; dependencies are
    ``F(s, m) <- F(s-1, m)`` and ``B(s, m) <- F(s, m), B(s+1, m)``; a member does one pass at a time. Among the passes
    that can come next the one with the earliest start does; ties go to the span with most passes left, so that
    pipelines that share members end at about the same time, then to backwards, then to the span with less work (what a
    member computes for others is little, and they wait for it). A member with one role without progress gets exactly
    1F1B.

    *The simulation terminates*: 1F1B of all spans together has a linear extension (:func:`~.spans.warm_ups`); without
    the finished passes that is still one, so some span's next pass always has its dependencies fulfilled. *It cannot
    deadlock*: the passes, in the order in which the simulation takes them, are one linear extension of the
    dependencies, and each member's order is a part of it. With blocking receives and asynchronous sends, the
    first pass of the extension that is not done yet has all its inputs sent, so its member goes on. (Members find
    their own orders from less, see :func:`member_order`; they are parts of one extension all the same.)

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
        hosts: members that compute the parts of every role, by rank: ``(owner,)`` where it is not divided.
        micro_batches: micro-batches per pipeline and iteration.
        progress: what is finished; ``None``: nothing, and no role is divided.
        forward_cost: length of a forward pass of a stage, in any unit of time.
        backward_cost: length of a backward pass, in the same unit.
        costs: how much longer stages and their blocks take than others; ``None``: all take equally long.
        tight: members whose roles may have only so many micro-batches under way.

    Returns:
        The passes of every member that computes, ``()`` for one with nothing left to compute. Cached and read-only.

    Raises:
        ProtocolError: ``progress`` is not one of this layout and number of micro-batches, or differs between slices
            (see :func:`~.settling.settle`).
    """
    done = finished(layout, micro_batches, progress or dict.fromkeys(layout.roles, RoleProgress()))
    return ordered(layout, hosts, micro_batches, done, forward_cost, backward_cost, costs, tight)


@lru_cache(maxsize=32)
def member_order(
    layout: Layout,
    hosts: Hosts,
    micro_batches: int,
    done: Finished,
    member: str,
    costs: BlockCosts | None = None,
    tight: Tight = (),
) -> tuple[Work, ...]:
    """The order of ``member`` in :func:`compute_order`, found from what that depends on.

    *One span*: the passes of it that are left in 1F1B order. In every extension they are in this order, so nothing is
    simulated.

    *Several*: how they alternate depends on when their inputs come, hence on all spans of their copies of the model,
    and on whatever else the members of these compute. Two copies are *connected* if a member computes in both, or if
    both are connected with a third one. All that are connected with the member's are simulated, and no other::

        copy 0   a b c d     a computes in copies 0 and 1, g in 1 and 2: these three are connected. Both simulate all
        copy 1   a f g h     of them, a also copy 2, where it computes nothing: when f has its gradients from g depends
        copy 2   i j g k     on what keeps g busy there. The other members have one span each and simulate nothing.
        copy 3   m n o p

    *Orders fit together.* Connection is an equivalence, and it follows from ``hosts``, which all members know. So
    members with several spans in connected copies simulate the same spans from the same progress, and their orders are
    parts of one extension of these copies' passes. No pass depends on one of a copy that is not connected, and none
    keeps a member busy there: extensions of all sets of connected copies, one behind the other, are an extension of all
    passes, of which the order of every member is a part. Besides, it is the very order that a simulation of all copies
    gives: of the passes of connected copies that can come next it takes the first, whatever is taken in others.

    Args:
        layout, hosts, micro_batches, costs, tight: see :func:`compute_order`.
        done: what is finished.
        member: the member.

    Returns:
        Its passes, ``()`` if it has nothing left to compute. Cached.
    """
    copies: dict[str, set[int]] = defaultdict(set)
    for rank, members in enumerate(hosts):
        for each in members:
            copies[each].add(rank % layout.pipelines // layout.slices)

    def chains(of: Iterable[int]) -> list[list[StageSpan]]:
        return [spans_of(layout, copy, hosts, micro_batches, done, costs, tight) for copy in sorted(of)]

    found = set(copies[member])
    spans = [span for chain in chains(found) for span in chain if member in span.hosts]
    if len(spans) == 1:
        return tuple(spans[0].works(member, spans[0].todo))
    if not spans:
        return ()
    while more := {copy for each in copies.values() if found & each for copy in each} - found:
        found |= more
    return _simulated(chains(found), [member])[member]


@lru_cache(maxsize=32)
def ordered(
    layout: Layout,
    hosts: Hosts,
    micro_batches: int,
    done: Finished,
    forward_cost: float = 1,
    backward_cost: float = 2,
    costs: BlockCosts | None = None,
    tight: Tight = (),
) -> Mapping[str, tuple[Work, ...]]:
    """:func:`compute_order` with the progress as a hashable value."""
    chains = [spans_of(layout, copy, hosts, micro_batches, done, costs, tight) for copy in range(layout.copies)]
    members = dict.fromkeys(member for members in hosts for member in members)
    return MappingProxyType(_simulated(chains, members, forward_cost, backward_cost))


def _simulated(
    chains: Sequence[Sequence[StageSpan]], members: Iterable[str], forward_cost: float = 1, backward_cost: float = 2
) -> dict[str, tuple[Work, ...]]:
    """Orders of ``members``, which compute spans of ``chains``.

    Passes of a span whose members have no other compete with none: they are taken as soon as their inputs are. The
    others wait on a heap until no such pass is left. By then all passes are on it that may start as early as its first
    one: whatever is not depends on one of those, and begins when that has ended.

    Raises:
        ProtocolError: passes are left that wait for each other.
    """
    spans = [span for chain in chains for span in chain]
    # By the stages that they begin with, and at each of these by pipeline.
    spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[0].roles[0].pipeline))
    counts = Counter(member for span in spans for member in span.hosts)
    for number, span in enumerate(spans):
        span.number, span.shared = number, any(counts[member] > 1 for member in span.hosts)
    for chain in chains:
        for before, span, after in zip([None, *chain], chain, [*chain[1:], None], strict=False):
            span.connect(before, after, forward_cost, backward_cost)
    free: dict[str, float] = dict.fromkeys(counts, 0)
    orders: dict[str, list[Work]] = {member: [] for member in members}
    heap: list[_Entry] = []
    able: deque[StageSpan] = deque()

    def all_free(span: StageSpan) -> float:
        return free[span.hosts[0]] if len(span.hosts) == 1 else max(free[member] for member in span.hosts)

    def enter(span: StageSpan, there: float, kind: Kind) -> None:
        left = len(span.todo) - span.cursor
        heappush(heap, (max(there, all_free(span)), -left, int(kind == "F"), span.work, span.number))

    def look(span: StageSpan) -> None:
        """Lists ``span`` if its next pass can come."""
        if span.listed or span.cursor == len(span.todo):
            return
        kind, m = span.todo[span.cursor]
        there = span.inputs[kind][m]
        if there is None:
            return
        span.listed = True
        if span.shared:
            enter(span, there, kind)
        else:
            able.append(span)

    for span in spans:
        look(span)
    while able or heap:
        if able:
            span = able.popleft()
            span.run()
            span.listed = False
            for each in span.fed.values():
                look(each)
        else:
            start, *_, number = heappop(heap)
            span = spans[number]
            kind, m = span.todo[span.cursor]
            if all_free(span) > start:  # a member took another of its spans meanwhile
                enter(span, start, kind)
                continue
            span.take(kind, m, start)
            span.listed = False
            for member in span.hosts:
                free[member] = span.free
                if member in orders:
                    orders[member] += span.works(member, [(kind, m)])
            look(span)
            if kind in span.fed:
                look(span.fed[kind])
    for span in spans:
        if span.cursor < len(span.todo):
            raise ProtocolError("passes that are left of an iteration wait for each other")
        for member in span.hosts if not span.shared else ():
            if member in orders:
                orders[member] += span.works(member, span.todo)
    return {member: tuple(order) for member, order in orders.items()}
