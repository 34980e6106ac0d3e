"""All members of a job are out of etcd's reach, or stopped, when somebody comes who starts it again."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from bamboo_ds.state.checkpoints import list_checkpoints
from tests.job.test_consumption import assert_consumed_once
from tests.support.compare import assert_computed
from tests.support.hosts import HostJob, MakeHosts
from tests.support.jobs import Reference, Result, slow_until, write_config
from tests.support.watching import PATIENCE_S, wait_steps

pytestmark = [pytest.mark.claim("guides/elastic.md", "reference/settings.md"), pytest.mark.integration]

TTL_S, FENCE_S = 2.0, 5.0
SETTINGS = {
    "lease_ttl_s": TTL_S,
    "heartbeat_timeout_s": 30.0,
    "start_timeout_s": 60.0,
    "max_restarts": 10,
    "fence_s": FENCE_S,
}
ARGUMENTS = ("--save-every", "2")


def times(result: Result, kind: str, members: set[str]) -> list[datetime]:
    """When events of ``kind`` were told by ``members``."""
    return [datetime.fromisoformat(e["time"]) for e in result.events(kind) if e["member"] in members]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["cut", "stop"])
def test_the_job_goes_on_once(tmp_path: Path, reference: Reference, make_hosts: MakeHosts, fault: str) -> None:
    """Its members see each other and not etcd, or are held and wake up when others have gone on for long."""
    block = {
        "membership": {"lease_ttl_s": 2, "heartbeat_timeout_s": 30, "fence_s": FENCE_S},
        "observe": {"checksums": True},
    }
    config = write_config(tmp_path, block, 4)
    command = ["--stages", "2", *ARGUMENTS, *slow_until(tmp_path / "go", 0.5)]
    hosts = make_hosts(2)
    with HostJob(tmp_path, hosts, [0, 0], command, config, settings=SETTINGS) as job:
        job.wait_for("a checkpoint", lambda: len(job.events("checkpoint_saved")) >= 2, PATIENCE_S)
        old = {job.member(slot).id for slot in (0, 1)}
        pids = [job.member(slot).pid for slot in (0, 1)]
        held = hosts.pids(0) if fault == "stop" else []
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        if fault == "cut":
            hosts.cut(0)
        job.come(2, 1, rank=0)
        job.wait_for("a restart", lambda: bool(job.events("restart")), PATIENCE_S)
        if fault == "cut":
            assert "pauses before a commit" in job.output()  # one of them: the other one waits for it
            assert all(psutil.pid_exists(pid) for pid in pids), "they know nothing of it"
        begun = len(job.events("checkpoint_saved"))
        job.wait_for("checkpoints of the others", lambda: len(job.events("checkpoint_saved")) > begun, PATIENCE_S)
        wait_steps(job, 2)
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        if fault == "cut":
            hosts.mend(0)
        job.wait_for("the old workers' end", lambda: not any(map(psutil.pid_exists, pids)), PATIENCE_S)
        (tmp_path / "go").touch()
        result = job.finish()
    (restart,) = result.events("restart")
    again = datetime.fromisoformat(restart["time"])
    for kind in ("step", "checkpoint_saved"):
        assert max(times(result, kind, old)) < again, kind
    assert result.exit_code == 0, result.output[-5000:]
    assert_computed(result, reference(2, 1, 4, *ARGUMENTS, *result.length, own=True))
    assert len(assert_consumed_once(result, 1, int(result.length[1])).starts) == 2
    infos = list_checkpoints(tmp_path / "checkpoints")
    assert [info.step for info in infos if info.status == "complete"] == sorted(info.step or 0 for info in infos)
