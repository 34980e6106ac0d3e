"""The passes of a rehearsed takeover: without a loss, every shadow computes its stage once more.

The instructions are those of a resumed iteration: the neighbours of the stage re-send the tensors that its owner has
used, and the replica runs the missing forwards and all backwards.
"""

from __future__ import annotations

from collections.abc import Collection

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ..topology import Layout, Plan, Role
from .instructions import ResendActivation, ResendGrad, UseRole
from .program import Program
from .redundant import pass_step
from .spans import one_f_one_b


def rehearsal_sends(plan: Plan, member: str, roles: Collection[Role], micro_batches: int) -> Program:
    """Re-sends of ``member`` with which the shadows can compute ``roles``."""
    layout = plan.world
    program: list[PipeInstruction] = []
    for own in plan.owned_by(member):
        program.append(UseRole(own))
        if own.stage < layout.stages - 1 and layout.successor(own) in roles:
            program += [ResendActivation(m) for m in range(micro_batches)]
        if own.stage > 0 and layout.predecessor(own) in roles:
            program += [ResendGrad(m) for m in range(micro_batches)]
    return tuple(program)


def rehearsal_passes(layout: Layout, role: Role, micro_batches: int, forwards: int, backwards: int) -> Program:
    """Passes of the replica of ``role``, which has done ``forwards`` and ``backwards`` redundantly."""
    first, last = role.stage == 0, role.stage == layout.stages - 1
    program: list[PipeInstruction] = [UseRole(role)]
    for kind, m in one_f_one_b(micro_batches, layout.stages - role.stage):
        if m >= (forwards if kind == "F" else backwards):
            program += pass_step(kind, m, first=first, last=last, bubbles=False, send=False)
    return tuple(program)
