"""Instruction programs for the pipeline. Pure: no tensors, no I/O."""

from .instructions import (
    Awaits,
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
from .orders import compute_order
from .program import Program, commit_program, epilogue, member_program
from .progress import (
    Decision,
    Hosts,
    MemberProgress,
    PartProgress,
    RoleProgress,
    beginning,
    beside,
    decide,
    finished,
    hosts,
    not_begun,
)
from .rehearsal import rehearsal_passes, rehearsal_sends
from .settling import settle, ways
from .spans import Kind, Tight, Work, one_f_one_b
from .syncing import NETWORK_SHARE, PROCESSOR_SHARE, affordable, syncs
from .timing import PassTimeline, needed, timeline
