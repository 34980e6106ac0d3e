"""``bamboo run`` and its companions: exit codes, and that nothing is left however the job ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bamboo_ds.cli import jobs
from bamboo_ds.control.access import open_store
from bamboo_ds.control.membership import boot_id
from bamboo_ds.control.neighbours import started
from bamboo_ds.errors import ConfigError, LaunchError

from .support.control import BAMBOO, Job, start, wait_gone
from .support.etcd import EtcdServer

__all__ = ["start"]  # the fixture

Start = Callable[..., Job]


def test_failing_script_ends_the_job_with_its_code(start: Start) -> None:
    job = start(3).run()
    job.tell(1, "exit 3")
    assert job.exit_code() == 3
    assert not job.events("takeover")
    assert job.events("run_finished")[0]["exit_code"] == 3


def test_exception_in_a_script_ends_the_job(start: Start) -> None:
    job = start(2).run()
    job.tell(0, "raise")
    assert job.exit_code() == 1
    assert "RuntimeError: a test says so" in job.output()


def test_all_killed_is_a_fatal_loss(start: Start) -> None:
    job = start(2).run()
    for rank in (0, 1):
        job.kill(job.worker(rank))
    assert job.exit_code() == 86


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_ends_everything_in_order(start: Start, signum: signal.Signals) -> None:
    job = start(2).run()
    job.tell(0, "child")
    job.wait(lambda: job.find("child"), "a child of the worker")
    job.remember()
    assert job.find("child")[0]["pid"] in job.seen
    job.kill(job.process.pid, signum)
    assert job.exit_code() == 128 + signum
    wait_gone(job, 2.0)


def test_ctrl_c_in_a_terminal_reaches_the_launcher_only(start: Start) -> None:
    job = start(2).run()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.exit_code() == 130
    assert "KeyboardInterrupt" not in job.output()


def test_worker_that_ignores_sigterm_is_killed(start: Start) -> None:
    job = start(2, "--grace-s", "0.5").run()
    job.tell_all("deaf")
    job.wait(lambda: len(job.find("deaf")) == 2, "deaf workers")
    job.kill(job.process.pid, signal.SIGINT)
    assert job.exit_code() == 130


def test_killed_launcher_leaves_nothing(start: Start) -> None:
    job = start(3).run()
    job.tell(0, "child")
    job.tell(1, "deaf")
    job.wait(lambda: job.find("child") and job.find("deaf"), "a child and a deaf worker")
    job.remember()
    # The launcher, etcd with its supervisor, agents, workers, the child.
    assert len(job.seen) >= 1 + 2 + 3 + 3 + 1
    assert job.folders
    job.kill(job.process.pid)
    wait_gone(job, 10.0)
    job.process.wait()
    job.wait_quietly(lambda: not job.files_left(), 10.0)


def test_interrupt_while_starting(start: Start) -> None:
    job = start(2).begin()
    job.kill(job.process.pid, signal.SIGINT)
    assert job.exit_code() == 130


def test_status_and_stop(start: Start) -> None:
    job = start(4, "--job", "status-test").run(pipelines=2)
    job.tell(0, "progress 12 /ckpt/10")
    job.wait_quietly(lambda: job.status()["step"] == 12)
    report = job.status()
    assert (report["job"], report["epoch"], report["checkpoint"]) == ("status-test", 2, "/ckpt/10")
    assert [(m["slot"], m["id"], m["pid"], m["agent_pid"]) for m in report["members"]] == [
        (r, job.member(r), job.worker(r), job.agent(r)) for r in range(4)
    ]
    assert [m["roles"] for m in report["members"]] == [[[0, 0]], [[1, 0]], [[0, 1]], [[1, 1]]]
    assert [m["shadows"] for m in report["members"]] == [[[0, 1]], [[1, 1]], [[0, 0]], [[1, 0]]]
    assert {m["state"] for m in report["members"]} == {"running"}
    assert sum(m["leader"] for m in report["members"]) == 1
    job.kill(job.worker(3))
    job.wait_epoch(3, 3)
    done = job.bamboo("status", "--job", "status-test")
    assert done.returncode == 0
    assert "epoch 3" in done.stdout
    assert "step 12" in done.stdout
    report = job.status()
    assert [m["state"] for m in report["members"]] == [*["running"] * 3, "lost (signal SIGKILL)"]
    assert job.bamboo("stop").returncode == 0
    assert job.exit_code() == 143
    nothing = job.bamboo("status")
    assert nothing.returncode == 2
    assert "no job runs here" in nothing.stderr


def test_shared_etcd(start: Start, tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd, open_store(etcd.url, "shared", 10.0) as store:
        store.put("left/old", "garbage of a dead job of the same name")
        job = start(2, "--store", etcd.url, "--job", "shared").run()
        again = job.bamboo("run", "-n", "1", "--store", etcd.url, "--job", "shared", "x.py")
        assert again.returncode == 1
        assert "runs already" in again.stderr
        done = job.bamboo("stop", "--store", etcd.url, "--job", "shared")
        assert done.returncode == 0, done.stderr
        assert job.exit_code() == 143
        assert not store.get_prefix("").entries, "keys were left"


def test_prefixed_output(start: Start) -> None:
    job = start(2, "--prefix-output").run()
    job.tell(1, "print some words")
    job.wait(lambda: job.find("printed"), "the worker has printed")
    job.finish()
    assert "[1] some words\n" in job.output()


def test_settings_of_the_script(start: Start, tmp_path: Path) -> None:
    """The script's own DeepSpeed configuration sets TTL and timeouts; its arguments reach it untouched."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"bamboo": {"membership": {"lease_ttl_s": 7, "heartbeat_timeout_s": 3}}}))
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['BAMBOO_HEARTBEAT_TIMEOUT'], *sys.argv[1:])")
    arguments = ["-n", "2", "--deepspeed_config", str(config), "--", "-x"]
    done = subprocess.run(
        [*BAMBOO, "run", "-n", "1", str(script), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"3.0 -n 2 --deepspeed_config {config} -- -x\n"


def test_script_without_bamboo_runs_as_it_would_alone(tmp_path: Path) -> None:
    """No heartbeat, no layout, no channel: nothing is expected of it but its exit code."""
    script = tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'], flush=True)")
    done = subprocess.run(
        [*BAMBOO, "run", "-n", "2", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "3", "--pipelines", "2", "x.py"], "--pipelines 2 does not divide -n 3"),
        (["-n", "1", "--job", "a/b", "x.py"], "job name 'a/b' is not usable"),
        (["-n", "1", "x.py", "--deepspeed_config", "/does/not/exist"], "does not exist"),
        (["-n", "1", "--events", "/does/not/exist/e", "x.py"], "/does/not/exist"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    done = subprocess.run([*BAMBOO, "run", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help() -> None:
    for arguments, words in ((["version"], "bamboo_ds"), (["run", "--help"], "fatal loss"), (["-h"], "demo")):
        done = subprocess.run([*BAMBOO, *arguments], capture_output=True, text=True, timeout=60, check=True)
        assert words in done.stdout


# -- the files of running jobs ------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_job_files(runtime: Path) -> None:
    with pytest.raises(ConfigError, match="no job runs here"):
        jobs.choose(None)
    one = jobs.this_process("one", "http://user:secret@x")
    one.write()
    assert one.path.stat().st_mode & 0o777 == 0o600
    assert one.path.parent.stat().st_mode & 0o777 == 0o700
    assert jobs.choose(None) == one
    with pytest.raises(LaunchError, match="runs already"):
        jobs.this_process("one", "y").write()
    two = jobs.this_process("two", "y")
    two.write()
    with pytest.raises(ConfigError, match="one, two"):
        jobs.choose(None)
    assert jobs.choose("two") == two
    one.remove()
    one.remove()
    assert jobs.running() == [two]


def test_files_of_dead_launchers_are_cleaned(runtime: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = started(child.pid)
    assert began is not None
    dead = jobs.JobFile(job="dead", store="x", pid=child.pid, started=began, boot=boot_id())
    dead.write()
    assert jobs.running() == [dead]
    child.communicate()
    reused = jobs.this_process("reused", "x").model_copy(update={"started": 1})
    reused.write()
    assert jobs.running() == []
    assert not list(dead.path.parent.iterdir())


def test_folder_that_others_can_write_to_is_refused(runtime: Path) -> None:
    jobs.folder().chmod(0o777)
    with pytest.raises(LaunchError, match="only you can write to"):
        jobs.folder()


def test_ports_are_bound_to_the_advertised_address_only(start: Start) -> None:
    job = start(2, "--address", "127.0.0.3").run()
    listening = [c.laddr for p in job.left() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening, "etcd must listen somewhere"
    assert {address.ip for address in listening} <= {"127.0.0.3", "127.0.0.1"}
    assert job.hello(0)["env"]["MASTER_ADDR"] == "127.0.0.3"
    with socket.socket() as probe:  # the port that was promised is free
        probe.bind(("127.0.0.3", int(job.hello(0)["env"]["MASTER_PORT"])))
    job.finish()
