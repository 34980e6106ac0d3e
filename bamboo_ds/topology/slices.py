"""A plan as one plan per tensor slice, and back.

Within a slice everything is as in a job without slices: rank ``r`` of the job is rank ``r // slices`` of its slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from .costs import Candidate
from .plan import Plan

_T = TypeVar("_T")


def only(plan: Plan, number: int) -> Plan:
    """The part of ``plan`` about slice ``number`` and the members whose scripts run in it."""
    layout = plan.world
    slices = layout.slices
    if slices == 1:
        return plan
    here = [
        (member, script_rank)
        for member, script_rank in zip(plan.members, plan.script_ranks, strict=True)
        if script_rank % slices == number
    ]
    return replace(
        plan,
        layout=replace(layout, pipelines=layout.copies, slices=1),
        owners=plan.owners[number::slices],
        shadows=plan.shadows[number::slices],
        members=tuple(member for member, _ in here),
        script_ranks=tuple(script_rank // slices for _, script_rank in here),
        lost_roles=tuple(rank // slices for rank in plan.lost_roles if rank % slices == number),
        unshadowed=tuple(rank // slices for rank in plan.unshadowed if rank % slices == number),
        builders=tuple((rank // slices, member) for rank, member in plan.builders if rank % slices == number),
    )


def given_up(sliced: Plan) -> Plan:
    """The plan after ``sliced``, that of a slice that has no members any more."""
    return replace(
        sliced,
        epoch=sliced.epoch + 1,
        members=(),
        script_ranks=(),
        shadows=(None,) * len(sliced.owners),
        lost=(),
        builders=(),
        lost_roles=tuple(range(len(sliced.owners))),
        unshadowed=(),
        crowded=(),
        parked=(),
        tight=(),
        when="boundary",
    )


def merged(previous: Plan, plans: Sequence[Plan], candidates: Iterable[Candidate] = ()) -> Plan:
    """The plan whose slices are ``plans``.

    Args:
        previous: the plan before; its layout and, as long as it lives, its store's host stay.
        plans: by slice.
        candidates: in the order of their slots; default: the members of ``previous``.
    """
    layout = previous.world
    if layout.slices == 1:
        return plans[0]
    owners, shadows = (_woven([getattr(each, name) for each in plans]) for name in ("owners", "shadows"))
    script_ranks = {member.id: member.script_rank for member in candidates} or dict(
        zip(previous.members, previous.script_ranks, strict=True)
    )
    members = [member for member in script_ranks if any(member in each.members for each in plans)]
    return replace(
        plans[0],
        layout=layout,
        owners=owners,
        shadows=shadows,
        members=tuple(members),
        script_ranks=tuple(script_ranks[member] for member in members),
        lost_roles=tuple(sorted(rank * layout.slices + m for m, each in enumerate(plans) for rank in each.lost_roles)),
        unshadowed=tuple(sorted(rank * layout.slices + m for m, each in enumerate(plans) for rank in each.unshadowed)),
        crowded=tuple(member for member in members if any(member in each.crowded for each in plans)),
        parked=tuple(sorted({member for each in plans for member in each.parked})),
        tight=tuple((m, count) for m in members for each in plans for name, count in each.tight if name == m),
        builders=tuple(
            sorted((r * layout.slices + m, who) for m, each in enumerate(plans) for r, who in each.builders)
        ),
    )


def _woven(slices: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
    """The values of ``slices``, by rank of the job in place of the slice's."""
    return tuple(each for ranks in zip(*slices, strict=True) for each in ranks)
