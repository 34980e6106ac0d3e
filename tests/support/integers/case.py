"""Jobs on integers, and the plans that they begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Literal

from bamboo_ds.topology import Layout, Lent, Plan, initial_plan, with_redundancy


class Fatal(Exception):
    """A role has no holder left."""


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        ties: stages that share weights, by set.
        every: after so many micro-batches sums are sent; 0: never.
        mode: of redundancy: no replicas; replicas; these compute redundant forward passes; backward passes, too.
        lends: shadows compute parts of roles, which are drawn.
        sharded: optimizers are partitioned over the pipelines, so that no role can be cloned.
        copies: members make their first copies when the job begins, each for itself.
        differs: replicas may be found to differ from their owners.
        standby: a member without roles holds some of the replicas.
        long: iterations are long: copies that have arrived serve in the middle of one.
        tight: some members have few micro-batches under way; how many is drawn, anew with each plan.
    """

    pipelines: int
    stages: int
    micro_batches: int
    slices: int = 1
    iterations: int = 2
    blocks: int = 4
    ties: tuple[frozenset[int], ...] = ()
    every: int = 0
    mode: Literal["none", "lazy", "eager", "eager-brc"] = "eager"
    lends: bool = False
    sharded: bool = False
    copies: bool = False
    differs: bool = False
    standby: bool = False
    long: bool = False
    tight: bool = False

    @property
    def layout(self) -> Layout:
        """The logical world."""
        blocks = (self.blocks,) * self.stages if self.lends else ()
        return Layout(self.pipelines, self.stages, self.sharded, self.slices, blocks)

    @property
    def tied(self) -> frozenset[int]:
        """Stages that share weights."""
        return frozenset().union(*self.ties)

    @property
    def eager(self) -> bool:
        """Whether replicas compute redundantly."""
        return self.mode in ("eager", "eager-brc")


@lru_cache(maxsize=64)
def first_plan(case: Case, draw: int) -> Plan:
    """The plan that a job begins with, of those that are drawn."""
    random, layout = Random(draw), case.layout
    plan = with_redundancy(initial_plan([f"m{rank}" for rank in range(layout.size)]), layout, case.mode != "none")
    if case.standby and any(plan.shadows):
        script_rank = random.randrange(layout.size)
        mine = [rank for rank in range(layout.size) if rank % layout.slices == script_rank % layout.slices]
        shadows = ["s0" if rank in mine and random.random() < 0.6 else each for rank, each in enumerate(plan.shadows)]
        members, script_ranks = (*plan.members, "s0"), (*plan.script_ranks, script_rank)
        plan = replace(plan, shadows=tuple(shadows), members=members, script_ranks=script_ranks)
    return tight(lent(plan, case, random), case, random)


def tight(plan: Plan, case: Case, random: Random) -> Plan:
    """``plan`` with counts of micro-batches for some members."""
    if not case.tight:
        return plan
    counts = {member: random.choice((0, 1, 1, 2)) for member in plan.members if random.random() < 0.6}
    return replace(plan, tight=tuple(counts.items()))


def lent(plan: Plan, case: Case, random: Random) -> Plan:
    """``plan`` with parts of some roles for their shadows."""
    if not case.lends:
        return replace(plan, lent=())
    parts = [
        Lent(rank, random.randrange(1, case.blocks), random.choice(["front", "rear"]))
        for rank, shadow in enumerate(plan.shadows)
        if shadow is not None and random.random() < 0.4
    ]
    return replace(plan, lent=tuple(parts))
