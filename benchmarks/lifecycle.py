"""A job's whole life in one go: losses, healing, joiners, the loss of a host, an outage of etcd, a spot notice.

Started once by ``bamboo run``; then only real commands, signals and a metadata service act on it. It must stay one
uninterrupted job that computes, bit by bit, what stock DeepSpeed computes undisturbed. See ``--help``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from common import (
    WORKERS,
    Job,
    JobFailed,
    bamboo_job,
    console,
    environment,
    fresh,
    machine,
    run_stock,
    wall,
    write_config,
)
from imds import Metadata, metadata
from rich.box import SIMPLE
from rich.table import Table

from bamboo_ds.chaos.observer import Observer
from bamboo_ds.chaos.processes import agent_of, listener, stopped, worker_of
from bamboo_ds.chaos.situation import JobSituation
from bamboo_ds.launchers import jobs
from bamboo_ds.observe.consumption import Consumption
from bamboo_ds.observe.events import read_events

MICRO_BATCHES, BATCH = 4, 4
#: Seconds for anything that is waited for.
PATIENCE_S = 240.0
#: Seconds that the spot notice leaves.
NOTICE_S = 120.0
#: What of a checkpoint, besides its layers, is compared.
STATE = ("optimizer", "lr_scheduler", "global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Scenario:
    """What happens to a job, in this order.

    Attributes:
        pipelines, stages, hosts: the job, over hosts by name.
        kills: slots whose workers are killed, one by one; each waits until all stages are replicated again.
        joins: members that come, each on a host of its own.
        host: emulated host that is lost with all of its members.
        etcd_s: seconds for which etcd is stopped.
        notice: slot that gets a spot notice.
        steps: of the job; it is slowed down until everything has happened.
        forward_s: seconds of a stage's forward pass until then.
    """

    pipelines: int
    stages: int
    hosts: int
    kills: tuple[int, ...]
    joins: int
    host: str
    etcd_s: float
    notice: int
    steps: int
    forward_s: float

    @property
    def slots(self) -> int:
        """Members that the job is started with."""
        return self.pipelines * self.stages


#: Ranks, and with them slots, number the pipelines of a stage first; two slots are on a host.
FULL = Scenario(2, 4, 4, (2, 5, 1), 2, "emulated-3", 60.0, 3, 400, 0.015)
SMALL = Scenario(2, 2, 2, (1,), 1, "emulated-1", 8.0, 4, 250, 0.025)


@dataclass
class Deed:
    """Something that was done to the job.

    Attributes:
        what: in words.
        begin, end: in seconds since 1970; at the end all stages were replicated again.
        members: of the job afterwards.
        lost, left, joined: members that were lost, have left on notice, were admitted meanwhile.
        pause_s: longest pause of a member: of takeovers and changes between two iterations.
        redone_s: longest time of redone and remaining work after a takeover.
        steps: committed meanwhile.
    """

    what: str
    begin: float
    end: float = 0.0
    members: int = 0
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    redone_s: float = 0.0
    steps: int = 0


class Lifecycle:
    """The running job and what was done to it."""

    def __init__(self, folder: Path, scenario: Scenario, process: subprocess.Popen[bytes], name: str) -> None:
        self.folder, self.scenario, self.process, self.name = folder, scenario, process, name
        self.job = Job(folder)
        self.deeds: list[Deed] = []
        self.joiners: list[subprocess.Popen[bytes]] = []
        self.pids: dict[str, int] = {}
        self.struck: set[str] = set()

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until ``condition`` holds; fails if the job ends, or after ``PATIENCE_S``."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise JobFailed(f"{self.folder}: {what} did not come\n{self.job.log()[-3000:]}")
            time.sleep(0.05)

    def count(self, kind: str) -> int:
        """Events of one kind so far."""
        return len(self.job.events(kind))

    def situation(self) -> JobSituation | None:
        """As etcd tells it; ``None`` if it does not answer."""
        return self.observer.fresh()

    def settled(self) -> bool:
        """Whether every stage is replicated and nothing is left to do."""
        situation = self.situation()
        return situation is not None and situation.training and situation.unsettled() is None

    @contextmanager
    def deed(self, what: str) -> Iterator[Deed]:
        """The body does something; then the job has to come to rest, and to go on."""
        deed = Deed(what, time.time())
        before = self.count("step")
        yield deed
        self.wait(f"rest after: {what}", self.settled)
        after = self.count("step")
        self.wait(f"training after: {what}", lambda: self.count("step") > after + 1)
        deed.end, deed.steps = time.time(), self.count("step") - before
        situation = self.situation()
        assert situation is not None and situation.plan is not None
        deed.members = len(situation.plan.members)
        self.deeds.append(deed)
        console.print(f"{datetime.now(timezone.utc):%H:%M:%S} {what}: {deed.members} members", highlight=False)

    def strike(self, deed: Deed, processes: Sequence[psutil.Process]) -> None:
        """SIGKILL, and wait until the job knows."""
        before = self.count("member_lost")
        for process in processes:
            process.kill()
        self.wait(f"the loss by: {deed.what}", lambda: self.count("member_lost") >= before + len(processes))
        self.struck |= {event["member_id"] for event in self.job.events("member_lost")[before:]}

    def live(self, service: Metadata) -> None:
        """All of the scenario."""
        scenario = self.scenario
        with closing(Observer(jobs.choose(self.name).store, self.name, PATIENCE_S)) as self.observer:
            self.wait("training", lambda: self.settled() and self.count("step") >= 3)
            situation = self.situation()
            assert situation is not None
            self.pids = {record.id: record.pid for record in situation.members.values()}
            for slot in scenario.kills:
                with self.deed(f"kill -9 worker of slot {slot}") as deed:
                    self.strike(deed, [worker_of(r) for r in self._records(slot=slot)])
            if scenario.joins:
                with self.deed(f"bamboo join, {scenario.joins} times"):
                    self.join(scenario.joins)
            with self.deed(f"kill -9 host {scenario.host}") as deed:
                self.strike(deed, [agent_of(r) for r in self._records(host=scenario.host)])
            with self.deed(f"etcd stopped for {scenario.etcd_s:.0f} s"):
                self.stop_etcd(scenario.etcd_s)
            with self.deed(f"spot notice for slot {scenario.notice}"):
                (record,) = self._records(slot=scenario.notice)
                service.notify(scenario.notice, NOTICE_S)
                self.wait("its departure", lambda: self.count("member_left") == 1)
                self.struck.add(record.id)
            situation = self.situation()
            assert situation is not None
            self.survivors = {record.id: record.pid for record in situation.members.values()}

    def _records(self, slot: int | None = None, host: str | None = None) -> list[Any]:
        situation = self.situation()
        assert situation is not None
        found = [r for r in situation.members.values() if slot in (None, r.slot) and host in (None, r.host)]
        if not found:
            raise JobFailed(f"no member is in slot {slot} or on host {host}")
        return found

    def join(self, count: int) -> None:
        """``bamboo join``, so many times."""
        before = self.count("member_joined")
        for number in range(count):
            command = [sys.executable, "-m", "bamboo_ds.cli.main", "join", "--job", self.name]
            command += ["--host", f"joined-{number}", "--events", str(self.folder / "events.jsonl"), *self.command]
            with open(self.folder / f"log-join-{number}.txt", "wb") as log:
                self.joiners.append(
                    subprocess.Popen(
                        command,
                        env={**environment(), **self.variables},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        self.wait("the admission of all joiners", lambda: self.count("member_joined") >= before + count)

    def stop_etcd(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after some time."""
        pid = listener(self.process.pid, jobs.choose(self.name).store)
        if pid is None:
            raise JobFailed("no process of the job is its etcd")
        etcd = psutil.Process(pid)
        etcd.suspend()
        try:
            if not stopped(etcd, 5.0):
                raise JobFailed("etcd did not stop")
            before = self.count("step")
            time.sleep(seconds)
            self.steps_without_etcd = self.count("step") - before
        finally:
            etcd.resume()

    def finish(self) -> int:
        """Wait for the end of everything; returns the exit code of ``bamboo run``."""
        code = self.process.wait(PATIENCE_S)
        for joiner in self.joiners:
            joiner.wait(60)
        return code

    def account(self) -> None:
        """Fill in what the events tell of each deed."""
        events = self.job.events()
        for deed in self.deeds:
            mine = [event for event in events if deed.begin <= wall(event) < deed.end]
            of = {kind: [e for e in mine if e["event"] == kind] for kind in {e["event"] for e in mine}}
            deed.lost = [event["member_id"] for event in of.get("member_lost", [])]
            deed.left = [event["member_id"] for event in of.get("member_left", [])]
            deed.joined = [event["member_id"] for event in of.get("member_joined", [])]
            changes = [*of.get("recovered", []), *of.get("reconfigured", [])]
            deed.pause_s = max((event["pause_seconds"] for event in changes), default=0.0)
            deed.redone_s = max((event["redo_seconds"] for event in of.get("recovered", [])), default=0.0)


