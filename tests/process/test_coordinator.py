"""What a coordinator tells its leader and its agent, and when it registers its member."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from bamboo_ds.control.agent.callbacks import Callbacks
from bamboo_ds.control.agent.coordinator import Coordinator
from bamboo_ds.control.agent.lease import register
from bamboo_ds.control.agent.membership import Membership, followed
from bamboo_ds.control.agent.states import State
from bamboo_ds.control.leader.restarts import fatal_plan, unstarted_plan
from bamboo_ds.control.messages import Contact
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import LeaderRecord, MemberRecord, StopRecord, WorkerState
from bamboo_ds.errors import LaunchError, LeaseExpired, StoreError, StoreUnavailable
from bamboo_ds.secret import JobSecret
from bamboo_ds.store.client import Lease, Store
from bamboo_ds.store.records import KeyValue, WatchEvent
from bamboo_ds.topology import Plan
from bamboo_ds.topology.planner import initial_plan
from tests.support.etcd import EtcdServer, new_namespace, wait_until
from tests.support.records import left, member

pytestmark = pytest.mark.claim("guides/clusters.md", "guides/elastic.md", "guides/security.md")

TTL_S = 30.0
DEADLINE_S = 20.0
ONE = initial_plan(["a"])


class LeaderDouble:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.departed = False  #: it has been asked to plan when somebody had left
        self.abdicated = False
        self.alone = False  #: it leads from now on
        self.lacked: list[str] = []  #: what it did not know when it led

    def abdicate(self) -> None:
        self.abdicated = True

    def tell_takeovers(self, mirror: Mirror) -> bool:
        return False

    def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> None:
        self.departed = self.departed or bool(mirror.left)
        if self.alone and mirror.leader == "m9":
            self.lacked += [key for key in (Keys.left("a"), Keys.worker("a")) if not mirror.revision(key)]
        self.steps.put(trusted_from)


def record(name: str = "m9", **how: Any) -> MemberRecord:
    return member(name, 9, **how)


class Member:
    """A coordinator, and what it tells; ``how``: of its record."""

    def __init__(
        self,
        store: Store,
        name: str = "m9",
        *,
        ttl_s: float = TTL_S,
        outage_s: float = math.inf,
        display: Any = None,
        leader: Any = None,
        **how: Any,
    ) -> None:
        self.store, self.leader = store, leader or LeaderDouble()
        self.plans: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.stops: queue.SimpleQueue[StopRecord] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.contacts: queue.SimpleQueue[Contact] = queue.SimpleQueue()
        self.held = threading.Event()  #: where it is not set it stays in the callback of a plan
        self.held.set()
        self.coordinator = Coordinator(
            store,
            self.leader,
            record(name, **how),
            lease_ttl_s=ttl_s,
            callbacks=Callbacks(
                on_plan=self._take,
                on_peers=lambda peers: None,
                on_stop=self.stops.put,
                on_error=self.errors.put,
                on_evicted=lambda: self.told.put("evicted"),
                on_ended=lambda: self.told.put("ended"),
                on_contact=self.contacts.put,
            ),
            last_heartbeat=lambda: None,
            outage_s=outage_s,
            display=display,
        )

    def _take(self, plan: Plan) -> None:
        self.plans.put(plan.epoch)
        assert self.held.wait(DEADLINE_S)

    def sees(self, *epochs: int) -> None:
        """These are the next plans that it is told of."""
        assert tuple(self.plans.get(timeout=DEADLINE_S) for _ in epochs) == epochs

    @property
    def state(self) -> State:
        return self.coordinator._membership.state

    @property
    def lease(self) -> Lease:
        lease = self.coordinator._keeper.lease
        assert lease is not None
        return lease

    def __enter__(self) -> Member:
        self.coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.set()
        self.coordinator.close(timeout_s=10.0)


def write(store: Store, epoch: int, **fields: Any) -> None:
    store.put(Keys.PLAN, replace(ONE, epoch=epoch, **fields).to_json())


def test_one_that_has_just_come_does_not_trust_absence(store: Store) -> None:
    """It may have come at the end of an outage, in which others have lost their leases."""
    begin = time.monotonic()
    with Member(store, joiner=True) as member:
        assert member.leader.steps.get(timeout=DEADLINE_S) >= begin + TTL_S


def test_what_concerns_others_reaches_the_leader_alone(store: Store) -> None:
    """One that becomes leader has read all before it is asked to plan; also what it was not told of before."""
    write(store, 1, members=("a", "m9"), script_ranks=(0, 0))
    store.put(Keys.LEADER, LeaderRecord(id="a").to_json())
    store.put(Keys.worker("a"), WorkerState(id="a", epoch=1).to_json())
    with Member(store) as one:
        one.leader.steps.get(timeout=DEADLINE_S)
        store.put(Keys.left("a"), left("a").to_json())
        write(store, 2, members=("a", "m9"), script_ranks=(0, 0))
        one.sees(1, 2)
        mirror = one.coordinator._mirror
        assert mirror is not None and mirror.leader == "a" and not one.leader.departed
        assert not {key for key, _ in mirror.revisions()}.intersection({Keys.left("a"), Keys.worker("a")})
        one.leader.alone = True
        store.put(Keys.LEADER, LeaderRecord(id="m9").to_json())
        wait_until(lambda: one.leader.departed, "it knows who has left")
    assert one.leader.lacked == []


@pytest.mark.parametrize(
    ("how", "more"),
    [
        ({}, ()),
        ({"process_space": "s"}, ("hosts/s/",)),
        ({"joiner": True}, (Keys.WORKERS,)),
        ({"state": "waiting"}, ()),
        ({"state": "leaving"}, (Keys.MEMBERS,)),
    ],
)
def test_what_a_member_follows(how: dict[str, Any], more: tuple[str, ...]) -> None:
    """None of it begins with another one, and none grows with the number of members, but for the few that need that."""
    membership = Membership(record(**how))
    keys = followed(membership, fatal_plan(ONE, (), ("a",)), leads=False)
    few = {Keys.SPEC, Keys.PLAN, Keys.LEADER, Keys.STOP, Keys.RESTART, Keys.EPOCHS, Keys.NOTICES}
    assert set(keys) == few | {Keys.leave("m9"), Keys.asked("m9"), *more}
    assert not [(one, other) for one in keys for other in keys if one != other and one.startswith(other)]
    assert followed(membership, None, leads=True) == ("",)
    if how == {"state": "waiting"}:
        assert Keys.MEMBERS in followed(membership, ONE, leads=False), "whether the job is whole again"


def test_a_joiner_is_told_of_every_plan(store: Store) -> None:
    """Of the one that has admitted it, too, when the next one has lost it already: it is out then."""
    write(store, 1)
    member = Member(store, joiner=True)
    member.held.clear()
    with member:
        member.sees(1)
        write(store, 2, members=("a", "m9"), script_ranks=(0, 0))
        write(store, 3, lost=("m9",))
        wait_until(lambda: member.coordinator._inbox._actions.qsize() >= 2, "both", DEADLINE_S)
        member.held.set()
        member.sees(2, 3)
    assert member.state is State.EVICTED


class Forgetful(Store):
    """Its watch brings no plan of ``missed`` epochs, and may be ended by :attr:`fail`."""

    missed: tuple[int, ...] = ()
    fail: Callable[[BaseException], None]

    def watch(
        self, prefix: str | Sequence[str], callback: Callable[[WatchEvent], None], *args: Any, **more: Any
    ) -> Any:
        def bring(event: WatchEvent) -> None:
            if event.key != Keys.PLAN or Plan.from_json(event.kv.value).epoch not in self.missed:
                callback(event)

        self.fail = more["on_error"]
        return super().watch(prefix, bring, *args, **more)


@pytest.fixture
def joiner(etcd: EtcdServer) -> Iterator[Member]:
    """One that waits to be admitted, has seen plan 1, and misses 2, which admits it, and 3, which has lost it."""
    namespace = new_namespace()
    store = Forgetful([etcd.url], namespace=namespace)
    store.missed = (2, 3)
    with Store([etcd.url], namespace=namespace) as mine:
        write(mine, 1)
        with Member(store, joiner=True, ttl_s=1.0) as one:
            one.store = mine
            one.sees(1)
            one.leader.steps.get(timeout=DEADLINE_S)
            write(mine, 2, members=("a", "m9"), script_ranks=(0, 0))
            write(mine, 3, lost=("m9",))
            yield one


def test_a_joiner_that_has_missed_plans_and_its_record_is_out_and_says_so(joiner: Member) -> None:
    joiner.store.delete(Keys.member("m9"))  # by the leader
    joiner.store.put(Keys.STOP, StopRecord(code=3, reason="x", by="a").to_json())
    write(joiner.store, 4)
    joiner.sees(4)
    assert joiner.stops.get(timeout=DEADLINE_S).code == 3
    assert joiner.told.get(timeout=DEADLINE_S) == "evicted"
    write(joiner.store, 5)
    joiner.sees(5)
    assert joiner.state is State.EVICTED
    lease = joiner.lease
    joiner.coordinator.leave(left("m9", 9, "evicted"))
    assert joiner.told.get(timeout=DEADLINE_S) == "ended" and joiner.told.empty() and joiner.stops.empty()
    assert joiner.store.get(Keys.left("m9")) is not None
    with pytest.raises(LeaseExpired):
        joiner.store.put("x", "", lease)


def test_a_joiner_that_has_missed_plans_and_is_registered_waits_on(joiner: Member) -> None:
    """The leader would have removed its record."""
    write(joiner.store, 4)
    joiner.sees(4)
    joiner.leader.steps.get(timeout=DEADLINE_S)
    wait_until(lambda: joiner.state is State.JOINING, "it has looked")
    assert joiner.told.empty() and joiner.store.get(Keys.member("m9")) is not None


def test_a_joiner_that_has_missed_plans_does_not_register_before_it_has_found_out(joiner: Member) -> None:
    """Else it would find its own new record. The plan after those it has missed is fatal: it waits for the next one."""
    joiner.lease.revoke()
    joiner.store.put(Keys.PLAN, replace(fatal_plan(ONE, (), ("a",)), epoch=4).to_json())
    joiner.sees(4)
    wait_until(lambda: joiner.coordinator._keeper.lease is None, "it knows that its lease has run out")
    turns, turned = joiner.coordinator._turn, threading.Event()
    joiner.coordinator._turn = lambda: (turns(), turned.set())[0]  # type: ignore[method-assign]
    assert turned.wait(DEADLINE_S)
    write(joiner.store, 5)
    joiner.sees(5)
    assert joiner.told.get(timeout=DEADLINE_S) == "evicted" and joiner.store.get(Keys.member("m9")) is None


def test_what_a_watch_cannot_bring_is_read_again(joiner: Member) -> None:
    """Etcd has compacted it."""
    store: Any = joiner.coordinator._store
    store.fail(StoreError("etcd has compacted revision 7"))
    joiner.sees(3)
    assert joiner.told.get(timeout=DEADLINE_S) == "evicted", "it is lost by that plan"
    write(joiner.store, 4)
    joiner.sees(4)


def test_a_member_registers_again_while_somebody_has_overwritten_the_plan(etcd: EtcdServer) -> None:
    """Else nobody could lead, and put it back."""
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as stranger:
        store = Store([etcd.url], namespace=namespace, secret=JobSecret.new())
        store.put(Keys.PLAN, initial_plan(["m0"]).to_json())
        with Member(store, "m0", ttl_s=1.0) as member:
            member.leader.steps.get(timeout=DEADLINE_S)
            before = stranger.get(Keys.member("m0"))
            stranger.put(Keys.PLAN, "{}")
            member.lease.revoke()
            wait_until(lambda: stranger.get(Keys.member("m0")) not in (None, before), "it is registered anew", 20.0)


def test_one_that_leaves_and_is_out_without_a_lease_asks_no_more(etcd: EtcdServer) -> None:
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as mine:
        mine.put(Keys.PLAN, initial_plan(["m0"]).to_json())
        member = Member(Store([etcd.url], namespace=namespace), "m0", ttl_s=1.0)
        wakes, turn = queue.SimpleQueue[float | None](), member.coordinator._turn

        def counted() -> float | None:
            wake = turn()
            if member.coordinator._keeper.lease is None:
                wakes.put(wake)
            return wake

        member.coordinator._turn = counted  # type: ignore[method-assign]
        with member:
            member.leader.steps.get(timeout=DEADLINE_S)
            member.coordinator.mark_leaving()
            write(mine, 1)
            wait_until(lambda: member.coordinator._membership.epoch == 1, "it has seen that it is out")
            member.lease.revoke()
            assert wakes.get(timeout=DEADLINE_S) is None
    assert member.state is State.LEAVING


def test_a_record_is_put_only_under_the_plan_that_was_looked_at(store: Store) -> None:
    looked_at = store.put(Keys.PLAN, ONE.to_json())
    newer = store.put(Keys.PLAN, replace(ONE, epoch=ONE.epoch + 1).to_json())
    leases: list[Lease] = []
    with mock.patch.object(
        store, "lease", side_effect=lambda ttl_s: leases.append(Store.lease(store, ttl_s)) or leases[-1]
    ):
        assert register(store, record(), TTL_S, looked_at) is None and store.get(Keys.member("m9")) is None
    assert [lease.refresh() for lease in leases] == [False], "not revoked"
    assert register(store, record(), TTL_S, newer) is not None and store.get(Keys.member("m9")) is not None


@pytest.mark.parametrize("plan", [ONE, fatal_plan(ONE, (), ("a",))], ids=["running", "fatal"])
@pytest.mark.parametrize("how", [{"state": "waiting"}, {"joiner": True}], ids=["waits", "joins"])
def test_one_that_takes_no_part_ends_with_the_job_and_does_not_lead_it_on(
    store: Store, plan: Plan, how: dict[str, Any]
) -> None:
    """The others have finished before it could join them; what its leader would plan now is a restart."""
    store.put(Keys.PLAN, plan.to_json())
    store.put(Keys.worker("a"), WorkerState(id="a", epoch=1).to_json())
    with Member(store, **how) as member:
        member.leader.steps.get(timeout=DEADLINE_S)
        assert member.stops.empty()
        store.put(Keys.left("a"), left("a", outcome="finished").to_json())
        store.put(Keys.LEADER, LeaderRecord(id="m9").to_json())  # which nobody else contests
        stop = member.stops.get(timeout=DEADLINE_S)
    assert (stop.code, stop.reason) == (0, "the job has finished")
    assert not member.leader.departed and member.leader.abdicated


def test_one_that_a_launcher_has_started_does_not_wait_with_members_that_start_a_job_of_its_name(store: Store) -> None:
    """Their plan lists nobody, and waits for members without workers; it has one."""
    store.put(Keys.PLAN, unstarted_plan(2, None).to_json())
    with Member(store, "m0") as member:
        error = member.errors.get(timeout=DEADLINE_S)
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

    store = Watched([etcd.url], namespace=new_namespace())
    write(store, 3, origin="third", members=("m0",), fence_s=1.0)
    with Member(store, "m0", ttl_s=1.0) as member:
        assert member.contacts.get(timeout=DEADLINE_S).origin == "third"
        write(store, 2, origin="second", members=("m0",), fence_s=1.0)
        while not reads.empty():
            reads.get()
        for _ in range(2):
            reads.get(timeout=DEADLINE_S)
        write(store, 4, origin="fourth", members=("m0",), fence_s=1.0)
        while (origin := member.contacts.get(timeout=DEADLINE_S).origin) != "fourth":
            assert origin == "third"


def test_a_forged_request_to_stop_holds_no_other_one_up(etcd: EtcdServer) -> None:
    """That of a member whose worker has failed: the job would wait for it."""
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as stranger:
        stranger.put(Keys.STOP, "{}")
        with Member(Store([etcd.url], namespace=namespace, secret=JobSecret.new()), "m0") as member:
            member.coordinator.write(Keys.STOP, StopRecord(code=7, reason="failed", by="m0"))
            assert member.stops.get(timeout=DEADLINE_S).code == 7


def test_the_end_of_the_job_outlives_an_outage_in_which_the_member_departs(etcd: EtcdServer) -> None:
    """Its worker has failed, and was killed before etcd answered again: its departure does not say so any more."""

    class Away(Store):
        refused = 0

        def compare_and_swap(self, key: str, *args: Any, **more: Any) -> bool:
            if key == Keys.STOP and not self.refused:
                self.refused += 1
                raise StoreUnavailable("etcd is away")
            return super().compare_and_swap(key, *args, **more)

    namespace = new_namespace()
    store = Away([etcd.url], namespace=namespace)
    with Store([etcd.url], namespace=namespace) as mine:
        member = Member(store, "a")
        member.held.clear()
        write(mine, 1)
        with member:
            member.sees(1)
            member.coordinator.write(Keys.STOP, StopRecord(code=7, reason="failed", by="a"))
            member.coordinator.leave(left("a"))
            member.held.set()
            assert member.told.get(timeout=DEADLINE_S) == "ended"
        stop = mine.get(Keys.STOP)
        assert store.refused == 1 and stop is not None and StopRecord.from_json(stop.value).code == 7
        assert mine.get(Keys.left("a")) is not None


@pytest.mark.parametrize("outcome", ["lost", "finished"])
def test_a_loss_is_one_write_and_who_has_finished_is_there_until_it_needs_etcd_no_more(
    etcd: EtcdServer, outcome: str
) -> None:
    """A launcher ends the job's etcd as soon as no member is registered."""
    there: list[bool] = []
    namespace = new_namespace()
    with Store([etcd.url], namespace=namespace) as mine, Member(Store([etcd.url], namespace=namespace), "a") as member:
        write(mine, 1)
        member.leader.steps.get(timeout=DEADLINE_S)
        revoke = member.lease.revoke

        def watched() -> None:
            assert mine.get(Keys.left("a")) is not None
            there.append(mine.get(Keys.member("a")) is not None)
            revoke()

        member.lease.revoke = watched  # type: ignore[method-assign]
        member.coordinator.leave(left("a", outcome=outcome))
        assert member.told.get(timeout=DEADLINE_S) == "ended"
        assert there == [outcome == "finished"] and mine.get(Keys.member("a")) is None


