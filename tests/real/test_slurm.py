"""Jobs of a real Slurm of two nodes; processes are tracked by `proctrack/linuxproc`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.store.embedded import EmbeddedEtcd

from ..support.jobs import TRAIN, Reference, bamboo_command, slow_until, write_config
from ..support.launching import LaunchedJob
from ..support.recipes import CLUSTER
from ..support.watching import PATIENCE_S, assert_exact, wait_lost, wait_steps, wait_whole
from .machines import Machines
from .slurm import Slurm

pytestmark = [
    pytest.mark.claim("guides/clusters.md", "guides/launchers.md"),
    pytest.mark.tools("Slurm", "munge", "sshd"),
]

STAGES, MICRO_BATCHES = 4, 4
ARGUMENTS = ("--training-data",)
BLOCK = {"membership": {"lease_ttl_s": 20}, "redundancy": {"verify_every": 5}}
#: As the README has it.
SRUN = ("srun", "--kill-on-bad-exit=0", "--no-kill", "--ntasks-per-node", "2")


@pytest.fixture
def slurm(tmp_path: Path, machines: Machines) -> Iterator[Slurm]:
    with Slurm(tmp_path / "slurm", machines, 2) as cluster:
        yield cluster


def launched(folder: Path, machines: Machines, slurm: Slurm, stages: int, script: Path, *more: str) -> LaunchedJob:
    """The job, one task per stage."""
    config = write_config(folder, BLOCK, MICRO_BATCHES)
    launch = [bamboo_command(), "launch", "--address", machines.outside, "--job", "slurm"]
    command = [*launch, "--events", str(folder / "events.jsonl"), "--", *SRUN, "-n", str(stages), sys.executable, "-u"]
    words = [str(script), "--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages)]
    words += [*ARGUMENTS, *more]
    return LaunchedJob(folder, [*command, *words], words, "slurm", machines.path, slurm.variables)


def test_losses(tmp_path: Path, reference: Reference, machines: Machines, slurm: Slurm) -> None:
    """srun, 2 nodes x 2: a worker and a task are killed, then `scancel --signal=USR1` tells all to leave."""
    go = tmp_path / "go"
    with launched(tmp_path, machines, slurm, STAGES, TRAIN, *slow_until(go)) as job:
        wait_whole(job, 4)
        wait_steps(job, 2)
        tasks = job.tasks()
        assert set(tasks) == set(range(4)) and {task.parent().name() for task in tasks.values()} == {"slurmstepd"}
        job.strike(job.workers()[1])
        wait_lost(job, 1)
        wait_whole(job, 3)
        wait_steps(job, 2)
        assert all(task.is_running() for task in tasks.values()), "Slurm has ended a task"
        job.strike(tasks[2])
        wait_lost(job, 2)
        wait_whole(job, 2)
        wait_steps(job, 2)
        members = job.plan()["members"]
        slurm.call("scancel", "--signal=USR1", slurm.step())
        job.wait_for("the notice", lambda: len(job.events("notice")) >= len(members), PATIENCE_S)
        wait_steps(job, 5)
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert [event["reason"] for event in result.events("member_lost")] == ["signal"] * 2
    notices = [(event["member"], event["source"], event["leaves"]) for event in result.events("notice")]
    assert sorted(notices) == [(member, "signal", True) for member in sorted(members)], (
        "each of the living hears it once"
    )
    assert len(result.events("member_left")) < len(members), "with all told to leave somebody stays"
    assert_exact(result, reference(STAGES, 1, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert set(result.ranks()) < {0, 1, 2, 3}


def test_a_loss_while_engines_are_built(tmp_path: Path, reference: Reference, machines: Machines, slurm: Slurm) -> None:
    """srun, 2 tasks: a worker is killed while engines are built; the job starts again."""
    script = Path(__file__).with_name("building.py")
    go = tmp_path / "go"
    with launched(tmp_path, machines, slurm, 2, script, *slow_until(go)) as job:
        both = [tmp_path / f"building-{rank}" for rank in (0, 1)]
        job.wait_for("both build their engines", lambda: all(file.exists() for file in both), PATIENCE_S)
        assert not job.events("step")
        job.strike(job.workers()[1])
        wait_lost(job, 1)
        (tmp_path / "built").touch()
        job.wait_for("it starts again", lambda: bool(job.events("restart")), PATIENCE_S)
        wait_steps(job, 3)
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert [event["reason"] for event in result.events("member_lost")] == ["signal"]
    assert_exact(result, reference(2, 1, MICRO_BATCHES, *ARGUMENTS, *result.length))


def submitted(folder: Path, machines: Machines, slurm: Slurm, recipe: str, *options: str, **told: str) -> LaunchedJob:
    """The job of a recipe's script; the process is that of ``sbatch``, which waits for its end."""
    config = write_config(folder, BLOCK, MICRO_BATCHES)
    words = [str(TRAIN), "--deepspeed_config", str(config), "--out", str(folder), "--stages", str(STAGES)]
    words += [*ARGUMENTS, *slow_until(folder / "go")]
    secret = folder / "job.secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())
    told |= {"BAMBOO_SECRET_FILE": str(secret), "BAMBOO_EVENTS": str(folder / "events.jsonl")}
    command = ["sbatch", "--wait", *options, str(CLUSTER / "slurm" / recipe), *words]
    return LaunchedJob(folder, command, words, "gpt", machines.path, slurm.variables | told)


