"""The actions of a leader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import BambooConfig
from ...topology.plan import Plan
from ..registry.records import RestartRecord


@dataclass(frozen=True)
class Loss:
    """A member that a new plan drops.

    Attributes:
        reason: how it was noticed.
        detail: exit code, name of the signal, or names of the accusers, or what it could not abort.
        detection_s: seconds from the fault to its notice; ``None`` where unknown.
        noticed: monotonic seconds of the notice.
    """

    member: str
    reason: Literal["exit", "signal", "heartbeat", "hang", "lease", "suspects", "abort"]
    detail: str
    detection_s: float | None
    noticed: float


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something changes, or before the monotonic time ``until``; ``reason`` is worth telling."""

    until: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class WritePlan:
    """Replaces the plan that the view showed by ``plan``."""

    plan: Plan
    reason: str
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True)
class StopJob:
    """Ends the job on all members with exit code ``code``."""

    code: int
    reason: str
    losses: tuple[Loss, ...] = ()


@dataclass(frozen=True)
class Assign:
    """Starts workers: for every rank, on the slots that the record names."""

    record: RestartRecord


@dataclass(frozen=True)
class StartDataWorkers:
    """Starts a worker that runs as each of ``ranks``, since nobody can draw the batches of these pipelines."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Complete:
    """Completes the job's record, which was open, by the settings that its workers have told."""

    settings: BambooConfig


@dataclass(frozen=True)
class Ask:
    """Asks the agents of members that are accused whether their workers live."""

    members: tuple[str, ...]


Action = Wait | Ask | WritePlan | StopJob | StartDataWorkers | Assign | Complete
