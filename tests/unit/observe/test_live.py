"""The live model: what it says of a recorded job, of one that never was, and that it stays small and quick."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.events import Event, read_events
from bamboo_ds.observe.goodput import Accountant, account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.observe.grid import Grid
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.observe.series import Series
from bamboo_ds.observe.view import LOSSES, PLANS, POINTS, RECENT, LiveView, Overview
from bamboo_ds.topology.plan import Plan
from bamboo_ds.topology.planner import takeover
from bamboo_ds.topology.roles import Layout
from tests.support.synthetic_job import SyntheticJob, four, thousand
from tests.support.written import Written

pytestmark = pytest.mark.claim("guides/observing.md")

RECORDED = Path(__file__).parents[2] / "support" / "recorded_job.jsonl"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def calls(run: Callable[[], object]) -> int:
    """How many functions ``run`` calls: a cost that no machine changes."""
    count = 0

    def note(_: object, what: str, __: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def recorded() -> list[Event]:
    """A job of four members: one is lost in step 10, another one joins; three checkpoints."""
    return list(read_events(RECORDED))


def fold(events: list[Event], overview: Overview | None = None) -> LiveView:
    job = LiveJob(events[0].job)
    for event in events:
        job.add(event)
    return job.view(overview)


def test_a_recorded_job() -> None:
    events = recorded()
    view = fold(events)
    assert (view.state, view.exit_code, view.epoch, view.step) == ("ended", 0, 6, 25)
    assert (view.pipelines, view.stages, view.unshadowed) == (1, 4, ())
    assert {role.state for role in view.roles} == {"shadowed"}
    assert [role.owner[:2] for role in view.roles] == ["m0", "m1", "m2", "m4"]
    assert [(each.name, each.state, each.present) for each in view.members] == [
        *((name, "running", True) for name in ("m0", "m1", "m2", "m4")),
        ("m3", "lost (signal SIGKILL)", False),
    ]
    (loss,) = view.losses
    assert ([each.name for each in loss.members], loss.step, loss.before, loss.left) == (["m3"], 10, 4, 3)
    assert [(each.role, each.before[:2], each.after[:2]) for each in loss.moved] == [((0, 3), "m3", "m2")]
    told = [event for event in events if isinstance(event, ev.Recovered)]
    assert (loss.survivors, loss.recovered, loss.fatal) == (3, True, False)
    assert loss.pause_seconds == max(event.pause_seconds for event in told)
    assert loss.replicas_back_seconds == pytest.approx(1.547, abs=0.01)
    assert [plan.kind for plan in view.plans] == ["start", "start", "loss", "change", "change", "change"]
    assert [plan.unshadowed for plan in view.plans] == [None, 0, 2, 2, 2, 0]
    assert [(plan.joined[0][:2] if plan.joined else None) for plan in view.plans[2:]] == [None, None, "m4", None]
    assert [each.step for each in view.checkpoints] == [7, 14, 21]
    assert view.checkpoint == view.checkpoints[-1]
    totals = view.totals
    assert (totals.steps, totals.samples, totals.losses_by_reason) == (25, 25 * 24, {"signal": 1})
    assert (totals.joined, totals.takeovers, totals.checkpoints) == (1, 1, 3)
    assert view.history.step == tuple(range(1, 26)) and view.history == view.recent
    assert view.history.loss[0] == pytest.approx(3.593264)
    assert any("died (SIGKILL); stage 3 taken over by m2 in 0.07 s" in line.text for line in view.story)
    report = account(events)
    assert view.account is not None and view.account.goodput == pytest.approx(report.goodput)
    assert view.account.categories == pytest.approx({each.value: s for each, s in report.categories.items()})
    assert LiveView.model_validate_json(view.model_dump_json()) == view


def test_the_state_of_the_job() -> None:
    """After each event of the recorded job."""
    job, states = LiveJob("recorded"), []
    for event in recorded():
        job.add(event)
        state = job.view().state
        if not states or states[-1] != state:
            states.append(state)
    assert states == ["starting", "building", "training", "recovering", "training", "ended"]


def test_a_fatal_loss_and_a_restart() -> None:
    job = Written("a", "b")
    job.plan(5, 2, ["a", "b"], ["a", "b"], ["b", "a"], pipelines=1)
    job.steps(1, 2, 5, epoch=2)
    job.lose(10, "a")
    job.lose(10, "b")
    live, states = LiveJob("gpt"), []
    job.add(ev.Fatal, 10.1, 2, stages=[(0, 0)], members=["a", "b"], checkpoint="/c/2")
    job.add(ev.Restart, 12, 2, number=1, slots=[0, 1], checkpoint="/c/2", step=2)
    job.add(ev.MemberJoined, 14, 3, member_id="c", host="h", rank=0)
    job.plan(14, 3, ["c"], ["c", "c"])
    job.plan(15, 4, ["c"], ["c", "c"], pipelines=1)
    job.step(17, 3, epoch=4)
    for event in job.events:
        live.add(event)
        states.append((event.event, live.view().state))
    assert states[-6:] == [
        ("fatal", "waiting"),
        ("restart", "restarting"),
        ("member_joined", "restarting"),
        ("plan", "building"),
        ("plan", "training"),  # it has steps already
        ("step", "training"),
    ]
    view = live.view()
    assert [(loss.fatal, len(loss.members)) for loss in view.losses] == [(True, 2)]
    assert view.totals.restarts == 1 and view.unshadowed == ((0, 0), (0, 1)), "the job has had replicas"


def test_another_start_in_the_file_begins_anew() -> None:
    first, second = recorded(), four("recorded").events
    assert fold([*first, *second]) == fold(second)
    assert fold([*first, *four("another").events]) == fold(first)


def test_where_the_events_are_others_etcd_tells() -> None:
    made = four()
    told = made.overview()
    view = LiveJob("gpt-demo").view(told)
    assert (view.step, view.epoch, view.pipelines) == (told.step, told.plan.epoch if told.plan else 0, 1)
    assert (view.state, view.time, view.losses) == ("training", None, ())
    assert [member.state for member in view.members] == ["running"] * len(told.members)
    whole = fold(made.events, told)
    assert whole.members[0].leader and whole.members[0].zone == told.members[0].zone
    assert [(role.owner, role.shadow) for role in whole.roles] == [(role.owner, role.shadow) for role in view.roles]
    assert sum(member.load or 0.0 for member in whole.members) == pytest.approx(4.0)
    assert any(role.state == "copying" for role in whole.roles)


def test_members_follow_the_newest_plan_where_the_events_are_ahead() -> None:
    """etcd's copy lags behind: a view never shows a plan beside states of the one before."""
    made = four()
    told = made.overview()
    stale = tuple(member.model_copy(update={"state": "building"}) for member in told.members)
    leaving = stale[0].model_copy(update={"state": "leaving"})
    view = fold(made.events, replace(told, plan=None, members=(leaving, *stale[1:])))
    listed = {member.id for member in fold(made.events, told).members if member.state == "running"}
    assert view.epoch > 0 and len(listed) > 1
    for member in view.members[1:]:
        assert not member.present or member.state == ("running" if member.id in listed else "evicted")
    assert next(member for member in view.members if member.id == leaving.id).state == "leaving"


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("slices", [1, 2])
def test_the_predicted_effect_of_a_loss_is_the_planners(sharded: bool, slices: int) -> None:
    layout = Layout(4, 3, sharded=sharded, slices=slices)
    owners = tuple(f"m{rank % 7}-a" for rank in range(12))
    shadows = tuple(f"m{(rank + 1) % 7}-a" if rank % 3 else None for rank in range(12))
    members = tuple(f"m{slot}-a" for slot in range(7))
    plan = Plan(1, owners, members, layout, shadows)
    duties = Grid.of_plan(plan).duties
    for member in members:
        after = takeover(plan, [member])
        fatal = [(layout.role(rank).pipeline, layout.role(rank).stage) for rank in after.lost_roles]
        assert duties[member].fatal == fatal
        assert {each.role for each in duties[member].heirs} == {
            (role.pipeline, role.stage) for role in plan.owned_by(member)
        } - set(fatal)
        for each in duties[member].heirs:
            rank = each.role[1] * 4 + each.role[0]
            if shadows[rank] is not None:
                assert each.heir == after.owners[rank] == shadows[rank]