def test_one_that_is_lost_and_leads_plans_what_is_lost_meanwhile(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heir, say, of whom it would else wait to hear that it has taken over."""
    monkeypatch.setattr("bamboo_ds.control.agent.coordinator._LAST_LEAD_S", DEADLINE_S)
    namespace = new_namespace()
    store = Store([etcd.url], namespace=namespace)

    class Leading(LeaderDouble):
        def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> None:
            if "m9" in mirror.left and mirror.plan is not None:
                write(
                    store,
                    mirror.plan.epoch + 1,
                    members=("b",) if "a" in mirror.left else ("a", "b"),
                    script_ranks=(0, 0),
                )

        def tell_takeovers(self, mirror: Mirror) -> bool:
            if "a" not in mirror.left:
                store.put_all({Keys.left("a"): left("a", outcome="lost").to_json()}, [Keys.member("a")])
            return "a" in mirror.members  # both come in one write, and one after the other

    for name in ("a", "b"):
        store.put(Keys.member(name), record(name).to_json())
    store.put(Keys.LEADER, LeaderRecord(id="m9").to_json())
    write(store, 1, members=("a", "b", "m9"), script_ranks=(0, 0, 0))
    with store, Member(Store([etcd.url], namespace=namespace), leader=Leading()) as one:
        one.sees(1)
        one.coordinator.leave(left("m9", outcome="lost"))
        assert one.told.get(timeout=DEADLINE_S) == "ended"
        assert Mirror(store.get_prefix(Keys.PLAN)).plan == replace(ONE, epoch=3, members=("b",), script_ranks=(0, 0))


@pytest.mark.parametrize("plans", [True, False])
def test_one_that_is_lost_and_leads_plans_that_itself(store: Store, plans: bool) -> None:
    """The next one that leads would have to be found, and to read all, first; and not tell of takeovers before its."""
    told: list[str] = []

    class Leading(LeaderDouble):
        def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> None:
            super().step(mirror, lease, trusted_from)
            if "m9" in mirror.left:
                told.append("plans" if "m9" not in mirror.members else "has still its record")
                if plans:
                    write(store, 2)

        def tell_takeovers(self, mirror: Mirror) -> bool:
            told.append("tells")
            if mirror.get(Keys.worker("a"), WorkerState) is None:
                store.put(Keys.worker("a"), WorkerState(id="a", epoch=2).to_json())
                return True
            return False

    store.put(Keys.member("a"), record("a").to_json())
    store.put(Keys.LEADER, LeaderRecord(id="m9").to_json())
    write(store, 1, members=("a", "m9"), script_ranks=(0, 0))
    with Member(store, leader=Leading()) as one:
        one.sees(1)
        one.coordinator.leave(left("m9", outcome="lost"))
        assert one.told.get(timeout=DEADLINE_S) == "ended"
    if plans:
        assert told[0] == "plans" and told[-2:] == ["tells", "tells"]
    else:
        assert set(told) == {"plans"}, "for a second"
    assert one.plans.empty(), "its worker needs no plan any more"


@pytest.mark.parametrize("registered", [True, False])
def test_one_that_takes_no_part_gives_up_when_etcd_stays_away(own_etcd: EtcdServer, registered: bool) -> None:
    """Its job may have ended with its etcd. One that takes part trains on."""
    namespace = new_namespace()
    joins, takes_part = (
        Member(
            Store([own_etcd.url], namespace=namespace, timeout_s=1.0), name, ttl_s=1.0, outage_s=0.5, joiner=name == "j"
        )
        for name in "jt"
    )
    if not registered:
        own_etcd.kill()
    with joins, takes_part:
        if registered:
            for member in (joins, takes_part):
                member.leader.steps.get(timeout=DEADLINE_S)
            own_etcd.kill()
        assert isinstance(joins.errors.get(timeout=DEADLINE_S), StoreUnavailable)
        assert takes_part.errors.empty()


def test_whatever_fails_at_the_end_the_agent_is_told_of_it() -> None:
    """Otherwise it would wait for a minute, and the connection to etcd stay open."""

    class Failing:
        def close(self, timeout_s: float) -> None:
            raise RuntimeError("a test says so")

    store: Any = mock.Mock()
    member = Member(store, "m0", display=Failing())
    member.coordinator._ending.set()
    with pytest.raises(RuntimeError, match="a test says so"):
        member.coordinator._run()
    store.close.assert_called_once_with()
    assert member.told.get_nowait() == "ended"
