"""Jobs on integers: the schedule, the planner and the decisions of recoveries, with numbers in the place of tensors.

Each member is a coroutine that executes the programs of :mod:`bamboo_ds.schedule`. A micro-batch's result is its
number, a sum of gradients the tuple of the numbers that are in it, an optimizer's state the number of its steps.
A *cut* ends an epoch between any two instructions of any members: some are lost, of what is on its way a part has
arrived, and the others go on as the engine does: by the planner's plan, the reports of all, and the decision that
follows from these (:func:`bamboo_ds.engine.recovery.reports.decision_of`).

What the engine's own parts make of it, with tensors and threads: :mod:`tests.test_takeover_cuts`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from typing import Any

from bamboo_ds.engine.recovery.reports import (
    MemberReport,
    PartReport,
    RoleReport,
    ScriptReport,
    SumsReport,
    decision_of,
)
from bamboo_ds.engine.stage.layers import Changes
from bamboo_ds.schedule import (
    Decision,
    PartProgress,
    RoleProgress,
    beginning,
    beside,
    commit_program,
    finished,
    hosts,
    member_program,
    syncs,
)
from bamboo_ds.topology import Layout, Lent, Plan, Role, holders_of, initial_plan, takeover, with_redundancy
from bamboo_ds.topology.memory import NEWEST_SUMS

#: Instructions of all members after which a job counts as one that never ends.
_ENDLESS = 100_000

#: One in so many instructions is the last one of a member's turn.
_TURN = 1 / 3

#: A part of a role: its first block, and the one behind the last.
Range = tuple[int, int]
#: What a coroutine waits for; ``None``: nothing.
Waits = Callable[[], bool] | None


class Fatal(Exception):
    """A role has no holder left."""


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        ties: stages that share weights, by set.
        every: after so many micro-batches sums are sent; 0: never.
        eager: shadows compute redundant forward passes.
        lends: shadows compute parts of roles, which are drawn.
        sharded: optimizers are partitioned over the pipelines, so that no role can be cloned.
    """

    pipelines: int
    stages: int
    micro_batches: int
    slices: int = 1
    iterations: int = 2
    blocks: int = 4
    ties: tuple[frozenset[int], ...] = ()
    every: int = 0
    eager: bool = True
    lends: bool = False
    sharded: bool = False

    @property
    def layout(self) -> Layout:
        """The logical world."""
        blocks = (self.blocks,) * self.stages if self.lends else ()
        return Layout(self.pipelines, self.stages, self.sharded, self.slices, blocks)

    @property
    def tied(self) -> frozenset[int]:
        """Stages that share weights."""
        return frozenset().union(*self.ties)


@dataclass(eq=False)
class Part:
    """What a member has done of a part of a role in the iteration under way; see :class:`..engine.stage.work.Part`."""

    begin: int
    end: int
    forwards: int = 0
    backwards: int = 0
    since: int = 0
    fold: tuple[int, ...] = ()
    outputs: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    marks: set[int] = field(default_factory=set)
    received: set[tuple[str, int]] = field(default_factory=set)  # inputs of passes that are to come

    def progress(self) -> PartProgress:
        return PartProgress(self.begin, self.forwards, self.backwards, self.since)

    def report(self, broken: bool) -> PartReport:
        given = self.backwards
        while given in self.given:
            given += 1
        counts = {"forwards": self.forwards, "backwards": self.backwards, "since": self.since, "given": given}
        return PartReport(begin=self.begin, end=self.end, broken=broken, **counts)

    def go_back(self, to: PartProgress, fold: tuple[int, ...]) -> None:
        """Forget what does not count at ``to``, and go on from ``fold``."""
        assert len(fold) == to.backwards
        self.fold, self.received = fold, set()
        self.outputs &= set(range(to.since, to.forwards))
        self.gradients &= set(range(to.since, to.backwards))
        self.marks &= set(range(to.backwards + 1, to.forwards + 1))
        self.forwards, self.backwards, self.since = to.forwards, to.backwards, to.since


