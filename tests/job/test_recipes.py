"""The recipes for clusters: every file is checked for what this machine can tell without the cluster.

``tests/real/test_recipes.py`` has their tools' own checks.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from bamboo_ds.control.registry.access import open_store, put_once
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import StopRecord
from bamboo_ds.errors import EXIT_LEFT, EXIT_OVER
from bamboo_ds.secret import JobSecret
from tests.job.test_notice_leave import NoticedAws
from tests.support.compare import assert_computed
from tests.support.etcd import EtcdServer
from tests.support.jobs import TRAIN, Reference, slow_until, write_config
from tests.support.members import MembersJob
from tests.support.recipes import (
    Unit,
    environment_file,
)
from tests.support.watching import PATIENCE_S, assert_exact, registered, wait_steps
from tests.unit.launchers.test_recipes import ENVIRONMENT, EXIT_USAGE, UNIT, configurations

pytestmark = pytest.mark.claim("guides/clusters.md")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_members_of_the_unit_start_a_job_join_it_and_leave_on_notice(tmp_path: Path, reference: Reference) -> None:
    """The unit's own command line, with its variables. Two start the job; a third joins, and leaves by AWS's notice.

    Others come with another number of members, or too late.
    """
    unit, go, secret = Unit(UNIT), tmp_path / "go", JobSecret.new()
    told = configurations()["ds_config.json"]["bamboo"]
    told = {**told, "recovery": {"min_members": 2}, "notices": {**told["notices"], "poll_s": 0.1}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    script += ["--stages", "2", *slow_until(go)]
    etcd = EtcdServer(tmp_path)
    with ExitStack() as stack, NoticedAws(3) as aws:
        environ = environment_file(ENVIRONMENT) | {
            "BAMBOO_STORE": etcd.url,
            "BAMBOO_JOB_SECRET": secret.text,
            "BAMBOO_AWS_METADATA_URL": f"{aws.url}/{{slot}}",
            "MEMBERS": "2",
            "ZONE": "us-east-1a",
            "COMMAND": " ".join(script),
        }
        arguments = unit.command("ExecStart", "0", environ)[1:]
        name = environ["BAMBOO_JOB"]
        with MembersJob(tmp_path, name, environ) as job:
            job.member(arguments)
            job.wait_for("etcd is waited for", lambda: "It is waited for, up to 3600 s" in job.output(), PATIENCE_S)
            stack.enter_context(etcd)
            job.wait_for("one waits", lambda: "1 of --start = 2 are there" in job.output(), PATIENCE_S)
            ((only, _),) = [(each.state, each.slot) for each in registered(etcd.url, name, secret)]
            assert only == "waiting" and not job.events()
            job.member(arguments)
            wait_steps(job, 2)
            other = job.member(unit.command("ExecStart", "0", environ | {"MEMBERS": "3"})[1:])
            third = job.member(arguments)
            job.wait_for("it is admitted", lambda: len(job.events("member_joined")) == 3, PATIENCE_S)
            assert {each.zone for each in registered(etcd.url, name, secret)} == {"us-east-1a"}
            wait_steps(job, 2)
            aws.change(action={"action": "terminate", "time": "2099-01-01T00:00:00Z"}, noticed=frozenset([2]))
            job.wait_for("it has left", lambda: third.poll() is not None, PATIENCE_S)
            assert third.returncode == EXIT_LEFT, job.output()[-4000:]
            go.touch()
            result = job.finish()
            codes = [each.returncode for each in job.joiners]
            assert codes == [0, 0, EXIT_USAGE, EXIT_LEFT], result.output[-4000:]
            assert other.returncode == EXIT_USAGE and "--start 3: job 'gpt-1'" in result.output
            late = job.member(arguments)
            assert late.wait(60) == 0 and "has finished: there is nothing to join" in job.output()
            with open_store(etcd.url, name, 10.0, secret) as store:
                put_once(store, Keys.STOP, StopRecord(code=3, reason="the script failed", by="m0").to_json())
            assert job.member(arguments).wait(60) == EXIT_OVER and "has ended (the script failed)" in job.output()
    assert_exact(result, reference(2, 1, 4, *result.length))
    (left,) = result.events("member_left")
    assert left["detail"].startswith("aws: ")
    (started,) = result.events("run_started")
    assert started["members"] == 2 and started["command"][-len(script) :] == script
    assert not result.events("restart") and not result.events("member_lost") and not result.events("fatal")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_all_members_vanish_at_once(tmp_path: Path, reference: Reference) -> None:
    """With nobody left who could say anything, two others start the job again from its newest checkpoint."""
    go = tmp_path / "go"
    told = {"recovery": {"min_members": 2}, "membership": {"lease_ttl_s": 4, "fence_s": 8}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    script += ["--stages", "2", "--save-every", "2", *slow_until(go)]
    with EtcdServer(tmp_path) as etcd, MembersJob(tmp_path, "gpt", {}) as job:
        arguments = ["join", "--start", "2", "--store", etcd.url, "--job", "gpt", *script]
        first = [job.member(arguments), job.member(arguments)]
        saved = lambda: job.events("checkpoint_saved")  # noqa: E731
        job.wait_for("a checkpoint", lambda: bool(saved()), PATIENCE_S)
        wait_steps(job, 2)
        for member in first:
            os.killpg(member.pid, signal.SIGKILL)
        assert [member.wait(30) for member in first] == [-signal.SIGKILL] * 2
        del job.joiners[:]
        log = len(saved())
        second = [job.member(arguments)]
        job.wait_for("it waits", lambda: "1 of bamboo.recovery.min_members = 2 are there" in job.output(), PATIENCE_S)
        second.append(job.member(arguments))
        job.wait_for("it has started again", lambda: len(saved()) > log, PATIENCE_S)
        go.touch()
        result = job.finish()
        assert [member.returncode for member in second] == [0, 0], result.output[-4000:]
    plain = reference(2, 1, 4, *result.length)
    (restart,) = result.events("restart")
    assert restart["checkpoint"] == saved()[log - 1]["path"] and restart["number"] == 1
    assert_computed(result, plain)


@pytest.mark.exhaustive
@pytest.mark.integration
def test_all_members_vanish_before_the_engines_are_built(tmp_path: Path, reference: Reference) -> None:
    """Two others find a job that nobody is left of: they lead it, and all begins anew."""
    length = ("--steps", "4")
    told = {"recovery": {"min_members": 2}, "membership": {"lease_ttl_s": 2, "fence_s": 8}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    with EtcdServer(tmp_path) as etcd, MembersJob(tmp_path, "gpt", {}) as job:
        arguments = ["join", "--start", "2", "--store", etcd.url, "--job", "gpt", *script, "--stages", "2", *length]
        first = [job.member(arguments), job.member(arguments)]
        job.wait_for("the first plan", lambda: bool(job.events("plan")), PATIENCE_S)
        for member in first:
            os.killpg(member.pid, signal.SIGKILL)
        assert [member.wait(30) for member in first] == [-signal.SIGKILL] * 2
        assert [event["pipelines"] for event in job.events("plan")] == [None], "the engines were built too fast"
        del job.joiners[:]
        second = [job.member(arguments)]
        job.wait_for("it waits", lambda: "1 of bamboo.recovery.min_members = 2 are there" in job.output(), PATIENCE_S)
        second.append(job.member(arguments))
        result = job.finish()
        assert [member.returncode for member in second] == [0, 0], result.output[-4000:]
    (restart,) = result.events("restart")
    assert (restart["number"], restart["checkpoint"]) == (1, None)
    plain = reference(2, 1, 4, *length)
    assert_computed(result, plain)
    assert [len(dump["losses"]) for dump in result.ranks().values()] == [4, 4]
