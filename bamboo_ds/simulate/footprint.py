"""The memory that members of a simulated job need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..config import RedundancyMode
from ..topology import Candidate, Layout, Plan, Room, StageMemory
from ..topology.memory import StateBytes
from ..topology.room import rests
from .profile import Profile


@dataclass(frozen=True)
class Footprint:
    """The memory of stages, and whether plans fit.

    Attributes:
        profile: of the model and the devices.
        layout: the logical world.
        micro_batches: of a pipeline in an iteration.
        parameters: by stage.
        kept: bytes that a micro-batch keeps, by stage.
        state: what is kept per parameter.
        mode: what shadows do.
    """

    profile: Profile
    layout: Layout
    micro_batches: int
    parameters: tuple[int, ...]
    kept: tuple[float, ...]
    state: StateBytes
    mode: RedundancyMode

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """The memory of roles by stage, as workers report it once they have measured their passes."""
        found = []
        for stage, count in enumerate(self.parameters):
            chosen = round(self.micro_batches * self.kept[stage]) if self.mode is RedundancyMode.AUTO else None
            # Tensors that are kept for a takeover are in host memory.
            under_way = min(self.layout.stages - stage, self.micro_batches)
            passes = round(under_way * self.kept[stage])
            found.append(replace(self.state.of(count), passes=passes, redundant=chosen, under_way=under_way))
        return tuple(found)

    def waiting(self, plan: Plan) -> frozenset[str]:
        """Members of ``plan`` whose replicas wait in host memory."""
        device = self.profile.memory_bytes
        if device is None:
            return frozenset()
        limit = device - self.profile.workspace_bytes
        members = [
            Candidate(m, slot, m, script_rank=self.layout.size, memory=limit) for slot, m in enumerate(plan.members)
        ]
        lacking = Room(replace(plan, memory=self.stages), members).waiting(plan.owners, plan.shadows)
        return frozenset({*plan.parked, *lacking})

    def need(self, plan: Plan, waiting: bool = True) -> float:
        """Bytes of the member that needs most; ``waiting``: with what is kept free for replicas that wait."""
        if not waiting:
            lent, waits = {each.rank for each in plan.lent}, self.waiting(plan)
            there = (s if rank in lent or s not in waits else None for rank, s in enumerate(plan.shadows))
            plan = replace(plan, shadows=tuple(there))
        counts, roles = dict(plan.tight), range(len(plan.owners))
        step = max(stage.masters for stage in self.stages)
        need: dict[str, float] = {member: step if member in counts else 0 for member in plan.members}
        for rank, owner, shadow in zip(roles, plan.owners, plan.shadows or (None,) * len(roles), strict=True):
            if owner in need:
                stage = self.on(plan, rank, owner)
                need[owner] += stage.own + (stage.bounded(counts[owner]) if counts.get(owner) else stage).passes
            if shadow in need:
                need[shadow] += self.on(plan, rank, shadow).replica
        for rank, member in plan.builders if not self.state.parked else ():
            if member in need:
                need[member] += self.parameters[rank // self.layout.pipelines] * self.state.shadow
        return max(need.values(), default=0.0) + self.profile.workspace_bytes

    def on(self, plan: Plan, rank: int, member: str) -> StageMemory:
        """What the role of ``rank`` takes on ``member``."""
        stage = self.stages[rank // self.layout.pipelines]
        return stage.lean if rests(plan, rank, member) else stage

    def resting(self, plan: Plan, rank: int) -> int:
        """Bytes of the role that its owner has in host memory between steps."""
        return self.stages[rank // self.layout.pipelines].resting if rests(plan, rank, plan.owners[rank]) else 0

    def fits(self, plan: Plan) -> bool:
        """Whether all members have the memory that ``plan`` needs, but for what waits in host memory."""
        return self.profile.memory_bytes is None or self.need(plan, waiting=False) <= self.profile.memory_bytes
