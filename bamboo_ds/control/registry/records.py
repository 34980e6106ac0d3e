"""The control plane's records in etcd, by key in the namespace ``/bamboo/<job>/`` (:mod:`.keys`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator
from typing_extensions import Self

from ...config import BambooConfig
from ...job_settings import JobSettings
from ...processes import boot_id
from ...topology.block_costs import BlockSeconds
from ...topology.memory import StageMemory
from ...topology.roles import Layout
from .keys import Keys

SCHEMA = 1


class Record(BaseModel):
    """Base of all stored values: JSON with a schema version; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = SCHEMA

    @field_validator("schema_version")
    @classmethod
    def _known(cls, version: int) -> int:
        if version > SCHEMA:
            raise ValueError(f"version {version} of a newer bamboo_ds; this one reads {SCHEMA} at most")
        return version

    def to_json(self) -> str:
        """The record as it is stored."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parses :meth:`to_json`'s output; raises ``pydantic.ValidationError`` for anything else."""
        return cls.model_validate_json(text)


class WorkerRecord(Record):
    """Base of records that a worker writes: its agent brings them to etcd as they come over the channel."""

    def to_line(self) -> bytes:
        """The record as one line of JSON, newline included."""
        return self.to_json().encode() + b"\n"

    @property
    def key(self) -> str:
        """The key of the record in etcd."""
        raise NotImplementedError


class JobRecord(Record):
    """``spec``: what the launcher, or the first member of a job without one, was asked for.

    Attributes:
        world_size: number of ranks.
        starters: members that start a job whose members come one by one; ``None``: one for each rank.
        settings: what the job goes by.
        since: when it was written, in UTC.
    """

    job: str
    world_size: int
    starters: int | None = None
    pipelines: int | None = None
    command: tuple[str, ...] = ()
    settings: JobSettings = JobSettings()
    since: AwareDatetime | None = None


class MemberRecord(Record):
    """``members/<id>``, under the agent's lease: a slot that lives.

    As it was first it stands at ``known/<id>``, too, which outlives the lease; and that of a joiner at
    ``hosts/<process space>/<id>``, under the lease, for the other agents of its host.

    Attributes:
        pid: process id of the worker, on ``host``.
        agent_pid: process id of the agent, on ``host``.
        agent_started: when it began, and process_space: where its id means something; see :mod:`bamboo_ds.processes`.
        lease: id of the lease that the record lives under.
        script_rank: rank that the worker's script runs as.
        joiner: the member came while the job was running; it waits to be admitted.
        feeder: it only draws batches, for a pipeline at whose ends no other script runs.
        state: ``leaving``: it is going to vanish and gets nothing any more; ``waiting``: it has no worker and waits
            for the job's restart.
        generation: the restart (0: the first start) that the worker is part of from the beginning, of one that waits
            the newest one that is over for it; ``None``: it joins what is running.
        events: the file on ``host`` that its agent writes events to.
        place: where its worker is reached by others, as plans have it.
    """

    id: str
    slot: int
    host: str
    zone: str = ""
    address: str
    pid: int
    agent_pid: int
    agent_started: int | None = None
    process_space: str = ""
    incarnation: str
    lease: int = 0
    script_rank: int = 0
    joiner: bool = False
    feeder: bool = False
    state: Literal["running", "leaving", "waiting"] = "running"
    generation: int | None = 0
    events: str | None = None
    place: str = Field(default="", repr=False)


class RestartRecord(Record):
    """``restart``: who starts which workers after a fatal loss.

    Attributes:
        generation: number of the restart, from 1 on; 0: the first start of a job whose members have come one by one.
        after_epoch: the epoch that was fatal.
        ranks: the ranks whose workers each slot starts.
        extra: numbers of the slots of the second and further workers of a member, by rank.
        checkpoint: folder of the newest checkpoint that a member has told of.
        step, global_step: newest step that any member has told of so far, and the same as DeepSpeed counts.
        failures: restarts in a row, up to this one, that came after one that had not got beyond ``step``.
    """

    generation: int
    after_epoch: int
    ranks: dict[int, tuple[int, ...]]
    extra: dict[int, int] = {}
    checkpoint: str | None = None
    step: int = 0
    global_step: int | None = None
    failures: int = 0


