"""Takeovers at every cut: the engine's parts on a simulated network, with losses before everything that members do.

One seed is one course of events: who goes on when, what arrives when, what is lost with a member, when plans come.
:mod:`tests.model.test_integers` proves what is decided at every cut, the jobs of :mod:`tests.job.test_takeover` and
:mod:`tests.job.test_losses` the same of real processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds.engine.context.channels import BATCH_PARTS
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.data.supply import BatchSupply
from bamboo_ds.engine.iteration import reduction
from bamboo_ds.engine.iteration.boundaries import Boundaries
from bamboo_ds.engine.iteration.replication import Replication
from bamboo_ds.engine.joining import replay
from bamboo_ds.engine.recovery.copies import Copies
from bamboo_ds.engine.replicas.construction import Construction
from bamboo_ds.engine.stage import layers, shares
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.errors import FatalLoss, UnsupportedError
from bamboo_ds.topology import Role, takeover
from bamboo_ds.topology import ends as ends_of
from bamboo_ds.worker import plan_changes
from tests.support.simulated_engine import RUNS, Cut, Member, Spec, World, finite, same, state_of
from tests.support.simulated_network import SimulatedChannel

pytestmark = pytest.mark.claim(
    "README.md",
    "guides/elastic.md",
    "guides/even-shares.md",
    "guides/notices.md",
    "guides/scripts.md",
    "reference/guarantees.md",
)

LINE = Spec()
JOBS = {
    "eager-frc": LINE,
    "eager-brc": Spec(mode="eager-frc-eager-brc", sync_every=1),
    "lazy": Spec(mode="lazy-frc-lazy-brc", micro_batches=3),
    "sums": Spec(mode="lazy-frc-lazy-brc", stages=4, micro_batches=5, sync_every=1),
    "tied": Spec(tied=True),
    "two pipelines": Spec(pipelines=2, stages=2, sync_every=1),
    "four stages": Spec(stages=4),
    "tight": Spec(stages=4, micro_batches=4, sync_every=1, tight=1),
    "dataset": Spec(dataset=True),
    "divided": Spec(blocks=3, lends=True, tied=True),
    "divided, sums": Spec(blocks=3, lends=True, sync_every=1),
    "divided, two pipelines": Spec(pipelines=2, stages=2, blocks=2, lends=True, micro_batches=3),
    "sharded, with evaluations": Spec(
        pipelines=2, stages=2, micro_batches=1, iterations=2, sharded=True, evaluates=True
    ),
}


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Members of a job are threads of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    groups = SimpleNamespace(all_reduce=lambda tensor, group: group.all_reduce(tensor))
    for module in (reduction, shares):
        monkeypatch.setattr(module, "dist", groups)
    listener: Any = lambda view: RUNS.get().look("on_plan_change")  # noqa: E731
    monkeypatch.setattr(plan_changes, "_listeners", [listener])
    yield
    torch.set_num_threads(threads)


@cache
def undisturbed(spec: Spec, seed: int) -> World:
    return World(spec, seed).run()


def cuts_of(spec: Spec, seed: int, member: str, iteration: int = 1) -> list[Cut]:
    """Every place in ``iteration`` where ``member`` may be lost, if things go as ``seed`` has it until then."""
    done = undisturbed(spec, seed).done[member]
    return [Cut(member, event) for event, (steps, _) in enumerate(done) if steps == iteration]


#: The event that the iterators at the ends of a pipeline differ.
DIFFER = "iterators_differ"
#: So many things a member does at the end of an iteration, around its commit.
_COMMIT = 5


def every_loss(spec: Spec, seed: int, victim: str, step: int = 1) -> list[World]:
    """Jobs that lose ``victim`` in their second iteration, at one cut each: every ``step``-th, and the last ones."""
    cuts = cuts_of(spec, seed, victim)
    last = cuts[-_COMMIT:] if step == 1 else cuts[-_COMMIT::2]
    return [World(spec, seed, (cut,)).run() for cut in dict.fromkeys([*cuts[seed % step :: step], *last])]


def check(world: World) -> None:
    """The job has ended as one that has lost nobody, or with an error on all members where it cannot."""
    spec, survivors = world.spec, world.survivors()
    changes_weights = spec.changes in ("weights", "weights once")
    if world.plan.lost_roles or (changes_weights and any(member.fatal for member in survivors)):
        # An error that one member alone has ends the job for all.
        refused = changes_weights and any(isinstance(member.fatal, UnsupportedError) for member in survivors)
        assert refused or all(isinstance(member.fatal, FatalLoss) for member in survivors)
        assert all(member.fatal for member in survivors)
        return
    calm = replace(
        spec, heals=False, leaves=False, joiners=0, grows=0, lends=False, straggler=None, apart=None, tight=0
    )
    expected = undisturbed(calm, 0)
    states, wanted = state_of(world), state_of(expected)
    assert all(same(states[role], wanted[role]) for role in wanted)
    losses = expected.members["m0"].losses
    for member in survivors:
        assert member.fatal is None and member.losses == losses
        assert not member.epoch.begun or not set(member.epoch.plan.members) & set(world.killed)
        assert done_by(member) == done_by(expected.members["m0"])
        assert member.strange == [], "the script's own code has run while another role was bound"
        for tag, saved in member.saves.collected.items():
            for role, state in saved.items():
                owner = expected.members[expected.plan.owner(role)]
                assert same(state, owner.saves.collected[tag][role]), (member.name, tag, role)
        assert not any(kind == "replica_mismatch" for kind, _ in member.job.events)
        # Every micro-batch is drawn once, by each member that can read it.
        assert member.drawn[0] in (0, spec.iterations * spec.micro_batches * (not spec.dataset))
        assert member.evaluated[0] in (0, (spec.iterations + 1) * spec.micro_batches * spec.evaluates)


def done_by(member: Member) -> list[tuple[str, Any]]:
    """What a member knows of what the job has done; saves are called after their attempts."""
    history: History = member.training.history
    done = [history[number] for number in range(len(history))]
    return [(each.kind, None if each.kind == "save" else each.data) for each in done]


@pytest.mark.parametrize("spec", JOBS.values(), ids=JOBS)
def test_what_comes_first_makes_no_difference(spec: Spec) -> None:
    expected = undisturbed(spec, 0)
    losses = expected.members["m0"].losses
    assert expected.members["m0"].looks["batch_fn"] > 0
    assert finite(expected) and len(set(losses)) == len(losses) >= spec.iterations
    for seed in (1, 2):
        check(World(spec, seed).run())
    if spec.mode != "lazy-frc-lazy-brc" and not spec.lends:
        redundant = [facts["frc_done"] for kind, facts in expected.members["m0"].job.events if kind == "step"]
        assert sum(redundant) > 0  # what a loss finds done varies


#: One course of events in the suite, another and longer one by ``make exhaustive``.
COURSES = [0, pytest.param(1, marks=pytest.mark.exhaustive)]
#: Those whose parts all others have as well are lost in long courses alone.
_LONG_ONLY = ("eager-brc", "lazy", "four stages", "dataset", "divided")
COURSES_OF_JOBS = [
    pytest.param(job, course, marks=[pytest.mark.exhaustive] * (course > 0 or job in _LONG_ONLY))
    for job in JOBS
    for course in ((1,) if job in _LONG_ONLY else (0, 1))
]


def seeds(course: int, few: int, many: int) -> range:
    """Of the jobs of a course: few of the first one, many of the long one."""
    return range(1000 * course, 1000 * course + (many if course else few))


@pytest.mark.parametrize(("job", "course"), COURSES_OF_JOBS)
def test_a_loss_at_every_cut(job: str, course: int) -> None:
    """Of each member, before every third thing that it does in an iteration; in the suite before every twelfth."""
    modes: Counter[str] = Counter()
    kept = 0
    for number, victim in enumerate(sorted(undisturbed(JOBS[job], 0).members)):
        seed = 100 * course + number
        for world in every_loss(JOBS[job], seed, victim, step=3 if course else 12):
            check(world)
            assert world.killed == [victim] and not world.plan.lost_roles
            modes.update(facts["mode"] for kind, facts in world.survivors()[0].job.events if kind == "recovered")
            told = [facts for member in world.survivors() for kind, facts in member.job.events if kind == "recovered"]
            kept += sum(facts["backwards_kept"] for facts in told)
    assert bool(kept) == bool(JOBS[job].sync_every), "sums of lost members are gone on from where there are any"
    # Where a member is lost between the messages of its commit, some may have committed and others not.
    assert modes["resume"] > 3 and modes["commit"] > 0


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("job", ["eager-frc", "two pipelines", "sharded, with evaluations"])
def test_own_checkpoints_lack_the_roles_of_the_lost_only(job: str, course: int) -> None:
    """All others take part, also those that learn of the commit from others, so none waits for what never comes."""
    lacking = 0
    spec = replace(JOBS[job], own=True)
    for number, victim in enumerate(sorted(undisturbed(spec, 0).members)):
        for world in every_loss(spec, 100 * course + number, victim, step=3 if course else 12):
            check(world)
            saves = [member.saves.collected for member in world.survivors()]
            tags = {f"step{step}" for step in range(1, spec.iterations + 1)}
            assert set().union(*saves) == tags, "none is left out"
            for tag in tags:
                found = {role for each in saves for role in each.get(tag, {})}
                missing = set(world.layout.roles) - found
                assert not missing or missing == {world.layout.role(number)}, (tag, victim)
                lacking += bool(missing)
    assert lacking, "all were taken before a loss, or anew after it"


#: The ends of a pipeline give different batches, or may do so: what DeepSpeed does not look at is noise. And in which
#: iteration members are lost.
ENDS = {
    "apart": (Spec(micro_batches=3, apart=0), 1),
    "apart, at once": (Spec(stages=2, apart=0), 0),
    "apart, two pipelines": (Spec(pipelines=2, stages=2, apart=0), 0),
    "apart, divided": (Spec(blocks=3, lends=True, apart=0), 1),
    "apart, in evaluations": (Spec(stages=2, apart=0, evaluates=True), 1),
    "apart later": (Spec(apart=2, iterations=4), 2),
    "not known to be alike": (Spec(), 0),
}


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("job", ENDS)
def test_each_end_is_drawn_from(job: str, course: int) -> None:
    """Of the end that is lost a worker draws that runs the script as that rank; nothing else is computed."""
    (spec, iteration), done = ENDS[job], Counter[str]()
    plain = undisturbed(replace(spec, apart=None, lends=False), 0)
    check(undisturbed(spec, course))
    ends = {plain.plan.owners[rank] for pipeline in range(spec.pipelines) for rank in ends_of(plain.plan, pipeline)}
    for number, victim in enumerate(sorted(ends)):
        seed = 100 * course + number
        for cut in cuts_of(spec, seed, victim, iteration)[seed % 16 :: 4 if course else 16]:
            world = World(spec, seed, (cut,)).run()
            check(world)
            assert world.killed == [victim]
            done["fed"] += len(world.fed)
            told = [facts for member in world.survivors() for kind, facts in member.job.events if kind == DIFFER]
            done["told"] += len(told)
            assert len(told) <= 1 + spec.evaluates
    assert done["fed"] > 0 and (done["told"] > 0) == (spec.apart is not None)


def test_where_the_ends_are_alike_nothing_more_is_sent() -> None:
    """Than in the first step, before that is known."""
    names = tuple(stream.name.lower() for stream in BATCH_PARTS)
    sent: dict[int | None, Counter[int]] = {}
    for apart in (None, 0):
        done = undisturbed(Spec(stages=2, iterations=4, apart=apart), 1).done.values()
        found = [(step, what.split(" on ")[1]) for each in done for step, what in each if what.startswith("send")]
        sent[apart] = Counter(step for step, channel in found if channel.startswith(names))
    # The inputs for the shadow of the first stage, and the labels for that of the last one.
    assert sent[None] == {0: 2 * LINE.micro_batches}
    assert sent[0] == dict.fromkeys(range(4), 2 * LINE.micro_batches)


@pytest.mark.parametrize(("job", "course"), COURSES_OF_JOBS)
def test_two_losses(job: str, course: int) -> None:
    """The second one at any time after the first: before it is noticed, in the recovery from it, or long after."""
    spec = JOBS[job]
    outcomes: Counter[str] = Counter()
    for seed in seeds(course, 6, 16):
        random, before = Random(seed), undisturbed(spec, seed)
        first, second = random.sample(sorted(before.members), 2)
        if before.starves([first, second]):
            continue  # nobody would be left who can read the batches
        cut = random.choice(cuts_of(spec, seed, first))
        world = World(spec, seed, (cut, Cut(second, random.randrange(random.choice((12, 40)))))).run()
        check(world)
        outcomes["fatal" if world.plan.lost_roles else "survived"] += len(world.killed) == 2
    # Of three stages in a row no two can be lost, of four those that are no neighbours, of two pipelines more.
    assert outcomes["survived" if spec.pipelines * spec.stages > 3 else "fatal"] > 0


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("statistics", [True, False])
def test_owner_and_shadow_are_lost(statistics: bool, course: int) -> None:
    """Another pipeline has the same parameters, but layers of its own; sooner or later both losses are one."""
    spec = Spec(pipelines=3, stages=3, statistics=statistics)
    outcomes: Counter[str] = Counter()
    for seed in seeds(course, 6, 16):
        random, plan = Random(seed), undisturbed(spec, 0).plan
        owner, shadow = random.choice([pair for pair in zip(plan.owners, plan.shadows, strict=True)])
        if undisturbed(spec, 0).starves([owner, str(shadow)]):
            continue
        world = World(spec, seed, (random.choice(cuts_of(spec, 0, owner)), Cut(str(shadow), random.randrange(8)))).run()
        check(world)
        outcomes["fatal" if world.plan.lost_roles else "survived"] += len(world.killed) == 2
    assert outcomes["fatal" if statistics else "survived"] > 1


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("job", ["eager-brc", "two pipelines"])
def test_a_loss_beside_a_planned_change(job: str, course: int) -> None:
    switched: Counter[bool] = Counter()
    for seed in seeds(course, 6, 16):
        random = Random(seed)
        victim, done = random.choice(sorted(undisturbed(JOBS[job], seed).done.items()))
        world = World(JOBS[job], seed, (Cut(victim, random.randrange(len(done) - 10)),), switch=True).run()
        check(world)
        switched[world.switched] += len(world.killed)
    assert switched[True] > 2


@pytest.mark.parametrize("course", COURSES)
def test_losses_beside_another_division(course: int) -> None:
    """A plan divides stages in another way; losses come before all have entered it, and after."""
    met: Counter[str] = Counter()
    for seed in seeds(course, 8, 24):
        random, job = Random(seed), ("divided", "divided, two pipelines")[seed % 2]
        before = undisturbed(JOBS[job], seed)
        first, second = random.sample(sorted(before.members), 2)
        cuts = [Cut(first, random.randrange(len(before.done[first]) - 10))]
        if not before.starves([first, second]):
            cuts.append(Cut(second, random.randrange(40)))
        world = World(JOBS[job], seed, tuple(cuts[: random.choice((1, 2))]), switch=True).run()
        check(world)
        met["switched"] += world.switched
        met["lost"] += len(world.killed)
        met["survived"] += bool(world.killed) and not world.plan.lost_roles
    assert min(met.values()) > 2, met


def test_losses_after_parameters_were_frozen() -> None:
    """Replicas that compute redundantly do not know of it before the end of the iteration, or a loss in it."""
    spec = Spec(micro_batches=4, sync_every=1, changes="trained")
    check(undisturbed(spec, 1))
    for seed, victim in enumerate(("m0", "m1", "m2")):
        done = undisturbed(spec, seed).done[victim]
        told = [event for event, (steps, what) in enumerate(done) if steps == 1 and " on told " in what]
        for cut in [cut for cut in cuts_of(spec, seed, victim) if cut.event > told[-1] + 1][seed::16]:
            world = World(spec, seed, (cut,)).run()
            check(world)
            assert world.killed == [victim]


def test_gradients_for_shadows_that_come_later_than_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of passes that the sums have made needless, at the moment when the first ones have just been dropped."""
    discard, late = SimulatedChannel.discard, [0]

    def while_others_come(self: SimulatedChannel, below: int) -> bool:
        left, network = discard(self, below), self._mine.network
        way = self._mine.plan.epoch, self.source, self.destination
        if not left and any(key == self.name and number < below for key, number, _ in network._flying.get(way, ())):
            while not self.ready():
                network._deliver(*way)
            late[0] += 1
        return left

    monkeypatch.setattr(SimulatedChannel, "discard", while_others_come)
    spec = Spec(mode="eager-frc-eager-brc", micro_batches=6, sync_every=1)
    for seed in range(40):
        check(World(spec, seed).run())
        if late[0]:
            return
    pytest.fail("no gradient has come late")


