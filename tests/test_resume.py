"""Interrupted iterations: programs of all members, run by an interpreter, cut, re-planned and resumed.

The interpreter knows no tensors: it moves micro-batch numbers. Sends never block, receives block and take
their edge's messages in order, members proceed in random interleaving. A cut discards all messages in flight
and lets members vanish with everything they held; their roles go to the shadows with some redundant forwards.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import (
    Decision,
    MemberProgress,
    RoleProgress,
    commit_program,
    decide,
    member_program,
    settle,
)
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy

pytestmark = pytest.mark.claim("reference/guarantees.md")


def plan_of(pipelines: int, stages: int, redundant: bool = True, scattered: random.Random | None = None) -> Plan:
    """The plan that a job starts with; ``scattered``: shadows, and some owners, as after any number of changes."""
    layout = Layout(pipelines, stages)
    plan = with_redundancy(initial_plan([f"m{rank}" for rank in range(layout.size)]), layout, redundant)
    if scattered is None or len(plan.members) == 1:
        return plan
    owners = [scattered.choice((owner, scattered.choice(plan.members))) for owner in plan.owners]
    shadows = [scattered.choice([m for m in plan.members if m != owner]) for owner in owners]
    return replace(plan, owners=tuple(owners), shadows=tuple(shadows if redundant else plan.shadows))


@dataclass
class Held:
    """What the owner of a role holds of the current iteration."""

    outputs: set[int] = field(default_factory=set)  # retained activations
    gradients: set[int] = field(default_factory=set)  # retained boundary gradients
    summed: list[int] = field(default_factory=list)  # micro-batches in the gradient sum, in order of addition
    forwards: int = 0
    reduced: bool = False
    state_only: bool = False
    loss: bool = True  # with the reduced gradients; a step does without

    def progress(self) -> RoleProgress:
        return RoleProgress(self.forwards, len(self.summed), self.reduced and self.loss, self.state_only)


class Deadlock(AssertionError):
    pass


class Job:
    """All members of a job, one instruction at a time."""

    def __init__(self, plan: Plan, micro_batches: int, rng: random.Random, ties: Sequence[set[int]] = ()) -> None:
        self.plan, self.micro_batches, self.rng = plan, micro_batches, rng
        self.ties, self.tied = ties, set().union(*ties)  # stages that share weights
        self.layout = plan.world
        self.held = {role: Held() for role in self.layout.roles}
        self.replicas: dict[Role, bool] = {}  # shadowed role -> reduced gradients received
        self.steps = dict.fromkeys(plan.members, 0)
        self.vectors: dict[str, tuple[float, ...] | None] = dict.fromkeys(plan.members)
        self.versions: Counter[tuple[str, Role]] = Counter()  # optimizer steps of each copy of a role
        self.faults: Counter[str] = Counter()
        self.load(None)

    # --- epochs ---

    def load(self, decision: Decision | None) -> None:
        """Give each member its program: that of ``decision``, or of an iteration that begins."""
        commit = decision is not None and decision.mode == "commit"
        progress = None if decision is None else decision.progress
        self.programs = {
            member: commit_program(self.plan, member)
            if commit
            else member_program(self.plan, member, self.micro_batches, progress)
            for member in self.plan.members
        }
        self.pc = dict.fromkeys(self.plan.members, 0)
        self.role: dict[str, Role] = {}
        self.edges: dict[tuple[str, Role], deque[int]] = defaultdict(deque)
        self.inputs: dict[Role, set[int]] = defaultdict(set)
        self.loaded: dict[Role, set[int]] = defaultdict(set)
        self.incoming: dict[Role, set[int]] = defaultdict(set)
        self.arrived: set[Role] = set()
        self.tying: dict[tuple[int, int], set[Role]] = defaultdict(set)  # who has come, by pipeline and tie
        self.entered: set[str] = set()
        self.work: Counter[tuple[str, Role, int]] = Counter()  # passes performed and to perform in this epoch
        self.expected: Counter[tuple[str, Role, int]] = Counter()
        for role in self.layout.roles:
            done = progress[role] if progress else RoleProgress()
            if not (commit or done.reduced):
                self.expected.update(("F", role, m) for m in range(done.forwards, self.micro_batches))
                self.expected.update(("B", role, m) for m in range(done.backwards, self.micro_batches))

    def cut(self, lost: set[str]) -> bool:
        """End the epoch: ``lost`` vanish, the rest recovers. False, and nothing done: a fatal loss."""
        new = takeover(self.plan, lost)
        if new.unheld:
            return False
        newest = max(self.steps[m] for m in new.members)
        changed = [r for r in self.layout.roles if self.plan.owner(r) != new.owner(r)]
        clones = [r for r in changed if new.owner(r) != self.plan.shadow(r)]
        for role in changed:
            if role not in clones:
                self.promote(role, new.owner(role), newest)
        for role in clones:
            self.replicas.pop(role, None)
            self.clone(role, new, clones)
        self.replicas = {r: ok for r, ok in self.replicas.items() if new.shadow(r) is not None}
        self.plan = new
        records = {
            member: MemberProgress(
                self.steps[member],
                member in self.entered,
                {role: self.held[role].progress() for role in new.owned_by(member)},
                self.vectors[member],
            )
            for member in new.members
        }
        decision = decide(records, self.layout)
        assert decision.step == newest
        for member in decision.behind:
            assert decision.commit_vector == (float(newest - 1),)
            self.finish_commit(member)
            for role in new.owned_by(member):
                self.do_OptimizerStep(member, role)
            for role in new.shadowed_by(member):
                self.do_StepReplica(member, None, role)
        assert {self.steps[m] for m in new.members} == {newest}
        # Everything that a member of iteration K holds counts, and nothing else does.
        for role in self.layout.roles:
            assert decision.progress[role] == self.held[role].progress()
        if decision.mode == "commit" and not all(p.reduced for p in decision.progress.values()):
            decision = replace(decision, mode="resume")  # a clone lacks what the commit needs
        if decision.mode == "resume":
            settled = settle(self.layout, self.micro_batches, decision.progress, self.tied)
            for role, done in settled.items():
                self.faults["redone"] += done != decision.progress[role]
                self.held[role].reduced = done.reduced
            decision = replace(decision, progress=settled)
        self.faults[decision.mode] += 1
        self.faults["behind"] += bool(decision.behind)
        self.load(decision)
        return True

    def promote(self, role: Role, owner: str, newest: int) -> None:
        """The shadow becomes the owner."""
        self.held[role] = Held(reduced=self.replicas.pop(role, False), state_only=True)
        if not self.held[role].reduced:
            assert self.steps[owner] == newest
            # Redundant forwards need the inputs that the shadow computed itself (stage 0 loads them).
            before = self.layout.predecessor(role)
            source = self.held[before] if self.plan.owner(before) == owner else Held()
            limit = source.forwards if role.stage else self.micro_batches
            self.held[role].forwards = self.rng.randint(0, limit)
            self.held[role].outputs = set(range(self.held[role].forwards))
        self.faults["replicated" if self.held[role].reduced else "taken over"] += 1

    def clone(self, role: Role, new: Plan, clones: list[Role]) -> None:
        """A holder of the same stage of another pipeline becomes the owner, with that one's reduced gradients."""
        owner = new.owner(role)
        twins = (Role(d, role.stage) for d in range(self.layout.pipelines))
        twin = next(t for t in twins if t not in clones and new.owner(t) == owner)
        last = role.stage == self.layout.stages - 1  # the loss of its own pipeline is gone
        self.held[role] = Held(reduced=self.held[twin].reduced, state_only=True, loss=not last)
        self.versions[owner, role] = self.versions[owner, twin]
        self.faults["cloned"] += 1

    # --- running ---

    def run(self, budget: int | None = None, commit: bool = False) -> bool:
        """Run to the end of the iteration (True), or for ``budget`` instructions or to the commit (False)."""
        members = list(self.plan.members)
        while members:
            self.rng.shuffle(members)
            self.moved = False
            for member in members:
                for _ in range(self.rng.choice((1, 3, 20))):
                    if budget == 0 or (commit and self.entered == set(self.plan.members)):
                        return False
                    if self.pc[member] == len(self.programs[member]) or not self.execute(member):
                        break
                    self.pc[member] += 1
                    self.moved = True
                    budget = None if budget is None else budget - 1
            members = [m for m in members if self.pc[m] < len(self.programs[m])]
            if members and not self.moved:
                stuck = {m: self.programs[m][self.pc[m]] for m in members}
                raise Deadlock(f"nobody can go on: {stuck}")
        return True

    def execute(self, member: str) -> bool:
        """Try the next instruction of ``member``; False: it blocks."""
        instruction = self.programs[member][self.pc[member]]
        role = self.role.get(member)
        done = getattr(self, f"do_{instruction.name}")(member, role, **instruction.kwargs)
        return done is not False

    def do_UseRole(self, member: str, _: Any, role: Role, part: int) -> None:
        assert self.plan.owner(role) == member
        self.role[member] = role

    def do_FillBubble(self, member: str, current: Any, awaits: str, buffer_id: Any, role: Any) -> None:
        following = self.programs[member][self.pc[member] + 1]
        name = {"activation": "RecvActivation", "grad": "RecvGrad", "replica": "RecvReplica"}[awaits]
        assert following.name == name
        if awaits == "replica":
            assert following.role == role
        else:
            assert following.buffer_id == buffer_id

    def do_LoadMicroBatch(self, _: str, role: Role, buffer_id: int) -> None:
        assert role.stage in (0, self.layout.stages - 1)
        self.loaded[role].add(buffer_id)

    def receive(self, kind: str, role: Role, m: int) -> bool:
        queue = self.edges[kind, role]
        if not queue:
            return False
        assert queue.popleft() == m, "messages of an edge out of step"
        return True

    def do_RecvActivation(self, _: str, role: Role, buffer_id: int) -> bool:
        assert role.stage > 0
        self.inputs[role].add(buffer_id)
        return self.receive("activation", role, buffer_id)

    def do_RecvGrad(self, _: str, role: Role, buffer_id: int) -> bool:
        assert role.stage < self.layout.stages - 1
        self.incoming[role].add(buffer_id)
        return self.receive("grad", role, buffer_id)

    def do_ForwardPass(self, _: str, role: Role, buffer_id: int) -> None:
        held = self.held[role]
        assert buffer_id == held.forwards
        assert role.stage == 0 or buffer_id in self.inputs[role]
        assert 0 < role.stage < self.layout.stages - 1 or buffer_id in self.loaded[role]
        held.forwards += 1
        held.outputs.add(buffer_id)
        self.work["F", role, buffer_id] += 1

    def do_BackwardPass(self, _: str, role: Role, buffer_id: int) -> None:
        held = self.held[role]
        assert buffer_id == len(held.summed) < held.forwards
        assert role.stage == self.layout.stages - 1 or buffer_id in self.incoming[role]
        held.summed.append(buffer_id)
        held.gradients.add(buffer_id)
        self.work["B", role, buffer_id] += 1

    def do_SendActivation(self, _: str, role: Role, buffer_id: int) -> None:
        assert buffer_id in self.held[role].outputs, "sends an activation that it does not hold"
        self.edges["activation", self.layout.successor(role)].append(buffer_id)

    def do_SendGrad(self, _: str, role: Role, buffer_id: int) -> None:
        assert buffer_id in self.held[role].gradients, "sends a gradient that it does not hold"
        self.edges["grad", self.layout.predecessor(role)].append(buffer_id)

    do_ResendActivation = do_SendActivation
    do_ResendGrad = do_SendGrad

    def do_ReduceTiedGrads(self, member: str, role: Role) -> bool:
        """A member reduces all ties of a pipeline with the last of its roles there, one after the other."""
        mine = [r for r in sorted(self.plan.owned_by(member)) if r.pipeline == role.pipeline]
        if role != mine[-1]:
            return True
        for tie, stages in enumerate(self.ties):
            come = self.tying[role.pipeline, tie]
            for r in mine:
                if r.stage in stages and r not in come:
                    assert self.held[r].summed == list(range(self.micro_batches)), "an incomplete gradient sum"
                    come.add(r)
                    self.moved = True
            if any(r.stage in stages for r in mine) and len(come) < len(stages):
                return False
        return True

    def do_ReduceGrads(self, member: str, role: Role) -> bool:
        """A member reduces all of its roles of a stage with the last of them."""
        group = [Role(d, role.stage) for d in range(self.layout.pipelines)]
        mine = [r for r in group if self.plan.owner(r) == member]
        if role != mine[-1] or all(self.held[r].reduced for r in mine):
            return True
        for r in mine:
            assert self.held[r].summed == list(range(self.micro_batches)), "an incomplete or repeated gradient sum"
            self.arrived.add(r)
        complete = all(r in self.arrived for r in group)
        for r in mine:
            self.held[r].reduced = self.held[r].loss = complete
        return complete

    def do_SendReplica(self, _: str, role: Role) -> None:
        assert self.held[role].reduced
        assert self.plan.shadow(role) is not None
        self.edges["replica", role].append(-1)

    def do_RecvReplica(self, member: str, _: Any, role: Role) -> bool:
        assert self.plan.shadow(role) == member
        if not self.receive("replica", role, -1):
            return False
        self.replicas[role] = True
        return True

    def do_Commit(self, member: str, _: Any) -> bool:
        for role in self.plan.owned_by(member):
            assert self.held[role].progress().reduced
        for role in self.plan.shadowed_by(member):
            assert self.replicas[role]
        step = self.steps[member]
        if member not in self.entered:
            self.entered.add(member)
            self.moved = True
            return False
        # Complete once everyone has entered; each member notices at a moment of its own.
        if not all(m in self.entered or self.steps[m] > step for m in self.plan.members):
            return False
        self.finish_commit(member)
        return True

    def finish_commit(self, member: str) -> None:
        self.vectors[member] = (float(self.steps[member]),)
        self.steps[member] += 1
        self.entered.discard(member)

    def do_OptimizerStep(self, member: str, role: Role) -> None:
        assert self.held[role].reduced
        self.held[role] = Held()
        self.step_copy(member, role)

    def do_StepReplica(self, member: str, _: Any, role: Role) -> None:
        assert self.replicas.pop(role)
        self.step_copy(member, role)

    def step_copy(self, member: str, role: Role) -> None:
        self.versions[member, role] += 1
        assert self.versions[member, role] == self.steps[member], "a copy stepped twice or missed a step"

    def finish_steps(self) -> None:
        """Steps after the commit need no peer: whoever passed it finishes them."""
        for member, program in self.programs.items():
            names = [instruction.name for instruction in program]
            while self.pc[member] > names.index("Commit") and self.pc[member] < len(program):
                assert self.execute(member)
                self.pc[member] += 1