class NoticeRecord(Record):
    """``notices/<id>``: the member is going to vanish.

    Attributes:
        kind, source, detail: see :class:`~bamboo_ds.control.notices.Notice`.
        deadline_s: seconds from the writing of this record until it vanishes; ``None`` where unknown.
        iteration_s: duration of its newest iteration; ``None`` before the second one.
    """

    id: str
    kind: str
    source: str
    detail: str
    deadline_s: float | None = None
    iteration_s: float | None = None


class LeaveRecord(Record):
    """``leave/<id>``: somebody asks the member to leave; its agent takes that for a notice.

    Attributes:
        source, detail: who, see :class:`~bamboo_ds.control.notices.Notice`.
    """

    id: str
    source: str
    detail: str


class WebRecord(Record):
    """``web``, under the leader's lease: where the job's page is served."""

    id: str
    url: str


class LeftRecord(Record):
    """``left/<id>``: written by a member's agent just before it revokes the lease.

    Attributes:
        outcome: ``finished`` (exit 0), ``failed`` (an error of the application), ``fatal`` and
            ``evicted`` (the worker stopped itself, see :mod:`bamboo_ds.errors`), ``lost`` (died by a
            signal, was killed because it hung, or stopped itself and does not come back), ``stopped`` (the job was
            ended on request), ``left`` (went on notice, after it had handed over what it had).
        reason: how the worker ended: by itself, by a signal, killed because its heartbeat stopped or
            because it made no progress.
        detail: exit code or name of the signal; of a member that has left the notice.
        code: the exit code that the job should end with if this is a failure.
        generation: see :class:`MemberRecord`.
        error: in a job that takes such workers for lost: it has failed by itself, in this way.
        step: newest step that it has committed, as far as known.
        abrupt: it has trained, and has ended with exit code 0 without any word of its script's end, as by ``os._exit``.
        reaped: the agent knows that the worker has died: none of its code runs any more.
        since: ``CLOCK_MONOTONIC`` seconds at which the worker was last known to be well: its death as the
            agent saw it, or its last heartbeat. Comparable only where ``boot`` is the same.
        boot: id of the running kernel.
    """

    id: str
    slot: int
    outcome: Literal["finished", "failed", "fatal", "evicted", "lost", "stopped", "left"]
    reason: Literal["exit", "signal", "heartbeat", "hang"]
    detail: str
    code: int = 0
    generation: int | None = None
    error: str | None = None
    step: int | None = None
    abrupt: bool = False
    reaped: bool = False
    since: float
    boot: str

    def age_s(self, now: float) -> float | None:
        """Seconds from :attr:`since` to ``now``; ``None`` when it was taken on another host's clock."""
        return now - self.since if self.boot == boot_id() else None


