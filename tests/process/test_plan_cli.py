"""``bamboo plan``: about a job whose keys are in a real etcd, and about jobs that do not exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import JobRecord, LayoutRecord, WorkerState
from bamboo_ds.errors import ConfigError
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.topology import Layout, Plan, StageMemory, initial_plan, takeover, with_redundancy
from tests.support.etcd import EtcdServer, new_namespace
from tests.support.records import member
from tests.support.settings import block
from tests.unit.cli.test_plan_cli import bamboo_plan, next_owners, next_shadows, report

pytestmark = pytest.mark.claim("guides/even-shares.md", "reference/cli.md")


# -- a job that runs ------------------------------------------------------------------------------------


class Keyspace:
    """The keys of a job of four stages whose member ``c`` has been lost and whose member ``e`` has joined."""

    def __init__(self, etcd: EtcdServer) -> None:
        self.job = new_namespace().strip("/").replace("/", "-")
        self.arguments = ["--store", etcd.url, "--job", self.job]
        self.store = open_store(etcd.url, self.job, 5.0)
        self.plan = takeover(with_redundancy(initial_plan("abcd"), Layout(1, 4), True), ["c"])
        for name in "abd":
            self.add(name)
            self.put(Keys.report(name), LayoutRecord(id=name, layout=self.plan.world, redundant=True))

    def put(self, key: str, record: Any) -> None:
        self.store.put(key, record.to_json())

    def add(self, name: str, **fields: Any) -> None:
        slot = "abcdef".index(name)
        self.put(Keys.member(name), member(name, slot, **{"host": name, "script_rank": slot % 4, **fields}))


@pytest.fixture
def keys(etcd: EtcdServer) -> Any:
    keyspace = Keyspace(etcd)
    with keyspace.store:
        yield keyspace


def test_a_running_job(keys: Keyspace) -> None:
    with pytest.raises(ConfigError, match="has not built its engines yet"):
        bamboo_plan(*keys.arguments)
    keys.put(Keys.PLAN, keys.plan)
    healed = report(*keys.arguments)
    assert (healed["job"], healed["epoch"], healed["members"]) == (keys.job, 3, ["a", "b", "d"])
    assert next_owners(healed) == ["a", "b", "b", "d"] and next_shadows(healed) == ["d", "a", "a", "b"]
    assert [(m["stage"], m["source"], m["destination"]) for m in healed["moves"]] == [(2, "b", "a"), (3, "d", "b")]
    # A joiner counts when its engine is built.
    keys.add("e", joiner=True)
    assert report(*keys.arguments)["members"] == ["a", "b", "d"]
    keys.put(Keys.report("e"), LayoutRecord(id="e", layout=keys.plan.world, redundant=True))
    grown = report(*keys.arguments)
    assert grown["members"] == ["a", "b", "d", "e"] and next_owners(grown) == ["a", "b", "e", "d"]
    assert (grown["slowest"], grown["next_slowest"]) == (2, 1)
    # What an iteration takes is told by workers, what a change has to win by the job's settings.
    keys.put(Keys.worker("a"), WorkerState(id="a", epoch=keys.plan.epoch, iteration_s=0.4))
    expected = report(*keys.arguments)
    assert (expected["iteration_s"], expected["next_iteration_s"]) == (0.4, 0.2)
    assert "an iteration takes 0.4 s, and is expected to take 0.2 s" in expected["reasons"]
    keys.put(Keys.SPEC, JobRecord(job=keys.job, world_size=4, settings=JobSettings(values=block(min_gain=0.6))))
    calm = report(*keys.arguments)
    assert next_owners(calm) == ["a", "b", "b", "d"]
    assert "another plan would be 50.0% faster: topology.min_gain asks for 60.0%" in calm["reasons"]
    assert next_owners(report(*keys.arguments, "--min-gain", "0.1")) == next_owners(grown)
    keys.put(Keys.SPEC, JobRecord(job=keys.job, world_size=4, settings=JobSettings(values=block(replicas=True))))
    assert report(*keys.arguments) == expected  # nobody stands by
    # A copy that a builder reports complete is not made again.
    members = {"members": (*keys.plan.members, "e"), "script_ranks": (*keys.plan.script_ranks, 0)}
    copying: Plan = replace(keys.plan, **members, builders=((2, "e"), (3, "b")))
    keys.put(Keys.PLAN, copying)
    keys.put(Keys.worker("e"), WorkerState(id="e", epoch=copying.epoch, replicas=(2,)))
    assert [m["stage"] for m in report(*keys.arguments)["moves"]] == [3]
    # Somebody leaves, or has vanished just now.
    keys.add("e", joiner=True, state="leaving")
    assert report(*keys.arguments)["members"] == ["a", "b", "d"]
    assert keys.store.delete(Keys.member("d"))
    gone = report(*keys.arguments)
    assert gone["lost"] == ["d"] and set(next_owners(gone)) == {"a", "b"}
    assert gone["lost_roles"] == [[0, 3]], "its role had no shadow yet"
    assert "role (0,3): nobody holds its state any more" in gone["reasons"]
    assert "role (0,0): taken over" not in " ".join(gone["reasons"])


def test_where_replicas_of_a_running_job_are(keys: Keyspace) -> None:
    """By what its workers tell of passes: they wait until it is known of all stages, then where there is no room."""
    stage = StageMemory(10 << 20, 10 << 20, 8 << 20, parked=True, clones=1 << 20, sums=4 << 20)
    begun = with_redundancy(initial_plan("abcd"), Layout(1, 4), True, memory=(stage,) * 4)
    assert begun.parked == ("a", "b", "c", "d")
    keys.put(Keys.PLAN, begun)
    keys.add("c")
    for number, name in enumerate("abcd"):
        room = (40 if name == "c" else 41) << 20
        keys.put(Keys.report(name), LayoutRecord(id=name, layout=begun.world, redundant=True, memory=room))
        assert report(*keys.arguments)["parked"] == ["a", "b", "c", "d"]
        told = {"passes": {number: 2 << 20}, "redundant": {number: 14 << 20}}
        keys.put(Keys.worker(name), WorkerState(id=name, epoch=begun.epoch, **told))
    found = report(*keys.arguments)
    assert found["parked"] == ["c"], "13 MiB of its own, and 28 of a replica that computes"
    assert "replicas of a compute ahead of a loss: there is room for that" in found["reasons"]
    assert not any(reason.startswith(("no role changes", "replicas of c")) for reason in found["reasons"])
    keys.put(Keys.PLAN, replace(begun, parked=()))
    reason = (
        "replicas of c wait in host memory until they compute, as c lacks 1.0 MiB to have them compute ahead of a loss"
    )
    assert reason in report(*keys.arguments)["reasons"]
    text = bamboo_plan(*keys.arguments, "--explain")
    assert "c may hold 40.0 MiB, and holds 26.0 MiB, its replicas in host memory\n" in text
    assert "d may hold 41.0 MiB, and holds 26.0 MiB\n" in text


def test_unknown_jobs(etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="no job 'nobody' is known"):
        bamboo_plan("--store", etcd.url, "--job", "nobody")
    with pytest.raises(ConfigError, match=r"--store .* needs --job"):
        bamboo_plan("--store", etcd.url)