def train(job: Job, iterations: int, cuts: int) -> None:
    """Run ``iterations``, each cut up to ``cuts`` times at random instants; check that each is exact."""
    rng = job.rng
    while min(job.steps[member] for member in job.plan.members) < iterations:
        for _ in range(rng.randint(0, cuts)):
            length = sum(len(program) for program in job.programs.values())
            # Often near the end: the window around reduction, replication and commit is short.
            tail = rng.randint(1, min(length, 12 * len(job.plan.members)))
            where = rng.choice(("anywhere", "late", "commit"))
            budget = {"anywhere": rng.randrange(length), "late": length - tail, "commit": None}[where]
            if job.run(budget, where == "commit"):
                break
            job.finish_steps()
            for _ in range(5):
                victims = {rng.choice(job.plan.members) for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))}
                if job.cut(victims):
                    break
            else:
                victims = set()
                assert job.cut(victims)  # nobody can be spared: an epoch that nobody leaves
            job.faults["cuts"] += 1
            job.faults["several at once"] += len(victims) > 1
        assert job.run()
        assert job.work == job.expected
        advance(job)


def advance(job: Job) -> None:
    """Check that every copy of every role has made the same steps, and begin the next iteration."""
    (step,) = {job.steps[member] for member in job.plan.members}
    assert all(held == Held() for held in job.held.values()) and not job.replicas
    assert not any(job.edges.values()), "a message that nobody received"
    for role in job.layout.roles:
        for member in {job.plan.owner(role), job.plan.shadow(role)} - {None}:
            assert job.versions[member, role] == step
    job.load(None)


