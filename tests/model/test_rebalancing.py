"""Divided stages while members come and go: the engine's parts on a simulated network, planned by the leader.

What results is that of the undisturbed job, bit for bit: losses, parameters, optimizer states, and all replicas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bamboo_ds.topology import Plan
from tests.model.test_takeover_cuts import COURSES, HEALING, check, simulated, undisturbed  # noqa: F401  # the first is a fixture
from tests.support.simulated_engine import Cut, Spec, World

pytestmark = pytest.mark.claim("guides/even-shares.md")


def at_rest(world: World) -> bool:
    """All members live, and have entered a plan by which all stages have replicas."""
    plan = world.plan
    entered = all(world.members[name].job.known == plan for name in plan.members)
    whole = all(plan.shadows) and not plan.builders and not world.network.dead.intersection(plan.members)
    return whole and entered


def rebalancing(world: World) -> bool:
    """Some have not entered the plan that divides stages anew, or copies are made so that another one can."""
    plan = world.plan
    if world.network.dead.intersection(plan.members):
        return False
    late = any(world.members[name].job.known != plan for name in plan.members)
    return bool(plan.builders) or (late and plan in world.healed[-1:] and plan.lent != world.replaced.lent)


def computing(plan: Plan) -> set[str]:
    return {member for role in plan.world.roles for member in plan.computers(role)}


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("pipelines", [1, 2])
def test_down_to_one_member_and_back_to_more_than_at_first(pipelines: int, course: int) -> None:
    """One is lost after the other, each when the rest has divided the stages; then more join than there were."""
    stages = 3 if pipelines == 1 else 2
    size = pipelines * stages
    # What members measure is the same for all, so that nothing but losses and joiners changes plans.
    spec = Spec(
        pipelines, stages, blocks=3, iterations=20, heals=True, dataset=True, grows=size + 1, straggler="nobody"
    )
    for seed in range(1000 * course, 1000 * course + 1 + bool(course)):
        random = Random(seed)
        lost = random.sample([f"m{rank}" for rank in range(size)], size - 1)
        cuts = [Cut(lost[0], random.randrange(20)), *(Cut(name, random.randrange(20), at_rest) for name in lost[1:])]
        world = World(spec, seed, tuple(cuts)).run()
        check(world)
        assert world.killed == lost and not world.plan.lost_roles
        assert len(world.taken_over[-1].members) == 1
        assert max(len(computing(plan)) for plan in world.healed) > size


@pytest.mark.parametrize("course", COURSES)
def test_a_loss_in_the_middle_of_a_rebalancing(course: int) -> None:
    """Because of another loss, or since members are slower than others; of anyone, wherever the change has got to."""
    done: Counter[str] = Counter()
    for seed in range(1000 * course, 1000 * course + (20 if course else 6)):
        random, spec = Random(seed), [spec for spec in HEALING if spec.blocks > 1][seed % 2]
        before = undisturbed(replace(spec, heals=False), 0)
        first, second = random.sample(sorted(before.members), 2)
        if before.starves([first, second]):
            continue
        middle = Cut(second, random.randrange(12), rebalancing)
        first_too = seed % 4 < 2
        world = World(spec, seed, (Cut(first, random.randrange(20)), middle) if first_too else (middle,)).run()
        check(world)
        done["lost"] += second in world.killed
        done["survived"] += second in world.killed and not world.plan.lost_roles
        done["two losses"] += len(world.killed) == 2 and not world.plan.lost_roles
    assert min(done["lost"], done["survived"], done["two losses"]) > 0, done


@pytest.mark.parametrize("course", COURSES)
def test_a_straggler_comes_and_goes(course: int) -> None:
    """Others compute parts of its stage as long as it is slow, also when one of these is lost."""
    for seed in range(1000 * course, 1000 * course + (8 if course else 2)):
        random = Random(seed)
        slow = random.choice(("m0", "m1", "m2"))
        spec = Spec(blocks=3, iterations=16, heals=True, tied=bool(seed % 2), straggler=slow)
        rank = int(slow[1:])

        def helped(world: World, rank: int = rank) -> bool:
            return any(lent.rank == rank for lent in world.plan.lent)

        helper = f"m{(rank - 1) % 3}"  # whose loss leaves the straggler with two stages; nobody who draws is alone
        cuts = (Cut(helper, random.randrange(30), helped),) if seed % 4 == 3 and helper == "m1" else ()
        world = World(spec, seed, cuts).run()
        check(world)
        assert world.killed == [cut.member for cut in cuts]
        helps = [any(lent.rank == rank for lent in plan.lent) for plan in world.healed]
        assert any(helps) and (cuts or not helps[-1]), world.healed


@pytest.mark.parametrize("course", COURSES)
def test_members_hold_no_more_than_they_may(course: int) -> None:
    """Two stages each: a loss leaves room for one replica of three stages; a joiner has room for the others."""
    for seed in range(1000 * course, 1000 * course + (20 if course else 4)):
        random, joiners = Random(seed), seed % 2
        spec = Spec(blocks=2, iterations=12, heals=True, dataset=True, joiners=joiners, straggler="nobody", room=2)
        world = World(spec, seed, (Cut(random.choice(["m0", "m1", "m2"]), random.randrange(30)),)).run()
        check(world)
        plan = world.plan
        assert len(world.killed) == 1 and world.most == 2 and not plan.crowded
        given_up = [rank for rank, shadow in enumerate(plan.shadows) if shadow is None]
        assert list(plan.unshadowed) == given_up and len(given_up) == (0 if joiners else 2)
