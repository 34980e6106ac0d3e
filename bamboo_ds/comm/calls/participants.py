"""The members that take part in the collectives of a group of logical ranks.

An operation of the engine concerns roles: the owners of the ranks take part, and one that owns several stands for all
of them. A script's own collective concerns processes: each runs as one rank, its *local rank*, and what it passes is of
that rank alone. Several members may run as one rank (a standby does so beside the member that it could replace): the
first of them in the plan *represents* the rank, the others get the results and contribute nothing. A lost rank has no
process: its *host* contributes what it passes itself once more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...errors import PeerLost
from ...topology import Plan


@dataclass(frozen=True)
class Participants:
    """The members that take part in the collectives of one group.

    Attributes:
        members: all processes that call them, in the order of their ranks in the inner group.
        of_rank: for each of the group's ranks the member that represents it, or ``None`` if there is no process.
        hosts: the same, but for a lost rank the member that stands in for it: the owner of its role if that takes part,
            else the first member.
        by_role: a member stands for all of its roles; else only for the rank that it runs as.
    """

    members: tuple[str, ...]
    of_rank: tuple[str | None, ...]
    hosts: tuple[str, ...]
    by_role: bool = False

    @property
    def complete(self) -> bool:
        """Whether every rank has a process, and no other one takes part."""
        return self.members == self.of_rank

    def speaks(self, member: str, rank: int) -> bool:
        """Whether ``member``, which calls as rank ``rank`` of the group, is the one that contributes its part."""
        return self.by_role or self.of_rank[rank] == member


def owning(plan: Plan, ranks: Sequence[int]) -> Participants:
    """The owners of the roles ``ranks``."""
    owners = tuple(plan.owners[rank] for rank in ranks)
    return Participants(tuple(dict.fromkeys(owners)), owners, owners, by_role=True)


def founding(plan: Plan, ranks: Sequence[int], of_rank: Mapping[int, str]) -> Participants:
    """The processes that have been ``of_rank`` from the beginning, each for its own rank.

    Raises:
        PeerLost: ``plan`` has one of them no more.
    """
    missing = [rank for rank in ranks if of_rank.get(rank) not in plan.members]
    if missing:
        raise PeerLost(f"epoch {plan.epoch}: the processes of ranks {missing} are gone")
    members = tuple(of_rank[rank] for rank in ranks)
    return Participants(members, members, members)


def surviving(plan: Plan, ranks: Sequence[int], absent: Collection[str] = ()) -> Participants:
    """The processes that run as ``ranks``; none in ``absent`` takes part."""
    callers = {m: h for m, h in zip(plan.members, plan.script_ranks, strict=True) if h in ranks and m not in absent}
    first: dict[int, str] = {}
    for member, script_rank in callers.items():
        first.setdefault(script_rank, member)
    members = tuple(callers)

    def stands_in(rank: int) -> str:
        owner = plan.owners[rank]
        return first.get(rank) or (owner if owner in callers else members[0])

    # In the order of the ranks, where that is possible: sums then have the order that they have without a loss.
    order = {rank: position for position, rank in enumerate(ranks)}
    members = tuple(sorted(members, key=lambda m: (first[callers[m]] != m, order[callers[m]])))
    hosts = tuple(stands_in(rank) for rank in ranks) if members else ()
    return Participants(members, tuple(first.get(rank) for rank in ranks), hosts)
