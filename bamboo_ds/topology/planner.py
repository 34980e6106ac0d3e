"""The planner: pure functions from one plan to the next.

A job with four stages, one pipeline and members ``a b c d``; ``x/y`` is owner/shadow::

                       stage 0   stage 1   stage 2   stage 3
    initial_plan         a/-       b/-       c/-       d/-
    with_redundancy      a/d       b/a       c/b       d/c
    takeover {c}         a/d       b/a       b/-       d/-
    takeover {a}         d/-       b/-       b/-       d/-
    takeover {b}         d/-       unheld    unheld    d/-

Equal arguments give equal plans, so any agent that becomes leader writes the plan its predecessor would have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import ConfigError
from .plan import Plan
from .roles import Layout


def initial_plan(members: Sequence[str]) -> Plan:
    """The plan of epoch 1: ``members[rank]`` owns the role of that rank, nobody shadows.

    Args:
        members: member ids in slot order, one per rank.

    Raises:
        ConfigError: ``members`` is empty or names a member twice.
    """
    owners = tuple(members)
    if not owners:
        raise ConfigError("a job needs at least one member, got none")
    if len(set(owners)) != len(owners):
        raise ConfigError(f"member ids must be unique, got {', '.join(owners)}: give each slot its own id")
    return Plan(epoch=1, owners=owners, members=owners, store_host=owners[0])


def with_redundancy(plan: Plan, layout: Layout, redundant: bool) -> Plan:
    """The plan after ``plan`` in which the roles are known and, if ``redundant``, shadowed.

    A role's shadow is the owner of its predecessor in the pipeline: that member computes the role's inputs,
    so redundant forward passes need no message. Stage 0 is shadowed by the owner of the last stage, which
    loads the same batches. Where that would be the owner itself (one stage) the role has no shadow.

    Raises:
        ConfigError: ``layout`` has another number of roles than the plan has owners.
    """
    if layout.size != len(plan.owners):
        raise ConfigError(
            f"{layout.pipelines} pipelines x {layout.stages} stages need {layout.size} workers, "
            f"the job has {len(plan.owners)}: start it with -n {layout.size} or change the number of stages"
        )
    alive = frozenset(plan.members)
    shadows: list[str | None] = []
    for role in layout.roles:
        owner = plan.owners[layout.rank(role)]
        candidate = plan.owners[layout.rank(layout.predecessor(role))]
        shadows.append(candidate if redundant and candidate != owner and candidate in alive else None)
    return replace(plan, epoch=plan.epoch + 1, layout=layout, shadows=tuple(shadows), lost=())


def takeover(plan: Plan, lost: Collection[str]) -> Plan:
    """The plan after the loss of ``lost``: each of their roles goes to its shadow.

    A role whose owner and shadow are both gone keeps its last owner's name and its rank is listed in
    ``unheld``: a fatal loss, which the caller has to report. Before the layout is known nobody shadows, so
    every role of a lost member is unheld. Nothing else moves: a surviving owner keeps all its roles. Names
    that the plan does not list are ignored (they are gone already); with nobody lost the result is the same
    topology in a new epoch.
    """
    members = tuple(m for m in plan.members if m not in lost)
    alive = frozenset(members)
    owners: list[str] = []
    shadows: list[str | None] = []
    unheld: list[int] = []
    for rank, owner in enumerate(plan.owners):
        shadow = plan.shadows[rank] if plan.shadows else None
        if shadow not in alive:
            shadow = None
        if owner not in alive:
            if shadow is None:
                unheld.append(rank)
            else:
                owner, shadow = shadow, None
        owners.append(owner)
        shadows.append(shadow)
    host = plan.store_host
    if host not in alive:
        host = next((owner for owner in owners if owner in alive), host)
    return replace(
        plan,
        epoch=plan.epoch + 1,
        owners=tuple(owners),
        members=members,
        store_host=host,
        shadows=tuple(shadows) if plan.shadows else (),
        lost=tuple(m for m in plan.members if m in lost),
        unheld=tuple(unheld),
    )
