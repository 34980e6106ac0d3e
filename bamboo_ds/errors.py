"""Every exception that bamboo_ds raises, one type per kind of failure.

All derive from :class:`BambooError`. Messages name the setting or member at fault, what was found and
what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

#: Exit code of a worker whose job suffered a fatal loss (see :class:`FatalLoss`).
EXIT_FATAL_LOSS = 86
#: Exit code of a worker that the plan no longer lists, or may not list (see :class:`Evicted`, :class:`Isolated`),
#: or whose device cannot be trusted any more (see :class:`AbortFailed`).
EXIT_EVICTED = 87
#: Exit code of a worker that has handed over what it had (see :class:`Left`).
EXIT_LEFT = 88
#: Exit code of ``bamboo join`` if the job has ended, but not finished (see :class:`JobOver`).
EXIT_OVER = 89
#: Exit code of a worker whose device has failed (see :mod:`.devices.errors`).
EXIT_DEVICE = 90
#: Exit code of a worker that holds wrong state (see :class:`Corrupt`).
EXIT_CORRUPT = 91
#: Of a job that a user has ended, by a command or on its page: as if by SIGTERM.
EXIT_STOPPED = 143


class BambooError(Exception):
    """Base class of all errors of this package."""


class UserError(BambooError):
    """Unusable input of a user; the message says what to do. Workers show it without frames of packages.

    Attributes:
        told_by: the member that has told of it, where all raise the same.
    """

    told_by: str | None = None


class ConfigError(UserError, ValueError):
    """A setting is wrong. Raised before any process group or etcd key exists."""


class UnsupportedError(ConfigError):
    """The job uses a DeepSpeed feature that bamboo_ds does not support (yet)."""


class EpochChanged(BambooError, RuntimeError):
    """The current epoch ended while an operation was in flight or about to start.

    Raised by every operation of the ``bamboo`` process groups and of channels from the
    moment on that the epoch is aborted, until the next one is attached. ``train_batch``, ``eval_batch``
    and ``save_checkpoint`` absorb it.
    """


class PeerLost(EpochChanged):
    """An operation towards ``member`` failed before the control plane told of a new plan.

    A kind of :class:`EpochChanged`: the caller waits for the plan that follows.
    """

    def __init__(self, message: str, member: str | None = None) -> None:
        super().__init__(message)
        self.member = member


class NotMet(BambooError, RuntimeError):
    """Some members have not come to a meeting in time; ``members`` are those."""

    def __init__(self, message: str, members: Sequence[str]) -> None:
        super().__init__(message)
        self.members = tuple(members)


class ProtocolError(BambooError, RuntimeError):
    """A message arrived that the schedule does not expect. Always a defect; never ignored."""


class CallsDiffer(UserError, RuntimeError):
    """The scripts of two members wait for each other for ever, since they do not make the same calls."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"{difference}. The scripts of all ranks must call train_batch, eval_batch, save_checkpoint and their own "
            "collectives in the same order, and end after the same step. What only one rank knows (that training is to "
            "stop, or that a checkpoint is due) it must tell the others first, as by torch.distributed.broadcast; "
            "save_checkpoint is called on every rank"
        )


class ReplicaDiffers(BambooError, RuntimeError):
    """A replica differs from its owner time and again, although it was copied anew.

    Attributes:
        role: pipeline and stage.
        tensors: names of what differs.
    """

    def __init__(self, pipeline: int, stage: int, tensors: Sequence[str], optimizer: str) -> None:
        self.role = pipeline, stage
        self.tensors = tuple(tensors)
        shown = ", ".join(self.tensors[:10]) or "unknown tensors"
        more = f" and {len(self.tensors) - 10} more" if len(self.tensors) > 10 else ""
        super().__init__(
            f"the replica of stage {stage} of pipeline {pipeline} differs from its owner again after it was copied "
            f"anew: {shown}{more}. Likely something that a step depends on is not part of the state that is replicated,"
            f" such as attributes of the optimizer ({optimizer}) or of layers, the member, the time, or what the "
            "script changes on one stage only; or the memory of one of the two hosts fails. Keep such things in the "
            'optimizer\'s state or in buffers, or set "bamboo.redundancy.on_mismatch" to "warn" to train on without '
            "this replica"
        )


class Corrupt(BambooError, RuntimeError):
    """This member's copy of a stage is wrong: most copies of it are equal, and this one differs. Others take over.

    Attributes:
        copies: what is wrong: ``owner`` or ``replica``, pipeline and stage.
        tensors: names of what differs, as far as they are known.
    """

    def __init__(self, copies: Sequence[tuple[str, int, int]], tensors: Sequence[str], step: int) -> None:
        self.copies, self.tensors = tuple(copies), tuple(tensors)
        held = ", ".join(f"{name} of stage {stage} of pipeline {pipeline}" for name, pipeline, stage in self.copies)
        shown = ", ".join(self.tensors[:10]) or "unknown tensors"
        super().__init__(
            f"this member ({held}) has another state than most copies of the same stage after step {step}: {shown}. "
            "Its memory, or its device's, may fail: it is lost from here on, and others take over its stages "
            '("bamboo.redundancy.on_mismatch": "evict")'
        )


