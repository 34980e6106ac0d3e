"""Messages of the channel between an agent and its worker: one JSON object per line.

The channel is an inherited ``AF_UNIX`` socket pair, so both ends run the same version of this package
and a message that does not parse is a defect, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ..topology.plan import Plan
from ..topology.roles import Layout


class Message(BaseModel):
    """Base of all channel messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_line(self) -> bytes:
        """The message as one line of JSON, newline included."""
        return self.model_dump_json().encode() + b"\n"


class PlanPush(Message):
    """Agent to worker: a plan, newer than any pushed before."""

    type: Literal["plan"] = "plan"
    plan: Plan


class StoreAddress(Message):
    """Where the ``TCPStore`` of an epoch listens.

    Worker to agent when the worker hosts it, agent to worker when another one does.
    """

    type: Literal["store"] = "store"
    epoch: int
    host: str
    port: int


class Heartbeat(Message):
    """Worker to agent: the interpreter runs. Carries the newest committed step and checkpoint.

    Attributes:
        global_step: ``step`` as DeepSpeed counts.
        beats: grows with every instruction that is done.
        computing: the worker is in the middle of an instruction and waits for nobody.
        hang_after_s: seconds without a new beat while computing after which it hangs, as far as it can tell from
            its own times; ``None`` while it cannot.
        doing: what it does that takes long outside of instructions, such as compiling an extension; ``None``: nothing.
    """

    type: Literal["heartbeat"] = "heartbeat"
    step: int | None = None
    global_step: int | None = None
    checkpoint: str | None = None
    beats: int = 0
    computing: bool = False
    hang_after_s: float | None = None
    doing: str | None = None


class LayoutReport(Message):
    """Worker to agent: the engine is built; this is its logical world.

    Attributes:
        redundant: whether roles are to be shadowed.
        iterators: whether batches come from the script's iterators, which only the ends of a pipeline have.
    """

    type: Literal["layout"] = "layout"
    layout: Layout
    redundant: bool
    iterators: bool = True


class Place(BaseModel):
    """Where a worker offers its history and snapshots (see :class:`~bamboo_ds.state.server.StateServer`).

    Attributes:
        token: goes into what proves knowledge of the job's secret. In a job without one it is all there is to know.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    token: str = Field(repr=False)


class Standing(Message):
    """Worker to agent: it has entered ``epoch``, and which copies of others' state it holds.

    Attributes:
        replicas: ranks of the roles whose replicas are complete, shadows' and learners'.
        place: where others find what it offers.
    """

    type: Literal["standing"] = "standing"
    epoch: int
    replicas: list[int] = Field(default_factory=list)
    place: Place | None = None


class Places(Message):
    """Agent to a worker that has not been admitted yet: where it can ask what the job has done so far."""

    type: Literal["places"] = "places"
    places: list[Place]


class Contact(Message):
    """Agent to worker: etcd's newest plan was one of this lineage, and not fatal, at ``at`` or later.

    Attributes:
        origin, generation: see :class:`~bamboo_ds.topology.plan.Plan`.
        at: see :func:`~.fencing.now`.
    """

    type: Literal["contact"] = "contact"
    origin: str
    generation: int
    at: float


class Suspicion(Message):
    """Worker to agent: an operation of ``epoch`` towards ``member`` failed."""

    type: Literal["suspect"] = "suspect"
    epoch: int
    member: str
    reason: str


class EventReport(Message):
    """Worker to agent: an event for the job's event file."""

    type: Literal["event"] = "event"
    kind: str
    fields: dict[str, Any] = Field(default_factory=dict)


class ExitNotice(Message):
    """Worker to agent: the worker is about to end, for this reason.

    Attributes:
        reason: for people.
        failed: the script failed. That ends the job, so nobody must take the worker for lost meanwhile; unless
            ``bamboo.recovery.on_exception`` says otherwise.
        code: the exit code that it is going to have, if it failed.
        done: the script has ended well, and nobody needs the worker any more.
        step: newest step that it has committed.
    """

    type: Literal["exit"] = "exit"
    reason: str
    failed: bool = False
    code: int = 1
    done: bool = False
    step: int | None = None


ToWorker = Annotated[PlanPush | StoreAddress | Places | Contact, Field(discriminator="type")]
ToAgent = Annotated[
    StoreAddress | Heartbeat | LayoutReport | Standing | Suspicion | EventReport | ExitNotice,
    Field(discriminator="type"),
]

_TO_WORKER: TypeAdapter[PlanPush | StoreAddress | Places | Contact] = TypeAdapter(ToWorker)
_TO_AGENT: TypeAdapter[StoreAddress | Heartbeat | LayoutReport | Standing | Suspicion | EventReport | ExitNotice] = (
    TypeAdapter(ToAgent)
)


def parse_to_worker(line: bytes) -> PlanPush | StoreAddress | Places | Contact:
    """Parse one line that an agent sent; raises ``pydantic.ValidationError``."""
    return _TO_WORKER.validate_json(line)


def parse_to_agent(
    line: bytes,
) -> StoreAddress | Heartbeat | LayoutReport | Standing | Suspicion | EventReport | ExitNotice:
    """Parse one line that a worker sent; raises ``pydantic.ValidationError``."""
    return _TO_AGENT.validate_json(line)
