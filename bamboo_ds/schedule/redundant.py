"""The schedule of an undisturbed iteration: 1F1B with redundant work in its bubbles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

from ..errors import ConfigError
from .instructions import FillBubble, RedundantForward
from .orders import one_f_one_b

#: Where redundant forwards go: into measured idle time, one before every ``RecvGrad``, or nowhere.
Placement = Literal["idle", "fixed", "none"]


class RedundantTrainSchedule(TrainSchedule):
    """Forward and backward passes of one stage in stock 1F1B order, with redundant forwards in the bubbles.

    Three stages, four micro-batches, a backward as long as two forwards. ``Fm`` and ``Bm`` are the stage's
    own passes, ``rm`` the redundant forward of micro-batch m of the *next* stage (of stage 0 on the last
    one), which runs only where the stage waits::

        stage 0   F0 F1 F2 r0 r1 r2 .. B0 B0 F3 B1 B1 r3 B2 B2 .. B3 B3
        stage 1   .. F0 F1 r0 r1 B0 B0 F2 B1 B1 F3 B2 B2 r2 B3 B3
        stage 2   r0 r1 F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

    (At ``..`` a stage only waits: the next stage's inputs that exist so far are all used.)
    Redundant forwards delay nothing: each begins only while the awaited message is not there. What they
    do not cover is left for a takeover.

    Against the stock schedule: sends follow the pass that produces their tensor (ours are asynchronous,
    receives block, so the stock schedule's delay of sends, which avoids a deadlock, is not needed); one
    buffer per micro-batch, since a takeover needs all of them until the commit; and no reduction or
    optimizer step, which belong to the member and not to a role (:func:`~.program.epilogue`).

    Args:
        micro_batches: micro-batches per pipeline and iteration.
        stages: stages of the pipeline.
        stage_id: the stage to schedule.
        placement: ``"idle"`` puts a :class:`FillBubble` directly before every receive, ``"fixed"`` a
            :class:`RedundantForward` directly before every ``RecvGrad`` (for comparison: it lengthens the
            iteration), ``"none"`` nothing.

    Raises:
        ConfigError: unknown ``placement``.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, placement: Placement = "idle") -> None:
        super().__init__(micro_batches, stages, stage_id)
        check_placement(placement)
        self.placement: Placement = placement

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions around each forward or backward pass."""
        for kind, m in one_f_one_b(self.micro_batches, self.stages, self.stage_id):
            build = forward_step if kind == "F" else backward_step
            yield build(m, first=self.is_first_stage, last=self.is_last_stage, placement=self.placement)

    def num_pipe_buffers(self) -> int:
        """One buffer per micro-batch: a buffer id is a micro-batch index."""
        return int(self.micro_batches)


def check_placement(placement: str) -> None:
    """Raise :class:`ConfigError` unless ``placement`` is a :data:`Placement`."""
    if placement not in get_args(Placement):
        raise ConfigError(f"placement must be one of {', '.join(get_args(Placement))}, got {placement!r}")


def forward_step(
    m: int, *, first: bool, last: bool, placement: Placement, send: bool = True, local: bool = False
) -> list[PipeInstruction]:
    """Instructions around the forward pass of micro-batch ``m``.

    Args:
        m: the micro-batch.
        first: the role is a first stage.
        last: the role is a last stage.
        placement: see :class:`RedundantTrainSchedule`.
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
