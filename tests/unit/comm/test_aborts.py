"""Communicators that block or fail when they are aborted hold nobody up."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from bamboo_ds.comm import aborts
from bamboo_ds.comm import groups as groups_module
from bamboo_ds.comm.aborts import Guard, Guarded
from bamboo_ds.comm.hub import Signal
from bamboo_ds.comm.inner import NCCL
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.comm.links import Links
from bamboo_ds.comm.work import BambooWork
from bamboo_ds.control.messages import Heartbeat, PlanPush, parse_to_agent
from bamboo_ds.control.registry.records import SuspicionRecord
from bamboo_ds.errors import EXIT_EVICTED, AbortFailed, EpochChanged, Isolated
from bamboo_ds.topology import Plan
from bamboo_ds.worker.channel import WorkerChannel
from bamboo_ds.worker.exit import exit_code_of
from bamboo_ds.worker.job import Job

pytestmark = pytest.mark.claim("reference/limits.md")


def plan(epoch: int, *others: str) -> Plan:
    return Plan(epoch=epoch, owners=("a", *others), members=("a", *others))


def without(epoch: int) -> Plan:
    """One that has dropped the worker."""
    return Plan(epoch=epoch, owners=("b",), members=("b",), lost=("a",))


class Communicator:
    """In the place of NCCL's: only its abort is called."""

    def __init__(self, action: Callable[[], object] = lambda: None) -> None:
        self._action = action
        self.called = threading.Event()

    def abort(self) -> None:
        self.called.set()
        self._action()


def fail() -> None:
    raise RuntimeError("unhandled device error")


class Worker:
    """A job's worker end, alone in its epoch, with the test as its agent."""

    def __init__(self) -> None:
        self._agent, theirs = socket.socketpair()
        self._agent.settimeout(20)
        self._lines = self._agent.makefile("rb")
        channel = WorkerChannel(theirs, member="a", job="j", rank=0, world_size=1, address="127.0.0.1")
        self.job = Job(channel, None, timedelta(seconds=20))
        channel.start(self.job._plan_arrived, lambda: None)
        self.push(plan(1))
        self.job.enter(channel.wait_plan(0, 20))

    def push(self, plan: Plan) -> None:
        self._agent.sendall(PlanPush(plan=plan).to_line())

    def have(self, *communicators: Communicator) -> None:
        groups: Any = self.job.session.current.groups._groups
        for number, communicator in enumerate(communicators):
            groups[f"group{number}", NCCL, ("a", "b")] = communicator

    def heartbeats(self, count: int) -> None:
        """Return when so many more have come."""
        while count:
            line = self._lines.readline()
            assert line, "the channel has ended"
            count -= isinstance(parse_to_agent(line), Heartbeat)

    def suspicion(self) -> SuspicionRecord:
        """The next one that has come."""
        until = time.monotonic() + 20
        while True:
            assert time.monotonic() < until, "nothing but heartbeats"
            line = self._lines.readline()
            assert line, "the channel has ended"
            message = parse_to_agent(line)
            if isinstance(message, SuspicionRecord):
                return message

    def close(self) -> None:
        self.job.session.close()
        self.job.channel.close()
        self._lines.close()
        self._agent.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has no patience with an abort before it tells."""
    monkeypatch.setattr(groups_module, "_ABORT_TIMEOUT_S", 0.1)


@pytest.fixture
def held() -> Iterator[Communicator]:
    """One that blocks until the test ends."""
    release = threading.Event()
    yield Communicator(release.wait)
    release.set()


def entering(worker: Worker, after: int = 1) -> Future[None]:
    """The worker enters the newest plan, on another thread: the test is its agent."""
    future: Future[None] = Future()

    def enter() -> None:
        try:
            worker.job.enter(worker.job.channel.wait_plan(after, 20))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=enter, daemon=True).start()
    return future


def test_one_that_blocks_or_fails_holds_nobody_up(
    worker: Worker, impatient: None, held: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    fails, ends = Communicator(fail), Communicator()
    worker.have(held, fails, ends)
    worker.push(plan(2))
    assert all(each.called.wait(20) for each in (held, fails, ends))
    worker.heartbeats(4)
    entered = entering(worker)
    told = worker.suspicion()
    assert (told.by, told.epoch, set(told.accused)) == ("a", 2, {"a"})
    assert "NCCL group group0 of a, b (epoch 1) still blocks after 0 s" in told.accused["a"]
    worker.heartbeats(2)
    assert not entered.done(), "it is not ended before somebody has decided that"
    worker.push(without(3))
    with pytest.raises(AbortFailed, match=r"group0 of a, b .*may go on writing .*others take over its stages") as first:
        entered.result(20)
    assert exit_code_of(first.value) == EXIT_EVICTED, "a loss of this member, no failure of the script"
    assert "NCCL group group1 of a, b (epoch 1) could not be aborted" in caplog.text


def test_one_that_has_failed_is_told_at_once(worker: Worker) -> None:
    worker.have(Communicator(fail))
    worker.push(plan(2))
    entered = entering(worker)
    assert "group0 of a, b (epoch 1) has failed: unhandled device error" in worker.suspicion().accused["a"]
    worker.push(without(3))
    with pytest.raises(AbortFailed):
        entered.result(20)


def test_the_end_of_another_worker_is_another_chance(worker: Worker, impatient: None) -> None:
    """NCCL's abort may wait for a process that is stuck itself, until that has ended."""
    release = threading.Event()
    worker.have(Communicator(release.wait))
    worker.push(plan(2, "b"))
    entered = entering(worker)
    assert worker.suspicion().epoch == 2
    worker.push(plan(3))
    with pytest.raises(EpochChanged, match="epoch 2 ended while it was entered"):
        entered.result(20)
    again = entering(worker, 2)
    assert worker.suspicion().epoch == 3, "it asks again"
    release.set()
    again.result(20)
    assert worker.job.session.epoch == 3
    taken_back = worker.suspicion()
    assert (taken_back.epoch, taken_back.accused) == (3, {})