def test_an_heir_passes_on_what_the_layers_of_the_lost_stage_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the gradients of a stage whose passes it has not done; its layers are as before the iteration."""
    spec, passed_on = JOBS["two pipelines"], Counter[bool]()
    send = Replication.send

    def counting(self: Replication) -> None:
        passed_on[self.binding.current.results.layers is not None] += 1
        send(self)

    monkeypatch.setattr(Replication, "send", counting)
    for world in losses_after_a_switch(spec, 0):
        check(world)
        if passed_on[True] > 1:
            return
    pytest.fail("no heir has passed them on")


def losses_after_a_switch(spec: Spec, iteration: int) -> Iterator[World]:
    """A loss at the end of ``iteration``, of each member, where owner and shadow of a role change places before."""
    for seed in range(4):
        for victim in sorted(undisturbed(spec, seed).members):
            for cut in cuts_of(spec, seed, victim, iteration)[-6:]:
                yield World(spec, seed, (cut,), switch=True).run()


@pytest.mark.parametrize(("job", "course"), COURSES_OF_JOBS)
def test_roles_move_in_the_middle_of_an_iteration(job: str, course: int) -> None:
    """Owner and shadow change places at once, while both live; sometimes one of all is lost at some time after that."""
    done: Counter[str] = Counter()
    for seed in seeds(course, 6, 16):
        random, spec = Random(seed), JOBS[job]
        before = undisturbed(spec, 0)
        victim = random.choice(sorted(before.members))
        cuts = (Cut(victim, random.randrange(20), lambda world: world.switched),) if seed % 2 else ()
        world = World(spec, seed, cuts, at_once=random.randrange(sum(map(len, before.done.values())) // 2)).run()
        check(world)
        done["losses"] += len(world.killed)
        if not world.killed:
            told = [facts for m in world.survivors() for kind, facts in m.job.events if kind == "recovered"]
            done["resumed"] += any(facts["mode"] == "resume" for facts in told)
            done["kept"] += any(facts["backwards_kept"] > 0 for facts in told)
    assert done["losses"] > 0 and done["resumed"] > 0, done
    assert done["kept"] > 0 or job != "sums" or course, done


def test_no_role_moves_without_what_its_script_has_just_changed() -> None:
    """That comes with the end of the iteration: in the middle of it the job ends rather than lose it in silence."""
    spec, ended = replace(LINE, changes="weights once"), Counter[Any]()
    before = undisturbed(spec, 0)
    for seed in range(10):
        things = Random(seed).randrange(sum(map(len, before.done.values())))
        world = World(spec, seed, at_once=things).run()
        check(world)
        ended.update({type(member.fatal) for member in world.survivors()})
    assert min(ended[FatalLoss], ended[type(None)]) > 0, ended


def test_an_heir_that_has_no_pass_to_do_draws_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the reduced gradients of the first stage, and alone draws the labels that the last one waits for."""
    drawn, draw_ahead = Counter[bool](), BatchSupply.draw_ahead

    def counting(self: BatchSupply, micro_batches: int) -> None:
        own = [runtime for runtime in self.binding.owned() if runtime.role.stage in (0, self.epoch.layout.stages - 1)]
        channels = [channel for stream, _, channel in self.epoch.channels if stream in BATCH_PARTS]
        serves = any(channel.source == self.epoch.member for channel in channels)
        drawn[serves and bool(own) and all(runtime.results.reduced is not None for runtime in own)] += 1
        draw_ahead(self, micro_batches)

    monkeypatch.setattr(BatchSupply, "draw_ahead", counting)
    for world in losses_after_a_switch(LINE, 1):
        check(world)
        if drawn[True] > 1:
            return
    pytest.fail("none has drawn for others without a pass to do")


