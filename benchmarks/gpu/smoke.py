"""Whether jobs on a GPU are as exact as those on CPUs, and what they cost: several workers on one GPU.

With two and four workers, in fp32 and in bf16 with ZeRO-1, the same transformer is trained by stock DeepSpeed, with the
block, and with the block and one SIGKILL; losses and checkpoints are compared bit by bit. One worker alone builds an
engine on NCCL, aborts and ends. See ``--help``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import click
from bench import MIB, Experiment, experiment, table
from common import PATIENCE_S, TRAININGS, WORKERS, Job, JobFailed, Watcher, environment
from jobs import BACKENDS, Case, Jobs, Model, differences, peaks, seconds
from recovery import members
from rich.markup import escape
from rich.table import Table

from bamboo_ds.config import RedundancyMode

STEPS, MICRO_BATCHES = 12, 8
#: A worker is killed in the middle of the step after this one.
KILL_AFTER = 5
#: NCCL refuses several workers on one GPU.
BLOCK = {"redundancy": {"verify_every": 4}}
CASES = (
    Case(TRAININGS["fp32"], 2),
    Case(TRAININGS["bf16-zero1"], 2),
    Case(TRAININGS["fp32"], 4),
    Case(TRAININGS["bf16-zero1"], 2, 2),
)
#: Further ones, which are to be asked for: their engines reduce over pipelines.
MORE = (Case(TRAININGS["fp32"], 2, 2), Case(TRAININGS["fp32"], 2, 3))


@dataclass
class Figures:
    """What a case has shown. Seconds are medians over iterations; bytes are the largest worker's peak.

    Attributes:
        stock: where the run with the block differs from stock DeepSpeed.
        killed: where the run with a SIGKILL differs from the undisturbed one with the block.
        struck: what was killed, and how the others went on.
        problem: why there are no figures.
    """

    case: str
    workers: int
    stock_s: float = 0.0
    block_s: float = 0.0
    stock_bytes: int = 0
    block_bytes: int = 0
    stock: list[str] | None = None
    killed: list[str] | None = None
    struck: str = ""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether everything was equal, and the fault struck."""
        return not self.problem and self.stock == [] and self.killed == [] and bool(self.struck)


