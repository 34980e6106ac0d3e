"""Members that leave on notice: they hand over between two iterations, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.control.leader.actions import StartDataWorkers, StopJob, Wait, WritePlan
from bamboo_ds.control.leader.departures import Deadlines
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.overview import overview
from bamboo_ds.control.registry.records import (
    LayoutRecord,
    LeftRecord,
    MemberRecord,
    NoticeRecord,
    WorkerState,
)
from bamboo_ds.topology import Candidate, Layout
from bamboo_ds.topology.planner import initial_plan, with_redundancy
from tests.support.records import left, member, mirror
from tests.support.settings import deciding

pytestmark = pytest.mark.claim(
    "guides/clusters.md",
    "guides/elastic.md",
    "guides/notices.md",
    "reference/cli.md",
    "reference/events.md",
    "reference/limits.md",
)


class Simulated:
    """A job whose members do at once what the plan says. Members are called ``m<slot>``."""

    def __init__(
        self,
        hosts: Sequence[str],
        stages: int | None = None,
        iterators: bool = True,
        copying: bool = True,
        apart: bool = False,
    ):
        self.layout = Layout(len(hosts) // (stages or len(hosts)), stages or len(hosts))
        self.members = {f"m{slot}": self.record(slot, host, slot) for slot, host in enumerate(hosts)}
        self.iterators, self.copying, self.apart, self.every_rank = iterators, copying, apart, False
        candidates = [Candidate(m.id, m.slot, m.host, m.zone, m.script_rank) for m in self.members.values()]
        self.plan = with_redundancy(initial_plan(list(self.members)), self.layout, True, candidates)
        self.written: list[WritePlan] = []
        self.left: dict[str, LeftRecord] = {}
        self.near_deadline: frozenset[str] = frozenset()
        self.waiting: set[str] = set()
        self.workers: dict[str, WorkerState] = {}
        self.one = deciding(0.0, 1.0)
        self.enter()

    @staticmethod
    def record(slot: int, host: str, script_rank: int, **more: Any) -> MemberRecord:
        return member(f"m{slot}", slot, host=host, script_rank=script_rank, **more)

    def join(self, slot: int, script_rank: int, feeder: bool = False) -> None:
        """A member has registered and built its engine."""
        self.members[f"m{slot}"] = self.record(slot, f"h{slot}", script_rank, joiner=True, feeder=feeder)
        self.waiting.add(f"m{slot}")

    def notice(self, *slots: int) -> None:
        for slot in slots:
            self.members[f"m{slot}"] = self.members[f"m{slot}"].model_copy(update={"state": "leaving"})

    def enter(self) -> None:
        """All workers enter the plan; the copies that it asks for are made, if anything is copied at all."""
        for name in self.plan.members:
            copies = [rank for rank, builder in self.plan.builders if builder == name] if self.copying else []
            self.workers[name] = WorkerState(id=name, epoch=self.plan.epoch, replicas=tuple(copies))
            self.waiting.discard(name)
        for name in set(self.members) - set(self.plan.members) - self.waiting:
            del self.members[name]
            self.left[name] = left_record(name)

    @property
    def view(self) -> View:
        told = {
            "layout": self.layout,
            "redundant": True,
            "iterators": self.iterators,
            "apart": self.apart,
            "every_rank": self.every_rank,
        }
        reports = {member: LayoutRecord(id=member, **told) for member in self.members}
        return View(
            world_size=self.layout.size,
            plan=self.plan,
            members=self.members,
            left=self.left,
            reports=reports,
            workers=self.workers,
            near_deadline=self.near_deadline,
        )

    def step(self) -> Any:
        """One decision of the leader; a plan that it writes is the newest, but nobody has entered it."""
        action = self.one.decide(self.view, 100.0)
        assert not isinstance(action, StopJob), action
        if isinstance(action, WritePlan):
            assert action.plan.epoch == self.plan.epoch + 1
            self.written.append(action)
            self.plan = action.plan
        return action

    def settle(self) -> Any:
        """Until the leader has nothing more to write; returns what it does then."""
        for _ in range(20):
            action = self.step()
            if not isinstance(action, WritePlan):
                return action
            self.check(action)
            self.enter()
        raise AssertionError("the leader does not come to rest")

    def check(self, action: WritePlan) -> None:
        """What every plan on the way must keep to."""
        plan, before = action.plan, self.written[-2].plan if len(self.written) > 1 else None
        assert not action.losses and not plan.interrupts() and not plan.lost_roles and not plan.lost
        assert {*plan.owners, *(s for s in plan.shadows if s)} <= set(plan.members)
        if before is not None:
            for rank, owner in enumerate(plan.owners):
                held = {before.owners[rank], before.shadows[rank], *(m for r, m in before.builders if r == rank)}
                assert owner in held, "nobody may own what it does not hold"


def left_record(name: str, outcome: str = "left") -> LeftRecord:
    return left(name, int(name[1:]), outcome, detail="x", since=99.0)


def hosts(count: int) -> list[str]:
    return [f"h{slot}" for slot in range(count)]


# -- decisions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", range(4))
def test_a_member_hands_over_and_is_gone(slot: int) -> None:
    job = Simulated(hosts(4))
    job.notice(slot)
    job.settle()
    assert [len(action.plan.members) for action in job.written] == [4, 3], "first the copies, then the exchange"
    assert job.written[0].plan.owners == ("m0", "m1", "m2", "m3")
    assert f"m{slot}" not in {*job.plan.owners, *job.plan.shadows, *job.plan.members}
    assert None not in job.plan.shadows
    assert "is leaving" in job.written[1].reason


def test_several_at_once_leave_together() -> None:
    job = Simulated(hosts(4))
    job.notice(0, 2)
    job.settle()
    assert set(job.plan.members) == {"m1", "m3"}
    assert len(job.written) == 2


def test_all_members_of_a_host_leave() -> None:
    job = Simulated(["a", "a", "b", "b", "c", "c"], iterators=False)
    job.notice(2, 3)
    job.settle()
    assert set(job.plan.members) == {"m0", "m1", "m4", "m5"}
    host = {m: r.host for m, r in job.members.items()}
    assert all(s and host[o] != host[s] for o, s in zip(job.plan.owners, job.plan.shadows, strict=True))


def test_the_last_members_stay() -> None:
    job = Simulated(hosts(3))
    job.notice(0, 1, 2)
    assert job.settle() == Wait()
    assert not job.written
    job.join(3, 1)
    job.settle()
    assert job.plan.members == ("m0", "m3"), "one that draws batches stays; all the rest is with the new one"
    assert set(job.plan.owners) == {"m3"}


def test_a_joiner_that_leaves_is_not_admitted() -> None:
    job = Simulated(hosts(2))
    job.join(2, 0)
    job.notice(2)
    assert job.settle() == Wait()
    assert job.plan.members == ("m0", "m1")


def test_whoever_is_short_of_time_does_not_wait_for_copies() -> None:
    job = Simulated(hosts(4), copying=False)
    job.notice(2)
    assert job.settle() == Wait()
    assert job.plan.builders and "m2" in job.plan.members
    job.near_deadline = frozenset(["m2"])
    job.settle()
    assert job.plan.owners == ("m0", "m1", "m1", "m3")
    assert "m2" not in job.plan.members
    assert job.written[1].reason.startswith("short of time: ")
    assert job.plan.builders, "what has lost its shadow gets another one"


def test_whose_state_nobody_else_has_does_not_hold_up_the_others() -> None:
    job = Simulated(hosts(4), copying=False)
    job.notice(1, 2)  # m1 shadows what m2 owns
    job.near_deadline = frozenset(["m1", "m2"])
    job.settle()
    assert "m1" not in job.plan.members or "m2" not in job.plan.members
    assert not job.plan.lost_roles


def test_the_last_one_that_draws_batches_stays_until_another_one_does() -> None:
    job = Simulated(hosts(4))
    job.notice(0, 3)
    action = job.settle()
    assert action == StartDataWorkers((0,))
    assert job.plan.members == ("m0", "m1", "m2"), "one of the two is enough"
    assert "m0" not in {*job.plan.owners, *job.plan.shadows}
    job.members["m4"] = job.record(4, "h4", 0, joiner=True, feeder=True)
    job.waiting.add("m4")
    assert isinstance(job.settle(), Wait)
    assert job.plan.members == ("m1", "m2", "m4")


def test_each_end_that_gives_other_batches_needs_a_member() -> None:
    """Who leaves stays until another one draws its batches; for who is lost a worker is started at once."""
    job = Simulated(hosts(4), apart=True)
    job.notice(0)
    assert job.settle() == StartDataWorkers((0,))
    assert "m0" in job.plan.members and "m0" not in {*job.plan.owners, *job.plan.shadows}
    job.join(4, script_rank=0, feeder=True)
    assert job.settle() == Wait()
    assert job.plan.members == ("m1", "m2", "m3", "m4")
    del job.members["m3"]
    job.left["m3"] = left_record("m3", "lost")
    assert isinstance(job.step(), WritePlan) and job.plan.lost == ("m3",)
    job.enter()
    assert job.step() == StartDataWorkers((3,))
    job.join(5, script_rank=3, feeder=True)
    action = job.step()
    assert isinstance(action, WritePlan) and action.plan.interrupts()
    assert (action.plan.members[-1], action.plan.script_ranks[-1]) == ("m5", 3)


def test_all_ends_without_a_member_get_one_at_once() -> None:
    job = Simulated(hosts(4), stages=2, apart=True)
    for lost in ("m0", "m1"):
        del job.members[lost]
        job.left[lost] = left_record(lost, "lost")
    assert isinstance(job.step(), WritePlan) and set(job.plan.lost) == {"m0", "m1"} and not job.plan.lost_roles
    job.enter()
    assert job.step() == StartDataWorkers((0, 1))
    job.join(4, script_rank=1, feeder=True)
    assert isinstance(job.step(), WritePlan) and (job.plan.members[-1], job.plan.script_ranks[-1]) == ("m4", 1)
    job.enter()
    assert job.step() == StartDataWorkers((0,))


def test_who_leaves_is_not_called_back_to_draw_batches() -> None:
    """Released at last, since it is short of time, it is registered until its worker has ended."""
    job = Simulated(hosts(4), apart=True)
    del job.members["m3"]
    job.left["m3"] = left_record("m3", "lost")
    assert isinstance(job.step(), WritePlan) and job.plan.lost == ("m3",)
    job.enter()
    job.join(4, script_rank=3)
    job.notice(4)
    assert job.step() == StartDataWorkers((3,))
    job.join(5, script_rank=3)
    action = job.step()
    assert isinstance(action, WritePlan) and action.plan.members[-1] == "m5"


def test_who_is_needed_no_more_to_draw_batches_is_not_admitted_again() -> None:
    """It is registered until its worker has ended, and would be lost then."""
    job = Simulated(hosts(4), apart=True)
    job.join(4, script_rank=0, feeder=True)
    job.workers["m4"] = WorkerState(id="m4", epoch=job.plan.epoch)  # of a plan that has listed it
    del job.members["m1"]
    job.left["m1"] = left_record("m1", "lost")
    assert isinstance(job.step(), WritePlan) and job.plan.lost == ("m1",)
    kept = job.members["m4"]
    job.enter()
    job.members["m4"] = kept
    assert isinstance(job.step(), WritePlan) and job.plan.members == ("m0", "m2", "m3")
    job.enter()
    job.members["m4"] = kept
    del job.members["m0"]
    job.left["m0"] = left_record("m0", "lost")
    assert isinstance(job.step(), WritePlan) and job.plan.lost == ("m0",)
    job.enter()
    job.members["m4"] = kept
    assert job.step() == StartDataWorkers((0,))


def test_without_iterators_nobody_is_needed_to_draw_batches() -> None:
    job = Simulated(hosts(4), iterators=False)
    job.notice(0, 3)
    assert job.settle() == Wait()
    assert job.plan.members == ("m1", "m2")


@pytest.mark.parametrize("every_rank", [False, True])
def test_workers_that_a_restart_has_started_besides_stay_where_every_rank_is_needed(every_rank: bool) -> None:
    """A script has an engine without the block, which nobody else could compute with."""
    job = Simulated(["h0", "h0", "h1", "h1"])
    job.every_rank = every_rank
    for slot in (1, 3):
        job.members[f"m{slot}"] = job.members[f"m{slot}"].model_copy(update={"feeder": True})
    assert isinstance(job.settle(), Wait)
    assert set(job.plan.owners) == ({"m0", "m1", "m2", "m3"} if every_rank else {"m0", "m2"})


def test_where_every_rank_is_needed_no_worker_joins_to_draw_batches() -> None:
    job = Simulated(hosts(4))
    job.every_rank, job.one = True, deciding(0.0, 1.0, max_restarts=1)
    job.notice(0, 3)
    assert isinstance(job.settle(), Wait), "those that leave draw on as long as they can"
    for name in job.plan.members:
        if name in ("m0", "m3"):
            del job.members[name]
            job.left[name] = left_record(name, "lost")
    action = job.step()
    assert isinstance(action, WritePlan) and not action.plan.lost_roles
    job.enter()
    action = job.step()
    assert isinstance(action, WritePlan) and action.plan.lost_roles, "the job starts again"
    assert "nobody draws the batches of rank 0 any more" in action.reason


def test_a_worker_that_ends_before_it_has_drawn_is_not_started_for_ever() -> None:
    """Its script has gone another way while it was replayed; a restart has a worker for each rank."""
    job = Simulated(hosts(4))
    job.one = deciding(0.0, 1.0, max_restarts=1)
    job.notice(0, 3)
    job.settle()
    for name in {"m0", "m3"} & set(job.members):  # the last one that draws
        del job.members[name]
        job.left[name] = left_record(name, "lost")
    assert isinstance(job.step(), WritePlan)
    job.enter()
    assert isinstance(job.step(), StartDataWorkers)
    job.join(4, 0, feeder=True)
    job.one.decide(job.view, 100.0)  # it is on its way
    del job.members["m4"]
    job.left["m4"] = left_record("m4", "finished").model_copy(update={"slot": 4, "step": 7})
    assert isinstance(job.step(), StartDataWorkers), "it has trained, and has come to its end"
    job.left["m4"] = job.left["m4"].model_copy(update={"step": None})
    action = job.step()
    assert isinstance(action, WritePlan) and action.plan.lost_roles, "the job starts again"
    assert "worker m4, which was to do so, has ended before" in action.reason


def failing(job: Simulated, slot: int, reason: str = "exit") -> None:
    """A worker that was to draw the batches of rank 0 has ended before it could."""
    job.join(slot, 0, feeder=True)
    job.one.decide(job.view, 100.0)  # it is on its way
    del job.members[f"m{slot}"]
    ended = {"slot": slot, "reason": reason, "detail": "AssertionError: no device"}
    job.left[f"m{slot}"] = left_record(f"m{slot}", "lost").model_copy(update=ended)


@pytest.mark.parametrize("leaves", [False, True])
def test_workers_that_fail_before_they_draw_are_not_started_for_ever(leaves: bool) -> None:
    """Those that were preempted do not count."""
    job = Simulated(hosts(4), apart=True)
    job.one = deciding(0.0, 1.0, max_restarts=1)
    if leaves:
        job.notice(0)
    else:
        del job.members["m0"]
        job.left["m0"] = left_record("m0", "lost")
        assert isinstance(job.step(), WritePlan)
        job.enter()
    assert job.settle() == StartDataWorkers((0,))
    for slot, reason in enumerate(("exit", "signal", "exit", "signal"), start=4):
        failing(job, slot, reason)
        assert job.step() == StartDataWorkers((0,))
    failing(job, 8)
    action = job.step()
    why = "each of 3 workers that were to do so has failed, the last one, m8, by AssertionError: no device"
    if leaves:
        assert action == Wait(None, f"who draws the batches of rank 0 cannot leave, since {why}")
    else:
        assert isinstance(action, WritePlan) and action.plan.lost_roles, "the job starts again"
        assert action.reason == f"nobody draws the batches of rank 0 any more, and {why}"


def test_a_loss_while_a_member_leaves() -> None:
    job = Simulated(hosts(4))
    job.notice(2)
    while "m2" in job.plan.members:
        job.step()
        if "m2" in job.plan.members:
            job.enter()
    # The workers have yet to come to the boundary, and m2 with them.
    del job.members["m0"]
    job.left["m0"] = left_record("m0", "lost")
    action = job.step()
    assert isinstance(action, WritePlan)
    assert action.plan.interrupts() and action.plan.lost == ("m0",) and not action.plan.lost_roles
    assert "m2" not in action.plan.members


@pytest.mark.parametrize("told", [True, False])
def test_who_vanishes_on_the_way_out_is_a_loss(told: bool) -> None:
    job = Simulated(hosts(4))
    job.notice(2)
    while "m2" in job.plan.members:
        job.step()
        if "m2" in job.plan.members:
            job.enter()
    assert isinstance(job.step(), Wait), "the others wait for the boundary"
    del job.members["m2"]
    if told:
        job.left["m2"] = left_record("m2", "lost")
    before = job.plan
    action = job.step()
    assert isinstance(action, WritePlan)
    assert action.plan == replace(before, epoch=before.epoch + 1, when="now")
    assert [loss.member for loss in action.losses] == ["m2"]
    job.enter()
    assert not isinstance(job.step(), WritePlan) or not job.written[-1].losses, "it is lost only once"


def test_who_has_left_in_order_is_no_loss() -> None:
    job = Simulated(hosts(4))
    job.notice(2)
    while "m2" in job.plan.members:
        job.step()
        if "m2" in job.plan.members:
            job.enter()
    del job.members["m2"]
    job.left["m2"] = left_record("m2")  # it went first; the others have yet to enter
    assert isinstance(job.step(), Wait)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(2, 8),
    shape=st.booleans(),
    noticed=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=8),
    iterators=st.booleans(),
    copying=st.booleans(),
)
def test_any_notices(slots: int, shape: bool, noticed: list[tuple[int, bool]], iterators: bool, copying: bool) -> None:
    """Whoever can, leaves; nothing is lost on the way, and nothing goes to somebody who does not hold it."""
    job = Simulated(hosts(slots), slots // 2 if shape and slots % 2 == 0 and slots > 2 else None, iterators, copying)
    for slot, hurried in noticed:
        if f"m{slot}" not in job.members:
            continue
        job.notice(slot)
        job.near_deadline |= {f"m{slot}"} if hurried else set()
        job.settle()
    staying = {m for m, r in job.members.items() if r.state == "running"}
    if staying and copying:
        assert staying >= {*job.plan.owners, *(s for s in job.plan.shadows if s)}
        extra = set(job.plan.members) - staying
        assert len(extra) <= (job.layout.pipelines if iterators else 0)
    assert set(job.plan.owners) <= set(job.members)


# -- time -----------------------------------------------------------------------------------------------


def notice_of(
    deadline_s: float | None, iteration_s: float | None = None, member: str = "m1"
) -> dict[str, NoticeRecord]:
    record = NoticeRecord(
        id=member, kind="preempt", source="aws", detail="x", deadline_s=deadline_s, iteration_s=iteration_s
    )
    return {member: record}


def test_half_of_the_time_is_for_copies() -> None:
    times = Deadlines()
    times.note(notice_of(120.0), 1000.0)
    assert times.near(1059.0) == frozenset() and times.wake(1059.0) == 1060.0
    assert times.near(1060.0) == {"m1"} and times.wake(1060.0) is None
    times.note(notice_of(30.0), 1061.0)  # a nearer one
    times.note(notice_of(500.0), 1062.0)  # a later one
    times.note(notice_of(None), 1063.0)
    assert times.near(1063.0) == {"m1"}


@pytest.mark.parametrize(("deadline_s", "iteration_s", "after"), [(3.0, None, 1.0), (30.0, 8.0, 6.0), (1.0, None, 0.0)])
def test_time_for_some_iterations_must_be_left(deadline_s: float, iteration_s: float | None, after: float) -> None:
    times = Deadlines()
    times.note(notice_of(deadline_s, iteration_s), 50.0)
    assert (times.wake(40.0) or 0.0) <= 50.0 + after
    assert times.near(50.0 + after) == {"m1"}
    assert not after or times.near(50.0 + after - 0.01) == frozenset()


def test_who_does_not_know_when_is_never_short_of_time() -> None:
    times = Deadlines()
    times.note(notice_of(None), 50.0)
    assert times.wake(50.0) is None and times.near(1e9) == frozenset()


# -- what is told of it --------------------------------------------------------------------------------


def test_status_tells_who_leaves_and_who_has_left() -> None:
    job = Simulated(hosts(3))
    job.notice(1)
    found = overview(mirror(job.plan, *job.members.values(), left_record("m7")))
    states = {each.id: each.state for each in found.members}
    assert states == {"m0": "running", "m1": "leaving", "m2": "running", "m7": "left (x)"}


def block(folder: Path, *sources: str) -> dict[str, Any]:
    notices: dict[str, Any] = {"sources": list(sources), "poll_s": 0.1}
    if "file" in sources:
        notices["file"] = str(folder / "notice-{slot}")
    return {"notices": notices, "redundancy": {"verify_every": 2}}
