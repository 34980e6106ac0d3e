"""At most one start of a job commits and publishes, whatever processes, clocks and the network do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.vacancies import Desertion
from bamboo_ds.store.records import KeyValue, WatchEvent
from tests.support.fencing_model import FENCES, KINDS, RATES, SECONDS, TICK_S, Broken, Step, World, draw, quiet, run
from tests.support.simulated_members import STAGES

pytestmark = pytest.mark.claim("guides/clusters.md", "guides/elastic.md")

#: By the fence that is switched off, a schedule that then breaks an invariant: the number of a drawn one, or steps.
BREAKING: dict[str, int | list[Step]] = {
    "pause": 24,
    "lineage": 804,
    "wait": 24,
    "mark": 247,
    "clean": 441,
    # An agent is held in the middle of writing that its worker has failed, until others have gone on without it.
    "stop": [Step("pass", seconds=4.0), Step("fail", 0, 1, 7.0)],
    # The leader is held in the middle of writing a plan, until others have written plans.
    "swap": [
        Step("pass", seconds=4.0),
        Step("join", seconds=4.0),
        Step("hold", 1, 2, 7.0),
        Step("kill worker", 0, 0, 12.0),
    ],
    "remove": 90_001_504,
    "missed": 90_000_581,
    # A joiner is admitted and lost while it is stopped. When it goes on it registers before its watch tells of that.
    "unseen": [
        Step("pass", seconds=4.0),
        Step("join", seconds=0.8),
        Step("mute", 2, seconds=1.2),
        Step("stop", 2, seconds=3.0),
        Step("join", seconds=3.0),
        Step("stop", 2, seconds=3.0),
    ],
}

#: A member is admitted while it is cut from etcd, and lost in the plan after that, which is fatal.
LOST_UNAWARES = (30_000_702, 30_013_123)

NUMBERS = st.integers(0, 4)
#: How many members start the job: none, since a launcher has; fewer than there are ranks; as many.
FIRST_MEMBERS = (0, STAGES - 1, STAGES)
STEPS = st.builds(Step, st.sampled_from(list(KINDS)), NUMBERS, NUMBERS, st.sampled_from(SECONDS))


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    """Of these jobs' logs, which are most of what they cost."""
    logger = logging.getLogger("bamboo_ds")
    level = logger.level
    quiet()
    yield
    logger.setLevel(level)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=8), st.tuples(*[st.sampled_from(RATES)] * 3), st.sampled_from(FIRST_MEMBERS))
def test_no_schedule_breaks_an_invariant(steps: list[Step], rates: tuple[float, ...], first: int) -> None:
    run([Step("pass", seconds=2.0), *steps], rates, first=first)


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1500), marks=pytest.mark.exhaustive)])
def test_drawn_schedules_break_none_and_have_faults_of_all_kinds(seeds: range) -> None:
    happened = sum((run(*draw(seed)) for seed in seeds), start=type(run([]))())
    assert set(KINDS) - {"pass"} <= set(happened), sorted(set(KINDS) - set(happened))
    others = ("restarts", "paused", "gave up", "published", "refused", "writer stopped", "compacted", "watch refused")
    assert min(happened[what] for what in others) > 0


@pytest.mark.parametrize("first", FIRST_MEMBERS[1:])
def test_members_that_start_a_job_break_none(first: int) -> None:
    """With as many hosts as it needs it commits in the end."""
    happened = sum((run(*draw(seed), first=first) for seed in range(60)), start=type(run([]))())
    assert min(happened[what] for what in ("restarts", "commits", "kill all", "join", "hold", "lose")) > 0


#: What is there when all hosts vanish.
FIRST: dict[str, Callable[[World], bool]] = {
    "plan": lambda world: world.plan is not None,
    "assignment": lambda world: world.assigned == 0,
    "first plan": lambda world: world.plan is not None and world.plan.generation == 0,
}


