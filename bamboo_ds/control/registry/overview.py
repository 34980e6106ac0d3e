"""The overview of a job from etcd, for displays."""

from __future__ import annotations

from ...observe.view import MemberView, Overview
from ...topology.plan import Plan
from .keys import slot_of
from .mirror import Mirror
from .records import LeftRecord, MemberRecord, in_slot_order, newest


def overview(mirror: Mirror) -> Overview:
    """The job as its keys have it."""
    plan, progress = mirror.plan, mirror.progress
    listed = set() if plan is None else set(plan.members)
    members = [
        MemberView(
            id=member.id,
            slot=member.slot,
            state=state_of(member, plan, member.id in listed),
            host=member.host,
            zone=member.zone or None,
            doing=progress[member.id].doing if member.id in progress else None,
            script_rank=member.script_rank,
            address=member.address,
            pid=member.pid,
            agent_pid=member.agent_pid,
        )
        for member in in_slot_order(mirror.members.values())
    ]
    last, saved, stop = newest(progress.values()), newest(progress.values(), saved=True), mirror.stop
    return Overview(
        leader=mirror.leader,
        members=(*members, *gone(mirror)),
        plan=plan,
        step=(last.step or None) if last else None,
        global_step=last.global_step if last else None,
        checkpoint=saved.checkpoint if saved else None,
        stopping=stop.reason if stop else None,
    )


def gone(mirror: Mirror) -> list[MemberView]:
    """Members that are not registered, and of which something is left."""
    present, left, known, plan = mirror.members.keys(), mirror.left, mirror.known, mirror.plan
    # Those whose agents could not say goodbye. What they have reported is still there.
    silent = mirror.reports.keys() - present - left.keys()
    states = {member: (record.slot, ending_of(record)) for member, record in left.items() if member not in present}
    for member in silent:
        states[member] = slot_of(member), "silent" if plan and member in plan.members else "lost"
    return [
        MemberView(
            id=member,
            slot=slot,
            state=state,
            host=known[member].host if member in known else None,
            zone=(known[member].zone or None) if member in known else None,
            present=False,
        )
        for member, (slot, state) in sorted(states.items(), key=lambda pair: (pair[1][0], pair[0]))
    ]


def state_of(member: MemberRecord, plan: Plan | None, listed: bool) -> str:
    """The state of a registered member, in a word; ``listed``: ``plan`` lists it."""
    if member.state != "running":
        return member.state
    if plan is None:
        return "starting"
    if not listed:
        return "evicted"
    return "running" if plan.layout else "building"


def ending_of(left: LeftRecord) -> str:
    """The way in which a member went."""
    if left.outcome == "finished":
        return left.outcome
    return f"left ({left.detail})" if left.outcome == "left" else f"{left.outcome} ({left.reason} {left.detail})"
