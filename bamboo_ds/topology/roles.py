"""Roles: the fixed duties of a job, numbered as DeepSpeed's topologies number ranks.

Where layers are cut into tensor slices, every slice has a pipeline of its own: slice ``m`` of data-parallel copy ``d``
is pipeline ``d * slices + m``. Its stages exchange activations and gradients among themselves only, and no other
pipeline holds its state. Slices meet in the collectives inside their layers, hence in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

#: The most blocks that a stage is cut into where ``topology.blocks`` is "auto".
MOST_BLOCKS = 16


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

    A role's rank is its logical rank in DeepSpeed's ``PipeDataParallelTopology`` (axes ``pipe``, ``data``) or
    ``PipeModelDataParallelTopology`` (axes ``pipe``, ``data``, ``model``): ``stage * pipelines + pipeline``.

    Attributes:
        pipelines: data-parallel copies of the model, times ``slices``.
        stages: stages of each.
        sharded: every role of a stage has optimizer state of its own (ZeRO), so none can stand in for another.
        slices: tensor slices that the layers are cut into.
        blocks: number of blocks of each stage: runs of consecutive layers, the smallest units of work that a stage can
            be divided at. Empty: stages are computed whole.

    Raises:
        ValueError: ``slices`` does not divide ``pipelines``; ``blocks`` are not those of ``stages``.
    """

    pipelines: int
    stages: int
    sharded: bool = False
    slices: int = 1
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.slices < 1 or self.pipelines % self.slices:
            raise ValueError(f"{self.pipelines} pipelines cannot be those of {self.slices} slices each")
        if self.blocks and (len(self.blocks) != self.stages or min(self.blocks) < 1):
            raise ValueError(f"blocks {self.blocks} are not those of {self.stages} stages")

    def blocks_of(self, stage: int) -> int:
        """Number of blocks of ``stage``."""
        return self.blocks[stage] if self.blocks else 1

    @property
    def size(self) -> int:
        """Number of roles, which is the logical world size."""
        return self.pipelines * self.stages

    @property
    def copies(self) -> int:
        """Data-parallel copies of the model."""
        return self.pipelines // self.slices

    @property
    def alike(self) -> bool:
        """Whether owners of a stage in several copies of the model have the same state: one may stand in for others."""
        return self.copies > 1 and not self.sharded

    @property
    def ahead(self) -> bool:
        """Whether replicas may compute ahead of a loss: slices would have to agree when, a stage alone feeds none."""
        return self.slices == 1 and self.stages > 1

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

    def copy_of(self, role: Role) -> int:
        """The data-parallel copy of the model that ``role`` is a part of."""
        return role.pipeline // self.slices

    def slice_of(self, role: Role) -> int:
        """The tensor slice that ``role`` computes."""
        return role.pipeline % self.slices

    def siblings(self, role: Role) -> tuple[Role, ...]:
        """The roles of the same stage and slice in all copies of the model, ``role`` included; of equal weights."""
        return tuple(Role(pipeline, role.stage) for pipeline in range(self.slice_of(role), self.pipelines, self.slices))

    def slices_with(self, role: Role) -> tuple[Role, ...]:
        """All slices of the stage of one copy of the model, ``role`` included: they do their passes together."""
        first = role.pipeline - self.slice_of(role)
        return tuple(Role(pipeline, role.stage) for pipeline in range(first, first + self.slices))


@lru_cache(maxsize=64)
def groups_like(layout: Layout, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The group of every rank that extends along the same axes (stages, copies, slices) as the group of ``ranks``."""
    places = [(role.stage, layout.copy_of(role), layout.slice_of(role)) for role in layout.roles]
    fixed = [axis for axis in range(3) if len({places[rank][axis] for rank in ranks}) == 1]
    keys = [tuple(place[axis] for axis in fixed) for place in places]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(groups[key]) for key in keys)
