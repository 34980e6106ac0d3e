"""Agents, membership and leadership with real processes, a real etcd and real faults."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bamboo_ds.comm.places import Place
from bamboo_ds.control.agent.agent import Agent
from bamboo_ds.control.agent.data_workers import DataWorkers
from bamboo_ds.control.agent.mailbox import Mailbox
from bamboo_ds.control.messages import Heartbeat
from bamboo_ds.control.registry.records import LeftRecord, ProgressRecord, StopRecord
from bamboo_ds.topology.planner import initial_plan
from tests.support.control import Job, Start, lives
from tests.support.page import ask, gone_back, scraped, seen, served_at, value
from tests.support.ports import free_port

pytestmark = pytest.mark.claim(
    "guides/elastic.md",
    "guides/observing.md",
    "guides/restarts.md",
    "reference/cli.md",
    "reference/events.md",
    "reference/guarantees.md",
    "reference/limits.md",
    "reference/settings.md",
)

#: Seconds within which survivors must know of a dead process. Alone it takes some 0.05 s; the machine may be busy.
#: Where it counts leases last 60 s, so that none of them tells of the loss.
KNOWN_S = 20.0
TTL_S = 2


def leader_of(job: Job) -> int:
    """The slot whose agent wrote the first plan."""
    leader = job.events("plan")[0]["member"]
    return next(rank for rank in range(job.world) if job.member(rank) == leader)


def test_start_gives_everyone_the_same_plans_and_says_where_workers_listen(start: Start) -> None:
    job = start(4).run(pipelines=2)
    members = [job.member(r) for r in range(4)]
    assert job.wait_epoch(1)["owners"] == members
    plan = job.wait_epoch(2)
    assert plan["layout"] == {"pipelines": 2, "stages": 2, "sharded": False, "slices": 1, "blocks": []}
    assert plan["owners"] == members
    assert plan["shadows"] == [members[2], members[3], members[0], members[1]]
    places = [Place.parse(place) for place in plan["places"]]
    assert plan["places"] == job.wait_epoch(1)["places"] and {place.host for place in places} == {"127.0.0.1"}
    assert len({place.port for place in places}) == len({place.token for place in places}) == 4
    for rank, place in enumerate(places):
        listening = psutil.Process(job.hello(rank)["pid"]).net_connections("tcp")
        assert [each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN] == [place.port]
    env = job.hello(3)["env"]
    assert env["RANK"] == env["LOCAL_RANK"] == "3"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["LOCAL_SIZE"] == "4"
    assert "BAMBOO_CHANNEL_FD" not in env and "BAMBOO_LISTENER" not in env
    assert "BAMBOO_STORE" not in env
    job.finish()
    assert not job.events("member_lost")
    assert [e["epoch"] for e in job.events("plan")] == [1, 2]
    assert [e["rank"] for e in job.events("member_joined")] == [0, 1, 2, 3]
    assert job.events("run_finished")[0]["exit_code"] == 0


def test_one_tells_of_steps_and_each_of_checkpoints_and_of_what_takes_long() -> None:
    """Whoever comes to speak for all tells what it knows."""
    written: list[ProgressRecord] = []
    agent: Any = Agent.__new__(Agent)
    agent._id, agent._progress, agent._progress_due, agent._written = "a", None, None, Heartbeat()
    agent._speaks, agent._telling = False, None
    agent._coordinator = SimpleNamespace(write=lambda key, record: written.append(record))
    agent._slot = SimpleNamespace(note_plan=lambda plan: None)

    def beat(**told: Any) -> ProgressRecord | None:
        agent._progress = Heartbeat(**told)
        agent._plan_progress()
        if agent._progress_due is None:
            return None
        agent._write_progress()
        return written[-1]

    assert beat(step=1) is None
    assert beat(step=2, checkpoint="c2") == ProgressRecord(id="a", step=2, checkpoint="c2")
    assert beat(step=3, checkpoint="c2") is None
    assert beat(step=3, checkpoint="c2", doing="compiling") is not None
    assert beat(step=4, checkpoint="c2") == ProgressRecord(id="a", step=4, checkpoint="c2")
    assert beat(step=5, checkpoint="c2") is None
    agent._note_plan(initial_plan(["a", "b"]))
    assert agent._progress_due is not None
    agent._write_progress()
    assert written[-1].step == 5
    assert beat(step=5, checkpoint="c2") is None
    assert beat(step=6, checkpoint="c2") == ProgressRecord(id="a", step=6, checkpoint="c2")
    agent._note_plan(initial_plan(["b", "a"]))
    assert beat(step=7, checkpoint="c2") is None


@pytest.mark.integration
@pytest.mark.parametrize("outcome", ["fatal", "evicted", "lost", "failed"])
def test_data_workers_end_in_order(outcome: str) -> None:
    """Nobody has to wait for the lease of one, nor for that of the leader that one may have become."""
    agent: Any = Agent.__new__(Agent)
    agent._data_workers, agent._mailbox = DataWorkers(), Mailbox()
    agent._slot, agent._leaving = SimpleNamespace(terminated=False), SimpleNamespace(end_at=None)
    # It says good-bye before it ends.
    script = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("runs", flush=True)
signal.sigwait([signal.SIGTERM])
print("good-bye", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        agent._data_workers._processes.append(process)
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"runs\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
        agent._await_data_workers(SimpleNamespace(outcome=outcome))
        code = process.poll()
        process.kill()
    assert code == 0


@pytest.mark.integration
def test_what_a_killed_data_worker_leaves_is_collected() -> None:
    """Its agent is gone, so that its worker becomes a child of the agent that had started it."""
    script = """
