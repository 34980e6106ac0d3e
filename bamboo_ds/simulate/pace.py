"""Durations of iterations under a plan, whole or interrupted by a loss.

Passes are those of :func:`~bamboo_ds.schedule.compute_order`, by list scheduling. Pipelines that share no member are
played each for itself, and equal ones once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from ..config import RedundancyMode
from ..schedule import (
    NETWORK_SHARE,
    Hosts,
    PartProgress,
    PassTimeline,
    RoleProgress,
    Tight,
    affordable,
    beginning,
    beside,
    hosts,
    needed,
    settle,
    timeline,
)
from ..topology import BlockCosts, Layout, Plan, Role
from ..topology.memory import StateBytes
from ..topology.roles import MOST_BLOCKS
from .footprint import Footprint
from .profile import Profile
from .terms import Terms

#: Iteration time against stock DeepSpeed by mode (docs/benchmarks.md, emulated devices, P = 8, M = 16), besides what
#: replicas' gradients and updates take, which are counted by their bytes. Without eager passes there is nothing else
#: that modes differ in: lazy replicas cost what this package costs without any.
OVERHEAD = {
    RedundancyMode.AUTO: 1.021,
    RedundancyMode.NONE: 1.008,
    RedundancyMode.LAZY: 1.008,
    RedundancyMode.EAGER_FORWARD: 1.021,
    RedundancyMode.EAGER: 1.021,
}
#: Blocks of a stage where ``topology.blocks`` is "auto", at most.
AUTO = MOST_BLOCKS

_Progress = Mapping[Role, RoleProgress]


@dataclass(frozen=True)
class _Shape:
    """Pipelines that share members, by number: who computes the parts of roles, what is done, and ``Plan.tight``."""

    pipelines: int
    hosts: tuple[tuple[int, ...], ...]
    progress: tuple[RoleProgress, ...]
    tight: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Group:
    """Pipelines of a plan that share members, and their members by the numbers of the shape."""

    pipelines: tuple[int, ...]
    members: tuple[str, ...]
    shape: _Shape


class Pace:
    """The speed of a job of ``pipelines`` x ``stages``.

    Args:
        profile: of the model.
        terms: network and pauses.
        pipelines: data-parallel pipelines.
        stages: stages of each.
        mode: what shadows do.
        blocks: that a stage is divided into, at most; 1: stages are computed whole.
        sync_every: ``redundancy.sync_every``.
        parked: replicas may be parked; they are if devices' memory is looked at, and the optimizer can be.

    Attributes:
        layout: the logical world.
        cuts: where stages may be divided.
        costs: of their blocks, as members measure them.
        micro_batches: of a pipeline in an iteration.
        footprint: what it needs of memory.
        saved: bytes per parameter in a checkpoint: all shards of the optimizer's state, and no gradients.
        sync_every: sums are sent after so many micro-batches; 0: never.
        sums_s: seconds that those of the largest stage take on the network.

    Raises:
        ConfigError: the profile has too few layers or samples.
    """

    def __init__(
        self,
        profile: Profile,
        terms: Terms,
        pipelines: int,
        stages: int,
        mode: RedundancyMode,
        blocks: int = AUTO,
        sync_every: Literal["auto"] | int = "auto",
        parked: bool = False,
    ) -> None:
        self.profile, self.terms, self.mode = profile, terms, mode
        self.micro_batches = profile.micro_batches(pipelines)
        parts = [profile.each[begin:end] for begin, end in profile.partition(stages)]
        counts = [min(len(part), blocks) for part in parts]
        self.layout = Layout(pipelines, stages, profile.zero, blocks=tuple(counts) if max(counts) > 1 else ())
        divided = [
            [part[b * len(part) // count : (b + 1) * len(part) // count] for b in range(count)]
            for part, count in zip(parts, counts, strict=True)
        ]
        self.cuts = tuple(tuple(range(1, count)) for count in counts)
        self._until = {
            "F": [[0.0, *accumulate(sum(layer.forward_s for layer in b) for b in stage)] for stage in divided],
            "B": [[0.0, *accumulate(sum(layer.backward_s for layer in b) for b in stage)] for stage in divided],
        }
        each = [[sum(x.forward_s + x.backward_s for x in b) * self.micro_batches for b in stage] for stage in divided]
        self.costs = BlockCosts(tuple(tuple(seconds) for seconds in each))
        forward, backward = (sum(until[-1] for until in self._until[kind]) for kind in "FB")
        self._ratio = (1.0, backward / forward if forward else 2.0)
        self.forward_s = [until[-1] for until in self._until["F"]]
        self.parameters = [sum(layer.parameters for layer in part) for part in parts]
        self._update = [sum(layer.update_s for layer in part) for part in parts]
        kept = tuple(sum(layer.kept_bytes + layer.boundary_bytes for layer in part) for part in parts)
        self._boundary = [part[-1].boundary_bytes for part in parts]
        self._message_s = terms.message_ms / 1000 + max(self._boundary[:-1], default=0) / (terms.network_gb_s * 1e9)
        trained = profile.precision, profile.optimizer, profile.zero, pipelines
        syncs = mode.replicas and sync_every != 0
        state = StateBytes(*trained, eager_backwards=mode.eager_backward, syncs=syncs)
        state = replace(state, parked=parked and state.elementwise and profile.memory_bytes is not None)
        self.footprint = Footprint(profile, self.layout, self.micro_batches, tuple(self.parameters), kept, state, mode)
        self.saved = replace(state, zero=False).copied
        self.sums_s = max(self.parameters) * profile.gradient_bytes / (terms.network_gb_s * 1e9)
        self.sync_every = 0
        if mode.replicas:
            slowest_s = max(f[-1] + b[-1] for f, b in zip(self._until["F"], self._until["B"], strict=True))
            fewest = affordable(self.sums_s, self.micro_batches, slowest_s, NETWORK_SHARE)
            self.sync_every = fewest if sync_every == "auto" else sync_every
        self._played = lru_cache(maxsize=512)(self._play)
        self._advanced = lru_cache(maxsize=512)(self._advance)

    # -- passes -------------------------------------------------------------------------------------------

    def groups(self, plan: Plan, progress: _Progress) -> list[_Group]:
        """The pipelines of ``plan`` by what members they share."""
        layout, who = self.layout, hosts(plan, progress)
        leader = list(range(layout.pipelines))

        def find(pipeline: int) -> int:
            while leader[pipeline] != pipeline:
                pipeline = leader[pipeline]
            return pipeline

        first: dict[str, int] = {}
        for rank, members in enumerate(who):
            for member in members:
                one, other = find(rank % layout.pipelines), find(first.setdefault(member, rank % layout.pipelines))
                leader[max(one, other)] = min(one, other)
        together: dict[int, list[int]] = defaultdict(list)
        for pipeline in range(layout.pipelines):
            together[find(pipeline)].append(pipeline)
        return [self._group(tuple(pipelines), who, progress, plan.tight) for pipelines in together.values()]

    def _group(self, pipelines: tuple[int, ...], who: Hosts, progress: _Progress, tight: Tight) -> _Group:
        numbers: dict[str, int] = {}
        ranks = [stage * self.layout.pipelines + d for stage in range(self.layout.stages) for d in pipelines]
        seats = tuple(tuple(numbers.setdefault(m, len(numbers)) for m in who[rank]) for rank in ranks)
        done = tuple(progress[self.layout.roles[rank]] for rank in ranks)
        counts = sorted((numbers[member], count) for member, count in tight if count and member in numbers)
        return _Group(pipelines, tuple(numbers), _Shape(len(pipelines), seats, done, tuple(counts)))

    def _play(self, shape: _Shape) -> PassTimeline:
        layout = replace(self.layout, pipelines=shape.pipelines)
        return timeline(
            layout,
            tuple(tuple(str(number) for number in numbers) for numbers in shape.hosts),
            self.micro_batches,
            self.pass_s,
            dict(zip(layout.roles, shape.progress, strict=True)),
            self.costs,
            self._ratio,
            self._message_s,
            tuple((str(number), count) for number, count in shape.tight),
        )

    def pass_s(self, role: Role, kind: str, begin: int, end: int, member: str) -> float:
        """Seconds of a pass of the blocks from ``begin`` to before ``end``, of any member."""
        until = self._until[kind][role.stage]
        return until[end] - until[begin]

    def played(self, group: _Group) -> PassTimeline:
        """The passes of the members of ``group``, by their numbers."""
        return self._played(group.shape)

    def _advance(
        self, shape: _Shape, at_s: float, lost: frozenset[int], noticed_s: float
    ) -> tuple[tuple[RoleProgress, ...], dict[int, int]]:
        """The finished work, and how many of their passes members have done."""
        layout = replace(self.layout, pipelines=shape.pipelines)
        begins = [[part.begin for part in done.parts] for done in shape.progress]
        spans = self._played(shape).spans
        left = {work for each in spans.values() for *_, work in each}
        begun = [(*span, int(name)) for name, each in spans.items() for span in each if span[0] <= noticed_s]
        counts: dict[tuple[Role, int, str], int] = defaultdict(int)
        passes: dict[int, int] = defaultdict(int)
        halted: set[int] = set()
        for since, until, work, member in sorted(begun, key=lambda each: each[1]):
            before = needed(layout, begins, work)
            # Survivors come to the end of the pass that they are in, which is half done on average.
            late = until > at_s if member in lost else (since + until) / 2 > noticed_s
            if member in halted or late or before in left:
                halted.add(member)
                continue
            left.remove(work)
            role, kind, _, begin = work
            counts[role, begin, kind] += 1
            passes[member] += 1
        found = []
        for role, done in zip(layout.roles, shape.progress, strict=True):
            parts = [
                replace(
                    part,
                    forwards=part.forwards + counts[role, part.begin, "F"],
                    backwards=part.backwards + counts[role, part.begin, "B"],
                )
                for part in done.parts
            ]
            found.append(replace(done, parts=tuple(parts)))
        return tuple(found), passes

    def behind(self, progress: _Progress, role: Role) -> list[PartProgress]:
        """The part behind each part of ``role``; behind the last one of a pipeline one that has given everything."""
        layout, all_ = self.layout, PartProgress(0, 1, self.micro_batches, self.micro_batches)
        parts = [progress[each].parts for each in layout.roles]
        found = []
        for index in range(len(progress[role].parts)):
            place = beside(layout, parts, layout.rank(role), index, +1)
            found.append(all_ if place is None else parts[place[0]][place[1]])
        return found

    def sums_of(self, part: PartProgress) -> tuple[int, ...]:
        """The numbers of micro-batches in the two newest sums of a part that have been sent."""
        counts = range(self.sync_every, min(part.backwards, self.micro_batches - 1) + 1, self.sync_every or 1)
        return tuple(counts)[-2:] if self.sync_every else ()

    def advanced(
        self, groups: Sequence[_Group], at_s: float, lost: Collection[str] = (), noticed_s: float | None = None
    ) -> tuple[dict[Role, RoleProgress], dict[str, int]]:
        """The finished work after ``at_s`` seconds, and how many of their passes members have done.

        Args:
            groups: pipelines.
            at_s: seconds since the begin.
            lost: members that end then. The others go on until ``noticed_s``, as far as they have what they need.
            noticed_s: seconds since the begin; ``None``: as ``at_s``.
        """
        found: dict[Role, RoleProgress] = {}
        passes: dict[str, int] = {}
        for group in groups:
            layout = replace(self.layout, pipelines=len(group.pipelines))
            numbers = frozenset(number for number, member in enumerate(group.members) if member in lost)
            done, counts = self._advanced(group.shape, at_s, numbers, at_s if noticed_s is None else noticed_s)
            for role, each in zip(layout.roles, done, strict=True):
                found[Role(group.pipelines[role.pipeline], role.stage)] = each
            passes |= {member: counts.get(number, 0) for number, member in enumerate(group.members)}
        return found, passes

    # -- the end of an iteration --------------------------------------------------------------------------

    def epilogue(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the slowest member for its gradients (over pipelines, and to replicas), and of its updates.

        An optimizer that rests in host memory goes to the device for its update, and back.
        """
        pipelines, network = self.layout.pipelines, self.terms.network_gb_s * 1e9
        reduced: dict[str, dict[int, float]] = defaultdict(dict)
        sent: dict[str, float] = defaultdict(float)
        received: dict[str, float] = defaultdict(float)
        update: dict[str, float] = defaultdict(float)
        followers: dict[int, list[str]] = defaultdict(list)
        for rank, shadow in enumerate(plan.shadows):
            if shadow is not None:
                followers[rank].append(shadow)
        for rank, builder in plan.builders:
            followers[rank].append(builder)
        for rank, owner in enumerate(plan.owners):
            stage = rank // pipelines
            size = self.parameters[stage] * self.profile.gradient_bytes / network
            reduced[owner][stage] = 2 * (pipelines - 1) / pipelines * size
            resting_s = self.footprint.resting(plan, rank) / (self.terms.host_gb_s * 1e9)
            update[owner] += self._update[stage] + 2 * resting_s
            for member in followers[rank]:
                sent[owner] += size
                received[member] += size
                if self.layout.sharded:  # else it takes the step in idle time of the next iteration
                    update[member] += self._update[stage]
        gradients = max(sum(each.values()) for each in reduced.values())
        copies = max((max(sent[member], received[member]) for member in (*sent, *received)), default=0.0)
        latency = (2 * (pipelines - 1) + bool(followers)) * self.terms.message_ms / 1000
        return gradients + copies + latency, max(update.values())

    @property
    def overhead(self) -> float:
        """Iteration time against stock."""
        return OVERHEAD[self.mode]


