"""The leader's decisions: state in, action out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.control.leader.actions import Ask, Complete, StopJob, Wait, WritePlan
from bamboo_ds.control.leader.boundary import short_of_memory
from bamboo_ds.control.leader.decisions import EXIT_CONFIG, Decider
from bamboo_ds.control.leader.view import View, limits_of
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.overview import overview
from bamboo_ds.control.registry.records import (
    DeviceRecord,
    HealthReply,
    HealthRequest,
    LayoutRecord,
    LeaderRecord,
    LeftRecord,
    MemberRecord,
    ProgressRecord,
    RestartRecord,
    SuspicionRecord,
    WorkerState,
)
from bamboo_ds.errors import EXIT_FATAL_LOSS
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.store.records import KeyValue, WatchEvent
from bamboo_ds.topology import Layout, Plan, StageMemory, holders_of, planner
from bamboo_ds.topology.planner import initial_plan, takeover, with_redundancy
from tests.support import records
from tests.support.settings import block, decided, deciding

pytestmark = pytest.mark.claim(
    "guides/elastic.md", "guides/even-shares.md", "guides/scripts.md", "reference/cli.md", "reference/settings.md"
)

SETTLE_S = 0.02
PATIENCE_S = 2.5
IDS = ("a", "b", "c", "d")
FIRST = initial_plan(IDS)
SECOND = with_redundancy(FIRST, Layout(1, 4), True)


def member(name: str) -> MemberRecord:
    return records.member(name, IDS.index(name), script_rank=IDS.index(name))


def members(*names: str) -> dict[str, MemberRecord]:
    return {name: member(name) for name in names}


def left(name: str, outcome: str = "lost", **fields: Any) -> LeftRecord:
    values = {"reason": "signal", "detail": "SIGKILL", "code": 137, "since": 99.9, **fields}
    return records.left(name, IDS.index(name), outcome, **values)


def suspicions(*pairs: tuple[str, str], epoch: int = 2) -> dict[str, SuspicionRecord]:
    """Each pair: who accuses, and whom."""
    found: dict[str, dict[str, str]] = {}
    for by, accused in pairs:
        found.setdefault(by, {})[accused] = "reset"
    return {by: SuspicionRecord(by=by, epoch=epoch, accused=accused) for by, accused in found.items()}


def well(name: str, epoch: int = 2) -> dict[str, HealthReply]:
    return {name: HealthReply(id=name, epoch=epoch)}


def report(name: str, layout: Layout = SECOND.world, redundant: bool = True) -> LayoutRecord:
    return LayoutRecord(id=name, layout=layout, redundant=redundant)


def decider() -> Decider:
    return deciding(SETTLE_S, PATIENCE_S)


def all_well() -> View:
    return View(world_size=4, plan=SECOND, members=members(*IDS))


# -- start ------------------------------------------------------------------------------------------


def test_start_waits_for_all_slots() -> None:
    assert decider().decide(View(world_size=4, members=members("a", "b", "c")), 0.0) == Wait()


def test_first_plan_is_in_the_order_of_ranks() -> None:
    action = decided(WritePlan, decider(), View(world_size=4, members=members("d", "b", "a", "c")), 0.0)
    assert action.plan == FIRST


def test_layout_waits_for_every_report() -> None:
    reports = {name: report(name) for name in IDS}
    view = View(world_size=4, plan=FIRST, members=members(*IDS), reports=reports)
    action = decided(WritePlan, decider(), view, 0.0)
    assert action.plan == SECOND
    del reports["c"]
    assert decider().decide(view, 0.0) == Wait()


STAGE = StageMemory(10, 12, 8)


def test_members_may_hold_what_their_devices_have() -> None:
    """A tenth stays free. Those of one device divide it; a setting counts instead, and host memory has no bound."""
    devices = [DeviceRecord(name=name, total=1000, besides=b) for name, b in (("h cuda 0", 0), ("h cuda 1", 50))]
    reports = [report(name).model_copy(update={"device": devices[name != "a"]}) for name in IDS]
    assert limits_of(reports) == {"a": 900, "b": 250, "c": 250, "d": 250}
    assert limits_of(reports[:2]) == {"a": 900, "b": 850}, "the others are gone"
    set_here = reports[1].model_copy(update={"memory": 70})
    assert limits_of([reports[0], set_here, reports[2]]) == {"a": 900, "b": 70, "c": 400}
    full = report("d").model_copy(update={"device": DeviceRecord(name="h cuda 2", total=100, besides=95)})
    assert limits_of([full, report("a")]) == {"d": 0}


def test_no_replica_is_planned_that_its_device_cannot_hold() -> None:
    """By default: there is no setting. Two of the members are on one device."""
    sizes = {"a": ("h cuda 0", 30), "b": ("h cuda 1", 30), "c": ("h cuda 2", 40), "d": ("h cuda 2", 40)}
    reports = {
        name: report(name).model_copy(update={"stage": STAGE, "device": DeviceRecord(name=device, total=total)})
        for name, (device, total) in sizes.items()
    }
    view = View(world_size=4, plan=FIRST, members=members(*IDS), reports=reports)
    plan = decided(WritePlan, decider(), view, 0.0).plan
    assert plan.memory == (STAGE,) * 4
    assert {shadow for shadow in plan.shadows if shadow} == {"a", "b"}, "c and d have 18 each, of which owners need 10"
    assert len(plan.unshadowed) == 2 and plan.crowded == ()
    apart = {n: r.model_copy(update={"device": DeviceRecord(name=n, total=30)}) for n, r in reports.items()}
    plan = decided(WritePlan, decider(), replace(view, reports=apart), 0.0).plan
    assert set(plan.shadows) == set(IDS) and plan.unshadowed == ()


def test_what_stages_take_is_told_with_the_layout() -> None:
    """And replicas are given up that members may not hold; not before all have told."""
    reports = {n: report(n).model_copy(update={"stage": STAGE, "memory": 25 if n == "a" else 21}) for n in IDS}
    view = View(world_size=4, plan=FIRST, members=members(*IDS), reports=reports)
    action = decided(WritePlan, decider(), view, 0.0)
    plan = action.plan
    assert plan.memory == (STAGE,) * 4 and plan.unshadowed == (0, 2, 3) and plan.shadows[1] == "a"
    reports["b"] = report("b").model_copy(update={"memory": 21})
    action = decider().decide(view, 0.0)
    assert isinstance(action, WritePlan) and action.plan.memory == () and action.plan.shadows == SECOND.shadows


def test_copies_wait_for_room() -> None:
    """A replica on its owner's host moves, and another one to where its inputs are: both give way to what comes.

    What passes keep counts as soon as a worker has told of it.
    """
    records = {n: member(n).model_copy(update={"host": "AB"[n in "cd"]}) for n in IDS}
    reports = {n: report(n).model_copy(update={"memory": 25}) for n in IDS}
    plan = replace(SECOND, shadows=(None, "d", "a", "c"), memory=(StageMemory(10, 10, 8),) * 4)
    workers = {n: WorkerState(id=n, epoch=2, replicas=r) for n, r in zip(IDS, ((2,), (), (3,), (1,)), strict=True)}
    view = View(world_size=4, plan=plan, members=records, reports=reports, workers=workers)
    action = decided(WritePlan, decider(), view, 0.0)
    assert action.plan.builders == ((0, "c"), (2, "b"), (3, "a")) and action.plan.shadows == (None, "d", None, None)
    workers["d"] = workers["d"].model_copy(update={"passes": {0: 3, 3: 6}})
    action = decided(WritePlan, decider(), view, 0.0)
    assert [stage.passes for stage in action.plan.memory] == [3, 0, 0, 6]
    assert action.plan.shadows == (None, "d", "a", None) and "no replica of (0,0)" in action.reason


def test_different_layouts_stop() -> None:
    for wrong in (report("d", Layout(2, 2)), report("d", redundant=False)):
        reports = {name: report(name) for name in IDS} | {"d": wrong}
        view = View(world_size=4, plan=FIRST, members=members(*IDS), reports=reports)
        action = decided(StopJob, decider(), view, 0.0)
        assert action.code == EXIT_CONFIG
        assert "a has 1 pipelines of 4 stages with redundancy, d has" in action.reason


def test_what_workers_go_by_completes_an_open_record() -> None:
    """Before the first plan with stages, which is made by that; a worker that goes by something else ends the job."""
    opened, own = JobSettings(values=block(max_restarts=0), open=True), block(max_restarts=0, zones_apart=False)
    first = initial_plan(IDS)
    told = {name: report(name).model_copy(update={"settings": own}) for name in IDS}
    view = View(world_size=4, plan=first, members=members(*IDS), reports=told, settings=opened)
    assert decider().decide(view, 100.0) == Complete(own)
    after = replace(view, settings=opened.completed(own))
    assert isinstance(decider().decide(after, 100.0), WritePlan)
    told[IDS[2]] = report(IDS[2]).model_copy(update={"settings": block(max_restarts=0)})
    for each in (view, after):
        action = decider().decide(each, 100.0)
        assert isinstance(
            action, StopJob
        ) and f"the script of {IDS[2]} differs from others in topology.zones_apart" in (action.reason)
    unwritten = decider().decide(replace(view, settings=None), 100.0)
    assert unwritten == Wait(), "slot 0 has yet to write what it goes by"


def test_layout_of_another_size_stops() -> None:
    reports = {"a": report("a", Layout(1, 3))}
    action = decided(StopJob, decider(), View(world_size=4, plan=FIRST, members=members(*IDS), reports=reports), 0.0)
    assert "needs 3 members, but the job was started with 4" in action.reason


# -- losses -----------------------------------------------------------------------------------------


def test_loss_waits_for_companions() -> None:
    one = decider()
    lost_b = replace(all_well(), members=members("a", "c", "d"), left={"b": left("b")})
    assert one.decide(all_well(), 99.0) == Wait()
    assert one.decide(lost_b, 100.0) == Wait(100.0 + SETTLE_S)
    lost_both = replace(lost_b, members=members("a", "c"), left={"b": left("b"), "d": left("d")})
    assert one.decide(lost_both, 100.01) == Wait(100.0 + SETTLE_S), "the first one's time counts"
    action = decided(WritePlan, one, lost_both, 100.0 + SETTLE_S)
    assert action.plan == takeover(SECOND, ["b", "d"])
    assert [loss.member for loss in action.losses] == ["b", "d"]
    assert abs((action.losses[0].detection_s or 0) - 0.1) < 1e-9
    assert action.losses[0].noticed == 100.0


def test_copies_begin_with_the_takeover() -> None:
    """Of the stages that have lost their replicas; not where members would have to give up others for them first."""
    calm = replace(all_well(), reports={name: report(name) for name in IDS})
    lost = replace(calm, members=members("a", "c", "d"), left={"b": left("b")})
    plan = decided(WritePlan, deciding(0.0, PATIENCE_S), lost, 100.0).plan
    bare = takeover(SECOND, ["b"])
    assert replace(plan, builders=()) == bare and plan.interrupts()
    copied = dict(plan.builders)
    assert sorted(copied) == [rank for rank, shadow in enumerate(bare.shadows) if shadow is None]

    def entered(complete: bool) -> View:
        """All are in the plan's epoch; their copies are complete, or not."""
        held = {name: {rank for rank, shadow in enumerate(plan.shadows) if shadow == name} for name in plan.members}
        for rank, name in plan.builders if complete else ():
            held[name].add(rank)
        told = {n: WorkerState(id=n, epoch=plan.epoch, replicas=tuple(sorted(held[n]))) for n in plan.members}
        return replace(lost, plan=plan, workers=told)

    assert decider().decide(entered(complete=False), 100.1) == Wait(), "nothing is left to be copied"
    healed = decided(WritePlan, decider(), entered(complete=True), 100.1).plan
    assert not healed.builders and None not in healed.shadows and not healed.interrupts()

    reports = {name: report(name).model_copy(update={"memory": 21}) for name in IDS}
    full = replace(SECOND, shadows=("b", None, "a", "a"), memory=(StageMemory(10, 10, 8),) * 4)
    crowded = View(4, full, members("a", "b", "d"), reports=reports, left={"c": left("c")})
    plan = decided(WritePlan, deciding(0.0, PATIENCE_S), crowded, 100.0).plan
    assert plan == takeover(full, ["c"], members=crowded.candidates(full).values()) and not plan.builders
    told = {n: WorkerState(id=n, epoch=plan.epoch, replicas=r) for n, r in zip("abd", ((3,), (0,), ()), strict=True)}
    later = decided(WritePlan, decider(), replace(crowded, plan=plan, workers=told), 100.1).plan
    assert later.builders and later.shadows != plan.shadows, "at a boundary a replica gives way"