# -- bounds ---------------------------------------------------------------------------------------------


def test_a_series_keeps_means_and_the_longest() -> None:
    series = Series(8)
    for step in range(1, 101):
        series.add(step, float(step), None if step == 1 else float(step), 5.0 if step == 50 else 1.0)
    found = series.history()
    assert len(found.step) <= 8 and found.stride == 16 and found.step[0] == 16 and found.step[-1] == 100
    assert found.loss[0] == pytest.approx(sum(range(2, 17)) / 15)
    assert max(found.slowest) == 5.0 and sum(seconds > 1.0 for seconds in found.seconds) == 1
    newest = Series(8, newest=True)
    for step in range(1, 101):
        newest.add(step, float(step), float("nan"), 1.0)
    assert newest.history().step == tuple(range(93, 101)) and newest.history().loss == (None,) * 8


def endless(rounds: int) -> SyntheticJob:
    made = SyntheticJob("endless", 1, 4)
    for number in range(rounds):
        made.train(9).lose(number % 4).train(1).heal().join(4 + number).save()
        made.owners[number % 4] = made.members[-1]
        made._plan("moved")
    return made


def size(thing: Any, seen: set[int]) -> int:
    """Bytes of what hangs on ``thing``, enums, types and what was seen apart."""
    if id(thing) in seen or isinstance(thing, type | Category):
        return 0
    seen.add(id(thing))
    total = sys.getsizeof(thing)
    parts = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else []
    parts += list(thing) if isinstance(thing, list | tuple | set | frozenset) or hasattr(thing, "maxlen") else []
    parts += list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    return total + sum(size(part, seen) for part in parts)


