"""Checkpoints of scripts that are mirrored in a store of objects, by hosts that need not share a folder."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.state.checkpoints import list_checkpoints
from tests.job.test_own_checkpoints import saved
from tests.job.test_restart import steps_of
from tests.job.test_stored_jobs import PATIENCE_S, use
from tests.support.compare import assert_computed
from tests.support.etcd import EtcdServer
from tests.support.jobs import TRAIN, Reference, RunningJob, slow_until, write_config
from tests.support.members import MembersJob
from tests.support.s3 import BUCKET, S3Server
from tests.support.savers import members

__all__ = ["members"]  # a fixture

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/limits.md")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_job_on_hosts_that_share_nothing_goes_on_on_others(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its members are lost for good, with their folders and with etcd; the script loads from fresh folders."""
    go = tmp_path / "go"
    told = {"checkpoint": {"mirror": f"s3://{BUCKET}/mirror", "every_s": 0}, "membership": {"lease_ttl_s": 4}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    # The same path on each host, and another folder.
    script += ["--checkpoints", "/proc/self/cwd/checkpoints", "--stages", "2", "--save-every", "2", "--resume"]
    with S3Server(tmp_path) as server:
        use(server, monkeypatch)

        def start(job: MembersJob, etcd: EtcdServer, host: str) -> Any:
            (tmp_path / host).mkdir()
            with monkeypatch.context() as patch:
                patch.chdir(tmp_path / host)
                arguments = ["join", "--start", "2", "--store", etcd.url, "--job", "gpt", *script, *slow_until(go)]
                return job.member(arguments)

        (tmp_path / "one").mkdir()
        with EtcdServer(tmp_path / "one") as etcd, MembersJob(tmp_path, "gpt", {}) as job:
            first = [start(job, etcd, host) for host in "ab"]
            job.wait_for("a checkpoint", lambda: max(saved(job, own=False), default=0) >= 4, PATIENCE_S)
            for member in first:
                os.killpg(member.pid, signal.SIGKILL)
            assert [member.wait(30) for member in first] == [-signal.SIGKILL] * 2
            known = max(saved(job, own=False))
            assert not [host for host in "ab" if list((tmp_path / host).glob("checkpoints/step*"))], "no host has all"
        (tmp_path / "tmp").rename(tmp_path / "tmp-one")
        (tmp_path / "two").mkdir()
        with EtcdServer(tmp_path / "two") as etcd, MembersJob(tmp_path, "gpt", {}) as job:
            steps = len(job.events("step"))
            second = [start(job, etcd, host) for host in "cd"]
            job.wait_for("some steps", lambda: len(job.events("step")) > steps + 2, PATIENCE_S)
            go.touch()
            result = job.finish()
            assert [member.returncode for member in second] == [0, 0], result.output[-4000:]
    assert [bool(list((tmp_path / host).glob("checkpoints/step*"))) for host in "cd"] == [True, True]
    (begun,) = {int(result.length[1]) - len(dump["losses"]) for dump in result.ranks().values()}
    assert begun >= known, "from the newest one"
    assert_computed(result, reference(2, 1, 4, *result.length))


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_fatal_loss_takes_the_job_back_to_the_mirror(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is lost with the workers, and is there again afterwards."""
    go, arguments = tmp_path / "go", ("--save-every", "2", "--dropout", "0.1")
    told = {"checkpoint": {"mirror": f"s3://{BUCKET}/mirror", "every_s": 0}}
    with S3Server(tmp_path) as server:
        use(server, monkeypatch)
        command = ["--stages", "3", *arguments, *slow_until(go)]
        with RunningJob(tmp_path, 3, command, write_config(tmp_path, told, 4)) as job:
            job.wait_for("a checkpoint", lambda: max(saved(job, own=False), default=0) >= 4)
            workers = {member["slot"]: member["pid"] for member in job.status()["members"]}
            for pid in workers.values():
                os.kill(pid, signal.SIGSTOP)
            shutil.rmtree(tmp_path / "checkpoints")
            for slot in (1, 2):  # who owns the last stage, and its shadow
                os.kill(workers[slot], signal.SIGKILL)
            os.kill(workers[0], signal.SIGCONT)
            job.wait_for("the restart", lambda: bool(job.events("restart")))
            go.touch()
            result = job.finish()
    assert result.exit_code == 0, result.output[-5000:]
    (restart,) = result.events("restart")
    assert restart["checkpoint"].startswith(f"s3://{BUCKET}/mirror{tmp_path}/checkpoints/")
    first, second = steps_of(result.events())
    assert 4 < second[0] <= first[-1] + 1, (first, second)
    tags = [info.tag for info in list_checkpoints(tmp_path / "checkpoints", checksums=True) if not info.reasons]
    assert f"step{second[0] - 1}" in tags
    assert_computed(result, reference(3, 1, 4, *arguments, *result.length, own=True))
