"""The same unchanged script under each launcher loses a rank by SIGKILL and goes on, as if nothing had happened."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.jobs import SUPPORT, bamboo_command, free_port, run_stock, write_config
from tests.support.launching import SCRIPT, LaunchedJob, losses
from tests.support.watching import wait_steps

pytestmark = pytest.mark.claim("guides/launchers.md", "guides/security.md", "reference/events.md")

RANKS = 2


def prepare(folder: Path, bamboo: bool, **block: Any) -> list[str]:
    """Write the script and its configuration, with ``block`` if with any; returns the script's command line."""
    config = write_config(folder, block if bamboo else None, 8)
    (folder / "numbers_script.py").write_text(SCRIPT)
    return ["numbers_script.py", "--deepspeed_config", str(config), "--out", str(folder)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of stock DeepSpeed."""
    folder = tmp_path_factory.mktemp("stock")
    prepare(folder, bamboo=False)
    result = run_stock(folder, RANKS, [], folder / "ds_config.json", script=folder / "numbers_script.py")
    assert result.exit_code == 0, result.output[-4000:]
    return losses(folder)[0]


LAUNCHERS = {
    "deepspeed": lambda: ["deepspeed", f"--num_gpus={RANKS}", f"--master_port={free_port()}"],
    "deepspeed-module": lambda: ["deepspeed", f"--num_gpus={RANKS}", f"--master_port={free_port()}", "--module"],
    "torchrun": lambda: ["torchrun", f"--nproc-per-node={RANKS}", f"--master-port={free_port()}"],
    "srun": lambda: [sys.executable, str(SUPPORT / "srun.py"), str(RANKS), sys.executable, "-u"],
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "launcher",
    [
        "deepspeed-module",
        pytest.param("torchrun", marks=pytest.mark.exhaustive),
        pytest.param("srun", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_is_lost_under(launcher: str, tmp_path: Path, stock: list[float]) -> None:
    script = prepare(tmp_path, bamboo=True)
    if "module" in launcher:
        script[0] = script[0].removesuffix(".py")
    go = tmp_path / "go"
    told = {"BAMBOO_CHECK_EXACT": "2", "BAMBOO_EVENTS": str(tmp_path / "events.jsonl")}
    command = [*LAUNCHERS[launcher](), *script, "--slow-until", str(go)]
    with LaunchedJob(tmp_path, command, script, "launched", variables=told) as job:
        wait_steps(job, 3)
        tasks = job.tasks()
        assert set(tasks) == set(range(RANKS))
        job.strike(job.workers()[1])
        wait_steps(job, 5)
        assert all(task.status() != psutil.STATUS_ZOMBIE for task in tasks.values()), "the launcher has ended something"
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert not job.files_left
    assert [(e["reason"], e["detail"]) for e in job.events("member_lost")] == [("signal", "SIGKILL")]
    assert re.search(
        r"worker m1 on host \S+ died \(SIGKILL\); stage 1 taken over by m0; 1 of 2 is left\n", job.output()
    )
    assert [e["exit_code"] for e in job.events("run_finished")] == [0]
    assert [(e["step"], e["stages"]) for e in job.events("exact_checked")] == [(2, 2)]
    assert losses(tmp_path) == {0: stock}


@pytest.fixture(scope="module")
def stock_apart(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of stock DeepSpeed where each rank draws other batches."""
    folder = tmp_path_factory.mktemp("stock-apart")
    prepare(folder, bamboo=False)
    result = run_stock(folder, RANKS, ["--apart"], folder / "ds_config.json", script=folder / "numbers_script.py")
    assert result.exit_code == 0, result.output[-4000:]
    return losses(folder)[0]


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [pytest.param(False, id="draws"), pytest.param(True, id="fails")])
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_worker_that_draws_for_another_rank(
    launcher: str, fails: bool, tmp_path: Path, stock_apart: list[float]
) -> None:
    """It has the local rank of the rank that it runs as. If none can begin the job ends, and says what they said."""
    go, broken = tmp_path / "go", tmp_path / "broken"
    script = [*prepare(tmp_path, bamboo=True, recovery={"max_restarts": 0}), "--apart", "--slow-until", str(go)]
    script += ["--fails-once-there", str(broken)]
    told = {"BAMBOO_EVENTS": str(tmp_path / "events.jsonl")}
    with LaunchedJob(tmp_path, [*LAUNCHERS[launcher](), *script], script, "launched", variables=told) as job:
        wait_steps(job, 3)
        if fails:
            broken.touch()
        else:
            go.touch()
        job.strike(job.workers()[0])
        result = job.finish()
    first = job.events("member_lost")[0]
    assert (first["member_id"][:2], first["reason"]) == ("m0", "signal")
    assert "starting a worker for rank 0: nobody else can draw its batches" in job.output()
    if fails:
        assert result.exit_code != 0
        assert job.output().count("RuntimeError: no such data set") == 3
        told = "nobody draws the batches of rank 0 any more, and each of 3 workers that were to do so has failed"
        assert re.search(rf"{told}, the last one, m\d+-\w+, by exit code 1: its output says why", job.output())
        return
    assert result.exit_code == 0, result.output[-6000:]
    assert losses(tmp_path)[1] == stock_apart


@pytest.mark.integration
@pytest.mark.exhaustive
def test_bamboo_launch_survives_the_launcher(tmp_path: Path, stock: list[float]) -> None:
    script = prepare(tmp_path, bamboo=True)
    go, told = tmp_path / "go", ["--job", "launched", "--check-exact", "2"]
    command = [bamboo_command(), "launch", *told, "--", *LAUNCHERS["torchrun"](), *script, "--slow-until", str(go)]
    with LaunchedJob(tmp_path, command, script, "launched", variables={"BAMBOO_EVENTS": "", "BAMBOO_LOGS": ""}) as job:
        job.events_file = tmp_path / "bamboo-logs" / "launched" / "events.jsonl"
        wait_steps(job, 3)
        # torchrun, as deepspeed, ends all others when it sees the death of a process that it has started.
        job.children_of(str(Path(sys.executable).with_name("torchrun")))[0].kill()
        wait_steps(job, 5)
        job.strike(job.workers()[1])
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert not job.files_left
    assert "torchrun has ended with" in job.output()
    assert job.output().count("[bamboo] exit code 0 after") == 1
    assert [(e["reason"], e["detail"]) for e in job.events("member_lost")] == [("signal", "SIGKILL")]
    assert [e["exit_code"] for e in job.events("run_finished")] == [0]
    assert losses(tmp_path) == {0: stock}
