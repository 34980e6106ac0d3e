"""Tensor slices: numbering, plans that keep them apart, orders in which they meet in every pass."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.control.registry.vacancies import choose_script_rank
from bamboo_ds.engine.context.channels import Channels, assists
from bamboo_ds.engine.data.batches import as_message, from_message
from bamboo_ds.errors import ProtocolError, UnsupportedError
from bamboo_ds.schedule import (
    RoleProgress,
    compute_order,
    settle,
)
from bamboo_ds.topology import (
    Candidate,
    Layout,
    Plan,
    Policy,
    Role,
    builders_for,
    holders_of,
    initial_plan,
    takeover,
    with_redundancy,
)
from bamboo_ds.topology.planner import plan as next_plan
from bamboo_ds.topology.roles import groups_like
from bamboo_ds.topology.slices import merged, only
from tests.support.channels import Ends
from tests.support.compare import differences
from tests.support.planning import plan_of, undivided
from tests.support.programs import play

pytestmark = pytest.mark.claim("guides/tensor-slices.md")

layouts = st.builds(
    lambda copies, slices, stages: Layout(copies * slices, stages, slices=slices),
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(2, 5),
)


def candidates(layout: Layout, hosts: int = 0) -> list[Candidate]:
    """One member per rank; with ``hosts`` the slices of a stage are beside each other on them."""
    host = [rank // layout.slices % hosts if hosts else rank for rank in range(layout.size)]
    return [Candidate(f"m{rank}", rank, f"h{host[rank]}", script_rank=rank) for rank in range(layout.size)]


def sliced(layout: Layout, hosts: int = 0) -> Plan:
    return plan_of(layout, members=candidates(layout, hosts))


def slices_of(plan: Plan) -> dict[str, set[int]]:
    """What each member has to do with: the slices of its roles, replicas, copies in the making, and script."""
    slices = plan.world.slices
    found = {
        member: {script_rank % slices} for member, script_rank in zip(plan.members, plan.script_ranks, strict=True)
    }
    for rank, (owner, shadow) in enumerate(zip(plan.owners, plan.shadows, strict=True)):
        for member in (owner, shadow):
            if member is not None and rank not in plan.lost_roles:
                found[member].add(rank % slices)
    for rank, member in plan.builders:
        found[member].add(rank % slices)
    return found


# -- numbering ------------------------------------------------------------------------------------------------


@given(layouts)
def test_numbering_is_that_of_deepspeed(layout: Layout) -> None:
    topology = PipeModelDataParallelTopology(layout.stages, layout.slices, layout.copies)
    for role in layout.roles:
        rank = layout.rank(role)
        place = topology.get_coord(rank)
        assert (place.pipe, place.data, place.model) == (role.stage, layout.copy_of(role), layout.slice_of(role))
        assert [layout.rank(r) for r in layout.siblings(role)] in topology.get_axis_comm_lists("data")
        assert [layout.rank(r) for r in layout.slices_with(role)] in topology.get_axis_comm_lists("model")
        assert role in layout.siblings(role) and role in layout.slices_with(role)
    for axis in ("pipe", "data", "model"):
        groups = {tuple(group) for group in topology.get_axis_comm_lists(axis)}
        assert all(set(groups_like(layout, group)) == groups for group in groups if len(group) > 1)
    whole = tuple(sorted(topology.get_axis_list(axis="data", idx=0)))
    assert groups_like(layout, whole)[0] == whole


def test_slices_divide_pipelines() -> None:
    with pytest.raises(ValueError, match="3 pipelines"):
        Layout(3, 2, slices=2)


def test_plans_from_before_there_were_slices() -> None:
    plan = with_redundancy(initial_plan("abcd"), Layout(2, 2), True)
    fields = json.loads(plan.to_json())
    del fields["layout"]["slices"]
    assert Plan.from_json(json.dumps(fields)) == plan
    sliced = replace(plan, layout=Layout(2, 2, slices=2))
    assert Plan.from_json(sliced.to_json()) == sliced != plan


# -- plans ----------------------------------------------------------------------------------------------------


@given(layouts, st.integers(0, 4))
def test_shadows_are_of_the_same_slice(layout: Layout, hosts: int) -> None:
    plan = sliced(layout, hosts)
    assert None not in plan.shadows and all(len(found) == 1 for found in slices_of(plan).values())
    for rank, role in enumerate(layout.roles):
        if not hosts:
            assert plan.shadows[rank] == plan.owner(layout.predecessor(role))
    assert with_redundancy(initial_plan(plan.members), layout, False).shadows == (None,) * layout.size


@given(layouts)
def test_a_slice_is_a_plan_and_back(layout: Layout) -> None:
    plan = replace(sliced(layout), builders=((0, f"m{layout.slices}"),), lost_roles=(1,))
    parts = [only(plan, number) for number in range(layout.slices)]
    assert all(part.world == Layout(layout.copies, layout.stages) for part in parts)
    assert merged(plan, parts) == plan


def assert_lasts(target: Plan, learning: Plan, members: list[Candidate], policy: Policy) -> None:
    """When the copies of ``learning`` are made, ``target`` is still the target."""
    ready = {m: [rank for rank, each in learning.builders if each == m] for m in learning.members}
    again = next_plan(learning, members, policy=policy, holders=holders_of(learning, ready))
    assert (again.owners, again.shadows, again.members) == (target.owners, target.shadows, target.members)


def test_a_target_lasts_that_is_not_found_at_once() -> None:
    """Targets go round in a circle here, each of them made by the copies for another one."""
    layout = Layout(9, 3, slices=3)
    plan, members = sliced(layout), candidates(layout)
    policy = Policy(near_shadows=True, standby_replicas=True)
    for event in ("m21", "m12", "join", "join"):
        if event == "join":
            slot = len(plan.members) + 2
            members.append(
                Candidate(f"m{slot}", slot, f"h{slot}", script_rank=choose_script_rank(plan, plan.script_ranks))
            )
            plan = replace(
                plan, members=(*plan.members, f"m{slot}"), script_ranks=(*plan.script_ranks, members[-1].script_rank)
            )
        else:
            plan = takeover(plan, {event})
            members = [m for m in members if m.id != event]
        target = next_plan(plan, members, policy=policy)
        assert_lasts(target, replace(plan, builders=builders_for(plan, target)), members, policy)
        plan = target


@settings(max_examples=100)
@given(layouts, st.data())
def test_members_keep_to_their_slice(layout: Layout, data: st.DataObject) -> None:
    """Losses, members that come, members that leave: nobody ever gets anything of another slice."""
    plan, members = sliced(layout), candidates(layout)
    policy = Policy(near_shadows=True, standby_replicas=data.draw(st.booleans()))
    slots = itertools.count(layout.size)
    for _ in range(data.draw(st.integers(1, 5))):
        event = data.draw(st.sampled_from(["lose", "join", "leave"]))
        if event == "lose":
            plan = takeover(plan, {data.draw(st.sampled_from(plan.members))})
            members = [m for m in members if m.id in plan.members]
        elif event == "join":
            slot = next(slots)
            members.append(
                Candidate(f"m{slot}", slot, f"h{slot}", script_rank=choose_script_rank(plan, plan.script_ranks))
            )
            plan = replace(
                plan, members=(*plan.members, f"m{slot}"), script_ranks=(*plan.script_ranks, members[-1].script_rank)
            )
        else:
            leaver = data.draw(st.sampled_from(members))
            members = [replace(m, leaving=m.leaving or m == leaver) for m in members]
        assert all(len(found) == 1 for found in slices_of(plan).values())
        if plan.lost_roles:
            return
        target = next_plan(plan, members, policy=policy)
        assert all(len(found) == 1 for found in slices_of(target).values())
        for number in range(layout.slices):
            mine = [m for m in members if m.script_rank % layout.slices == number]
            staying = {m.id for m in mine if not m.leaving} or {m.id for m in mine}
            assert {owner for owner in target.owners[number :: layout.slices]} <= staying
        assert all(m in target.members for m in (*target.owners, *filter(None, target.shadows)))
        learning = replace(plan, builders=builders_for(plan, target))
        assert all(len(found) == 1 for found in slices_of(learning).values())
        assert_lasts(target, learning, members, policy)
        plan, members = target, [m for m in members if m.id in target.members]


def test_nobody_left_for_a_slice() -> None:
    layout = Layout(2, 2, slices=2)  # ranks by (stage, slice)
    plan = sliced(layout)
    assert takeover(plan, {"m1"}).owners == ("m0", "m3", "m2", "m3")
    assert takeover(plan, {"m0", "m3"}).owners == ("m2", "m1", "m2", "m1")
    assert takeover(plan, {"m1", "m3"}).lost_roles == (1, 3)
    left = next_plan(plan, [m for m in candidates(layout) if m.script_rank % 2 == 0])
    assert (left.owners, left.shadows, left.lost_roles) == (plan.owners, ("m2", None, "m0", None), (1, 3))
    assert left.members == ("m0", "m2") and left.epoch == plan.epoch + 1


def test_another_copy_stands_in_with_the_same_slice() -> None:
    layout = Layout(4, 2, slices=2)
    plan = sliced(layout)
    after = takeover(plan, {"m0", "m4"})  # slice 0 of copy 0, both stages
    assert (after.owners[0], after.owners[4], after.lost_roles) == ("m2", "m6", ())
    sharded = replace(plan, layout=replace(layout, sharded=True))
    assert takeover(sharded, {"m0", "m4"}).lost_roles == (0, 4)


def test_newcomers_run_as_the_slice_that_needs_them() -> None:
    layout = Layout(2, 4, slices=2)
    plan = sliced(layout)
    for lost in plan.members:
        after = takeover(plan, {lost})
        script_rank = choose_script_rank(after, after.script_ranks)
        assert script_rank % 2 == plan.script_rank(lost) % 2
    assert choose_script_rank(plan, [2, 3, 4, 5, 0]) % 2 == 1  # no source of slice 1


def test_no_redundant_passes() -> None:
    plan = sliced(Layout(2, 3, slices=2))
    assert not any(assists(plan, role) for role in plan.world.roles)
    names = [channel.name for _, _, channel in Channels(plan, Ends, shadow_gradients=True)]
    assert not any("shadow" in name for name in names) and any("replica" in name for name in names)


def test_batches_travel_as_they_were_drawn() -> None:
    batch = {"text": torch.arange(6).reshape(2, 3), "parts": [torch.ones(1), (2.5, "x", None)], 3: True}
    for value in (None, batch, (torch.zeros(0), torch.tensor(True))):
        back = from_message(as_message(value))
        assert differences(value, back) == []
        assert type(back) is type(value)
    with pytest.raises(UnsupportedError, match="object"):
        as_message({"text": object()})


# -- orders ---------------------------------------------------------------------------------------------------


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Plan, int, dict[Role, RoleProgress]]:
    """Any plan after some losses; any progress of the survivors, the lost ones' roles bare."""
    plan = sliced(draw(layouts))
    micro_batches = draw(st.integers(1, 6))
    for _ in range(draw(st.integers(1, 3))):
        after = takeover(plan, {draw(st.sampled_from(plan.members))})
        plan = plan if after.lost_roles else after
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        kept = undivided(forwards, draw(st.integers(0, forwards)), draw(st.booleans()))
        bare = undivided(reduced=draw(st.booleans()), state_only=True)
        progress[role] = draw(st.sampled_from([kept, kept, bare]))
    return plan, micro_batches, progress


