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
    MemberProgress,
    PartProgress,
    RoleProgress,
    decide,
    hosts,
    not_begun,
    settle,
)
from .redundant import Placement
from .rehearsal import rehearsal_passes, rehearsal_sends
from .timing import PassTimeline, needed, timeline
