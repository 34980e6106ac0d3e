"""Changes of the plan that no loss asks for: healing, admission, rebalancing, leaving. Pure.

What the planner wants is reached in two steps. First the same owners and shadows with *builders*, which copy the state
that the planner wants them to have while training goes on. When all of them are ready, the plan itself: an exchange of
names between members that hold the state already. No step is written before all workers have entered the one before
it, so a worker never has to skip one. They enter it at a boundary between two operations; in the middle of an iteration
that takes long, where the end would come too late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...config import BambooConfig
from ...topology import (
    LONG_S,
    Candidate,
    Costs,
    Layout,
    Plan,
    Policy,
    Room,
    StageMemory,
    builders_for,
    divided,
    explain,
    holders_of,
    moves,
    predicted_s,
    settled,
    tightness_of,
    while_copying,
    without_copies,
)
from ...topology.planner import plan as best_plan
from ..registry.records import WorkerState, in_slot_order
from .actions import WritePlan
from .departures import every_rank, feeding, going, handover, needed, waits
from .view import View

#: Where roles move in the middle of an iteration: after which share of it their owners send sums, at most, and what the
#: slowest member has to do then, of what it had before.
_OFTEN, _SHORTER = 0.2, 0.8


def policy_of(layout: Layout, redundant: bool, settings: BambooConfig) -> Policy:
    """The planner's policy for a job; ``redundant``: roles have replicas."""
    topology = settings.topology
    # Who holds a stage can compute a part of it.
    divides = bool(layout.blocks)
    return Policy(
        redundant,
        divides,
        standby_replicas=settings.standby.replicas or divides,
        near_shadows=True,
        zones_apart=topology.zones_apart,
        min_gain=topology.min_gain,
    )


def ready_copies(workers: Mapping[str, WorkerState], plan: Plan) -> dict[str, tuple[int, ...]]:
    """Ranks of the complete replicas by member, as far as the members of ``plan`` have reported them."""
    return {m: workers[m].replicas for m in plan.members if m in workers}


def next_change(view: View, plan: Plan, policy: Policy) -> WritePlan | None:
    """The next plan on the way to the planner's choice; ``None``: none, or not yet."""
    if plan.layout is None or any(view.finished(member) for member in plan.members):
        return None
    entered = (view.workers.get(member) for member in plan.members)
    if any(state is None or state.epoch != plan.epoch for state in entered):
        return None
    candidates = _candidates(view, plan)
    plan = as_told(view.workers, plan)
    holders = holders_of(plan, ready_copies(view.workers, plan))
    target = _with_sources(view, plan, best_plan(plan, candidates, policy=policy, holders=holders), candidates)
    target = _able(view, target)
    joined = {c.id for c in candidates}.difference(plan.members)
    missing = moves(plan, target, holders)
    if not missing:
        same = _duties(target) == _duties(plan)
        if same and not plan.builders:
            return None
        return WritePlan(_in_time(view, plan, target), _reason(plan, target, candidates))
    rushed = handover(view, plan, candidates, holders)
    if rushed is not None:
        return WritePlan(rushed, "short of time: " + _reason(plan, rushed, candidates))
    builders = tuple(sorted(builders_for(plan, target)))
    if builders == tuple(sorted(plan.builders)) and not joined:
        return None
    members = tuple(c.id for c in candidates)
    room = Room(plan, candidates, tightness_of(plan, target))
    shadows = tuple(while_copying(plan, target, builders, room))
    meanwhile = replace(
        plan,
        shadows=shadows,
        parked=tuple(room.waiting(plan.owners, shadows)),
        tight=room.tight(plan.owners, shadows, builders),
    )
    learning = replace(
        meanwhile,
        # What owners and shadows can do meanwhile needs no copies.
        lent=divided(meanwhile, Costs(), plan.cuts, policy.min_gain),
        epoch=plan.epoch + 1,
        members=members,
        script_ranks=tuple(c.script_rank for c in candidates),
        builders=builders,
        when="boundary",
        lost=(),
    )
    return WritePlan(_in_time(view, plan, _able(view, learning)), _reason(plan, target, candidates))


def with_copies(view: View, plan: Plan, policy: Policy) -> Plan:
    """``plan``, which follows a loss, with the copies that its members can make at once.

    The state of a stage is the same throughout an iteration. So what comes next is not begun with the next iteration:
    with long ones, and frequent losses, it might never be. Copies for which members would have to give up replicas
    first wait all the same, and so do members that have yet to be admitted.
    """
    candidates = [each for each in _candidates(view, plan) if each.id in plan.members]
    if plan.lost_roles or len(candidates) < len(plan.members):
        return plan
    holders = holders_of(plan, ready_copies(view.workers, plan))
    target = best_plan(plan, candidates, policy=policy, holders=holders)
    builders = tuple(sorted(builders_for(plan, target)))
    room = Room(plan, candidates, tightness_of(plan, target))
    crowded = tuple(while_copying(plan, target, builders, room)) != plan.shadows
    tight = room.tight(plan.owners, plan.shadows, builders)
    return plan if crowded else replace(plan, builders=builders, tight=tight)