def test_plans_tell_which_members_have_optimizers_at_rest() -> None:
    """After a loss two of three members hold three roles, which take 42 as they are, and 32 with optimizers at rest."""
    stage = StageMemory(10, 10, 8, passes=4, parked=True, resting=6, masters=2, under_way=4)

    def limited(memory: int) -> dict[str, LayoutRecord]:
        return {name: report(name).model_copy(update={"memory": memory}) for name in IDS}

    full = replace(SECOND, memory=(stage,) * 4)
    lost = View(4, full, members("a", "c", "d"), reports=limited(32), left={"b": left("b")})
    hurt = decided(WritePlan, deciding(0.0, PATIENCE_S), lost, 100.0).plan
    assert hurt.tight == () and hurt.builders, "copies in host memory need no room"

    def at_rest(plan: Plan, memory: int, iteration_s: float = 0.0) -> View:
        held = {n: [r for r, s in enumerate(plan.shadows) if s == n] for n in plan.members}
        for rank, name in plan.builders:
            held[name].append(rank)
        told = {
            n: WorkerState(id=n, epoch=plan.epoch, replicas=tuple(sorted(held[n])), iteration_s=iteration_s)
            for n in plan.members
        }
        return replace(lost, plan=plan, workers=told, reports=limited(memory))

    healed = decided(WritePlan, decider(), at_rest(hurt, 32), 100.1).plan
    assert None not in healed.shadows and not healed.unshadowed and not healed.crowded
    most = Counter((*healed.owners, *healed.shadows))
    assert healed.tight == tuple((name, 0) for name in healed.members if most[name] == 3) != ()
    told = {"roles": [], "members": [], "resting": [name for name, _ in healed.tight], "under_way": []}
    assert short_of_memory(healed) == told
    unable = replace(healed, memory=(replace(stage, resting=0),) * 4, tight=(("a", 0), ("c", 2)))
    assert short_of_memory(unable) == {**told, "resting": [], "under_way": [("c", 2)]}, "nothing rests there"
    assert decider().decide(at_rest(healed, 32), 100.2) == Wait()
    # That alone makes another plan, which no member breaks off a long iteration for.
    for iteration_s in (0.0, 100.0):
        roomy = decided(WritePlan, decider(), at_rest(healed, 42, iteration_s), 100.2).plan
        assert roomy == replace(healed, epoch=roomy.epoch, tight=()) and roomy.when == "boundary"
    # A joiner's copies do not change what the others hold meanwhile.
    joiner = records.member("e", 4, script_rank=1, joiner=True)
    joining = at_rest(healed, 32)
    joining = replace(
        joining,
        members={**joining.members, "e": joiner},
        reports={**joining.reports, "e": report("e").model_copy(update={"memory": 32})},
    )
    learning = decided(WritePlan, decider(), joining, 100.3).plan
    assert learning.builders and learning.shadows == healed.shadows and learning.tight == healed.tight


