"""Holders of state, and the copies between members that a new plan needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from .costs import Costs
from .plan import Plan
from .question import Holders


@dataclass(frozen=True)
class Move:
    """A copy of a role's state.

    Attributes:
        rank: rank of the role.
        source: a member with a valid copy.
        destination: the member that needs one.
        bytes: size of the state; 0 where unknown.
    """

    rank: int
    source: str
    destination: str
    bytes: int


def holders_of(plan: Plan, ready: Mapping[str, Collection[int]] | None = None) -> dict[int, frozenset[str]]:
    """The members of ``plan`` with a valid copy, by rank of the role.

    Args:
        plan: the newest written plan.
        ready: ranks of the roles that builders have reported ready, by member. Builders that the plan does not
            list have stopped following and do not count.
    """
    alive = frozenset(plan.members)
    found: dict[int, set[str | None]] = {}
    for rank, owner in enumerate(plan.owners):
        found[rank] = {None if rank in plan.lost_roles else owner, plan.shadows[rank] if plan.shadows else None}
    for rank, builder in plan.builders:
        if ready and rank in ready.get(builder, ()):
            found[rank].add(builder)
    return {rank: frozenset(m for m in members if m in alive) for rank, members in found.items()}


def without_copies(plan: Plan, lacking: Mapping[str, Collection[int]]) -> Plan:
    """``plan`` as its members go by it: shadows that have no replica of their role make one, as builders do.

    Args:
        plan: the newest written plan.
        lacking: ranks of roles whose replica members had not when they entered it, by member.
    """
    bare = {r: s for r, s in enumerate(plan.shadows) if s is not None and r in lacking.get(s, ())}
    if not bare:
        return plan
    return replace(
        plan,
        shadows=tuple(None if rank in bare else shadow for rank, shadow in enumerate(plan.shadows)),
        builders=tuple(sorted({*plan.builders, *bare.items()})),
        lent=tuple(each for each in plan.lent if each.rank not in bare),
    )


def builders_for(old: Plan, new: Plan) -> tuple[tuple[int, str], ...]:
    """The builders, as (rank, member), of the boundary plan that leads from ``old`` to the target ``new``.

    Every member that ``new`` names as owner or shadow of a role and ``old`` as neither: the destinations of
    :func:`moves`, and builders that are ready already, which have to go on following until the switch.
    """
    pairs = []
    for rank, owner in enumerate(new.owners):
        present = {old.owners[rank] if rank not in old.lost_roles else None, old.shadows[rank] if old.shadows else None}
        wanted = dict.fromkeys((owner, new.shadows[rank] if new.shadows else None))
        pairs += [(rank, member) for member in wanted if member is not None and member not in present]
    return tuple(pairs)


def moves(old: Plan, new: Plan, holders: Holders, costs: Costs | None = None) -> tuple[Move, ...]:
    """The copies that must be complete before ``new`` may follow ``old``, in rank order.

    Args:
        old: the plan that is in force.
        new: the target.
        holders: valid copies by rank, see :func:`holders_of`.
        costs: for the sizes.

    Sources are spread: each copy comes from the living holder that has least to send so far; of equals a shadow
    or builder goes before the owner, which has more to do. A role without a living holder has no moves: its rank
    is in ``new.lost_roles``.
    """
    costs = costs or Costs()
    alive = frozenset(old.members) | frozenset(new.members)
    order = {member: position for position, member in enumerate(dict.fromkeys(old.members + new.members))}
    sent: dict[str, int] = dict.fromkeys(order, 0)
    found = []
    for rank, role in enumerate(new.world.roles):
        sources = sorted((m for m in holders.get(rank, ()) if m in alive), key=lambda m: order[m])
        wanted = (new.owners[rank], new.shadows[rank] if new.shadows else None)
        for destination in wanted:
            if destination is None or destination in sources or not sources:
                continue
            source = min(sources, key=lambda m: (sent[m], m == old.owners[rank]))
            sent[source] += costs.weight(role.stage)
            found.append(Move(rank, source, destination, costs.size(role.stage)))
    return tuple(found)
