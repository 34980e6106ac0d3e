"""Faults carried out on small real processes, and the runner on a job that only pretends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bamboo_ds.chaos.faults import HIT_ELSEWHERE, Fault, FaultKind, FaultRecord, Target
from bamboo_ds.chaos.injections import Impossible, Notify, Obey, Order, ProcessKill, Raise, Stop
from bamboo_ds.chaos.joiners import Join, JoinCommand
from bamboo_ds.chaos.processes import agent_of, dead, feeders_of, here, listener, stopped, worker_of
from bamboo_ds.chaos.runner import Conduct, JobParts, Runner
from bamboo_ds.chaos.situation import JobSituation
from bamboo_ds.chaos.sparing import Choice
from bamboo_ds.chaos.victim import EXIT_CODE
from bamboo_ds.control.registry.records import MemberRecord
from bamboo_ds.topology import takeover
from bamboo_ds.variables import ENV_MEMBER
from tests.support.chaos import AGENT, IDLE, OBEDIENT, at, members, record, settled
from tests.support.etcd import wait_until

pytestmark = [pytest.mark.claim("guides/chaos.md"), pytest.mark.integration, pytest.mark.usefixtures("leak_gate")]


def fault(kind: FaultKind, seconds: float | None = None, target: str = "", at_s: float = 0.0, n: int = 0) -> Fault:
    return Fault(n, at_s, kind, Target.parse(target) if target else None, seconds)


def gone(pid: int, timeout_s: float = 0.0) -> bool:
    try:
        return dead(psutil.Process(pid), timeout_s)
    except psutil.NoSuchProcess:
        return True


def still(*pids: int) -> list[bool]:
    return [stopped(psutil.Process(pid)) for pid in pids]


def test_kill_of_a_worker_an_agent_a_host() -> None:
    with members(4) as found:
        for kind, victims in (("kill", found[:1]), ("kill_agent", found[1:2]), ("host", found[2:])):
            injection = ProcessKill(fault(FaultKind(kind)), victims)
            injection.begin()
            assert injection.confirmed and injection.due is None
            assert all(gone(r.pid) for r in victims)
            assert kind == "kill" or all(gone(r.agent_pid) for r in victims)
        with pytest.raises(psutil.NoSuchProcess):
            ProcessKill(fault(FaultKind.KILL), found[:1]).begin()


def test_only_the_members_own_processes_are_hit() -> None:
    with members(2) as (one, other):
        mistaken = one.model_copy(update={"pid": other.pid})
        assert here(one) and not here(mistaken)
        with pytest.raises(psutil.NoSuchProcess):
            worker_of(mistaken)
        with pytest.raises(psutil.NoSuchProcess):
            agent_of(one.model_copy(update={"agent_pid": other.agent_pid}))
        with pytest.raises(psutil.NoSuchProcess):  # nobody dies where not everybody is there
            ProcessKill(fault(FaultKind.HOST), [one, mistaken]).begin()
        assert not gone(one.pid) and not gone(one.agent_pid)


def test_stop_ends_after_its_seconds() -> None:
    with members(1) as (one,):
        injection = Stop(fault(FaultKind.STOP, 60.0), [one])
        injection.begin()
        assert injection.confirmed and still(one.pid) == [True] and not injection.done(JobSituation())
        injection.due = injection.began + 0.2
        wait_until(lambda: injection.done(JobSituation()), "it is over")
        assert injection.seconds is not None and injection.seconds >= 0.2
        assert still(one.pid) == [False] and not gone(one.pid)
        frozen = Stop(fault(FaultKind.FREEZE, 60.0), [one])
        frozen.begin()
        assert still(one.pid, one.agent_pid) == [True, True]
        frozen.undo()
        assert still(one.pid, one.agent_pid) == [False, False]


def test_stopped_worker_that_is_killed_is_accounted_for() -> None:
    with members(1) as (one,):
        injection = Stop(fault(FaultKind.STOP, 60.0), [one])
        injection.begin()
        os.kill(one.pid, signal.SIGKILL)
        wait_until(lambda: injection.done(JobSituation()), "it is over")
        assert injection.detail == "1 of 1 were killed while they were stopped"


def test_worker_obeys() -> None:
    with members(3, OBEDIENT, BAMBOO_CHAOS="1") as (one, two, three):
        held = Obey(fault(FaultKind.HOLD_GIL, 2.0), [one])
        held.begin()
        with pytest.raises(Impossible):  # it cannot answer anybody else meanwhile
            Order(worker_of(one), fault(FaultKind.HOLD_GIL, 0.0), timeout_s=0.1)
        wait_until(lambda: held.done(JobSituation()), "it is over")
        assert held.confirmed and held.seconds is not None and held.seconds >= 2.0
        assert not gone(one.pid)
        raised, left = Raise(fault(FaultKind.EXCEPTION), [two]), Obey(fault(FaultKind.EXIT), [three])
        raised.begin()
        left.begin()
        wait_until(lambda: raised.done(JobSituation()), "it is over")
        assert raised.confirmed and left.confirmed
        assert gone(two.agent_pid, 5.0)
        assert EXIT_CODE == 13 and gone(two.pid) and gone(three.pid)


def test_worker_that_takes_no_orders() -> None:
    with members(1) as (one,), pytest.raises(Impossible, match=r"bamboo_ds\.chaos\.victim"):
        Obey(fault(FaultKind.HOLD_GIL, 0.1), [one]).begin()


def test_notice_is_written_and_withdrawn(tmp_path: Path) -> None:
    with members(2) as found:
        situation = settled(found)
        injection = Notify(fault(FaultKind.NOTICE), found[:1], str(tmp_path / "notice-{slot}-{member}"))
        injection.begin()
        path = tmp_path / "notice-0-m0"
        assert json.loads(path.read_text())["kind"] == "preempt" and not injection.done(situation)
        assert situation.plan is not None
        assert injection.done(at(takeover(situation.plan, ["m0"]), found[1:]))
        assert injection.confirmed and not path.exists()
        with pytest.raises(Impossible, match="notices"):
            Notify(fault(FaultKind.NOTICE), found[1:], None).begin()


def test_listener_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(os.getpid(), f"http://127.0.0.1:{port}") is None  # it is no descendant
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            assert listener(os.getpid(), f"http://127.0.0.1:{port}") == child
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# -- the runner -------------------------------------------------------------------------------------------


class PretendedJob:
    """A job whose leader plans a takeover when a worker is dead, and heals when it is told to."""

    def __init__(self, records: list[MemberRecord], heals: bool = True) -> None:
        self.situation = settled(records)
        self.heals = heals
        self.answers = True

    def look(self, timeout_s: float = 0.0) -> JobSituation:
        time.sleep(min(timeout_s, 0.01))
        plan, records = self.situation.plan, list(self.situation.members.values())
        assert plan is not None
        alive = [r for r in records if not gone(r.pid)]
        if self.answers and len(alive) < len(records):
            plan = takeover(plan, [r.id for r in records if r not in alive])
            if self.heals:
                ring = {owner: alive[(i + 1) % len(alive)].id for i, owner in enumerate(r.id for r in alive)}
                plan = replace(plan, shadows=tuple(ring[owner] for owner in plan.owners))
            self.situation = at(plan, alive)
        return self.situation

    def fresh(self) -> JobSituation | None:
        return self.look() if self.answers else None


def command(tmp_path: Path, *words: str) -> JoinCommand:
    return JoinCommand("ftp://nowhere", "j", None, words, dict(os.environ), str(tmp_path), tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Runner, list[FaultRecord]]]:
    def start(
        job: PretendedJob, faults: list[Fault], choice: Choice | None = None, **parts: object
    ) -> tuple[Runner, list[FaultRecord]]:
        records: list[FaultRecord] = []
        conduct, found = Conduct(choice or Choice(), timeout_s=0.3), JobParts(join=command(tmp_path))
        runner = Runner(job, faults, conduct, replace(found, **parts), lambda: False, records.append)  # type: ignore[arg-type]
        try:
            runner.run()
        finally:
            runner.close()
        return runner, records

    return start


Run = Callable[..., tuple[Runner, list[FaultRecord]]]


def test_faults_are_carried_out_and_told(run: Run) -> None:
    with members(4) as found:
        faults = [fault(FaultKind.STOP, 0.2, "slot:1"), fault(FaultKind.KILL, None, "slot:3", 0.05, 1)]
        faults += [fault(FaultKind.ETCD_STOP, 1.0, None, 0.1, 2)]
        runner, records = run(PretendedJob(found), faults, choice=Choice(spare_holders=False))
        assert runner.reached == 3 and gone(found[3].pid) and not gone(found[1].pid)
        told = {d.number: d for d in records}
        assert sorted(told) == [0, 1, 2]
        assert [told[n].outcome for n in range(3)] == ["injected", "injected", "impossible"]
        assert told[0].confirmed and told[1].confirmed and told[1].pids == [found[3].pid]
        assert told[1].members == ["m3"] and told[1].begun_s >= 0.05 and told[0].seconds is not None


def test_kill_waits_for_healing_or_is_spared(run: Run) -> None:
    kills = [fault(FaultKind.KILL, None, "slot:1"), fault(FaultKind.KILL, None, "slot:2", 0, 1)]
    with members(4) as found:
        _, records = run(PretendedJob(found, heals=False), kills)
        assert [d.outcome for d in records] == ["injected", "spared"] and not gone(found[2].pid)
        assert "nobody would hold" in records[1].detail
    with members(4) as found:
        _, records = run(PretendedJob(found), kills)
        assert [d.outcome for d in records] == ["injected", "injected"] and gone(found[2].pid)
    with members(4) as found:
        _, records = run(PretendedJob(found, heals=False), kills, choice=Choice(spare_holders=False))
        assert [d.outcome for d in records] == ["injected", "injected"] and gone(found[2].pid)


def test_nodes_of_a_trace_are_found_after_a_restart(run: Run) -> None:
    """Members have other names then, of the same agents."""
    with members(4) as found:
        before = [record.model_copy(update={"id": f"before{record.slot}"}) for record in found]
        job = PretendedJob(before)
        looks = job.look

        def look(timeout_s: float = 0.0) -> JobSituation:
            situation = looks(timeout_s)
            if "before0" in situation.members:
                job.situation = settled(found)
            return situation

        job.look = look  # type: ignore[method-assign]
        kill = fault(FaultKind.KILL_AGENT, None, "node:b", 0.1)
        _, records = run(job, [kill], nodes={"a": 0, "b": 2}, choice=Choice(spare_holders=False))
        assert [(d.outcome, d.members) for d in records] == [("injected", ["m2"])]


def test_stopped_member_counts_as_lost(run: Run) -> None:
    with members(4) as found:
        _, records = run(
            PretendedJob(found), [fault(FaultKind.STOP, 0.4, "slot:1"), fault(FaultKind.KILL, None, "slot:2", 0.1, 1)]
        )
        outcomes = {d.number: d.outcome for d in records}
        assert outcomes == {0: "injected", 1: "spared"} and not gone(found[2].pid)


def test_without_etcd_only_what_was_settled_is_relied_on(run: Run) -> None:
    with members(4) as found:
        job = PretendedJob(found)
        job.answers = False
        _, records = run(job, [fault(FaultKind.KILL, None, "slot:1"), fault(FaultKind.KILL, None, "slot:3", 0, 1)])
        assert [d.outcome for d in records] == ["injected", "spared"]  # the second one has to wait for the leader


def test_nobody_there_is_told(run: Run) -> None:
    with members(2) as found:
        _, records = run(PretendedJob(found), [fault(FaultKind.KILL, None, "slot:7")])
        assert [d.outcome for d in records] == ["absent"]


def test_joiner_that_cannot_join_is_told_with_its_output(run: Run, tmp_path: Path) -> None:
    with members(2) as found:
        join = command(tmp_path, sys.executable, "-u", __file__)
        _, records = run(PretendedJob(found), [fault(FaultKind.JOIN)], join=join)
        (record,) = records
        assert record.outcome == "failed" and "ended with exit code" in record.detail
        assert "ftp://nowhere" in record.detail and "ftp://nowhere" in (tmp_path / "join-0.log").read_text()
        _, records = run(PretendedJob(found), [fault(FaultKind.JOIN)])
        assert records[0].outcome == "impossible"


class Lasting(JoinCommand):
    """Starts what looks like a member, and is never admitted."""

    def arguments(self) -> list[str]:
        return [sys.executable, "-c", AGENT, IDLE]


def test_a_joiner_that_is_hit_before_it_is_seen_has_not_failed(tmp_path: Path) -> None:
    """A fault finds it in etcd, and there is nothing of it there any more when the runner looks for the joiner."""
    told: list[FaultRecord] = []
    with members(2) as found:
        job, environment = PretendedJob(found), {**os.environ, ENV_MEMBER: "m2"}
        lasting = Lasting("", "j", None, (), environment, str(tmp_path), tmp_path)
        conduct = Conduct(Choice(), timeout_s=0.3)
        runner = Runner(job, [], conduct, JobParts(lasting), lambda: False, told.append)  # type: ignore[arg-type]
        for number in range(2):
            join = Join(fault(FaultKind.JOIN), lasting, number)
            join.begin()
            (pid,) = join.pids
            agent = psutil.Process(pid)
            wait_until(lambda agent=agent: AGENT in agent.cmdline() and agent.children(), "its worker has begun")
            if number:
                os.kill(pid, signal.SIGKILL)  # by nobody whom the runner knows of
            else:
                (worker,) = agent.children()
                strike = ProcessKill(fault(FaultKind.KILL_AGENT), [record(2, pid=worker.pid, agent_pid=pid)])
                runner._inject(strike, job.situation)
            wait_until(lambda join=join: join.done(job.situation), "it has ended")
            runner._note(join)
    assert [(each.kind, each.outcome) for each in told] == [
        (FaultKind.KILL_AGENT, "injected"),
        (FaultKind.JOIN, "injected"),
        (FaultKind.JOIN, "failed"),
    ]
    assert told[1].detail == HIT_ELSEWHERE and not told[1].members


def test_feeders_end_with_the_agent_that_has_started_them() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            victim = record(0, agent_pid=os.getpid())
            feeder = record(1, agent_pid=child.pid, feeder=True)
            others = [record(2, agent_pid=1, feeder=True), record(3, agent_pid=child.pid)]
            assert feeders_of([victim], [victim, feeder, *others]) == [feeder]
        finally:
            child.kill()


REAPER = """
import subprocess, sys, time
import psutil
from bamboo_ds.processes import adopt_orphans, reap_adopted
adopt_orphans()
own = subprocess.Popen(["sh", "-c", "exit 3"])
# Its child ends when told to, which is after it was adopted: a shell collects what has ended before.
other = subprocess.Popen(
    ["sh", "-c", "exec 3<&0; sh -c 'read line <&3; exit 4' & exec sleep 600"], stdin=subprocess.PIPE
)
deadline = time.monotonic() + 20
while not psutil.Process(other.pid).children() and time.monotonic() < deadline:
    time.sleep(0.01)
(adopted,) = psutil.Process(other.pid).children()
other.kill()
other.wait()
assert adopted.ppid() == psutil.Process().pid
other.stdin.write(b"go\\n")
other.stdin.close()
deadline = time.monotonic() + 20
def zombies():
    return [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
while len(zombies()) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
assert len(zombies()) == 2, psutil.Process().children()
reap_adopted({own.pid})
assert [p.pid for p in zombies()] == [own.pid]
assert own.wait() == 3
"""


def test_what_was_adopted_is_collected_and_nothing_else() -> None:
    subprocess.run([sys.executable, "-c", REAPER], check=True, timeout=60)
