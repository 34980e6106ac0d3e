"""Orders of computation: 1F1B of one role, and the global order of all roles from any progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Literal

from ..errors import ProtocolError
from ..topology import BlockCosts, Layout, Role
from .progress import Finished, Hosts, PartProgress, RoleProgress, finished

#: A forward ("F") or backward ("B") pass of one micro-batch.
Kind = Literal["F", "B"]
#: By whether it is a forward pass.
_KINDS: tuple[Kind, Kind] = ("B", "F")
#: A pass that may come next: earliest start, backward before forward, work and micro-batch, number of the span.
_Entry = tuple[float, int, float, int, int]
#: One pass of one role, or of a part of it: (role, kind, micro-batch, first block).
Work = tuple[Role, Kind, int, int]


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
    hosts: Hosts,
    micro_batches: int,
    progress: Mapping[Role, RoleProgress] | None = None,
    forward_cost: float = 1,
    backward_cost: float = 2,
    costs: BlockCosts | None = None,
) -> Mapping[str, tuple[Work, ...]]:
    """Order of the passes that finish an iteration from ``progress``, for every member that computes.

    What a member computes of successive stages is one *span*: it does the passes of all of it one after the other, as
    if it were one stage. Pipelines are 1F1B over their spans. One list-scheduling simulation goes over all pipelines.
    Each span keeps its 1F1B order with the finished passes removed; dependencies are ``F(s, m) <- F(s-1, m)`` and
    ``B(s, m) <- F(s, m), B(s+1, m)``; a member does one pass at a time. Among the passes that can come next the one
    with the earliest start does; ties go to backwards, then to the span with less work (what a member computes for
    others is little, and they wait for it), then to the older micro-batch. A member with one role without progress gets
    exactly 1F1B.

    *The simulation terminates*: 1F1B of all spans together has a linear extension; without the finished
    passes that is still one, so some span's next pass always has its dependencies fulfilled. *It cannot
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
        hosts: members that compute the parts of every role, by rank: ``(owner,)`` where it is not divided.
        micro_batches: micro-batches per pipeline and iteration.
        progress: what is finished; ``None``: nothing, and no role is divided.
        forward_cost: length of a forward pass of a stage, in any unit of time.
        backward_cost: length of a backward pass, in the same unit.
        costs: how much longer stages and their blocks take than others; ``None``: all take equally long.

    Returns:
        The passes of every member that computes, ``()`` for one with nothing left to compute. Cached and read-only.

    Raises:
        ProtocolError: ``progress`` is not one of this layout and number of micro-batches, or differs between slices
            (see :func:`~.progress.settle`).
    """
    done = finished(layout, micro_batches, progress or dict.fromkeys(layout.roles, RoleProgress()))
    return ordered(layout, hosts, micro_batches, done, forward_cost, backward_cost, costs)


@dataclass(frozen=True)
class _SpanPart:
    """A stage, or a part of it; ``roles``: of all its slices; ``cost``: how long its passes take."""

    roles: tuple[Role, ...]
    cost: float
    done: PartProgress


@dataclass
class _Span:
    """Parts of successive stages of one pipeline that the same members compute.

    Attributes:
        hosts: one, or of tensor slices one each.
        parts: in the order of their layers.
        work: how long the passes of a micro-batch take.
        number: of the span among all.
        todo: passes that are left, in 1F1B order.
        cursor: how many of ``todo`` are scheduled.
        ends: by kind and micro-batch when a pass ends: 0 if it is finished, ``None`` if it is not scheduled yet.
    """

    hosts: tuple[str, ...]
    parts: list[_SpanPart]
    work: float = 0
    number: int = 0
    todo: list[tuple[Kind, int]] = field(default_factory=list)
    cursor: int = 0
    ends: dict[Kind, list[float | None]] = field(default_factory=dict)

    def begin(self, micro_batches: int, spans: int, index: int) -> None:
        """It is number ``index`` of the ``spans`` of its pipeline."""
        self.work = sum(part.cost for part in self.parts)
        done: dict[Kind, int] = {
            "F": min(part.done.forwards for part in self.parts),
            "B": min(part.done.backwards for part in self.parts),
        }
        self.todo = [(kind, m) for kind, m in one_f_one_b(micro_batches, spans, index) if m >= done[kind]]
        self.ends = {kind: [0 if m < done[kind] else None for m in range(micro_batches)] for kind in done}

    def next(self) -> tuple[Kind, int] | None:
        """The next pass; ``None`` if none is left."""
        return self.todo[self.cursor] if self.cursor < len(self.todo) else None


@lru_cache(maxsize=32)
def ordered(
    layout: Layout,
    hosts: Hosts,
    micro_batches: int,
    done: Finished,
    forward_cost: float = 1,
    backward_cost: float = 2,
    costs: BlockCosts | None = None,
) -> Mapping[str, tuple[Work, ...]]:
    """:func:`compute_order` with the progress as a hashable value."""
    chains = [_spans(layout, copy, hosts, done, costs) for copy in range(layout.copies)]
    for chain in chains:
        for index, span in enumerate(chain):
            span.begin(micro_batches, len(chain), index)
    # By the stages that they begin with, and at each of these by pipeline.
    spans = [(chain, index) for chain in chains for index in range(len(chain))]
    spans.sort(key=lambda each: layout.rank(each[0][each[1]].parts[0].roles[0]))
    for number, (chain, index) in enumerate(spans):
        chain[index].number = number
    free: dict[str, float] = {member: 0 for members in hosts for member in members}
    orders: dict[str, list[Work]] = {member: [] for member in free}

    def all_free(span: _Span) -> float:
        return free[span.hosts[0]] if len(span.hosts) == 1 else max(free[member] for member in span.hosts)

    def ready(number: int) -> _Entry | None:
        """Heap entry of the next pass of a span."""
        chain, n = spans[number]
        following = chain[n].next()
        if following is None:
            return None
        kind, m = following
        other = n - 1 if kind == "F" else n + 1
        start = chain[other].ends[kind][m] if 0 <= other < len(chain) else 0
        # The span's own earlier passes need no look: its members are busy with them until `free`.
        return None if start is None else entry_of(chain[n], start, kind, m)

    def entry_of(span: _Span, start: float, kind: Kind, m: int) -> _Entry:
        return max(start, all_free(span)), int(kind == "F"), span.work, m, span.number

    heap = [entry for number in range(len(spans)) if (entry := ready(number)) is not None]
    heapify(heap)
    while heap:
        start, is_forward, _, m, number = heappop(heap)
        chain, n = spans[number]
        span = chain[n]
        if all_free(span) > start:  # a member took another of its spans meanwhile
            heappush(heap, entry_of(span, start, _KINDS[is_forward], m))
            continue
        kind = _KINDS[is_forward]
        span.cursor += 1
        end = start
        for part in span.parts if is_forward else reversed(span.parts):
            if m >= (part.done.forwards if is_forward else part.done.backwards):
                end += part.cost * (forward_cost if is_forward else backward_cost)
                for role, member in zip(part.roles, span.hosts, strict=True):
                    orders[member].append((role, kind, m, part.done.begin))
        span.ends[kind][m] = end
        for member in span.hosts:
            free[member] = end
        if (entry := ready(number)) is not None:
            heappush(heap, entry)
        # A neighbour is in the heap already unless exactly this pass is what it waits for.
        dependent = n + 1 if is_forward else n - 1
        if 0 <= dependent < len(chain) and chain[dependent].next() == (kind, m):
            heappush(heap, entry_of(chain[dependent], end, kind, m))
    if any(chain[n].next() is not None for chain, n in spans):
        raise ProtocolError(f"no order finishes an iteration of {layout} from {done}")
    return MappingProxyType({member: tuple(order) for member, order in orders.items()})


def _spans(layout: Layout, copy: int, hosts: Hosts, done: Finished, costs: BlockCosts | None) -> list[_Span]:
    """The spans of one copy of the model, in the order of their layers."""
    spans: list[_Span] = []
    for stage in range(layout.stages):
        first = stage * layout.pipelines + copy * layout.slices
        ranks = range(first, first + layout.slices)
        if any(done[rank] != done[first] for rank in ranks):
            raise ProtocolError(f"slices of a stage are at different places of an iteration of {layout}: {done}")
        roles, parts, blocks = tuple(layout.role(rank) for rank in ranks), done[first], layout.blocks_of(stage)
        ends = [*(part.begin for part in parts[1:]), blocks]
        for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
            members = tuple(hosts[rank][index] for rank in ranks)
            if not spans or spans[-1].hosts != members:
                spans.append(_Span(members, []))
            if costs is not None:
                cost = costs.part(stage, part.begin, end) * costs.slow(members[0])
            else:
                cost = 1 if len(parts) == 1 else (end - part.begin) / blocks
            spans[-1].parts.append(_SpanPart(roles, cost, part))
    return spans
