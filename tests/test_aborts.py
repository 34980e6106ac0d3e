"""Communicators that block or fail when they are aborted hold nobody up."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from bamboo_ds.comm import groups as module
from bamboo_ds.comm.inner import NCCL
from bamboo_ds.control.messages import Heartbeat, PlanPush, parse_to_agent
from bamboo_ds.errors import EXIT_EVICTED, AbortFailed, Isolated
from bamboo_ds.topology import Plan
from bamboo_ds.worker.channel import WorkerChannel
from bamboo_ds.worker.exit import exit_code_of
from bamboo_ds.worker.job import Job

pytestmark = pytest.mark.claim("reference/limits.md")


def plan(epoch: int, *others: str) -> Plan:
    return Plan(epoch=epoch, owners=("a", *others), members=("a", *others))


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


def test_one_that_blocks_or_fails_holds_nobody_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_ABORT_TIMEOUT_S", 0.2)
    release = threading.Event()
    blocks, fails, ends = Communicator(release.wait), Communicator(fail), Communicator()
    worker.have(blocks, fails, ends)
    epoch = worker.job.session.current
    try:
        worker.push(plan(2))
        assert all(each.called.wait(20) for each in (blocks, fails, ends))
        worker.heartbeats(4)
        with pytest.raises(AbortFailed, match=r"NCCL group group0 of a, b \(epoch 1\) still blocks after 0 s") as first:
            worker.job.enter(worker.job.channel.wait_plan(1, 20))
        assert exit_code_of(first.value) == EXIT_EVICTED, "a loss of this member, no failure of the script"
    finally:
        release.set()
    epoch.groups._aborts.join()
    with pytest.raises(AbortFailed, match=r"group1 of a, b .* has failed: unhandled device error"):
        epoch.groups.await_aborts()
    assert "NCCL group group1 of a, b (epoch 1) could not be aborted" in caplog.text
    worker.heartbeats(2)


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
