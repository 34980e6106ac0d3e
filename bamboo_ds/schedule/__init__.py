"""Instruction programs for the pipeline. Pure: no tensors, no I/O."""

from .instructions import (
    Awaits,
    Commit,
    FillBubble,
    RecvChanges,
    RecvPart,
    RecvReplica,
    RedundantForward,
    ResendActivation,
    ResendGrad,
    SendChanges,
    SendPart,
    SendReplica,
    StepReplica,
    UseRole,
)
from .orders import Kind, Work, compute_order, one_f_one_b
from .program import Program, commit_program, epilogue, member_program
from .progress import (
    Decision,
    Hosts,
    MemberRecord,
    PartProgress,
    RoleProgress,
    decide,
    hosts,
    not_begun,
    settle,
)
from .redundant import Placement, RedundantTrainSchedule
from .rehearsal import rehearsal_passes, rehearsal_sends
from .timing import Timeline, timeline

__all__ = [
    "Awaits",
    "Commit",
    "Decision",
    "FillBubble",
    "Hosts",
    "Kind",
    "MemberRecord",
    "PartProgress",
    "Placement",
    "Program",
    "RecvChanges",
    "RecvPart",
    "RecvReplica",
    "RedundantForward",
    "RedundantTrainSchedule",
    "ResendActivation",
    "ResendGrad",
    "RoleProgress",
    "SendChanges",
    "SendPart",
    "SendReplica",
    "StepReplica",
    "Timeline",
    "UseRole",
    "Work",
    "commit_program",
    "compute_order",
    "decide",
    "epilogue",
    "hosts",
    "member_program",
    "not_begun",
    "one_f_one_b",
    "rehearsal_passes",
    "rehearsal_sends",
    "settle",
    "timeline",
]
