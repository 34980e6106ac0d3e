"""The worker's end of the channel, with the test as its agent."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pydantic import ValidationError

from bamboo_ds.control.messages import (
    EventReport,
    ExitNotice,
    Heartbeat,
    Message,
    Peers,
    PlanPush,
    parse_to_agent,
    parse_to_worker,
)
from bamboo_ds.control.registry.records import LayoutRecord, SuspicionRecord
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.worker.channel import WorkerChannel
from tests.support.settings import unchecked

PLAN = Plan(epoch=1, owners=("a", "b"), members=("a", "b"))


class Agent:
    """The other end; ``plans`` and ``closed`` are what the channel called back."""

    def __init__(self, heartbeat_timeout_s: float = 5.0) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(10)
        self._file = self.sock.makefile("rb")
        self.channel = WorkerChannel(
            theirs,
            member="a",
            job="j",
            rank=0,
            world_size=2,
            address="127.0.0.1",
            settings=JobSettings(values=unchecked(heartbeat_timeout_s=heartbeat_timeout_s)),
        )
        self.plans: list[Plan] = []
        self.closed = threading.Event()

    def start(self) -> Agent:
        self.channel.start(self.plans.append, self.closed.set)
        return self

    def push(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(message.to_line() for message in messages))

    def read(self, kind: type[Message]) -> Message:
        """The next message of ``kind``; others are skipped."""
        while line := self._file.readline():
            message = parse_to_agent(line)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the channel ended without {kind.__name__}")

    def read_until(self, expected: Message, timeout_s: float = 20.0) -> None:
        """Skips messages until ``expected`` has come; fails with what came in its place."""
        came: list[Message] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            came.append(self.read(type(expected)))
            if came[-1] == expected:
                return
        raise AssertionError(f"waited for {expected}, the last of {len(came)} was {came[-1]}")

    def close(self) -> None:
        self.channel.close()
        self._file.close()
        self.sock.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    before = len(os.listdir("/proc/self/fd"))
    one = Agent()
    yield one
    one.close()
    assert not [t for t in threading.enumerate() if t.name == "bamboo-channel"]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_messages_survive_their_line() -> None:
    plan = replace(PLAN, layout=Layout(1, 2), shadows=("b", None), lost=("c",), lost_roles=(1,))
    assert parse_to_worker(PlanPush(plan=plan).to_line()) == PlanPush(plan=plan)
    for message in (
        Heartbeat(step=3, checkpoint="/x"),
        LayoutRecord(id="a", layout=Layout(2, 3), redundant=True),
        SuspicionRecord(by="a", epoch=1, accused={"b": "a\nb"}),
        EventReport(kind="step", fields={"loss": 0.5}),
        ExitNotice(reason="fatal"),
    ):
        assert message.to_line().count(b"\n") == 1
        assert parse_to_agent(message.to_line()) == message
    with pytest.raises(ValidationError):
        parse_to_agent(b'{"type": "unknown"}')


def test_plans_arrive_newest_first_and_never_older(agent: Agent) -> None:
    agent.start()
    assert agent.channel.newest_plan is None
    agent.push(PlanPush(plan=replace(PLAN, epoch=2)), PlanPush(plan=PLAN), PlanPush(plan=replace(PLAN, epoch=4)))
    assert agent.channel.wait_plan(3, 10).epoch == 4
    assert agent.channel.wait_plan(0, 10).epoch == 4
    assert [plan.epoch for plan in agent.plans] == [2, 4]
    with pytest.raises(TimeoutError, match="epoch above 4"):
        agent.channel.wait_plan(4, 0.05)


def test_message_in_pieces(agent: Agent) -> None:
    agent.start()
    line = PlanPush(plan=PLAN).to_line()
    for piece in (line[:10], line[10:-1], line[-1:]):
        agent.sock.sendall(piece)
    assert agent.channel.wait_plan(0, 10) == PLAN


def test_every_plan_can_be_entered_at_the_next_boundary(agent: Agent) -> None:
    agent.start()
    assert agent.channel.boundary() == 0
    for epoch, when in ((1, "now"), (2, "boundary")):
        agent.push(PlanPush(plan=replace(PLAN, epoch=epoch, when=when)))
        agent.channel.await_boundary(epoch - 1, 10)
        assert agent.channel.boundary() == epoch


def test_a_wait_ends_with_the_agent(agent: Agent) -> None:
    """Whatever it is for: a plan, or those who can tell what the job has done."""
    agent.start()
    with pytest.raises(TimeoutError, match="no worker of the job is known"):
        agent.channel.wait_peers(0.05)
    raised: list[str] = []

    def wait() -> None:
        with pytest.raises(ConnectionError, match="the channel to the agent is closed") as error:
            agent.channel.wait_peers(30)
        raised.append(str(error.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    agent.sock.shutdown(socket.SHUT_RDWR)
    waiter.join(10)
    assert raised and agent.closed.wait(10)


def test_peers_arrive(agent: Agent) -> None:
    agent.start()
    peers = (("m0", "127.0.0.1 1 t"), ("m1", "127.0.0.1 2 u"))
    agent.push(Peers(peers=peers))
    assert agent.channel.wait_peers(10) == peers


def test_reports(agent: Agent) -> None:
    agent.start()
    agent.push(PlanPush(plan=PLAN))
    agent.channel.wait_plan(0, 10)
    agent.channel.report_layout(Layout(1, 2), True)
    assert agent.read(LayoutRecord) == LayoutRecord(id="a", layout=Layout(1, 2), redundant=True)
    agent.channel.suspect(1, {"b": "reset by peer"})
    assert agent.read(SuspicionRecord) == SuspicionRecord(by="a", epoch=1, accused={"b": "reset by peer"})
    agent.channel.event("step", loss=0.5)
    assert agent.read(EventReport) == EventReport(kind="step", fields={"epoch": 1, "loss": 0.5})
    agent.channel.exit_notice("done")
    assert agent.read(ExitNotice) == ExitNotice(reason="done")


def test_heart_beats_and_carries_progress() -> None:
    agent = Agent(heartbeat_timeout_s=0.2).start()
    beats = []
    for _ in range(4):
        agent.read(Heartbeat)
        beats.append(time.monotonic())
    assert beats[-1] - beats[0] < 10.0
    agent.channel.progress(3, "/ckpt")
    agent.channel.progress(4)
    agent.read_until(Heartbeat(step=4, global_step=4, checkpoint="/ckpt"))
    agent.close()


def test_closing_sends_the_last_progress(agent: Agent) -> None:
    agent.start()
    agent.read(Heartbeat)
    agent.channel.progress(9)
    agent.channel.close()
    agent.read_until(Heartbeat(step=9, global_step=9))
    assert not agent.closed.is_set(), "it was us who closed"
    with pytest.raises(ConnectionError):
        agent.channel.wait_plan(0, 10)
    agent.channel.close()


def test_closing_wakes_waiters(agent: Agent) -> None:
    agent.start()
    raised = threading.Event()

    def wait() -> None:
        with pytest.raises(ConnectionError):
            agent.channel.wait_plan(0, 30)
        raised.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    agent.channel.close()
    assert raised.wait(5)
    waiter.join()


def test_death_of_the_agent(agent: Agent) -> None:
    agent.start()
    agent._file.close()
    agent.sock.close()
    assert agent.closed.wait(10)
    with pytest.raises(ConnectionError):
        agent.channel.wait_plan(0, 10)
    agent.channel.event("step")  # must not raise, whoever comes first


def test_agent_that_does_not_read_blocks_nobody(agent: Agent) -> None:
    agent.start()
    begin = time.monotonic()
    for number in range(300):
        agent.channel.event("step", number=number, padding="x" * 4096)
    assert time.monotonic() - begin < 5.0
    assert agent.channel._wire.backlog > 0, "the socket took everything: nothing was tested"
    agent.push(PlanPush(plan=PLAN))
    assert agent.channel.wait_plan(0, 10) == PLAN
    for number in range(300):
        report = agent.read(EventReport)
        assert isinstance(report, EventReport)
        assert report.fields["number"] == number


def test_descriptors_above_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("needs 2048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        agent = Agent().start()
        assert agent.channel._wire.fileno() > 1023
        agent.push(PlanPush(plan=PLAN))
        assert agent.channel.wait_plan(0, 10) == PLAN
        agent.close()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_garbage_ends_the_channel_loudly(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    agent.start()
    agent.sock.sendall(b"nonsense\n")
    with pytest.raises(ConnectionError):
        agent.channel.wait_plan(0, 10)
    agent.channel.close()
    assert isinstance(errors[0], ValidationError)
