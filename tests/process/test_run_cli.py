"""``bamboo run`` and its companions: exit codes, and that nothing is left however the job ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.control.registry import claims
from bamboo_ds.control.registry.access import open_store
from bamboo_ds.launchers import jobs, slots
from bamboo_ds.observe.events import read_events
from bamboo_ds.processes import boot_id, started
from tests.support.control import BAMBOO, Job, Start, wait_gone
from tests.support.etcd import EtcdServer
from tests.support.patience import Patience
from tests.support.processes import run
from tests.support.processes import start as start_process

pytestmark = pytest.mark.claim(
    "guides/elastic.md",
    "guides/logs.md",
    "guides/observing.md",
    "guides/security.md",
    "reference/cli.md",
    "reference/events.md",
    "reference/settings.md",
)


def test_failing_script_ends_the_job_with_its_code(start: Start) -> None:
    job = start(3).run()
    job.tell(1, "exit 3")
    assert job.exit_code() == 3
    assert not job.events("takeover_planned")
    assert job.events("run_finished")[0]["exit_code"] == 3
    (failed,) = job.events("member_failed")
    assert (failed["member_id"], failed["rank"], failed["detail"], failed["exit_code"]) == (job.member(1), 1, "3", 3)
    host = socket.gethostname()
    assert f"first failure: worker {job.member(1)}, rank 1 on host {host}, exited (code 3)" in job.output()


def test_exception_in_a_script_ends_the_job(start: Start) -> None:
    job = start(2).run()
    job.tell(0, "raise")
    assert job.exit_code() == 1
    shown = job.output()
    assert shown.index('    raise RuntimeError("a test says so")\nRuntimeError: a test says so\n')
    assert f"[bamboo] its output: {logs_of(job) / 'worker-0.log'}\n" in shown
    assert shown.endswith("[bamboo]   | RuntimeError: a test says so\n"), "with where that was, at the end"


def logs_of(job: Job) -> Path:
    """Where the logs of ``job`` are."""
    return Path(os.environ["BAMBOO_LOGS"], job.events("run_started")[0]["job"])


def test_all_killed_is_a_fatal_loss(start: Start) -> None:
    job = start(2).run()
    for rank in (0, 1):
        job.kill(job.worker(rank))
    assert job.exit_code() == 86


def test_ctrl_c_in_a_terminal_ends_everything_in_order(start: Start) -> None:
    """It reaches the launcher only; a worker that ignores SIGTERM is killed, and so is what a worker has started."""
    job = start(2, "--grace-s", "0.5").run()
    job.tell(0, "child")
    job.tell(1, "deaf")
    job.wait(lambda: job.find("child") and job.find("deaf"), "a child of one worker, and another worker that is deaf")
    job.remember()
    assert job.find("child")[0]["pid"] in job.seen
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.exit_code() == 128 + signal.SIGINT
    wait_gone(job, 2.0)
    assert "KeyboardInterrupt" not in job.output()


def test_killed_launcher_leaves_nothing(start: Start) -> None:
    job = start(3).run()
    job.tell(0, "child")
    job.tell(1, "deaf")
    job.tell(1, "print some words")
    job.wait(lambda: job.find("child") and job.find("printed"), "a child and a deaf worker that has printed")
    job.remember()
    # The launcher, etcd with its supervisor, agents, workers, the child.
    assert len(job.seen) >= 1 + 2 + 3 + 3 + 1
    assert job.folders
    job.kill(job.process.pid)
    wait_gone(job, 10.0)
    job.process.wait()
    job.wait_quietly(lambda: not job.files_left(), 10.0)
    logs = logs_of(job)
    assert {path.name for path in logs.iterdir()} == {f"{who}-{i}.log" for who in ("worker", "agent") for i in range(3)}
    assert {path.stat().st_mode & 0o777 for path in logs.iterdir()} == {0o600}
    assert logs.stat().st_mode & 0o777 == 0o700
    assert (logs / "worker-1.log").read_text().endswith(" some words\n")


def test_a_launcher_that_is_stopped_or_hung_up_stops_no_worker(start: Start) -> None:
    """Under ``nohup`` SIGHUP stays ignored, by launcher and agents. What workers write is shown all the same."""
    job = start(2, "--prefix-output", ignored=signal.SIGHUP).run()
    for pid in (job.process.pid, job.agent(0), job.agent(1)):
        job.kill(pid, signal.SIGHUP)
    job.tell(0, "print still here")
    job.wait(lambda: job.find("printed", 0), "a worker goes on")
    job.kill(job.process.pid, signal.SIGSTOP)
    lines = [f"{number:05d}{'x' * 30_000}" for number in range(60)]  # more than pipes hold
    for line in lines:
        job.tell(1, f"print {line}")
    job.wait(lambda: len(job.find("printed", 1)) == 60, "the worker has printed all")
    file = logs_of(job) / "worker-1.log"

    def told(text: str, prefix: str) -> list[str]:
        return [line.split()[-1] for line in text.splitlines() if line.startswith(prefix) and line.endswith("xxx")]

    job.wait_quietly(lambda: told(job.output(), "[1] ") == told(file.read_text(), "") == lines)
    job.kill(job.process.pid, signal.SIGCONT)
    job.finish()
    assert "[0] still here\n" in job.output() and not job.events("member_lost")


def orderly(start: Start) -> Job:
    """A job whose workers take their time to end."""
    job = start(2, "--grace-s", "60").run()
    job.tell_all("orderly")
    job.wait(lambda: len(job.find("orderly")) == 2, "orderly workers")
    return job


def told_to_end(job: Job) -> bool:
    return {told["rank"] for told in job.find("told to end")} == {0, 1}


def test_two_signals_of_one_event_are_one(start: Start) -> None:
    """A closing terminal sends SIGHUP, and who has started the launcher SIGTERM: workers keep their grace."""
    job = orderly(start)
    launcher = psutil.Process(job.process.pid)
    job.kill(launcher.pid, signal.SIGSTOP)
    job.wait_quietly(lambda: launcher.status() == psutil.STATUS_STOPPED)
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
        job.kill(launcher.pid, signum)  # so that it finds both
    job.wait(lambda: told_to_end(job), "both workers were told to end")
    job.tell_all("close")
    job.wait(lambda: len(job.find("threads")) == 2, "what they had to do")
    job.tell_all("exit 0")
    # Each is taken by any of the launcher's threads, so either may be the first.
    assert job.exit_code() in (128 + signal.SIGHUP, 128 + signal.SIGTERM)


def test_asked_again_it_ends_at_once(start: Start) -> None:
    job = orderly(start)
    job.kill(job.process.pid, signal.SIGTERM)
    job.wait(lambda: told_to_end(job), "both workers were told to end")
    again_at = time.monotonic() + 1.1 * slots._SAME_EVENT_S
    job.wait_quietly(lambda: time.monotonic() > again_at)
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.exit_code() == 128 + signal.SIGTERM  # long before the workers' grace is over


def test_exit_code_is_that_of_the_first_failure(start: Start) -> None:
    """Its agent ends after the other's: it has a child to end that does not listen. Neither hears of the other."""
    job = start(2, "--lease-ttl-s", "60").run()
    for words, answer in (("deaf", "deaf"), ("child", "child")):  # a child ignores what its parent does
        job.tell(0, words)
        job.wait(lambda answer=answer: job.find(answer, 0), words)
    job.remember()
    etcd, workers = job.etcd(), [psutil.Process(job.worker(rank)) for rank in (0, 1)]
    etcd.suspend()
    for rank, code in ((0, 3), (1, 4)):
        job.tell(rank, f"exit {code}")
        job.wait_quietly(lambda rank=rank: not workers[rank].is_running())
    etcd.resume()
    assert job.exit_code() == 3


