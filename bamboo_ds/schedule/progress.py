"""Progress of an interrupted iteration, and what the survivors do about it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from ..errors import ProtocolError
from ..topology import Layout, Lent, Plan, Role, Side, part_hosts


@dataclass(frozen=True)
class PartProgress:
    """The progress of a part of a stage on the member that computes it. Members send it as it is.

    Attributes:
        begin: its first block.
        end: the first block behind it.
        forwards: forward passes finished: micro-batches ``0 .. forwards - 1``. Of a role that was just taken over these
            are the redundant ones.
        backwards: backward passes whose gradients are in the member's sums.
        since: the first micro-batch of which the member holds what its passes have given to the parts beside. Before
            it is what the sums contain that have come from a lost member.
        given: gradients of the part's outputs that are here, used or received and kept: of micro-batches
            ``0 .. given - 1``.
        sums: numbers of micro-batches whose sums of gradients are here: the part can go on from each of them.
        broken: a pass was interrupted that had changed something: what is finished cannot be gone on from.

    Raises:
        ProtocolError: not ``0 <= since <= backwards <= forwards``.
    """

    begin: int = 0
    end: int = 1
    forwards: int = 0
    backwards: int = 0
    since: int = 0
    given: int = 0
    sums: tuple[int, ...] = ()
    broken: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.since <= self.backwards <= self.forwards:
            raise ProtocolError(
                f"impossible progress: {self.forwards} forwards, {self.backwards} backwards, held from {self.since} on"
            )

    @property
    def blocks(self) -> tuple[int, int]:
        """The first one, and the one behind the last."""
        return self.begin, self.end

    def passes(
        self, forwards: int | None = None, backwards: int | None = None, since: int | None = None
    ) -> PartProgress:
        """The passes alone, without what is held besides; other numbers of them where these are given."""
        return PartProgress(
            self.begin,
            self.end,
            self.forwards if forwards is None else forwards,
            self.backwards if backwards is None else backwards,
            self.since if since is None else since,
        )


@dataclass(frozen=True)
class RoleProgress:
    """The progress of a role on its (new) owner; with its shadow's, where that computes a part.

    Attributes:
        parts: the whole role; or its front and its rear, where it is divided in this iteration.
        reduced: the role's reduced gradients are held, by its owner or because its shadow had received them.
            The role needs nothing more from its pipeline and counts as finished, whatever the counters say.
        state_only: the role was taken over: of the passes beyond those counted there are neither boundary tensors nor
            sums, also if it is reduced. See :func:`~.settling.settle`.
        lent: the part that the role's shadow computes. A divided role none of whose parts is lent was taken over in
            this iteration.
    """

    parts: tuple[PartProgress, ...] = (PartProgress(),)
    reduced: bool = False
    state_only: bool = False
    lent: Side | None = None

    @property
    def begun(self) -> bool:
        """Whether anything was done."""
        return self.reduced or self.state_only or any(part.forwards for part in self.parts)

    def afresh(self) -> RoleProgress:
        """The progress of the role, divided alike, in an iteration that no member has begun."""
        return RoleProgress(tuple(PartProgress(*part.blocks) for part in self.parts), lent=self.lent)


def not_begun(blocks: int, lent: Lent | None) -> RoleProgress:
    """The progress of a role of so many ``blocks`` of which nothing is done, and of which ``lent`` is lent."""
    bounds = (0, blocks) if lent is None else (0, lent.cut, blocks)
    parts = tuple(PartProgress(*each) for each in pairwise(bounds))
    return RoleProgress(parts, lent=None if lent is None else lent.side)


@lru_cache(maxsize=8)
def beginning(plan: Plan) -> Mapping[Role, RoleProgress]:
    """The progress of all roles in an iteration of ``plan`` that no member has begun. Cached and read-only."""
    world = plan.world
    found = {role: not_begun(world.blocks_of(role.stage), plan.lending(role)) for role in world.roles}
    return MappingProxyType(found)


#: Finished passes of the parts of every role, by rank. Hashable form of a progress mapping.
Finished = tuple[tuple[PartProgress, ...], ...]


def finished(layout: Layout, micro_batches: int, progress: Mapping[Role, RoleProgress]) -> Finished:
    """Counters of all roles by rank; a reduced role counts as having finished all ``micro_batches``.

    Raises:
        ProtocolError: a role is missing, unknown, or has finished more than ``micro_batches``; or slices of a stage
            differ (see :func:`~.settling.settle`).
    """
    if progress.keys() != set(layout.roles):
        odd = ", ".join(str(role) for role in sorted(progress.keys() ^ set(layout.roles)))
        raise ProtocolError(f"progress must name every role of {layout} once; missing or unknown: {odd}")
    counters = []
    for role in layout.roles:
        parts = progress[role].parts
        for part in parts:
            if part.forwards > micro_batches:
                raise ProtocolError(f"role {role} reports {part.forwards} forwards of {micro_batches} micro-batches")
        if progress[role].reduced:
            # Of one that was taken over with nothing else there is nothing that others could have.
            bare = micro_batches if progress[role].state_only else 0
            parts = tuple(part.passes(micro_batches, micro_batches, max(bare, part.since)) for part in parts)
        counters.append(tuple(part.passes() for part in parts))
    for first in range(0, layout.size, layout.slices) if layout.slices > 1 else ():
        together = counters[first : first + layout.slices]
        if len({tuple((part.forwards, part.backwards) for part in parts) for parts in together}) > 1:
            raise ProtocolError(f"slices of {layout.role(first)} are at different places of an iteration: {counters}")
    return tuple(counters)


#: The members that compute the parts of every role, by rank.
Hosts = tuple[tuple[str, ...], ...]


def beside(
    layout: Layout, parts: Sequence[Sequence[object]], rank: int, index: int, step: int
) -> tuple[int, int] | None:
    """Rank and number of the part before (``step`` -1) or after part ``index`` of a role, if there is one.

    Args:
        parts: of every role, by rank.
    """
    if 0 <= index + step < len(parts[rank]):
        return rank, index + step
    rank += step * layout.pipelines
    return (rank, len(parts[rank]) - 1 if step < 0 else 0) if 0 <= rank < layout.size else None


def hosts(plan: Plan, progress: Mapping[Role, RoleProgress]) -> Hosts:
    """The members that compute the parts of every role in an iteration of ``progress``."""
    found: list[tuple[str, ...]] = []
    for role in plan.world.roles:
        owner, done = plan.owner(role), progress[role]
        if done.lent is not None:
            found.append(part_hosts(owner, plan.shadow(role), done.lent))
        else:
            found.append((owner,) * len(done.parts))
    return tuple(found)


@dataclass(frozen=True)
class MemberProgress:
    """A survivor's report to the others after a loss.

    Attributes:
        step: iterations that the member has committed *and* stepped; it is in iteration ``step``.
        entered: it has everything that the commit of iteration ``step`` needs of it: its sends are drained,
            its own roles are reduced and it has received the reduced gradients of the roles it shadows.
        roles: progress in iteration ``step`` of every role that it owns under the *new* plan.
        commit: the committed vector of iteration ``step - 1``; ``None`` before the first commit.
    """

    step: int
    entered: bool
    roles: Mapping[Role, RoleProgress]
    commit: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Decision:
    """The decision of all survivors; equal on all of them.

    Attributes:
        step: the iteration K that goes on.
        mode: ``"commit"``: run :func:`~.program.commit_program`; ``"resume"``: run
            :func:`~.program.member_program` with ``progress``.
        behind: members that first step iteration K - 1, with ``commit_vector``, and drop its data.
        commit_vector: the committed vector of iteration K - 1; ``None`` if no iteration was committed yet.
        progress: progress of every role in iteration K.
    """

    step: int
    mode: Literal["commit", "resume"]
    behind: tuple[str, ...] = ()
    commit_vector: tuple[float, ...] | None = None
    progress: Mapping[Role, RoleProgress] = field(default_factory=dict)


def decide(records: Mapping[str, MemberProgress], layout: Layout) -> Decision:
    """The decision on the interrupted iteration, from the records of *all* members of the new plan.

    Let K be the largest ``step`` among them. The rules, and why each is right:

    1. *Nobody is more than one iteration behind.* The commit of K - 1 is an all-reduce over all owners: a
       member at K passed it, hence every survivor had entered it, hence had stepped K - 2.
    2. *A member at K - 1 has entered.* By the same argument. It has all that a step needs except the vector
       of the commit, which every member at K holds; so it takes that one and steps, its roles and replicas.
       It has not begun K: its roles have zero progress there.
    3. *All members at K, all entered: redo the commit.* No survivor has passed the commit of K (its step
       would be K + 1), so none has stepped. Every role's reduced gradients exist: where the owner died, its
       shadow had received them, because the shadow has entered. Only the all-reduce is missing.
    4. *Otherwise: resume iteration K.* Some member had not entered its commit, so nobody can have passed it
       and nobody has stepped K. The iteration is finished from the progress that exists.

    The order of ``records`` does not matter. The vectors of all members at K must be bit-equal (they are
    results of one all-reduce); a difference would make replicas diverge silently.

    Raises:
        ProtocolError: the records contradict the rules above, do not name each role of ``layout`` exactly
            once, or the vectors of the last commit differ or are missing where one is needed.
    """
    if not records:
        raise ProtocolError("no records to decide upon")
    step = max(record.step for record in records.values())
    progress: dict[Role, RoleProgress] = {}
    behind = []
    vectors: dict[bytes, tuple[float, ...]] = {}
    for member, record in sorted(records.items()):
        if record.step < step - 1 or (record.step == step - 1 and not record.entered):
            raise ProtocolError(
                f"member {member} is in iteration {record.step} (entered its commit: {record.entered}) "
                f"while iteration {step - 1} is committed"
            )
        if record.step == step and record.commit is not None:
            vectors[struct.pack(f"{len(record.commit)}d", *record.commit)] = record.commit
        if record.step < step:
            behind.append(member)
        for role, done in record.roles.items():
            if role in progress:
                raise ProtocolError(f"role {role} is claimed by {member} and by another member")
            progress[role] = done if record.step == step else done.afresh()
    if progress.keys() != set(layout.roles):
        odd = ", ".join(str(role) for role in sorted(progress.keys() ^ set(layout.roles)))
        raise ProtocolError(f"the records must name every role of {layout} once; missing or unknown: {odd}")
    if len(vectors) > 1:
        raise ProtocolError(f"members disagree on the commit of iteration {step - 1}: {sorted(vectors.values())}")
    vector = next(iter(vectors.values()), None)
    if behind and vector is None:
        raise ProtocolError(f"{', '.join(behind)} must step iteration {step - 1}, but nobody has its commit vector")
    entered = not behind and all(record.entered for record in records.values())
    return Decision(step, "commit" if entered else "resume", tuple(behind), vector, progress)
