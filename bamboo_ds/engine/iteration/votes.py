"""Votes on which of several copies of the same state is wrong: the one that most others differ from. Pure.

Without ZeRO the owners of a stage in all pipelines and their replicas hold equal parameters and optimizer state, since
all step from the same sums. A bit that flips in one of them stays there: the gradients that it spoils reach all of
them alike. With ZeRO there is no vote: only owner and replica hold a shard of the optimizer, and what a spoilt one
makes of the parameters goes to the owners of the other shards, so that most would be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...topology import Layout, Role


@dataclass(frozen=True, order=True)
class StateCopy:
    """One copy of a role's state: its owner's, or its replica."""

    role: Role
    owned: bool

    @property
    def name(self) -> str:
        """The copy's name, in words."""
        return "owner" if self.owned else "replica"


@dataclass(frozen=True)
class Judgement:
    """The outcome of the votes of all stages.

    Attributes:
        odd: copies that differ from what most copies of their stage have.
        right: what these have, by role.
        split: roles of several pipelines of which no state is that of most, and not all have the same.
    """

    odd: tuple[StateCopy, ...] = ()
    right: Mapping[Role, int] = field(default_factory=dict)
    split: tuple[Role, ...] = ()

    @property
    def decided(self) -> frozenset[Role]:
        """Roles of which it is known which copy is wrong."""
        return frozenset(copy.role for copy in self.odd)


def judge(layout: Layout, held: Mapping[StateCopy, int]) -> Judgement:
    """The judgement of copies with these checksums, all of the same step.

    The state is right that more copies have than any other, and at least two.
    """
    odd: list[StateCopy] = []
    right: dict[Role, int] = {}
    split: list[Role] = []
    for first in layout.roles:
        siblings = layout.siblings(first)
        if first != siblings[0] or not layout.alike:
            continue
        votes = {copy: value for copy, value in held.items() if copy.role in siblings}
        (value, most), *others = Counter(votes.values()).most_common() or [(0, 0)]
        if not others:
            continue
        if most > others[0][1]:
            odd += [copy for copy, own in votes.items() if own != value]
            right.update((role, value) for role in siblings)
        elif len(voters := sorted({copy.role for copy in votes})) > 1:
            split += voters
    return Judgement(tuple(sorted(odd)), right, tuple(split))
