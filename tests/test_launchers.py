"""The same unchanged script under each launcher loses a rank by SIGKILL and goes on, as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds import secret
from bamboo_ds.errors import ConfigError, LaunchError
from bamboo_ds.launchers import meeting, ranks, slurm
from bamboo_ds.secret import NONE, JobSecret

from .support.jobs import SUPPORT, bamboo_command, free_port, run_stock, write_config
from .support.launching import SCRIPT, LaunchedJob, losses
from .support.watching import wait_steps

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
@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["deepspeed-module", "torchrun", "srun"])
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
@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="draws"), pytest.param(True, id="fails", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
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


# -- Slurm's variables ------------------------------------------------------------------------------------


def task(**changes: str) -> dict[str, str]:
    usual = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NODELIST": "gpu[03-04,10],login-1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "1",
    }
    return usual | changes


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")])
def test_an_etcd_on_one_of_several_hosts_is_told(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss of that host would be the end of all recoveries."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    answer = {"store": "http://127.0.0.1:1", "job": "j", "embedded": True, "wrapped": False}

    def meet(rank: int) -> dict[str, object]:
        place = ranks.Launched(rank, 2, "127.0.0.1", int(os.environ["MASTER_PORT"]))
        own = meeting.Meeting(place, timedelta(seconds=60), hosts[rank])
        return own.agree(None, lambda: (answer, NONE))[0]

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(meet, (0, 1))) == [answer, answer]
    assert ("2 hosts take part, and the job's etcd is on one of them, a" in caplog.text) == (hosts == ("a", "b"))


GIVEN, MADE = JobSecret.new(), JobSecret.new()


@pytest.mark.parametrize(
    ("sealed_by", "own", "local", "outcome"),
    [
        (NONE, None, False, NONE),
        (GIVEN, GIVEN, False, GIVEN),
        (GIVEN, GIVEN, True, GIVEN),
        (MADE, None, True, MADE),  # rank 0 has made one, and all are on its host
        (NONE, GIVEN, False, "without proving"),
        (NONE, None, True, "without proving"),
        (GIVEN, None, False, "that this rank does not have"),
        (GIVEN, MADE, False, "another secret"),
        (GIVEN, None, True, "another secret"),
    ],
)
def test_only_rank_0_is_believed(
    sealed_by: JobSecret,
    own: JobSecret | None,
    local: bool,
    outcome: JobSecret | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is the first to write where the ranks meet could name an etcd of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    secret.keep("j", MADE)
    answer = {"store": "http://127.0.0.1:1", "job": "j", "embedded": True, "wrapped": False}
    place = ranks.Launched(1, 2, "127.0.0.1", 29500, local)
    said = sealed_by.seal(json.dumps(answer), "bamboo/0")
    if isinstance(outcome, JobSecret):
        assert meeting.verified(said, place, own, "bamboo/0") == (answer, outcome)
        return
    with pytest.raises(LaunchError, match=f"127.0.0.1:29500 .*{outcome}.*BAMBOO_SECRET_FILE"):
        meeting.verified(said, place, own, "bamboo/0")


@pytest.mark.parametrize("said", ["", "[]", "{}", "no", '{"job": "../../etc/x"}', '{"error": "no etcd"}'])
def test_other_answers_are_refused(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises((LaunchError, ConfigError)):
        meeting.verified(said, ranks.Launched(1, 2, "127.0.0.1", 29500, True), None, "bamboo/0")


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, False),
        ({}, False),
    ],
)
def test_ranks_of_one_host_know_it(variables: dict[str, str], local: bool) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = ranks.launched(usual | variables)
    assert place is not None and place.local == local


def test_variables_of_a_task() -> None:
    assert slurm.variables(task()) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21718",
    }


def test_what_is_set_stays() -> None:
    found = slurm.variables(task(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"))
    assert "MASTER_ADDR" not in found and "MASTER_PORT" not in found


def test_a_batch_script_is_no_task() -> None:
    assert slurm.is_task(task())
    assert not slurm.is_task({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("a[1-3]", ["a1", "a2", "a3"]),
        ("a[08-10,1]b", ["a08b", "a09b", "a10b", "a1b"]),
        ("r[1-2]n[1,3],x", ["r1n1", "r1n3", "r2n1", "r2n3", "x"]),
    ],
)
def test_lists_of_nodes(text: str, expected: list[str]) -> None:
    assert list(slurm.hosts(text)) == expected


@pytest.mark.parametrize(
    "wrong", [{"SLURM_STEP_NODELIST": "a[x]"}, {"SLURM_STEP_TASKS_PER_NODE": "two"}, {"SLURM_NODEID": "9"}]
)
def test_unreadable_variables_are_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
        slurm.variables(task(**wrong))
