"""Hundreds of seeded faults of all kinds against one job of emulated devices with standbys, or with too few members.

The job must bear them in one run: no restart, no fatal loss, every sample once, the parameters of the undisturbed run,
nothing leaked, every pause recorded. See ``--help``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
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
    write_config,
)
from scrape import Scraper, free_address

from bamboo_ds.chaos.faults import FaultKind
from bamboo_ds.chaos.observer import Observer
from bamboo_ds.launchers import jobs

#: Largest relative difference of parameters, and largest growth of memory, threads and descriptors per process.
TOLERANCE, GROWTH = 1e-6, 0.05
#: How often which kind of fault is injected: all that are possible on one host.
WEIGHTS = {
    FaultKind.KILL: 18,
    FaultKind.KILL_AGENT: 10,
    FaultKind.STOP: 14,
    FaultKind.FREEZE: 6,
    FaultKind.HOLD_GIL: 8,
    FaultKind.EXCEPTION: 8,
    FaultKind.EXIT: 6,
    FaultKind.HOST: 5,
    FaultKind.NOTICE: 8,
    FaultKind.JOIN: 11,
    FaultKind.ETCD_STOP: 6,
}
#: Seconds for a job to be as it should be.
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        blocks: layers of a stage, which may be divided at each of them.
        micro_batches: of a pipeline.
        standbys: members beyond :attr:`size` that chaos keeps up; negative: so many lost ones are not replaced.
        batch: samples of a micro-batch.
    """

    pipelines: int
    stages: int
    blocks: int
    micro_batches: int
    steps: int
    standbys: int
    batch: int = 2

    @property
    def size(self) -> int:
        """Members at the start, without standbys."""
        return self.pipelines * self.stages

    def arguments(self, folder: Path, block: dict[str, Any] | None, hold_s: float) -> list[str]:
        """Those of the worker, whose configuration is written to ``folder``; it hurries once ``done`` is there."""
        config = write_config(folder, self.micro_batches, block, train_micro_batch_size_per_gpu=self.batch)
        arguments = ["--deepspeed_config", str(config), "--stages", str(self.stages), "--layers", str(self.blocks)]
        arguments += ["--steps", str(self.steps), "--forward-s", str(hold_s)]
        return [*arguments, "--until", str(folder / "done"), "--out", str(folder)]


@dataclass(frozen=True)
class Usage:
    """What the processes of the job use at a quiet moment; means per worker and per agent.

    Attributes:
        strays: processes besides workers and agents of members, the launcher, etcd and its supervisor.
        *_rss_mb: resident memory in MB, without what processes share.
    """

    members: int
    strays: int
    worker_threads: float
    worker_fds: float
    worker_rss_mb: float
    agent_threads: float
    agent_fds: float
    agent_rss_mb: float
    launcher_fds: int
    launcher_rss_mb: float


def usage(observer: Observer, launcher: int, chaos: int) -> Usage:
    """Look at all processes of the job, those that ``bamboo chaos`` has started included."""
    members = observer.look().members.values()
    known = {pid for record in members for pid in (record.pid, record.agent_pid)}
    found = [p for root in (launcher, chaos) for p in psutil.Process(root).children(recursive=True)]
    workers = [psutil.Process(record.pid) for record in members]
    agents = [psutil.Process(record.agent_pid) for record in members]
    root = psutil.Process(launcher)

    def rss(process: psutil.Process) -> float:
        return process.memory_full_info().uss / 2**20

    return Usage(
        members=len(workers),
        strays=len({p.pid for p in found} - known) - 2,
        worker_threads=mean(p.num_threads() for p in workers),
        worker_fds=mean(p.num_fds() for p in workers),
        worker_rss_mb=mean(map(rss, workers)),
        agent_threads=mean(p.num_threads() for p in agents),
        agent_fds=mean(p.num_fds() for p in agents),
        agent_rss_mb=mean(map(rss, agents)),
        launcher_fds=root.num_fds(),
        launcher_rss_mb=rss(root),
    )


