"""A leader recognises its own plan when the answer to its writing was lost, and tells of it once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.control.leader.actions import Loss, StopJob
from bamboo_ds.control.leader.leader import Leader
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import (
    LayoutRecord,
    LeaderRecord,
    StopRecord,
    WorkerState,
)
from bamboo_ds.errors import StoreUnavailable
from bamboo_ds.observe.events import EventWriter
from bamboo_ds.secret import JobSecret
from bamboo_ds.store.client import Lease, Store
from bamboo_ds.store.records import WatchEvent
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.variables import ENV_LAUNCH
from tests.support.etcd import EtcdServer, new_namespace
from tests.support.records import left, member
from tests.support.settings import agent

pytestmark = pytest.mark.claim("concepts.md", "guides/launchers.md", "guides/security.md")

IDS = ("a", "b", "c")


class LossyStore:
    """A real store that loses the answers to some writings of the plan.

    Attributes:
        script: what becomes of the next ones: ``answered``, ``lost`` (carried out, the answer does not come),
            ``dropped`` (never carried out), ``late`` (carried out before the next one).
        struck: how many answers were lost.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.script: list[str] = []
        self.struck = 0
        self._late: list[Callable[[], bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_and_swap(
        self,
        key: str,
        mod_revision: int,
        value: str,
        lease: Lease | None = None,
        given: Mapping[str, int] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> bool:
        while self._late:
            assert self._late.pop()()
        fate = self.script.pop(0) if key == Keys.PLAN and self.script else "answered"

        def write() -> bool:
            return self._store.compare_and_swap(key, mod_revision, value, lease, given, also)

        if fate == "answered":
            return write()
        self.struck += 1
        if fate == "lost":
            assert write()
        elif fate == "late":
            self._late.append(write)
        raise StoreUnavailable("the answer is lost")


class Stage:
    """A leader with a job of three members, two steps before its first takeover."""

    def __init__(self, store: Store, folder: Path, launched: bool = False) -> None:
        self.store = LossyStore(store)
        self.file = folder / "events.jsonl"
        self.lease = store.lease(60)
        for slot, name in enumerate(IDS):
            store.put(Keys.member(name), member(name, slot, script_rank=slot).to_json(), self.lease)
            store.put(Keys.report(name), LayoutRecord(id=name, layout=Layout(1, 3), redundant=True).to_json())
        store.put(Keys.LEADER, LeaderRecord(id="a").to_json(), self.lease)
        self._events = EventWriter(str(self.file))
        self.fed: list[int] = []
        self.leader = Leader(
            self.store,  # type: ignore[arg-type]  # a double
            self._events,
            agent(world_size=3, settle_ms=0, lease_ttl_s=2, launched=launched),
            "a",
            on_feed=lambda slot, rank: self.fed.append(rank),
        )

    def step(self) -> None:
        """As the coordinator does: a request that is not answered is no error."""
        mirror = Mirror(self.store.get_prefix(""))
        try:
            self.leader.step(mirror, self.lease, 0.0)
        except StoreUnavailable:
            return

    def lose(self, name: str, **how: Any) -> None:
        fields = {"reason": "signal", "detail": "SIGKILL", **how}
        self.store.put(Keys.left(name), left(name, 1, **fields).to_json())
        self.store.delete(Keys.member(name))

    def events(self, kind: str) -> list[Any]:
        found = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def plan(self) -> Plan:
        entry = self.store.get(Keys.PLAN)
        assert entry is not None
        return Plan.from_json(entry.value)

    def close(self) -> None:
        self._events.close()


@pytest.fixture
def stage(store: Store, tmp_path: Path) -> Iterator[Stage]:
    one = Stage(store, tmp_path)
    one.step()
    one.step()
    yield one
    one.close()


def test_a_data_worker_that_has_come_does_not_keep_the_next_one_waiting(stage: Stage) -> None:
    """One that is on its way does."""
    stage.store.put(Keys.report("a"), LayoutRecord(id="a", layout=Layout(1, 3), redundant=True, apart=True).to_json())
    stage.lose("c")
    for name in ("a", "b"):
        stage.store.put(Keys.worker(name), WorkerState(id=name, epoch=3).to_json())
    for _ in range(4):
        stage.step()
    assert stage.plan().members == ("a", "b") and stage.fed == [2]
    for number in (3, 4):
        name = f"d{number}"
        record = member(name, number, script_rank=2, joiner=True, feeder=True)
        stage.store.put(Keys.member(name), record.to_json(), stage.lease)
        stage.store.put(Keys.report(name), LayoutRecord(id=name, layout=Layout(1, 3), redundant=True).to_json())
        for _ in range(2):
            stage.step()
        assert stage.plan().members == ("a", "b", name)
        stage.lose(name)
        for _ in range(4):
            stage.step()
        assert stage.plan().lost == (name,) and stage.fed == [2] * (number - 1)


def test_one_data_worker_is_started_in_place_of_one_that_leaves(stage: Stage) -> None:
    """It draws batches until the other one does, which takes the time of a start."""
    stage.store.put(Keys.report("a"), LayoutRecord(id="a", layout=Layout(1, 3), redundant=True, apart=True).to_json())
    stage.lose("c")
    for _ in range(2):
        stage.step()
    assert stage.plan().lost == ("c",)
    old = member("d3", 3, script_rank=2, joiner=True, feeder=True)
    stage.store.put(Keys.report("d3"), LayoutRecord(id="d3", layout=Layout(1, 3), redundant=True).to_json())
    stage.store.put(Keys.member("d3"), old.to_json(), stage.lease)
    for _ in range(2):
        stage.step()
    assert stage.plan().members == ("a", "b", "d3")
    for name in stage.plan().members:
        stage.store.put(Keys.worker(name), WorkerState(id=name, epoch=stage.plan().epoch).to_json())
    before = list(stage.fed)
    stage.store.put(Keys.member("d3"), old.model_copy(update={"state": "leaving"}).to_json(), stage.lease)
    for _ in range(6):
        stage.step()
    assert "d3" in stage.plan().members
    assert stage.fed == [*before, 2]


@pytest.mark.parametrize(
    "script", [["lost"], ["dropped"], ["dropped", "lost"], ["late"], ["late", "dropped"], ["dropped", "dropped"]]
)
def test_a_takeover_is_told_once(stage: Stage, script: list[str]) -> None:
    assert stage.plan().epoch == 2
    stage.lose("b")
    stage.store.script = list(script)
    for _ in range(6):
        stage.step()
    assert stage.store.struck == len(script)
    assert stage.plan().lost == ("b",)
    assert [event["epoch"] for event in stage.events("plan")] == [1, 2, 3]
    assert [event["member_id"] for event in stage.events("member_lost")] == ["b"]
    assert [(event["from"], event["to"]) for event in stage.events("takeover_planned")] == [("b", "a")]
    assert stage.store.get(Keys.timing(3)) is not None
    assert not stage.events("takeover"), "its heir has not entered the plan"
    stage.store.put(Keys.worker("a"), WorkerState(id="a", epoch=3).to_json())
    for _ in range(2):
        stage.step()
    (done,) = stage.events("takeover")
    assert (done["epoch"], done["from"], done["to"], done["role"]) == (3, "b", "a", [0, 1]) and done["seconds"] >= 0.0


@pytest.mark.parametrize(
    ("launched", "wrapped", "told"),
    [
        (True, False, ["worker b died (SIGKILL); stage 1 taken over by a; 2 of 3 are left"]),
        (True, True, []),
        (False, False, []),
    ],
    ids=["plain-launcher", "bamboo-launch", "bamboo-run"],
)
def test_the_terminal_of_another_launcher_tells_losses(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    launched: bool,
    wrapped: bool,
    told: list[str],
) -> None:
    """``bamboo run`` and ``bamboo launch`` tell the whole story themselves."""
    monkeypatch.setenv(ENV_LAUNCH, "1 2 3")
    if not wrapped:
        monkeypatch.delenv(ENV_LAUNCH)
    with contextlib.closing(Stage(store, tmp_path, launched)) as stage:
        stage.step()
        stage.step()
        assert not caplog.messages
        stage.lose("b")
        stage.step()
    assert caplog.messages == told


def test_the_plan_of_another_leader_is_not_told(stage: Stage) -> None:
    stage.lose("b")
    stage.store.script = ["dropped"]
    stage.step()
    assert stage.store.struck == 1
    stage.step()
    mine = stage.plan()
    assert (mine.epoch, len(stage.events("plan"))) == (3, 3)
    stage.lose("c")
    stage.store.script = ["dropped"]
    stage.step()
    stage.store.put(Keys.LEADER, LeaderRecord(id="other").to_json())
    stage.store.put(Keys.PLAN, replace(mine, epoch=4, nonce="theirs").to_json())
    stage.step()
    assert [event["epoch"] for event in stage.events("plan")] == [1, 2, 3]


def test_own_plan_is_told_although_another_one_leads_by_now(stage: Stage) -> None:
    stage.lose("b")
    stage.store.script = ["lost"]
    stage.step()
    stage.store.put(Keys.LEADER, LeaderRecord(id="c").to_json())
    for _ in range(2):
        stage.step()
    assert [event["epoch"] for event in stage.events("plan")] == [1, 2, 3]
    assert len(stage.events("member_lost")) == 1


def test_an_end_that_was_refused_is_not_told_later(stage: Stage) -> None:
    """The plan had changed since it was decided; then this member's own worker failed, and that ended the job."""
    before = Mirror(stage.store.get_prefix(""))
    stage.lose("b")
    stage.step()
    loss = Loss("c", "lease", "ran out", None, 0.0)
    stage.leader._stop(StopJob(86, "c was lost", (loss,)), before)
    assert stage.store.get(Keys.STOP) is None
    stage.store.put(Keys.STOP, StopRecord(code=1, reason="the worker failed", by="a").to_json())
    stage.step()
    assert not stage.events("fatal")
    assert [event["member_id"] for event in stage.events("member_lost")] == ["b"]


def test_forged_records_are_in_nobodys_way(etcd: EtcdServer, tmp_path: Path) -> None:
    """Somebody who can write to etcd, but does not know the secret, has put records where the leader's belong."""
    namespace = new_namespace()
    with (
        Store([etcd.url], namespace=namespace, secret=JobSecret.new()) as store,
        Store([etcd.url], namespace=namespace) as stranger,
        contextlib.closing(Stage(store, tmp_path)) as stage,
    ):
        stage.step()
        stage.step()
        first = stage.store.get(Keys.PLAN)
        assert first is not None and stage.plan().epoch == 2
        stranger.put(Keys.LEADER, LeaderRecord(id="a").to_json())
        stage.step()
        leader = stage.store.get(Keys.LEADER)
        assert leader is not None and leader.genuine and leader.lease == stage.lease.id
        stranger.put(Keys.STOP, "{}")
        stage.lose("b", outcome="failed", reason="exit", code=3)
        stage.step()
        stop = stage.store.get(Keys.STOP)
        assert stop is not None and stop.genuine and StopRecord.from_json(stop.value).code == 3


def test_a_plan_of_the_past_is_replaced(etcd: EtcdServer, tmp_path: Path) -> None:
    """Somebody who can write to etcd has put it there again; the leader has the newest one."""
    with (
        Store([etcd.url], namespace=new_namespace(), secret=JobSecret.new()) as store,
        contextlib.closing(Stage(store, tmp_path)) as stage,
    ):
        stage.step()
        stage.step()
        second = stage.plan()
        stage.lose("b")
        stage.step()
        newest = stage.plan()
        mirror = Mirror(stage.store.get_prefix(""))
        stage.store.put(Keys.PLAN, second.to_json())
        entry = stage.store.get(Keys.PLAN)
        assert entry is not None and newest.epoch == 3
        mirror.apply(WatchEvent("put", Keys.PLAN, entry))
        stage.leader.step(mirror, stage.lease, 0.0)
        assert stage.plan() == newest