def test_long_iterations_are_not_waited_for() -> None:
    """A plan that serves better takes effect in the middle of one, if that costs little of it."""
    reports = {name: report(name) for name in "acde"}
    names = {"e": records.member("e", 4, script_rank=1, joiner=True)}
    lost = takeover(SECOND, ["b"])  # a has two stages
    heir = lost.owners[1]

    def view(plan: Plan, iteration_s: float, sums_share: float = 0.1) -> View:
        told = {"epoch": plan.epoch, "iteration_s": iteration_s, "sums_share": sums_share}
        held = {n: tuple(r for r, shadow in enumerate(plan.shadows) if shadow == n) for n in plan.members}
        workers = {n: WorkerState(id=n, replicas=ranks, **told) for n, ranks in held.items()}
        return View(4, plan, members("a", "c", "d") | names, reports=reports, workers=workers)

    def next_plan(seen: View) -> Plan:
        return decided(WritePlan, decider(), seen, 100.0).plan

    short, long = next_plan(view(lost, 20.0)), next_plan(view(lost, 200.0))
    assert replace(short, when="iteration") == long and "e" in long.members and long.builders
    assert (short.when, long.when) == ("boundary", "iteration")
    # All that members copy is there: e gets the stage that its heir computes besides its own.
    copied = {n: tuple(rank for rank, builder in long.builders if builder == n) for n in long.members}

    def complete(seen: View) -> View:
        workers = {n: s.model_copy(update={"replicas": (*s.replicas, *copied[n])}) for n, s in seen.workers.items()}
        return replace(seen, workers={n: s.model_copy(update={"epoch": long.epoch}) for n, s in workers.items()})

    target = next_plan(complete(view(long, 200.0)))
    assert target.owners != long.owners and heir == "a" and target.when == "iteration" and not target.lost
    for seen in (view(long, 20.0), view(long, 200.0, sums_share=0.0), view(long, 200.0, sums_share=0.5)):
        assert next_plan(complete(seen)) == replace(target, when="boundary"), "what moves would begin again"
    # A member leaves with a boundary, but those that take its stages over begin to copy them.
    going = records.member("d", 3, script_rank=3).model_copy(update={"state": "leaving"})
    leaving = replace(view(SECOND, 200.0), members=members("a", "b", "c") | {"d": going})
    leaving = replace(leaving, reports={name: report(name) for name in IDS})
    plan = next_plan(leaving)
    assert plan.when == "iteration" and plan.builders and plan.owners == SECOND.owners
    held = {n: tuple(rank for rank, builder in plan.builders if builder == n) for n in plan.members}
    told = {n: s.model_copy(update={"epoch": plan.epoch, "replicas": held[n]}) for n, s in leaving.workers.items()}
    without = next_plan(replace(leaving, plan=plan, workers=told))
    assert "d" not in without.members and not without.interrupts()