@dataclass(eq=False)
class Runtime:
    """A role on a member: its state, and what there is of the iteration under way.

    Attributes:
        steps: of its optimizer: the state.
        theirs: what its shadow has computed of it.
        tied: the sets of shared weights that are reduced.
        reduced: the sums of all copies of the stage, of all parts; ``None``: not reduced.
        loss: it has the loss and the checksums that a commit needs of the ends of a pipeline.
    """

    role: Role
    blocks: int
    steps: int = 0
    owned: bool = False
    parts: list[Part] = field(default_factory=list)
    helps: bool = False
    spent: bool = False
    broken: bool = False
    theirs: Part | None = None
    tied: set[int] = field(default_factory=set)
    reduced: tuple[Any, ...] | None = None
    loss: bool = False

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """An iteration begins."""
        self.parts = [Part(0, self.blocks)]
        self.helps = self.spent = self.broken = self.loss = False
        self.theirs = self.reduced = None
        self.tied = set()

    @property
    def begun(self) -> bool:
        return any(part.forwards for part in self.parts)

    @property
    def divided(self) -> bool:
        return [(part.begin, part.end) for part in self.parts] != [(0, self.blocks)]

    def divide(self, ranges: Sequence[Range]) -> None:
        known = {(part.begin, part.end): part for part in self.parts}
        self.parts = [known.get(each) or Part(*each) for each in ranges]

    def told(self) -> tuple[PartReport, ...]:
        return tuple(part.report(self.broken) for part in self.parts)


