"""Stages x pipelines: who has what, and what the loss of a member would mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..topology.plan import Plan
from . import events as ev
from .event_base import Role
from .view import Heir, Moved, RoleState, RoleView


@dataclass
class Duties:
    """The duties of a member, and their heirs."""

    roles: list[Role] = field(default_factory=list)
    shadows: list[Role] = field(default_factory=list)
    copies: list[Role] = field(default_factory=list)
    load: float | None = 0.0
    heirs: list[Heir] = field(default_factory=list)
    fatal: list[Role] = field(default_factory=list)


@dataclass(frozen=True)
class Grid:
    """The topology of one epoch, from a plan or from the event that tells of it. See :class:`~..topology.plan.Plan`.

    Attributes:
        pipelines: ``None`` before engines are built.
        lent: by rank the blocks that the shadow computes: the first, and the first one behind them.
        copies: (rank, member): a member makes a copy of the role's state.
        blocks: of each stage; empty where not known.
        alone: no role can stand in for another one of its stage: their states differ, or nobody knows.
    """

    epoch: int = 0
    members: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    shadows: tuple[str | None, ...] = ()
    pipelines: int | None = None
    slices: int = 1
    lent: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    copies: tuple[tuple[int, str], ...] = ()
    blocks: tuple[int, ...] = ()
    lost_roles: frozenset[int] = frozenset()
    alone: bool = True

    @classmethod
    def of_event(cls, plan: ev.PlanWritten) -> Grid:
        """The grid by the event, without copies in the making, blocks, and whether states are sharded."""
        return cls(
            epoch=plan.epoch,
            members=tuple(plan.members),
            owners=tuple(plan.owners),
            shadows=tuple(plan.shadows),
            pipelines=plan.pipelines,
            lent={rank: (first, behind) for rank, first, behind in plan.lent},
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Grid:
        """All of it."""
        layout = plan.layout
        return cls(
            epoch=plan.epoch,
            members=plan.members,
            owners=plan.owners,
            shadows=plan.shadows,
            pipelines=layout.pipelines if layout else None,
            slices=layout.slices if layout else 1,
            lent={each.rank: plan.lent_blocks(each) for each in plan.lent} if layout else {},
            copies=plan.builders,
            blocks=tuple(map(layout.blocks_of, range(layout.stages))) if layout else (),
            lost_roles=frozenset(plan.lost_roles),
            alone=layout.sharded if layout else True,
        )

    @property
    def stages(self) -> int | None:
        """Stages of each pipeline."""
        return None if self.pipelines is None else len(self.owners) // self.pipelines

    @property
    def redundant(self) -> bool:
        """Whether any role has a shadow."""
        return any(self.shadows)

    @property
    def complete(self) -> bool:
        """Whether every role has one."""
        return bool(self.shadows) and None not in self.shadows

    def role(self, rank: int) -> Role:
        """The role of a rank, in the one pipeline of a job whose pipelines are not known."""
        pipelines = self.pipelines or 1
        return rank % pipelines, rank // pipelines

    def moved(self, before: Grid) -> list[Moved]:
        """Roles that living members have got from others since the plan ``before``."""
        alive = set(self.members)
        pairs = zip(before.owners, self.owners, strict=False)
        return [
            Moved(role=self.role(rank), before=old, after=new)
            for rank, (old, new) in enumerate(pairs)
            if old != new and new in alive
        ]

    def unshadowed(self, redundant: bool = False) -> tuple[Role, ...] | None:
        """Roles without a shadow; ``None`` where none has one, unless the job is known to be ``redundant``."""
        if self.pipelines is None or not (redundant or self.redundant):
            return None
        shadows = self.shadows or (None,) * len(self.owners)
        return tuple(self.role(rank) for rank, shadow in enumerate(shadows) if shadow is None)

    @cached_property
    def roles(self) -> tuple[RoleView, ...]:
        """The roles by rank; none before engines are built."""
        if self.pipelines is None:
            return ()
        copying: dict[int, list[str]] = {}
        for rank, member in self.copies:
            copying.setdefault(rank, []).append(member)
        alive, found = set(self.members), []
        for rank, owner in enumerate(self.owners):
            pipeline, stage = self.role(rank)
            shadow = self.shadows[rank] if self.shadows else None
            state: RoleState = "shadowed" if shadow else "copying" if rank in copying else "unshadowed"
            if rank in self.lost_roles or owner not in alive:
                state = "lost"
            found.append(
                RoleView(
                    rank=rank,
                    pipeline=pipeline,
                    stage=stage,
                    owner=owner,
                    shadow=shadow,
                    copying=tuple(copying.get(rank, ())),
                    state=state,
                    lent=self.lent.get(rank),
                    blocks=self.blocks[stage] if self.blocks else None,
                )
            )
        return tuple(found)

    @cached_property
    def duties(self) -> dict[str, Duties]:
        """The duties by member; those of the plan, and others that it names."""
        found = {member: Duties() for member in self.members}
        if self.pipelines is None:
            for duties in found.values():
                duties.load = None
            return found
        for rank, owner in enumerate(self.owners):
            role = self.role(rank)
            shadow = self.shadows[rank] if self.shadows else None
            found.setdefault(owner, Duties()).roles.append(role)
            if shadow is not None:
                found.setdefault(shadow, Duties()).shadows.append(role)
            self._share(found, rank, owner, shadow)
        for rank, member in self.copies:
            found.setdefault(member, Duties()).copies.append(self.role(rank))
        self._foretell(found)
        return found

    def _share(self, found: dict[str, Duties], rank: int, owner: str, shadow: str | None) -> None:
        """Counts the work of a role for those who compute it."""
        lent, mine = self.lent.get(rank), found[owner]
        if lent is None or shadow is None:
            mine.load = None if mine.load is None else mine.load + 1.0
            return
        other = found[shadow]
        if not self.blocks:
            mine.load = other.load = None
            return
        part = (lent[1] - lent[0]) / self.blocks[self.role(rank)[1]]
        mine.load = None if mine.load is None else mine.load + 1.0 - part
        other.load = None if other.load is None else other.load + part

    def _foretell(self, found: dict[str, Duties]) -> None:
        """Foretells each role's heirs, were a member lost: as :func:`~bamboo_ds.topology.planner.takeover` has it."""
        alive = set(self.members)
        twins: dict[tuple[int, int], list[str]] = {}  # owners of a stage and slice, those with least to do first
        for rank, owner in enumerate(self.owners):
            if rank not in self.lost_roles and owner in alive:
                pipeline, stage = self.role(rank)
                twins.setdefault((stage, pipeline % self.slices), []).append(owner)
        for key, owners in twins.items():
            twins[key] = sorted(dict.fromkeys(owners), key=lambda member: len(found[member].roles))[:2]
        for rank, owner in enumerate(self.owners):
            role = pipeline, stage = self.role(rank)
            heir = self.shadows[rank] if self.shadows else None
            if heir is None and not self.alone:
                heir = next((m for m in twins.get((stage, pipeline % self.slices), ()) if m != owner), None)
            if heir is not None and heir in alive:
                found[owner].heirs.append(Heir(role=role, heir=heir))
            else:
                found[owner].fatal.append(role)