@pytest.mark.parametrize(
    ("gone", "reason"),
    [({"b": left("b", boot="elsewhere")}, "signal"), ({}, "lease")],
    ids=["on another host", "its lease ran out"],
)
def test_when_a_member_was_lost_may_be_unknown(gone: dict[str, LeftRecord], reason: str) -> None:
    view = replace(all_well(), members=members("a", "c", "d"), left=gone)
    action = decided(WritePlan, deciding(0.0, PATIENCE_S), view, 100.0)
    assert (action.losses[0].reason, action.losses[0].detection_s) == (reason, None)


def test_absence_after_an_outage_is_not_trusted() -> None:
    one = deciding(0.0, PATIENCE_S)
    view = replace(all_well(), members=members("a"), trusted_from=105.0)
    assert one.decide(view, 100.0) == Wait(105.0)
    returned = replace(view, members=members(*IDS))
    assert one.decide(returned, 101.0) == Wait()
    action = decided(WritePlan, one, replace(view, members=members("a", "b", "c")), 105.0)
    assert action.plan.lost == ("d",)


def test_death_in_an_outage_is_trusted() -> None:
    view = replace(all_well(), members=members("a", "c"), left={"b": left("b")}, trusted_from=105.0)
    action = decided(WritePlan, deciding(0.0, PATIENCE_S), view, 100.0)
    assert action.plan.lost == ("b",), "d has time to return"