@settings(max_examples=150)
@given(interrupted())
def test_slices_meet_from_any_progress(case: tuple[Plan, int, dict[Role, RoleProgress]]) -> None:
    plan, micro_batches, progress = case
    layout = plan.world
    settled = dict(settle(layout, micro_batches, progress))
    for role, done in settled.items():
        assert done == progress[role] or done in (
            undivided(state_only=progress[role].state_only),
            replace(progress[role], reduced=False),
        )
        if done != progress[role]:
            assert not done.reduced
    play(plan, micro_batches, settled)


def test_slices_at_different_places() -> None:
    layout = Layout(2, 2, slices=2)
    progress = dict.fromkeys(layout.roles, undivided(3, 1))
    ahead = {**progress, Role(1, 0): undivided(4, 1)}
    with pytest.raises(ProtocolError, match="different places"):
        compute_order(layout, tuple((member,) for member in "abcd"), 4, ahead)
    again = {**progress, Role(0, 0): undivided(), Role(1, 0): undivided()}
    assert settle(layout, 4, ahead) == again
    assert settle(layout, 4, progress) == progress
    # A role that was taken over after its gradients were reduced: its neighbour still needs something.
    late = dict.fromkeys(layout.roles, undivided(4, 4, reduced=True))
    late[Role(0, 1)] = undivided(reduced=True, state_only=True)
    assert settle(layout, 4, late) == late
    late[Role(0, 0)] = undivided(4, 3)
    bare = undivided(state_only=True)
    assert settle(layout, 4, late) == {
        Role(0, 0): undivided(),
        Role(1, 0): undivided(),
        Role(0, 1): bare,
        Role(1, 1): undivided(),
    }
