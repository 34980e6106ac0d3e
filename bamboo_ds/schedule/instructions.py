"""Instructions that bamboo_ds adds to DeepSpeed's pipeline instruction set.

The rest of a program (``LoadMicroBatch``, ``ForwardPass``, ``SendActivation``, ...) is DeepSpeed's own, with
one rule on top: **a buffer id is a micro-batch index**, everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.runtime.pipe.schedule import BufferOpInstruction, PipeInstruction

from ..topology import Role

#: What a :class:`FillBubble` waits for: the message that the next instruction receives.
Awaits = Literal["activation", "grad", "replica"]


class _RoleInstruction(PipeInstruction):
    """Acts on ``role``, whatever role is the current one."""

    role: Role

    def __init__(self, role: Role, **more: Any) -> None:
        super().__init__(role=role, **more)


class UseRole(_RoleInstruction):
    """All following instructions act on the runtime of ``role``; passes on its part that begins with block ``part``.

    This member owns the role, or computes that part of it as its shadow.
    """

    part: int

    def __init__(self, role: Role, part: int = 0) -> None:
        super().__init__(role, part=part)


class FillBubble(PipeInstruction):
    """Takes pending steps of replicas, and does redundant work, while the message that is received next is not there.

    Does nothing when the message is there already or nothing can be done, and never waits for the message itself: that
    is the next instruction's business.

    Attributes:
        awaits: ``"activation"`` before a ``RecvActivation``, ``"grad"`` before a ``RecvGrad``,
            ``"replica"`` before a :class:`RecvReplica`.
        buffer_id: micro-batch of the awaited activation or gradient (of the current role); ``None`` for
            a replica.
        role: the role whose replica is awaited; ``None`` otherwise.
    """

    awaits: Awaits
    buffer_id: int | None
    role: Role | None

    def __init__(self, awaits: Awaits, buffer_id: int | None = None, role: Role | None = None) -> None:
        super().__init__(awaits=awaits, buffer_id=buffer_id, role=role)


class ResendActivation(BufferOpInstruction):
    """Sends the retained output of micro-batch ``buffer_id`` of the current role to the next stage again."""

    buffer_id: int


class ResendGrad(BufferOpInstruction):
    """Sends the retained input gradient of micro-batch ``buffer_id`` to the previous stage again."""

    buffer_id: int


class SendSums(BufferOpInstruction):
    """Sends the sums of gradients up to micro-batch ``buffer_id`` to whom could take the current role or part over."""

    buffer_id: int


class SendChanges(PipeInstruction):
    """Sends what the script has changed of the current role to its shadow, which computes a part of it."""


class RecvChanges(_RoleInstruction):
    """Receives an owner's changes of ``role``, before this member computes a part of it."""


class SendPart(_RoleInstruction):
    """Sends the gradients of the part of ``role`` that this member has computed as its shadow, to its owner."""


class RecvPart(PipeInstruction):
    """Receives the gradients of the part of the current role that its shadow has computed."""


class SendReplica(PipeInstruction):
    """Sends the current role's reduced gradients to its shadow (asynchronously)."""


class RecvReplica(_RoleInstruction):
    """Receives the reduced gradients of ``role``, which this member shadows; the current role stays."""


class Commit(PipeInstruction):
    """Drains all sends, enters and completes the iteration's commit all-reduce over all owners."""


class StepReplica(_RoleInstruction):
    """Performs on the replica of ``role`` the optimizer step that its owner performs, now or when there is time."""
