"""Plans of jobs, the way to them copy by copy, and what members do by their programs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from bamboo_ds.schedule import RoleProgress, member_program
from bamboo_ds.topology import (
    Candidate,
    Layout,
    Plan,
    Policy,
    Role,
    holders_of,
    initial_plan,
    learners_for,
    moves,
    with_redundancy,
)
from bamboo_ds.topology.planner import plan as best_plan
from bamboo_ds.topology.question import Holders

#: Ranks of roles, and members that make copies of them.
Learners = tuple[tuple[int, str], ...]
#: Passes that the slices of a stage do together.
_JOINT = ("LoadMicroBatch", "ForwardPass", "BackwardPass")


def plan_of(layout: Layout, redundant: bool = True, members: Sequence[Candidate] = ()) -> Plan:
    """The first plan of ``m0``, ``m1``, ..., or of ``members``, with their roles."""
    names = [member.id for member in members] or [f"m{rank}" for rank in range(layout.size)]
    return with_redundancy(initial_plan(names[: layout.size]), layout, redundant, members)


def drawn(plan: Plan) -> str:
    """``owner/shadow`` of every role."""
    return " ".join(f"{o[1:]}/{s[1:] if s else '-'}" for o, s in zip(plan.owners, plan.shadows, strict=True))


def learning(plan: Plan, members: Sequence[Candidate], learners: Learners, **more: Any) -> Plan:
    """The plan after ``plan`` in which ``learners`` make copies."""
    names, homes = tuple(member.id for member in members), tuple(member.home for member in members)
    told = {"members": names, "homes": homes, "learners": learners, "lost": (), **more}
    return replace(plan, epoch=plan.epoch + 1, **told)


def at_rest(
    plan: Plan,
    members: list[Candidate],
    policy: Policy,
    random: Random,
    copying: Callable[[Plan, list[Candidate], Plan, Learners], Plan],
    look: Callable[[Plan, Plan, Holders], None] = lambda plan, target, holders: None,
) -> tuple[Plan, int]:
    """The plan at rest, when all copies have been made that it takes; also how many different targets that were.

    Args:
        plan: the first one.
        members: of the job; those that have left by the end are removed.
        policy: of the planner.
        random: says which copy is ready next.
        copying: makes the plan in which learners make copies, of that before, the members, the target and the learners.
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
                return replace(target, learners=()), len(targets)
            plan, ready = target, {}
            continue
        learners = tuple(sorted(learners_for(plan, target)))
        if learners != plan.learners:
            plan = copying(plan, members, target, learners)
            ready = {m: [rank for rank in ranks if (rank, m) in learners] for m, ranks in ready.items()}
        rank, learner = random.choice([(rank, m) for rank, m in learners if rank not in ready.get(m, ())])
        ready.setdefault(learner, []).append(rank)
    raise AssertionError(f"it does not come to rest: {plan}")


def execute(plan: Plan, micro_batches: int, progress: Mapping[Role, RoleProgress]) -> None:
    """Execute the programs of all members from ``progress``, in whatever order they can go on.

    Receives block, and passes wait for all slices of their stage. Every message is received, in the order in which it
    was sent, and every pass is done once.
    """
    layout = plan.world
    todo = {m: deque(member_program(plan, m, micro_batches, progress, "none")) for m in plan.members}
    current: dict[str, tuple[Role, int]] = {}
    sent: dict[tuple[str, Role, int], deque[int]] = defaultdict(deque)
    done: dict[tuple[str, Role, int], list[int]] = defaultdict(list)
    parts = {role: [part.begin for part in progress[role].parts] for role in layout.roles}

    def beside(role: Role, part: int, step: int) -> tuple[Role, int]:
        index = parts[role].index(part) + step
        if 0 <= index < len(parts[role]):
            return role, parts[role][index]
        other = Role(role.pipeline, role.stage + step)
        return other, parts[other][-1 if step < 0 else 0]

    def together(member: str) -> list[str]:
        """The members that do the next instruction of ``member`` together; none if not all are there yet."""
        instruction = todo[member][0]
        if layout.slices == 1 or instruction.name not in _JOINT:
            return [member]
        role, part = current[member]
        owners = {plan.owner(other): other for other in layout.slices_with(role)}
        there = [m for m in owners if todo[m] and repr(todo[m][0]) == repr(instruction)]
        whole = len(there) == len(owners) and all(current.get(m) == (other, part) for m, other in owners.items())
        return there if whole else []

    def execute_one(member: str) -> bool:
        instruction = todo[member][0]
        name, role = instruction.name, getattr(instruction, "role", None)
        if name == "UseRole":
            current[member] = instruction.role, instruction.part
        elif name in ("SendChanges", "SendReplica"):
            sent[name[4:], current[member][0], 0].append(0)
        elif name == "SendPart":
            sent["Part", instruction.role, 0].append(0)
        elif name in ("RecvChanges", "RecvPart", "RecvReplica"):
            queue = sent[name[4:], role or current[member][0], 0]
            if not queue:
                return False
            queue.popleft()
        elif name in ("SendActivation", "ResendActivation", "SendGrad", "ResendGrad"):
            forward = name.endswith("Activation")
            target = beside(*current[member], +1 if forward else -1)
            sent[("F" if forward else "B", *target)].append(instruction.buffer_id)
        elif name in ("RecvActivation", "RecvGrad"):
            queue = sent[("F" if name == "RecvActivation" else "B", *current[member])]
            if not queue:
                return False
            assert queue.popleft() == instruction.buffer_id
        elif name in ("ForwardPass", "BackwardPass"):
            done[(name[0], *current[member])].append(instruction.buffer_id)
        return True

    while any(todo.values()):
        moved = False
        for member, queue in todo.items():
            while queue and (able := together(member)) and all(map(execute_one, able)):
                for each in able:
                    todo[each].popleft()
                moved = True
        assert moved, f"nobody can go on: { ({m: q[0] for m, q in todo.items() if q}) }"
    assert not any(sent.values())
    for role in layout.roles:
        for part in progress[role].parts:
            for kind, count in (("F", part.forwards), ("B", part.backwards)):
                first = micro_batches if progress[role].reduced else count
                assert done[kind, role, part.begin] == list(range(first, micro_batches))
