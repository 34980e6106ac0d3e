"""The states of a slot: what it is told, and what follows."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.control.agent.mailbox import Mailbox
from bamboo_ds.control.agent.rejoin import Rejoin
from bamboo_ds.control.agent.slot import EndWorker, Slot
from bamboo_ds.control.agent.states import State
from bamboo_ds.control.agent.waiting import WaitingAgent
from bamboo_ds.control.messages import ExitNotice
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import LeaveRecord, LeftRecord, RestartRecord, StopRecord
from bamboo_ds.errors import EXIT_EVICTED, EXIT_FATAL_LOSS, EXIT_LEFT
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.store.records import KeyValue, Snapshot
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.topology.planner import initial_plan, takeover, with_redundancy
from tests.support.settings import agent

FIRST = initial_plan(["me", "b", "c"])
RUNNING = with_redundancy(FIRST, Layout(1, 3), True)
WITHOUT = takeover(RUNNING, {"me"})
FATAL = takeover(takeover(RUNNING, {"b"}), {"c"})
STOP = StopRecord(code=3, reason="asked", by="b")
RESTART = RestartRecord(generation=1, after_epoch=9, ranks={0: (1, 2)}, extra={2: 7}, checkpoint="/c")


def slot(*plans: Plan, **settings: Any) -> Slot:
    """One that has heard of ``plans``."""
    found = Slot(agent(**{"world_size": 3, "max_restarts": 10, **settings}), "me")
    for plan in plans:
        found.note_plan(plan)
    return found


def end(it: Slot, status: int, **more: Any) -> str:
    """What it means that the worker has ended."""
    notice = ExitNotice(reason="ValueError", **more) if more else None
    return it.note_end(status, 1.0, None, notice, None).outcome


def test_it_runs_when_a_plan_lists_it() -> None:
    assert slot().state is State.STARTING
    assert slot(FIRST).state is State.RUNNING
    joining = slot(WITHOUT, script_rank=1)
    assert joining.state is State.JOINING and not joining.admitted


def test_an_evicted_member_rejoins_unless_it_is_told_to_end() -> None:
    it = slot(RUNNING)
    order = it.note_plan(WITHOUT)
    assert order is not None and not order.ask, "its worker stops by itself"
    assert it.state is State.EVICTED and end(it, EXIT_EVICTED) == "evicted"
    assert (it.state, it.next) == (State.REJOINING, None)
    found = agent(slot=9)
    it.start_with(found)
    assert it.next == found
    it.terminate()
    assert (it.state, it.next) == (State.ENDED, None)


@pytest.mark.parametrize("first", ["evicted", "doomed"])
def test_an_evicted_member_of_a_job_that_starts_again_waits_for_that(first: str) -> None:
    it = slot(RUNNING)
    fatal = replace(WITHOUT, epoch=WITHOUT.epoch + 1, lost_roles=(1,), members=RUNNING.members, lost=())
    if first == "evicted":
        it.note_evicted()
        it.note_plan(fatal)
    else:
        it.note_plan(fatal)
        assert it.note_plan(replace(WITHOUT, epoch=fatal.epoch + 1)) is not None
        assert it.note_plan(replace(WITHOUT, epoch=fatal.epoch + 2)) is None, "it was told once"
    assert it.state is State.ADRIFT and not it.may_leave and not it.failure_ends_job
    assert end(it, 0) == "fatal" and it.state is State.WAITING


def test_a_member_that_leaves_has_not_been_evicted() -> None:
    it = slot(RUNNING)
    assert it.note_notice("told to") is None and it.state is State.LEAVING
    boundary = replace(WITHOUT, when="boundary", lost=())
    assert it.note_plan(boundary) is None and it.state is State.FREE
    assert end(it, EXIT_LEFT) == "left" and it.state is State.ENDED


def test_one_that_waits_to_be_admitted_leaves_at_once() -> None:
    it = slot(WITHOUT, script_rank=1)
    assert it.note_notice("told to") == EndWorker(5.0)
    assert end(it, -signal.SIGTERM) == "left" and it.state is State.ENDED


def test_after_a_fatal_loss_it_waits_for_the_restart() -> None:
    it = slot(RUNNING, FATAL)
    assert end(it, EXIT_FATAL_LOSS) == "fatal" and it.state is State.WAITING
    after = it.next
    assert after is not None and after.waiting and after.after_epoch == FATAL.epoch
    waiting = Slot(after, "me")
    assert (waiting.state, waiting.next) == (State.WAITING, None)
    waiting.note_restart(replace_restart(after_epoch=FATAL.epoch - 1))
    assert waiting.state is State.WAITING, "an older one"
    waiting.note_restart(replace_restart(after_epoch=FATAL.epoch))
    assert waiting.state is State.PLACED and waiting.next is not None
    told = waiting.next
    assert (told.rank, told.generation, told.restart_from, told.extra) == (1, 1, "/c", {2: 7})
    assert not told.waiting and not told.joins


def replace_restart(**changes: Any) -> RestartRecord:
    return RESTART.model_copy(update=changes)


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [({"max_restarts": 0}, "fatal"), ({"feeder": True}, "lost")],  # a restart waits for those that are "fatal"
)
def test_where_nothing_starts_again_it_ends(settings: dict[str, Any], outcome: str) -> None:
    it = slot(RUNNING, FATAL, **settings)
    assert end(it, EXIT_FATAL_LOSS) == outcome
    assert (it.state, it.next) == (State.ENDED, None)


def test_one_that_waits_rejoins_a_job_that_has_started_without_it() -> None:
    it = slot(waiting=True)
    it.note_plan_without(FIRST)
    it.note_plan_without(FATAL)
    assert it.state is State.WAITING, "the engines are not built, or the job has to start again"
    it.note_plan_without(RUNNING)
    assert it.state is State.REJOINING
    it.note_stop(STOP)
    assert it.departure is None, "it learns of that when it looks for a place"
    it.note_signal(signal.SIGTERM)
    assert it.state is State.ENDED and it.departure is not None
    assert (it.departure.outcome, it.departure.code) == ("lost", 128 + signal.SIGTERM)


@pytest.mark.parametrize(("code", "outcome"), [(0, "stopped"), (3, "stopped")])
def test_one_that_waits_ends_with_the_job(code: int, outcome: str) -> None:
    it = slot(waiting=True)
    it.note_stop(STOP.model_copy(update={"code": code}))
    assert it.departure is not None and (it.departure.outcome, it.departure.code) == (outcome, code)
    it.note_signal(signal.SIGUSR1)
    assert it.departure.outcome == outcome, "it has ended"


def test_one_that_waits_leaves_when_somebody_asks_it_to() -> None:
    waiting = WaitingAgent(agent(waiting=True))
    waiting.callbacks().on_leave(LeaveRecord(id=waiting._id, source="web", detail="the job's page"))
    waiting._mailbox.handle_all()
    left = waiting._slot.departure
    assert left is not None and waiting._slot.state is State.ENDED
    assert (left.outcome, left.detail, left.code) == ("left", "leave, web: the job's page", 0)


def leaves(it: Slot) -> None:
    it.note_notice("leave, file: x")
    it.note_plan(replace(WITHOUT, when="boundary", lost=()))


def fails(it: Slot) -> None:
    it.note_error(OSError("x"))


@pytest.mark.parametrize(
    ("told", "status", "outcome", "code"),
    [
        ((), 0, "finished", 0),
        ((), 1, "failed", 1),
        ((), -signal.SIGKILL, "lost", 137),
        ((), EXIT_EVICTED, "evicted", 0),
        ((), EXIT_LEFT, "evicted", 0),
        ((), EXIT_FATAL_LOSS, "fatal", EXIT_FATAL_LOSS),
        ((fails,), 0, "failed", 1),
        ((leaves,), EXIT_LEFT, "left", 0),
        ((leaves,), 1, "left", 0),  # the script has made something else of the exception
        ((leaves,), 0, "finished", 0),
        ((leaves,), -signal.SIGKILL, "lost", 137),
        ((leaves, Slot.terminate), -signal.SIGTERM, "left", 0),
        ((leaves, lambda it: it.note_stop(STOP)), EXIT_LEFT, "stopped", 3),
    ],
)
def test_what_the_end_of_a_worker_means(
    told: Sequence[Callable[[Slot], object]], status: int, outcome: str, code: int
) -> None:
    it = slot(RUNNING)
    for each in told:
        each(it)
    departure = it.note_end(status, 100.0, None, None, None)
    assert (departure.outcome, departure.code) == (outcome, code)
    assert (departure.detail == "leave, file: x") == (outcome == "left")


def test_the_end_of_a_worker_that_failed() -> None:
    """By itself: a loss where others may go on without it, and told with its cause."""

    def departure(status: int, notice: ExitNotice | None = None, **settings: Any) -> LeftRecord:
        return slot(RUNNING, **settings).note_end(status, 5.0, None, notice, 7)

    spared: dict[str, Any] = {"on_exception": "takeover"}
    raised = ExitNotice(reason="ValueError: x", failed=True)
    done = ExitNotice(reason="", done=True)
    assert (departure(13).outcome, departure(13).error) == ("failed", None)
    assert slot(WITHOUT, script_rank=1).note_end(1, 5.0, None, None, 7).outcome == "lost", "it has only tried to join"
    lost = departure(13, **spared)
    assert (lost.outcome, lost.error, lost.code, lost.step) == ("lost", "exit code 13", 13, 7)
    assert lost.detail == "exit code 13"
    assert departure(1, raised, **spared).error == "ValueError: x"
    # It did not get to its exit code.
    assert (departure(-9, raised).outcome, departure(-9, raised).code) == ("failed", 1)
    assert departure(-9, done).outcome == "finished"
    assert departure(0).abrupt and not departure(0, done).abrupt
    assert not slot(RUNNING).note_end(0, 5.0, None, None, None).abrupt, "what is no training job"
    hung = slot(RUNNING).note_end(-9, 5.0, ("heartbeat", 3.0), None, None)
    assert (hung.outcome, hung.reason, hung.since, hung.detail) == ("lost", "heartbeat", 3.0, "none for 2.0 s")
    # Whatever it does, these are no failures.
    for status in (0, -9, 86, 87, 88):
        assert departure(status, **spared).error is None


def test_a_stop_ends_the_worker_and_the_slot() -> None:
    it = slot(RUNNING)
    assert it.note_stop(STOP) == EndWorker(5.0)
    assert end(it, -signal.SIGTERM) == "stopped" and it.state is State.ENDED


def test_a_failure_ends_the_job_unless_it_goes_on_without_the_member() -> None:
    it = slot(RUNNING)
    assert it.failure_ends_job
    departure = it.note_end(1, 1.0, None, ExitNotice(reason="ValueError", failed=True), None)
    assert departure.outcome == "failed" and it.state is State.ENDED
    assert it.note_superseded(departure).outcome == "evicted" and it.state is State.REJOINING
    assert not slot(RUNNING, WITHOUT).failure_ends_job
    assert not slot(WITHOUT, script_rank=1).failure_ends_job
    assert not slot(RUNNING, on_exception="takeover").failure_ends_job


def test_a_job_that_has_gone_on_with_a_newer_version_is_over_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with a result, as one that finds no job."""
    caplog.set_level(logging.ERROR, LOGGER)
    plan = initial_plan(["a"]).to_json().replace('"schema":5', '"schema":6')
    store = SimpleNamespace(get_prefix=lambda prefix: Snapshot({Keys.PLAN: KeyValue(Keys.PLAN, plan, 1, 1)}, 1))
    it = slot()
    it.state = State.REJOINING
    rejoin = Rejoin("me", it)
    monkeypatch.setattr(rejoin, "_open", lambda: nullcontext(store))
    rejoin.find(Mailbox())
    assert it.state is State.ENDED and it.next is None
    assert "the bamboo_ds of this member reads 5: " in caplog.text
