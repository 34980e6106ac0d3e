"""What a coordinator tells its leader."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from bamboo_ds.control.agent.callbacks import Callbacks
from bamboo_ds.control.agent.coordinator import Coordinator
from bamboo_ds.control.agent.lease import register
from bamboo_ds.control.leader.restarts import fatal_plan, unstarted_plan
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord, StopRecord, WorkerState
from bamboo_ds.errors import LaunchError, LeaseExpired, StoreUnavailable
from bamboo_ds.secret import JobSecret
from bamboo_ds.store.client import Lease, Store
from bamboo_ds.store.records import KeyValue, WatchEvent
from bamboo_ds.topology import Plan
from bamboo_ds.topology.planner import initial_plan

from .support.etcd import EtcdServer, new_namespace, wait_until

pytest_plugins = ["tests.support.fixtures"]

TTL_S = 30.0
ONE = initial_plan(["a"])


class LeaderDouble:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.departed = False  #: it has been asked to plan when somebody had left

    def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> None:
        self.departed = self.departed or bool(mirror.left)
        self.steps.put(trusted_from)


def test_one_that_has_just_come_does_not_trust_absence(store: Store) -> None:
    """It may have come at the end of an outage, in which others have lost their leases."""
    record = MemberRecord(id="m9", slot=9, host="h", address="x", pid=1, agent_pid=2, incarnation="x", joiner=True)
    leader: Any = LeaderDouble()
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_stop", "on_error"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_ended=lambda: None)  # type: ignore[arg-type]
    begin = time.monotonic()
    coordinator = Coordinator(
        store, leader, record, lease_ttl_s=TTL_S, callbacks=callbacks, last_heartbeat=lambda: None
    )
    coordinator.start()
    try:
        assert leader.steps.get(timeout=20.0) >= begin + TTL_S
    finally:
        coordinator.close(timeout_s=10.0)


def test_a_joiner_is_told_of_every_plan(store: Store) -> None:
    """Of the one that has admitted it, too, when the next one has lost it already: it is out then."""
    record = MemberRecord(id="m9", slot=9, host="h", address="x", pid=1, agent_pid=2, incarnation="x", joiner=True)
    leader: Any = LeaderDouble()
    plans: queue.SimpleQueue[int] = queue.SimpleQueue()
    written, waits = threading.Event(), threading.Event()

    def take(plan: Plan) -> None:
        plans.put(plan.epoch)
        if plan.epoch == 1:
            waits.set()
            assert written.wait(20.0)

    ignore = dict.fromkeys(("on_store", "on_peers", "on_stop", "on_error"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_plan=take, on_ended=lambda: None)  # type: ignore[arg-type]
    first = replace(ONE, epoch=1)
    listed = replace(first, epoch=2, members=("a", "m9"), homes=(0, 0))
    store.put(Keys.PLAN, first.to_json())
    coordinator = Coordinator(
        store, leader, record, lease_ttl_s=TTL_S, callbacks=callbacks, last_heartbeat=lambda: None
    )
    coordinator.start()
    try:
        assert waits.wait(20.0)
        store.put(Keys.PLAN, listed.to_json())
        store.put(Keys.PLAN, replace(first, epoch=3, lost=("m9",)).to_json())
        wait_until(lambda: coordinator._inbox.qsize() >= 3, "both have arrived, and its own record", 20.0)
        written.set()
        assert [plans.get(timeout=20.0) for _ in range(3)] == [1, 2, 3]
    finally:
        written.set()
        coordinator.close(timeout_s=10.0)
    assert coordinator._evicted


class Forgetful(Store):
    """Its watch brings no plan of ``missed`` epochs, as after etcd has compacted them."""

    missed: tuple[int, ...] = ()

    def watch(self, prefix: str, callback: Callable[[WatchEvent], None], *args: Any, **more: Any) -> Any:
        def bring(event: WatchEvent) -> None:
            if event.key != Keys.PLAN or Plan.from_json(event.kv.value).epoch not in self.missed:
                callback(event)

        return super().watch(prefix, bring, *args, **more)


class Joiner:
    """One that waits to be admitted, has seen plan 1, and misses 2, which admits it, and 3, which has lost it."""

    def __init__(self, store: Store) -> None:
        self.store, self.leader = store, LeaderDouble()
        self.plans, self.told = queue.SimpleQueue[int](), queue.SimpleQueue[str]()
        how: Any = {"incarnation": "x", "joiner": True}
        record = MemberRecord(id="m9", slot=9, host="h", address="x", pid=1, agent_pid=2, **how)
        callbacks = Callbacks(
            on_plan=lambda plan: self.plans.put(plan.epoch),
            on_stop=lambda stop: self.told.put(f"stop {stop.code}"),
            on_evicted=lambda: self.told.put("evicted"),
            on_ended=lambda: self.told.put("ended"),
            **dict.fromkeys(("on_store", "on_peers", "on_error"), lambda *_: None),  # type: ignore[arg-type]
        )
        self.write(1)
        leader: Any = self.leader
        self.coordinator = Coordinator(
            store, leader, record, lease_ttl_s=1.0, callbacks=callbacks, last_heartbeat=lambda: None
        )
        self.coordinator.start()
        assert self.plans.get(timeout=20.0) == 1
        self.leader.steps.get(timeout=20.0)
        self.write(2, members=("a", "m9"), homes=(0, 0))
        self.write(3, lost=("m9",))

    def write(self, epoch: int, **fields: Any) -> None:
        self.store.put(Keys.PLAN, replace(ONE, epoch=epoch, **fields).to_json())

    @property
    def lease(self) -> Lease:
        lease = self.coordinator._keeper.lease
        assert lease is not None
        return lease

    def registered(self) -> bool:
        return self.store.get(Keys.member("m9")) is not None


@pytest.fixture
def joiner(etcd: EtcdServer) -> Iterator[Joiner]:
    namespace = new_namespace()
    store = Forgetful([etcd.url], namespace=namespace)
    store.missed = (2, 3)
    with Store([etcd.url], namespace=namespace) as mine:
        one = Joiner(store)
        one.store = mine
        yield one
        one.coordinator.close(timeout_s=10.0)


def test_a_joiner_that_has_missed_plans_and_its_record_is_out_and_says_so(joiner: Joiner) -> None:
    joiner.store.delete(Keys.member("m9"))  # by the leader
    joiner.store.put(Keys.STOP, StopRecord(code=3, reason="x", by="a").to_json())
    joiner.write(4)
    assert joiner.plans.get(timeout=20.0) == 4
    assert [joiner.told.get(timeout=20.0) for _ in range(2)] == ["stop 3", "evicted"]
    joiner.write(5)
    assert joiner.plans.get(timeout=20.0) == 5 and joiner.coordinator._evicted
    lease = joiner.lease
    joiner.coordinator.leave(
        LeftRecord(id="m9", slot=9, outcome="evicted", reason="exit", detail="", since=1.0, boot="b")
    )
    assert joiner.told.get(timeout=20.0) == "ended" and joiner.told.empty()
    assert joiner.store.get(Keys.left("m9")) is not None
    with pytest.raises(LeaseExpired):
        joiner.store.put("x", "", lease)


def test_a_joiner_that_has_missed_plans_and_is_registered_waits_on(joiner: Joiner) -> None:
    """The leader would have removed its record."""
    joiner.write(4)
    assert joiner.plans.get(timeout=20.0) == 4
    joiner.leader.steps.get(timeout=20.0)
    wait_until(lambda: not joiner.coordinator._unsure, "it has looked")
    assert joiner.told.empty() and joiner.registered()


def test_a_joiner_that_has_missed_plans_does_not_register_before_it_has_found_out(joiner: Joiner) -> None:
    """Else it would find its own new record. The plan after those it has missed is fatal: it waits for the next one."""
    lease = joiner.lease
    lease.revoke()
    joiner.store.put(Keys.PLAN, replace(fatal_plan(ONE, (), ("a",)), epoch=4).to_json())
    assert joiner.plans.get(timeout=20.0) == 4
    wait_until(lambda: joiner.coordinator._keeper.lease is None, "it knows that its lease has run out")
    turns = joiner.coordinator._turn
    turned = threading.Event()
    joiner.coordinator._turn = lambda: (turns(), turned.set())[0]  # type: ignore[method-assign]
    assert turned.wait(20.0)
    joiner.write(5)
    assert joiner.plans.get(timeout=20.0) == 5
    assert joiner.told.get(timeout=20.0) == "evicted" and not joiner.registered()


class Taking:
    """A member of the plan, whose turns are counted by what they say of the next one."""

    def __init__(self, store: Store) -> None:
        record = MemberRecord(id="m0", slot=0, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
        ignore = dict.fromkeys(("on_store", "on_peers", "on_stop", "on_error", "on_plan"), lambda *_: None)
        leader: Any = LeaderDouble()
        callbacks = Callbacks(**ignore, on_ended=lambda: None)  # type: ignore[arg-type]
        self.coordinator = Coordinator(
            store, leader, record, lease_ttl_s=1.0, callbacks=callbacks, last_heartbeat=lambda: None
        )
        self.wakes = queue.SimpleQueue[float | None]()
        turn = self.coordinator._turn

        def counted() -> float | None:
            wake = turn()
            if self.coordinator._keeper.lease is None:
                self.wakes.put(wake)
            return wake

        self.coordinator._turn = counted  # type: ignore[method-assign]
        self.coordinator.start()
        leader.steps.get(timeout=20.0)

    def lose_lease(self) -> None:
        lease = self.coordinator._keeper.lease
        assert lease is not None
        lease.revoke()


def test_a_member_registers_again_while_somebody_has_overwritten_the_plan(etcd: EtcdServer) -> None:
    """Else nobody could lead, and put it back."""
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as stranger:
        store = Store([etcd.url], namespace=namespace, secret=JobSecret.new())
        store.put(Keys.PLAN, initial_plan(["m0"]).to_json())
        member = Taking(store)
        try:
            before = stranger.get(Keys.member("m0"))
            stranger.put(Keys.PLAN, "{}")
            member.lose_lease()
            wait_until(lambda: stranger.get(Keys.member("m0")) not in (None, before), "it is registered anew", 20.0)
        finally:
            member.coordinator.close(timeout_s=10.0)


def test_one_that_leaves_and_is_out_without_a_lease_asks_no_more(etcd: EtcdServer) -> None:
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as mine:
        mine.put(Keys.PLAN, initial_plan(["m0"]).to_json())
        member = Taking(Store([etcd.url], namespace=namespace))
        try:
            member.coordinator.mark_leaving()
            mine.put(Keys.PLAN, replace(ONE, epoch=1).to_json())
            wait_until(lambda: member.coordinator._pushed_epoch == 1, "it has seen that it is out")
            member.lose_lease()
            assert member.wakes.get(timeout=20.0) is None
        finally:
            member.coordinator.close(timeout_s=10.0)
    assert not member.coordinator._evicted


def test_a_record_is_put_only_under_the_plan_that_was_looked_at(store: Store) -> None:
    record = MemberRecord(id="m9", slot=9, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
    looked_at = store.put(Keys.PLAN, ONE.to_json())
    newer = store.put(Keys.PLAN, replace(ONE, epoch=ONE.epoch + 1).to_json())
    leases: list[Lease] = []
    with mock.patch.object(
        store, "lease", side_effect=lambda ttl_s: leases.append(Store.lease(store, ttl_s)) or leases[-1]
    ):
        assert register(store, record, TTL_S, looked_at) is None and store.get(Keys.member("m9")) is None
    assert [lease.refresh() for lease in leases] == [False], "not revoked"
    assert register(store, record, TTL_S, newer) is not None and store.get(Keys.member("m9")) is not None


@pytest.mark.parametrize("plan", [ONE, fatal_plan(ONE, (), ("a",))], ids=["running", "fatal"])
@pytest.mark.parametrize("waits", [True, False])
def test_one_that_takes_no_part_ends_with_the_job_and_does_not_lead_it_on(
    store: Store, plan: Plan, waits: bool
) -> None:
    """The others have finished before it could join them; what its leader would plan now is a restart."""
    how: Any = {"state": "waiting"} if waits else {"joiner": True}
    record = MemberRecord(id="m9", slot=9, host="h", address="x", pid=1, agent_pid=2, incarnation="x", **how)
    finished = LeftRecord(id="a", slot=0, outcome="finished", reason="exit", detail="0", since=1.0, boot="b")
    store.put(Keys.PLAN, plan.to_json())
    store.put(Keys.worker("a"), WorkerState(id="a", epoch=1).to_json())
    leader: Any = LeaderDouble()
    stops: queue.SimpleQueue[StopRecord] = queue.SimpleQueue()
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_error"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_stop=stops.put, on_ended=lambda: None)  # type: ignore[arg-type]
    coordinator = Coordinator(
        store, leader, record, lease_ttl_s=TTL_S, callbacks=callbacks, last_heartbeat=lambda: None
    )
    coordinator.start()
    try:
        leader.steps.get(timeout=20.0)
        assert stops.empty()
        store.put(Keys.left("a"), finished.to_json())
        stop = stops.get(timeout=20.0)
    finally:
        coordinator.close(timeout_s=10.0)
    assert (stop.code, stop.reason) == (0, "the job has finished")
    assert not leader.departed


def test_one_that_a_launcher_has_started_does_not_wait_with_members_that_start_a_job_of_its_name(store: Store) -> None:
    """Their plan lists nobody, and waits for members without workers; it has one."""
    store.put(Keys.PLAN, unstarted_plan(2, None).to_json())
    record = MemberRecord(id="m0", slot=0, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_stop"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_error=errors.put, on_ended=lambda: None)  # type: ignore[arg-type]
    leader: Any = LeaderDouble()
    coordinator = Coordinator(
        store, leader, record, lease_ttl_s=TTL_S, callbacks=callbacks, last_heartbeat=lambda: None
    )
    coordinator.start()
    try:
        error = errors.get(timeout=20.0)
    finally:
        coordinator.close(timeout_s=10.0)
    assert isinstance(error, LaunchError) and "bamboo join --start" in str(error) and "another name" in str(error)


def test_a_plan_of_the_past_is_no_word_of_the_present(etcd: EtcdServer) -> None:
    """Somebody who can write to etcd has put it back: workers may not commit by it."""
    reads: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Watched(Store):
        def get(self, key: str) -> KeyValue | None:
            entry = super().get(key)
            if key == Keys.PLAN:
                reads.put(None)
            return entry

    record = MemberRecord(id="m0", slot=0, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
    contacts: queue.SimpleQueue[str] = queue.SimpleQueue()
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_stop", "on_error"), lambda *_: None)
    tell: Any = lambda contact: contacts.put(contact.origin)  # noqa: E731
    callbacks = Callbacks(**ignore, on_contact=tell, on_ended=lambda: None)  # type: ignore[arg-type]
    leader: Any = LeaderDouble()
    store = Watched([etcd.url], namespace=new_namespace())
    coordinator = Coordinator(store, leader, record, lease_ttl_s=1.0, callbacks=callbacks, last_heartbeat=lambda: None)
    plan = initial_plan(["m0"])
    store.put(Keys.PLAN, replace(plan, epoch=3, origin="third").to_json())
    coordinator.start()
    try:
        assert contacts.get(timeout=20.0) == "third"
        store.put(Keys.PLAN, replace(plan, epoch=2, origin="second").to_json())
        while not reads.empty():
            reads.get()
        for _ in range(2):
            reads.get(timeout=20.0)
        store.put(Keys.PLAN, replace(plan, epoch=4, origin="fourth").to_json())
        while (origin := contacts.get(timeout=20.0)) != "fourth":
            assert origin == "third"
    finally:
        coordinator.close(timeout_s=10.0)


def test_a_forged_request_to_stop_holds_no_other_one_up(etcd: EtcdServer) -> None:
    """That of a member whose worker has failed: the job would wait for it."""
    namespace, own = new_namespace(), JobSecret.new()
    record = MemberRecord(id="m0", slot=0, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
    stops: queue.SimpleQueue[StopRecord] = queue.SimpleQueue()
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_error"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_stop=stops.put, on_ended=lambda: None)  # type: ignore[arg-type]
    leader: Any = LeaderDouble()
    with Store([etcd.url], namespace=namespace) as stranger:
        stranger.put(Keys.STOP, "{}")
        store = Store([etcd.url], namespace=namespace, secret=own)
        coordinator = Coordinator(
            store, leader, record, lease_ttl_s=TTL_S, callbacks=callbacks, last_heartbeat=lambda: None
        )
        coordinator.start()
        try:
            coordinator.write(Keys.STOP, StopRecord(code=7, reason="failed", by="m0"))
            assert stops.get(timeout=20.0).code == 7
        finally:
            coordinator.close(timeout_s=10.0)


@pytest.mark.parametrize("registered", [True, False])
def test_one_that_takes_no_part_gives_up_when_etcd_stays_away(own_etcd: EtcdServer, registered: bool) -> None:
    """Its job may have ended with its etcd. One that takes part trains on."""
    leaders: list[Any] = []
    namespace = new_namespace()
    errors: queue.SimpleQueue[tuple[str, BaseException]] = queue.SimpleQueue()
    coordinators = []
    for name, joins in (("joins", True), ("takes part", False)):
        fields = {"slot": 9, "host": "h", "address": "x", "pid": 1, "agent_pid": 2, "incarnation": "x"}
        record = MemberRecord.model_validate({"id": name, "joiner": joins, **fields})
        ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_stop"), lambda *_: None)
        tell: Any = partial(lambda name, error: errors.put((name, error)), name)
        callbacks = Callbacks(**ignore, on_error=tell, on_ended=lambda: None)  # type: ignore[arg-type]
        leaders.append(LeaderDouble())
        store = Store([own_etcd.url], namespace=namespace, timeout_s=1.0)
        coordinators.append(
            Coordinator(
                *(store, leaders[-1], record),
                lease_ttl_s=1.0,
                callbacks=callbacks,
                last_heartbeat=lambda: None,
                outage_s=0.5,
            )
        )
    if not registered:
        own_etcd.kill()
    try:
        for coordinator, leader in zip(coordinators, leaders, strict=True):
            coordinator.start()
            if registered:
                leader.steps.get(timeout=20.0)
        if registered:
            own_etcd.kill()
        name, error = errors.get(timeout=20.0)
        assert name == "joins" and isinstance(error, StoreUnavailable)
        assert errors.empty()
    finally:
        for coordinator in coordinators:
            coordinator.close(timeout_s=10.0)


def test_whatever_fails_at_the_end_the_agent_is_told_of_it() -> None:
    """Otherwise it would wait for a minute, and the connection to etcd stay open."""
    ended: list[str] = []

    class Failing:
        def close(self, timeout_s: float) -> None:
            raise RuntimeError("a test says so")

    class Closing:
        def close(self) -> None:
            ended.append("store")

    record = MemberRecord(id="m0", slot=0, host="h", address="x", pid=1, agent_pid=2, incarnation="x")
    ignore = dict.fromkeys(("on_plan", "on_store", "on_peers", "on_stop", "on_error"), lambda *_: None)
    callbacks = Callbacks(**ignore, on_ended=lambda: ended.append("told"))  # type: ignore[arg-type]
    doubles: Any = Closing(), LeaderDouble(), Failing()
    store, leader, display = doubles
    more: dict[str, Any] = {"lease_ttl_s": TTL_S, "last_heartbeat": lambda: None, "display": display}
    coordinator = Coordinator(store, leader, record, callbacks=callbacks, **more)
    coordinator._ending.set()
    with pytest.raises(RuntimeError, match="a test says so"):
        coordinator._run()
    assert ended == ["store", "told"]
