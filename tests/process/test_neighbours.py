"""Dead agents of members that have joined are known to the other agents of their host."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.control.agent.neighbours import Neighbours, report_dead_agent, watched_by
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import LeaderRecord, LeftRecord, MemberRecord
from bamboo_ds.launchers import joined
from bamboo_ds.launchers.slots import Slots
from bamboo_ds.processes import process_space, started
from bamboo_ds.store.client import Store
from tests.support.records import left, member

pytestmark = pytest.mark.claim("reference/guarantees.md")

PATIENCE_S = 20.0


def agent(pid: int, name: str = "m5-x", space: str | None = None, began: int | None = None) -> MemberRecord:
    began, space = started(pid) if began is None else began, process_space() if space is None else space
    return member(name, int(name[1]), agent_pid=pid, agent_started=began, process_space=space, joiner=True)


def me() -> MemberRecord:
    return agent(1, "m9-me")


def follow(neighbours: Neighbours, *joiners: MemberRecord) -> None:
    neighbours.follow(me(), {record.id: record for record in joiners})


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import threading; threading.Event().wait()"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    one = Neighbours()
    yield one
    one.close()
    assert not one.pidfds


def next_death(neighbours: Neighbours) -> MemberRecord:
    assert wait(neighbours.pidfds, PATIENCE_S)
    neighbours.look()
    _, (record, at) = neighbours.dead.popitem()
    assert not neighbours.dead and at <= time.monotonic()
    return record


@pytest.mark.integration
def test_killed_agent_is_seen_and_told_once(neighbours: Neighbours) -> None:
    with process() as one, process() as other:
        records = [agent(one.pid), agent(other.pid, "m6-x")]
        follow(neighbours, *records)
        one.kill()
        assert next_death(neighbours) == records[0]
        follow(neighbours, *records)
        follow(neighbours, *records[1:])
        assert not neighbours.dead and len(neighbours.pidfds) == 1
        other.kill()
        assert next_death(neighbours) == records[1]


@pytest.mark.integration
def test_one_that_has_left_is_watched_no_more(neighbours: Neighbours) -> None:
    with process() as one, process() as other:
        follow(neighbours, agent(one.pid), agent(other.pid, "m6-x"))
        follow(neighbours, agent(other.pid, "m6-x"))
        one.kill()
        one.wait()
        other.kill()
        assert next_death(neighbours).id == "m6-x"


@pytest.mark.integration
def test_dead_before_it_was_watched(neighbours: Neighbours) -> None:
    """Or its process id means another process by now."""
    with process() as one:
        gone = agent(one.pid)
    with process() as one:
        follow(neighbours, gone, agent(one.pid, "m6-x", began=1))
    assert neighbours.dead.keys() == {"m5-x", "m6-x"} and not neighbours.pidfds


@pytest.mark.integration
def test_processes_elsewhere_are_not_judged(neighbours: Neighbours) -> None:
    with process() as one:
        far = agent(one.pid, space="another kernel")
    follow(neighbours, far)
    assert not neighbours.dead and not neighbours.pidfds


@pytest.mark.parametrize("launched", [True, False])
def test_the_leadership_of_one_ends_that_died_before_its_lease_did(
    store: Store, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """It had said good-bye, and so removed its record; its launcher, or a neighbour, finds it dead."""
    record = agent(1).model_copy(update={"joiner": not launched})
    kept = {
        Keys.known(record.id): record.to_json(),
        Keys.left(record.id): left(record.id, 5, "finished").to_json(),
    }
    for key in (Keys.LEADER, Keys.host(record.process_space, record.id)):
        store.put(key, (record if key != Keys.LEADER else LeaderRecord(id=record.id)).to_json())
    store.put_all(kept, [Keys.member(record.id)])
    if launched:
        monkeypatch.setattr(joined, "launchers_store", lambda *_: nullcontext(store))
        launcher: Any = Slots.__new__(Slots)
        launcher._options = SimpleNamespace(address=record.address)
        died: Any = SimpleNamespace(slot=5, process=SimpleNamespace(pid=record.agent_pid, returncode=-9))
        launcher._report_dead_agent(died)
    else:
        report_dead_agent(store, record, 12.5, "agent died")
    assert {key: entry.value for key, entry in store.get_prefix("").entries.items()} == kept


@pytest.mark.integration
def test_all_are_told_of_that_die_together(store: Store, neighbours: Neighbours) -> None:
    """Those that are reported make room for the next ones at once, not when their leases run out."""
    with process() as one:
        dead = [agent(one.pid, f"m{n}-x") for n in range(3, 8)]
    for record in dead:
        for key in (Keys.member(record.id), Keys.host(record.process_space, record.id)):
            store.put(key, record.to_json())
    told = set()
    for _ in dead:
        neighbours.follow(me(), Mirror(store.get_prefix(Keys.host(process_space()))).on_host)
        for record, at in neighbours.dead.values():
            report_dead_agent(store, record, at, "agent died")
            told.add(record.id)
        neighbours.dead.clear()
    assert told == {record.id for record in dead}
    assert store.get_prefix("").entries.keys() == {Keys.left(record.id) for record in dead}


def test_everybody_who_has_joined_is_watched() -> None:
    """Whoever dies together: among those that are left somebody watches each that has joined."""
    everybody = [agent(n, f"m{n}-x").model_copy(update={"joiner": n > 2}) for n in range(8)]
    everybody.append(agent(8, "m8-far", space="another kernel"))
    for living in ({0, 1, 2, 3, 4, 5, 6, 7}, {0, 3}, {6, 7}, {3, 4, 5, 6}):
        records = [r for r in everybody if r.slot in living or r.slot == 8]
        joiners = [r for r in records if r.joiner]
        watches = {r.id: watched_by(r, joiners, r.process_space) for r in records}
        assert all(len(watched) <= 2 and me not in watched for me, watched in watches.items())
        watched = {member for them in watches.values() for member in them}
        assert watched == {r.id for r in records if r.joiner and r.slot != 8}


def test_report_makes_the_loss_known(store: Store) -> None:
    record = agent(1)
    for key in (Keys.member(record.id), Keys.LEADER):
        store.put(key, (record if key != Keys.LEADER else LeaderRecord(id=record.id)).to_json())
    report_dead_agent(store, record, 12.5, "agent died")
    assert store.get(Keys.member(record.id)) is None
    assert store.get(Keys.LEADER) is None
    entry = store.get(Keys.left(record.id))
    assert entry is not None
    departure = LeftRecord.from_json(entry.value)
    assert (departure.outcome, departure.reason, departure.since) == ("lost", "signal", 12.5)


def test_report_says_nothing_of_one_that_has_said_good_bye(store: Store) -> None:
    record = agent(1)
    report_dead_agent(store, record, 12.5, "agent died")
    assert store.get(Keys.left(record.id)) is None
    good_bye = left(record.id, 5, "finished").to_json()
    store.put(Keys.left(record.id), good_bye)
    store.put(Keys.member(record.id), record.to_json())  # its lease is about to be revoked
    report_dead_agent(store, record, 12.5, "agent died")
    entry = store.get(Keys.left(record.id))
    assert entry is not None and entry.value == good_bye
