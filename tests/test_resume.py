"""Interrupted iterations: programs of all members that finish them from any progress, in whatever order members go on.

What the engine makes of them, with losses at every place: :mod:`tests.test_takeover_cuts`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import RoleProgress, member_program, settle
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy

from .support.programs import play

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
        kept = RoleProgress(forwards, draw(st.integers(0, forwards)), reduced=draw(st.booleans()))
        bare = RoleProgress(reduced=draw(st.booleans()), state_only=True)
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
        progress = dict.fromkeys(plan.world.roles, RoleProgress())
    settled = settle(plan.world, micro_batches, progress, set().union(*ties))
    assert all(replace(done, reduced=progress[role].reduced) == progress[role] for role, done in settled.items())
    play(plan, micro_batches, settled, ties)


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