def test_finishing_is_no_loss() -> None:
    view = replace(all_well(), members=members("a"), left={n: left(n, "finished") for n in "bcd"})
    assert decider().decide(view, 100.0) == Wait()


def test_who_has_finished_takes_nothing_over() -> None:
    view = replace(all_well(), members=members("c", "d"), left={"a": left("a", "finished"), "b": left("b")})
    action = decided(WritePlan, deciding(0.0, PATIENCE_S), view, 100.0)
    assert action.plan == takeover(SECOND, ["a", "b"])
    assert [loss.member for loss in action.losses] == ["b"]


@pytest.mark.parametrize("plan", [None, FIRST], ids=["no plan", "no layout"])
def test_loss_before_the_layout_stops(plan: Plan | None) -> None:
    view = View(world_size=4, plan=plan, members=members("a", "b", "c"), left={"d": left("d")})
    action = decided(StopJob, deciding(0.0, PATIENCE_S), view, 100.0)
    assert action.code == EXIT_FATAL_LOSS
    assert [loss.member for loss in action.losses] == (["d"] if plan else [])


def test_application_error_stops_instead_of_a_takeover() -> None:
    view = replace(all_well(), members=members("a", "b", "c"), left={"d": left("d", "failed", reason="exit", code=3)})
    action = decided(StopJob, decider(), view, 100.0)
    assert action.code == 3


def test_failure_of_a_member_that_the_plan_goes_on_without_stops_nothing() -> None:
    failed = {"d": left("d", outcome="failed", reason="exit", detail="3", code=3, generation=0)}
    without = replace(all_well(), plan=takeover(SECOND, {"d"}), members=members("a", "b", "c"), left=failed)
    assert isinstance(decider().decide(without, 100.0), Wait)
    fatal = replace(without, plan=takeover(SECOND, {"c", "d"}), members=members("a", "b"))
    assert not isinstance(decider().decide(fatal, 100.0), StopJob)
    restart = RestartRecord(generation=0, after_epoch=3, ranks={})
    assert isinstance(decider().decide(replace(fatal, restart=restart), 100.0), StopJob)


def test_fatal_plan_ends_planning() -> None:
    plan = takeover(SECOND, ["a", "b"])
    assert plan.lost_roles
    gone = {name: left(name, "fatal", code=86) for name in "cd"}
    assert decider().decide(View(world_size=4, plan=plan, left=gone), 100.0) == Wait()


def test_fatal_loss_that_only_a_worker_knows_of_stops() -> None:
    view = replace(all_well(), members=members("a", "b", "c"), left={"d": left("d", "fatal", code=86)})
    action = decided(StopJob, decider(), view, 100.0)
    assert action.code == 86


def test_job_that_is_being_stopped_plans_nothing() -> None:
    assert decider().decide(View(world_size=4, plan=SECOND, stopping=True), 100.0) == Wait()


# -- suspicions -------------------------------------------------------------------------------------


def test_two_accusers_convict_after_a_moment() -> None:
    one = decider()
    view = replace(all_well(), suspicions=suspicions(("a", "b"), ("c", "b")))
    assert one.decide(view, 100.0) == Wait(100.0 + SETTLE_S)
    action = decided(WritePlan, one, view, 100.0 + SETTLE_S)
    assert action.plan == takeover(SECOND, ["b"])
    assert (action.losses[0].reason, action.losses[0].detail) == ("suspects", "a, c")


