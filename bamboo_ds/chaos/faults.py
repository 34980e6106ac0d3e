"""Faults, their targets and their outcomes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import ConfigError


class FaultKind(str, Enum):
    """Kinds of faults.

    A *silent* fault is one after which nobody says that the member is gone.
    """

    #: SIGKILL of a worker.
    KILL = "kill"
    #: SIGKILL of an agent; the kernel ends its worker with it.
    KILL_AGENT = "kill_agent"
    #: SIGSTOP of a worker, SIGCONT after some seconds.
    STOP = "stop"
    #: SIGSTOP of a worker and its agent, SIGCONT after some seconds: a silent node.
    FREEZE = "freeze"
    #: The worker's interpreter does nothing for some seconds; needs :mod:`.victim` in the worker.
    HOLD_GIL = "hold_gil"
    #: An exception in the main thread of a worker; needs :mod:`.victim` in the worker.
    EXCEPTION = "exception"
    #: A worker ends at once with an exit code; needs :mod:`.victim` in the worker.
    EXIT = "exit"
    #: SIGKILL of all agents and workers of a host at once.
    HOST = "host"
    #: The file that the member's agent takes for a notice is written.
    NOTICE = "notice"
    #: A member more.
    JOIN = "join"
    #: SIGSTOP of the embedded etcd, SIGCONT after some seconds.
    ETCD_STOP = "etcd_stop"

    @property
    def timed(self) -> bool:
        """Whether it lasts for some seconds and is undone then."""
        return self in (FaultKind.STOP, FaultKind.FREEZE, FaultKind.HOLD_GIL, FaultKind.ETCD_STOP)

    @property
    def lethal(self) -> bool:
        """Whether the members that it hits are gone for good."""
        return self in (FaultKind.KILL, FaultKind.KILL_AGENT, FaultKind.EXCEPTION, FaultKind.EXIT, FaultKind.HOST)

    @property
    def risky(self) -> bool:
        """Whether the members that it hits may be lost: a timed fault that outlasts a timeout."""
        return self.lethal or self in (FaultKind.STOP, FaultKind.FREEZE, FaultKind.HOLD_GIL)

    @property
    def aimed(self) -> bool:
        """Whether it hits members of the job."""
        return self not in (FaultKind.JOIN, FaultKind.ETCD_STOP)


#: How many of a hundred faults are of which kind. An error of the script ends the job unless its configuration says so,
#: so exceptions and exits have to be asked for.
WEIGHTS: dict[FaultKind, float] = {
    FaultKind.KILL: 22,
    FaultKind.KILL_AGENT: 10,
    FaultKind.STOP: 16,
    FaultKind.FREEZE: 8,
    FaultKind.HOLD_GIL: 10,
    FaultKind.HOST: 6,
    FaultKind.NOTICE: 8,
    FaultKind.JOIN: 14,
    FaultKind.ETCD_STOP: 6,
}
#: How long timed faults last, in seconds: from, to. Short ones are as likely as long ones on a logarithmic scale.
SECONDS: dict[FaultKind, tuple[float, float]] = {
    FaultKind.STOP: (0.05, 8.0),
    FaultKind.FREEZE: (0.2, 10.0),
    FaultKind.HOLD_GIL: (0.05, 8.0),
    FaultKind.ETCD_STOP: (0.2, 10.0),
}

#: What a record says of a joiner that another fault has hit.
HIT_ELSEWHERE = "it was hit by another fault before it was admitted"

#: What a record says that was under way when the job or the schedule ended.
GIVEN_UP = "it was under way when the job or the schedule ended"

_TARGET = re.compile(
    r"(?P<what>leader|standby|joiner)"
    r"|(?P<named>slot|member|host|node):(?P<name>\S+)"
    r"|(?P<held>owner|shadow):(?P<pipeline>\d+),(?P<stage>\d+)"
)


@dataclass(frozen=True)
class Target:
    """The target of a fault.

    Attributes:
        what: ``leader``; ``standby``: a member that owns nothing; ``joiner``: one that waits to be admitted;
            ``slot``, ``member``, ``host``: the one called ``name``; ``node``: the member that stands for the node
            ``name`` of a trace; ``owner``, ``shadow``: that of a role.
        name: see above.
        role: (pipeline, stage).
    """

    what: Literal["leader", "standby", "joiner", "slot", "member", "host", "node", "owner", "shadow"]
    name: str = ""
    role: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str | int) -> Target:
        """``3`` or ``slot:3``, ``member:ID``, ``host:NAME``, ``node:NAME``, ``owner:D,S``, ``shadow:D,S``, ``leader``,
        ``standby`` or ``joiner``; raises :class:`ConfigError` for anything else."""
        found = _TARGET.fullmatch(f"slot:{text}" if str(text).isdecimal() else str(text))
        if found is None:
            raise ConfigError(
                f"{text!r} is no target: write slot:3, member:ID, host:NAME, owner:D,S, shadow:D,S, leader, standby or "
                "joiner"
            )
        if found["what"]:
            return cls(found["what"])  # type: ignore[arg-type]
        if found["held"]:
            return cls(found["held"], role=(int(found["pipeline"]), int(found["stage"])))  # type: ignore[arg-type]
        if found["named"] == "slot" and not found["name"].isdecimal():
            raise ConfigError(f"{text!r}: a slot is a number")
        return cls(found["named"], found["name"])  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.role is not None:
            return f"{self.what}:{self.role[0]},{self.role[1]}"
        return f"{self.what}:{self.name}" if self.name else self.what


@dataclass(frozen=True)
class Fault:
    """A fault that is to happen.

    Attributes:
        number: counts the faults of a schedule from 0.
        at_s: seconds since the begin of the schedule.
        target: ``None``: whoever ``draw`` hits.
        seconds: how long a timed fault lasts.
        draw: a number in [0, 1) that decides where the schedule leaves a choice.
        healed: waits until everything that was lost before has been replaced.
    """

    number: int
    at_s: float
    kind: FaultKind
    target: Target | None = None
    seconds: float | None = None
    draw: float = 0.0
    healed: bool = False


class FaultRecord(BaseModel):
    """The outcome of a fault: a line of the journal.

    Attributes:
        number: that of the fault; ``None`` for a joiner that only keeps up the number of members.
        planned_s: when it was to happen, and ``begun_s`` when it did, in seconds since the begin of the schedule.
        time: when it happened, in seconds since 1970; ``None`` if it did not.
        members: ids of the members that it hit; of a joiner: its own, once it has one.
        pids: processes that it hit.
        seconds: how long it lasted.
        outcome: ``injected``; ``absent``: there was nobody whom it could have hit; ``spared``: until the timeout it
            would have left a stage without holder; ``impossible``: not on this host or in this job; ``failed``: it was
            tried in vain.
        confirmed: whether its effect was seen.
        detail: why, for people.
        epoch: of the plan at that time, and the newest committed ``step``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int | None
    kind: FaultKind
    target: str | None = None
    planned_s: float
    begun_s: float
    time: float | None = None
    members: list[str] = Field(default_factory=list)
    slots: list[int] = Field(default_factory=list)
    pids: list[int] = Field(default_factory=list)
    seconds: float | None = None
    outcome: Literal["injected", "absent", "spared", "impossible", "failed"]
    confirmed: bool = False
    detail: str = ""
    epoch: int = 0
    step: int | None = None
