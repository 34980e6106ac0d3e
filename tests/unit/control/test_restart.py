"""After a fatal loss the job starts again by itself, and its results are those of an undisturbed run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.control.leader.actions import Assign, StopJob, Wait, WritePlan
from bamboo_ds.control.leader.decisions import Decider
from bamboo_ds.control.leader.restarts import RestartLimits, assign, fatal_plan, unstarted_plan
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord, ProgressRecord, RestartRecord, WorkerState
from bamboo_ds.topology import Layout
from bamboo_ds.topology.planner import initial_plan, takeover, with_redundancy
from tests.support.records import left, member
from tests.support.settings import decided, deciding

pytestmark = pytest.mark.claim(
    "guides/clusters.md", "guides/restarts.md", "reference/events.md", "reference/limits.md", "reference/settings.md"
)

IDS = ("a", "b", "c", "d")
RUNNING = with_redundancy(initial_plan(IDS), Layout(1, 4), True)
#: The owner of stage 1, and its shadow.
FATAL = takeover(takeover(RUNNING, {"b"}), {"a"})


def waiting(*slots: int) -> dict[str, MemberRecord]:
    return {f"w{slot}": member(f"w{slot}", slot, state="waiting", generation=None) for slot in slots}


def after_the_loss(**more: Any) -> View:
    """``c`` and ``d`` have ended and wait; ``a`` and ``b`` are lost."""
    gone = {"c": left("c", 2, "fatal", reaped=True), "d": left("d", 3, "fatal"), "a": left("a", 0, "lost")}
    progress = {"c": ProgressRecord(id="c", step=9, checkpoint="/c/step8")}
    entered = {"c": WorkerState(id="c", epoch=2)}
    view = View(world_size=4, plan=FATAL, members=waiting(2, 3), left=gone, progress=progress, workers=entered)
    return replace(view, **more)


def decider(**recovery: Any) -> Decider:
    return deciding(0.02, 2.5, RestartLimits(return_s=5.0, start_s=60.0), **{"max_restarts": 10, **recovery})


RECORD = RestartRecord(
    generation=1,
    after_epoch=FATAL.epoch,
    ranks={2: (0, 1), 3: (2, 3)},
    checkpoint="/c/step8",
    step=9,
)


# -- decisions ------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 16))
def test_every_rank_runs_once(slots: set[int], world_size: int) -> None:
    ranks = assign(list(slots), world_size)
    assert sorted(rank for each in ranks.values() for rank in each) == list(range(world_size))
    assert set(ranks) <= slots and len(ranks) == min(len(slots), world_size)
    loads = [len(each) for each in ranks.values()]
    assert max(loads) - min(loads) <= 1


def test_survivors_start_all_workers() -> None:
    assert FATAL.lost_roles and decider().decide(after_the_loss(), 0.0) == Assign(RECORD)


def test_without_restarts_nothing_happens() -> None:
    assert deciding(0.02, 2.5).decide(after_the_loss(), 0.0) == Wait()


def test_members_on_their_way_back_are_waited_for_but_not_for_ever() -> None:
    it, view = decider(), after_the_loss(members=waiting(2))
    assert it.decide(view, 1.0) == Wait(6.0)
    assert it.decide(after_the_loss(members={**waiting(2), "d": member("d", 3)}), 2.0) == Wait()
    action = it.decide(view, 6.0)
    assert isinstance(action, Assign) and action.record.ranks == {2: (0, 1, 2, 3)}


def test_a_member_that_an_earlier_plan_has_dropped_comes_back_too() -> None:
    """Both have stopped by themselves; one of them was taken over before it was known that the other one had."""
    alone = replace(FATAL, members=(), lost=("d",))
    gone = {"c": left("c", 2, "evicted", since=99.0), "d": left("d", 3, "fatal", since=100.0, reaped=True)}
    entered = {"d": WorkerState(id="d", epoch=2)}
    view = after_the_loss(plan=alone, members=waiting(3), left=gone, workers=entered)
    it = decider()
    assert it.decide(view, 101.0) == Wait(106.0)
    assert it.decide(replace(view, members=waiting(2, 3)), 102.0) == Assign(RECORD)
    assert isinstance(decider().decide(view, 104.5), Assign), "it has had its time to return"


@pytest.mark.parametrize(
    ("change", "wait_s"),
    [
        ({}, 0.0),
        ({"left": {}}, 12.0),
        ({"workers": {}}, 12.0),  # the others' commits may not need a worker that has entered no plan
        ({"left": {"c": left("c", 2, "lost")}}, 12.0),  # its agent is dead, its worker may be held
        ({"workers": {}, "left": {m: left(m, 0, "lost", reaped=True) for m in "acd"}}, 0.0),
        ({"left": {}, "restart": RECORD.model_copy(update={"after_epoch": 1})}, 0.0),  # a start that has not begun
        ({"left": {}, "plan": replace(FATAL, layout=None)}, 0.0),  # nobody had built an engine
        ({"left": {}, "plan": replace(FATAL, fence_s=None)}, math.inf),
    ],
)
def test_workers_that_nobody_saw_end_are_waited_for(change: dict[str, Any], wait_s: float) -> None:
    """Until they commit nothing any more, without etcd."""
    view = replace(after_the_loss(plan=replace(FATAL, fence_s=10.0)), **change)
    it, due = decider(), 100.0 + wait_s
    first = it.decide(view, 100.0)
    assert isinstance(first, Assign) == (not wait_s)
    if wait_s:
        assert isinstance(first, Wait) and first.until == (None if wait_s == math.inf else due)
        assert "whether any worker of the last plan has ended is not known" in str(first.reason)
        assert isinstance(it.decide(view, min(due, 1e9) - 0.1), Wait)
        assert isinstance(it.decide(view, min(due, 1e9)), Assign) == (wait_s < math.inf)


def test_with_too_few_members_it_waits_and_says_so() -> None:
    action = decider(min_members=3).decide(after_the_loss(), 0.0)
    assert isinstance(action, Wait) and "2 of bamboo.recovery.min_members = 3" in str(action.reason)
    action = decider(min_members=3).decide(after_the_loss(members=waiting(2, 3, 7)), 0.0)
    assert isinstance(action, Assign) and set(action.record.ranks) == {2, 3, 7}


UNSTARTED_PLAN = unstarted_plan(4, 120.0)


def not_started(*slots: int, **more: Any) -> View:
    """Nothing has been there before; these wait."""
    return replace(View(world_size=4, plan=UNSTARTED_PLAN, members=waiting(*slots)), **more)


def test_the_first_start_waits_for_all_members_and_is_no_restart() -> None:
    one = decider(min_members=1)
    told = one.decide(not_started(0, 1, 5), 0.0)
    assert isinstance(told, Wait) and told.reason == "3 of --start = 4 are there"
    action = one.decide(not_started(0, 1, 5, 6, 7), 0.0)
    assert isinstance(action, Assign), "with nobody to wait for it begins at once; the fifth joins what runs"
    record = action.record
    assert (record.generation, record.after_epoch, record.checkpoint, record.failures) == (0, 0, None, 0)
    assert record.ranks == {0: (0,), 1: (1,), 5: (2,), 6: (3,)}
    slots = {0: 0, 1: 1, 2: 5, 3: 6}
    workers = {f"r{rank}": member(f"r{rank}", slot, script_rank=rank, generation=0) for rank, slot in slots.items()}
    first = decided(WritePlan, one, not_started(members=workers, restart=record), 1.0)
    plan = first.plan
    assert (plan.epoch, plan.members, plan.lost_roles, plan.generation) == (1, ("r0", "r1", "r2", "r3"), (), 0)
    assert (plan.origin, plan.fence_s) == (UNSTARTED_PLAN.origin, 120.0) and plan.origin


def test_a_loss_before_the_first_plan_makes_all_wait_again_for_all() -> None:
    one = decider(min_members=1)
    action = decided(Assign, one, not_started(0, 1, 2, 3), 0.0)
    workers = {f"r{rank}": member(f"r{rank}", rank, script_rank=rank, generation=0) for rank in (0, 1, 2)}
    lost = {"r3": left("r3", 3, "lost", generation=0)}
    failed = one.decide(not_started(members=workers, left=lost, restart=action.record), 1.0)
    assert isinstance(failed, WritePlan) and failed.plan.epoch == 1 and failed.plan.lost_roles
    again = View(world_size=4, plan=failed.plan, members=waiting(0, 1, 2), restart=action.record)
    told = one.decide(again, 30.0)
    assert isinstance(told, Wait) and told.reason == "3 of --start = 4 are there"
    second = one.decide(replace(again, members=waiting(0, 1, 2, 9)), 30.0)
    assert isinstance(second, Assign) and (second.record.generation, second.record.failures) == (1, 0)


def test_restarts_that_lead_nowhere_end_the_job() -> None:
    before = RECORD.model_copy(update={"generation": 4, "after_epoch": 1, "failures": 1})
    action = decider().decide(after_the_loss(restart=before), 0.0)
    assert isinstance(action, Assign) and (action.record.generation, action.record.failures) == (5, 2)
    beyond = before.model_copy(update={"step": 8})
    action = decider().decide(after_the_loss(restart=beyond), 0.0)
    assert isinstance(action, Assign) and action.record.failures == 0
    action = decider(max_restarts=2).decide(after_the_loss(restart=before), 0.0)
    assert isinstance(action, StopJob) and action.code == 86 and "without getting beyond step 9" in action.reason


def test_the_first_start_counts_for_no_restart() -> None:
    """Neither does it where `bamboo run` starts the job, which leaves no record."""
    first = RECORD.model_copy(update={"generation": 0, "after_epoch": 0, "step": 9, "failures": 0})
    one = decider(max_restarts=1)
    action = one.decide(after_the_loss(restart=first), 0.0)
    assert isinstance(action, Assign) and (action.record.generation, action.record.failures) == (1, 0)
    again = action.record.model_copy(update={"after_epoch": 1})
    assert isinstance(decider(max_restarts=1).decide(after_the_loss(restart=again), 0.0), StopJob)


def workers(*ranks: int) -> dict[str, MemberRecord]:
    slots = {0: 2, 1: 8, 2: 3, 3: 9}
    return {f"n{r}": member(f"n{r}", slots[r], script_rank=r, generation=1) for r in ranks}


def test_the_first_plan_waits_for_all_workers() -> None:
    it, view = decider(), after_the_loss(restart=RECORD)
    assert it.decide(replace(view, members={**workers(0, 1, 2), **waiting(9)}), 0.0) == Wait(60.0)
    action = decided(WritePlan, it, replace(view, members=workers(3, 1, 0, 2)), 1.0)
    plan = action.plan
    assert (plan.epoch, plan.owners, plan.script_ranks) == (FATAL.epoch + 1, ("n0", "n1", "n2", "n3"), (0, 1, 2, 3))
    assert plan.lost_roles == () and plan.layout is None
    assert plan.generation == 1


@pytest.mark.parametrize(
    ("members", "departures", "now"),
    [
        (workers(0, 1, 2), {"n3": left("n3", 9, "lost", generation=1)}, 0.0),
        (workers(0, 1), {}, 5.0),  # slot 3 is neither waiting nor running
        (workers(0, 1, 2), {}, 60.0),
    ],
)
def test_a_loss_on_the_way_begins_again(
    members: dict[str, MemberRecord], departures: dict[str, LeftRecord], now: float
) -> None:
    it, view = decider(), after_the_loss(restart=RECORD, members=members)
    if not departures:
        assert isinstance(it.decide(view, 0.0), Wait)
    action = it.decide(replace(view, left={**view.left, **departures}), now)
    assert isinstance(action, WritePlan) and action.plan.lost_roles == (0, 1, 2, 3)
    assert (action.plan.epoch, action.plan.members) == (FATAL.epoch + 1, tuple(sorted(members)))


def test_one_that_comes_too_late_for_its_restart_holds_nobody_up() -> None:
    """It had left to join a job that it took for running, when the loss of the rest was not known yet."""
    late = {"w3": member("w3", 3, state="waiting", generation=1)}
    action = decider().decide(after_the_loss(restart=RECORD, members={**workers(0, 1), **late}), 0.0)
    assert isinstance(action, WritePlan) and action.plan.lost_roles == (0, 1, 2, 3) and "too late" in action.reason
    coming = after_the_loss(restart=RECORD, members=late)
    assert isinstance(decider().decide(coming, 0.0), Wait), "slot 2 is on its way"
    again = after_the_loss(plan=action.plan, restart=RECORD, members={**waiting(2), **late})
    assert isinstance(again_action := decider().decide(again, 30.0), Assign) and 3 in again_action.record.ranks


def test_a_loss_before_the_engines_are_built_is_fatal_for_this_start_only() -> None:
    first = initial_plan(IDS)
    members = {name: member(name, slot) for slot, name in enumerate(IDS) if name != "b"}
    view = View(world_size=4, plan=first, members=members, left={"b": left("b", 1, "lost")})
    it = decider()
    assert isinstance(it.decide(view, 0.0), Wait)
    action = it.decide(view, 1.0)
    assert isinstance(action, WritePlan) and action.plan == fatal_plan(first, ("a", "c", "d"), ("b",))


def test_a_worker_that_cannot_go_on_takes_all_back() -> None:
    members = {name: member(name, slot) for slot, name in enumerate(IDS) if name != "b"}
    view = View(world_size=4, plan=RUNNING, members=members, left={"b": left("b", 1, "fatal")})
    action = decider().decide(view, 0.0)
    assert isinstance(action, WritePlan) and action.plan.lost_roles == (0, 1, 2, 3) and action.plan.members == IDS
