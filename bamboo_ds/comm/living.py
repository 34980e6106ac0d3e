"""Collectives of a script, by the ranks that its processes run as: among those of the group's ranks that live.

An operation of the engine concerns roles, and a member that owns several stands for all of them. A script's own
collective concerns processes: each runs as one rank, its *home*, and what it passes is of that rank alone. Several
members may run as one rank (a standby does so beside the member that it could replace): the first of them in the plan
*represents* the rank, the others get the results and contribute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..topology import Plan
from .c10d import dist, registry
from .cohosted import Cohosted
from .inner import Pending, Several

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Living:
    """Who takes part in the script's collectives of one group.

    Attributes:
        members: all processes that call them, in the plan's order.
        of_rank: for each of the group's ranks the member that represents it; ``None``: no process runs as that rank.
        hosts: the same, but for a lost rank who stands in for it: the owner of its role if that takes part, else the
            first member.
    """

    members: tuple[str, ...]
    of_rank: tuple[str | None, ...]
    hosts: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every rank has a process, and no other one takes part."""
        return len(self.members) == len(self.of_rank) and self.members == self.of_rank


def living(plan: Plan, ranks: Sequence[int], absent: Collection[str] = ()) -> Living:
    """Who takes part in the collectives of the group of ``ranks``; nobody in ``absent`` does."""
    callers = {m: h for m, h in zip(plan.members, plan.homes, strict=True) if h in ranks and m not in absent}
    first: dict[int, str] = {}
    for member, home in callers.items():
        first.setdefault(home, member)
    members = tuple(callers)

    def stands_in(rank: int) -> str:
        owner = plan.owners[rank]
        return first.get(rank) or (owner if owner in callers else members[0])

    # In the order of the ranks, where that is possible: sums then have the order that they have without a loss.
    order = {rank: position for position, rank in enumerate(ranks)}
    members = tuple(sorted(members, key=lambda m: (first[callers[m]] != m, order[callers[m]])))
    hosts = tuple(stands_in(rank) for rank in ranks) if members else ()
    return Living(members, tuple(first.get(rank) for rank in ranks), hosts)


class LivingGroup(Cohosted):
    """Translates a script's collectives over the ranks of a group to collectives of ``inner``.

    Args:
        inner: group with one rank for each of ``group.members``.
        group: who takes part.
        member: this one.
        rank: position in the group of the rank that it runs as.
    """

    def __init__(self, inner: Any, group: Living, member: str, rank: int) -> None:
        super().__init__(inner, [group.members.index(host) for host in group.hosts], rank)
        self._members = len(group.members)
        self._me = group.members.index(member)
        self._living = sum(of is not None for of in group.of_rank)
        self._represents = group.of_rank[rank] == member
        self._of_rank = group.of_rank

    def _reducing(self, options: Any, tensors: Tensors) -> Callable[[], None] | None:
        average = options.reduceOp == dist.ReduceOp.AVG
        if average:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        if not self._represents:
            for tensor in tensors:
                tensor.fill_(neutral(options.reduceOp, tensor.dtype))
        if not average:
            return None

        def divide() -> None:
            for tensor in tensors:
                tensor.div_(self._living)

        return divide

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce for all; whoever does not run as the root keeps what it has passed."""
        before = [tensor.clone() for tensor in tensors]
        options = registry.AllreduceOptions()
        options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        work, divide = self.allreduce(tensors, options)

        def finish() -> None:
            if divide is not None:
                divide()
            if opts.rootRank != self._rank:
                for tensor, old in zip(tensors, before, strict=True):
                    tensor.copy_(old)

        return work, finish

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Gather for all; who has passed outputs gets them."""
        options = registry.AllgatherOptions()
        options.timeout = opts.timeout
        whole = outputs or [[torch.empty_like(inputs[0]) for _ in self._hosts]]
        return self.allgather(whole, inputs, options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        """From the process that represents the root; nothing if there is none."""
        if self._of_rank[opts.rootRank] is None:
            return Several([]), None
        root, output = self._hosts[opts.rootRank], outputs[0]
        if root == self._me:
            whole = torch.stack([part.reshape(output.shape) for part in inputs[0]])
        else:
            whole = output.new_empty((len(self._hosts), *output.shape))
        options = registry.BroadcastOptions()
        options.rootRank, options.timeout = root, opts.timeout

        def finish() -> None:
            output.copy_(whole[self._rank])

        return self._inner.broadcast([whole], options), finish


def neutral(operator: Any, dtype: torch.dtype) -> Any:
    """What a process contributes to a reduction that must not change it."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else None if dtype is torch.bool else torch.iinfo(dtype)
    if operator == dist.ReduceOp.MAX:
        return False if limits is None else -torch.inf if dtype.is_floating_point else limits.min
    if operator == dist.ReduceOp.MIN:
        return True if limits is None else torch.inf if dtype.is_floating_point else limits.max
    if operator == dist.ReduceOp.PRODUCT:
        return 1
    if operator == dist.ReduceOp.BAND:
        return True if limits is None else -1 if dtype.is_signed else limits.max
    return 0