def quiet(observer: Observer, members: int, what: str) -> None:
    """Wait until the job has ``members`` members and nothing is left to do."""
    deadline = time.monotonic() + PATIENCE_S
    missing: str | None = "nothing is known"
    while time.monotonic() < deadline:
        situation = observer.look(0.2)
        missing = situation.unsettled()
        if missing is None and situation.plan is not None and len(situation.plan.members) >= members:
            return
    raise JobFailed(f"{what}: {missing or 'members are missing'}")


@contextmanager
def chaos(folder: Path, job: str, options: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """``bamboo chaos`` with its output in ``folder``."""
    command = [sys.executable, "-m", "bamboo_ds.cli.main", "chaos", "--job", job, "--out", str(folder / "chaos")]
    with open(folder / "chaos.txt", "wb") as log:
        process = subprocess.Popen([*command, *options], env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def faults_done(folder: Path) -> int:
    """Faults that are over, as the journal says."""
    path = folder / "chaos" / "faults.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return sum(json.loads(line)["number"] is not None for line in lines)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """All parameters of a checkpoint, by layer and name."""
    files = sorted((folder / "checkpoint" / "last").glob("layer_*-model_states.pt"))
    found = {}
    for file in files:
        for name, value in torch.load(file, weights_only=False).items():
            found[f"{file.name}:{name}"] = value
    return found


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a parameter tensor (by the maximum norm)."""
    if one.keys() != other.keys() or not one:
        raise JobFailed(f"the checkpoints hold other parameters: {sorted(one.keys() ^ other.keys())}")
    return max(float((one[k] - other[k]).abs().max() / other[k].abs().max()) for k in one)


def ledger_problems(folder: Path, work: Work) -> list[str]:
    """Every worker's iterator must have handed out its pipeline's samples in order, each once."""
    problems, pipelines, needed = [], work.pipelines, work.steps * work.micro_batches
    for file in sorted(folder.glob("ledger-*.txt")):
        pipeline = int(file.stem.split("-")[2])
        lines = file.read_text().split("\n")[:-1]  # a worker that was killed may have left a part of one
        rows = [tuple(map(int, line.split())) for line in lines]
        width = work.batch * pipelines
        expected = [(pipeline + width * i, pipeline + width * (i + 1) - pipelines) for i in range(len(rows))]
        if rows != expected:
            wrong = next(i for i, pair in enumerate(zip(rows, expected, strict=True)) if pair[0] != pair[1])
            problems.append(f"{file.name}: entry {wrong} is {rows[wrong]}, not {expected[wrong]}")
        if len(rows) > needed:
            problems.append(f"{file.name}: {len(rows)} micro-batches were drawn, {needed} are needed")
    return problems


def growth_problems(before: Usage, after: Usage) -> list[str]:
    """What has grown by more than :data:`GROWTH`."""
    problems = []
    old, new = asdict(before), asdict(after)
    joined = max(0, new.pop("members") - old.pop("members"))
    for name in old:
        # The launcher talks to etcd for the first time when one of its agents dies.
        slack = 10 if name == "launcher_rss_mb" else 2 if name.endswith("fds") else 1 if name.endswith("threads") else 0
        # A worker has a connection to every other one, and a thread that reads it.
        slack += joined if name in ("worker_threads", "worker_fds") else 0
        if new[name] > old[name] * (1 + GROWTH) + slack:
            problems.append(f"{name} grew from {old[name]:.1f} to {new[name]:.1f}")
    return problems


def disturbed(folder: Path, work: Work, hold_s: float, faults: int, rate: float, seed: int, more: list[str],
              address: str | None, sync_every: int | None, device: bool, long: bool,
              limit_mb: float | None) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """The job with its faults; returns what was measured and what is wrong."""
    block: dict[str, Any] = {
        "notices": {"sources": ["file"], "file": str(folder / "notice-{slot}"), "poll_s": 0.25},
        "recovery": {"on_exception": "takeover"},
        "topology": {"blocks": work.blocks, "memory_limit_mb": limit_mb},
    }
    redundancy: dict[str, Any] = {} if sync_every is None else {"sync_every": sync_every}
    if device:
        redundancy |= {"mode": "lazy-frc-lazy-brc", "verify_every": 20}
    block["redundancy"] = redundancy
    if address is not None:
        block["observe"] = {"http": address}
    name, members = f"soak-{os.getpid()}", work.size + work.standbys
    script = [*work.arguments(folder, block, hold_s), *["--device"] * device, *["--long"] * long]
    arguments = [str(WORKERS / "soak.py"), *script]
    options = ["--rate", str(rate), "--seed", str(seed), "--count", str(faults), "--keep", str(members)]
    options += ["--slots-per-host", "2", "--min-members", "3", "--timeout-s", "90", "--ready-s", str(PATIENCE_S)]
    if "--weight" not in more:
        options += [word for kind, weight in WEIGHTS.items() for word in ("--weight", f"{kind.value}={weight}")]
    options += more
    problems: list[str] = []
    measured: dict[str, Any] = {}
    with bamboo_job(folder, work.size, Path("-m"), ["bamboo_ds.chaos.victim", *arguments], name) as process:
        wait_for_job(name, process, folder)
        scraper = None if address is None else Scraper(address, name, folder / "events.jsonl")
        with (
            closing(Observer(jobs.choose(name).store, name, PATIENCE_S)) as observer,
            chaos(folder, name, options) as runner,
            nullcontext() if scraper is None else scraper.running(),
        ):
            quiet(observer, members, "the standbys did not join")
            before = usage(observer, process.pid, runner.pid)
            while faults_done(folder) < faults and runner.poll() is None and process.poll() is None:
                time.sleep(0.5)
            if process.poll() is None and runner.poll() is None:
                quiet(observer, members, "after the last fault the job did not heal")
                after = usage(observer, process.pid, runner.pid)
                measured["usage"] = {"before": asdict(before), "after": asdict(after)}
                problems += growth_problems(before, after)
                if scraper is not None:
                    problems += scraper.compare()
                    measured["scrapes"] = {"done": scraper.done, "refused": scraper.refused}
            (folder / "done").touch()
            code = runner.wait(PATIENCE_S + work.steps)
        measured["exit_code"] = process.wait(PATIENCE_S)
    if code:
        problems.append(f"bamboo chaos says {code}, see {folder / 'chaos.txt'}")
    measured["chaos"] = json.loads((folder / "chaos" / "report.json").read_text())
    problems += measured["chaos"]["problems"]
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    if left:
        problems.append(f"processes {left} were left behind")
    return measured, problems


def wait_for_job(name: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until ``bamboo run`` has made its job known."""
    deadline = time.monotonic() + PATIENCE_S
    while jobs.find(name) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise JobFailed(f"{folder}: the job did not start\n{Job(folder).log()[-3000:]}")
        time.sleep(0.1)


@click.command()
@click.option("--faults", type=click.IntRange(min=1), default=300, show_default=True)
@click.option("--rate", type=float, default=15.0, show_default=True, help="Faults per minute, if the job can bear it.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--pipelines", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--stages", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--standbys", default=2, show_default=True, help="Negative: so many lost members are not replaced.")
@click.option("--steps", type=click.IntRange(min=10), help="Of the job.  [default: 20 per fault]")
@click.option("--hold-s", type=float, default=0.012, show_default=True, help="Of an emulated forward pass.")
@click.option(
    "--blocks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Layers of a stage, which may be divided at each of them.",
)
@click.option("--micro-batches", type=click.IntRange(min=1), default=4, show_default=True, help="Of a pipeline.")
@click.option("--sync-every", type=click.IntRange(min=0), help="redundancy.sync_every.  [default: as it is]")
@click.option("--device", is_flag=True, help="On the device of the tests, which is EMULATED, with parked replicas.")
@click.option("--limit-mb", type=float, help="topology.memory_limit_mb; optimizers must have rested then.")
@click.option("--long", is_flag=True, help="Workers tell that iterations take minutes, so that plans interrupt them.")
@click.option("--scrape", is_flag=True, help="Scrape the job's metrics meanwhile, and compare them with its events.")
@click.option("--quick", is_flag=True, help="Twenty faults.")
@click.option("--option", "more", multiple=True, help="For bamboo chaos, such as --option=--weight --option=kill=1.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(faults: int, rate: float, seed: int, pipelines: int, stages: int, standbys: int, steps: int | None,
         hold_s: float, blocks: int, micro_batches: int, sync_every: int | None, device: bool, limit_mb: float | None,
         long: bool, scrape: bool, quick: bool, more: tuple[str, ...], out: Path) -> None:  # fmt: skip
    """Do hundreds of seeded faults to one job and check that it bears them."""
    out, faults = out.resolve(), 20 if quick else faults
    work = Work(pipelines, stages, blocks, micro_batches, steps or 100 + 20 * faults, standbys)
    folder = fresh(out / "jobs" / "soak")
    begin = time.monotonic()
    address = free_address() if scrape else None
    measured, problems = disturbed(
        folder, work, hold_s, faults, rate, seed, list(more), address, sync_every, device, long, limit_mb
    )
    console.print(f"[dim]{time.monotonic() - begin:.0f} s[/dim]")
    if measured["exit_code"] == 0:
        problems += compare(out, folder, work, measured)
    plans = Job(folder).events("plan")
    divided = sum(bool(plan["lent"]) for plan in plans)
    recovered = {event["epoch"] for event in Job(folder).events("recovered")}
    interrupting = sum(plan["epoch"] in recovered and not plan["lost"] for plan in plans)
    measured["plans"] = {"all": len(plans), "divided": divided, "interrupting": interrupting}
    if limit_mb is not None:
        short = Job(folder).events("memory_short")
        for name in ("resting", "under_way"):
            measured["plans"][name] = sum(bool(event[name]) for event in short)
        if not measured["plans"]["resting"]:
            problems.append("no optimizer has rested")
    if long and not interrupting:
        problems.append("no plan has interrupted an iteration without a loss")
    if blocks > 1 and not divided:
        problems.append("no plan has divided a stage")
    pauses = [effect for effect in measured["chaos"]["effects"] if effect["lost"] and effect["pause_s"] is None]
    if pauses:
        problems.append(f"the pauses of faults {[effect['record'] for effect in pauses]} were not recorded")
    report(out, folder, {"faults": faults, "seed": seed, "seconds": time.monotonic() - begin, **measured}, problems)


def compare(out: Path, folder: Path, work: Work, measured: dict[str, Any]) -> list[str]:
    """What differs from the undisturbed run."""
    problems = []
    calm = fresh(out / "jobs" / "soak-undisturbed")
    run_stock(calm, work.size, WORKERS / "soak.py", work.arguments(calm, None, 0.0), 60 + work.steps)
    expected = next(json.loads(f.read_text())["losses"] for f in sorted(calm.glob("result-*.json")))
    losses = [json.loads(f.read_text())["losses"] for f in sorted(folder.glob("result-*.json"))]
    if not losses:
        problems.append("no worker came to the end")
    worst = max((abs(a - b) / abs(b) for found in losses for a, b in zip(found, expected, strict=True)), default=None)
    measured |= {"largest_difference_of_losses": worst, "workers_at_the_end": len(losses), "steps": work.steps}
    if worst is None or worst > TOLERANCE:
        problems.append(f"losses differ by up to {worst}")
    if losses:
        measured["largest_difference_of_parameters"] = largest_difference(parameters(folder), parameters(calm))
        if measured["largest_difference_of_parameters"] > TOLERANCE:
            problems.append(f"parameters differ by up to {measured['largest_difference_of_parameters']}")
    return problems + ledger_problems(folder, work)


def report(out: Path, folder: Path, content: dict[str, Any], problems: list[str]) -> None:
    """Tables and JSON; fails if there are problems."""
    click.echo((folder / "chaos.txt").read_text()[-6000:])
    for name in ("largest_difference_of_losses", "largest_difference_of_parameters", "plans", "usage"):
        console.print(f"{name}: {content.get(name)}", highlight=False)
    (out / "soak.json").write_text(json.dumps({**content, "problems": problems, "machine": machine()}, indent=1) + "\n")
    console.print(f"[dim]{out / 'soak.json'}[/dim]")
    if problems:
        raise JobFailed("\n".join(problems))
    console.print("[green]the job has borne all of it[/green]")


if __name__ == "__main__":
    main()
