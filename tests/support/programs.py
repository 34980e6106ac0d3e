"""The programs of all members, played without tensors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bamboo_ds.schedule import PartProgress, RoleProgress, UseRole, finished, member_program
from bamboo_ds.topology import Plan, Role


def play(
    plan: Plan,
    micro_batches: int,
    progress: Mapping[Role, RoleProgress],
    ties: Sequence[Collection[int]] | None = None,
) -> None:
    """With blocking receives, and with passes that all slices must be in, in whatever order members go on.

    Args:
        plan, micro_batches, progress: of the programs.
        ties: stages that share weights, for each of these. Reductions block, too, where they are given; the progress
            must be settled then.

    Raises:
        AssertionError: members wait for each other for ever, a message is out of step or left, or a pass is not done
            once.
    """
    layout = plan.world
    parts = {role: [part.begin for part in progress[role].parts] for role in layout.roles}
    todo: dict[str, deque[Any]] = {}
    for member in plan.members:
        place, todo[member] = None, deque()
        for instruction in member_program(plan, member, micro_batches, progress, "none"):
            if isinstance(instruction, UseRole):
                place = instruction.role, instruction.part
            else:
                todo[member].append((place, instruction))
    sent: dict[tuple[str, Role, int], deque[int]] = defaultdict(deque)
    done: dict[tuple[str, Role, int], list[int]] = defaultdict(list)
    come: dict[Any, set[Role]] = defaultdict(set)

    def beside(role: Role, part: int, step: int) -> tuple[Role, int]:
        index = parts[role].index(part) + step
        if 0 <= index < len(parts[role]):
            return role, parts[role][index]
        other = Role(role.pipeline, role.stage + step)
        return other, parts[other][-1 if step < 0 else 0]

    def progress_of(role: Role, part: int) -> PartProgress:
        index = parts[role].index(part)
        return finished(layout, micro_batches, progress)[layout.rank(role)][index]

    def receive(key: tuple[str, Role, int], number: int) -> bool:
        if not sent[key]:
            return False
        assert sent[key].popleft() == number, f"a message to {key} is out of step"
        return True

    def compute(role: Role, part: int, instruction: Any) -> bool:
        slices = layout.slices_with(role)
        others = [(todo[plan.owner(each)], each) for each in slices if each != role]
        for queue, each in others:
            if not queue or queue[0][0] != (each, part) or repr(queue[0][1]) != repr(instruction):
                return False
        for queue, _ in others:
            queue.popleft()
        for each in slices:
            done[instruction.name, each, part].append(instruction.buffer_id)
        return True

    def reduce(key: Any, mine: Collection[Role], group: Collection[Role]) -> bool:
        """A member takes part with all of its roles of ``group`` at once."""
        for role in mine:
            sums = [part.backwards + len(done["BackwardPass", role, part.begin]) for part in progress[role].parts]
            assert set(sums) == {micro_batches}, f"the sums of {role} are not complete"
        come[key].update(mine)
        return come[key] == set(group)

    def reduce_tied(member: str, role: Role) -> bool:
        mine = sorted(each for each in plan.owned_by(member) if each.pipeline == role.pipeline)
        groups = enumerate([{Role(role.pipeline, stage) for stage in stages} for stages in ties or ()])
        shared = [(number, group) for number, group in groups if group.intersection(mine)]
        return role != mine[-1] or all(
            reduce((role.pipeline, n), group.intersection(mine), group) for n, group in shared
        )

    def reduce_copies(member: str, role: Role) -> bool:
        group = layout.siblings(role)
        mine = [each for each in group if plan.owner(each) == member]
        if ties is None or role != mine[-1] or all(progress[each].reduced for each in mine):
            return True
        return reduce(group, mine, group)

    def execute(member: str) -> bool:
        place, instruction = todo[member][0]
        name = instruction.name
        if name in ("SendChanges", "SendReplica", "SendPart"):
            sent[name[4:], getattr(instruction, "role", None) or place[0], 0].append(0)
        elif name in ("RecvChanges", "RecvReplica", "RecvPart"):
            return receive((name[4:], getattr(instruction, "role", None) or place[0], 0), 0)
        elif name in ("SendActivation", "ResendActivation"):
            sent[("F", *beside(*place, 1))].append(instruction.buffer_id)
        elif name in ("SendGrad", "ResendGrad"):
            sent[("B", *beside(*place, -1))].append(instruction.buffer_id)
        elif name == "RecvGrad" and instruction.buffer_id < progress_of(*beside(*place, 1)).since:
            assert progress_of(*place).backwards <= instruction.buffer_id
        elif name in ("RecvActivation", "RecvGrad"):
            return receive(("F" if name == "RecvActivation" else "B", *place), instruction.buffer_id)
        elif name in ("ForwardPass", "BackwardPass", "LoadMicroBatch"):
            return compute(*place, instruction)
        elif name == "ReduceTiedGrads":
            return reduce_tied(member, place[0])
        elif name == "ReduceGrads":
            return reduce_copies(member, place[0])
        return True

    def advance() -> tuple[int, int]:
        """What is left, and who has come to a reduction."""
        return sum(map(len, todo.values())), sum(map(len, come.values()))

    while any(todo.values()):
        before = advance()
        for member, queue in todo.items():
            while queue and execute(member):
                queue.popleft()
        assert advance() != before, f"nobody can go on: { ({m: q[0] for m, q in todo.items() if q}) }"
    assert not any(sent.values())
    for role in layout.roles:
        for part in progress[role].parts:
            for kind, count in (("ForwardPass", part.forwards), ("BackwardPass", part.backwards)):
                first = micro_batches if progress[role].reduced else count
                assert done[kind, role, part.begin] == list(range(first, micro_batches))