@pytest.mark.parametrize("abrupt", [True, False])
def test_a_member_that_has_ended_in_mid_training_is_no_loss(abrupt: bool) -> None:
    """The others cannot go on as its script would; a member that has said that it has ended is accused by mistake."""
    ended = left("b", "finished", reason="exit", detail="0", code=0, step=7, abrupt=abrupt)
    view = View(world_size=4, plan=SECOND, members=members("a", "c", "d"), left={"b": ended})
    assert decider().decide(view, 100.0) == Wait()
    action = decider().decide(replace(view, suspicions=suspicions(("a", "b"))), 100.0)
    if abrupt:
        assert isinstance(action, StopJob) and action.code == 1
        assert (
            "rank 1 (b) has ended with exit code 0 (the newest step that it told: 7), while rank 0 goes on"
            in action.reason
        )
    else:
        assert action == Wait()


def test_single_accuser_needs_a_silent_agent() -> None:
    one = decider()
    view = replace(all_well(), suspicions=suspicions(("a", "b")))
    assert one.decide(view, 100.0) == Wait(100.0 + SETTLE_S)
    assert one.decide(view, 100.0 + SETTLE_S) == Ask(("b",))
    view = replace(view, asked={"b": HealthRequest(id="b", epoch=2)})
    assert one.decide(view, 100.0 + SETTLE_S) == Wait(100.0 + SETTLE_S + PATIENCE_S)
    action = decided(WritePlan, one, view, 100.0 + SETTLE_S + PATIENCE_S)
    assert action.plan.lost == ("b",)


def test_nobody_is_dropped_at_the_word_of_one_before_it_was_asked() -> None:
    """Also where a loss waits longer for companions than an accused member has for its reply."""
    one = deciding(2 * PATIENCE_S, PATIENCE_S)
    view, now = replace(all_well(), suspicions=suspicions(("a", "b"))), 100.0
    while isinstance(action := one.decide(view, now), Wait):
        assert action.until is not None
        now = action.until
    assert action == Ask(("b",))
    view = replace(view, asked={"b": HealthRequest(id="b", epoch=2)})
    assert one.decide(view, now) == Wait(now + PATIENCE_S), "it has all its time"
    view = replace(view, healthy=well("b"))
    assert decided(WritePlan, one, view, now + PATIENCE_S).plan == replace(SECOND, epoch=3)


def test_vouched_member_stays_and_connections_are_made_anew() -> None:
    one = decider()
    view = replace(all_well(), suspicions=suspicions(("a", "b")), healthy=well("b"))
    one.decide(view, 100.0)
    action = decided(WritePlan, one, view, 100.0 + SETTLE_S + PATIENCE_S)
    assert action.plan == replace(SECOND, epoch=3)
    assert not action.losses


def test_who_cannot_be_reconnected_is_divided_once() -> None:
    """The third time in a row one of the two has to go: the one with fewer roles, else that with the higher slot.

    The second time may be the end of the old connection, which one of them has noticed late.
    """
    one = deciding(0.0, 0.0)
    for epoch, by, accused in ((2, "a", "c"), (3, "c", "a")):
        plan = replace(SECOND, epoch=epoch)
        accusing = suspicions((by, accused), epoch=epoch)
        view = replace(all_well(), plan=plan, suspicions=accusing, healthy=well(accused, epoch))
        again = decided(WritePlan, one, view, 100.0)
        assert again.plan == replace(SECOND, epoch=epoch + 1)
    view = replace(all_well(), plan=again.plan, suspicions=suspicions(("c", "a"), epoch=4), healthy=well("a", 4))
    action = decided(WritePlan, one, view, 101.0)
    assert action.plan == takeover(again.plan, ["c"])
    assert (action.losses[0].member, action.losses[0].reason, action.losses[0].detail) == ("c", "suspects", "a")
    # Another pair is another matter, and so is the same one later.
    for epoch, accused, by in ((3, "d", "a"), (7, "c", "a")):
        plan = replace(SECOND, epoch=epoch)
        view = replace(
            all_well(), plan=plan, suspicions=suspicions((by, accused), epoch=epoch), healthy=well(accused, epoch)
        )
        one = deciding(0.0, 0.0)
        one.decide(replace(all_well(), suspicions=suspicions(("a", "c")), healthy=well("c")), 100.0)
        action = one.decide(view, 200.0)
        assert isinstance(action, WritePlan) and not action.losses


def test_an_attempt_that_was_never_written_counts_for_no_reconnection() -> None:
    one = deciding(0.0, 0.0)
    view = replace(all_well(), suspicions=suspicions(("a", "c")), healthy=well("c"))
    for _ in range(4):  # etcd does not answer
        assert decided(WritePlan, one, view, 100.0).plan == replace(SECOND, epoch=3)


