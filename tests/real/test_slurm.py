"""Jobs of a real Slurm of two nodes; processes are tracked by `proctrack/linuxproc`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..support.jobs import TRAIN, Result, bamboo_command, slow_until, write_config
from ..support.watching import PATIENCE_S, assert_exact, wait_lost, wait_steps, wait_whole
from .machines import Machines, RealJob
from .slurm import Slurm

Reference = Callable[..., Result]

pytestmark = pytest.mark.tools("Slurm", "munge", "sshd")

STAGES, MICRO_BATCHES = 4, 4
ARGUMENTS = ("--training-data",)
BLOCK = {"membership": {"lease_ttl_s": 20}, "redundancy": {"verify_every": 5}}
#: As the README has it.
SRUN = ("srun", "--kill-on-bad-exit=0", "--no-kill", "--ntasks-per-node", "2")


@pytest.fixture
def slurm(tmp_path: Path, machines: Machines) -> Iterator[Slurm]:
    with Slurm(tmp_path / "slurm", machines, 2) as cluster:
        yield cluster


def launched(folder: Path, machines: Machines, slurm: Slurm, stages: int, script: Path, *more: str) -> RealJob:
    """The job, one task per stage."""
    config = write_config(folder, BLOCK, MICRO_BATCHES)
    launch = [bamboo_command(), "launch", "--address", machines.outside, "--job", "slurm"]
    command = [*launch, "--events", str(folder / "events.jsonl"), "--", *SRUN, "-n", str(stages), sys.executable, "-u"]
    words = [str(script), "--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages)]
    words += [*ARGUMENTS, *more]
    return RealJob(folder, [*command, *words], words, "slurm", machines, slurm.variables)


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