def _in_time(view: View, plan: Plan, change: Plan) -> Plan:
    """``change`` as members enter it: at the next boundary, or in the middle of a long iteration.

    That costs a second or so, and the passes that members are in. It is done where nobody leaves, and roles move only
    if that makes the iteration shorter. Who gets one goes on from sums, which are those of whole stages. Stages that
    are divided anew are so with the next iteration in any case, and so is state that is elsewhere.
    """
    states = [view.workers[member] for member in plan.members]
    if max(state.iteration_s for state in states) < LONG_S or not set(plan.members) <= set(change.members):
        return change
    alike = _duties(replace(change, lent=plan.lent, parked=plan.parked, tight=plan.tight)) == _duties(plan)
    if alike and change.builders == plan.builders:
        return change
    pairs = zip(plan.owners, change.owners, strict=True)
    moved = {rank for rank, (before, after) in enumerate(pairs) if before != after}
    now = replace(change, lent=tuple(each for each in change.lent if each.rank not in moved))
    often = all(0 < view.workers[plan.owners[rank]].sums_share <= _OFTEN for rank in moved)
    shorter = predicted_s(now, Costs()) <= _SHORTER * predicted_s(plan, Costs())
    return replace(now, when="iteration") if not moved or (often and shorter) else change


def _able(view: View, plan: Plan) -> Plan:
    """``plan`` without what is lent to shadows that have not said that they hold the stage."""
    ready = ready_copies(view.workers, plan)
    return replace(plan, lent=tuple(e for e in plan.lent if e.rank in ready.get(str(plan.shadows[e.rank]), ())))


def _duties(plan: Plan) -> tuple[Any, ...]:
    duties = plan.owners, plan.shadows, plan.members, plan.lent
    return *duties, plan.unshadowed, plan.crowded, plan.parked, plan.tight


def as_told(workers: Mapping[str, WorkerState], plan: Plan, lost: Collection[str] = ()) -> Plan:
    """``plan`` with what workers have found out of stages and replicas; not all of the ``lost`` may have told."""
    if plan.layout is None:
        return plan
    states = [workers[member] for member in plan.members if member in workers]
    plan = without_copies(plan, {state.id: state.lacked for state in states if state.epoch == plan.epoch})
    plan = replace(plan, memory=_with_passes(plan.memory, states))
    if not plan.world.blocks:
        return plan
    told = {state.id: state.seconds for state in states}
    iteration_s = max((state.iteration_s for state in states), default=0.0)
    computing = {member for role in plan.world.roles for member in plan.computers(role)}.difference(lost)
    costs = settled(plan.costs, plan.world, told, computing, iteration_s)
    return replace(plan, cuts=_known_cuts(workers, plan), costs=costs)


def _with_passes(memory: tuple[StageMemory, ...], states: Sequence[WorkerState]) -> tuple[StageMemory, ...]:
    """``memory`` with what passes keep, as far as owners have told."""
    found = []
    for number, stage in enumerate(memory):
        passes = [stage.passes, *(state.passes.get(number, 0) for state in states)]
        redundant = [stage.redundant, *(state.redundant.get(number) for state in states)]
        most = max((each for each in redundant if each is not None), default=None)
        found.append(replace(stage, passes=max(passes), redundant=most))
    return tuple(found)


def _known_cuts(workers: Mapping[str, WorkerState], plan: Plan) -> tuple[tuple[int, ...] | None, ...]:
    """Places where stages may be divided, as their owners in all pipelines have reported, once all have."""
    layout = plan.world
    found = list(plan.cuts or (None,) * layout.stages)
    for stage in range(layout.stages):
        ranks = range(stage * layout.pipelines, (stage + 1) * layout.pipelines)
        told = [cuts for rank in ranks if (cuts := _told(workers, plan, rank)) is not None]
        if () in told:
            found[stage] = ()
        elif found[stage] is None and len(told) == len(ranks):
            found[stage] = tuple(sorted(set(told[0]).intersection(*told)))
    return tuple(found)


def _told(workers: Mapping[str, WorkerState], plan: Plan, rank: int) -> tuple[int, ...] | None:
    state = workers.get(plan.owners[rank])
    return None if state is None else state.cuts.get(rank)


def _candidates(view: View, plan: Plan) -> Sequence[Candidate]:
    """The members of the plan and those that wait to be admitted, in the order of their slots."""
    inside = set(plan.members)
    records = in_slot_order(r for r in view.members.values() if r.id in inside or waits(view, plan, r))
    spare = frozenset() if every_rank(view) else {r.id for r in records if r.feeder}
    facts = view.candidates(plan, going(view, plan) | spare)
    return [facts[record.id] for record in records]


def _with_sources(view: View, plan: Plan, target: Plan, candidates: Sequence[Candidate]) -> Plan:
    """``target`` with the members that have no roles but draw batches."""
    drawing = needed(view, plan, candidates) | feeding(view, plan, candidates)
    staying = drawing.union(target.members)
    kept = [c for c in candidates if c.id in staying]
    return replace(target, members=tuple(c.id for c in kept), script_ranks=tuple(c.script_rank for c in kept))


def _reason(plan: Plan, target: Plan, candidates: Sequence[Candidate]) -> str:
    return "; ".join(explain(plan, target, candidates)) or "tidying up"


def short_of_memory(plan: Plan) -> dict[str, list[Any]]:
    """What ``plan`` has its members do or lack for want of memory: the fields of the event ``memory_short``."""
    roles = [plan.world.role(rank) for rank in plan.unshadowed]
    rests = any(stage.resting for stage in plan.memory)
    return {
        "roles": [(role.pipeline, role.stage) for role in roles],
        "members": list(plan.crowded),
        "resting": [member for member, _ in plan.tight] if rests else [],
        "under_way": [(member, count) for member, count in plan.tight if count],
    }
