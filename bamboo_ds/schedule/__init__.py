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
from .orders import compute_order
from .program import Program, commit_program, epilogue, member_program
from .progress import (
    Decision,
    Hosts,
    MemberProgress,
    PartProgress,
    RoleProgress,
    beginning,
    decide,
    hosts,
    not_begun,
    settle,
)
from .redundant import Placement
from .rehearsal import rehearsal_passes, rehearsal_sends
from .spans import Kind, Work, one_f_one_b
from .timing import PassTimeline, needed, timeline