def run(folder: Path, scenario: Scenario) -> tuple[Lifecycle, int]:
    """The job with all that happens to it; returns what was done and its exit code."""
    block = {
        "notices": {"sources": ["aws"], "poll_s": 0.5},
        "redundancy": {"verify_every": 10},
        "observe": {"checksums": True},
    }
    config = write_config(folder, MICRO_BATCHES, block, train_micro_batch_size_per_gpu=BATCH)
    until, name = folder / "done", f"lifecycle-{os.getpid()}"
    arguments = ["--deepspeed_config", str(config), "--stages", str(scenario.stages), "--steps", str(scenario.steps)]
    arguments += ["--forward-s", str(scenario.forward_s), "--until", str(until), "--out", str(folder)]
    script, hosts = WORKERS / "soak.py", ["--emulate-hosts", str(scenario.hosts)]
    with ExitStack() as stack:
        service = stack.enter_context(metadata())
        variables = {"BAMBOO_AWS_METADATA_URL": service.url}
        process = stack.enter_context(
            bamboo_job(folder, scenario.slots, script, arguments, name, options=hosts, variables=variables)
        )
        life = Lifecycle(folder, scenario, process, name)
        life.command, life.variables = [str(script), *arguments], variables
        stack.callback(end, life.joiners)
        life.wait("the job", lambda: jobs.find(name) is not None)
        life.live(service)
        until.touch()
        code = life.finish()
    life.account()
    return life, code


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that are still there."""
    for process in processes:
        if process.poll() is None:
            process.kill()  # the kernel ends its worker with it
            process.wait()


def undisturbed(folder: Path, scenario: Scenario) -> list[float]:
    """The same by stock DeepSpeed; returns its losses."""
    config = write_config(folder, MICRO_BATCHES, None, train_micro_batch_size_per_gpu=BATCH)
    arguments = ["--deepspeed_config", str(config), "--stages", str(scenario.stages), "--steps", str(scenario.steps)]
    arguments += ["--forward-s", "0", "--until", str(folder / "done"), "--out", str(folder)]
    run_stock(folder, scenario.slots, WORKERS / "soak.py", arguments, PATIENCE_S + scenario.steps)
    return losses(folder)[0]


def losses(folder: Path) -> list[list[float]]:
    """Losses by worker that came to the end."""
    return [json.loads(file.read_text())["losses"] for file in sorted(folder.glob("result-*.json"))]


def states(folder: Path) -> dict[str, Any]:
    """Parameters, optimizer states, schedules and counters of the last checkpoint."""
    found: dict[str, Any] = {}
    for file in sorted((folder / "checkpoint" / "last").glob("*_model_states.pt")):
        content = torch.load(file, weights_only=False)
        if file.name.startswith("mp_rank"):
            content = {name: content[name] for name in STATE}
        found[file.name] = content
    for file in sorted((folder / "checkpoint" / "last").glob("layer_*")):
        found[file.name] = torch.load(file, weights_only=False)
    return found


def equal(one: Any, other: Any) -> bool:
    """Whether two nested structures are equal, tensors bit by bit."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def verdicts(life: Lifecycle, code: int, calm: Path) -> dict[str, bool]:
    """What the job has to fulfil, and whether it does."""
    folder, scenario, job = life.folder, life.scenario, life.job
    expected = undisturbed(calm, scenario)
    mine, wanted = states(folder), states(calm)
    consumed = Consumption()
    for event in read_events(folder / "events.jsonl"):
        consumed.add(event)
    outage = next(deed for deed in life.deeds if deed.what.startswith("etcd"))
    notice = life.deeds[-1]
    redone = [e for e in job.events("recovered") if notice.begin <= wall(e) < notice.end]
    untouched = {member: pid for member, pid in life.pids.items() if member not in life.struck}
    struck = len(life.struck) == len(scenario.kills) + scenario.slots // scenario.hosts + 1
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    return {
        "every fault struck": struck and len(life.joiners) == scenario.joins,
        "one job, exit code 0, nothing fatal": (len(job.events("run_started")), code, job.events("fatal"))
        == (1, 0, []),
        "no restart: workers that nothing happened to are the same": untouched.items() <= life.survivors.items()
        and not job.events("restart"),
        "every step once": [e["step"] for e in job.events("step")] == list(range(1, scenario.steps + 1)),
        "losses of every worker bit-equal to the undisturbed run": all(x == expected for x in losses(folder))
        and bool(losses(folder)),
        "weights, optimizer states, counters bit-equal": bool(wanted) and equal(mine, wanted),
        "replicas verified": bool(job.events("replica_verified")) and not job.events("replica_mismatch"),
        "every sample consumed exactly once": list(consumed.history()) == list(range(1, scenario.steps + 1))
        and not consumed.problems()
        and not consumed.alike(),
        "training went on without etcd, which cost nobody": life.steps_without_etcd > 0 and not outage.lost,
        "the notice cost no redone work": len(notice.left) == 1 and not notice.lost and not redone,
        "no process left": not left,
    }