class Smoke:
    """Runs the jobs of a case."""

    def __init__(self, run: Experiment, model: Model, backend: str, mode: str | None, kills: bool) -> None:
        self._run, self._jobs, self._kills = run, Jobs(run, model, MICRO_BATCHES, backend), kills
        self._block = {"redundancy": {**BLOCK["redundancy"], **({} if mode is None else {"mode": mode})}}

    def killed(self, case: Case) -> tuple[Job, str]:
        """With the block and a SIGKILL to the owner of the last stage in the middle of an iteration; what of it."""
        folder, arguments = self._jobs.prepare(case, "killed", STEPS, self._block)
        with self._jobs.started(case, folder, arguments) as process:
            watcher = Watcher(Job(folder), process)
            watcher.step(1)
            victim = members(process)[case.workers - 1]
            watcher.step(KILL_AFTER)
            typical = median(e["seconds"] for e in watcher.seen if e["event"] == "step" and e["step"] > 1)
            time.sleep(typical / 2)
            os.kill(victim.pid, signal.SIGKILL)
            watcher.wait("recovery", lambda seen: any(e["event"] == "recovered" for e in seen))
            code = process.wait(PATIENCE_S)
        job = Job(folder)
        if code:
            raise JobFailed(f"{folder}: exit code {code}\n{job.log()[-3000:]}")
        lost = [(e["member_id"], e["detail"]) for e in job.events("member_lost")]
        if lost != [(victim.id, "SIGKILL")] or job.events("replica_mismatch"):
            raise JobFailed(f"{folder}: {victim.id} was killed; lost: {lost}, see {folder}/events.jsonl")
        end = job.events("recovered")[0]
        return job, f"step {end['step']}, {end['mode']}, pause {end['pause_seconds'] * 1000:.0f} ms"

    def measure(self, case: Case) -> Figures:
        """All runs of a case, compared."""
        found = Figures(case.name, case.workers)
        try:
            stock, block = self._jobs.stock(case, STEPS), self._jobs.block(case, "block", STEPS, self._block)
            found.stock_s, found.stock_bytes = seconds(stock), max(peaks(stock))
            found.block_s, found.block_bytes = seconds(block), max(peaks(block))
            found.stock = differences(stock, block, STEPS)
            if not self._kills:
                found.struck, found.killed = "none", []
                return found
            job, found.struck = self.killed(case)
            found.killed = differences(block, job, STEPS)
        except JobFailed as error:
            found.problem = error.message
        return found

    def alone(self) -> dict[str, Any]:
        """One rank on NCCL."""
        limit = self._run.timeout_s("one rank alone")
        file = self._run.folder("alone") / "result.json"
        command = [sys.executable, str(WORKERS / "nccl_alone.py"), str(file)]
        env = {**environment(), **self._jobs.variables, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        env |= {"LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"problem": f"still runs after {limit:.0f} s"}
        if done.returncode or not file.exists():
            return {"problem": f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"}
        result: dict[str, Any] = json.loads(file.read_text())
        wanted = "nccl" if self._run.kind == "cuda" else "gloo"
        if result["inner"] != wanted or not result["raised"] or not result["sum_of_one"]:
            return {**result, "problem": f"not as it should be, on {wanted}"}
        return result


def view(rows: list[Figures], title: str) -> Table:
    """The figures for people."""
    names = ("case", "workers", "stock [s]", "block [s]", "ratio", "stock [MiB]", "block [MiB]")
    result = table(title, *names, " = stock", " SIGKILL", " = undisturbed")
    for row in rows:
        if row.problem:
            result.add_row(row.case, str(row.workers), f"[red]failed[/red]: {escape(row.problem.splitlines()[0])}")
            continue
        sizes = (f"{size / MIB:.0f}" for size in (row.stock_bytes, row.block_bytes))
        times = (f"{row.stock_s:.3f}", f"{row.block_s:.3f}", f"{row.block_s / row.stock_s:.2f}")
        same = ["[green]yes[/green]" if found == [] else "[red]NO[/red]" for found in (row.stock, row.killed)]
        result.add_row(row.case, str(row.workers), *times, *sizes, same[0], row.struck, same[1])
    return result


@experiment("smoke")
@click.option(
    "--case",
    "wanted",
    type=click.Choice([case.name for case in (*CASES, *MORE)]),
    multiple=True,
    help=f"[default: {', '.join(case.name for case in CASES)}]",
)
@click.option("--backend", type=click.Choice(BACKENDS), default="gloo", show_default=True)
@click.option("--mode", type=click.Choice([each.value for each in RedundancyMode]), help="redundancy.mode.")
@click.option("--kill/--no-kill", default=True, show_default=True)
@click.option("--layers", type=click.IntRange(min=2), default=6, show_default=True)
@click.option("--width", type=click.IntRange(min=64), default=512, show_default=True, help="A multiple of 8.")
@click.option("--context", type=click.IntRange(min=8), default=256, show_default=True)
def main(
    run: Experiment,
    wanted: tuple[str, ...],
    backend: str,
    mode: str | None,
    kill: bool,
    layers: int,
    width: int,
    context: int,
) -> None:
    """Lose workers on a GPU, and compare with stock DeepSpeed."""
    if not run.gpu:
        layers, width, context = min(layers, 4), min(width, 64), min(context, 16)
    smoke = Smoke(run, Model(layers, width, context), backend, mode, kill)
    alone: dict[str, Any] = {}
    if not wanted:
        alone = smoke.alone()
        run.say(f"one rank alone{' on NCCL' if run.gpu else ', gloo for NCCL'}: {alone}")
    if "problem" in alone:
        run.problems.append("one rank alone")
    rows: list[Figures] = []
    for case in (*CASES, *MORE):
        if case.name in (wanted or [each.name for each in CASES]):
            rows.append(smoke.measure(case))
            for said in (rows[-1].problem, *(rows[-1].stock or ()), *(rows[-1].killed or ())):
                if said:
                    run.say(f"{case.name}: {said}")
            if not rows[-1].good:
                run.problems.append(case.name)
            run.save(alone=alone, rows=[asdict(row) for row in rows])
    title = f"all workers on it, M={MICRO_BATCHES}, {layers} layers of width {width}, context {context}"
    run.end(view(rows, title), alone=alone, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