@settings(max_examples=120)
@given(
    stages=st.integers(2, 8),
    micro_batches=st.integers(1, 24),
    pipelines=st.integers(1, 4),
    redundant=st.sampled_from([True, True, True, False]),
    scattered=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_resumed_iterations_are_exact(
    stages: int, micro_batches: int, pipelines: int, redundant: bool, scattered: bool, seed: int
) -> None:
    rng = random.Random(seed)
    job = Job(plan_of(pipelines, stages, redundant, rng if scattered else None), micro_batches, rng)
    train(job, iterations=2, cuts=3)


@pytest.mark.parametrize(("pipelines", "stages"), [(1, 2), (1, 4), (2, 3), (4, 4)])
def test_every_kind_of_recovery_happens(pipelines: int, stages: int) -> None:
    """The same with fixed seeds, counting the faults: the property above must not hold for lack of them."""
    faults: Counter[str] = Counter()
    for seed in range(150):
        job = Job(plan_of(pipelines, stages), 5, random.Random(seed))
        train(job, iterations=2, cuts=3)
        faults += job.faults
    kinds = ["cuts", "resume", "commit", "taken over", "replicated"]
    if pipelines * stages > 2:  # with two members there is only one survivor
        kinds += ["behind", "several at once"]
    assert all(faults[kind] >= 5 for kind in kinds), faults


@pytest.mark.parametrize(("pipelines", "ties"), [(1, [{0, 3}]), (1, [{0, 1, 3}, {1, 2}]), (2, [{0, 3}, {1, 2}])])
def test_tied_stages(pipelines: int, ties: list[set[int]]) -> None:
    """Nobody waits for ever, whoever owns what; a stage that others reduce with has its sums."""
    faults: Counter[str] = Counter()
    for seed in range(300):
        rng = random.Random(seed)
        job = Job(plan_of(pipelines, 4, scattered=rng if seed % 2 else None), 5, rng, ties)
        train(job, iterations=2, cuts=3)
        faults += job.faults
    assert faults["redone"] >= 10 and faults["commit"] >= 10, faults


@pytest.mark.parametrize(("pipelines", "stages"), [(1, 4), (1, 8), (2, 3)])
def test_shadows_anywhere(pipelines: int, stages: int) -> None:
    """After healing the shadow is not always the stage before; passes that the lost owner had finished are redone."""
    faults: Counter[str] = Counter()
    for seed in range(300):
        rng = random.Random(seed)
        job = Job(plan_of(pipelines, stages, scattered=rng), 5, rng)
        train(job, iterations=2, cuts=3)
        faults += job.faults
    assert faults["redone"] >= 3 and faults["behind"] >= 5, faults
    assert (faults["cloned"] >= 5) == (pipelines > 1), faults


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("lacking", [None, 0, 1, 2])
def test_what_is_reduced_everywhere_is_not_done_again(copies: int, lacking: int | None) -> None:
    """A loss after all passes, when some had not entered the commit; one copy of stage ``lacking`` is not reduced."""
    plan = takeover(plan_of(copies, 3), {"m1" if copies == 1 else f"m{copies}"})
    lost = Role(0, 1)
    progress = {role: RoleProgress(4, 4, reduced=True) for role in plan.world.roles}
    progress[lost] = RoleProgress(2, 0, reduced=True, state_only=True)
    late = Role(copies - 1, lacking) if lacking is not None else None
    if late is not None:
        progress[late] = replace(progress[late], reduced=False)
    settled = settle(plan.world, 4, progress)
    kept = {role.stage for role in plan.world.roles if settled[role].reduced}
    assert kept == {0, 1, 2} - {lacking}
    passes: Counter[str] = Counter()
    for member in plan.members:
        passes.update(type(i).__name__ for i in member_program(plan, member, 4, settled) if "Pass" in type(i).__name__)
    # The passes of the lost role alone, and only if it has to reduce again; it had done two forwards redundantly.
    again = lacking == lost.stage
    assert passes == (Counter(ForwardPass=2, BackwardPass=4) if again else Counter())
    assert settled[lost].reduced is not again


def test_one_stage() -> None:
    train(Job(plan_of(2, 1), 4, random.Random(0)), iterations=2, cuts=3)