def test_a_plan_for_later_is_told_as_well(worker: Worker, impatient: None, held: Communicator) -> None:
    """What is told of an older plan does not count; this one leaves everybody where it is."""
    worker.have(held)
    worker.push(plan(2))
    entered = entering(worker)
    assert worker.suspicion().epoch == 2
    worker.push(replace(plan(3), when="boundary"))
    assert worker.suspicion().epoch == 3 and not entered.done()
    worker.push(without(4))
    with pytest.raises(AbortFailed):
        entered.result(20)


def test_a_worker_that_nobody_can_replace_gives_up_in_the_end(
    worker: Worker, impatient: None, held: Communicator
) -> None:
    recovery = worker.job.settings.recovery.model_copy(update={"plan_timeout_s": 0.3})
    worker.job.settings = worker.job.settings.model_copy(update={"recovery": recovery})
    worker.have(held)
    worker.push(plan(2))
    entered = entering(worker)
    assert worker.suspicion().epoch == 2
    with pytest.raises(AbortFailed, match=r"nothing has helped for bamboo.recovery.plan_timeout_s = 0.3 s"):
        entered.result(20)


def test_those_that_end_are_waited_for(worker: Worker) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        assert release.wait(20)

    worker.have(Communicator(slow))
    worker.push(plan(2))
    assert started.wait(20)
    before = worker.job.session.current if worker.job.session.aborted is None else None
    assert before is None
    threading.Timer(0.1, release.set).start()
    worker.job.enter(worker.job.channel.wait_plan(1, 20))
    assert release.is_set() and worker.job.session.epoch == 2


# -- calls and aborts --------------------------------------------------------------------------------------------


class Called:
    """A communicator whose calls and works block as long as the test likes; notes what overlaps with its abort."""

    def __init__(self) -> None:
        self.entered, self.release, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.inside = self.overlapping = 0

    def allreduce(self, *tensors: Any) -> Any:
        self.inside += 1
        self.entered.set()
        self.release.wait(20)
        self.inside -= 1
        return Asked(self)

    def abort(self) -> None:
        self.overlapping += self.inside
        self.aborted.set()


class Asked(dist.Work):  # type: ignore[misc]
    """A work of it: torch's ask their communicator, under a lock that the abort holds."""

    def __init__(self, communicator: Called) -> None:
        super().__init__()
        self.asked = 0
        self._communicator = communicator

    def is_completed(self) -> bool:
        self.asked += 1
        assert not self._communicator.aborted.is_set(), "here the process would stand still"
        return False


class Life:
    """An epoch that ends."""

    def __init__(self) -> None:
        self.over = False

    def check(self, operation: str) -> None:
        if self.over:
            raise EpochChanged(operation)


def launching() -> tuple[Called, Guarded, threading.Thread]:
    """A communicator whose epoch has ended while a call is under way, and the thread of that call."""
    called, life = Called(), Life()
    guarded = Guarded(called, Guard(life.check))
    launch = threading.Thread(target=guarded.allreduce, daemon=True)
    launch.start()
    assert called.entered.wait(20)
    life.over = True
    return called, guarded, launch


def test_an_abort_waits_for_a_launch_and_none_begins_after_it() -> None:
    called, guarded, launch = launching()
    abort = threading.Thread(target=guarded.abort, daemon=True)
    abort.start()
    assert not called.aborted.wait(0.1), "the launch is under way"
    called.release.set()
    assert called.aborted.wait(20) and called.overlapping == 0
    with pytest.raises(EpochChanged, match="allreduce"):
        guarded.allreduce()
    for thread in (launch, abort):
        thread.join(20)


def test_an_abort_does_not_wait_for_a_launch_that_only_it_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "_CALL_S", 0.05)
    called, guarded, launch = launching()
    guarded.abort()
    assert called.overlapping == 1
    called.release.set()
    launch.join(20)


def test_works_are_not_asked_while_their_communicator_is_aborted() -> None:
    called, life = Called(), Life()
    called.release.set()
    lifetime: Any = Lifetime(1, lambda member, reason: None)
    nobody: Any = SimpleNamespace(changed=Signal(), leave=lambda epoch, over: None)
    links = Links(lifetime, nobody, ("a", "b"), "a", ("", ""))
    inner = Guarded(called, Guard(life.check)).allreduce()
    work = BambooWork(links, inner, "allreduce", ("a", "b"), kind=NCCL, device=torch.device("cpu"))
    assert not work.is_completed() and not work.through and inner.asked == 2
    life.over = True  # which the work has not heard of: it is looking just now
    called.abort()
    assert work.through and work.is_completed() and isinstance(work.exception(), EpochChanged)
    with pytest.raises(EpochChanged):
        work.wait()
    assert inner.asked == 2


# -- heartbeats --------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_followed_ends_no_heartbeat(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(reason: str, epoch: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(worker.job.session, "abort", refuse)
    caplog.set_level(logging.ERROR)
    worker.push(plan(2))
    with pytest.raises(Isolated, match=r"cannot follow a new plan: .*Too many open files"):
        worker.job.channel.wait_plan(2, 20)
    worker.heartbeats(3)
    assert "the plan of epoch 2 cannot be followed" in caplog.text
