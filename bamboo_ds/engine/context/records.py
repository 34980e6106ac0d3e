"""The two records that the parts of the engine share: what holds for an epoch, and how far the job is."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...comm.agreement import Agreement
from ...devices.accelerators import HOST, name_on_host
from ...errors import UnsupportedError
from ...observe.event_base import Consumed
from ...schedule import Decision
from ...state.intervals import LossRate
from ...topology import Layout, Plan, Role
from ..stage.commit import Committed
from ..stage.layers import Changes
from ..stage.schedulers import SchedulerPosition
from .channels import Channels, Opening

if TYPE_CHECKING:
    from ...worker.job import Job


class CurrentEpoch:
    """The epoch that this member is in: its plan, and the streams between its members.

    Args:
        job: this process's job.
        layout: the logical world.
        shadow_gradients: whether gradients are also sent to shadows.
        device: that this member computes on.

    Attributes:
        session: the data plane.
        member: this member's id.
        plan, channels: those of the epoch; there are none before :meth:`enter`.
        begun: whether this member has entered an epoch.
        switch_due: all members know of a newer plan that waits for the next boundary.
        copied: all copies that the plan has made are complete with the operation under way, and the last of them is
            not before.
    """

    plan: Plan
    channels: Channels

    def __init__(self, job: Job, layout: Layout, shadow_gradients: bool, device: torch.device) -> None:
        self.job, self.layout, self._device = job, layout, device
        #: Which device this member computes on, of all those of the job; ``None`` without memory of its own.
        self.device_name: str | None = None
        if device.type != HOST.type:
            host = job.channel.host or socket.gethostname()
            self.device_name = f"{host} {name_on_host(device, os.environ)}"
        #: Members that compute on this member's device, itself among them.
        self.sharing = 1
        self.session, self.member = job.session, job.session.member
        self._shadow_gradients = shadow_gradients
        self.begun = self.switch_due = self.copied = False

    def enter(self, plan: Plan) -> None:
        """Attaches to ``plan``'s epoch and opens its channels.

        Raises:
            EpochChanged: it has ended meanwhile.
        """
        if self.begun:
            self.session.conclude()
        self.job.enter(plan)
        self.plan = plan
        self.switch_due = self.copied = False
        self.channels = Channels(plan, self.opening, self._shadow_gradients)
        self.begun = True

    @property
    def opening(self) -> Opening:
        """Opens channels of the epoch, on which what others have on their devices comes to this member's."""
        return partial(self.session.current.open, self._device)

    @property
    def agreement(self) -> Agreement:
        """The collectives of its members; raises ``EpochChanged`` if it has ended."""
        return self.session.current.agreement

    def drain(self) -> None:
        """See :meth:`~bamboo_ds.comm.epoch.Epoch.drain`."""
        self.session.current.drain()

    def note_devices(self, names: Iterable[str | None]) -> None:
        """The members of the epoch compute on these devices."""
        self.sharing = 1 if self.device_name is None else max(1, Counter(names)[self.device_name])

    @property
    def leads(self) -> bool:
        """Whether this member owns the role of rank 0, whose owner speaks for the job."""
        return self.plan.owners[0] == self.member

    def owns(self, role: Role) -> bool:
        """Whether this member computes ``role``."""
        return self.plan.owner(role) == self.member

    def shadows(self, role: Role) -> bool:
        """Whether this member holds the replica of ``role``."""
        return self.plan.shadow(role) == self.member


@dataclass
class Recovery:
    """The results of a recovery: what it has agreed on and taken over, and its times in seconds on this member's clock.

    Of several recoveries of an operation it is about the last one, with the times of all.

    Attributes:
        decision: on the interrupted operation.
        noticed: when the first of them was noticed (a plan arrived or an operation failed).
        planned: until the plan was there.
        rebuilt: from the plan until all members had agreed what to do.
        forwards_redone: passes of the roles taken over that their lost owners may have done already.
        backwards_redone: the same of backward passes.
        backwards_kept: backward passes of lost owners whose sums go on being used.
        consumed: by the newest committed step.
    """

    decision: Decision
    noticed: float
    planned: float
    rebuilt: float
    forwards_redone: int
    backwards_redone: int
    backwards_kept: int
    consumed: Consumed | None

    def after(self, before: Recovery | None) -> Recovery:
        """The same, if ``before`` was another one of the operation, which went on in between."""
        if before is None:
            return self
        planned, rebuilt = before.planned + self.planned, before.rebuilt + self.rebuilt
        return replace(self, noticed=before.noticed, planned=planned, rebuilt=rebuilt)


class ScriptPhase(Enum):
    """The script's place with respect to the job; :class:`~..joining.replay.Replay` draws how that changes."""

    #: Where the job is.
    TOGETHER = "together"
    #: Behind it, on a member that waits to be admitted.
    JOINING = "joining"
    #: Behind it, on a member that was just admitted.
    CATCHING_UP = "catching up"
    #: Before the checkpoint that the job goes on from after a restart.
    RESUMING = "resuming"