def test_memory_is_bounded() -> None:
    """A loss leaves no more behind than the names of who was lost and who came, and the path of a checkpoint."""
    sizes, made = [], endless(300)
    job = LiveJob("endless")
    for number, event in enumerate(made.events):
        job.add(event)
        if number in (len(made.events) // 3, len(made.events) - 1):
            view = job.view()
            sizes.append(size(job, set()))
    assert len(view.history.step) <= POINTS and len(view.recent.step) == RECENT
    assert (len(view.losses), len(view.plans)) == (LOSSES, PLANS)
    assert view.totals.losses == 300
    assert (sizes[1] - sizes[0]) / 200 < 1500, sizes


def late() -> list[Event]:
    """A member is built for long before it is in a plan; another is lost, and a survivor tells so after the step."""
    job = Written("a", "b")
    job.steps(1, 7, at=10)
    job.join(12, 2, "c")
    job.lose(25, "b")
    job.plan(25, 2, "a", owners="aa", lost=["b"])
    job.step(29, 8, seconds=5, epoch=2)
    job.recover(29.2, 2, "a", step=8, pause=2.2, redo=2)
    job.steps(9, 12, at=29, epoch=2)
    job.plan(37, 3, "ac", owners="aa")
    job.steps(13, 14, at=37, epoch=3)
    job.plan(41, 4, "ac", owners="ac")
    job.steps(15, 20, at=41, epoch=4)
    return job.events


@pytest.mark.parametrize("unsettled", [64, 8, 4])
def test_the_running_account_is_the_account(unsettled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each moment of a job it is what the report on the events so far says."""
    monkeypatch.setattr("bamboo_ds.observe.goodput.accountant._UNSETTLED", unsettled)
    for events in (recorded(), endless(40).events, four().events, late()):
        accountant = Accountant()
        for number, event in enumerate(events):
            accountant.add(event)
            if number % 29 and number != len(events) - 1:
                continue
            whole, found = account(events[: number + 1]), accountant.snapshot()
            assert found.seconds == pytest.approx(whole.seconds, abs=1e-6)
            assert (found.steps, found.repeated_steps) == (whole.steps, whole.repeated_steps)
            assert found.wall_seconds == pytest.approx(whole.wall_seconds)
            assert found.categories == pytest.approx(whole.categories, abs=1e-6)


@pytest.mark.parametrize("kept", [90, 37])
def test_steps_that_a_restart_repeats_are_taken_back(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.observe.goodput.accountant._UNSETTLED", 8)
    job = Written("a", "b")
    job.steps(1, kept, 5)
    job.add(ev.CheckpointSaved, 5 + 2 * kept, step=kept, path="/c", seconds=0.0, bytes=1)
    job.steps(kept + 1, 100, 5 + 2 * kept)
    job.lose(205, "a")
    job.add(ev.Fatal, 205.1, 1, stages=[(0, 0)], members=["a"], checkpoint="/c")
    job.add(ev.Restart, 206, 1, number=1, slots=[0, 1], checkpoint="/c", step=100)
    job.join(208, 2, "c", "d")
    job.plan(208, 2, ["c", "d"], ["c", "d"])
    job.steps(kept + 1, 150, 209, epoch=2)
    accountant = Accountant()
    for event in job.events:
        accountant.add(event)
        if isinstance(event, ev.Restart):  # it says itself how many steps are lost
            assert (accountant.snapshot().steps, accountant.snapshot().repeated_steps) == (kept, 100 - kept)
    whole, found = account(job.events), accountant.snapshot()
    assert (found.steps, found.repeated_steps) == (whole.steps, whole.repeated_steps) == (150, 100 - kept)
    # Of a stretch that is taken back in part its mean counts.
    assert found.categories == pytest.approx(whole.categories, abs=2.0)
    assert found.categories[Category.WASTED] > 0


def test_badput_does_not_go_back() -> None:
    job, before = LiveJob("recorded"), dict[str, float]()
    for event in recorded():
        job.add(event)
        now = job.badput()
        # What was seen as rest may turn out to have been a copy that is complete now, or a checkpoint.
        kept = {each: seconds for each, seconds in before.items() if each not in ("standby", "other")}
        assert all(now[each] >= seconds - 1e-9 for each, seconds in kept.items()), (event, before, now)
        before = now
    assert before["detection_and_agreement"] > 0 and before["initialization"] > 0


def test_a_thousand_members_cost_little() -> None:
    """No kind of event costs more than some calls for each, most cost none; what has not changed is not made again."""
    made = thousand()
    events, told = made.events, made.overview()
    job = LiveJob("gpt-1024")
    costs: dict[str, list[int]] = {}
    for event in events:
        costs.setdefault(event.event, []).append(calls(lambda event=event: job.add(event)))  # type: ignore[misc]
    for kind, found in costs.items():
        # A plan, and the account of a step and of a checkpoint, go through the members; many steps are settled at once.
        most = 300 + 10 * 1024 * (kind in ("plan", "step", "checkpoint_saved"))
        assert sum(found) / len(found) < most, kind
    view = job.view(told)
    job.add(events[-1].model_copy(update={"time": events[-1].time + timedelta(seconds=0.01)}))
    again = job.view(told)
    assert again.members is view.members and again.roles is view.roles, "made again although nothing has changed"
    assert len(view.model_dump_json()) < 1_500_000
