"""Instruction programs for the pipeline. Pure: no tensors, no I/O."""

from .instructions import (
    Awaits,
    Commit,
    FillBubble,
    RecvReplica,
    RedundantForward,
    ResendActivation,
    ResendGrad,
    SendReplica,
    StepReplica,
    UseRole,
)
from .orders import Kind, Work, compute_order, one_f_one_b
from .program import Program, commit_program, epilogue, member_program
from .progress import Decision, MemberRecord, RoleProgress, decide, settle
from .redundant import Placement, RedundantTrainSchedule
from .rehearsal import rehearsal_passes, rehearsal_sends

__all__ = [
    "Awaits",
    "Commit",
    "Decision",
    "FillBubble",
    "Kind",
    "MemberRecord",
    "Placement",
    "Program",
    "RecvReplica",
    "RedundantForward",
    "RedundantTrainSchedule",
    "ResendActivation",
    "ResendGrad",
    "RoleProgress",
    "SendReplica",
    "StepReplica",
    "UseRole",
    "Work",
    "commit_program",
    "compute_order",
    "decide",
    "epilogue",
    "member_program",
    "one_f_one_b",
    "rehearsal_passes",
    "rehearsal_sends",
    "settle",
]