import os, signal, subprocess, sys
import psutil
from bamboo_ds.control.agent import data_workers
from bamboo_ds.processes import adopt_orphans
from tests.support.patience import Patience
adopt_orphans()
own = subprocess.Popen(["true"])  # somebody else waits for it
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
agent = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
left = psutil.Process(int(agent.stdout.readline()))
found = data_workers.DataWorkers()
found._processes.append(agent)
agent.kill()
os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
data_workers._LOOK_S = 0.01
found.reap(own.pid)
assert left.is_running() and left.ppid() == os.getpid()
left.kill()
os.waitid(os.P_PID, left.pid, os.WEXITED | os.WNOWAIT)
patience = Patience(20.0)
while psutil.pid_exists(left.pid):
    assert not patience.over(), left
    found.reap(own.pid)
assert own.wait() == 0
print("collected")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "collected\n", done.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_the_end_of_a_good_job_ends_has_not_failed(code: int) -> None:
    """One that still starts, say. Where the job has failed by this worker, it has."""
    agent: Any = Agent.__new__(Agent)
    agent._id = "m4"
    agent._slot = SimpleNamespace(stop=StopRecord(code=code, reason="the job has ended", by="m4"))
    told = {"id": "m4", "slot": 4, "reason": "signal", "detail": "SIGTERM", "since": 0.0, "boot": ""}
    departure = LeftRecord(outcome="stopped", code=code, **told)
    assert agent._has_failed(departure) is (code != 0)
    assert agent._has_failed(departure.model_copy(update={"outcome": "failed"}))


