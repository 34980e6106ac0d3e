"""Input of the planner besides the plan: members, costs and the user's policy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import ConfigError
from .block_costs import BlockCosts
from .plan import Plan


@dataclass(frozen=True)
class Candidate:
    """The planner's facts on a member, living or gone.

    Attributes:
        id: member id.
        slot: number of its slot; orders members.
        host: its failure domain: all members of a host vanish together.
        zone: availability zone; empty where unknown.
        script_rank: the rank that its script runs as.
        leaving: whether it is going to vanish soon: it gets no role and no replica.
        memory: bytes that it may hold of roles (:class:`~.memory.StageMemory`); ``None``: any number.
    """

    id: str
    slot: int
    host: str
    zone: str = ""
    script_rank: int = 0
    leaving: bool = False
    memory: int | None = None


def known(plan: Plan, members: Iterable[Candidate]) -> dict[str, Candidate]:
    """``members`` and all others that ``plan`` names, by id: one of whom nothing is known is on a host of its own."""
    named = dict.fromkeys((*plan.members, *plan.owners))
    strangers = {member: Candidate(member, slot, host=member) for slot, member in enumerate(named)}
    return strangers | {member.id: member for member in members}


@dataclass(frozen=True)
class Costs:
    """Costs of the stages, indexed by stage. An empty tuple stands for equal, unknown costs.

    Attributes:
        seconds: forward and backward pass of one micro-batch.
        state_bytes: parameters and optimizer state, as far as copies contain it.
    """

    seconds: tuple[float, ...] = ()
    state_bytes: tuple[int, ...] = ()

    def with_sizes(self, plan: Plan) -> Costs:
        """The same with the sizes that workers have told, if none are given."""
        if self.state_bytes or not plan.memory:
            return self
        return replace(self, state_bytes=tuple(stage.copied for stage in plan.memory))

    def check(self, stages: int) -> None:
        """Raises :class:`ConfigError` unless both tuples are empty or have ``stages`` numbers >= 0."""
        for name, values in (("seconds", self.seconds), ("state_bytes", self.state_bytes)):
            if values and len(values) != stages:
                raise ConfigError(f"costs.{name} has {len(values)} entries: give one for each of {stages} stages")
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise ConfigError(f"costs.{name} is {values}: costs must be finite and not negative")

    def time(self, stage: int) -> float:
        """Seconds per micro-batch of ``stage``; 1 where unknown."""
        return float(self.seconds[stage]) if self.seconds else 1.0

    def weight(self, stage: int) -> int:
        """Cost of a copy of ``stage`` in comparisons: its bytes, at least 1, since no copy is free."""
        return max(1, self.size(stage))

    def size(self, stage: int) -> int:
        """Bytes of state of ``stage``; 0 where unknown."""
        return self.state_bytes[stage] if self.state_bytes else 0


@dataclass(frozen=True)
class Policy:
    """Wishes of the user, from the settings.

    Attributes:
        redundant: whether roles have replicas.
        divides: whether shadows compute parts of stages, so that standbys hold even shares of the replicas.
        standby_replicas: whether standbys hold replicas, copied there although their present shadows may stay.
        near_shadows: whether a replica is copied to the owner of the stage before, where redundant passes need no
            messages, although its present shadow may stay. Off, nothing is copied unless a rule is violated.
        zones_apart: whether shadows are moved out of the zones of their owners, although they may stay, where nobody
            but these two has the state.
        min_gain: share by which the predicted iteration time must improve before owners change for speed.
    """

    redundant: bool = True
    divides: bool = False
    standby_replicas: bool = False
    near_shadows: bool = False
    zones_apart: bool = False
    min_gain: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain is {self.min_gain}: it is a share of the iteration time, from 0 to below 1")


class Roster:
    """The members that may own roles, in the order of their slots.

    Attributes:
        usable: those that are not leaving; all where everybody is.
        everyone: all living members by id, also those that are leaving.
        order: position in ``usable`` by id.
        hosts: hosts of ``usable``.
        zones, domains: availability zone, empty where unknown, and failure domain of each of these, by id.

    Raises:
        ConfigError: no member, or two of one id.
    """

    def __init__(self, members: Iterable[Candidate]) -> None:
        ordered = sorted(members, key=lambda member: (member.slot, member.id))
        self.everyone = {member.id: member for member in ordered}
        if not ordered:
            raise ConfigError("a plan needs at least one member, got none")
        if len(self.everyone) != len(ordered):
            raise ConfigError("member ids must be unique: give each slot its own id")
        self.usable = tuple(member for member in ordered if not member.leaving) or tuple(ordered)
        self.order = {member.id: position for position, member in enumerate(self.usable)}
        self.hosts = frozenset(member.host for member in self.usable)
        self.zones = {member.id: member.zone for member in self.usable}
        self.domains = {member.id: self.domain(member.id) for member in self.usable}

    def domain(self, member: str) -> str:
        """Failure domain that a role's owner and shadow must not share: the host, or on a single host the member."""
        return self.everyone[member].host if len(self.hosts) > 1 else member

    def apart(self, owner: str, shadow: str) -> bool:
        """Whether ``shadow`` may shadow a role of ``owner``."""
        return shadow in self.order and shadow != owner and self.domain(shadow) != self.domain(owner)


def block_seconds(plan: Plan, costs: Costs) -> BlockCosts:
    """The costs of blocks: ``costs.seconds`` if given, else what has been measured, else the same for every stage.

    Where only the cost of a stage is known its blocks are equal.
    """
    layout = plan.world
    if plan.costs is not None and not costs.seconds:
        return plan.costs
    counts = [layout.blocks_of(stage) for stage in range(layout.stages)]
    return BlockCosts(tuple((costs.time(stage) / count,) * count for stage, count in enumerate(counts)))


def predicted_s(plan: Plan, costs: Costs) -> float:
    """Predicted seconds per micro-batch in steady state: the largest sum of costs of what any member computes.

    Pipelines meet in the reduction of gradients, so the slowest member sets the pace of all. Costs are those of
    :func:`block_seconds`.
    """
    loads: dict[str, float] = {}
    blocks = block_seconds(plan, costs)
    for role in plan.world.roles:
        lent, count = plan.lending(role), plan.world.blocks_of(role.stage)
        bounds = [0, count] if lent is None else [0, lent.cut, count]
        for member, (begin, end) in zip(plan.computers(role), pairwise(bounds), strict=True):
            seconds = blocks.part(role.stage, begin, end) * blocks.slow(member)
            loads[member] = loads.get(member, 0.0) + seconds
    return max(loads.values())
