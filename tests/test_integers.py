"""Losses between any two instructions of any members, on integers: :mod:`tests.support.integers`."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from .support.integers import Case, Fatal, World, check_end

pytestmark = pytest.mark.claim("reference/guarantees.md")

TIES = (frozenset({0, 3}),), (frozenset({0, 1, 3}), frozenset({1, 2}))
#: Small jobs, in which each member is lost after each instruction.
SMALL = {
    "line": Case(1, 3, 3),
    "sums": Case(1, 3, 3, every=1, eager=False),
    "two pipelines": Case(2, 2, 2),
    "sharded": Case(2, 2, 2, sharded=True, eager=False),
    "slices": Case(2, 2, 2, slices=2, every=1),
    "tied": Case(1, 4, 2, ties=TIES[0]),
    "lent": Case(1, 3, 2, lends=True, every=1),
}


def drawn(random: Random) -> Case:
    """Any job."""
    stages = random.choice((2, 3, 4, 4))
    pipelines = random.choice((1, 1, 2, 3))
    slices = 2 if random.random() < 0.2 else 1
    return Case(
        pipelines * slices,
        stages,
        micro_batches=random.randint(1, 5),
        slices=slices,
        ties=random.choice(TIES) if stages == 4 and random.random() < 0.3 else (),
        every=random.choice((0, 0, 1, 2)),
        eager=random.random() < 0.7,
        lends=slices == 1 and random.random() < 0.4,
        sharded=random.random() < 0.3,
    )


def course(seed: int) -> Counter[str]:
    """A job with one to three losses after drawn instructions, later ones mostly in recoveries; what has happened."""
    random = Random(seed)
    case = drawn(random)
    world = World(case, Random(random.random()))
    length = world.length
    cuts = [random.randrange(length)]
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        cuts.append(random.randrange(4 * case.layout.size if random.random() < 0.6 else length))
    return lost(world, cuts, random, f"seed {seed}")


def lost(world: World, cuts: list[int], random: Random, what: str, first: str | None = None) -> Counter[str]:
    """What has happened in ``world``, of whose members one, ``first``, or seldom two are lost at each cut."""
    try:
        for cut in cuts:
            if world.run(cut):
                break
            living = sorted(world.members)
            some = random.sample(living, min(len(living) - 1, 1 if random.random() < 0.9 else 2))
            world.lose(some if first is None else [first])
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
    for member in range(case.layout.size):
        for cut in range(World(case, Random(0)).length):
            found += lost(World(case, Random(cut)), [cut], Random(cut), f"{member} after {cut}", f"m{member}")
    assert not found["fatal"] and found["losses"] > 100
    assert found["commit"] and found["behind"] and found["resume"]


def test_drawn_jobs_with_several_losses() -> None:
    found = Counter[str]()
    for seed in range(400):
        found += course(seed)
    kinds = ("losses", "resume", "commit", "behind", "clones", "from sums", "redundant", "fatal")
    assert all(found[kind] for kind in kinds), found
    assert found["losses"] > 400


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_many_drawn_jobs(part: int) -> None:
    for seed in range(1000 * (part + 1), 1000 * (part + 2)):
        course(seed)