def test_interrupt_while_starting(start: Start) -> None:
    job = start(2).begin()
    job.kill(job.process.pid, signal.SIGINT)
    assert job.exit_code() == 130


def test_status_and_stop(start: Start) -> None:
    job = start(4, "--job", "status-test").run(pipelines=2)
    job.tell(0, "progress 12 /ckpt/10")
    job.wait_quietly(lambda: job.status()["step"] == 12)
    report = job.status()
    assert (report["job"], report["epoch"], report["checkpoint_path"]) == ("status-test", 2, "/ckpt/10")
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
    assert "lost (signal SIGKILL)" in done.stdout and "…" not in done.stdout, "cut without a terminal"
    bare = [
        [pipeline, stage]
        for pipeline, stage in ((0, 0), (1, 0), (0, 1), (1, 1))
        if not _shadow(report, pipeline, stage)
    ]
    assert report["unshadowed"] == bare and bare and "/(m" in done.stdout, "they are being copied"
    times = {"pause_seconds": 0.2, "rebuild_seconds": 0.1, "redo_seconds": 0.1}
    passes = {"step": 12, "forwards_redone": 1, "backwards_redone": 1, "mode": "resume"}
    unknown = {"detection_seconds": None, "plan_seconds": None}
    for rank in (0, 1, 2):
        job.tell(rank, f"event recovered {json.dumps({**times, **passes, **unknown})}")
    job.tell(0, "print some words")

    (terminal, inside), (terminal_top, inside_top) = pty.openpty(), pty.openpty()
    commands = []

    def begin(output: int, *words: str) -> None:
        commands.append(start_process([*BAMBOO, *words], job.environment, output, errors=job.log.fileno()))
        os.close(output)

    (of_logs, logs_to), (of_events, events_to) = os.pipe(), os.pipe()
    begin(logs_to, "logs", "-f", "--member", "m0", "--agents")
    begin(events_to, "events", "-f", "--job", "status-test")
    begin(inside, "status", "-w")
    begin(inside_top, "top")
    with open(of_logs) as logs, open(of_events) as told:
        _read_until(terminal, b"epoch 3")
        _read_until(terminal_top, b"losses 1")
        (listed,) = json.loads(job.bamboo("jobs", "--json").stdout)
        assert (listed["job"], listed["members"], listed["step"], listed["losses"]) == ("status-test", 3, 12, 1)
        assert listed["events"] == str(job.events_file) and listed["problem"] is None
        loss = next(line for line in told if "worker m3 on host" in line)  # it is told while the job runs
        assert loss.endswith("died (SIGKILL); stage 1 of pipeline 1 taken over by m1 in 0.20 s; 3 of 4 are left\n"), (
            loss
        )
        assert any(line.startswith("[0] ") and line.endswith(" some words\n") for line in logs), "while the job runs"
        assert job.bamboo("stop").returncode == 0
        assert job.exit_code() == 143
        assert all(line.startswith(("[0] ", "[agent 0] ")) for line in logs)
        assert "exit code 143 after" in "".join(told)
        _read_until(terminal, b"job status-test has ended")
        _read_until(terminal_top, b"job status-test has ended")
    for each in (terminal, terminal_top):
        os.close(each)
    assert [command.wait(60) for command in commands] == [0] * 4
    nothing = job.bamboo("status")
    assert nothing.returncode == 2
    assert "no job runs here" in nothing.stderr


