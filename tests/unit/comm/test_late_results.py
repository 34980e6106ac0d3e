"""Collectives that run behind the host, as NCCL's do, and are cut off without an error: their results do not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds.comm import groups as groups_module
from bamboo_ds.comm.epoch import Epoch
from bamboo_ds.comm.groups import Groups
from bamboo_ds.comm.hub import Signal
from bamboo_ds.comm.inner import NCCL
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.comm.links import Links
from bamboo_ds.comm.work import BambooWork, CompletedWork, Several, future_of
from bamboo_ds.engine.iteration import slices as slices_module
from bamboo_ds.engine.iteration.slices import SlicedPasses
from bamboo_ds.errors import EpochChanged, PeerLost, ProtocolError
from bamboo_ds.topology import Plan
from tests.support.hubs import Hubs
from tests.support.nccl.groups import LateWork

pytestmark = pytest.mark.claim("reference/limits.md")

CPU = torch.device("cpu")
#: A device whose tensors are no processor's.
ELSEWHERE = torch.device("meta")
LONG = timedelta(seconds=60)


def _refused(*asked: object) -> Any:
    pytest.fail("neither a meeting nor a store")


class Alone:
    """One member's groups in an epoch, and a collective that is under way."""

    def __init__(self) -> None:
        self.life = Lifetime(3, lambda member, reason: None)
        nobody: Any = SimpleNamespace(changed=Signal(), leave=lambda epoch, over: None)
        links = Links(self.life, nobody, ("a", "b"), "a", ("", ""))
        self.groups = Groups(links, _refused, _refused, "a", "127.0.0.1", LONG)

    def begin(self, inner: Any = None, limit: timedelta = LONG) -> tuple[BambooWork, torch.Tensor, Any]:
        tensor = torch.zeros(3)
        inner = LateWork([tensor]) if inner is None else inner
        self.life.call_on_abort(lambda: inner.end(None))
        return self.groups.work(inner, "allreduce", ("a", "b"), kind=NCCL, limit=limit, device=CPU), tensor, inner


@pytest.fixture
def alone() -> Alone:
    return Alone()


def test_a_wait_lasts_until_the_device_is_through(alone: Alone) -> None:
    work, tensor, inner = alone.begin()
    assert not work.is_completed() and not work.is_success()
    threading.Timer(0.05, inner.end, ([torch.ones(3)],)).start()
    assert work.wait()
    assert torch.equal(tensor, torch.ones(3)) and inner.waits == 1
    assert work.is_success() and torch.equal(work.get_future().value()[0], torch.ones(3))


def test_what_an_abort_cuts_off_is_no_result(alone: Alone) -> None:
    work, _, inner = alone.begin()
    threading.Timer(0.05, alone.life.abort, ("a loss",)).start()
    with pytest.raises(EpochChanged, match=r"allreduce: epoch 3 ended \(a loss\)"):
        work.wait()
    alone.life.await_abort()  # which goes on in the thread that has begun it
    assert inner.is_completed() and inner.exception() is None, "the device itself tells nothing"
    assert not work.is_success()


def test_an_abort_counts_whenever_it_comes_before_the_last_look(alone: Alone) -> None:
    """The device may have been through just before: then the result is lost, and done again."""

    class Between(LateWork):
        def is_completed(self) -> bool:
            alone.life.abort("a loss")
            return True

    work, _, _ = alone.begin(Between([torch.zeros(3)]))
    with pytest.raises(EpochChanged, match="epoch 3 ended"):
        work.wait()


def test_what_has_failed_by_itself_is_no_result(alone: Alone) -> None:
    work, _, inner = alone.begin()
    inner.error = RuntimeError("NCCL error: remote process exited or there was a network error")
    inner.end(None)
    with pytest.raises(PeerLost, match="NCCL error"):
        work.wait()
    assert inner.waits == 0, "torch's own wait would abort the communicator, in this thread"