def table(deeds: Sequence[Deed]) -> Table:
    """What was done."""
    found = Table(box=SIMPLE)
    for column in ("event", "seconds", "steps", "lost", "left", "joined", "members", "pause s", "redone s"):
        found.add_column(column, justify="left" if column == "event" else "right", no_wrap=True)
    for deed in deeds:
        counts = [str(len(names) or "") for names in (deed.lost, deed.left, deed.joined)]
        seconds = [f"{value:.3f}" if value else "" for value in (deed.pause_s, deed.redone_s)]
        found.add_row(deed.what, f"{deed.end - deed.begin:.1f}", str(deed.steps), *counts, str(deed.members), *seconds)
    return found


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
@click.option("--small", is_flag=True, help="2 x 2 stages, one kill, one joiner, etcd stopped for 8 s.")
@click.option("--etcd-s", type=click.FloatRange(min=0), help="Seconds for which etcd is stopped.  [default: 60]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(out: Path, small: bool, etcd_s: float | None, as_json: bool) -> None:
    """2 pipelines of 4 stages on 4 emulated hosts: 3 kills with healing between, 2 joiners, the loss of a host, etcd
    stopped for 60 s, a spot notice (from a local metadata service). Compared with stock DeepSpeed undisturbed.

    Exit code 1 if it was not one uninterrupted job with the same results.
    """
    scenario = SMALL if small else FULL
    if etcd_s is not None:
        scenario = Scenario(**{**asdict(scenario), "etcd_s": etcd_s})
    out = out.resolve()
    console.quiet, console.width = as_json, max(100, console.width)
    begin = time.monotonic()
    life, code = run(fresh(out / "jobs" / "lifecycle"), scenario)
    seconds = time.monotonic() - begin
    found = verdicts(life, code, fresh(out / "jobs" / "lifecycle-undisturbed"))
    report = {
        "scenario": asdict(scenario),
        "deeds": [asdict(deed) for deed in life.deeds],
        "steps_without_etcd": life.steps_without_etcd,
        "seconds": seconds,
        "verdicts": found,
        "machine": machine(),
    }
    (out / "lifecycle.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(table(life.deeds))
    console.print("seconds, steps: until every stage is replicated again and training goes on")
    console.print("pause, redone: the longest of a member")
    for what, reached in found.items():
        console.print(f"{'[green]yes' if reached else '[red]NO '}[/] {what}", highlight=False)
    console.print(f"{scenario.steps} steps, {life.steps_without_etcd} of them without etcd; {seconds:.0f} s")
    if as_json:
        click.echo(json.dumps(report, indent=1))
    sys.exit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