@dataclass(eq=False)
class Member:
    """A member: what it holds, and where it is.

    Attributes:
        step: iterations that it has finished.
        inside: the pass that its slices wait for each other in.
    """

    name: str
    runtimes: dict[Role, Runtime] = field(default_factory=dict)
    sums: dict[tuple[Role, int, int], dict[int, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    step: int = 0
    entered: bool = False
    vector: tuple[float, ...] | None = None
    taken: set[Role] = field(default_factory=set)
    inside: tuple[Role, int, str, int] | None = None
    report: MemberReport | None = None

    def owned(self) -> list[Runtime]:
        return [runtime for _, runtime in sorted(self.runtimes.items()) if runtime.owned]

    def hold(self, place: tuple[Role, int, int], fold: tuple[int, ...]) -> None:
        """Sums have arrived; the newest are kept."""
        held = self.sums[place]
        held[len(fold)] = fold
        for count in sorted(held)[:-NEWEST_SUMS]:
            del held[count]

    def end_iteration(self) -> None:
        for runtime in self.runtimes.values():
            runtime.begin()
        self.sums.clear()
        self.taken.clear()
        self.entered = False
        self.step += 1


class World:
    """One run of a job.

    Args:
        case: the job.
        random: says who goes on, what is drawn, and what arrives.

    Attributes:
        done: instructions that members have executed.
        counts: what has happened.
    """

    def __init__(self, case: Case, random: Random) -> None:
        self.case, self.random, self.layout = case, random, case.layout
        names = [f"m{rank}" for rank in range(self.layout.size)]
        self.plan = self._lent(with_redundancy(initial_plan(names), self.layout, True))
        self.members = {name: Member(name) for name in names}
        for name, member in self.members.items():
            for role in (*self.plan.owned_by(name), *self.plan.shadowed_by(name)):
                member.runtimes[role] = self._runtime(role, owned=self.plan.owner(role) == name)
        self.sent: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self.come: dict[Any, set[str]] = defaultdict(set)
        self.done = 0
        self._neighbours: tuple[Any, Any] = (None, None)
        self._decision: Decision | None = None
        self.counts: Counter[str] = Counter()
        self.running = {name: self._script(member) for name, member in self.members.items()}
        self.waiting: dict[str, Waits] = dict.fromkeys(self.running)

    def _runtime(self, role: Role, **more: Any) -> Runtime:
        return Runtime(role, self.layout.blocks_of(role.stage), **more)

    def _lent(self, plan: Plan) -> Plan:
        if not self.case.lends:
            return replace(plan, lent=())
        draw = self.random
        lent = [
            Lent(rank, draw.randrange(1, self.case.blocks), draw.choice(["front", "rear"]))
            for rank, shadow in enumerate(plan.shadows)
            if shadow is not None and draw.random() < 0.4
        ]
        return replace(plan, lent=tuple(lent))

    @property
    def length(self) -> int:
        """About how many instructions there are if nobody is lost."""
        every, placement = self.case.every, "idle" if self.case.eager else "none"
        programs = (member_program(self.plan, m, self.case.micro_batches, None, placement, every) for m in self.members)
        return self.case.iterations * sum(map(len, programs))

    # -- the course -------------------------------------------------------------------------------------------

    def run(self, instructions: int | None = None) -> bool:
        """Go on until all have ended, or for so many instructions; whether all have ended."""
        end = _ENDLESS if instructions is None else self.done + instructions
        while self.running and self.done < end:
            names = list(self.running)
            first = int(self.random.random() * len(names))
            name = next(filter(self._goes_on, (*names[first:], *names[:first])), None)
            assert name is not None, f"nobody can go on: {self._where()}"
            self._advance(name, min(end - self.done, int(self.random.expovariate(_TURN)) + 1))
        assert self.done < _ENDLESS, "the job never ends"
        return not self.running

    def _goes_on(self, name: str) -> bool:
        waits = self.waiting[name]
        return waits is None or waits()

    def _advance(self, name: str, most: int) -> None:
        """Until it waits, or for so many instructions."""
        script = self.running[name]
        for _ in range(most):
            self.done += 1
            try:
                waits = self.waiting[name] = next(script)
            except StopIteration:
                del self.running[name], self.waiting[name]
                return
            if waits is not None and not waits():
                return

    def _where(self) -> dict[str, Any]:
        return {name: (member.step, member.entered, member.inside) for name, member in self.members.items()}

    def lose(self, lost: Sequence[str]) -> None:
        """An epoch ends by the loss of members; the others recover.

        Raises:
            Fatal: a role has no holder left.
        """
        for name in lost:
            del self.members[name]
        for member in self.members.values():
            self._doubt(member)
            self._take_arrived(member)
        self.counts["losses"] += len(lost)
        self.plan = takeover(self.plan, lost, holders_of(self.plan))
        if self.plan.unheld:
            raise Fatal
        self.sent.clear()
        self.come.clear()
        self._decision = None
        for member in self.members.values():
            member.report = member.inside = None
        self.running = {name: self._recover(member) for name, member in self.members.items()}
        self.waiting = dict.fromkeys(self.running)

    def _doubt(self, member: Member) -> None:
        """A pass that slices were in may have changed something."""
        if member.inside is not None:
            role, _, kind, _ = member.inside
            member.runtimes[role].broken |= kind == "BackwardPass" or self.random.random() < 0.5

    def _take_arrived(self, member: Member) -> None:
        """Of what is on its way to ``member`` some has arrived: gradients and sums are kept."""
        for key, messages in self.sent.items():
            kind, destination, *place = key
            if destination != member.name or kind not in ("B", "Sums"):
                continue
            for _ in range(self.random.randint(0, len(messages))):
                message = messages.popleft()
                if kind == "Sums":
                    member.hold((place[0], *message[:2]), message[2])
                    continue
                runtime = member.runtimes.get(place[0])
                for part in runtime.parts if runtime is not None else ():
                    if part.begin == place[1]:
                        part.given.add(message)

    # -- a member's script ------------------------------------------------------------------------------------

    def _script(self, member: Member) -> Iterator[Waits]:
        while member.step < self.case.iterations:
            yield from self._iteration(member, None)
        # Its last operation takes part in a commit of all, as an engine's end does.
        yield self._all_come(member, ("end", self.plan.epoch))

    def _all_come(self, member: Member, what: Any) -> Waits:
        self.come[what].add(member.name)
        return lambda: self.come[what] >= set(self.plan.members)

    def _iteration(self, member: Member, progress: Mapping[Role, RoleProgress] | None) -> Iterator[Waits]:
        plan, case = self.plan, self.case
        self._divide(member, beginning(plan) if progress is None else progress, resumed=progress is not None)
        placement = "idle" if case.eager else "none"
        program = member_program(plan, member.name, case.micro_batches, progress, placement, case.every)
        yield from self._execute(member, program, progress or beginning(plan))

    def _commit(self, member: Member) -> Iterator[Waits]:
        yield from self._execute(member, commit_program(self.plan, member.name), {})

    def _finish(self, member: Member) -> None:
        """The commit of an iteration has taken place: steps."""
        for instruction in commit_program(self.plan, member.name)[1:]:
            if type(instruction).__name__ in ("UseRole", "StepReplica"):
                runtime = member.runtimes[instruction.role]
                assert runtime.reduced is not None, f"{member.name} steps {runtime.role}, which is not reduced"
                assert all(each == tuple(range(self.case.micro_batches)) for each in runtime.reduced), runtime.reduced
                assert runtime.steps == member.step
                runtime.steps += 1
        member.end_iteration()

    def _divide(self, member: Member, progress: Mapping[Role, RoleProgress], resumed: bool) -> None:
        """As :meth:`bamboo_ds.engine.iteration.division.Division.begin`."""
        plan, computers = self.plan, hosts(self.plan, progress)
        for role, runtime in member.runtimes.items():
            parts, by = progress[role].parts, computers[plan.world.rank(role)]
            ends = [*(part.begin for part in parts[1:]), runtime.blocks]
            mine = [(part, end) for part, end, each in zip(parts, ends, by, strict=True) if each == member.name]
            runtime.helps, runtime.theirs = bool(mine) and not runtime.owned, None
            if not mine:
                if runtime.divided:
                    runtime.parts = [Part(0, runtime.blocks)]
                continue
            ranges = [(part.begin, end) for part, end in mine]
            if progress[role].reduced:
                runtime.divide(ranges)
                continue
            if any(part.forwards and (part.begin, part.end) not in ranges for part in runtime.parts):
                runtime.parts = [Part(0, runtime.blocks)]
            runtime.divide(ranges)
            for part, (to, _) in zip(runtime.parts, mine, strict=True):
                self._move(member, runtime, part, to)
        if resumed:
            self._use_given(member, progress)

    def _move(self, member: Member, runtime: Runtime, part: Part, to: PartProgress) -> None:
        """As :meth:`bamboo_ds.engine.iteration.sums.PartialSums.move`."""
        if to == part.progress() and not runtime.broken:
            return
        fold: tuple[int, ...] = ()
        if to.backwards:
            fold = member.sums[runtime.role, part.begin, part.end].pop(to.backwards)
            self.counts["from sums"] += 1
        else:
            assert not to.forwards, f"{runtime.role} is to go on from {to}, and has done {part.progress()}"
        part.go_back(to, fold)
        runtime.broken = False

    def _use_given(self, member: Member, progress: Mapping[Role, RoleProgress]) -> None:
        done = finished(self.layout, self.case.micro_batches, progress)
        computers = hosts(self.plan, progress)
        for rank, role in enumerate(self.layout.roles):
            computed = [index for index, each in enumerate(computers[rank]) if each == member.name]
            for index, part in zip(computed, member.runtimes[role].parts if computed else (), strict=True):
                behind = None if progress[role].reduced else beside(self.layout, done, rank, index, +1)
                until = 0 if behind is None else done[behind[0]][behind[1]].since
                part.given = {m for m in part.given if part.backwards <= m < until}
                assert part.given == set(range(part.backwards, until)), f"gradients of {role} are gone"

    # -- recoveries -------------------------------------------------------------------------------------------

    def _recover(self, member: Member) -> Iterator[Waits]:
        yield None
        self._follow(member)
        yield None
        member.report = self._report(member)
        yield lambda: all(each.report is not None for each in self.members.values())
        decision = self._decide()
        behind = member.name in decision.behind
        if behind:
            member.vector = decision.commit_vector
        elif decision.mode == "resume":
            member.entered = False
            for role, runtime in member.runtimes.items():
                if not decision.progress[role].reduced:
                    runtime.reduced, runtime.loss, runtime.tied = None, False, set()
        yield None
        if behind:
            self._finish(member)
        yield from self._attempt(member, decision)
        yield from self._script(member)

    def _decide(self) -> Decision:
        """The same on all members: a pure function of what all have reported."""
        if self._decision is None:
            reports = {name: each.report for name, each in self.members.items() if each.report is not None}
            self._decision = decision_of(reports, self.plan, self.case.micro_batches, self.case.tied)
            self.counts[self._decision.mode] += 1
            self.counts["behind"] += len(self._decision.behind)
        return self._decision

    def _attempt(self, member: Member, decision: Decision) -> Iterator[Waits]:
        if decision.mode == "commit":
            yield from self._commit(member)
        elif member.step < self.case.iterations:
            yield from self._iteration(member, decision.progress)

    def _follow(self, member: Member) -> None:
        """As :meth:`bamboo_ds.engine.recovery.roles.RoleTransfer.follow`."""
        plan, runtimes, name = self.plan, member.runtimes, member.name
        owned, followed = plan.owned_by(name), {*plan.shadowed_by(name)}
        for role in owned:
            runtime = runtimes.get(role) or self._clone(member, role)
            if not runtime.owned:
                runtime.owned, runtime.helps = True, False
                member.taken.add(role)
            elif runtime.divided and runtime.begun and plan.lending(role) is None:
                member.taken.add(role)
        for role in [role for role in runtimes if role not in owned]:
            runtime = runtimes[role]
            if role in followed:
                before = runtime.owned
                runtime.helps |= before and runtime.divided
                runtime.spent |= before and runtime.begun and not runtime.divided
                runtime.owned = False
            else:
                del runtimes[role]

    def _clone(self, member: Member, role: Role) -> Runtime:
        alike = [member.runtimes[each] for each in self.layout.siblings(role) if each in member.runtimes]
        assert alike, f"{member.name} has nothing of {role}"
        runtime = self._runtime(role, steps=alike[0].steps)
        runtime.reduced = alike[0].reduced
        member.runtimes[role] = runtime
        self.counts["clones"] += 1
        return runtime

    def _complete(self, runtime: Runtime) -> bool:
        at_end = runtime.role.stage in (0, self.layout.stages - 1)
        return runtime.reduced is not None and (runtime.loss or not at_end)

    def _report(self, member: Member) -> MemberReport:
        rank = self.layout.rank
        roles = [
            RoleReport(
                role=(each.role.pipeline, each.role.stage),
                parts=each.told() if each.begun or each.broken else (),
                reduced=self._complete(each),
                state_only=each.role in member.taken,
                changes=Changes(),
            )
            for each in member.owned()
        ]
        replicas = [each for each in member.runtimes.values() if not each.owned]
        return MemberReport(
            step=member.step,
            entered=member.entered,
            at_boundary=False,
            training=True,
            roles=tuple(roles),
            helped=tuple((rank(each.role), part) for each in replicas if each.helps for part in each.told()),
            spent=tuple(rank(each.role) for each in replicas if each.spent),
            commit=member.vector,
            received={},
            repeatable=all(self._complete(each) for each in member.owned()),
            stale=False,
            replicas=tuple(rank(each.role) for each in replicas),
            copying={},
            sums=tuple(
                SumsReport(rank=rank(role), begin=begin, end=end, counts=tuple(sorted(held)))
                for (role, begin, end), held in member.sums.items()
                if held
            ),
            joining=False,
            history=member.step,
            steps=member.step,
            iteration_s=0.0,
            ahead=0,
            consumed=0,
            seed=0,
            nonce="",
            checksums=True,
            script=ScriptReport(gap=0, done={}, open=0, newcomers={}, had={}, missed=None),
            exact=0,
            device=None,
        )

    # -- instructions -----------------------------------------------------------------------------------------

    def _execute(
        self, member: Member, program: Sequence[Any], progress: Mapping[Role, RoleProgress]
    ) -> Iterator[Waits]:
        place: tuple[Runtime, Part] | None = None
        for instruction in program:
            kind = type(instruction).__name__
            yield None
            if kind == "Commit":
                member.entered = True
                yield self._all_come(member, ("commit", member.step))
                member.vector = (float(member.step),)
                self._finish(member)
                return
            if kind == "UseRole":
                runtime = member.runtimes[instruction.role]
                found = [part for part in runtime.parts if part.begin == instruction.part]
                place = runtime, (found or runtime.parts)[0]
                continue
            if kind in ("RecvReplica", "RecvChanges", "SendPart"):
                yield from self._of_role(member, kind, instruction.role)
                continue
            if kind == "FillBubble":
                self._fill(member)
                continue
            assert place is not None
            yield from self._of_part(member, kind, instruction, *place, progress)

    def _of_role(self, member: Member, kind: str, role: Role) -> Iterator[Waits]:
        runtime = member.runtimes[role]
        if kind == "SendPart":
            (part,) = runtime.parts
            self.sent["Part", self.plan.owner(role), role].append(part)
            return
        queue = self.sent[kind[4:], member.name, role]
        yield lambda: bool(queue)
        told = queue.popleft()
        if kind == "RecvReplica":
            runtime.reduced, runtime.loss = told

    def _beside(self, runtime: Runtime, part: Part, step: int, progress: Mapping[Role, RoleProgress]) -> Any:
        """Member, role and first block of the part before or after; ``None``: there is none."""
        if self._neighbours[0] is not progress:
            self._neighbours = progress, self._all_neighbours(progress)
        return self._neighbours[1][runtime.role, part.begin, step]

    def _all_neighbours(self, progress: Mapping[Role, RoleProgress]) -> dict[tuple[Role, int, int], Any]:
        done = [progress[role].parts for role in self.layout.roles]
        computers, table = hosts(self.plan, progress), {}
        for rank, role in enumerate(self.layout.roles):
            for (index, part), step in product(enumerate(done[rank]), (-1, 1)):
                found = beside(self.layout, done, rank, index, step)
                table[role, part.begin, step] = found and (
                    computers[found[0]][found[1]],
                    self.layout.roles[found[0]],
                    done[found[0]][found[1]].begin,
                )
        return table

    def _of_part(
        self,
        member: Member,
        kind: str,
        instruction: Any,
        runtime: Runtime,
        part: Part,
        progress: Mapping[Role, RoleProgress],
    ) -> Iterator[Waits]:
        role, m = runtime.role, getattr(instruction, "buffer_id", None)
        if kind in ("SendActivation", "ResendActivation"):
            assert m in part.outputs, f"{member.name} has no output {m} of {role}"
            self.sent[("F", *self._beside(runtime, part, +1, progress))].append(m)
        elif kind in ("SendGrad", "ResendGrad"):
            assert m in part.gradients, f"{member.name} has no gradient {m} of {role}"
            self.sent[("B", *self._beside(runtime, part, -1, progress))].append(m)
        elif kind in ("RecvActivation", "RecvGrad"):
            which = "F" if kind == "RecvActivation" else "B"
            if which == "B" and m in part.given:
                part.given.remove(m)
            else:
                queue = self.sent[which, member.name, role, part.begin]
                yield lambda: bool(queue)
                assert queue.popleft() == m, f"a message to {role} is out of step"
            part.received.add((which, m))
        elif kind in ("ForwardPass", "BackwardPass"):
            yield from self._together(member, runtime, part, kind, m)
            self._pass(runtime, part, kind, m, progress)
        elif kind == "SendSums":
            self._send_sums(member, runtime, part, m + 1)
        elif kind == "SendChanges":
            self.sent["Changes", self.plan.shadow(role), role].append(())
        elif kind == "RecvPart":
            queue = self.sent["Part", member.name, role]
            yield lambda: bool(queue)
            theirs = queue.popleft()
            if runtime.reduced is None:
                runtime.theirs = theirs
        elif kind == "ReduceTiedGrads":
            yield from self._reduce_tied(member, role)
        elif kind == "ReduceGrads":
            yield from self._reduce(member, role)
        elif kind == "SendReplica":
            assert runtime.reduced is not None
            self.sent["Replica", self.plan.shadow(role), role].append((runtime.reduced, runtime.loss))
        else:
            assert kind == "LoadMicroBatch", kind

    def _together(self, member: Member, runtime: Runtime, part: Part, kind: str, m: int) -> Iterator[Waits]:
        """Slices of a stage do each pass together; one that has ended has done it."""
        together = [each for each in self.layout.slices_with(runtime.role) if each != runtime.role]
        if not together:
            return
        member.inside = runtime.role, part.begin, kind, m

        def there(role: Role) -> bool:
            other = self.members[self.plan.owner(role)]
            theirs = other.runtimes[role].parts[0]
            done = theirs.forwards if kind == "ForwardPass" else theirs.backwards
            return done > m or other.inside == (role, part.begin, kind, m)

        yield lambda: all(map(there, together))
        member.inside = None

    def _pass(self, runtime: Runtime, part: Part, kind: str, m: int, progress: Mapping[Role, RoleProgress]) -> None:
        forward = kind == "ForwardPass"
        source = self._beside(runtime, part, -1 if forward else +1, progress)
        if source is not None:
            part.received.remove(("F" if forward else "B", m))
        self.counts[kind] += 1
        if forward:
            assert m == part.forwards
            part.forwards += 1
            part.outputs.add(m)
            every = self.case.every
            if every and part.forwards % every == 0 and part.forwards < self.case.micro_batches:
                part.marks.add(part.forwards)
        else:
            assert m == part.backwards < part.forwards
            part.backwards += 1
            part.gradients.add(m)
            part.fold += (m,)

    def _send_sums(self, member: Member, runtime: Runtime, part: Part, count: int) -> None:
        if count not in part.marks:
            return
        part.marks.remove(count)
        if not syncs(self.plan, runtime.role) or self.random.random() < 0.2:  # passes come first on the network
            return
        place = runtime.role, part.begin, part.end
        if self.layout.slices > 1:
            member.hold(place, part.fold)
        whom = self.plan.shadow(runtime.role) if runtime.owned else self.plan.owner(runtime.role)
        if whom is not None:
            self.sent["Sums", whom, runtime.role].append((part.begin, part.end, part.fold))

    def _fill(self, member: Member) -> None:
        """A redundant forward pass, if one can be done."""
        able = []
        for role, runtime in member.runtimes.items():
            part = runtime.parts[0]
            if runtime.owned or runtime.helps or runtime.divided or runtime.spent or runtime.reduced is not None:
                continue
            if part.forwards == self.case.micro_batches or self.layout.slices > 1:
                continue
            before = None if role.stage == 0 else member.runtimes.get(self.layout.predecessor(role))
            if role.stage > 0 and (before is None or part.forwards not in before.parts[-1].outputs):
                continue
            able.append(part)
        if able:
            part = self.random.choice(able)
            part.outputs.add(part.forwards)
            part.forwards += 1
            self.counts["redundant"] += 1

    def _sums_of(self, runtime: Runtime) -> tuple[int, ...]:
        """The sums of a role, of all of its parts, which have to be the same."""
        parts = sorted((*runtime.parts, *filter(None, [runtime.theirs])), key=lambda part: part.begin)
        covered = [0, *(part.end for part in parts)]
        assert covered == [*(part.begin for part in parts), runtime.blocks], f"parts of {runtime.role}: {covered}"
        folds = {part.fold for part in parts}
        assert folds == {tuple(range(self.case.micro_batches))}, f"the sums of {runtime.role} are {folds}"
        return folds.pop()

    def _reduce_tied(self, member: Member, role: Role) -> Iterator[Waits]:
        mine = [each.role for each in member.owned() if each.role.pipeline == role.pipeline]
        for number, stages in enumerate(self.case.ties):
            tied = [each for each in mine if each.stage in stages]
            if role != mine[-1] or not tied:
                continue
            group = {self.plan.owner(Role(role.pipeline, stage)) for stage in stages}
            if all(member.runtimes[each].reduced is not None for each in tied):
                continue
            for each in tied:
                self._sums_of(member.runtimes[each])
                member.runtimes[each].tied.add(number)
            what = "tied", member.step, role.pipeline, number
            self.come[what].add(member.name)
            yield lambda what=what, group=group: self.come[what] >= group  # type: ignore[misc]

    def _reduce(self, member: Member, role: Role) -> Iterator[Waits]:
        same = [each for each in member.owned() if each.role.stage == role.stage]
        if role != same[-1].role or all(each.reduced is not None for each in same):
            return
        what = "reduce", member.step, role.stage, self.layout.slice_of(role)
        for each in same:
            shared = {number for number, stages in enumerate(self.case.ties) if role.stage in stages}
            assert each.tied == shared, f"the tied weights of {each.role} are not reduced"
            self.sent[("Fold", *what)].append(self._sums_of(each))
        group = {self.plan.owner(each) for each in self.layout.siblings(role)}
        self.come[what].add(member.name)
        yield lambda: self.come[what] >= group
        for each in same:
            each.reduced = tuple(self.sent[("Fold", *what)])
            each.loss = True


def check_end(world: World) -> None:
    """The job has trained as it should: every role has an owner, and owners and shadows the same state."""
    for rank, owner in enumerate(world.plan.owners):
        role = world.layout.role(rank)
        for name in filter(None, (owner, world.plan.shadows[rank] if world.plan.shadows else None)):
            assert world.members[name].runtimes[role].steps == world.case.iterations, (role, name)
