"""The steps around each pass: 1F1B in stock order, with redundant forwards in the bubbles.

Three stages, four micro-batches, a backward as long as two forwards. ``Fm`` and ``Bm`` are the stage's own passes,
``rm`` the redundant forward of micro-batch m of the *next* stage (of stage 0 on the last one), which runs only where
the stage waits::

    stage 0   F0 F1 F2 r0 r1 r2 .. B0 B0 F3 B1 B1 r3 B2 B2 .. B3 B3
    stage 1   .. F0 F1 r0 r1 B0 B0 F2 B1 B1 F3 B2 B2 r2 B3 B3
    stage 2   r0 r1 F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

(At ``..`` a stage only waits: the next stage's inputs that exist so far are all used.) Redundant forwards delay
nothing: each begins only while the awaited message is not there. What they do not cover is left for a takeover.

Against the stock schedule: sends follow the pass that produces their tensor (ours are asynchronous, receives block, so
the stock schedule's delay of sends, which avoids a deadlock, is not needed), and there is one buffer per micro-batch,
since a takeover needs all of them until the commit.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

from .instructions import FillBubble
from .spans import Kind


def pass_step(
    kind: Kind, m: int, *, first: bool, last: bool, bubbles: bool, send: bool = True, local: bool = False
) -> list[PipeInstruction]:
    """Instructions around a pass of micro-batch ``m``.

    Args:
        kind: forward or backward.
        m: the micro-batch.
        first: the role is a first stage.
        last: the role is a last stage.
        bubbles: the member has something to do while it waits for the input.
        send: the stage that the result goes to, the next or of a backward pass the previous one, still needs it.
        local: the input is here by now, of another stage on the same member or kept from before a loss: no bubble.
    """
    forward = kind == "F"
    step: list[PipeInstruction] = []
    if not (first if forward else last):
        if bubbles and not local:
            step.append(FillBubble("activation" if forward else "grad", buffer_id=m))
        step.append(RecvActivation(m) if forward else RecvGrad(m))
    if forward and (first or last):
        step.append(LoadMicroBatch(m))
    step.append(ForwardPass(m) if forward else BackwardPass(m))
    if send and not (last if forward else first):
        step.append(SendActivation(m) if forward else SendGrad(m))
    return step
