"""What a script sends and receives itself arrives once, and in order, whatever is lost meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext as does
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds.comm.calls.messages import ScriptMessages
from bamboo_ds.comm.wire import payloads
from bamboo_ds.comm.wire.payloads import PeerMessage
from bamboo_ds.engine.recovery.takeover import Takeover
from bamboo_ds.errors import EpochChanged, FatalLoss
from bamboo_ds.topology import Layout, Plan

pytestmark = pytest.mark.claim("guides/scripts.md")

RANKS = 3


class Links:
    """Of one member in one epoch. Messages arrive at once."""

    def __init__(self, job: Job, epoch: int, member: str) -> None:
        self.job, self.epoch, self.member = job, epoch, member
        self.changed = threading.Condition()
        self.services: dict[bytes, Callable[[PeerMessage], None]] = {}
        self._inbox: dict[bytes, deque[PeerMessage]] = {}

    def check(self) -> None:
        if self.epoch != self.job.epoch or self.job.over:
            raise EpochChanged(f"epoch {self.epoch}")

    def inbox(self, key: bytes) -> deque[PeerMessage]:
        return self._inbox.setdefault(key, deque())

    def keep(self, key: bytes, sequence: int, payload: payloads.Payload) -> None:
        self.deliver(key, PeerMessage(self.member, sequence, *payloads.copied(payload), arrival=0.0))

    def deliver(self, key: bytes, message: PeerMessage) -> None:
        self.services.get(key, self.inbox(key).append)(message)

    def send(self, member: str, key: bytes, sequence: int, payload: payloads.Payload) -> None:
        self.check()
        if key.endswith(b"/had") and self.job.drops_answers:
            return
        self.job.sent.append((self.member, member))
        message = PeerMessage(self.member, sequence, *payloads.copied(payload), arrival=0.0)
        self.job.links[member].deliver(key, message)

    def wait(self, operation: str, ready: Callable[[], bool], members: Any, timeout: timedelta | None) -> bool:
        self.check()
        return ready()


class Job:
    """Members in one thread, each of which runs as a rank; ``absent`` are those whose scripts replay."""

    def __init__(self, **ranks: int) -> None:
        self.ranks, self.epoch, self.over, self.drops_answers = ranks, 0, False, False
        self.sent: list[tuple[str, str]] = []
        self.told: list[tuple[str, str, int]] = []
        self.absent: set[str] = set()
        self.script: dict[str, ScriptMessages] = {}
        self.links: dict[str, Links] = {}
        self._add()
        self.recover()

    def _add(self) -> None:
        for member in self.ranks.keys() - self.script.keys():
            session: Any = Session(self, member)

            def lacking(operation: str, ranks: tuple[int, ...], lost: int, result: str, member: str = member) -> str:
                self.told.append((member, operation, lost))
                return "here"

            self.script[member] = ScriptMessages(session, lambda: self.absent, self.recover, lacking)

    def recover(self) -> None:
        """All enter the next epoch."""
        self.epoch, self.over = self.epoch + 1, False
        self.links = {member: Links(self, self.epoch, member) for member in self.ranks}
        had = {member: self.script[member].had for member in self.ranks}
        for member in self.ranks:
            self.script[member].agree(had, {each: script.missed for each, script in self.script.items()})

    def lose(self, *members: str) -> None:
        """Nobody has noticed yet."""
        self.over = True
        for member in members:
            del self.ranks[member]

    def join(self, **ranks: int) -> None:
        """Members whose scripts have replayed this gap."""
        self.ranks |= ranks
        self.absent |= set(ranks)
        self._add()
        self.recover()

    def operate(self, number: int) -> None:
        self.absent.clear()
        for member in self.ranks:
            self.script[member].begin_gap(number)

    def send(self, member: str, to: int, value: float, tag: int = 0) -> None:
        tensor = torch.tensor([value])
        handle: Any = Handle(self.ranks[member])
        assert self.script[member].send(handle, handle.index, tensor, to, tag).wait()
        tensor.fill_(-1.0)

    def receive(self, member: str, source: int | None, tag: int = 0) -> Any:
        handle: Any = Handle(self.ranks[member])
        return self.script[member].receive(handle, handle.index, torch.tensor([0.5]), source, tag)

    def received(self, member: str, source: int | None, tag: int = 0) -> float:
        work = self.receive(member, source, tag)
        assert work.wait()
        (tensor,) = work.result()
        return float(tensor)


class Session:
    def __init__(self, job: Job, member: str) -> None:
        self.job, self.member = job, member

    @property
    def current(self) -> Any:
        links = self.job.links[self.member]
        links.check()
        members = tuple(self.job.ranks)
        owners = [next((m for m, rank in self.job.ranks.items() if rank == at), members[0]) for at in range(RANKS)]
        plan = SimpleNamespace(members=members, script_ranks=tuple(self.job.ranks.values()), owners=owners)
        return SimpleNamespace(number=links.epoch, plan=plan, member=self.member, links=links)


class Handle:
    key, ranks, timeout = "world/0.1.2", (0, 1, 2), timedelta(seconds=1)

    def __init__(self, index: int) -> None:
        self.index = index

    def rank(self) -> int:
        return self.index


@pytest.fixture
def job() -> Job:
    return Job(a=0, b=1, c=2)


def test_in_order_by_source_and_tag(job: Job) -> None:
    job.send("a", 2, 1.0)
    job.send("a", 2, 2.0, tag=5)
    job.send("b", 2, 3.0)
    job.send("a", 2, 4.0)
    job.send("c", 2, 5.0)  # to itself
    assert [job.received("c", 2), job.received("c", 0, tag=5), job.received("c", 1)] == [5.0, 2.0, 3.0]
    assert [job.received("c", 0), job.received("c", 0)] == [1.0, 4.0]
    job.send("b", 2, 6.0)
    work = job.receive("c", None)
    assert work.wait() and work.source_rank() == 1 and work.result()[0].item() == 6.0
    assert job.told == []


def test_those_that_wait_for_one_stream_get_it_in_turn(job: Job) -> None:
    first, second = job.receive("c", 0), job.receive("c", 0)
    job.send("a", 2, 1.0)
    assert not second.is_completed() and first.is_completed()
    job.send("a", 2, 2.0)
    assert second.wait() and first.wait() and (first.result()[0].item(), second.result()[0].item()) == (1.0, 2.0)


def test_what_an_epoch_takes_with_it_is_sent_again(job: Job) -> None:
    job.send("a", 2, 1.0)
    job.lose("b")
    assert job.received("c", 0) == 1.0
    assert job.sent.count(("a", "c")) == 2
    job.lose()
    job.recover()
    assert job.sent.count(("a", "c")) == 2  # it has it


@pytest.mark.parametrize("drops_answers", [False, True])
def test_nothing_arrives_twice(job: Job, drops_answers: bool) -> None:
    job.drops_answers = drops_answers
    job.send("a", 2, 1.0)
    job.send("a", 2, 2.0)
    assert job.received("c", 0) == 1.0
    job.lose("b")
    assert job.received("c", 0) == 2.0
    job.operate(1)
    job.send("a", 2, 3.0)
    assert job.received("c", 0) == 3.0
    assert len(job.script["a"]._kept) == 1
    assert job.sent.count(("a", "c")) == 4


def test_a_loss_while_it_is_sent(job: Job) -> None:
    job.lose("b")
    job.send("a", 2, 1.0)
    assert job.epoch == 2 and job.received("c", 0) == 1.0


def test_in_another_thread_a_loss_is_an_error(job: Job) -> None:
    """Only the main thread can recover."""
    found: list[float | str] = []

    def receive() -> None:
        try:
            found.append(job.received("c", 0))
        except EpochChanged as error:
            found.append(str(error))

    job.send("a", 2, 1.0)
    for _ in range(2):
        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()
        job.lose("b" if "b" in job.ranks else "a")
    assert found == [1.0, "epoch 1"] and job.epoch == 1


def test_one_that_comes_later_than_its_gap(job: Job) -> None:
    job.send("a", 2, 1.0)
    job.operate(1)
    job.lose("b")
    assert job.received("c", 0) == 1.0


def test_a_lost_rank_gets_nothing_and_gives_nothing(job: Job) -> None:
    job.send("c", 0, 1.0)
    job.lose("c")
    job.send("a", 2, 2.0)
    assert job.received("a", 2) == 0.5 and job.script["a"].missed == "here"
    assert job.told == [("a", "send", 2), ("a", "recv", 2)]
    job.operate(1)
    assert job.script["a"].missed == "here"  # a loader may have read ahead
    job.operate(2)
    assert job.script["a"].missed is None and job.script["b"].missed is None


def test_a_worker_in_the_place_of_a_lost_one_gets_what_is_sent_to_it(job: Job) -> None:
    """And not what was sent to the lost one, which its script has replayed."""
    job.send("a", 2, 1.0)
    job.lose("c")
    job.join(d=2)
    job.send("a", 2, 2.0)
    job.operate(1)
    job.send("a", 2, 3.0)
    job.send("d", 0, 4.0)
    assert job.received("d", 0) == 3.0 and job.received("a", 2) == 4.0


def test_of_two_that_run_as_one_rank_the_second_speaks_when_the_first_is_lost() -> None:
    job = Job(a=0, b=1, c=2, d=2)
    job.send("c", 0, 1.0)
    assert job.received("a", 2) == 1.0
    for value in (1.0, 2.0):
        job.send("d", 0, value)
    assert job.sent.count(("d", "a")) == 0
    job.lose("c")
    assert job.received("a", 2) == 2.0
    job.operate(1)
    assert not any(job.script["d"]._kept.values()) and job.told == []


def test_misuse_and_timeouts_are_torch_s(job: Job) -> None:
    late = job.receive("c", 0)
    with pytest.raises(RuntimeError, match=r"Timed out waiting .* for recv operation"):
        late.wait()
    assert job.script["c"].open == 0
    handle: Any = Handle(2)
    wide = job.script["c"].receive(handle, 2, torch.zeros(2), 0, 0)
    job.send("a", 2, 1.0)
    with pytest.raises(RuntimeError, match="rank 0 sent 4 bytes, the tensor takes 8"):
        wide.wait()


# -- batches ------------------------------------------------------------------------------------------------


def test_all_know_who_has_missed_something(job: Job) -> None:
    """A worker that joins has replayed its gap; members tell of it for two operations."""
    job.lose("c")
    job.join(d=2)
    job.script["d"].note_missed("loader.py:7")
    job.recover()
    for number, expected in ((1, "loader.py:7"), (2, None)):
        assert {job.script[member].missed_by("d") for member in job.ranks} == {"loader.py:7"}
        job.operate(number)
        assert {job.script[member].missed_by("d") for member in job.ranks} == {expected}
        if expected is None:
            break
    assert job.script["a"].missed is None


@pytest.mark.parametrize(
    ("missed", "apart", "fatal"),
    [
        ("z", True, True),  # draws for rank 2, and so do all know
        ("y", True, False),  # another draws for that rank
        ("b", True, False),  # draws nothing
        ("z", False, False),  # the other end has drawn the same
        ("", True, False),
    ],
)
def test_batches_that_may_lack_a_message_are_not_used(missed: str, apart: bool, fatal: bool) -> None:
    plan = Plan(
        epoch=5, owners=("a", "b", "z"), members=("a", "b", "z", "y"), layout=Layout(1, 3), script_ranks=(0, 1, 2, 2)
    )
    messages = SimpleNamespace(missed_by=lambda member: "loader.py:7" if member == missed else None)
    takeover: Any = SimpleNamespace(
        recovery=SimpleNamespace(supply=SimpleNamespace(apart=apart)),
        collectives=SimpleNamespace(messages=messages),
        epoch=SimpleNamespace(plan=plan, job=SimpleNamespace(newest_checkpoint=lambda plan: None)),
    )
    expected = r"holds what the script receives at loader\.py:7 for batches of stage 2 of pipeline 0"
    with pytest.raises(FatalLoss, match=expected) if fatal else does():
        Takeover._check_messages(takeover)
