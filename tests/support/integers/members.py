"""Members of jobs on integers: what they hold, and where they are."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from bamboo_ds.engine.recovery.reports import MemberReport
from bamboo_ds.schedule import Decision, PartProgress
from bamboo_ds.topology import Plan, Role
from bamboo_ds.topology.memory import NEWEST_SUMS

from .case import Case
from .programs import Programs

#: A part of a role: its first block, and the one behind the last.
Range = tuple[int, int]
#: What a coroutine waits for; ``None``: nothing.
Waits = Callable[[], Any] | None
#: After which iteration a snapshot is taken, and whether within the next one.
Moment = tuple[int, bool]


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
        return PartProgress(self.begin, self.end, self.forwards, self.backwards, self.since)

    def report(self, broken: bool) -> PartProgress:
        given = self.backwards
        while given in self.given:
            given += 1
        return replace(self.progress(), given=given, broken=broken)

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
        valid: it has not been found to differ from its owner.
        stale: it lacks what the shards of others' steps have changed.
        theirs: what its shadow has computed of it.
        tied: the sets of shared weights that are reduced.
        reduced: the sums of all copies of the stage, of all parts; ``None``: not reduced.
        loss: it has the loss and the checksums that a commit needs of the ends of a pipeline.
    """

    role: Role
    blocks: int
    steps: int = 0
    owned: bool = False
    valid: bool = True
    stale: bool = False
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
        return len(self.parts) > 1 or (self.parts[0].begin, self.parts[0].end) != (0, self.blocks)

    def part(self, begin: int) -> Part:
        """The part that begins with a block, or the only one."""
        first, *others = self.parts
        return next((part for part in others if part.begin == begin), first)

    def divide(self, ranges: Sequence[Range]) -> None:
        known = {(part.begin, part.end): part for part in self.parts}
        self.parts = [known.get(each) or Part(*each) for each in ranges]

    def told(self) -> tuple[PartProgress, ...]:
        return tuple(part.report(self.broken) for part in self.parts)


@dataclass(eq=False)
class Construction:
    """A replica that a member builds; see :class:`bamboo_ds.engine.replicas.construction.Construction`.

    Attributes:
        source: the member that offers the snapshot, and its key.
        arrived: the moment of the snapshot and the steps of its state, when that is here.
        built: steps of what is built of it.
        incoming: reduced gradients of the iteration under way.
        kept: those of committed ones.
    """

    source: tuple[str, str]
    arrived: tuple[Moment, int] | None = None
    built: int | None = None
    incoming: tuple[Any, ...] | None = None
    kept: list[tuple[Moment, tuple[Any, ...]]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """What all that executes a job goes by.

    Attributes:
        case: the job.
        random: says who goes on, what is drawn, and what arrives.
        counts: what has happened.
        did: passes that have been done, redundant ones as well, by iteration.
    """

    case: Case
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    did: dict[int, set[tuple[Role, str, int]]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.layout = self.case.layout

    def runtime(self, role: Role, **more: Any) -> Runtime:
        """A new one."""
        return Runtime(role, self.layout.blocks_of(role.stage), **more)


@dataclass(eq=False)
class Epoch:
    """A plan as its members go by it.

    Attributes:
        sent: messages that are under way, by kind and destination.
        come: members that have come to where all meet.
        reports: of those that have entered it.
        begins: when snapshots may be taken that copies begin with; ``None``: not before the end of the iteration.
        newest: by iteration the newest plan that each member knew when it entered the commit.
        passes: by iteration and kind, that have been done.
        resumed: the programs of the iteration that goes on.
    """

    plan: Plan
    sent: dict[tuple[Any, ...], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    come: dict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))
    reports: dict[str, MemberReport] = field(default_factory=dict)
    decision: Decision | None = None
    begins: Moment | None = None
    lacking: dict[str, set[int]] = field(default_factory=dict)
    newest: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    passes: Counter[tuple[int, str]] = field(default_factory=Counter)
    resumed: Programs | None = None


@dataclass(eq=False)
class Member:
    """A member: what it holds, and where it is.

    Attributes:
        epoch: that it is in.
        step: iterations that it has finished.
        at_boundary: it is between two of them.
        joining: it waits for its first plan.
        inside: the pass that its slices wait for each other in.
        lacked: roles that it was to shadow, and has no replica of.
        offers, due: snapshots that it offers, and is to offer, by key.
    """

    name: str
    epoch: Epoch
    script_rank: Role
    runtimes: dict[Role, Runtime] = field(default_factory=dict)
    sums: dict[tuple[Role, int, int], dict[int, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    step: int = 0
    at_boundary: bool = False
    joining: bool = False
    entered: bool = False
    vector: tuple[float, ...] | None = None
    taken: set[Role] = field(default_factory=set)
    inside: tuple[Role, int, str, int] | None = None
    lacked: set[Role] = field(default_factory=set)
    building: dict[Role, Construction] = field(default_factory=dict)
    offers: dict[str, tuple[Moment, int]] = field(default_factory=dict)
    due: dict[str, Role] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.epoch.plan

    def owned(self) -> list[Runtime]:
        return [runtime for _, runtime in sorted(self.runtimes.items()) if runtime.owned]

    def hold(self, role: Role, step: int, begin: int, end: int, fold: tuple[int, ...]) -> None:
        """Sums of a part have arrived; of this iteration the newest are kept."""
        if step != self.step:
            return
        held = self.sums[role, begin, end]
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
