"""The view of a job at one moment, for live displays: the models of :class:`LiveView`.

Conventions: a time is in seconds since 1970 (UTC), a duration in seconds, a role is ``[pipeline, stage]``, a member is
named by its id. ``None`` is "not known" or "does not apply". Every tuple is bounded by a number that is given here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..topology.plan import Plan
from .event_base import Role
from .goodput.accounted import Accounted

#: Bounds of what a view lists; the newest ones are kept.
POINTS, RECENT, LOSSES, PLANS, CHECKPOINTS, LINES, MOVES, GONE = 512, 256, 64, 64, 32, 200, 32, 64

JobState = Literal["starting", "building", "training", "recovering", "waiting", "restarting", "ended", "reading"]
"""``reading``: it is not known yet, since who shows it still reads the events."""
RoleState = Literal["shadowed", "copying", "unshadowed", "lost"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StepPace(_Part):
    """The speed of the job, over the newest (at most 64) committed steps."""

    seconds: float | None = Field(None, description="duration of the newest iteration")
    median_seconds: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = Field(None, description="None where the size of the global batch is not known")


class StepHistory(_Part):
    """Committed steps over time, in columns. A point stands for ``stride`` steps (the last of fewer)."""

    stride: int = Field(1, description="steps that a point stands for")
    step: tuple[int, ...] = Field((), description="newest step of the point; goes back at a restart")
    time: tuple[float, ...] = Field((), description="when that was committed")
    loss: tuple[float | None, ...] = Field((), description="mean loss; None where not computed, or not finite")
    seconds: tuple[float, ...] = Field((), description="mean duration of the iterations")
    slowest: tuple[float, ...] = Field((), description="longest of them")


class RoleView(_Part):
    """One stage of one pipeline."""

    rank: int
    pipeline: int
    stage: int
    owner: str
    shadow: str | None
    copying: tuple[str, ...] = Field((), description="members that are making a copy of its state")
    state: RoleState = Field(
        description="`shadowed`: a replica is complete; `copying`: one is being made, there is none; `unshadowed`: "
        "neither; `lost`: no member that lives holds the state (fatal)"
    )
    lent: tuple[int, int] | None = Field(
        None, description="blocks of the stage that the shadow computes: the first, and the first one behind them"
    )
    blocks: int | None = Field(None, description="blocks that the stage has")


class Heir(_Part):
    """A role and who takes it over."""

    role: Role
    heir: str


class MemberView(_Part):
    """One member; of those that are gone the newest 64."""

    id: str
    name: str = Field("", description="as the story calls it: `m2` for `m2-e373aeb4`, unless another one was called so")
    slot: int
    host: str | None = None
    zone: str | None = None
    state: str = Field(
        description="starting, building, running, leaving, waiting, evicted, silent; of gone ones `lost (signal "
        "SIGKILL)`, `left (…)`, `finished` and the like"
    )
    present: bool = Field(
        True, description="registered in etcd, or, where etcd is not asked, a member of the newest plan"
    )
    leader: bool = False
    script_rank: int | None = Field(None, description="rank that its script runs as")
    doing: str | None = Field(None, description="what its worker does that takes long outside of training")
    notice: str | None = Field(None, description="newest notice that it has got")
    joined: float | None = None
    address: str | None = Field(None, description="that its worker listens at; None when it is gone")
    pid: int | None = Field(None, description="process of its worker; None when it is gone")
    agent_pid: int | None = Field(None, description="process of its agent; None when it is gone")
    roles: tuple[Role, ...] = Field((), description="that it owns")
    shadows: tuple[Role, ...] = Field((), description="of which it holds the replica")
    copies: tuple[Role, ...] = Field((), description="of whose state it is making a copy")
    load: float | None = Field(
        None, description="stages' worth of work that it computes, parts of divided ones included; None before a layout"
    )
    heirs: tuple[Heir, ...] = Field((), description="if it were lost now: who would take over what it owns")
    fatal: tuple[Role, ...] = Field(
        (), description="if it were lost now: roles without another holder; one makes the loss fatal (a restart)"
    )


@dataclass(frozen=True)
class Overview:
    """The overview of a job from etcd at one moment.

    Attributes:
        members: registered ones, and those that are gone of which keys are left, in the order of their slots; with what
            their keys tell.
        stopping: why the job is being ended.
    """

    leader: str | None = None
    members: tuple[MemberView, ...] = ()
    plan: Plan | None = None
    step: int | None = None
    global_step: int | None = None
    checkpoint: str | None = None
    stopping: str | None = None


class LostMember(_Part):
    """A member that was lost, and how that was noticed; see the event ``member_lost``."""

    id: str
    name: str
    host: str | None
    script_rank: int | None = Field(None, description="rank that its script ran as")
    reason: str
    detail: str
    detection_seconds: float | None


class Moved(_Part):
    """A role that changed its owner."""

    role: Role
    before: str
    after: str


class LossView(_Part):
    """Members that were lost together, and the recovery. ``*_seconds`` are the longest of any survivor so far."""

    number: int = Field(description="of the losses since the job was started, from 1 on; see `Losses.detail`")
    time: float
    members: tuple[LostMember, ...]
    epoch: int | None = Field(None, description="of the plan that removes them; None before it is written")
    step: int | None = Field(None, description="that was interrupted")
    before: int = Field(description="members before the loss")
    left: int | None = Field(None, description="members after it")
    moved: tuple[Moved, ...] = Field((), description="the first 32 of the roles that were taken over")
    moved_count: int = 0
    fatal: bool = False
    survivors: int = Field(0, description="that have told of their recovery")
    recovered: bool = Field(False, description="all survivors have told, or a later step is committed")
    detection_seconds: float | None = None
    plan_seconds: float | None = None
    rebuild_seconds: float | None = None
    pause_seconds: float | None = None
    redo_seconds: float | None = None
    takeover_seconds: float | None = Field(None, description="until the last heir had entered the plan, for the leader")
    forwards_redone: int = Field(0, description="forward passes computed again, of all survivors together")
    backwards_redone: int = 0
    replicas_back_seconds: float | None = Field(None, description="from the loss until every stage had a replica again")


class SurvivorView(_Part):
    """The recovery of one survivor from a loss; see the event ``recovered``."""

    id: str
    name: str
    time: float
    mode: str
    pause_seconds: float
    detection_seconds: float | None
    plan_seconds: float | None
    rebuild_seconds: float
    redo_seconds: float
    forwards_redone: int
    backwards_redone: int


class LossDetail(_Part):
    """A loss with each of its survivors, slowest first."""

    loss: LossView
    survivors: tuple[SurvivorView, ...]


class ToldPlan(_Part):
    """A plan that was written."""

    epoch: int
    time: float
    kind: Literal["start", "loss", "change"]
    reason: str
    members: int
    joined: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    moved: tuple[Moved, ...] = Field((), description="the first 32 of the roles that changed their owner")
    moved_count: int = 0
    unshadowed: int | None = Field(None, description="roles without a shadow; None before redundancy, and without it")
    lent: int = Field(0, description="roles of which shadows compute a part")
    pause_seconds: float | None = Field(None, description="longest of members that entered it between two operations")
    entered: float | None = Field(None, description="when the last of them had entered it")


class CheckpointView(_Part):
    """A checkpoint, or the attempt to write one."""

    time: float
    step: int
    global_step: int | None
    path: str
    own: bool = Field(False, description="the job has taken it without the script's doing")
    seconds: float | None = None
    bytes: int | None = None
    failed: str | None = Field(None, description="what went wrong")


class Totals(_Part):
    """Counts since the job was started."""

    steps: int = Field(0, description="committed steps, repeated ones each time")
    samples: int | None = Field(None, description="in them; None while no event has told the size of a batch")
    losses: int = 0
    losses_by_reason: dict[str, int] = {}
    notices_by_source: dict[str, int] = {}
    joined: int = Field(0, description="members that came after the first plan")
    left: int = 0
    corrupt: int = Field(0, description="wrong copies of stages that members were lost for")
    restarts: int = 0
    takeovers: int = Field(0, description="roles taken over after losses")
    pause_seconds: float = Field(0.0, description="of all losses; of each the longest of any survivor")
    passes_redone: int = 0
    checkpoints: int = 0
    checkpoints_failed: int = 0


class Coverage(_Part):
    """Redundant forward passes that were done ahead of a loss, over the newest (at most 64) steps."""

    done: int = 0
    total: int = 0
    ratio: float | None = Field(None, description="done / total; None where none are to be done")


class StoryLine(_Part):
    """One plain English line about what happened."""

    time: float
    text: str


class LiveView(_Part):
    """A job at one moment. JSON: ``model_dump(mode="json")``; numbers that are not finite are null."""

    job: str
    state: JobState
    time: float | None = Field(None, description="of the newest event")
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    stopping: str | None = Field(None, description="why the job is being ended")
    command: tuple[str, ...] = ()
    epoch: int = Field(0, description="0 before the first plan")
    step: int | None = Field(None, description="newest committed step")
    global_step: int | None = Field(None, description="the same as DeepSpeed counts")
    last_step_time: float | None = None
    pace: StepPace = StepPace()
    history: StepHistory = Field(StepHistory(), description="all steps, at most 512 points")
    recent: StepHistory = Field(StepHistory(), description="the newest 256 steps, one point each")
    pipelines: int | None = None
    stages: int | None = None
    roles: tuple[RoleView, ...] = Field((), description="by rank, which is stage * pipelines + pipeline")
    unshadowed: tuple[Role, ...] | None = Field(
        None, description="roles without a replica; None before engines are built, and in a job without redundancy"
    )
    members: tuple[MemberView, ...] = Field((), description="present ones in the order of their slots, then gone ones")
    losses: tuple[LossView, ...] = Field((), description="the newest 64, oldest first")
    plans: tuple[ToldPlan, ...] = Field((), description="the newest 64, oldest first")
    checkpoints: tuple[CheckpointView, ...] = Field((), description="the newest 32, oldest first")
    checkpoint: CheckpointView | None = Field(None, description="the newest complete one that an event has told of")
    checkpoint_path: str | None = Field(None, description="folder of the newest complete one")
    account: Accounted | None = Field(
        None, description="where the members' time went so far; `docs/reference/goodput.md` defines the categories"
    )
    coverage: Coverage = Coverage()
    totals: Totals = Totals()
    story: tuple[StoryLine, ...] = Field((), description="the newest 200, oldest first")
