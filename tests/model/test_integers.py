"""Losses and changes of plans between any two instructions of any members, on integers: :mod:`tests.support.integers`.

One seed is one course. Without a process or a tensor one takes milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bamboo_ds.topology import Lent
from tests.support.integers import Case, Fatal, Leader, World, check_end

pytestmark = pytest.mark.claim("reference/guarantees.md")

TIES = (frozenset({0, 3}),), (frozenset({0, 1, 3}), frozenset({1, 2}))
#: Small jobs, in which each member is lost after each instruction.
SMALL = {
    "line": Case(1, 3, 3),
    "sums": Case(1, 3, 3, every=1, mode="lazy"),
    "backward passes": Case(1, 3, 2, every=2, mode="eager-brc"),
    "two pipelines": Case(2, 2, 2),
    "sharded": Case(2, 2, 2, sharded=True, mode="lazy"),
    "slices": Case(2, 2, 2, slices=2, every=1),
    "tied": Case(1, 4, 2, ties=TIES[0]),
    "lent": Case(1, 3, 2, lends=True, every=1),
    "standby": Case(1, 3, 2, lends=True, standby=True),
    "tight": Case(1, 3, 3, every=1, tight=True),
    "tight, two pipelines": Case(2, 2, 2, lends=True, tight=True),
}

#: So many jobs in a row are of one kind, and begin with one plan: programs are made once for all of them.
ALIKE = 16


def drawn(random: Random) -> Case:
    """Any job."""
    stages = random.choice((1, 2, 3, 3, 4))
    pipelines = random.choice((1, 1, 1, 2, 2, 3))
    slices = 2 if random.random() < 0.15 else 1
    bare = pipelines > 1 and random.random() < 0.1
    return Case(
        pipelines * slices,
        stages,
        micro_batches=random.choice((1, 2, 2, 3, 3, 4, 5)),
        slices=slices,
        ties=random.choice(TIES) if stages == 4 and random.random() < 0.4 else (),
        every=random.choice((0, 0, 1, 1, 2)),
        mode="none" if bare else random.choice(("lazy", "eager", "eager", "eager-brc")),
        lends=slices == 1 and random.random() < 0.4,
        sharded=not bare and random.random() < 0.3,
        copies=random.random() < 0.3,
        differs=random.random() < 0.2,
        standby=random.random() < 0.2,
        tight=random.random() < 0.4,
    )


def course(seed: int) -> Counter[str]:
    """A job with one to three losses after drawn instructions, later ones mostly in recoveries; what has happened."""
    random = Random(seed)
    case = drawn(Random(seed // ALIKE))
    world = World(case, random, draw=seed // ALIKE)
    length = world.length
    cuts = [random.randrange(length)]
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        cuts.append(random.randrange(4 * case.layout.size if random.random() < 0.6 else length))
    return lost(world, cuts, random, f"seed {seed}")


def elastic(seed: int) -> Counter[str]:
    """A job whose members come and leave, and whose plans change, beside losses; what has happened."""
    random, drawing = Random(seed), Random(seed // ALIKE)
    case = replace(drawn(drawing), iterations=drawing.randint(3, 5), long=drawing.random() < 0.5)
    case = replace(case, mode="lazy") if case.mode == "none" else case
    world = World(case, random, draw=seed // ALIKE)
    leader, size = Leader(world), case.layout.size
    acts = random.choices(("lose", "join", "leave", "exchange", "improve"), (4, 2, 1, 2, 6), k=random.randint(3, 9))
    return changed(world, leader, [(act, random.choice((4 * size, 40 * size))) for act in acts], f"seed {seed}")


def moving(seed: int) -> Counter[str]:
    """A job whose roles move within iterations, so that they go on from all kinds of places; what has happened."""
    random, drawing = Random(seed), Random(seed // ALIKE)
    case = replace(drawn(drawing), every=drawing.choice((0, 1, 1, 1, 2)), copies=False)
    case = replace(case, mode="lazy") if case.mode == "none" else case
    world = World(case, random, draw=seed // ALIKE)
    acts = [random.choice(("move", "move", "move", "lose")) for _ in range(random.randint(2, 5))]
    return changed(world, Leader(world), [(act, 16 * case.layout.size) for act in acts], f"seed {seed}")


def changed(world: World, leader: Leader, acts: list[tuple[str, int]], what: str) -> Counter[str]:
    """What has happened in ``world``, where ``acts`` come after so many instructions at most."""
    random = world.random
    try:
        for act, most in acts:
            if world.run(random.randrange(most), to_commit=random.random() < 0.1):
                break
            if act == "lose":
                leader.lose([random.choice(sorted(world.members))])
            else:
                getattr(leader, act)()
        world.run()
    except Fatal:
        return world.counts + Counter(fatal=1)
    except AssertionError as error:
        raise AssertionError(f"{what}, {world.case}, {acts}: {error}") from error
    check_end(world)
    return world.counts


def lost(world: World, cuts: list[int], random: Random, what: str, *named: str) -> Counter[str]:
    """What has happened in ``world``, of whose members one, that is ``named``, or seldom two are lost at each cut."""
    try:
        for number, cut in enumerate(cuts):
            if world.run(cut, to_commit=not named and random.random() < 0.1):
                break
            living = sorted(world.members)
            some = random.sample(living, min(len(living) - 1, 1 if random.random() < 0.9 else 2))
            world.lose([named[number]] if named else some)
        world.run()
    except Fatal:
        return world.counts + Counter(fatal=1)
    except AssertionError as error:
        raise AssertionError(f"{what}, {world.case}: {error}") from error
    check_end(world)
    return world.counts


@pytest.mark.parametrize("job", SMALL)
def test_each_member_is_lost_after_each_instruction(job: str) -> None:
    """Nobody of a job with a replica of each role is lost for good, whatever instruction comes before."""
    case, found = SMALL[job], Counter[str]()
    for member in World(case, Random(0)).plan.members:
        for cut in range(World(case, Random(0)).length):
            found += lost(World(case, Random(cut)), [cut], Random(cut), f"{member} after {cut}", member)
    assert not found["fatal"] and found["losses"] > 100
    assert found["commit"] and found["behind"] and found["resume"]
    assert bool(found["held"] and found["held, resumed"]) == case.tight


@pytest.mark.parametrize("case", [Case(1, 4, 2, every=1), Case(2, 2, 2, every=1)], ids=["line", "two pipelines"])
def test_a_second_loss_in_each_step_of_the_recovery(case: Case) -> None:
    """From the loss that is noticed to passes of the resumed iteration, each of the others.

    Of stages in a row no two neighbours can be lost; with two pipelines any two members.
    """
    found, size = Counter[str](), case.layout.size
    for first in range(0, World(case, Random(0)).length // 2, 13):
        for second in range(1, size):
            for cut in range(8 * size):
                names = f"m{first % size}", f"m{(first + second) % size}"
                what = f"{names} after {first} and {cut}"
                found += lost(World(case, Random(first)), [first, cut], Random(cut), what, *names)
    assert found["losses"] > 500 and found["resume"] > found["losses"] / 3
    assert bool(found["fatal"]) == (case.pipelines == 1) and bool(found["clones"]) == (case.pipelines > 1)


def test_one_that_has_computed_both_parts_of_a_role_gets_one_of_them_as_its_shadow() -> None:
    """In one iteration: a role is divided, then its owner computes all of it, then owner and shadow change places."""
    found = Counter[str]()
    for seed in range(60):
        random = Random(seed)
        world = World(Case(1, 3, 3, lends=True, mode="lazy"), random)
        divided = replace(world.plan, epoch=3, lent=(Lent(1, 2, random.choice(("front", "rear"))),))
        alone = replace(divided, epoch=4, lent=())
        owners, shadows = list(divided.owners), list(divided.shadows)
        owners[1], shadows[1] = str(shadows[1]), owners[1]
        changed = replace(divided, epoch=5, owners=tuple(owners), shadows=tuple(shadows))
        for plan in (divided, alone, changed):
            world.interrupt(plan)
            world.run(random.randrange(15, 45))
            both = len(world.members["m1"].runtimes[world.layout.role(1)].parts) == 2
            found["both"] += both and plan is alone
        world.run()
        check_end(world)
    assert found["both"] > 10, found


def test_drawn_jobs_with_several_losses() -> None:
    found = Counter[str]()
    for seed in range(800):
        found += course(seed)
    kinds = ("resume", "commit", "behind", "clones", "from sums", "redone", "lacking", "copied", "differs", "fatal")
    assert all(found[kind] for kind in (*kinds, "redundant ForwardPass", "redundant BackwardPass")), found
    assert found["held"] > 100 and found["held, resumed"] > 100, found
    assert found["losses"] > 800


def test_drawn_jobs_whose_roles_move_within_iterations() -> None:
    found = Counter[str]()
    for seed in range(320):
        found += moving(seed)
    kinds = ("losses", "interrupted", "from sums", "furthest", "redone", "redundant BackwardPass", "commit", "clones")
    kinds += ("held", "held, resumed")
    assert all(found[kind] for kind in kinds) and found["interrupted"] > 400, found


def test_drawn_jobs_whose_plans_change() -> None:
    found = Counter[str]()
    for seed in range(320):
        found += elastic(seed)
    kinds = ("losses", "changes", "interrupted", "joined", "left", "copied", "commit", "behind", "lacking")
    kinds += ("held", "held, resumed")
    assert all(found[kind] > 1 for kind in kinds), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 31))
def test_many_drawn_jobs(part: int) -> None:
    for number in range(350):
        course(10_000 * part + number)
        moving(10_000 * part + number)
        elastic(10_000 * part + number)
