"""Shadows in other zones than their owners."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.control.leader.boundary import policy_of
from bamboo_ds.topology import Candidate, Costs, Layout, Plan, explain, initial_plan, with_redundancy
from bamboo_ds.topology.costs import Policy, Roster
from bamboo_ds.topology.planner import plan as best_plan
from bamboo_ds.topology.question import Question
from bamboo_ds.topology.room import Room
from bamboo_ds.topology.zones import zones_apart
from tests.support.settings import block

pytestmark = pytest.mark.claim("reference/settings.md")


def members(zones: str, hosts: int | None = None) -> list[Candidate]:
    """A member for each letter, which is its zone; a dot: it is not known."""
    each = enumerate(zones.replace(".", " "))
    return [Candidate(f"m{n}", n, f"{zone}{n if hosts is None else n % hosts}", zone.strip(), n) for n, zone in each]


def job(zones: str, stages: int, pipelines: int = 1, apart: bool = True) -> Plan:
    layout = Layout(pipelines, stages)
    some = members(zones)[: layout.size]
    return with_redundancy(initial_plan([m.id for m in some]), layout, True, some, zones_apart=apart)


def together(plan: Plan, some: list[Candidate]) -> int:
    """Number of roles whose owner and shadow are in one zone."""
    zones = {member.id: member.zone for member in some}
    return sum(zones[o] == zones[str(s)] != "" for o, s in zip(plan.owners, plan.shadows, strict=True))


def drawn(plan: Plan) -> str:
    return " ".join(f"{o[1:]}/{str(s)[1:]}" for o, s in zip(plan.owners, plan.shadows, strict=True))


def test_neighbours_of_one_zone_exchange_their_shadows() -> None:
    """Stages 1 and 3 have the stage before in their own zones: each gets the other's shadow."""
    assert drawn(job("aabb", 4, apart=False)) == "0/3 1/0 2/1 3/2"
    assert drawn(job("aabb", 4)) == "0/3 1/2 2/1 3/0"


def test_members_of_one_zone_or_of_none_stay_as_they_are() -> None:
    for zones in ("aaaa", "....", "aa.."):
        assert job(zones, 4).shadows == job(zones, 4, apart=False).shadows


def test_a_job_that_runs_moves_its_shadows_and_says_why() -> None:
    """Until the zones are apart, and then no more; off, nothing moves."""
    near, some = job("aabb", 4, apart=False), members("aabb")
    layout = near.world
    off = best_plan(near, some, policy=policy_of(layout, True, block(zones_apart=False)))
    assert off.shadows == near.shadows
    policy = policy_of(layout, True, block())
    apart = best_plan(near, some, policy=policy)
    assert together(near, some) == 2 and together(apart, some) == 0
    assert "shadow of (0,1): m0 -> m2, because m0 is in zone a, as the owner m1 is" in "; ".join(
        explain(near, apart, some)
    )
    assert best_plan(apart, some, policy=policy).shadows == apart.shadows


def test_standbys_elsewhere_are_chosen() -> None:
    """Two standbys; each holds replicas of the other zone's stages."""
    some = members("aabbab")
    plan = best_plan(job("aabb", 4), some, policy=policy_of(Layout(1, 4, blocks=(4,) * 4), True, block(replicas=True)))
    assert together(plan, some) == 0
    assert {"m4", "m5"} <= set(plan.shadows)


def test_roles_that_other_pipelines_can_clone_stay() -> None:
    some, layout = members("aaaabbbb"), Layout(2, 4)
    for sharded in (False, True):
        near = with_redundancy(initial_plan([m.id for m in some]), replace(layout, sharded=sharded), True, some)
        apart = best_plan(near, some, policy=policy_of(near.world, True, block()))
        assert (apart.shadows != near.shadows) == sharded
        assert together(near, some) > 0 and (together(apart, some) == 0) == sharded


@settings(max_examples=60)
@given(
    zones=st.text("abc.", min_size=2, max_size=24),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    hosts=st.sampled_from([2, 3, 30]),
    sizes=st.lists(st.integers(1, 5), min_size=8, max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_nobody_loses_by_it(zones: str, shape: tuple[int, int], hosts: int, sizes: list[int], random: Random) -> None:
    """From any shadows: fewer share their owner's zone, none its host, and nobody holds more than one did."""
    some, layout = members(zones, hosts), Layout(*shape)
    roster, names = Roster(some), [member.id for member in some]
    costs = Costs(state_bytes=tuple(sizes[: layout.stages]))
    owners = [random.choice(names) for _ in range(layout.size)]
    able = [[m for m in names if roster.apart(owner, m)] for owner in owners]
    shadows = [random.choice(each) if each else None for each in able]
    previous = Plan(epoch=1, owners=tuple(owners), members=tuple(names), layout=layout)
    question = Question(previous, roster, costs, Policy(), Room(previous, ()), {})
    found = zones_apart(question, owners, shadows)
    zone = {member.id: member.zone for member in some}

    def close(placed: tuple[str | None, ...]) -> set[int]:
        return {r for r, (o, s) in enumerate(zip(owners, placed, strict=True)) if s and zone[o] == zone[s] != ""}

    def held(placed: tuple[str | None, ...], working: bool) -> Counter[str]:
        count: Counter[str] = Counter()
        for role, shadow in zip(layout.roles, placed, strict=True):
            if shadow is not None and (shadow in owners) == working:
                count[shadow] += costs.weight(role.stage)
        return count

    assert close(found) <= close(tuple(shadows))
    for owner, before, after in zip(owners, shadows, found, strict=True):
        assert (before is None) == (after is None)
        assert after is None or roster.apart(owner, after)
    for working in (True, False):
        before, after = held(tuple(shadows), working), held(found, working)
        assert before.total() == after.total()
        assert max(after.values(), default=0) <= max(before.values(), default=0)
    assert zones_apart(question, owners, found) == found or close(found)