def test_of_two_who_cannot_reach_each_other_the_one_that_can_be_replaced_goes() -> None:
    # Nobody but d holds stage 0 now, which it has taken over from a.
    plan = takeover(SECOND, ["a"])
    one = deciding(0.0, 0.0)
    view = replace(all_well(), plan=plan, members=members("b", "c", "d"))
    for epoch in (3, 4):
        accused = replace(view, plan=plan, suspicions=suspicions(("c", "d"), epoch=epoch), healthy=well("d", epoch))
        plan = decided(WritePlan, one, accused, 100.0).plan
        assert not plan.lost
    again = replace(view, plan=plan, suspicions=suspicions(("c", "d"), epoch=5), healthy=well("d", 5))
    action = decided(WritePlan, one, again, 101.0)
    assert action.plan.lost == ("c",) and not action.plan.lost_roles
    assert takeover(plan, ["d"]).lost_roles


def test_only_living_members_accuse_others_in_this_epoch() -> None:
    for useless in (
        suspicions(("a", "b"), ("c", "b"), epoch=1),
        suspicions(("x", "b"), ("y", "b")),
        suspicions(("a", "x"), ("c", "x")),
    ):
        assert deciding(0.0, 0.0).decide(replace(all_well(), suspicions=useless), 100.0) == Wait()


def test_known_loss_comes_before_accusations() -> None:
    view = replace(
        all_well(),
        members=members("a", "c", "d"),
        left={"b": left("b")},
        suspicions=suspicions(("a", "c"), ("d", "c")),
    )
    action = decided(WritePlan, deciding(0.0, 0.0), view, 100.0)
    assert action.plan.lost == ("b",)


def test_mutual_accusations_convict_one_at_a_time() -> None:
    accusations = [("a", "b"), ("b", "a"), ("c", "b"), ("d", "b"), ("c", "a")]
    view = replace(all_well(), suspicions=suspicions(*accusations))
    action = decided(WritePlan, deciding(0.0, 0.0), view, 100.0)
    assert action.plan.lost == ("b",)


# -- members that cannot enter an epoch --------------------------------------------------------------


def stuck_in(plan: Plan, *names: str) -> View:
    """All members of ``plan`` are there, and those of ``names`` cannot abort their communicators."""
    told = suspicions(*((name, name) for name in names), epoch=plan.epoch)
    return replace(all_well(), plan=plan, members=members(*plan.members), suspicions=told)


def test_a_member_that_cannot_enter_an_epoch_is_let_go() -> None:
    one = decider()
    assert one.decide(stuck_in(SECOND, "b"), 100.0) == Wait(100.0 + SETTLE_S)
    action = decided(WritePlan, one, stuck_in(SECOND, "b"), 100.0 + SETTLE_S)
    assert action.plan == takeover(SECOND, ["b"]) and not action.plan.lost_roles
    assert (action.losses[0].member, action.losses[0].reason, action.losses[0].detail) == ("b", "abort", "reset")
    # What it has told in another epoch, or has taken back, does not count.
    for told in (suspicions(("b", "b"), epoch=1), {"b": SuspicionRecord(by="b", epoch=2, accused={})}):
        assert deciding(0.0, 0.0).decide(replace(all_well(), suspicions=told), 100.0) == Wait()


@pytest.mark.parametrize("stuck", [("a", "b"), ("b", "c"), ("a", "b", "c"), ("a", "b", "c", "d")])
def test_several_that_cannot_are_let_go_in_turn_as_long_as_others_hold_their_stages(stuck: tuple[str, ...]) -> None:
    """Each plan gives the others another chance; who holds a stage alone is kept, whatever it takes."""
    one, plan, left_over = deciding(0.0, 0.0), SECOND, list(stuck)
    while isinstance(action := one.decide(stuck_in(plan, *left_over), 100.0), WritePlan):
        (gone,) = action.plan.lost
        assert gone in left_over and not action.plan.lost_roles and action.plan.epoch == plan.epoch + 1
        plan, left_over = action.plan, [name for name in left_over if name != gone]
    assert len(left_over) < len(stuck), "somebody was let go"
    assert all(takeover(plan, [name]).lost_roles for name in left_over), "and nobody else"
    who = ", ".join(left_over)
    assert action == Wait(None, f"{who} cannot go on, and nobody else holds their stages" if who else None)


def test_those_go_first_whose_stages_others_hold_that_can_go_on() -> None:
    """Of what a, c and d hold, d alone has nothing that b holds, too."""
    action = decided(WritePlan, deciding(0.0, 0.0), stuck_in(SECOND, "a", "c", "d"), 100.0)
    assert [sorted(held) for held in holders_of(SECOND, {}).values()] == [
        ["a", "d"], ["a", "b"], ["b", "c"], ["c", "d"],
    ]  # fmt: skip
    assert action.plan.lost == ("c",)