@dataclass
class OperationProgress:
    """The operation under way on this member.

    Attributes:
        committed: sum of its commit's all-reduce, decoded, of an iteration.
        paused: seconds for which this member entered other plans since the last iteration.
        entered: everything that its commit needs of this member is there.
        resumed: it was interrupted, and goes on from what there was.
        call: number and name (see :class:`~.operation.Operation`) of the operation that the script is in.
        evaluating: an evaluation runs.
        redone: of parts (by their first block) of roles taken over in it: how many forward and backward passes others
            have used the results of.
        taken_over: roles that are this member's since the last operation ended, after a loss or a planned change alike.
        recovery: the last recovery, until it is reported.
        pending: what a recovery has decided, for the operation under way or the next one.
    """

    committed: Committed | None = None
    paused: float = 0.0
    entered: bool = False
    resumed: bool = False
    call: tuple[int, str] | None = None
    evaluating: bool = False
    redone: dict[tuple[Role, int], tuple[int, int]] = field(default_factory=dict)
    taken_over: set[Role] = field(default_factory=set)
    recovery: Recovery | None = None
    pending: Decision | None = None

    @property
    def agreed(self) -> Committed:
        """The agreement of the current iteration's commit."""
        assert self.committed is not None
        return self.committed

    def check_idle(self) -> None:
        """Raises :class:`UnsupportedError` where what an operation calls of the script calls the engine."""
        if self.call is not None:
            raise UnsupportedError(
                f"the engine was called by a function that its {self.call[1]} has called: functions of "
                "bamboo_ds.for_each_stage and bamboo_ds.on_plan_change must not call the engine"
            )

    def go_on_from(self, decision: Decision) -> None:
        """The next operation begins as ``decision`` of a recovery between two operations says."""
        begun = any(done.begun for done in decision.progress.values())
        self.pending = decision if begun or decision.behind or decision.mode == "commit" else None


@dataclass
class ScriptProgress:
    """The place of this member's script, and its changes.

    Attributes:
        phase: its place with respect to the job.
        target: the number of operations that a script that is behind has to replay; ``None`` before it is known.
        sources: members that can tell what the job had done when this member was admitted, and their places.
        at_boundary: it has not gone on since the last operation.
        position: of the local role's scheduler when the iteration began.
        changed: names of parameters, buffers and numbers of the local role that it has changed since the last
            iteration began; their holders elsewhere get them with that iteration's end.
        known_changes: what the scripts had changed of all roles when the plan began.
        assigned: what it has assigned since the engine was built, as members compare it.
        told_assigned: fingerprint of the same of lost owners, by role, with the operation that they had begun.
    """

    phase: ScriptPhase = ScriptPhase.TOGETHER
    target: int | None = None
    sources: Sequence[tuple[str, str]] = ()
    at_boundary: bool = False
    position: SchedulerPosition | None = None
    changed: set[str] = field(default_factory=set)
    known_changes: dict[Role, Changes] = field(default_factory=dict)
    assigned: dict[str, str] = field(default_factory=dict)
    told_assigned: dict[Role, tuple[int, int]] = field(default_factory=dict)

    @property
    def joining(self) -> bool:
        """Whether this member waits to be admitted."""
        return self.phase is ScriptPhase.JOINING

    @property
    def behind(self) -> bool:
        """Whether the script has yet to come to where the job is."""
        return self.phase is not ScriptPhase.TOGETHER


@dataclass
class Progress:
    """The job's progress, the operation under way and the script.

    Attributes:
        seed: of the generators of passes and steps, equal on all members.
        sequence: operations (iterations, evaluations, saves) committed so far, equal on all members.
        steps: iterations committed so far.
        consumed: micro-batches of each pipeline that committed iterations have used.
        began: monotonic seconds at which this member has come to the job.
        seen: the fatal losses that the job had seen until then.
        checksums: micro-batches get checksums, by which events tell what steps have consumed; equal on all members.
        newest: what the newest committed step has consumed, with ``checksums``.
        vector: sum of the last commit all-reduce.
        operation, script: see there.
    """

    seed: int
    sequence: int = 0
    steps: int = 0
    consumed: int = field(default=0, init=False)
    began: float = field(default_factory=time.monotonic, init=False)
    seen: LossRate = field(default=LossRate(), init=False)
    checksums: bool = field(default=False, init=False)
    newest: Consumed | None = field(default=None, init=False)
    vector: tuple[float, ...] | None = field(default=None, init=False)
    operation: OperationProgress = field(default_factory=OperationProgress, init=False)
    script: ScriptProgress = field(default_factory=ScriptProgress, init=False)

    def rate(self) -> LossRate:
        """The fatal losses that the job has seen up to now."""
        return self.seen.plus(time.monotonic() - self.began, 0)

    @property
    def called(self) -> bool:
        """Whether the script is in an operation that is not finished."""
        call = self.operation.call
        return call is not None and call[0] == self.sequence

    @property
    def training(self) -> bool:
        """Whether the script is in an iteration that is not finished."""
        return self.operation.call == (self.sequence, "train_batch")

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """The body is the next operation, which the script has called as ``name``."""
        self.operation.call = self.sequence, name
        try:
            yield
        finally:
            self.operation.call = None

    def end_operation(self) -> None:
        """The operation under way is finished."""
        self.operation.entered = False
        self.operation.redone.clear()
        self.operation.taken_over.clear()
        self.sequence += 1