def test_an_error_that_comes_between_two_looks_is_seen(alone: Alone) -> None:
    """NCCL's look for an error comes before that for the end: what ended by the error may be through by then."""

    class Failing(LateWork):
        looks = 0

        def is_completed(self) -> bool:
            self.looks += 1
            if self.looks == 2:
                self.error = RuntimeError("NCCL error: remote process exited or there was a network error")
            return True

    work, _, _ = alone.begin(Failing([torch.zeros(3)]))
    with pytest.raises(PeerLost, match="NCCL error"):
        work.wait()


def test_a_group_that_gives_no_work_is_no_loss(alone: Alone) -> None:
    with pytest.raises(ProtocolError, match="nccl group has given no work of allreduce"):
        alone.groups.work(None, "allreduce", ("a", "b"), kind=NCCL, limit=LONG, device=CPU)


def test_a_wait_ends_after_its_time(alone: Alone) -> None:
    work, _, _ = alone.begin(limit=timedelta(milliseconds=30))
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0:00:00.030000 for allreduce to complete"):
        work.wait()


def test_several_are_complete_when_the_last_one_is(alone: Alone) -> None:
    works = [LateWork([torch.zeros(1)]) for _ in range(2)]
    several = Several([(work, None) for work in works])
    works[0].end([torch.ones(1)])
    assert several.wait() and not several.is_completed()
    works[1].end([torch.ones(1)])
    assert several.is_completed()


def test_those_of_a_pass_are_waited_for_in_the_end(alone: Alone) -> None:
    begun = [alone.begin() for _ in range(3)]
    for work, _, _ in begun:
        work.deferred = True
        assert work.wait() and not work.is_completed()
    for _, _, inner in begun:
        threading.Timer(0.05, inner.end, ([torch.ones(3)],)).start()
    alone.groups.confirm("reducing")
    assert all(torch.equal(tensor, torch.ones(3)) for _, tensor, _ in begun)
    alone.life.abort("a loss")
    with pytest.raises(EpochChanged, match="reducing: epoch 3 ended"):
        alone.groups.confirm("reducing")


def test_what_an_abort_cuts_off_in_a_pass_is_not_confirmed(alone: Alone) -> None:
    work, _, _ = alone.begin()
    work.deferred = True
    work.wait()
    threading.Timer(0.05, alone.life.abort, ("a loss",)).start()
    with pytest.raises(EpochChanged):
        alone.groups.confirm("reducing")


def test_a_layer_that_fails_on_the_remains_of_a_result_is_interrupted(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        alone.life.check("operation")

    groups: Any = SimpleNamespace(
        among_slices=lambda *arguments: nullcontext(), note_pass=lambda passing: None, check=check
    )
    runtime = SimpleNamespace(role=None, share=SimpleNamespace(partial_pass=False))
    binding: Any = SimpleNamespace(current=runtime, local=runtime)
    ds: Any = SimpleNamespace(device=CPU, timers=None)
    context: Any = SimpleNamespace(ds=ds, groups=groups, binding=binding)
    passes = SlicedPasses(context)

    def fail() -> None:
        with passes.in_pass(keeps=True):
            raise IndexError("target 77 is out of bounds")

    with pytest.raises(IndexError):
        fail()
    alone.life.abort("a loss")
    with pytest.raises(IndexError):
        fail()  # on the host each collective tells of an abort by itself
    monkeypatch.setattr(slices_module, "runs_behind", lambda device: True)
    with pytest.raises(EpochChanged, match="a loss"):
        fail()
    assert runtime.share.partial_pass


def test_without_such_collectives_nothing_is_asked(alone: Alone) -> None:
    alone.life.abort("a loss")
    alone.groups.confirm("reducing")


def test_futures_know_the_devices_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Future:
        def __init__(self, devices: Any = None) -> None:
            asked.append(devices)

        def set_result(self, value: Any) -> None:
            pass

    monkeypatch.setattr(torch.futures, "Future", Future)
    future_of([torch.zeros(1), torch.zeros(1, device=ELSEWHERE), torch.zeros(2, device=ELSEWHERE)])
    CompletedWork([torch.zeros(1, device=ELSEWHERE)]).get_future()
    CompletedWork([torch.zeros(1)]).get_future()
    assert asked == [[ELSEWHERE], [ELSEWHERE], None]


# -- groups that are made while a member is lost ---------------------------------------------------------------


class Creating:
    """A group whose communicator is made by the first collective, which blocks: an abort neither ends it nor itself."""

    made: list[Creating]

    def __init__(self, release: threading.Event) -> None:
        self.release, self.aborted = release, threading.Event()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        Creating.made.append(self)
        self.release.wait(60)
        return LateWork(tensors)

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *sizes: list[int]) -> Any:
        return LateWork([output])

    def abort(self) -> None:
        self.aborted.set()
        self.release.wait(60)