class DeviceRecord(BaseModel):
    """The device that a member computes on, when its engine has been built.

    Attributes:
        name: no other of the job's devices has it.
        total: bytes of its memory.
        besides: bytes of those that the member's process has allocated besides the stage that its script runs as.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    total: int
    besides: int = 0


class LayoutRecord(WorkerRecord):
    """``reports/<id>``: the member's engine is built and has this logical world.

    Attributes:
        redundant: whether roles are to be shadowed.
        iterators: whether batches come from the script's iterators, which only the ends of a pipeline have.
        apart: whether both ends of a pipeline need a member with their iterator, since these give, or may give,
            different batches.
        stage: what the stage takes that the member's script runs as.
        memory: bytes that the member may hold of roles; ``None``: what its device has for it.
        device: that it computes on; ``None`` without memory of its own, so that it may hold any number.
        every_rank: the script has an engine without the block, which computes with all ranks or not at all, or goes on
            to change its stage between two steps.
        settings: what the worker goes by, where the job's record is open; see :mod:`bamboo_ds.job_settings`.
    """

    type: Literal["layout"] = "layout"
    id: str
    layout: Layout
    redundant: bool
    iterators: bool = True
    apart: bool = False
    stage: StageMemory | None = None
    memory: int | None = None
    device: DeviceRecord | None = None
    every_rank: bool = False
    settings: BambooConfig | None = None

    @property
    def key(self) -> str:
        """The key of the record in etcd."""
        return Keys.report(self.id)


class WorkerState(WorkerRecord):
    """``workers/<id>``: the epoch that the member's worker has entered, and which copies of others' state it holds.

    Attributes:
        replicas: ranks of the roles whose replicas are complete, shadows' and builders'.
        lacked: ranks of the roles that it shadows whose replica it had not when it entered the epoch, and makes then.
        cuts: of stages that the worker has computed, by rank of the role, the blocks before which they may be divided.
        seconds: what it has measured of blocks.
        iteration_s: how long its iterations take.
        sums_share: after this share of the micro-batches of an iteration it sends sums of gradients that others can go
            on from; 0: never, or its script changes its stages between two iterations.
        passes: by stage what passes of an iteration keep, in bytes.
        outputs: by stage what it hands on for a micro-batch, in bytes; known with ``passes``.
        redundant: by stage what redundant forward passes of all micro-batches keep, in bytes, with ``passes``; empty
            where shadows may not choose whether they run any.
    """

    type: Literal["state"] = "state"
    id: str
    epoch: int
    replicas: tuple[int, ...] = ()
    lacked: tuple[int, ...] = ()
    cuts: dict[int, tuple[int, ...]] = {}
    seconds: tuple[BlockSeconds, ...] = ()
    iteration_s: float = 0.0
    sums_share: float = 0.0
    passes: dict[int, int] = {}
    outputs: dict[int, int] = {}
    redundant: dict[int, int] = {}

    @property
    def key(self) -> str:
        """The key of the record in etcd."""
        return Keys.worker(self.id)


class SuspicionRecord(WorkerRecord):
    """``suspects/<by>``: operations of ``epoch`` towards members failed. A member that accuses itself cannot enter it.

    Attributes:
        accused: these members, with the reasons.
    """

    type: Literal["suspect"] = "suspect"
    by: str
    epoch: int
    accused: dict[str, str]

    @property
    def key(self) -> str:
        """The key of the record in etcd."""
        return Keys.suspect(self.by)


class HealthRequest(Record):
    """``asked/<id>``: the leader asks the agent of a member that is accused in ``epoch`` whether its worker lives."""

    id: str
    epoch: int


class HealthReply(Record):
    """``health/<id>``: an agent's answer for ``epoch``: its worker has had a heartbeat since it was asked."""

    id: str
    epoch: int


class TimingRecord(Record):
    """``epochs/<e>/timing``: how the loss that made the epoch was learnt.

    Attributes:
        detection_s: from the fault to its notice by the leader; ``None`` where unknown.
        plan_s: from the notice to the plan.
    """

    epoch: int
    detection_s: float | None
    plan_s: float


class ProgressRecord(Record):
    """``progress/<id>``: newest committed step and newest complete checkpoint of a member.

    Attributes:
        step: 0 before the first.
        global_step: ``step`` as DeepSpeed counts.
        doing: see :class:`~bamboo_ds.control.messages.Heartbeat`.
    """

    id: str
    step: int
    global_step: int | None = None
    checkpoint: str | None = None
    doing: str | None = None


def newest(progress: Iterable[ProgressRecord], saved: bool = False) -> ProgressRecord | None:
    """The record of the newest step; with ``saved`` of those that tell of a checkpoint."""
    known = (record for record in progress if record.checkpoint is not None or not saved)
    return max(known, key=lambda record: record.step, default=None)


class LeaderRecord(Record):
    """``leader``: the member whose agent writes plans."""

    id: str


class StopRecord(Record):
    """``stop``: every agent ends its worker; the job's exit code is ``code``."""

    code: int
    reason: str
    by: str


def in_slot_order(members: Iterable[MemberRecord]) -> list[MemberRecord]:
    """``members`` ordered by slot."""
    return sorted(members, key=lambda member: (member.slot, member.id))