@pytest.mark.integration
def test_data_workers_that_have_ended_leave_nothing_behind() -> None:
    """A job that loses members for as long as it lasts starts many."""
    agent: Any = Agent.__new__(Agent)
    agent._data_workers, agent._channel_open = DataWorkers(), False
    process = subprocess.Popen([sys.executable, "-c", ""])
    agent._data_workers._processes.append(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    agent._timeout, agent._note_stall, agent._meet_deadlines = (lambda now: 0.0), (lambda s: None), (lambda: None)
    agent._worker = SimpleNamespace(lingers=lambda: True, dead=False, pid=0)
    with selectors.DefaultSelector() as selector:
        agent._watch(selector)
    assert not psutil.pid_exists(process.pid)


def test_killed_workers_are_taken_over_in_no_time(start: Start) -> None:
    """First that of the leader, then another one. What workers tell has what only the control plane knows added."""
    job = start(4, "--lease-ttl-s", "60").run()
    victim = leader_of(job)
    speaker = (victim + 1) % 4
    job.tell(speaker, 'event step {"step": 1, "loss": 0.5, "seconds": 0.1, "frc_done": 0, "frc_total": 4}')
    job.tell(speaker, "event nonsense {}")
    job.wait_quietly(lambda: job.events("step"))
    other = (victim + 2) % 4  # its neighbours hold what the first one had, or have lost their shadow with it
    gone: list[int] = []
    for epoch, rank in ((3, victim), (4, other)):
        gone.append(rank)
        at = job.kill(job.worker(rank))
        plan = job.wait_epoch(epoch, *gone)
        assert plan["lost"] == [job.member(rank)]
        assert plan["at"] - at < KNOWN_S
    assert plan["owners"][other] == job.member((other - 1) % 4)
    recovered = (
        '{"step": 1, "pause_seconds": 0.2, "detection_seconds": null, "plan_seconds": null, '
        '"rebuild_seconds": 0.1, "redo_seconds": 0.1, "forwards_redone": 1, "backwards_redone": 1, "mode": "x"}'
    )
    job.tell(speaker, f"event recovered {recovered}")
    job.finish(*gone)
    assert job.events("plan")[2]["member"] == job.member(victim), "whose agent lives, and leads a little longer"
    lost = job.events("member_lost")
    assert [(e["member_id"], e["reason"], e["detail"]) for e in lost] == [
        (job.member(rank), "signal", "SIGKILL") for rank in gone
    ]
    assert all(0 <= e["detection_seconds"] < KNOWN_S for e in lost)
    takeovers = {(e["role"][1], e["from"]) for e in job.events("takeover_planned")}
    assert {(rank, job.member(rank)) for rank in gone} <= takeovers
    (step,) = job.events("step")
    assert (step["member"], step["epoch"], step["loss"]) == (job.member(speaker), 2, 0.5)
    (event,) = job.events("recovered")
    assert event["epoch"] == 4
    assert 0 <= event["detection_seconds"] < KNOWN_S
    assert 0 <= event["plan_seconds"] < KNOWN_S
    assert "sent an event that is none" in job.output()


def test_two_at_once_make_one_plan(start: Start) -> None:
    job = start(4, "--settle-ms", "2000", "--lease-ttl-s", "60").run()
    etcd, workers, told = job.etcd(), [psutil.Process(job.worker(rank)) for rank in (0, 2)], len(job.find("plan"))
    job.kill(etcd.pid, signal.SIGSTOP)  # agents can tell nobody before both know
    for worker in workers:
        job.kill(worker.pid)
    job.wait_quietly(lambda: not any(map(lives, workers)))  # their agents may have waited for them
    assert len(job.find("plan")) == told, "who told?"
    job.kill(etcd.pid, signal.SIGCONT)
    plan = job.wait_epoch(3, 0, 2)
    assert sorted(plan["lost"]) == sorted([job.member(0), job.member(2)])
    assert not plan["lost_roles"]
    job.finish(0, 2)
    assert len(job.events("member_lost")) == 2
    assert len(job.events("plan")) == 3


def test_dead_agent_is_noticed_without_waiting_for_its_lease(start: Start, tmp_path: Path) -> None:
    """It led, and served the job's page: the next one that leads does so at the same address."""
    url, config, token_file = f"http://127.0.0.1:{free_port()}", tmp_path / "ds.json", tmp_path / "token"
    observe = {"http": url.partition("//")[2], "control": True}
    config.write_text(json.dumps({"bamboo": {"observe": observe}}))
    job = start(3, "--lease-ttl-s", "60", "--config", str(config)).run()
    step = {"step": 1, "loss": 1.5, "seconds": 0.25, "frc_done": 3, "frc_total": 4, "samples": 8}
    job.tell(0, f"event step {json.dumps(step)}")
    job.wait_quietly(lambda: served_at(url) and job.events("step"))
    where = "web", "--token-file", str(token_file)
    job.wait_quietly(lambda: job.bamboo(*where).returncode == 0)  # the leader tells in etcd where it serves it already
    told = job.bamboo(*where)
    assert told.returncode == 0 and f"page:    {url}/\n" in told.stdout, told.stderr
    token = token_file.read_text()
    assert token not in told.stdout and token_file.stat().st_mode & 0o777 == 0o600
    assert ask(url, "/metrics")[0] == ask(url, "/metrics", token[::-1])[0] == 401
    before = scraped(url, token)
    assert value(before, "bamboo_samples_total") == 8 and value(before, "bamboo_step_seconds_sum") == 0.25
    assert (value(before, "bamboo_members", state="running"), value(before, "bamboo_epoch")) == (3, 2)
    victim = leader_of(job)
    assert [member["slot"] for member in seen(url, token)["members"] if member["leader"]] == [victim]
    worker = psutil.Process(job.worker(victim))
    job.kill(job.agent(victim))
    assert job.wait_epoch(3, victim)["lost"] == [job.member(victim)]
    job.wait_quietly(lambda: not worker.is_running())  # and its parent, the launcher now, has collected it
    job.wait_quietly(lambda: served_at(url) and job.events("member_lost"))
    after = scraped(url, token)
    assert not gone_back(before, after)
    (lost,) = job.events("member_lost")
    assert value(after, "bamboo_losses_total", reason=lost["reason"]) == 1
    assert (value(after, "bamboo_members", state="running"), value(after, "bamboo_epoch")) == (2, 3)
    view = seen(url, token)
    assert view["losses"][0]["members"][0]["id"] == job.member(victim)
    leader = next(member["slot"] for member in view["members"] if member["leader"])
    assert leader != victim
    other = ({0, 1, 2} - {victim, leader}).pop()
    assert ask(url, f"/api/leave/{job.member(other)}", token, "POST")[0] == 200
    job.wait_quietly(lambda: job.events("notice"))
    assert [(event["member"], event["source"]) for event in job.events("notice")] == [(job.member(other), "web")]
    job.finish(victim)
    assert not served_at(url)
    assert token not in job.output()


def test_silent_node_loses_its_lease_and_stops_when_it_wakes(start: Start) -> None:
    job = start(3, "--lease-ttl-s", str(TTL_S)).run()
    victim = leader_of(job)  # the hardest case: its leadership lasts as long as its lease
    at = job.kill(job.agent(victim), signal.SIGSTOP)
    job.kill(job.worker(victim), signal.SIGSTOP)
    plan = job.wait_epoch(3, victim)
    assert plan["lost"] == [job.member(victim)]
    assert plan["at"] - at < TTL_S + 1 + KNOWN_S
    job.kill(job.worker(victim), signal.SIGCONT)
    job.kill(job.agent(victim), signal.SIGCONT)
    job.wait(lambda: job.plan(3, victim), "the member that woke up is told that it is out")
    # Its agent starts anew, in the same process, for whoever watches that; another member in another slot.
    job.wait(lambda: len(job.find("hello")) == 4, "it comes back")
    (before,) = (hello for hello in job.find("hello") if hello["member"] == job.member(victim))
    (after,) = (hello for hello in job.find("hello") if hello["member"].startswith("m3-"))
    assert after["agent"] == before["agent"] and after["pid"] != before["pid"]
    assert after["env"]["BAMBOO_JOINER"] == "1"
    # Its script runs at the end of the pipeline at which fewer are: the first one, unless the last one's has gone.
    assert after["env"]["RANK"] == ("2" if victim == 2 else "0")
    for member in plan["members"]:  # the newcomer may have the rank of one of them
        job.tell_member(member, "exit 0")
    assert job.exit_code() == 0, job.output()
    (lost,) = job.events("member_lost")
    assert (lost["reason"], lost["detection_seconds"]) == ("lease", None)


def test_failure_of_an_evicted_member_does_not_end_the_job(start: Start) -> None:
    job = start(3, "--lease-ttl-s", str(TTL_S), "--rejoin-s", "0").run()
    worker, agent = psutil.Process(job.worker(1)), psutil.Process(job.agent(1))
    job.kill(agent.pid, signal.SIGSTOP)
    assert job.wait_epoch(3, 1)["lost"] == [job.member(1)]
    job.tell(1, "raise")
    job.wait_quietly(lambda: worker.status() == psutil.STATUS_ZOMBIE)  # before its agent knows that it is out
    job.kill(agent.pid, signal.SIGCONT)
    job.wait_quietly(lambda: not agent.is_running())
    job.finish(1)
    assert not [epoch for epoch in job.events("plan") if epoch["epoch"] > 3]
    assert len(job.find("hello")) == 3, "it may not come back"


def test_when_all_members_stop_at_once_the_job_starts_again(start: Start) -> None:
    """As after an outage of etcd in a recovery that outlasts everybody's patience: nobody is left who leads."""
    job = start(2, "--lease-ttl-s", str(TTL_S)).run()
    job.tell_all("exit 87")

    def again() -> dict[int, str]:
        """Members of the restart by rank. One may have come back before it as a newcomer, when the other one lived."""
        return {h["rank"]: h["member"] for h in job.find("hello") if h["env"].get("BAMBOO_RESTART_COUNT")}

    job.wait(lambda: again().keys() == {0, 1}, "both come back")
    for member in again().values():
        job.tell_member(member, "go")
    job.wait(
        lambda: {told["rank"] for told in job.find("plan") if told["plan"]["generation"]} == {0, 1}, "they have a plan"
    )
    job.finish()
    assert len(job.events("restart")) == 1


def test_loss_before_the_engines_are_built_is_fatal(start: Start) -> None:
    job = start(2, "--max-restarts", "0").begin()
    job.tell_all("go")
    job.wait_epoch(1)
    job.kill(job.worker(1))
    assert job.exit_code() == 86
    assert "before the engines were built" in job.output()


def test_accusations(start: Start) -> None:
    """One accuser of a living member has all connections made anew; it is heard of a silent worker, and so are two."""
    job = start(4, "--rejoin-s", "0", "--lease-ttl-s", "10", "--heartbeat-timeout-s", "60").run()
    job.tell(0, f"suspect 2 {job.member(2)}")
    plan = job.wait_epoch(3)
    assert plan["lost"] == [] and plan["owners"] == job.wait_epoch(2)["owners"]
    job.kill(job.worker(3), signal.SIGSTOP)
    assert not threading.Event().wait(1.0)  # its agent has read the heartbeats that were on their way
    job.tell(0, f"suspect 3 {job.member(3)}")
    assert job.wait_epoch(4, 3)["lost"] == [job.member(3)]
    job.kill(job.worker(3), signal.SIGCONT)
    for accuser in (0, 2):
        job.tell(accuser, f"suspect 4 {job.member(1)}")
    assert job.wait_epoch(5, 3)["lost"] == [job.member(1)]
    job.finish(1, 3)  # the evicted workers have stopped by themselves
    lost = job.events("member_lost")
    assert [event["reason"] for event in lost] == ["suspects"] * 2
    assert lost[1]["detail"] == ", ".join(sorted([job.member(0), job.member(2)]))