def test_who_gives_up_in_the_end_is_a_loss_like_any_other() -> None:
    plan = takeover(SECOND, ["a"])  # nobody but d holds stage 0
    view = stuck_in(plan, "d")
    assert decided(Wait, deciding(0.0, 0.0), view, 100.0).reason is not None
    ended = left("d", reason="exit", detail="75", code=75)
    action = decided(
        WritePlan,
        deciding(0.0, 0.0),
        replace(view, members=members("b", "c"), left={"d": ended}),
        100.0,
    )
    assert action.plan.lost_roles, "the job starts again from its newest checkpoint"


def test_other_accusations_are_judged_beside_those_that_are_kept() -> None:
    plan = takeover(SECOND, ["a"])
    told = suspicions(("d", "d"), ("b", "c"), ("d", "c"), epoch=plan.epoch)
    action = decided(WritePlan, deciding(0.0, 0.0), replace(stuck_in(plan), suspicions=told), 100.0)
    assert action.plan.lost == ("c",)


# -- whole lives ------------------------------------------------------------------------------------


@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.lists(
        st.tuples(st.floats(0, 0.1), st.integers(0, 11), st.sampled_from(["signal", "silent", "finish"])), max_size=12
    ),
)
def test_any_order_of_losses_ends_with_a_plan_of_the_living(
    pipelines: int, stages: int, faults: list[tuple[float, int, str]]
) -> None:
    ids = [f"m{slot}" for slot in range(pipelines * stages)]
    everybody = {name: records.member(name, slot) for slot, name in enumerate(ids)}
    plan: Plan = with_redundancy(initial_plan(ids), Layout(pipelines, stages), True)
    living, gone, one, now = dict(everybody), dict[str, LeftRecord](), decider(), 100.0

    def settle(until: float) -> None:
        nonlocal plan
        at = now
        for _ in range(50):
            view = View(world_size=len(ids), plan=plan, members=living, left=gone)
            action = one.decide(view, at)
            assert not isinstance(action, StopJob)
            if isinstance(action, WritePlan):
                assert action.plan.epoch == plan.epoch + 1
                assert action.losses
                plan = action.plan
            elif action.until is None or action.until > until:
                return
            else:
                assert action.until > at
                at = action.until
        raise AssertionError("the leader does not come to rest")

    for gap, slot, kind in faults:
        settle(now + gap)
        now += gap
        name = ids[slot % len(ids)]
        if living.pop(name, None) is not None and kind != "silent":
            outcome = "finished" if kind == "finish" else "lost"
            gone[name] = left("a", outcome).model_copy(update={"id": name})
    settle(now + 1.0)
    if not plan.lost_roles:
        finished = {name for name, record in gone.items() if record.outcome == "finished"}
        assert set(living) <= set(plan.members)
        assert set(plan.members) <= set(living) | finished
        assert set(plan.owners) <= set(plan.members)


# -- the mirror and what status makes of it -----------------------------------------------------------


def test_status_of_a_job_that_lost_a_member() -> None:
    plan = takeover(SECOND, ["b"])
    progress = ProgressRecord(id="a", step=5, checkpoint="/x"), ProgressRecord(id="c", step=6)
    found = records.mirror(plan, *map(member, "acd"), LeaderRecord(id="c"), left("b"), *progress)
    assert found.plan == plan
    status = LiveJob("j").view(overview(found))
    assert (status.epoch, status.step, status.checkpoint_path) == (3, 6, "/x")
    by_id = {m.id: m for m in status.members}
    assert by_id["a"].roles == ((0, 0), (0, 1))
    assert by_id["d"].shadows == ((0, 0),)
    assert by_id["c"].leader
    assert by_id["b"].state == "lost (signal SIGKILL)"
    found.apply(WatchEvent("delete", Keys.LEADER, KeyValue(Keys.LEADER, "", 10, 0)))
    newer = replace(SECOND, epoch=plan.epoch + 1)
    found.apply(WatchEvent("put", Keys.PLAN, KeyValue(Keys.PLAN, newer.to_json(), 11, 1)))
    assert found.leader is None
    assert found.plan == newer


def test_an_heir_may_be_chosen_by_what_is_known_of_the_lost_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has run out, and its record is gone with it."""
    zones = {"a": "z1", "b": "z2", "c": "z1"}
    known = {name: member(name).model_copy(update={"zone": zone}) for name, zone in zones.items()}
    there = {name: record for name, record in known.items() if name != "a"}
    settled = with_redundancy(initial_plan(["a", "b", "c"]), Layout(3, 1), False)
    view = View(world_size=3, plan=settled, members=there, known=known, left={"a": left("a")})
    for prefer, heir in ((planner._preference, "b"), (lambda heir, gone, duties: (heir.zone != gone.zone,), "c")):
        monkeypatch.setattr(planner, "_preference", prefer)
        action = deciding(0.0, PATIENCE_S).decide(view, 100.0)
        assert isinstance(action, WritePlan) and action.plan.owners == (heir, "b", "c")
