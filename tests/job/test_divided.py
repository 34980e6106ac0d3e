"""Stages that owner and shadow compute together, so that no member has much more to do than another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.job.test_elastic import assert_same
from tests.support.jobs import RunningJob, bamboo_command, slow_until, write_config
from tests.support.surviving import Reference

pytestmark = pytest.mark.claim("guides/even-shares.md")

AUTO = {"topology": {"blocks": "auto"}, "redundancy": {"verify_every": 2}}


# -- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_straggler_comes_and_goes(tmp_path: Path, reference: Reference) -> None:
    """Its shadow computes a part of its stage as long as it is slow; results are those of a job without one."""
    go, slow = tmp_path / "go", tmp_path / "slow"

    def takes(times: float) -> None:
        (tmp_path / "new").write_text(f"1 {times}")
        (tmp_path / "new").rename(slow)

    def helped() -> bool:
        return 1 in [rank for rank, _, _ in job.plan()["lent"]]

    command = ["--stages", "3", "--pause-s", "0.01", "--straggler", str(slow), *slow_until(go, 0.01)]
    with RunningJob(tmp_path, 3, command, write_config(tmp_path, AUTO)) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        takes(4)
        job.wait_for("it is helped", helped)
        since = len(job.events("step"))
        job.wait_for("steps", lambda: len(job.events("step")) > since + 3)
        takes(1)
        job.wait_for("it computes its stage again", lambda: not helped())
        go.touch()
        result = job.finish()
    assert_same(result, reference(3, 1, 6, *result.length), [])
    assert not result.events("replica_mismatch") and not result.events("member_lost")


@pytest.mark.integration
def test_a_job_grows_beyond_its_stages(tmp_path: Path, reference: Reference) -> None:
    """Two members that join take halves of the stages; one of them is lost."""
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, AUTO)) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        joiners = []
        for count in (3, 4):
            joiners.append(job.join())
            job.wait_for("it is admitted", lambda count=count: len(job.events("member_joined")) == count)  # type: ignore[misc]
        job.wait_for("all compute", lambda: len(job.plan()["lent"]) == 2)
        parts = job.plan()
        assert sorted((rank, end - begin) for rank, begin, end in parts["lent"]) == [(0, 1), (1, 1)]
        computing = {*parts["owners"], *parts["shadows"]}
        assert len(computing) == 4
        epoch = parts["epoch"]
        job.wait_for("it is entered", lambda: sum(e["epoch"] == epoch for e in job.events("reconfigured")) == 4)
        job.wait_for("steps", lambda: sum(e["epoch"] == epoch for e in job.events("step")) > 3)
        os.killpg(joiners[0].pid, signal.SIGKILL)
        joiners[0].wait(30)
        job.wait_for("its loss", lambda: len(job.events("member_lost")) == 1)
        job.wait_for(
            "its replicas are elsewhere", lambda: job.plan()["epoch"] > epoch + 1 and all(job.plan()["shadows"])
        )
        go.touch()
        result = job.finish()
    assert_same(result, reference(2, 1, 6, *result.length), [], joined=1)
    assert not result.events("replica_mismatch")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_members_may_hold_only_so_much(tmp_path: Path, reference: Reference) -> None:
    """Two members have room for both stages, but not for what passes keep besides; one that joins holds one of them."""
    state = [16 * parameters for parameters in (2 * 272, 2 * 272 + 170)]
    limited = {"topology": {"memory_limit_mb": sum(state) / 2**20}, "redundancy": {"verify_every": 2}}
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go)]

    def short() -> list[list[list[int]]]:
        return [event["roles"] for event in job.events("memory_short")]

    with RunningJob(tmp_path, 2, command, write_config(tmp_path, limited)) as job:
        job.wait_for("replicas are given up", lambda: short() == [[[0, 0], [0, 1]]])
        job.join()
        job.wait_for("one is there again", lambda: short()[1:] == [[[0, 1]]])
        report = json.loads(run_plan(job))
        go.touch()
        result = job.finish()
    assert [plan["shadows"][0] is None for plan in result.events("plan")[1:]][:2] == [False, True]
    held = {each["member"]: (each["limit"], each["held"]) for each in report["memory"]}
    assert len(held) == 3 and all(0 < bytes_ <= limit == sum(state) for limit, bytes_ in held.values())
    assert any("no replica of (0,1)" in reason for reason in report["reasons"])
    assert_same(result, reference(2, 1, 6, *result.length), [], joined=1)


@pytest.mark.integration
def test_devices_bound_what_members_hold(tmp_path: Path, reference: Reference) -> None:
    """Without a setting. Each member has a device with room for one stage, and not for a replica of the other one."""
    go, room = tmp_path / "go", 12600
    command = ["--stages", "2", *slow_until(go), "--device-bytes", str(room * 10 // 9)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, {"redundancy": {"verify_every": 2}})) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        report = json.loads(run_plan(job))
        go.touch()
        result = job.finish()
    assert [(event["roles"], event["members"]) for event in result.events("memory_short")] == [([[0, 0], [0, 1]], [])]
    assert [each["limit"] for each in report["memory"]] == [room] * 2
    held = [each["held"] for each in report["memory"]]
    assert max(held) <= room < sum(held), held
    assert_same(result, reference(2, 1, 6, *result.length), [])


def run_plan(job: RunningJob) -> str:
    command = [bamboo_command(), "plan", "--job", job.name, "--json"]
    return subprocess.run(command, env=job.env, capture_output=True, check=True, timeout=60, text=True).stdout