class CopiesDiffer(BambooError, RuntimeError):
    """The copies of a stage in several pipelines differ, and no state is that of most of them.

    Attributes:
        roles: pipelines and stages.
    """

    def __init__(self, roles: Sequence[tuple[int, int]]) -> None:
        self.roles = tuple(roles)
        where = ", ".join(f"stage {stage} of pipeline {pipeline}" for pipeline, stage in self.roles)
        super().__init__(
            f"the copies of the same stage differ, and it cannot be told which of them is right: {where}. Either the "
            "script changes pipelines in different ways, or memory has failed where owner and replica have it alike. "
            'Go on from a checkpoint; "bamboo.redundancy.on_mismatch": "stop" does not compare pipelines'
        )


class Inexact(UserError, RuntimeError):
    """The shadow of a stage, from the same inputs, does not compute what the stage's owner has computed.

    Attributes:
        role: pipeline and stage.
        differences: what differs, as it is computed.
    """

    def __init__(self, step: int, pipeline: int, stage: int, found: str, causes: str, differences: Sequence[str]):
        self.role = pipeline, stage
        self.differences = tuple(differences)
        more = f" (and {len(self.differences) - 1} more)" if len(self.differences) > 1 else ""
        super().__init__(
            f"the check of the first steps: step {step}, stage {stage} of pipeline {pipeline}: {found}: "
            f"{self.differences[0]}{more}. After a loss of this stage the job would go on with other results. Likely "
            f"causes, and their cures: {causes}. docs/state.md lists what copies of a stage follow. To train on all "
            'the same set "bamboo.redundancy.on_mismatch" to "warn", or "bamboo.redundancy.check_exact" to 0'
        )


class Evicted(BambooError, RuntimeError):
    """The newest plan does not list this member. The worker must stop: others own its roles now."""


class Isolated(BambooError, RuntimeError):
    """An operation failed, and no plan came that says how to go on. The worker must stop: others may have one."""


class AbortFailed(BambooError, RuntimeError):
    """A communicator of an epoch that is over is not aborted. As long as that is so the worker cannot go on: its device
    still uses it, and may write to what the worker computes with."""


class Left(BambooError, RuntimeError):
    """This member has handed over what it had, and leaves the job as it was asked to. Nothing has failed."""


class FatalLoss(BambooError, RuntimeError):
    """A stage has no holder of its state left alive, or members were lost before training began; only a restart helps.

    Attributes:
        stages: the stages (pipeline, stage) without a holder; none if training had not begun.
        members: the members whose loss caused it.
        checkpoint: directory of the newest complete checkpoint that this job wrote, if any.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, int]],
        members: Sequence[str],
        checkpoint: str | None = None,
        part: str = "",
    ) -> None:
        self.stages = tuple(stages)
        self.members = tuple(members)
        self.checkpoint = checkpoint
        where = ", ".join(f"stage {s} of pipeline {d}" for d, s in self.stages)
        who = ", ".join(self.members) or "unknown"
        cure = (
            f"restart from the newest complete checkpoint: {checkpoint}"
            if checkpoint
            else "this job has written no checkpoint; restart it from the beginning"
        )
        what = (
            f"no living member holds {part}{where}"
            if self.stages
            else "what the script sets up together before it trains lacks members"
        )
        super().__init__(f"{what} (lost members: {who}); {cure}")


class FurtherEngineLost(BambooError, RuntimeError):
    """An engine without the block cannot compute any more: ranks that it has been built with are lost.

    Attributes:
        ranks: those ranks, as far as they are known.
    """

    def __init__(self, what: str, found: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f'{what}, of an engine without a "bamboo" block: {found}. Only the engine with the block goes on when '
            "ranks are lost; this one's results would be made up. The job starts again with a worker for every rank, "
            "as often as bamboo.recovery.max_restarts allows. For a job that goes on without them make the further "
            "model (reference, reward, evaluation) part of the pipeline, as frozen layers, or give each rank a copy of "
            "its own that it evaluates without communication"
        )


class StoreError(BambooError, RuntimeError):
    """etcd cannot be reached or refused a request."""


class StoreUnavailable(StoreError):
    """etcd did not answer in time. A write may or may not have taken place, or may still do so."""


class LeaseExpired(StoreError):
    """The lease that a request names is gone, and with it every key that hung on it."""


class PlanForged(StoreError):
    """The plan in etcd was written by none of this job's processes."""


class LaunchError(BambooError, RuntimeError):
    """A process that bamboo_ds starts (etcd, an agent, a worker) did not come up."""


class JobOver(LaunchError):
    """A member has come to a job that has ended.

    Attributes:
        finished: its workers had done all their work.
    """

    def __init__(self, message: str, finished: bool) -> None:
        super().__init__(message)
        self.finished = finished


class TransferError(BambooError, RuntimeError):
    """A snapshot of state was not transferred."""


def faults_of(error: ValidationError) -> str:
    """The faults of something that was read, without the values: there are secrets among them."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg']}" for fault in faults)
