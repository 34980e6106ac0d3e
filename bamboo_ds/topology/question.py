"""The question to the planner: the input of all that places roles and replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from .costs import Costs, Policy, Roster
from .plan import Plan
from .room import Room

#: Members with a valid copy, by rank of the role.
Holders = Mapping[int, Collection[str]]


@dataclass(frozen=True, eq=False)
class Question:
    """The input of all that places roles and replicas.

    Attributes:
        previous: the plan before, with its layout.
        roster: the members.
        costs: of the stages.
        policy: the user's wishes.
        room: what members may hold.
        holders: valid copies.
    """

    previous: Plan
    roster: Roster
    costs: Costs
    policy: Policy
    room: Room
    holders: Holders

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of a micro-batch's passes, by rank."""
        return [self.costs.time(role.stage) for role in self.previous.world.roles]

    @cached_property
    def weights(self) -> list[int]:
        """Costs of copies in comparisons, by rank."""
        return [self.costs.weight(role.stage) for role in self.previous.world.roles]

    def shadow(self, rank: int) -> str | None:
        """The present shadow of the role."""
        return self.previous.shadows[rank] if self.previous.shadows else None

    def able(self, rank: int, owner: str) -> list[str]:
        """Members with a copy that may shadow the role of ``owner``."""
        return [member for member in self.holders.get(rank, ()) if self.roster.apart(owner, member)]

    def held(self, rank: int) -> list[str]:
        """Usable members with a copy of the role: its present owner, its shadow, then the others."""
        first, order = (self.previous.owners[rank], self.shadow(rank)), self.roster.order
        found = [member for member in self.holders.get(rank, ()) if member in order]
        return sorted(found, key=lambda m: (first.index(m) if m in first else 2, order[m]))
