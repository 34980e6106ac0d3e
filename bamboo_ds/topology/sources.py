"""Members that can draw the batches of a pipeline, where scripts bring their own iterators."""

from __future__ import annotations

from .plan import Plan
from .roles import Role


def ends(plan: Plan, pipeline: int) -> tuple[int, ...]:
    """Ranks of the last and of the first stage of ``pipeline``: scripts have iterators there."""
    layout = plan.world
    return tuple(layout.rank(Role(pipeline, stage)) for stage in sorted({0, layout.stages - 1}, reverse=True))


def batch_sources(plan: Plan, pipeline: int) -> tuple[str, ...]:
    """Members whose scripts have an iterator over the batches of ``pipeline``, the one that serves others first.

    These are the members at home at its ends. Best are those that also own an end, since they draw in time anyway.
    """
    at = ends(plan, pipeline)
    found = [member for end in at for member, home in zip(plan.members, plan.homes, strict=True) if home == end]
    return tuple(sorted(found, key=lambda member: all(plan.owners[end] != member for end in at)))


def hungry(plan: Plan) -> tuple[int, ...]:
    """Pipelines without data: all members at home at their ends are gone."""
    return tuple(d for d in range(plan.world.pipelines) if not batch_sources(plan, d))
