"""Roles: the fixed duties of a job, numbered as DeepSpeed's ``PipeDataParallelTopology`` numbers ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, order=True)
class Role:
    """The duty "stage ``stage`` of pipeline ``pipeline``"."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"({self.pipeline},{self.stage})"


@dataclass(frozen=True)
class Layout:
    """The logical world of a job: ``pipelines`` x ``stages`` roles for its whole life.

    A role's rank is its logical rank in DeepSpeed's ``PipeDataParallelTopology`` (axes ``pipe``,
    ``data``): ``stage * pipelines + pipeline``.
    """

    pipelines: int
    stages: int

    @property
    def size(self) -> int:
        """Number of roles, which is the logical world size."""
        return self.pipelines * self.stages

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """All roles in rank order."""
        return tuple(self.role(rank) for rank in range(self.size))

    def rank(self, role: Role) -> int:
        """The logical rank of ``role``."""
        return role.stage * self.pipelines + role.pipeline

    def role(self, rank: int) -> Role:
        """The role with logical rank ``rank``."""
        stage, pipeline = divmod(rank, self.pipelines)
        return Role(pipeline, stage)

    def predecessor(self, role: Role) -> Role:
        """The role before ``role`` in its pipeline; the last stage for stage 0."""
        return Role(role.pipeline, (role.stage - 1) % self.stages)

    def successor(self, role: Role) -> Role:
        """The role after ``role`` in its pipeline; stage 0 for the last stage."""
        return Role(role.pipeline, (role.stage + 1) % self.stages)
