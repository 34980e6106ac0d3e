"""``bamboo plan``: about a job whose keys are in a real etcd, and about jobs that do not exist."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli.plan import plan as command
from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import JobRecord, LayoutRecord, WorkerState
from bamboo_ds.errors import ConfigError
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.topology import Layout, Plan, StageMemory, initial_plan, takeover, with_redundancy

from .support.etcd import EtcdServer, new_namespace
from .support.records import member
from .support.settings import block

pytestmark = pytest.mark.claim("guides/even-shares.md", "reference/cli.md")


def bamboo_plan(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def report(*arguments: str) -> dict[str, Any]:
    return json.loads(bamboo_plan(*arguments, "--json"))


def next_owners(found: dict[str, Any]) -> list[str]:
    return [role["next_owner"] for role in found["roles"]]


def next_shadows(found: dict[str, Any]) -> list[str]:
    return [role["next_shadow"] for role in found["roles"]]


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
        self.put(Keys.member(name), member(name, slot, **{"host": name, "home": slot % 4, **fields}))


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
    # A copy that a learner reports complete is not made again.
    members = {"members": (*keys.plan.members, "e"), "homes": (*keys.plan.homes, 0)}
    copying: Plan = replace(keys.plan, **members, learners=((2, "e"), (3, "b")))
    keys.put(Keys.PLAN, copying)
    keys.put(Keys.worker("e"), WorkerState(id="e", epoch=copying.epoch, replicas=(2,)))
    assert [m["stage"] for m in report(*keys.arguments)["moves"]] == [3]
    # Somebody leaves, or has vanished just now.
    keys.add("e", joiner=True, state="leaving")
    assert report(*keys.arguments)["members"] == ["a", "b", "d"]
    assert keys.store.delete(Keys.member("d"))
    gone = report(*keys.arguments)
    assert gone["lost"] == ["d"] and set(next_owners(gone)) == {"a", "b"}
    assert gone["unheld"] == [[0, 3]], "its role had no shadow yet"
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


# -- jobs that do not exist -----------------------------------------------------------------------------


def test_what_if() -> None:
    full = report("--stages", "4", "--pipelines", "2", "--members", "8")
    assert next_owners(full) == [f"m{slot}" for slot in range(8)] and not full["moves"]
    assert any(reason.startswith("no role changes") for reason in full["reasons"])
    few = report("--stages", "4", "--pipelines", "2", "--members", "3")
    assert set(next_owners(few)) == {"m0", "m1", "m2"} and few["next_slowest"] == 3
    one = report("--stages", "4", "--members", "1")
    assert set(next_owners(one)) == {"m0"} and set(next_shadows(one)) == {None} and not one["unheld"]
    hosts = report("--stages", "4", "--members", "2,host=a", "--members", "3,host=b,zone=z")
    where = {"m0": "a", "m1": "a", "m2": "b", "m3": "b", "m4": "b"}
    assert all(where[r["next_owner"]] != where[r["next_shadow"]] for r in hosts["roles"])
    lost = report("--stages", "4", "--members", "5", "--lose", "m1", "--leave", "m2", "--bytes", "9,9,7,9")
    assert lost["lost"] == ["m1"] and lost["members"] == ["m0", "m3", "m4"]
    assert {move["bytes"] for move in lost["moves"] if move["stage"] == 2} == {7}
    fatal = report("--stages", "4", "--members", "4", "--lose", "m1", "--lose", "m0")
    assert fatal["unheld"] == [[0, 1]]
    uneven = report("--stages", "3", "--members", "2", "--seconds", "1,2,3")
    assert uneven["next_slowest"] == 3
    sliced = report("--stages", "2", "--pipelines", "2", "--slices", "2", "--members", "8", "--lose", "m5")
    # A slice's shadow is the same slice of the stage before.
    assert [(r["pipeline"], r["stage"]) for r in sliced["roles"] if r["owner"] == "m5"] == [(1, 1)]
    assert next(r["shadow"] for r in sliced["roles"] if r["owner"] == "m5") == "m1" and not sliced["unheld"]


def test_what_people_see() -> None:
    text = bamboo_plan("--stages", "4", "--members", "5", "--lose", "m1", "--explain", "--bytes", "5,6,7,8")
    assert "m1 -> m4" in text and "standbys: none" in text
    assert "copy of (0,1) (6 bytes): m0 -> m4" in text
    assert "lost: m1" in text and "slowest member: 2 -> 1 stages" in text


def test_what_members_may_hold() -> None:
    """Limits, what is held of them, and what binds."""
    asked = ("--stages", "4", "--members", "4,memory=25000000", "--bytes", ",".join(["10000000"] * 4), "--lose", "m2")
    found = report(*asked)
    assert found["memory"] == [{"member": m, "limit": 25_000_000, "held": 20_000_000} for m in ("m0", "m1", "m3")]
    assert [move["bytes"] for move in found["moves"]] == [] and next_shadows(found) == ["m3", "m0", None, None]
    text = bamboo_plan(*asked, "--explain")
    assert "m0 may hold 23.8 MiB, and holds 19.1 MiB" in text
    assert "no replica of (0,2), (0,3): one takes 9.5 MiB; of members that might hold it m0 has most room, 4.8" in text
    assert report(*asked[:3], "4", *asked[4:])["memory"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "4", "--members", "4,memory=9"], "needs --bytes"),
        (["--stages", "4", "--members", "4,memory=1G"], "memory=BYTES"),
        (["--stages", "4", "--members", "4,memory=9", "--bytes", "1,2"], "one for each of 4 stages"),
        (["--stages", "4"], "needs --stages and --members"),
        (["--members", "4"], "needs --stages and --members"),
        (["--stages", "4", "--members", "four"], "write a number"),
        (["--stages", "4", "--members", "4,rack=3"], "write a number"),
        (["--stages", "4", "--members", "4", "--job", "x"], "are about a job that runs"),
        (["--stages", "4", "--members", "4", "--lose", "m9"], "no member 'm9'"),
        (["--stages", "2", "--members", "1", "--lose", "m0"], "at least one member"),
        (["--stages", "4", "--members", "4", "--seconds", "1,x"], "--seconds"),
        (["--stages", "4", "--members", "4", "--seconds", "1,2"], "one for each of 4 stages"),
        (["--stages", "4", "--members", "4", "--min-gain", "2"], "min_gain"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bamboo_plan(*arguments)


#: Why stages are computed whole, by what is said of them.
WHOLE = {"topology.blocks": (), "tensor slices": ("--slices", "2", "--blocks", "3", "--members", "2")}


def test_stages_are_divided() -> None:
    """Of a job that does not exist, where members are fewer than stages."""
    imagined = ("--stages", "8", "--members", "7", "--blocks", "3")
    found = report(*imagined)
    assert (round(found["slowest"], 3), round(found["next_slowest"], 3)) == (2, 1.333)
    assert all(0 <= part["begin"] < part["end"] <= part["blocks"] == 3 for part in found["parts"])
    reasons = {name: report("--stages", "2", "--members", "2", *more)["reasons"] for name, more in WHOLE.items()}
    assert all(any(name in line and "whole" in line for line in lines) for name, lines in reasons.items()), reasons
    told = bamboo_plan(*imagined, "--explain")
    assert "of 3 blocks)" in told and "so that the slowest member gets less to do" in told
