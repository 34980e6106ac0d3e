"""Programs: everything that one member does in one iteration, as a flat sequence of instructions.

::

    prologue   divided roles        SendChanges; RecvChanges
               computed roles       re-send what a receiver lost
    passes     computed, mixed      forwards and backwards in the order of compute_order; SendSums
    epilogue   divided roles        SendPart; RecvPart
               owned roles          ReduceTiedGrads; ReduceGrads
               owned and shadowed   SendReplica; RecvReplica
               the member           Commit
               owned, shadowed      OptimizerStep; StepReplica

An undisturbed iteration is the case of no progress: nothing is sent again. *Divided* is a role whose shadow computes a
part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, ReduceGrads, ReduceTiedGrads

from ..errors import ProtocolError
from ..topology import Plan, Role
from .instructions import (
    Commit,
    FillBubble,
    RecvChanges,
    RecvPart,
    RecvReplica,
    ResendActivation,
    ResendGrad,
    SendChanges,
    SendPart,
    SendReplica,
    SendSums,
    StepReplica,
    UseRole,
)
from .orders import member_order
from .progress import Finished, Hosts, RoleProgress, beginning, beside, finished, hosts
from .redundant import pass_step
from .spans import Kind
from .syncing import syncs

Program = tuple[PipeInstruction, ...]


def member_program(
    plan: Plan,
    member: str,
    micro_batches: int,
    progress: Mapping[Role, RoleProgress] | None = None,
    bubbles: bool = True,
    sync_every: int = 0,
) -> Program:
    """The program of ``member`` that finishes the current iteration from ``progress``, and steps.

    *The receiver's counters decide what is sent.* A tensor that was in flight when an epoch ended is gone,
    so role s first re-sends the tensors that its neighbours have not used yet: the activations ``f(s+1) .. f(s)-1`` and
    the gradients ``b(s-1) .. b(s)-1``. A role that was taken over re-does passes whose results its neighbours
    have used: those are not sent again. Nor is what is in sums that have come from its lost owner: its neighbours
    have used or kept that (:func:`~.settling.settle`). On every edge the messages thus are, in order and without a
    gap, the ones that the receiver waits for.

    All members must call this with equal ``plan``, ``micro_batches`` and ``progress``; then the programs
    match each other and cannot deadlock (see :func:`~.orders.compute_order`; re-sends are asynchronous like
    all sends). ``ReduceGrads`` is also there for a role that was reduced already: the engine makes it a no-op
    then, and so all members that share a reduction agree on it.

    ``FillBubble`` is left out where the sender is the member itself, since its order has the tensor ready.

    Args:
        plan: the current plan; its roles must all be held.
        member: the member, which must be in the plan.
        micro_batches: micro-batches per pipeline and iteration.
        progress: progress of every role in this iteration; ``None``: no role has begun.
        bubbles: a :class:`FillBubble` is before each receive that may wait.
        sync_every: after so many micro-batches sums of gradients are sent to whom could take over; 0: never. Members
            may differ in it.

    Returns:
        The program, which is cached: treat the instructions as immutable.

    Raises:
        ProtocolError: the plan does not list ``member``, has lost roles, or does not fit ``progress``.
        ValueError: the plan has no layout yet.
    """
    _check_member(plan, member)
    if progress is None:
        progress = beginning(plan)
    done = finished(plan.world, micro_batches, progress)
    return _member_program(plan, member, micro_batches, done, hosts(plan, progress), bubbles, sync_every)


def epilogue(plan: Plan, member: str, bubbles: bool = True, divided: Collection[Role] = ()) -> Program:
    """The part of a program from the end of the passes to the end of the iteration.

    Reductions block, so members that share several must meet them in one order: first those within pipelines, by
    pipeline, then those over pipelines, by stage; a member takes part with the last of its roles in each. All
    ``SendReplica`` come before any ``RecvReplica``, and all ``SendPart`` before any ``RecvPart``.

    Args:
        plan: the current plan.
        member: the member.
        bubbles: as in :func:`member_program`.
        divided: roles whose shadows compute a part of them in this iteration.
    """
    program: list[PipeInstruction] = []
    program += [SendPart(role) for role in plan.shadowed_by(member) if role in divided]
    for role in plan.owned_by(member):
        if role in divided:
            program += [UseRole(role), RecvPart()]
    for role in sorted(plan.owned_by(member)):
        program += [UseRole(role), ReduceTiedGrads()]
    for role in plan.owned_by(member):
        program += [UseRole(role), ReduceGrads()]
    copied = {plan.world.role(rank) for rank, _ in plan.builders}
    for role in plan.owned_by(member):
        if plan.shadow(role) is not None or role in copied:
            program += [UseRole(role), SendReplica()]
    for role in _followed(plan, member):
        if bubbles:
            program.append(FillBubble("replica", role=role))
        program.append(RecvReplica(role))
    return (*program, *commit_program(plan, member))


def commit_program(plan: Plan, member: str) -> Program:
    """The rest of an iteration whose commit all members had entered: the commit and the steps."""
    _check_member(plan, member)
    program: list[PipeInstruction] = [Commit()]
    for role in plan.owned_by(member):
        program += [UseRole(role), OptimizerStep()]
    program += [StepReplica(role) for role in _followed(plan, member)]
    return tuple(program)


def _followed(plan: Plan, member: str) -> tuple[Role, ...]:
    """Roles whose reduced gradients ``member`` receives: those that it shadows or makes a copy of, in rank order."""
    return tuple(sorted((*plan.shadowed_by(member), *plan.built_by(member)), key=plan.world.rank))


@lru_cache(maxsize=64)
def _member_program(
    plan: Plan,
    member: str,
    micro_batches: int,
    done: Finished,
    members: Hosts,
    bubbles: bool,
    sync_every: int,
) -> Program:
    """:func:`member_program` with the progress as a hashable value.

    Args:
        members: who computes each part of ``done``.
    """
    layout = plan.world
    divided = [role for rank, role in enumerate(layout.roles) if len(set(members[rank])) > 1]
    program: list[PipeInstruction] = []
    current: tuple[Role, int] | None = None

    def use(role: Role, part: int) -> None:
        nonlocal current
        if (role, part) != current:
            program.append(UseRole(role, part))
            current = role, part

    def needed(rank: int, index: int, kind: Kind) -> int:
        """First micro-batch whose result of a pass the part that it goes to still needs."""
        other = beside(layout, done, rank, index, +1 if kind == "F" else -1)
        if other is None:
            return micro_batches
        part, mine = done[other[0]][other[1]], done[rank][index]
        return part.forwards if kind == "F" else max(part.backwards, mine.since)

    for role in plan.owned_by(member):
        if role in divided:
            program += [UseRole(role), SendChanges()]
    program += [RecvChanges(role) for role in plan.shadowed_by(member) if role in divided]

    for rank, role in enumerate(layout.roles):
        for index, part in enumerate(done[rank]):
            if members[rank][index] == member:
                resends: list[PipeInstruction] = [
                    *(ResendActivation(m) for m in range(needed(rank, index, "F"), part.forwards)),
                    *(ResendGrad(m) for m in range(needed(rank, index, "B"), part.backwards)),
                ]
                if resends:
                    use(role, part.begin)
                    program += resends

    for role, kind, m, begin in member_order(layout, members, micro_batches, done, member, plan.costs, plan.tight):
        use(role, begin)
        place = layout.rank(role), int(begin > 0)
        before, after = (beside(layout, done, *place, step) for step in (-1, +1))
        source = before if kind == "F" else after
        kept = kind == "B" and source is not None and m < done[source[0]][source[1]].since
        program += pass_step(
            kind,
            m,
            first=before is None,
            last=after is None,
            bubbles=bubbles,
            send=m >= needed(*place, kind),
            local=kept or (source is not None and members[source[0]][source[1]] == member),
        )
        if kind == "B" and sync_every and (m + 1) % sync_every == 0 and m + 1 < micro_batches and syncs(plan, role):
            program.append(SendSums(m))

    return (*program, *epilogue(plan, member, bubbles, divided))


def _check_member(plan: Plan, member: str) -> None:
    if member not in plan.members:
        raise ProtocolError(f"the plan of epoch {plan.epoch} does not list member {member}: it has no program")
    if plan.lost_roles:
        raise ProtocolError(f"the plan of epoch {plan.epoch} has lost roles {plan.lost_roles}: nothing can go on")