def vanish(what: str) -> World:
    """A job whose hosts all vanish while it starts for the first time, and others come."""
    world, there = World(first=STAGES), FIRST[what]
    try:
        while not there(world):
            assert world.now < 200.0
            world.advance(TICK_S)
        assert world.plan is not None and world.plan.layout is None
        for host in world.hosts:
            world._kill_host(host, Step("kill host"))
        world.heal()
        return world
    finally:
        world.close()


@pytest.mark.parametrize("what", FIRST)
def test_all_hosts_vanish_while_a_job_starts(what: str) -> None:
    world = vanish(what)
    assert world.commits > 3 and world.assigned == {"plan": 0, "assignment": 1, "first plan": 1}[what]


def test_somebody_must_notice_that_all_are_gone_that_built_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Desertion, "look", lambda *_: False)
    with pytest.raises(Broken, match="stands still"):
        vanish("first plan")


def test_those_that_are_held_between_plan_and_record_hold_nobody_up() -> None:
    """Others write for them what the job is."""
    world = World(first=STAGES)
    for host in world.hosts:
        host.hold_s, host.hold_at = 30.0, Keys.SPEC
    try:
        for _ in range(2):
            world._come(2)
        world.advance(20.0)
        assert world.happened["hold"] and world.commits > 3
        world.heal()
    finally:
        world.close()


@pytest.mark.parametrize("fence", FENCES)
def test_every_fence_is_needed(fence: str) -> None:
    """Without it the same schedules break an invariant."""
    found = BREAKING[fence]
    steps, rates = draw(found) if isinstance(found, int) else (found, (1.0,))
    run(steps, rates)
    with pytest.raises(Broken):
        run(steps, rates, [fence])


def test_what_a_worker_had_contributed_to_is_committed_once_after_its_end() -> None:
    """It is known to have ended, so that the restart does not wait; one that is out of etcd's reach has been slow."""
    out_of_reach = [Step("stop", 0, seconds=0.0), Step("cut", 0, seconds=1.2)]
    steps = [Step("pass", seconds=4.0), Step("join", seconds=4.0), *out_of_reach]
    happened = run([*steps, Step("kill worker", 1, seconds=2.4), Step("stop", 0, seconds=1.2)])
    assert happened["late"] == 1 and happened["restarts"] == 1


def test_a_member_that_waits_joins_when_nobody_was_lost_after_all() -> None:
    """Its plan's leader was silent for so long that the evicted member waited for a restart, and is back."""
    run([Step("mute", 0, seconds=12.0), Step("hold", 0, 0, 3.0), Step("save", 1, 0, 12.0)])


@pytest.mark.parametrize("seed", LOST_UNAWARES)
def test_a_joiner_that_was_lost_before_it_knew_that_it_was_admitted_waits_for_the_restart(seed: int) -> None:
    """It has nothing that others could have taken over, and would lead a job that has no members for ever."""
    assert run(*draw(seed))["restarts"] == 1


def forge(world: World) -> None:
    """Somebody who does not know the job's secret writes a plan."""
    etcd = world.etcd
    etcd.revision += 1
    entry = KeyValue(Keys.PLAN, "{}", etcd.revision, etcd.revision, genuine=False)
    etcd.keys[Keys.PLAN] = entry
    etcd.changes.append(WatchEvent("put", Keys.PLAN, entry))


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.close()


def test_a_forged_plan_ends_nobody_before_there_is_another_one(world: World) -> None:
    """Neither a member that sees it come nor one that starts."""
    world.hosts[1].stopped = True
    world.advance(2 * TICK_S)
    forge(world)
    world.advance(4 * TICK_S)
    world.hosts[1].stopped = False
    world.advance(4 * TICK_S)
    assert world.plan is None and not any(party.over or party.worker.status for party in world.parties if party.worker)
    world.etcd.delete(Keys.PLAN)
    world.heal()
    assert world.commits > 3 and world.assigned == 0


def test_a_forged_plan_is_replaced_by_members_that_read_all_anew(world: World) -> None:
    world.advance(10 * TICK_S)
    known = world.plan
    for party in world.parties:
        party.process._coordinator._mirror = None  # as when a watch has failed
    forge(world)
    world.heal()
    assert known is not None and world.plan == known and world.assigned == 0
