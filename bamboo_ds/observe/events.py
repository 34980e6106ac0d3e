"""Events: one JSON object per line, the machine-readable account of a run (logs are for people).

Times are UTC; every ``*seconds`` field is a difference of one process's monotonic clock. Several
processes append to one file: each line is a single ``write`` on a descriptor opened with ``O_APPEND``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ..config import SOURCE_NAMES
from ..errors import ProtocolError, faults_of
from .event_base import GLOBAL_STEP, OF_THE_JOB, SCHEMA, Consumed, EventBase, Role
from .event_writer import EventWriter as EventWriter

#: What notices come from: a source, a signal, or the job's page.
NOTICE_ORIGINS: tuple[str, ...] = (*SOURCE_NAMES, "signal", "web")


class RunStarted(EventBase):
    """The job has been started, by a launcher or (bamboo join --start) by its members, of which the leading one tells.

    The event is missing if that one is lost before.
    """

    event: Literal["run_started"] = "run_started"
    members: int = Field(ge=1, description="members that start the job")
    command: list[str] = Field(description="the script and its arguments")


class RunFinished(EventBase):
    """A launcher has seen the end of all its members; a job that its members start has no such event."""

    event: Literal["run_finished"] = "run_finished"
    exit_code: int = Field(description="exit code of the launcher")
    run_seconds: float = Field(ge=0, description="seconds since run_started")


class MemberJoined(EventBase):
    """A member has registered."""

    event: Literal["member_joined"] = "member_joined"
    member_id: str = Field(description="the new member")
    host: str = Field(description="its host")
    rank: int = Field(description="RANK of its worker")


class MemberLost(EventBase):
    """The leader has detected the loss of a member."""

    event: Literal["member_lost"] = "member_lost"
    member_id: str = Field(description="the lost member")
    reason: Literal["exit", "signal", "heartbeat", "hang", "lease", "suspects", "abort"] = Field(
        description="how it was detected: its worker exited, died by a signal, stopped its heartbeat, made no "
        "progress; its lease ran out; its peers accused it; it could not abort its communicators"
    )
    detail: str = Field(description="exit code, name of the signal, names of the accusers, or why the abort failed")
    detection_seconds: float | None = Field(ge=0, description="from the fault to its notice; null where unknown")


class MemberFailed(EventBase):
    """The script of a worker has failed, which ends the job."""

    event: Literal["member_failed"] = "member_failed"
    member_id: str = Field(description="the member whose worker it was")
    host: str = Field(description="its host")
    rank: int = Field(description="RANK of the worker")
    exit_code: int = Field(description="the job's exit code for it")
    reason: Literal["exit", "signal", "heartbeat", "hang"] = Field(description="how the worker ended")
    detail: str = Field(description="exit code or name of the signal")
    error: str | None = Field(description="what it has told of its failure; null where it could not")
    log: str | None = Field(description="path on its host of the file with its output; null where there is none")


class NoticeReceived(EventBase):
    """A member has heard that its node is about to vanish, or was asked to leave."""

    event: Literal["notice"] = "notice"
    kind: Literal["preempt", "rebalance", "maintenance", "device", "leave"] = Field(
        description="what is announced: the cloud takes the node away, it has become likely that it will, the host is "
        "serviced, the member's device fails, the member is asked to leave"
    )
    source: str = Field(description=f"origin of the notice: {', '.join(f'`{name}`' for name in NOTICE_ORIGINS)}")
    deadline_seconds: float | None = Field(ge=0, description="until the node vanishes; null where unknown")
    detail: str = Field(description="text of the source")
    leaves: bool = Field(description="whether the member leaves for it; false where the node, or its device, goes on")


class MemberLeft(EventBase):
    """A member has handed its roles over between two iterations, and its worker has ended. It is no loss."""

    event: Literal["member_left"] = "member_left"
    member_id: str = Field(description="the member that has left")
    reason: str = Field(description="kind of the notice")
    detail: str = Field(description="source of the notice, and its text")
    seconds: float = Field(ge=0, description="from the notice to the end of its worker")


class PlanWritten(EventBase):
    """The leader has written a plan."""

    event: Literal["plan"] = "plan"
    members: list[str] = Field(description="living members, in the order of their slots")
    owners: list[str] = Field(description="owner of every role, by rank")
    shadows: list[str | None] = Field(description="shadow of every role, by rank; empty before redundancy")
    pipelines: int | None = Field(
        default=None, ge=1, description="pipelines; rank is stage * pipelines + pipeline; null before engines are built"
    )
    lent: list[tuple[int, int, int]] = Field(
        default=[],
        description="parts of stages that shadows compute: rank of the role, its first block, the first one behind it",
    )
    lost: list[str] = Field(description="members that this plan removes")
    reason: str = Field(description="why it was written")


class MemoryShort(EventBase):
    """Members have no room for all that the job would have them hold. With each plan in which that changes."""

    event: Literal["memory_short"] = "memory_short"
    roles: list[Role] = Field(description="roles, [pipeline, stage], that have no replica for that")
    members: list[str] = Field(description="members that hold more than they may all the same, as no plan is without")
    resting: list[str] = Field([], description="members with optimizers in host memory between steps: that is slower")
    under_way: list[tuple[str, int]] = Field([], description="members, and micro-batches of a role under way at most")


class TakeoverPlanned(EventBase):
    """A plan gives a role another owner: in a takeover, or between two operations (the plan's `reason` says why)."""

    event: Literal["takeover_planned"] = "takeover_planned"
    role: Role = Field(description="the role, [pipeline, stage]")
    from_: str = Field(alias="from", description="its owner until now")
    to: str = Field(description="its owner from now on")


class TakeoverDone(EventBase):
    """A role's new owner has entered the plan that gives it the role. It is missing where the leader is lost before."""

    event: Literal["takeover"] = "takeover"
    role: Role = Field(description="the role, [pipeline, stage]")
    from_: str = Field(alias="from", description="its owner before")
    to: str = Field(description="its owner now")
    seconds: float | None = Field(None, ge=0, description="since the notice of the loss, without one since the plan")


class Recovered(EventBase):
    """A member has ended a step that a takeover had interrupted, or another plan that could not wait for its end."""

    event: Literal["recovered"] = "recovered"
    step: int = Field(ge=0, description="step that was interrupted")
    global_step: int | None = GLOBAL_STEP
    pause_seconds: float = Field(
        ge=0,
        description="from the notice of the loss to the agreement on how to go on; passes are computed again after it; "
        "of a step that was interrupted several times the sum",
    )
    detection_seconds: float | None = Field(
        ge=0, description="from the agent's notice of the worker's end to the leader's; null where unknown"
    )
    plan_seconds: float | None = Field(
        ge=0, description="from its notice here to the plan, and one in which its batches are drawn; null where unknown"
    )
    rebuild_seconds: float = Field(ge=0, description="from the plan to rebuilt groups and agreed progress")
    redo_seconds: float = Field(
        ge=0, description="from the agreement to the end of the interrupted operation: redone and remaining work"
    )
    forwards_redone: int = Field(
        ge=0,
        description="forward passes computed again here, as far as the neighbours had used their results; of a divided "
        "stage those of each part",
    )
    backwards_redone: int = Field(ge=0, description="the same of backward passes")
    backwards_kept: int = Field(
        0, ge=0, description="backward passes of the lost workers that are not done again, since their sums are here"
    )
    mode: str = Field(
        description="`resume`: the operation was finished from its progress; `commit`: only its commit was repeated"
    )
    consumed: Consumed | None = Field(
        default=None,
        description="by the newest step that was committed before the loss, whose own event may be missing; null as "
        "in `step`",
    )


class Reconfigured(EventBase):
    """A member has entered a new plan at a boundary between two operations, without redoing anything."""

    event: Literal["reconfigured"] = "reconfigured"
    step: int = Field(ge=0, description="steps committed so far")
    global_step: int | None = GLOBAL_STEP
    pause_seconds: float = Field(ge=0, description="from the boundary to the new epoch")
    previous: int = Field(ge=0, description="epoch that it left")


class MembersAwaited(EventBase):
    """Other members wait for some to enter an epoch. Emitted by each that waits for them itself, after
    `recovery.plan_timeout_s`, then ever more rarely."""

    event: Literal["members_awaited"] = "members_awaited"
    members: list[str] = Field(description="the missing members")
    seconds: float = Field(ge=0, description="since it began to wait")


class ReplicaBuilt(EventBase):
    """A member has completed a copy of a role's state while training went on."""

    event: Literal["replica_built"] = "replica_built"
    step: int = Field(ge=0, description="last step contained in the copy")
    global_step: int | None = GLOBAL_STEP
    role: Role = Field(description="the role, [pipeline, stage]")
    seconds: float = Field(ge=0, description="since the copy was begun")
    bytes: int = Field(ge=0, description="size of the state")


class ReplicasPlaced(EventBase):
    """A member of a device has its first replicas; also when their place changes."""

    event: Literal["replicas_placed"] = "replicas_placed"
    step: int = Field(ge=0, description="steps that are done")
    global_step: int | None = GLOBAL_STEP
    parked: bool = Field(description="those that compute nothing are in host memory")
    reason: str | None = Field(description="why they are on the device; with `redundancy.mode` `auto` also why not")
    bytes: int = Field(ge=0, description="of their state, in host memory")
    resting: list[Role] = Field([], description="that this member computes, with optimizers there between steps")


class Step(EventBase):
    """A step is committed and done."""

    event: Literal["step"] = "step"
    step: int = Field(ge=0, description="number of the step; twice, or missing, where its emitter is lost just then")
    global_step: int | None = GLOBAL_STEP
    loss: float | None = Field(description="mean loss of the global batch; null where not computed")
    seconds: float = Field(ge=0, description="duration of the iteration")
    frc_done: int = Field(
        ge=0, description="redundant forward passes that fitted into idle time, or that sums have spared"
    )
    frc_total: int = Field(ge=0, description="redundant forward passes that would cover every micro-batch")
    samples: int | None = Field(
        default=None, ge=0, description="samples of the global batch; null where it is not known"
    )
    consumed: Consumed | None = Field(
        default=None, description="what `bamboo goodput` verifies; null without `observe.checksums`"
    )


class CollectiveIncomplete(EventBase):
    """A collective of the script has other parts in the place of some ranks'. Emitted once for each place in the script
    that calls it."""

    event: Literal["collective_incomplete"] = "collective_incomplete"
    step: int = Field(ge=0, description="steps committed so far")
    global_step: int | None = GLOBAL_STEP
    operation: str = Field(description="the collective, as torch's backends call it")
    ranks: list[int] = Field(description="ranks of its group")
    lost_ranks: list[int] = Field(description="those that no process runs as")
    moved_ranks: list[int] = Field(description="those whose process does not compute the rank's own stage now")
    place: str = Field(description="where the script calls it")


class IteratorsDiffer(EventBase):
    """The script's iterators at the two ends of a pipeline have given different batches for the first time.

    From then on each is drawn from for its part, if need be by a worker that is started for that.
    """

    event: Literal["iterators_differ"] = "iterators_differ"
    step: int = Field(ge=0, description="steps committed before that")
    global_step: int | None = GLOBAL_STEP
    call: str = Field(description="`train_batch` or `eval_batch`, whose iterators they are")


class RedundancyExhausted(EventBase):
    """A redundant pass, or sums that it goes on from, have exhausted the device's memory, or nothing is free: none
    follows in this step.

    Where nothing is free it is told once, until there is some again.
    """

    event: Literal["redundancy_exhausted"] = "redundancy_exhausted"
    step: int = Field(ge=0, description="steps committed so far")
    global_step: int | None = GLOBAL_STEP
    role: Role = Field(description="the role whose pass it was, [pipeline, stage]")
    dropped: int = Field(ge=0, description="redundant forward passes of the role that were dropped for their memory")
    reason: str = Field(description="the allocator's message, or that nothing is free")


class ReplicaVerified(EventBase):
    """A replica's checksum equals its owner's."""

    event: Literal["replica_verified"] = "replica_verified"
    step: int = Field(ge=0, description="last step contained in the replica")
    global_step: int | None = GLOBAL_STEP
    role: Role = Field(description="the role, [pipeline, stage]")
    checksum: str = Field(description="checksum of parameters and optimizer state")


class ReplicaMismatch(EventBase):
    """A replica's checksum differs from its owner's. It is copied again, once: see `redundancy.on_mismatch`."""

    event: Literal["replica_mismatch"] = "replica_mismatch"
    step: int = Field(ge=0, description="last step contained in the replica")
    global_step: int | None = GLOBAL_STEP
    role: Role = Field(description="the role, [pipeline, stage]")
    expected: str = Field(description="the owner's checksum")
    found: str = Field(description="the replica's checksum")
    tensors: list[str] = Field(description="what differs; none at the first time, when only one checksum is compared")


class MemberCorrupt(EventBase):
    """A member's copy of a stage differs from most copies of it (`redundancy.on_mismatch`: `evict`). It is lost."""

    event: Literal["member_corrupt"] = "member_corrupt"
    step: int = Field(ge=0, description="last step contained in the copies")
    global_step: int | None = GLOBAL_STEP
    member_id: str = Field(description="the member that holds the copy")
    role: Role = Field(description="the role, [pipeline, stage]")
    copy_of: Literal["owner", "replica"] = Field(description="whose copy it is")
    tensors: list[str] = Field(description="what differs between owner and replica; none where that is not known")


class ExactMismatch(EventBase):
    """The check of the first steps: the shadow of a stage computes or holds something else than the stage's owner."""

    event: Literal["exact_mismatch"] = "exact_mismatch"
    step: int = Field(ge=0, description="steps committed when the difference was found")
    global_step: int | None = GLOBAL_STEP
    role: Role = Field(description="the role, [pipeline, stage]")
    found: Literal["rehearsal", "replica"] = Field(description="a rehearsed iteration, or the replica after a step")
    tensors: list[str] = Field(description="what differs, as it is computed, and by how much")


class ExactChecked(EventBase):
    """The check of the first steps has ended without a difference."""

    event: Literal["exact_checked"] = "exact_checked"
    step: int = Field(ge=0, description="steps committed so far")
    global_step: int | None = GLOBAL_STEP
    steps: int = Field(ge=1, description="steps that were checked; those that a loss has hit are not")
    stages: int = Field(ge=0, description="roles whose takeover was rehearsed in each of them")
    tensors: int = Field(ge=0, description="tensors and numbers that were compared, bit for bit")
    not_rehearsed: list[Role] = Field(description="roles of which only the replica was compared, or nothing")


class CheckpointSaved(EventBase):
    """A checkpoint is complete. Emitted again by the next member that leads if the one that completed it was lost."""

    event: Literal["checkpoint_saved"] = "checkpoint_saved"
    step: int = Field(ge=0, description="last step contained in the checkpoint")
    global_step: int | None = GLOBAL_STEP
    path: str = Field(description="its folder, or its URL in a store of objects")
    seconds: float = Field(ge=0, description="from the end of the copy to host memory to the complete checkpoint")
    bytes: int = Field(ge=0, description="size of all of its files")
    waited: bool = Field(default=False, description="whether training has waited until it was complete")
    own: bool = OF_THE_JOB


class CheckpointFailed(EventBase):
    """A checkpoint could not be written; those before it are as they were. One event per member that has noticed."""

    event: Literal["checkpoint_failed"] = "checkpoint_failed"
    step: int = Field(ge=0, description="last step that it would have contained")
    global_step: int | None = GLOBAL_STEP
    path: str = Field(description="the folder or URL that it would have got")
    own: bool = OF_THE_JOB
    reason: str = Field(description="what went wrong")


class Fatal(EventBase):
    """A stage has no living holder; the job starts again (`recovery.max_restarts`) or ends."""

    event: Literal["fatal"] = "fatal"
    stages: list[Role] = Field(
        description="the roles without a holder, [pipeline, stage]; none before the engines are built"
    )
    members: list[str] = Field(description="members whose loss caused it")
    checkpoint: str | None = Field(description="newest complete checkpoint of the job, if any")


class Restart(EventBase):
    """All workers are started again after a fatal loss."""

    event: Literal["restart"] = "restart"
    number: int = Field(ge=1, description="which restart of the job it is")
    slots: list[int] = Field(description="slots whose members take part")
    checkpoint: str | None = Field(description="newest checkpoint that members had reported; null: from the beginning")
    step: int = Field(ge=0, description="newest committed step that members had reported")
    global_step: int | None = GLOBAL_STEP


Event = (
    RunStarted
    | RunFinished
    | MemberJoined
    | MemberLost
    | MemberFailed
    | NoticeReceived
    | MemberLeft
    | PlanWritten
    | MemoryShort
    | TakeoverPlanned
    | TakeoverDone
    | Recovered
    | Reconfigured
    | MembersAwaited
    | ReplicaBuilt
    | ReplicasPlaced
    | Step
    | CollectiveIncomplete
    | IteratorsDiffer
    | RedundancyExhausted
    | ReplicaVerified
    | ReplicaMismatch
    | MemberCorrupt
    | ExactMismatch
    | ExactChecked
    | CheckpointSaved
    | CheckpointFailed
    | Fatal
    | Restart
)
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def parse_event(line: str | bytes) -> Event:
    """One event from one line; raises ``pydantic.ValidationError`` for anything else."""
    return _ADAPTER.validate_json(line)


def parse_line(path: Path | str, number: int, line: bytes) -> Event:
    """The event in line ``number`` of a file; raises :class:`ProtocolError` naming ``file:line`` and the fields."""
    if not line.endswith(b"\n"):
        raise ProtocolError(f"{path}:{number}: the line is cut short")
    try:
        return parse_event(line)
    except ValidationError as error:
        raise ProtocolError(f"{path}:{number}: not an event of schema {SCHEMA}: {faults_of(error)}") from error


def read_events(path: Path | str) -> Iterator[Event]:
    """The events of a file, in order, strictly; raises as :func:`parse_line`, ``OSError`` if it cannot be read."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield parse_line(path, number, line)
