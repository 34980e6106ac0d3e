"""etcd stops, is restarted, or loses its leader while a job trains: training goes on, nothing is decided twice."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.records import MemberRecord
from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.jobs import Reference, RunningJob, slow_until, write_config
from tests.support.watching import assert_exact, registered, wait_lost, wait_steps, wait_whole

pytestmark = [pytest.mark.claim("guides/elastic.md"), pytest.mark.integration]

#: Undisturbed runs with these are needed by other tests, too.
ARGUMENTS = ("--evaluate-every", "10")
TTL_S = 5
#: Longer than the outages in which training goes on.
FENCE_S = 14


def start(folder: Path, urls: str) -> RunningJob:
    """Four stages on the etcd at ``urls``; a second a step until the file ``go`` exists."""
    membership = {"lease_ttl_s": TTL_S, "heartbeat_timeout_s": 30, "fence_s": FENCE_S}
    config = write_config(folder, {"membership": membership, "redundancy": {"verify_every": 5}})
    command = ["--stages", "4", *ARGUMENTS, *slow_until(folder / "go", pace_s=1)]
    return RunningJob(folder, 4, command, config, options=["--store", urls])


def last_step(job: RunningJob) -> datetime:
    """When the newest step was done."""
    return datetime.fromisoformat(job.events("step")[-1]["time"].replace("Z", "+00:00"))


def owner_of(job: RunningJob, urls: str, rank: int) -> MemberRecord:
    """The member that owns a rank's role."""
    owner = job.plan()["owners"][rank]
    return next(member for member in registered(urls, job.name) if member.id == owner)


@pytest.mark.exhaustive
def test_outage_and_restart(tmp_path: Path, reference: Reference) -> None:
    """etcd stands still for longer than any lease, and than workers go on; later it is killed and comes back.

    Nobody is lost by that.
    """
    with EtcdServer(tmp_path) as etcd, start(tmp_path, etcd.url) as job:
        wait_steps(job, 1)
        wait_whole(job, 4)
        with open_store(etcd.url, "outage", 10.0) as store:
            store.put("canary", "", store.lease(TTL_S))
            first = owner_of(job, etcd.url, 2)
            etcd.pause()
            begin = datetime.now(timezone.utc)
            job.wait_for(
                "steps for longer than any lease", lambda: last_step(job) - begin > timedelta(seconds=TTL_S + 1)
            )
            job.wait_for("it pauses", lambda: "pauses before a commit" in job.output())
            etcd.resume()
            job.wait_for("it goes on", lambda: "etcd is back: the worker goes on" in job.output())
            # Somebody is lost before everybody is back.
            os.kill(first.pid, signal.SIGKILL)
            job.wait_for("a lease has run out", lambda: store.get("canary") is None)
        wait_lost(job, 1)
        wait_whole(job, 3)

        second = owner_of(job, etcd.url, 0)
        etcd.kill()
        wait_steps(job, 2)
        os.kill(second.pid, signal.SIGKILL)
        etcd.start()
        wait_lost(job, 2)
        wait_whole(job, 2)
        wait_steps(job, 2 * TTL_S)  # nobody's lease may run out now
        (tmp_path / "go").touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(4, 1, 6, *ARGUMENTS, *result.length))
    assert [event["member_id"] for event in result.events("member_lost")] == [first.id, second.id]
    assert len(result.ranks()) == 2


@pytest.mark.exhaustive
def test_a_cluster_loses_its_leader(tmp_path: Path, reference: Reference) -> None:
    """One of three etcds dies, the one that leads and that everybody speaks to; then a worker, then another one."""
    with EtcdCluster(tmp_path / "etcd") as cluster:
        leader = cluster.leader()
        others = [server for server in cluster.servers if server is not leader]
        urls = ",".join(server.url for server in (leader, *others))
        with start(tmp_path, urls) as job:
            wait_steps(job, 1)
            wait_whole(job, 4)
            first = owner_of(job, urls, 1)
            os.kill(first.pid, signal.SIGKILL)
            wait_lost(job, 1)
            wait_whole(job, 3)
            victim = owner_of(job, urls, 3)
            leader.kill()
            os.kill(victim.pid, signal.SIGKILL)
            wait_lost(job, 2)
            assert cluster.leader() is not leader
            wait_whole(job, 2)
            wait_steps(job, 2 * TTL_S)
            (tmp_path / "go").touch()
            result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(4, 1, 6, *ARGUMENTS, *result.length))
    assert [event["member_id"] for event in result.events("member_lost")] == [first.id, victim.id]
    assert len(result.ranks()) == 2
