"""Programs of the schedule for jobs on integers: each instruction with what it acts on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from bamboo_ds.schedule import (
    PartProgress,
    RoleProgress,
    beginning,
    beside,
    commit_program,
    finished,
    hosts,
    member_program,
)
from bamboo_ds.topology import Plan, Role

#: Member, role and first block of a part.
Place = tuple[str, Role, int]


class Step(NamedTuple):
    """An instruction of a program, and what it acts on.

    Attributes:
        kind: name of the instruction.
        role: that it is about.
        begin: first block of the part of it.
        m: micro-batch.
        behind, before: the parts that come after this one and before it; ``None``: there is none.
    """

    kind: str
    role: Role
    begin: int = 0
    m: int = 0
    behind: Place | None = None
    before: Place | None = None


class Programs:
    """What the members of a plan do in an iteration that goes on from some progress.

    Args:
        plan: the plan.
        micro_batches: of the iteration.
        progress: from where it goes on; ``None``: nobody has begun it.
        bubbles, every: see :func:`~bamboo_ds.schedule.member_program`.

    Attributes:
        progress: the same, of all roles.
        done: finished passes, with those of roles that are reduced.
        hosts: who computes the parts of every role.
        shares: by role and member the parts that it computes: from where it goes on, and the block behind its last.
        left: passes that are to be done, by kind.
        held: members that do their passes in another order since the plan's members are tight.
    """

    def __init__(
        self,
        plan: Plan,
        micro_batches: int,
        progress: Mapping[Role, RoleProgress] | None,
        bubbles: bool,
        every: int,
    ) -> None:
        self._plan, self._given, self._settings = plan, progress, (bubbles, every)
        self._micro_batches = micro_batches
        self.progress = beginning(plan) if progress is None else progress
        self.hosts = hosts(plan, self.progress)
        self.done = finished(plan.world, micro_batches, self.progress)
        self.shares: dict[tuple[Role, str], list[tuple[PartProgress, int]]] = defaultdict(list)
        self.left = Counter[str]()
        for role, members, done in zip(plan.world.roles, self.hosts, self.done, strict=True):
            parts = self.progress[role].parts
            ends = [*(part.begin for part in parts[1:]), plan.world.blocks_of(role.stage)]
            for part, end, name in zip(parts, ends, members, strict=True):
                self.shares[role, name].append((part, end))
            self.left["ForwardPass"] += sum(micro_batches - part.forwards for part in done)
            self.left["BackwardPass"] += sum(micro_batches - part.backwards for part in done)
        self._steps: dict[str, list[Step]] = {}
        self._commits: dict[str, list[Step]] = {}
        self.held: set[str] = set()

    def of(self, member: str) -> list[Step]:
        """The program of a member."""
        if member not in self._steps:
            program = member_program(self._plan, member, self._micro_batches, self._given, *self._settings)
            self._steps[member] = steps = list(self._placed(program))
            for before, step in pairwise(steps):
                if step.kind in ("RecvActivation", "RecvGrad", "RecvReplica"):
                    waits = self._settings[0] and not self._here(member, step)
                    assert (before.kind == "FillBubble") == waits, f"{member} does {before} before {step}"
            if self._plan.tight:
                self._check_under_way(member, steps)
                free = replace(self._plan, tight=())
                if program != member_program(free, member, self._micro_batches, self._given, *self._settings):
                    self.held.add(member)
        return self._steps[member]

    def _check_under_way(self, member: str, steps: Sequence[Step]) -> None:
        """No part has more micro-batches under way than the count of its member, or than it has had before."""
        count = dict(self._plan.tight).get(member) or self._micro_batches
        parts = zip(self._plan.world.roles, self.done, strict=True)
        under_way = {(role, part.begin): part.forwards - part.backwards for role, each in parts for part in each}
        for step in steps:
            if step.kind in ("ForwardPass", "BackwardPass"):
                place = step.role, step.begin
                under_way[place] += 1 if step.kind == "ForwardPass" else -1
                assert step.kind == "BackwardPass" or under_way[place] <= count, f"{member} has {under_way} under way"

    def _here(self, member: str, step: Step) -> bool:
        """Whether what a member receives is there by then: it is its own, or has been kept from before a loss."""
        source = {"RecvActivation": step.before, "RecvGrad": step.behind}.get(step.kind)
        if source is None:
            return False
        computed, role, begin = source
        parts = self.done[self._plan.world.rank(role)]
        since = next(part.since for part in parts if part.begin == begin)
        return computed == member or (step.kind == "RecvGrad" and step.m < since)

    def commit(self, member: str) -> list[Step]:
        """That of a member in an iteration whose commit all have entered."""
        if member not in self._commits:
            self._commits[member] = list(self._placed(commit_program(self._plan, member)))
        return self._commits[member]

    def _placed(self, program: Sequence[Any]) -> Iterator[Step]:
        role, begin = self._plan.world.roles[0], 0
        beside: dict[tuple[Role, int], tuple[Place | None, Place | None]] = {}
        for each in program:
            kind, about = type(each).__name__, getattr(each, "role", None)
            micro_batch = getattr(each, "buffer_id", None)
            if kind == "UseRole":
                role, begin = about, each.part
            elif about is not None or micro_batch is None:
                yield Step(kind, about or role, begin)
            else:
                if (role, begin) not in beside:
                    beside[role, begin] = self._beside(role, begin, +1), self._beside(role, begin, -1)
                yield Step(kind, role, begin, micro_batch, *beside[role, begin])

    def _beside(self, role: Role, begin: int, step: int) -> Place | None:
        world = self._plan.world
        rank = world.rank(role)
        found = self.beside(rank, [part.begin for part in self.done[rank]].index(begin), step)
        if found is None:
            return None
        other, part = found
        return self.hosts[other][part], world.roles[other], self.done[other][part].begin

    def beside(self, rank: int, index: int, step: int) -> tuple[int, int] | None:
        """See :func:`bamboo_ds.schedule.beside`."""
        return beside(self._plan.world, self.done, rank, index, step)


@lru_cache(maxsize=64)
def begun_by(plan: Plan, micro_batches: int, bubbles: bool, every: int) -> Programs:
    """What members do in an iteration that nobody has begun: the same in many jobs."""
    return Programs(plan, micro_batches, None, bubbles, every)
