"""Interrupted iterations: programs of all members that finish them from any progress, in whatever order members go on.

What the engine makes of them, with losses at every place: :mod:`tests.model.test_takeover_cuts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import PartProgress, RoleProgress, SendSums, UseRole, member_program, settle
from bamboo_ds.schedule.settling import ways
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy
from tests.support.planning import undivided
from tests.support.programs import play

pytestmark = pytest.mark.claim("reference/guarantees.md")


def plan_of(pipelines: int, stages: int) -> Plan:
    """The plan that a job starts with."""
    layout = Layout(pipelines, stages)
    return with_redundancy(initial_plan([f"m{rank}" for rank in range(layout.size)]), layout, True)


#: Stages of four that share weights.
TIES: list[list[set[int]]] = [[], [{0, 3}], [{0, 1, 3}, {1, 2}], [{0, 3}, {1, 2}]]


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Plan, int, dict[Role, RoleProgress], list[set[int]]]:
    """A plan with owners and shadows anywhere, any progress of its roles, bare where one was taken over, and ties."""
    ties = draw(st.sampled_from(TIES))
    plan = plan_of(draw(st.integers(1, 4)), 4 if ties else draw(st.integers(1, 8)))
    if len(plan.members) > 1 and draw(st.booleans()):
        member = st.sampled_from(plan.members)
        owners = tuple(draw(member | st.just(owner)) for owner in plan.owners)
        shadows = tuple(draw(member.filter(lambda m, owner=owner: m != owner)) for owner in owners)
        plan = replace(plan, owners=owners, shadows=shadows)
    micro_batches = draw(st.integers(1, 12))
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        kept = undivided(forwards, draw(st.integers(0, forwards)), reduced=draw(st.booleans()))
        bare = undivided(reduced=draw(st.booleans()), state_only=True)
        progress[role] = draw(st.sampled_from([kept, kept, bare]))
    return plan, micro_batches, progress, ties


@settings(max_examples=300)
@given(interrupted(), st.booleans())
def test_iterations_come_to_their_end_from_any_progress(
    case: tuple[Plan, int, dict[Role, RoleProgress], list[set[int]]], begins: bool
) -> None:
    """Every message is received, every pass done once; stages that others reduce with have their sums."""
    plan, micro_batches, progress, ties = case
    if begins:
        progress = dict.fromkeys(plan.world.roles, undivided())
    settled = settle(plan.world, micro_batches, progress, set().union(*ties))
    assert all(replace(done, reduced=progress[role].reduced) == progress[role] for role, done in settled.items())
    play(plan, micro_batches, settled, ties)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("lacking", [None, 0, 1, 2])
def test_what_is_reduced_everywhere_is_not_done_again(copies: int, lacking: int | None) -> None:
    """A loss after all passes, when some had not entered the commit; one copy of stage ``lacking`` is not reduced."""
    plan = takeover(plan_of(copies, 3), {"m1" if copies == 1 else f"m{copies}"})
    lost = Role(0, 1)
    progress = {role: undivided(4, 4, reduced=True) for role in plan.world.roles}
    progress[lost] = undivided(2, 0, reduced=True, state_only=True)
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


# -- sums ---------------------------------------------------------------------------------------------------


@st.composite
def with_sums(draw: st.DrawFn) -> tuple[Plan, int, dict[Role, RoleProgress]]:
    """Any progress of owners, some of whom have taken their roles over now or before, and hold sums of these."""
    plan, micro_batches = plan_of(1, draw(st.integers(1, 4))), draw(st.integers(1, 6))
    counts = st.integers(1, micro_batches)
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        backwards = draw(st.integers(0, forwards))
        sums = tuple(sorted(draw(st.sets(counts, max_size=2))))
        given = draw(st.integers(backwards, micro_batches))
        kind = draw(st.sampled_from(["survives", "survives", "heir", "heir", "has taken over", "broken"]))
        done = undivided(forwards, backwards, given=given)
        if kind == "heir":  # it may have left out what the sums made needless
            since = draw(st.sampled_from([0, *(count for count in sums if count <= forwards)]))
            done = undivided(forwards, since, since=since, state_only=True, given=since, sums=sums)
        elif kind == "has taken over":
            since = draw(st.integers(0, backwards))
            done = undivided(forwards, backwards, since=since, given=given, sums=sums)
        elif kind == "broken":
            own = tuple(count for count in sums if count <= backwards)
            done = undivided(forwards, backwards, given=given, sums=own, broken=True)
        progress[role] = replace(done, reduced=draw(st.booleans()) and draw(st.booleans()))
    return plan, micro_batches, progress


def lacks(parts: Sequence[PartProgress], given: Sequence[int]) -> bool:
    """Whether a stage needs what the one beside it does not hold."""
    beside = zip(parts, parts[1:], given, strict=False)
    return any(after.forwards < part.since or max(part.backwards, has) < after.since for part, after, has in beside)


@settings(max_examples=400)
@given(with_sums(), st.integers(0, 3))
def test_what_is_built_on_is_the_most_that_fits_together(
    case: tuple[Plan, int, dict[Role, RoleProgress]], every: int
) -> None:
    plan, micro_batches, progress = case
    settled = settle(plan.world, micro_batches, progress)
    play(plan, micro_batches, settled)
    check_sums_sent(plan, micro_batches, settled, every)
    options = [ways(done.parts[0]) for done in progress.values()]
    # What is reduced everywhere may stay so, and counts as all of it.
    for done, ways_on in zip(progress.values(), options, strict=True):
        if done.reduced:
            since = micro_batches if done.state_only else ways_on[0].since
            ways_on.insert(0, PartProgress(0, 1, micro_batches, micro_batches, since))
    found = []
    for choice in product(*(range(len(ways_on)) for ways_on in options)):
        parts = [ways_on[number] for number, ways_on in zip(choice, options, strict=True)]
        kept = [part.backwards >= done.parts[0].backwards for part, done in zip(parts, progress.values(), strict=True)]
        given = [done.parts[0].given if here else 0 for here, done in zip(kept, progress.values(), strict=True)]
        if not lacks(parts, given):
            found.append(choice)
    best = tuple(min(choice[number] for choice in found) for number in range(len(options)))
    assert best in found, "there is one that is the most for each"
    for number, (role, ways_on) in enumerate(zip(progress, options, strict=True)):
        assert settled[role].reduced == (progress[role].reduced and best[number] == 0)
        if not settled[role].reduced:
            assert settled[role].parts[0] == ways_on[best[number]]


def check_sums_sent(plan: Plan, micro_batches: int, progress: Mapping[Role, RoleProgress], every: int) -> None:
    """Sums are sent of every so many micro-batches that are still to come, but the last."""
    for member in plan.members:
        role, sent = None, Counter[Role]()
        for instruction in member_program(plan, member, micro_batches, progress, "none", every):
            if isinstance(instruction, UseRole):
                role = instruction.role
            elif isinstance(instruction, SendSums):
                assert role is not None
                sent[role] += 1
                assert every and (instruction.buffer_id + 1) % every == 0
        for own in plan.owned_by(member):
            first = micro_batches if progress[own].reduced else progress[own].parts[0].backwards
            counts = range(first + 1, micro_batches) if plan.shadow(own) is not None and every else ()
            assert sent[own] == sum(count % every == 0 for count in counts)


def test_an_heir_goes_on_from_the_newest_sums_whose_gradients_are_there() -> None:
    """The example of :mod:`bamboo_ds.schedule.settling`."""
    plan = takeover(plan_of(1, 3), {"m1"})
    first, lost, last = plan.world.roles
    for received, count in ((4, 4), (3, 2), (1, 0)):
        used = min(3, received)
        progress = {
            first: undivided(4, used, given=received),
            lost: undivided(1, 0, state_only=True, sums=(2, 4)),
            last: undivided(5, 5, given=5),
        }
        settled = settle(plan.world, 6, progress)
        assert settled[lost] == undivided(count or 1, count, since=count, state_only=True)
        assert settled[first] == undivided(4, used) and settled[last].parts[0].backwards == 5
        play(plan, 6, settled)
