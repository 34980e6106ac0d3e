"""The plan: owner and shadow of every role in one epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pydantic import TypeAdapter

from .block_costs import BlockCosts
from .memory import StageMemory
from .roles import Layout, Role

SCHEMA = 5
#: Generation of a job whose workers have not been started yet.
UNSTARTED = -1

#: The end of an iteration that takes so many seconds is not waited for where copies, or another plan, serve before it.
LONG_S = 30.0

#: When members enter an epoch: at once, as after a loss; at once if they are in an iteration, else at the next boundary
#: between two operations; or together at that boundary.
When = Literal["now", "iteration", "boundary"]
#: Which part of a stage: its first blocks or its last ones.
Side = Literal["front", "rear"]


@dataclass(frozen=True)
class Lent:
    """Blocks of a role that its shadow computes, since it has time for them.

    State does not move for that: owner and shadow hold all of the stage, and the gradients of all of its layers reach
    both at the end of every iteration.

    Attributes:
        rank: of the role.
        cut: the first block of the rear part, which has those from there on; the front part has the others.
        side: the part that the shadow computes. The owner computes the other one.
    """

    rank: int
    cut: int
    side: Side


@dataclass(frozen=True)
class Plan:
    """The whole topology of one epoch: the only source of every member's duties.

    Attributes:
        epoch: number of the plan; every change of plan is a new epoch.
        owners: owner of every role, indexed by the role's rank.
        members: living members that take part in this epoch, in the order of their slots.
        layout: the logical world; ``None`` until the engines have reported it.
        shadows: shadow of every role, indexed by rank; ``None`` where a role has no replica.
        lost: members that this plan removed from the one before it.
        lost_roles: ranks of roles without any living holder. Not empty means a fatal loss.
        builders: (rank, member): copies of a role's state that are being made; they follow the owner like a
            shadow does, but hold nothing to rely on before they are reported ready.
        lent: parts of stages that shadows compute, at most one of each role.
        cuts: by stage the blocks before which it may be divided; ``None`` where no worker has told yet.
        costs: of the blocks, as workers have measured them; ``None`` before that.
        memory: by stage what its roles take; empty where no worker has told.
        unshadowed: ranks of roles that have no shadow since no member may hold so much.
        crowded: members that have to hold more than they may, since all others would as well.
        parked: members whose replicas wait in host memory, and compute nothing before their stage is lost or divided.
        tight: members that have no room for all that they own and shadow as it is, each with a number of micro-batches.
            The optimizers of their roles, but for that of their script's own, are in host memory between steps, and
            each role that they compute has so many micro-batches under way, at most; 0: as many as 1F1B has.
        places: for every one of ``members``, where others reach its worker: address, port and token, with blanks
            between. Empty in plans that no leader has written.
        script_ranks: for every one of ``members``, the rank that its worker's script runs as. Its data iterators are
            those of that rank. Not unique: a standby shares that of another member.
        when: members enter this epoch, see :data:`When`.
        origin: names the job, from its first plan on: that one's nonce.
        generation: the restart (0: the first start) whose workers these are; :data:`UNSTARTED`: there are none yet.
        fence_s: see ``bamboo.membership.fence_s``; settled by the first plan, so that all go by the same number.
        nonce: drawn for every attempt to write a plan, so that its writer recognises it.
        schema: version of this record.
    """

    epoch: int
    owners: tuple[str, ...]
    members: tuple[str, ...]
    layout: Layout | None = None
    shadows: tuple[str | None, ...] = ()
    lost: tuple[str, ...] = ()
    lost_roles: tuple[int, ...] = ()
    builders: tuple[tuple[int, str], ...] = ()
    lent: tuple[Lent, ...] = ()
    cuts: tuple[tuple[int, ...] | None, ...] = ()
    costs: BlockCosts | None = None
    memory: tuple[StageMemory, ...] = ()
    unshadowed: tuple[int, ...] = ()
    crowded: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()
    tight: tuple[tuple[str, int], ...] = ()
    places: tuple[str, ...] = field(default=(), repr=False)
    script_ranks: tuple[int, ...] = ()
    when: When = "now"
    origin: str = ""
    generation: int = 0
    fence_s: float | None = None
    nonce: str = ""
    schema: int = SCHEMA

    @property
    def lineage(self) -> tuple[str, int]:
        """Name of the lineage: all plans, steps and checkpoints of one start of the job's workers."""
        return self.origin, self.generation

    @property
    def world(self) -> Layout:
        """The layout; raises ``ValueError`` before the engines have reported it."""
        if self.layout is None:
            raise ValueError(f"plan of epoch {self.epoch} has no layout yet")
        return self.layout

    def interrupts(self, iterating: bool = True) -> bool:
        """Whether a member breaks off what it does to enter this epoch: an iteration, or something else."""
        return self.when == "now" or (self.when == "iteration" and iterating)

    def place(self, member: str) -> str:
        """The address of the worker of ``member``; empty where that is not known."""
        return dict(zip(self.members, self.places, strict=False)).get(member, "")

    def owner(self, role: Role) -> str:
        """The member that computes ``role``."""
        return self.owners[self.world.rank(role)]

    def shadow(self, role: Role) -> str | None:
        """The member that holds the replica of ``role``, if any."""
        return self.shadows[self.world.rank(role)] if self.shadows else None

    def lending(self, role: Role) -> Lent | None:
        """The part of ``role`` that its shadow computes, if any."""
        return self._lent.get(self.world.rank(role))

    @cached_property
    def _lent(self) -> dict[int, Lent]:
        return {each.rank: each for each in self.lent}

    def computers(self, role: Role) -> tuple[str, ...]:
        """The members that compute ``role``, in the order of their parts."""
        owner, lent = self.owner(role), self.lending(role)
        return (owner,) if lent is None else part_hosts(owner, self.shadow(role), lent.side)

    def lent_blocks(self, lent: Lent) -> tuple[int, int]:
        """The first of the blocks that are ``lent``, and the first one behind them."""
        blocks = self.world.blocks_of(self.world.role(lent.rank).stage)
        return (0, lent.cut) if lent.side == "front" else (lent.cut, blocks)

    def owned_by(self, member: str) -> tuple[Role, ...]:
        """Roles that ``member`` owns, in rank order."""
        return tuple(self.world.role(rank) for rank, owner in enumerate(self.owners) if owner == member)

    def shadowed_by(self, member: str) -> tuple[Role, ...]:
        """Roles whose replica ``member`` holds, in rank order."""
        return tuple(self.world.role(rank) for rank, shadow in enumerate(self.shadows) if shadow == member)

    def built_by(self, member: str) -> tuple[Role, ...]:
        """Roles of whose state ``member`` is making a copy, in rank order."""
        return tuple(self.world.role(rank) for rank, builder in sorted(self.builders) if builder == member)

    def script_rank(self, member: str) -> int:
        """The rank that the script of ``member`` runs as; raises ``ValueError`` if the plan does not list it."""
        return self.script_ranks[self.members.index(member)]

    def to_json(self) -> str:
        """The plan as JSON, as it is stored in etcd and pushed to workers."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parses :meth:`to_json`'s output; raises ``pydantic.ValidationError`` for anything else."""
        return _ADAPTER.validate_json(text)


def part_hosts(owner: str, shadow: str | None, side: Side) -> tuple[str, str]:
    """The members that compute front and rear of a role whose ``side`` is lent to its ``shadow``."""
    if shadow is None:
        raise ValueError(f"a part of a role of {owner} is lent to nobody")
    return (shadow, owner) if side == "front" else (owner, shadow)


_ADAPTER = TypeAdapter(Plan)
