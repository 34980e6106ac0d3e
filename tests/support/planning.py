"""Plans of jobs, and the way to them copy by copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from bamboo_ds.schedule import PartProgress, RoleProgress
from bamboo_ds.topology import (
    Candidate,
    Layout,
    Plan,
    Policy,
    builders_for,
    holders_of,
    initial_plan,
    moves,
    with_redundancy,
)
from bamboo_ds.topology.planner import plan as best_plan
from bamboo_ds.topology.question import Holders

#: Ranks of roles, and members that make copies of them.
Builders = tuple[tuple[int, str], ...]


def plan_of(layout: Layout, redundant: bool = True, members: Sequence[Candidate] = ()) -> Plan:
    """The first plan of ``m0``, ``m1``, ..., or of ``members``, with their roles."""
    names = [member.id for member in members] or [f"m{rank}" for rank in range(layout.size)]
    return with_redundancy(initial_plan(names[: layout.size]), layout, redundant, members)


def drawn(plan: Plan) -> str:
    """``owner/shadow`` of every role."""
    return " ".join(f"{o[1:]}/{s[1:] if s else '-'}" for o, s in zip(plan.owners, plan.shadows, strict=True))


def learning(plan: Plan, members: Sequence[Candidate], builders: Builders, **more: Any) -> Plan:
    """The plan after ``plan`` in which ``builders`` make copies."""
    names, script_ranks = tuple(member.id for member in members), tuple(member.script_rank for member in members)
    told = {"members": names, "script_ranks": script_ranks, "builders": builders, "lost": (), **more}
    return replace(plan, epoch=plan.epoch + 1, **told)


def at_rest(
    plan: Plan,
    members: list[Candidate],
    policy: Policy,
    random: Random,
    copying: Callable[[Plan, list[Candidate], Plan, Builders], Plan],
    look: Callable[[Plan, Plan, Holders], None] = lambda plan, target, holders: None,
) -> tuple[Plan, int]:
    """The plan at rest, when all copies have been made that it takes; also how many different targets that were.

    Args:
        plan: the first one.
        members: of the job; those that have left by the end are removed.
        policy: of the planner.
        random: says which copy is ready next.
        copying: makes the plan in which builders make copies, of that before, the members, the target and the builders.
        look: is shown every plan with its target and the valid copies.
    """
    ready: dict[str, list[int]] = {}
    targets = set()
    for _ in range(60):
        holders = holders_of(plan, ready)
        target = best_plan(plan, members, policy=policy, holders=holders)
        look(plan, target, holders)
        targets.add((target.owners, target.shadows))
        if not moves(plan, target, holders):
            members[:] = [member for member in members if member.id in target.members]
            if (target.owners, target.shadows, target.lent) == (plan.owners, plan.shadows, plan.lent):
                return replace(target, builders=()), len(targets)
            plan, ready = target, {}
            continue
        builders = tuple(sorted(builders_for(plan, target)))
        if builders != plan.builders:
            plan = copying(plan, members, target, builders)
            ready = {m: [rank for rank in ranks if (rank, m) in builders] for m, ranks in ready.items()}
        rank, builder = random.choice([(rank, m) for rank, m in builders if rank not in ready.get(m, ())])
        ready.setdefault(builder, []).append(rank)
    raise AssertionError(f"it does not come to rest: {plan}")


def undivided(
    forwards: int = 0, backwards: int = 0, reduced: bool = False, state_only: bool = False, since: int = 0, **held: Any
) -> RoleProgress:
    """Progress of a role that is not divided; ``held``: what its member holds besides its passes."""
    part = PartProgress(0, 1, forwards, backwards, since, **held)
    return RoleProgress((part,), reduced=reduced, state_only=state_only)