class Members:
    """Three members in one epoch, each in a thread."""

    names = ("a", "b", "c")

    def __init__(self) -> None:
        self._hubs = Hubs(self.names)
        plan = Plan(epoch=1, owners=self.names, members=self.names, places=self._hubs.places)
        usual = LONG, lambda member, reason: None, lambda members, seconds: None, 60.0, lambda: None
        self.epochs = {name: Epoch(plan, hub, name, "127.0.0.1", *usual) for name, hub in self._hubs.items()}
        for epoch in self.epochs.values():
            epoch.links.enter()

    def get(self, name: str) -> Any:
        return self.epochs[name].groups.get("g", self.names, NCCL, LONG, CPU)

    def close(self) -> None:
        for epoch in self.epochs.values():
            epoch.destroy()
        self._hubs.close()


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Members, ThreadPoolExecutor, threading.Event]]:
    release, Creating.made = threading.Event(), []
    monkeypatch.setattr(groups_module, "create_inner", lambda *arguments: Creating(release))
    with ThreadPoolExecutor(3) as pool:
        made = Members()
        yield made, pool, release
        release.set()
        made.close()


def lost(members: Members, pool: ThreadPoolExecutor, awaited: Callable[[], bool]) -> float:
    """Lose ``c`` once ``awaited``; seconds until the others are out of the group that they make."""

    def get(name: str) -> None:
        try:
            members.get(name)
        except EpochChanged:
            members.epochs[name].life.abort("a member is gone")  # as an engine does
            raise

    inside = [pool.submit(get, name) for name in ("a", "b")]
    while not awaited():
        time.sleep(0.001)
    begin = time.monotonic()
    members.epochs["c"].destroy()
    for future in inside:
        with pytest.raises(EpochChanged):
            future.result(60)
    return time.monotonic() - begin


def test_nobody_makes_a_communicator_without_the_others(members: Any) -> None:
    three, pool, _ = members
    assert lost(three, pool, lambda: all(three.epochs[name].waiting for name in ("a", "b"))) < 5
    assert Creating.made == []


def test_a_loss_while_a_communicator_is_made_holds_nobody_up(members: Any) -> None:
    three, pool, release = members
    third = pool.submit(three.get, "c")
    assert lost(three, pool, lambda: len(Creating.made) == 3) < 5
    with pytest.raises(EpochChanged):
        third.result(60)
    for name in ("a", "b"):
        three.epochs[name].life.abort("a new plan")
        three.epochs[name].groups.await_aborts()
    assert all(group.aborted.wait(60) for group in Creating.made) and not release.is_set()


def test_a_communicator_that_all_have_made_is_used(members: Any) -> None:
    three, pool, release = members
    release.set()
    found = dict(zip(three.names, pool.map(three.get, three.names), strict=True))
    assert len(Creating.made) == 3 and three.get("a") is found["a"]
    assert found["a"].aborted in {made.aborted for made in Creating.made}
    three.epochs["a"].life.abort("a loss")
    with pytest.raises(EpochChanged, match="a loss"):
        found["a"].allreduce([torch.ones(1)])
    assert len(Creating.made) == 3, "it may be freed by now"
