"""A launcher whose own members are all gone stays for those that have joined."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bamboo_ds.cli.main import _stop_members
from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.keys import Keys, namespace
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord, StopRecord
from bamboo_ds.launchers.jobs import JobLocation
from bamboo_ds.launchers.joined import JoinedMembers, exit_code, tell_to_stop
from bamboo_ds.secret import ENV_SECRET, JobSecret
from bamboo_ds.store.client import Store
from bamboo_ds.topology import Plan
from tests.support.control import Job, Start
from tests.support.etcd import EtcdServer, Recorder
from tests.support.jobs import SUPPORT, RunningJob, write_config
from tests.support.records import left, member, mirror
from tests.support.settings import agent

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md", "reference/cli.md")


def guest(name: str = "m9-guest") -> MemberRecord:
    return member(name, 9, host="elsewhere", joiner=True)


def gone(outcome: str, name: str = "m9-guest") -> LeftRecord:
    return left(name, 9, outcome)


def test_a_guest_that_etcd_has_forgotten_may_come_back() -> None:
    members = JoinedMembers(agent(lease_ttl_s=2), range(2))
    assert members.look(mirror(guest()), 100.0) == {"m9-guest"}
    assert members.look(mirror(), 200.0) == {"m9-guest"}
    assert members.look(mirror(guest()), 203.0) == {"m9-guest"}
    assert members.look(mirror(), 205.0) == {"m9-guest"}
    assert members.look(mirror(), 209.0) == set()
    assert members.look(mirror(gone("lost")), 210.0) == set()


@pytest.mark.parametrize(("outcome", "restarts", "stays"), [
    ("fatal", 10, True), ("fatal", 0, False), ("evicted", 0, True), ("lost", 10, False),
])  # fmt: skip
def test_members_that_are_about_to_start_again_are_waited_for(outcome: str, restarts: int, stays: bool) -> None:
    """Between the end of all workers and their agents' next registration a fatal loss leaves nobody registered."""
    members = JoinedMembers(agent(lease_ttl_s=2, max_restarts=restarts), range(2))
    fatal = Plan(epoch=3, owners=("m9-guest",), members=("m9-guest",), lost_roles=(0,))
    assert members.look(mirror(fatal, gone(outcome)), 100.0) == ({"m9-guest"} if stays else set())
    assert members.look(mirror(fatal, gone(outcome)), 105.0) == set()
    given_up = StopRecord(code=86, reason="", by="")
    members = JoinedMembers(agent(lease_ttl_s=2, max_restarts=restarts), range(2))
    assert members.look(mirror(fatal, gone(outcome), given_up), 100.0) == set()


def test_exit_code_is_that_of_the_job() -> None:
    assert exit_code(mirror(gone("lost"), gone("finished", "m8"))) == 0
    assert exit_code(mirror(gone("lost"))) == 86
    assert exit_code(mirror(gone("stopped"), StopRecord(code=143, reason="", by=""))) == 143


def test_forged_records_hold_no_request_to_stop_up(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    own, job = JobSecret.new(), f"job-{os.urandom(4).hex()}"
    monkeypatch.setenv(ENV_SECRET, own.text)
    with (
        Store([etcd.url], namespace=namespace(job)) as stranger,
        open_store(etcd.url, job, 10.0, own) as store,
    ):
        for request in (
            lambda: _stop_members(JobLocation(job, etcd.url)),
            lambda: tell_to_stop(agent(job=job, store=etcd.url), signal.SIGTERM, "x"),
        ):
            store.delete_prefix("")
            store.put(Keys.member("m9-guest"), guest().to_json())
            stranger.put(Keys.member("x"), "{}")
            stranger.put(Keys.STOP, "{}")
            request()
            entry = store.get(Keys.STOP)
            assert entry is not None and entry.genuine and StopRecord.from_json(entry.value).code == 143


@contextmanager
def job_store(job: Job) -> Iterator[Store]:
    (path,) = job.runtime.glob("bamboo-*/*.json")
    state = json.loads(path.read_text())
    (file,) = job.runtime.glob("bamboo-*/*.secret")
    with open_store(state["store"], state["job"], 10.0, JobSecret(file.read_text().strip())) as store:
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
        store.put(Keys.left("m9-guest"), gone(outcome).to_json())
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
        store.watch("", seen)
        job.kill(job.process.pid, signal.SIGTERM)
        seen.wait_for("put", Keys.STOP)
        keys = [key for _, key, _ in seen.seen]
        departed = [key for key in keys[: keys.index(Keys.STOP)] if key.startswith(Keys.LEFT)]
        assert not departed, "guests would take it for a loss"
        if not alone:
            seen.wait_for("put", Keys.left(job.member(0)), 20.0)
        store.put(Keys.left("m9-guest"), gone("stopped").to_json())
        store.delete(Keys.member("m9-guest"))  # nobody is left: the job ends, and its etcd
    assert job.exit_code() == 143


#: Trains until it is ended. A process that it has forked then fails as one of a ``DataLoader`` may, whose worker goes
#: while the two talk.
ENDLESS = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, SUPPORT)
from small_job import begin

engine, data = begin(7)
out = Path(sys.argv[sys.argv.index("--out") + 1])
reading, writing = os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(writing)
    os.read(reading, 1)  # until the worker has ended
    try:
        raise ConnectionResetError("as a resource_sharer meets it")
    except ConnectionResetError:
        sys.excepthook(*sys.exc_info())
    (out / f"failed-{os.getpid()}").touch()
    os._exit(0)
os.close(reading)
while True:
    engine.train_batch(data)
    time.sleep(0.05)  # the pace, so that a joiner comes up with it
"""


@pytest.mark.integration
def test_an_orderly_stop_ends_joiners_and_prints_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(f"SUPPORT = {str(SUPPORT)!r}\n{ENDLESS}")
    with RunningJob(tmp_path, 2, [], write_config(tmp_path, {}), script) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        job.join()
        job.wait_for("it is admitted", lambda: len(job.events("member_joined")) == 3)
        job.process.terminate()
        result = job.finish(60)
    assert (result.exit_code, job.joiners[0].returncode) == (143, 143), result.output[-4000:]
    assert len(list(tmp_path.glob("failed-*"))) == 3
    assert "Traceback" not in result.output and "starts again" not in result.output, result.output[-4000:]
    assert not result.events("fatal") and not result.events("restart")
