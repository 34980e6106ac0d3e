"""Messages of the channel between an agent and its worker: one JSON object per line.

What a worker tells the whole job are the records themselves, which its agent puts into etcd. The channel is an
inherited ``AF_UNIX`` socket pair, so both ends run the same version of this package and a message that does not parse
is a defect, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ..topology.plan import Plan
from .registry.records import LayoutRecord, SuspicionRecord, WorkerState


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


class Heartbeat(Message):
    """Worker to agent: the interpreter runs. Carries the newest committed step and checkpoint.

    Attributes:
        global_step: ``step`` as DeepSpeed counts.
        beats: grows with every instruction that is done.
        computing: the worker is in the middle of an instruction and waits for nobody.
        hang_after_s: seconds without a new beat while computing after which it hangs, as far as it can tell from
            its own times; ``None`` while it cannot.
        doing: what it does that takes long outside of instructions, such as compiling an extension or replaying what
            the job has done, and how far it is; ``None``: nothing.
    """

    type: Literal["heartbeat"] = "heartbeat"
    step: int | None = None
    global_step: int | None = None
    checkpoint: str | None = None
    beats: int = 0
    computing: bool = False
    hang_after_s: float | None = None
    doing: str | None = None


class Peers(Message):
    """Agent to a worker that has not been admitted yet: members that it can ask what the job has done so far.

    Attributes:
        peers: members, and the places of their workers.
    """

    type: Literal["peers"] = "peers"
    peers: tuple[tuple[str, str], ...] = Field(repr=False)


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


ToWorker = PlanPush | Peers | Contact
ToAgent = LayoutRecord | WorkerState | SuspicionRecord | Heartbeat | EventReport | ExitNotice

_TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="type")])
_TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="type")])


def parse_to_worker(line: bytes) -> ToWorker:
    """Parses one line that an agent sent; raises ``pydantic.ValidationError``."""
    return _TO_WORKER.validate_json(line)


def parse_to_agent(line: bytes) -> ToAgent:
    """Parses one line that a worker sent; raises ``pydantic.ValidationError``."""
    return _TO_AGENT.validate_json(line)
