"""Members that can draw the batches of a pipeline, where scripts bring their own iterators.

A pipeline takes its inputs from the iterator of its first stage, and its labels from that of its last stage. Where both
are *alike*, giving the same batches, one of them serves for the other. Where they are *apart* each end needs a member
whose script runs as that end.
"""

from __future__ import annotations

from .plan import Plan
from .roles import Role


def ends(plan: Plan, pipeline: int) -> tuple[int, ...]:
    """Ranks of the last and of the first stage of ``pipeline``: scripts have iterators there."""
    layout = plan.world
    return tuple(layout.rank(Role(pipeline, stage)) for stage in sorted({0, layout.stages - 1}, reverse=True))


def source_ends(plan: Plan, apart: bool) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks at the ends of pipelines: some script must run as one rank of each group.

    Args:
        plan: the plan.
        apart: whether the two ends of a pipeline are.
    """
    groups = [ends(plan, pipeline) for pipeline in range(plan.world.pipelines)]
    return tuple((rank,) for group in groups for rank in group) if apart else tuple(groups)


def end_sources(plan: Plan, *at: int) -> tuple[str, ...]:
    """Members whose scripts run as one of the ranks ``at``, ends of one pipeline; the one that serves others first.

    Best are those that also own an end, since they draw in time anyway.
    """
    found = [
        member
        for end in at
        for member, script_rank in zip(plan.members, plan.script_ranks, strict=True)
        if script_rank == end
    ]
    owners = {plan.owners[rank] for end in at for rank in ends(plan, plan.world.role(end).pipeline)}
    return tuple(sorted(found, key=lambda member: member not in owners))


def batch_sources(plan: Plan, pipeline: int) -> tuple[str, ...]:
    """Members whose scripts have an iterator over the batches of ``pipeline``, the one that serves others first."""
    return end_sources(plan, *ends(plan, pipeline))


def hungry(plan: Plan, apart: bool) -> tuple[tuple[int, ...], ...]:
    """Groups of :func:`source_ends` without data: all members whose scripts run there are gone."""
    return tuple(group for group in source_ends(plan, apart) if not set(group).intersection(plan.script_ranks))