def _read_until(terminal: int, words: bytes) -> None:
    """Wait until ``words`` appear on it."""
    shown, patience = b"", Patience(60.0)
    while words not in shown:
        assert not patience.over(), shown[-2000:]
        if select.select([terminal], [], [], 0.5)[0]:
            shown += os.read(terminal, 4096)


def _shadow(report: dict[str, Any], pipeline: int, stage: int) -> bool:
    return any([pipeline, stage] in member["shadows"] for member in report["members"])


def test_shared_etcd(start: Start, tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd, open_store(etcd.url, "shared", 10.0) as store:
        store.put("left/old", "garbage of a dead job of the same name")
        job = start(2, "--store", etcd.url, "--job", "shared").run()
        again = job.bamboo("run", "-n", "1", "--store", etcd.url, "--job", "shared", __file__)
        assert again.returncode == 1
        assert "runs already" in again.stderr
        (listed,) = json.loads(job.bamboo("jobs", "--store", etcd.url, "--json").stdout)
        assert (listed["job"], listed["members"], listed["problem"]) == ("shared", 2, None) and listed["since"]
        done = job.bamboo("stop", "--store", etcd.url, "--job", "shared")
        assert done.returncode == 0, done.stderr
        assert job.exit_code() == 143
        assert not store.get_prefix("").entries, "keys were left"


@pytest.mark.integration
def test_etcd_that_is_gone_at_the_end_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdServer(tmp_path) as etcd:
        with claims.claimed(etcd.url, "shared"), open_store(etcd.url, "shared", 10.0) as store:
            store.put("left/one", "a departure")
            assert store.get("left/one") is not None  # now it is on the disk, see EtcdServer.restart
            etcd.kill()
            monkeypatch.setattr(claims, "_TIMEOUT_S", 1.0)
        monkeypatch.undo()
        etcd.start()
        with open_store(etcd.url, "shared", 10.0) as store:
            assert store.get("left/one") is not None
            claims.claim(etcd.url, "shared")
            assert not store.get_prefix("").entries
    assert "the keys of job shared stay in etcd" in caplog.text


def test_settings_of_the_script(start: Start, tmp_path: Path) -> None:
    """The script's own DeepSpeed configuration sets TTL and timeouts; its arguments and its terminal are untouched."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"bamboo": {"membership": {"lease_ttl_s": 7, "heartbeat_timeout_s": 3}}}))
    script = tmp_path / "script.py"
    known = "json.loads(os.environ['BAMBOO_SETTINGS'])['values']['membership']['heartbeat_timeout_s']"
    words = f"{known}, os.isatty(1), os.isatty(2), os.get_terminal_size().columns"
    script.write_text(f"import json, os, sys; print({words}, *sys.argv[1:])")
    arguments = ["-n", "2", "--deepspeed_config", str(config), "--", "-x"]
    command = [*BAMBOO, "run", "--quiet", "-n", "1", str(script), *arguments]
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 40, 132, 0, 0))
    with open(tmp_path / "errors.txt", "w+b") as errors:
        code = start_process(command, os.environ, inside, errors=errors.fileno()).wait(60)
        told = errors.seek(0) or errors.read()
    assert (code, b"[bamboo]" in told) == (0, False), told
    shown = f"3.0 True False 132 -n 2 --deepspeed_config {config} -- -x\r\n".encode()
    assert os.read(terminal, 4096) == shown, "a terminal stays one"
    os.close(inside)
    os.close(terminal)


@pytest.mark.integration
def test_script_without_bamboo_runs_as_it_would_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat, no layout, no channel: nothing is expected of it but its exit code. Events have a place."""
    script = tmp_path / "script.py"
    script.write_text("import os; os.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())")  # in one piece
    command = [*BAMBOO, "run", "-n", "2", "--job", "alone", str(script)]
    env = {name: value for name, value in os.environ.items() if name != "BAMBOO_LOGS"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    monkeypatch.chdir(tmp_path)
    done = run(command, env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert "[bamboo] job alone: 2 members on this host" in done.stderr
    assert "[bamboo] exit code 0 after" in done.stderr
    kinds = [event.event for event in read_events(tmp_path / "bamboo-logs" / "alone" / "events.jsonl")]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")


# -- the files of running jobs ------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.integration
def test_files_of_dead_launchers_are_cleaned(runtime: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = started(child.pid)
    assert began is not None
    dead = jobs.JobFile(job="dead", store="x", pid=child.pid, started=began, boot=boot_id())
    dead.write()
    assert jobs.running() == [dead]
    child.communicate()
    mine = jobs.this_process("mine", "x")
    assert mine.launcher() == psutil.Process()
    for job, change in (("reused", {"started": mine.started + 1}), ("rebooted", {"boot": "another"})):
        mine.model_copy(update={"job": job, **change}).write()
    assert jobs.running() == []
    assert not list(dead.path.parent.iterdir())


def test_a_job_on_a_loopback_address_opens_no_port_for_etcd(start: Start) -> None:
    job = start(2, "--address", "127.0.0.3").run()
    listening = [c.laddr for p in job.left() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.ip for c in listening] == ["127.0.0.3"] * 2, "the workers': where all are on this host etcd has no port"
    assert job.hello(0)["env"]["MASTER_ADDR"] == "127.0.0.3"
    with socket.socket() as probe:  # the port that was promised is free
        probe.bind(("127.0.0.3", int(job.hello(0)["env"]["MASTER_PORT"])))
    job.finish()