class Stretch:
    """An iteration under a plan, or what is left of it.

    Args:
        pace: of the job.
        plan: its plan.
        progress: what is done; ``None``: nothing.
        committing: all but the steps is done.

    Attributes:
        committing: see above.
        seconds: until the step is done.
    """

    def __init__(self, pace: Pace, plan: Plan, progress: _Progress | None = None, committing: bool = False) -> None:
        self._pace, self.plan, self.committing = pace, plan, committing
        self.progress = progress or beginning(plan)
        self._groups = [] if committing else pace.groups(plan, self.progress)
        self._passes_s = max((pace.played(group).seconds for group in self._groups), default=0.0)
        self._gradients_s, self._update_s = pace.epilogue(plan)
        self._reduced_s = 0.0 if committing else self._passes_s * pace.overhead + self._gradients_s
        self.seconds = self._reduced_s + self._update_s

    @property
    def bare_s(self) -> float:
        """Seconds that it would take without replicas: passes, reduction and update alone."""
        gradients_s, update_s = self._pace.epilogue(replace(self.plan, shadows=(), builders=()))
        return self._passes_s + gradients_s + update_s

    def after(self, plan: Plan, at_s: float, noticed_s: float | None = None) -> Stretch:
        """The rest when members go on by ``plan``, which replaces lost ones.

        Args:
            plan: the new one.
            at_s: seconds since the begin, of the loss.
            noticed_s: the same of its notice, up to which survivors do what they can; ``None``: as ``at_s``.
        """
        noticed_s = at_s if noticed_s is None else noticed_s
        if at_s >= self._reduced_s:
            return Stretch(self._pace, plan, self.progress, committing=True)
        pace, layout = self._pace, plan.world
        at_s, noticed_s = at_s / pace.overhead, noticed_s / pace.overhead
        lost = set(self.plan.members).difference(plan.members)
        done, passes = pace.advanced(self._groups, at_s, lost, noticed_s)
        before = hosts(self.plan, done)
        sent, _ = pace.advanced(self._groups, at_s - self._gradients_s / pace.overhead)
        whole = {role for role, now in sent.items() if all(part.backwards == pace.micro_batches for part in now.parts)}
        found: dict[Role, RoleProgress] = {}
        for role in layout.roles:
            lending, now = plan.lending(role), done[role]
            side = lending.side if lending is not None and now.lent == lending.side else None
            found[role] = replace(now, lent=side, reduced=whole.issuperset(layout.siblings(role)))
        synced, _ = pace.advanced(self._groups, at_s - pace.sums_s / pace.overhead)
        for rank, (role, computing) in enumerate(zip(layout.roles, hosts(plan, found), strict=True)):
            now, changed = found[role], [new != old for new, old in zip(computing, before[rank], strict=True)]
            heir = plan.owner(role)
            near = heir == self.plan.shadow(role) or (rank, heir) in self.plan.builders or len(now.parts) > 1
            sums = [pace.sums_of(part) if near else () for part in synced[role].parts]
            given = [part.backwards for part in pace.behind(done, role)]
            redundant = 0
            if any(changed) and len(now.parts) == 1:
                redundant = self.redundant(role, noticed_s, heir, passes.get(heir, 0))
            parts = [
                replace(part.passes(redundant, 0, 0), sums=has)
                if new
                else replace(part, given=max(count, part.backwards))
                for new, has, count, part in zip(changed, sums, given, now.parts, strict=True)
            ]
            if not any(changed):
                found[role] = replace(now, parts=tuple(parts))
                continue
            # Reduced gradients are there if the shadow takes over, which has received them.
            reduced = now.reduced and plan.owner(role) == self.plan.shadow(role)
            found[role] = replace(now, parts=tuple(parts), state_only=changed[0], reduced=reduced)
        return Stretch(pace, plan, settle(layout, pace.micro_batches, found))

    def redundant(self, role: Role, at_s: float, heir: str, passes: int) -> int:
        """Redundant forward passes of ``role`` that ``heir`` has had idle time for, of the inputs that it had.

        Args:
            role: that it shadows.
            at_s: seconds since the begin, up to which it could work.
            heir: the member.
            passes: of its own that it has done.
        """
        pace, plan = self._pace, self.plan
        layout = plan.world
        source = layout.predecessor(role)
        near = plan.shadow(role) == heir and plan.owner(source) == heir
        if not (pace.mode.eager_forward and near) or heir in self._waits:
            return 0
        shadowed = max(1, sum(shadow == heir for shadow in plan.shadows))
        forward, inputs, count, free = pace.forward_s[role.stage] * shadowed, 0, 0, 0.0
        if role.stage == 0:
            inputs = pace.micro_batches  # it loads the same batches
        for begin, end, (own, kind, _, _) in [*self._spans(heir)[:passes], (at_s, at_s, (role, "", 0, 0))]:
            while count < inputs and free + forward <= begin:
                free += forward
                count += 1
            free = max(free, end)
            inputs += role.stage > 0 and kind == "F" and own == source
        return min(count, pace.micro_batches)

    @cached_property
    def _waits(self) -> frozenset[str]:
        return self._pace.footprint.waiting(self.plan)

    def _spans(self, member: str) -> Sequence[tuple[float, float, tuple[Role, str, int, int]]]:
        """The spans of ``member``, with the roles of the plan."""
        for group in self._groups:
            if member in group.members:
                spans = self._pace.played(group).spans[str(group.members.index(member))]
                return [
                    (begin, end, (Role(group.pipelines[role.pipeline], role.stage), kind, m, first))
                    for begin, end, (role, kind, m, first) in spans
                ]
        return []
