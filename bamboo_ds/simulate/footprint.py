"""The memory that members of a simulated job need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..config import RedundancyMode
from ..topology import Candidate, Layout, Plan, Room, StageMemory
from ..topology.memory import StateBytes
from ..topology.room import member_bytes
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
            found.append(replace(self.state.of(count), passes=round(self._passes(stage)), redundant=chosen))
        return tuple(found)

    def _passes(self, stage: int) -> float:
        """Bytes of the activations in flight. Tensors that are kept for a takeover are in host memory."""
        return min(self.layout.stages - stage, self.micro_batches) * self.kept[stage]

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
        known = member_bytes(plan, [self.state.of(count) for count in self.parameters])
        need: dict[str, float] = {member: sum(both) for member, both in known.items()}
        for rank, member in plan.builders if not self.state.parked else ():
            if member in need:
                need[member] += self.parameters[rank // self.layout.pipelines] * self.state.shadow
        for rank, owner in enumerate(plan.owners):
            if owner in need:
                need[owner] += self._passes(rank // self.layout.pipelines)
        return max(need.values(), default=0.0) + self.profile.workspace_bytes

    def fits(self, plan: Plan) -> bool:
        """Whether all members have the memory that ``plan`` needs, but for what waits in host memory."""
        return self.profile.memory_bytes is None or self.need(plan, waiting=False) <= self.profile.memory_bytes
