"""A launcher whose own members are all gone stays for those that have joined."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bamboo_ds.cli.guests import Guests, exit_code
from bamboo_ds.control.access import open_store
from bamboo_ds.control.membership import Keys, LeftRecord, MemberRecord, StopRecord
from bamboo_ds.control.mirror import Mirror
from bamboo_ds.store import Store
from bamboo_ds.store.records import KeyValue, Snapshot

from .support.control import Job, start
from .support.etcd import Recorder

__all__ = ["start"]  # the fixture

Start = Callable[..., Job]


def guest(name: str = "m9-guest") -> MemberRecord:
    return MemberRecord(
        id=name, slot=9, host="elsewhere", address="127.0.0.1", pid=1, agent_pid=2, incarnation="x", joiner=True
    )


def left(outcome: str, name: str = "m9-guest") -> LeftRecord:
    fields = {"id": name, "slot": 9, "outcome": outcome, "reason": "exit", "detail": "0", "since": 1.0, "boot": "b"}
    return LeftRecord.model_validate(fields)


def mirror(*records: MemberRecord | LeftRecord | StopRecord) -> Mirror:
    found = {}
    for record in records:
        kind = {MemberRecord: Keys.member, LeftRecord: Keys.left}.get(type(record))
        key = kind(record.id) if kind and not isinstance(record, StopRecord) else Keys.STOP
        found[key] = KeyValue(key, record.to_json(), 1, 1)
    return Mirror(Snapshot(found, 1))


def test_a_guest_that_etcd_has_forgotten_may_come_back() -> None:
    guests = Guests(range(2), return_s=4.0)
    assert guests.look(mirror(guest()), 100.0) == {"m9-guest"}
    assert guests.look(mirror(), 200.0) == {"m9-guest"}
    assert guests.look(mirror(guest()), 203.0) == {"m9-guest"}
    assert guests.look(mirror(), 205.0) == {"m9-guest"}
    assert guests.look(mirror(), 209.0) == set()
    assert guests.look(mirror(left("lost")), 210.0) == set()


def test_exit_code_is_that_of_the_job() -> None:
    assert exit_code(mirror(left("lost"), left("finished", "m8"))) == 0
    assert exit_code(mirror(left("lost"))) == 86
    assert exit_code(mirror(left("stopped"), StopRecord(code=143, reason="", by=""))) == 143


@contextmanager
def job_store(job: Job) -> Iterator[Store]:
    (path,) = job.runtime.glob("bamboo-*/*.json")
    state = json.loads(path.read_text())
    with open_store(state["store"], state["job"], 10.0) as store:
        yield store


@pytest.mark.parametrize("outcome", ["finished", "lost"])
def test_launcher_stays_with_its_etcd(start: Start, outcome: str) -> None:
    job = start(2).run()
    with job_store(job) as store:
        store.put(Keys.member("m9-guest"), guest().to_json())
        for rank in (0, 1):
            job.kill(job.worker(rank))
        job.wait_quietly(lambda: "m9-guest have joined and go on" in job.output())
        assert store.get(Keys.member("m9-guest")) is not None
        store.put(Keys.left("m9-guest"), left(outcome).to_json())
        store.delete(Keys.member("m9-guest"))
    assert job.exit_code() == {"finished": 0, "lost": 86}[outcome]


@pytest.mark.parametrize("alone", [False, True])
def test_interrupt_ends_guests_too(start: Start, alone: bool) -> None:
    job = start(1).run()
    with job_store(job) as store:
        store.put(Keys.member("m9-guest"), guest().to_json())
        if alone:
            job.kill(job.worker(0))
            job.wait_quietly(lambda: "m9-guest have joined and go on" in job.output())
        seen = Recorder()
        store.watch(Keys.STOP, seen)
        job.kill(job.process.pid, signal.SIGTERM)
        seen.wait_for("put", Keys.STOP)
        store.put(Keys.left("m9-guest"), left("stopped").to_json())
        store.delete(Keys.member("m9-guest"))  # nobody is left: the job ends, and its etcd
    assert job.exit_code() == 143
