"""Members on several hosts that are cut off from others, or lost together. The hosts are network namespaces."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.hosts import HostJob, Hosts, MakeHosts
from tests.support.jobs import Reference, slow_until, write_config
from tests.support.watching import PATIENCE_S, assert_exact, wait_entered, wait_lost, wait_steps, wait_whole

pytestmark = [pytest.mark.claim("guides/elastic.md"), pytest.mark.integration, pytest.mark.exhaustive]

#: A member whose worker may go on, or wait, for so long without a plan.
PLAN_TIMEOUT_S = 15
TTL_S = 4
SETTINGS = {"lease_ttl_s": float(TTL_S), "heartbeat_timeout_s": float(TTL_S), "start_timeout_s": 60.0}


def start(
    folder: Path,
    hosts: Hosts,
    places: list[int],
    stages: int,
    micro_batches: int,
    arguments: tuple[str, ...],
    pace: int,
) -> HostJob:
    """The job, ``pace`` seconds a step until the file ``go`` exists."""
    block = {
        "membership": {"lease_ttl_s": TTL_S},
        "recovery": {"plan_timeout_s": PLAN_TIMEOUT_S},
        "redundancy": {"verify_every": 5},
    }
    config = write_config(folder, block, micro_batches)
    command = ["--stages", str(stages), *arguments, *slow_until(folder / "go", pace)]
    return HostJob(folder, hosts, places, command, config, settings=SETTINGS)


def test_members_that_are_cut_off_come_back(tmp_path: Path, reference: Reference, make_hosts: MakeHosts) -> None:
    """One is cut off from everybody, later two only from each other: one is evicted each time, and comes back."""
    arguments = ("--evaluate-every", "10")
    hosts = make_hosts(4)
    with start(tmp_path, hosts, [0, 1, 2, 3], 4, 6, arguments, pace=1) as job:
        wait_whole(job, 4)
        wait_steps(job, 2)
        first = job.member(2)
        hosts.cut(2)
        wait_lost(job, 1)
        (lost,) = job.events("member_lost")
        assert (lost["member_id"], lost["reason"]) == (first.id, "lease")
        # It cannot know that, but that it can do nothing: it stops. The others go on.
        job.wait_for("its worker has stopped", lambda: not psutil.pid_exists(first.pid), PATIENCE_S)
        wait_whole(job, 3)
        wait_steps(job, 2)
        assert psutil.pid_exists(first.agent_pid)
        hosts.mend(2)
        wait_whole(job, 4)
        second = job.member(2)
        assert second.joiner and second.agent_pid == first.agent_pid and second.id in job.plan()["owners"]

        wait_entered(job)  # who is awaited there could be accused by everybody
        before = job.members()
        hosts.separate(0, 1)
        wait_lost(job, 2)
        hosts.unite(0, 1)
        lost = job.events("member_lost")[1]
        assert lost["reason"] == "suspects"
        pair = {before[job.agents[slot].pid].id for slot in (0, 1)}
        assert pair == {lost["member_id"], lost["detail"]}
        wait_whole(job, 4)
        (tmp_path / "go").touch()
        result = job.finish()
        departures = job.departures()
    assert_exact(result, reference(4, 1, 6, *arguments, *result.length))
    assert [d.outcome if d else None for d in departures] == ["finished"] * 4, result.output[-6000:]
    assert len(result.events("member_lost")) == 2
    assert len(result.joined()) == 2 and len(result.ranks()) == 2


def test_loss_of_a_host(tmp_path: Path, reference: Reference, make_hosts: MakeHosts) -> None:
    """Two slots vanish at once with their host, and nobody tells: no stage loses owner and shadow together."""
    arguments = ("--training-data",)
    hosts = make_hosts(3)
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    with start(tmp_path, hosts, [0, 0, 1, 2], 2, 4, arguments, pace=3) as job:
        wait_whole(job, 4)
        wait_steps(job, 2)
        gone = {job.member(slot).id for slot in (0, 1)}
        plan = job.plan()
        for owner, shadow in zip(plan["owners"], plan["shadows"], strict=True):
            assert not {owner, shadow} <= gone
        hosts.cut(0)
        hosts.kill(0)
        wait_lost(job, 2)
        wait_whole(job, 2)
        wait_steps(job, 1)
        (tmp_path / "go").touch()
        result = job.finish()
        departures = job.departures()
    assert_exact(result, reference(2, 2, 4, *arguments, *result.length))
    assert {event["member_id"] for event in result.events("member_lost")} == gone
    assert {event["reason"] for event in result.events("member_lost")} == {"lease"}
    assert [d.outcome if d else None for d in departures] == [None, None, "finished", "finished"]
    assert len(result.ranks()) == 2
