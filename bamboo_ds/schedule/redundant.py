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

from typing import Literal

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

from .instructions import FillBubble, RedundantForward

#: Where redundant forwards go: ``idle``, a :class:`FillBubble` before every receive, which runs them in measured idle
#: time; ``fixed``, a :class:`RedundantForward` before every ``RecvGrad``, which lengthens the iteration; ``none``.
Placement = Literal["idle", "fixed", "none"]


def forward_step(
    m: int, *, first: bool, last: bool, placement: Placement, send: bool = True, local: bool = False
) -> list[PipeInstruction]:
    """Instructions around the forward pass of micro-batch ``m``.

    Args:
        m: the micro-batch.
        first: the role is a first stage.
        last: the role is a last stage.
        placement: where redundant forwards go.
        send: the next stage still needs the output.
        local: the previous stage is on the same member, whose order has it computed by now: no bubble.
    """
    step: list[PipeInstruction] = []
    if not first:
        if placement == "idle" and not local:
            step.append(FillBubble("activation", buffer_id=m))
        step.append(RecvActivation(m))
    if first or last:
        step.append(LoadMicroBatch(m))
    step.append(ForwardPass(m))
    if send and not last:
        step.append(SendActivation(m))
    return step


def backward_step(
    m: int, *, first: bool, last: bool, placement: Placement, send: bool = True, local: bool = False
) -> list[PipeInstruction]:
    """Instructions around the backward pass of micro-batch ``m``; arguments as for :func:`forward_step`.

    ``send`` and ``local`` concern the gradient to the previous and from the next stage.
    """
    step: list[PipeInstruction] = []
    if not last:
        if placement == "idle" and not local:
            step.append(FillBubble("grad", buffer_id=m))
        elif placement == "fixed":
            step.append(RedundantForward())
        step.append(RecvGrad(m))
    step.append(BackwardPass(m))
    if send and not first:
        step.append(SendGrad(m))
    return step