def test_the_array_of_the_recipe(tmp_path: Path, reference: Reference, machines: Machines, slurm: Slurm) -> None:
    """sbatch, an array of 4 members on 2 nodes: one is preempted, the worker of one killed; both come back."""
    options = ("--array=1-4", "--cpus-per-task=2")
    with (
        EmbeddedEtcd(machines.outside) as etcd,
        submitted(tmp_path, machines, slurm, "members.sbatch", *options, BAMBOO_STORE=etcd.url) as job,
    ):
        wait_whole(job, 4)
        assert {event["host"] for event in job.events("member_joined")} == {machines.hostname(host) for host in (0, 1)}
        wait_steps(job, 2)
        slurm.call("sbatch", "--partition=urgent", "--cpus-per-task=2", "--output=/dev/null", "--wrap=true")
        job.wait_for("it has left", lambda: len(job.events("member_left")) == 1, PATIENCE_S)
        job.wait_for("it is there again", lambda: len(job.events("member_joined")) == 5, PATIENCE_S)
        wait_whole(job, 4)
        wait_steps(job, 2)
        job.strike(next(iter(job.workers().values())))
        wait_lost(job, 1)
        job.wait_for("it is there again", lambda: len(job.events("member_joined")) == 6, PATIENCE_S)
        wait_whole(job, 4)
        (tmp_path / "go").touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(STAGES, 1, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert len(result.ranks()) + len(result.joined()) == 4 and len(result.joined()) == 2
    (left,) = result.events("member_left")
    assert left["detail"] == "signal: SIGUSR1"
    assert [event["detail"] for event in result.events("member_lost")] == ["SIGKILL"]
    assert [event["members"] for event in result.events("run_started")] == [4]


def test_the_allocation_of_the_recipe(tmp_path: Path, reference: Reference, machines: Machines, slurm: Slurm) -> None:
    """sbatch, one allocation of 2 nodes x 2 with `bamboo launch` and srun in it: a worker is killed."""
    options = ("--ntasks-per-node=2",)
    with submitted(tmp_path, machines, slurm, "allocation.sbatch", *options) as job:
        wait_whole(job, 4)
        wait_steps(job, 2)
        job.strike(job.workers()[1])
        wait_lost(job, 1)
        wait_whole(job, 3)
        wait_steps(job, 2)
        (tmp_path / "go").touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(STAGES, 1, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert set(result.ranks()) == {0, 2, 3}
