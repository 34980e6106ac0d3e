"""What shadows compute for owners: loads that are kept sorted, and chains along which work is passed on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.topology import (
    BlockCosts,
    Costs,
    Layout,
    Lent,
    Plan,
    divided,
    initial_plan,
    predicted_s,
    with_redundancy,
)
from bamboo_ds.topology.lending import Graph, Ground, Lending
from bamboo_ds.topology.loads import Loads

pytestmark = pytest.mark.claim("guides/even-shares.md")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_loads_are_sorted_whatever_is_added(first: list[int], data: st.DataObject) -> None:
    plain = {f"m{number}": float(load) for number, load in enumerate(first)}
    loads = Loads(plain)
    for _ in range(data.draw(st.integers(0, 10))):
        member, amount = data.draw(st.sampled_from(sorted(plain))), data.draw(st.integers(-3, 3))
        plain[member] += amount
        loads.add(member, amount)
        assert loads.by_member == plain and loads.most == max(plain.values())
        assert loads.ascending == sorted(plain, key=lambda m: (plain[m], int(m[1:])))
        limit, count = data.draw(st.integers(-3, 6)), data.draw(st.integers(1, 4))
        assert loads.at_least(limit, count) == [m for m in plain if plain[m] >= limit][:count]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Plan, Lending]:
    """Any owners and shadows, cuts, costs, and parts that are lent at first."""
    pipelines, stages = draw(st.integers(1, 2)), draw(st.integers(2, 5))
    blocks = tuple(draw(st.integers(1, 4)) for _ in range(stages))
    plan = with_redundancy(initial_plan([f"m{n}" for n in range(pipelines * stages)]), Layout(pipelines, stages), True)
    member = st.sampled_from(plan.members)
    owners = tuple(draw(member) for _ in plan.owners)
    shadows = tuple(draw(st.none() | member.filter(lambda m, owner=owner: m != owner)) for owner in owners)
    seconds = tuple(tuple(draw(st.sampled_from([0.0, 1.0, 1.0, 2.5, 4.0])) for _ in range(count)) for count in blocks)
    slow = tuple((m, draw(st.sampled_from([0.5, 3.0]))) for m in plan.members if draw(st.booleans()))
    cuts = tuple(tuple(cut for cut in range(1, count) if draw(st.booleans())) for count in blocks)
    layout = Layout(pipelines, stages, blocks=blocks)
    lent = []
    for rank, shadow in enumerate(shadows):
        known = cuts[rank // pipelines]
        if shadow and known and draw(st.booleans()):
            lent.append(Lent(rank, draw(st.sampled_from(known)), draw(st.sampled_from(["front", "rear"]))))
    plan = replace(
        plan,
        layout=layout,
        owners=owners,
        shadows=shadows,
        cuts=cuts,
        costs=BlockCosts(seconds, slow),
        lent=tuple(lent),
    )
    return plan, Lending(Graph(Ground(plan, Costs(), cuts), shadows), lent)


@settings(max_examples=200)
@given(drawn())
def test_work_is_passed_on(case: tuple[Plan, Lending]) -> None:
    """Loads are those of what is lent; the slowest member is no slower than before; one that is even stays as it is."""
    plan, division = case
    assert division.lent() == plan.lent
    before, even = division.slowest, division.even
    assert abs(before - predicted_s(plan, Costs())) < 1e-9
    division.improve()
    lent = division.lent()
    assert all(plan.shadows[each.rank] and each.cut in plan.cuts[each.rank // plan.world.pipelines] for each in lent)
    assert abs(division.slowest - predicted_s(replace(plan, lent=lent), Costs())) < 1e-9
    assert division.slowest <= before + 1e-9 and (not even or lent == plan.lent)
    again = Lending(Graph(Ground(plan, Costs(), plan.cuts), plan.shadows), lent)
    assert not division.better_than(again) and not again.better_than(division)
    again.improve()
    assert again.slowest <= division.slowest + 1e-9


def test_a_stage_is_divided_from_the_side_that_fits() -> None:
    """The head takes four times as long as a layer, so the shadow takes layers in front of it.

    The rear would be the better side: the owner has the stage before, and would compute one span.
    """
    plan = with_redundancy(initial_plan("abc"), Layout(1, 3, blocks=(1, 1, 3)), True)
    plan = replace(plan, owners=("a", "b", "b"), shadows=("b", "a", "a"), cuts=((), (), (1, 2)))
    plan = replace(plan, costs=BlockCosts(((4.0,), (1.0,), (1.0, 1.0, 4.0))), members=("a", "b"))
    assert divided(plan, Costs(), plan.cuts, 0.05) == (Lent(2, 1, "front"),)
    # Where it has time for the head it takes that.
    plan = replace(plan, costs=BlockCosts(((1.0,), (1.0,), (1.0, 1.0, 4.0))))
    assert divided(plan, Costs(), plan.cuts, 0.05) == (Lent(2, 2, "rear"),)