#: Long enough for copies to be made, and for losses while that goes on.
HEALING = [
    Spec(stages=4, iterations=8, heals=True),
    Spec(stages=4, micro_batches=4, iterations=8, heals=True, mode="lazy-frc-lazy-brc", sync_every=1),
    Spec(iterations=8, heals=True, mode="eager-frc-eager-brc"),
    Spec(iterations=8, heals=True, tied=True),
    Spec(pipelines=2, stages=2, micro_batches=3, iterations=8, heals=True, sync_every=1),
    Spec(pipelines=3, stages=2, iterations=8, heals=True, statistics=False),
    Spec(stages=4, blocks=3, iterations=10, heals=True),
    Spec(pipelines=2, stages=2, blocks=4, iterations=10, heals=True, evaluates=True),
]


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("case", ["all stay", "one leaves", "layers keep much"])
def test_losses_while_the_job_heals(case: str, course: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages get new replicas and owners in the background, as the leader wants it; losses come at any time in that."""
    leaves = case == "one leaves"
    if case == "layers keep much":  # so it is not copied before passes that may have to be done again elsewhere alone
        monkeypatch.setattr(layers, "_LITTLE", 0)
        monkeypatch.setattr(layers, "_LITTLE_SHARE", 0)
    done: Counter[str] = Counter()
    complete_arrived, complete = Copies.complete_arrived, Copies._complete
    within: set[int] = set()

    def arrived(self: Copies, awaited: Role | None) -> None:
        within.add(id(self))
        complete_arrived(self, awaited)
        within.remove(id(self))

    def counting(self: Copies, construction: Construction) -> None:
        snapshot = construction.arrived()
        assert snapshot is not None
        interrupted = snapshot.moment == (self.progress.sequence - 1, True)
        done["in the interrupted iteration"] += interrupted and id(self) in within
        done["with the interrupted iteration"] += interrupted and id(self) not in within
        complete(self, construction)

    monkeypatch.setattr(Copies, "complete_arrived", arrived)
    monkeypatch.setattr(Copies, "_complete", counting)
    for seed in seeds(course, 2 * len(HEALING), 2 * len(HEALING)):
        random, spec = Random(seed), HEALING[seed % len(HEALING)]
        before = undisturbed(replace(spec, heals=False), 0)
        first, second = random.sample(sorted(before.members), 2)
        if before.starves([first, second]):
            continue
        late = random.randrange(3 * len(before.done[first]) // 4)
        cuts = Cut(first, late), Cut(second, random.randrange(random.choice((40, 120))))
        world = World(replace(spec, leaves=leaves), seed, cuts[:1] if leaves else cuts).run()
        check(world)
        done["losses"] += len(world.killed)
        done["plans"] += len(world.healed)
        done["left"] += any(member.left for name, member in world.members.items() if name not in world.fed)
        done["divided"] += any(plan.lent for plan in world.healed)
        done["copies"] += sum(kind == "replica_built" for m in world.survivors() for kind, _ in m.job.events)
        done["early"] += sum(member.offers.early for member in world.survivors())
        done["interrupted"] += sum(plan.interrupts() for plan in world.healed)
    assert min(done["losses"], done["plans"], done["copies"], done["early"]) > 3 and (done["left"] > 0) == leaves
    assert min(done["in the interrupted iteration"], done["divided"], done["interrupted"]) > 0, done
    assert done["with the interrupted iteration"] > 0 or case != "layers keep much", done


JOINING = [
    Spec(stages=4, iterations=10, heals=True, joiners=2),
    Spec(pipelines=2, stages=2, iterations=10, heals=True, joiners=2, evaluates=True, changes="rates"),
    Spec(pipelines=2, stages=2, iterations=10, heals=True, joiners=2, sharded=True, saves=True),
    Spec(iterations=10, heals=True, joiners=1, tied=True, saves=True),
    Spec(pipelines=2, stages=2, iterations=10, heals=True, joiners=2, sharded=True, evaluates=True),
    Spec(pipelines=3, stages=2, iterations=10, heals=True, joiners=2, mode="eager-frc-eager-brc"),
    Spec(pipelines=2, stages=2, blocks=3, iterations=12, heals=True, joiners=2, sharded=True, changes="rates"),
]


@pytest.mark.parametrize("course", COURSES)
def test_members_that_join(course: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of lost ones, at any time; further losses hit those that are there, or one that joins."""
    done: Counter[str] = Counter()
    complete = Copies._complete

    def counting(self: Copies, construction: Construction) -> None:
        # The steps that it has taken late were given the positions of the member's own scheduler.
        done["followed" if construction.follows else "did not follow"] += 1
        complete(self, construction)

    monkeypatch.setattr(Copies, "_complete", counting)
    for seed in seeds(course, len(JOINING), 2 * len(JOINING)):
        random, spec = Random(seed), JOINING[seed % len(JOINING)]
        before = undisturbed(replace(spec, heals=False, joiners=0), 0)
        first, second = random.sample(sorted(before.members), 2)
        if before.starves([first, second]):
            continue
        early = random.randrange(len(before.done[first]) // 3)
        late = Cut(random.choice((second, "j0")), random.randrange(random.choice((40, 200))))
        world = World(spec, seed, (Cut(first, early), late)).run()
        check(world)
        joined = [member for name, member in world.members.items() if name[0] == "j"]
        done["admitted"] += sum(member.epoch.begun for member in joined)
        done["computed"] += sum(bool(member.binding.owned()) for member in joined)
        done["lost"] += len([name for name in world.killed if name[0] == "j"])
        # Also to one that joins, where the copy begins with its admission.
        done["early"] += sum(member.offers.early for member in world.members.values())
        done["awaited"] += sum(world.awaited)
    assert not done.pop("did not follow", 0)
    assert min(done.values()) > 0 and done["computed"] > 1, done


#: Where a member may be lost while others copy what it has nothing to do with.
COPYING = [
    Spec(stages=4, iterations=10, heals=True),
    Spec(stages=4, iterations=10, heals=True, joiners=2, tied=True, changes="rates"),
    Spec(pipelines=2, stages=2, iterations=10, heals=True, joiners=1, evaluates=True),
    Spec(pipelines=2, stages=2, iterations=10, heals=True, joiners=2, sharded=True, evaluates=True, saves=True),
    Spec(stages=5, blocks=2, iterations=12, heals=True, changes="rates"),
]


@pytest.mark.parametrize("course", COURSES)
def test_copies_go_on(course: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another member is lost while a stage is copied; then, sometimes, the one that it was copied from."""
    done: Counter[str] = Counter()
    begin, complete = Copies.begin, Copies._complete
    went_on: dict[int, Construction] = {}
    sources: list[str] = []

    def beginning(self: Copies, *arguments: Any) -> None:
        before = {id(each): each for each in self.constructions.values()}
        begin(self, *arguments)
        after = set(map(id, self.constructions.values()))
        went_on.update({key: each for key, each in before.items() if key in after})
        done["given up"] += len(before.keys() - after)

    def completing(self: Copies, construction: Construction) -> None:
        if id(construction) in went_on:
            sources.append(construction.source[0])
        complete(self, construction)

    monkeypatch.setattr(Copies, "begin", beginning)
    monkeypatch.setattr(Copies, "_complete", completing)
    for seed in seeds(course, 2 * len(COPYING), 4 * len(COPYING)):
        random, spec = Random(seed), COPYING[seed % len(COPYING)]
        before = undisturbed(replace(spec, heals=False, joiners=0), 0)
        names = random.sample(sorted(before.members), 3)
        sources.clear()

        def survives(world: World, victim: str) -> bool:
            plan = world.plan
            there = victim in plan.members and not world.network.dead & set(plan.members)
            return there and not takeover(plan, [victim]).lost_roles and not world.starves([victim])

        def others_copy(world: World, victim: str = names[1]) -> bool:
            found = {(each.source[0], m.name) for m in world.survivors() for each in m.copies.constructions.values()}
            return survives(world, victim) and any(victim not in pair for pair in found)

        def has_given(world: World, victim: str = names[2]) -> bool:
            return victim in sources and survives(world, victim)

        cuts = (
            Cut(names[0], random.randrange(len(before.done[names[0]]) // 2)),
            Cut(names[1], random.randrange(20), others_copy),
            Cut(names[2], random.randrange(20), has_given),
        )
        world = World(spec, seed, cuts).run()
        check(world)
        done["lost while others copy"] += len(world.killed) > 1
        done["went on"] += len(sources)
        done["used"] += len(world.killed) > 2
    assert min(done["lost while others copy"], done["went on"], done["given up"]) > 0, done
    assert done["used"] > 0 or course, done  # not in every course one that has given a copy is lost


#: What scripts do besides training.
SCRIPTS: dict[str, dict[str, Any]] = {
    "evaluations": {"evaluates": True, "changes": "rates"},
    "checkpoints": {"saves": True, "changes": "rates"},
    "own checkpoints": {"own": True, "saves": True, "changes": "rates"},
    "weights": {"changes": "weights once", "iterations": 6},
    "check": {"checked": 6, "evaluates": True},
}
SCRIPTED = [
    *(spec for job, spec in JOBS.items() if job not in ("eager-brc", "four stages", "tight")),
    Spec(stages=4, iterations=6, heals=True),
    Spec(pipelines=2, stages=2, iterations=6, heals=True, sharded=True),
    Spec(iterations=6, heals=True),
]


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_around_what_scripts_do(script: str, course: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations whose passes change layers; rates and weights that are set between operations; the check."""
    done: Counter[str] = Counter()
    follow = Copies.follow_owner

    def counting(self: Copies, role: Role, change: Callable[[StageRuntime], None]) -> None:
        done["followed"] += 1
        follow(self, role, change)

    monkeypatch.setattr(Copies, "follow_owner", counting)
    for seed in seeds(course, len(SCRIPTED), 2 * len(SCRIPTED)):
        random, spec = Random(seed), replace(SCRIPTED[seed % len(SCRIPTED)], **SCRIPTS[script])
        spec = replace(spec, checked=min(spec.checked, spec.iterations))
        before = undisturbed(replace(spec, heals=False), 0)
        first, second = random.sample(sorted(before.members), 2)
        cuts = [Cut(first, random.randrange(len(before.done[first]) - 4))]
        if seed % 2 and not before.starves([first, second]):
            cuts.append(Cut(second, random.randrange(40)))
        world = World(spec, seed, tuple(cuts), switch=random.random() < 0.5).run()
        check(world)
        failed = any(member.fatal for member in world.survivors())
        done["went on"] += not failed
        done["ended by one loss"] += failed and len(cuts) == 1
        done["losses"] += len(world.killed)
        done["checked"] += any(kind == "exact_checked" for kind, _ in world.survivors()[0].job.events)
    assert done["losses"] > 6 and done["went on"] > 0
    assert done["followed"] > 3 or not SCRIPTS[script].get("evaluates")
    # Where weights have just been changed, or would have to be where nobody does it.
    assert (done["ended by one loss"] > 0) == (script == "weights") and (done["checked"] > 0) == (script == "check")


def test_what_is_consumed_is_told_once_and_by_somebody() -> None:
    """Who tells of steps is lost, and with it what it was about to tell: a survivor tells it, and nothing else."""
    told = _consumed(World(Spec(checksums=True), 0).run())
    assert list(told) == list(range(1, LINE.iterations + 1))
    for cut in cuts_of(LINE, 0, "m0")[::4]:
        world = World(Spec(checksums=True), 0, (cut,)).run()
        assert world.killed == ["m0"] and _consumed(world) == told


def _consumed(world: World) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for name, member in world.members.items():
        told = [facts["consumed"] for _, facts in member.job.events if facts.get("consumed") is not None]
        for each in told[:-1] if name in world.killed else told:
            assert found.setdefault(each["step"], each) == each
    return dict(sorted(found.items()))


# -- what this finds ----------------------------------------------------------------------------------------


def test_messages_that_are_not_sent_again_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Boundaries, "resend_activation", lambda self, channels, buffer_id: None)
    with pytest.raises(TimeoutError, match="would wait for ever"):
        every_loss(LINE, 1, "m1")


def test_a_replica_that_lacks_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Replication.receive

    def forgetful(self: Replication, role: Role) -> None:
        receive(self, role)
        replica = self.binding.runtimes[role]
        assert replica.results.reduced is not None
        replica.results.reduced = [torch.zeros_like(each) for each in replica.results.reduced]

    monkeypatch.setattr(Replication, "receive", forgetful)
    with pytest.raises(AssertionError, match="differs"):
        state_of(World(LINE, 0).run())
