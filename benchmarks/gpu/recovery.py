"""Seeded SIGKILLs in one job on a GPU, each replaced by a joiner: pauses, work done again, and whether it is bit-equal.

After the last one the job ends, and the same steps are trained again without losses. Losses, weights and optimizer
state are compared bit by bit. See ``--help``.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from bench import Experiment, experiment, table
from common import PATIENCE_S, TRAININGS, WORKERS, Job, JobFailed, Watcher, ending, join, summary
from jobs import BACKENDS, SCRIPT, Case, Jobs, Model, checkpoint_differences
from redone import Forecast, Loss, healed, strike
from rich.markup import escape

from bamboo_ds.config import RedundancyMode

MODE = RedundancyMode.EAGER_FORWARD
#: Steps from the last loss to the end of the job; all members see it coming.
LAST = 12
#: Share of the time for the losses; the rest is for the undisturbed run.
SHARE = 0.6


def losses_of(job: Job) -> dict[int, float]:
    """By step, as the members tell them."""
    return {event["step"]: event["loss"] for event in job.events("step")}


class Killing:
    """One job that loses workers.

    Args:
        run, jobs, case: of it.
        folder, arguments: of the job, as :meth:`.jobs.Jobs.prepare` gives them.
        spares: joiners that wait for a loss.
        sanitizer: the program that rank 0 runs under, if any; that worker is not killed.
    """

    def __init__(
        self, run: Experiment, jobs: Jobs, case: Case, folder: Path, arguments: list[str], spares: int, sanitizer: str
    ) -> None:
        self._run, self._jobs, self._case, self._spares, self._sanitizer = run, jobs, case, spares, sanitizer
        self._stop = folder / "stop"
        self._folder, self._name = folder, f"gpu-{os.getpid()}"
        self._arguments = [*arguments, "--stop-file", str(self._stop)]
        self._joined = 0

    def _join(self, stack: ExitStack) -> subprocess.Popen[bytes]:
        self._joined += 1
        joiner = join(self._folder, self._joined, self._name, SCRIPT, self._arguments, self._jobs.variables)
        stack.enter_context(ending(joiner))
        return joiner

    def lose(self, kills: int, draw: random.Random, at: float | None, forecast: Forecast, until_s: float) -> list[Loss]:
        """Kill until there are so many losses, or ``until_s`` seconds are left; then end the job."""
        stages, found, order = self._case.stages, [], []
        script = WORKERS / "sanitized.py" if self._sanitizer else SCRIPT
        with ExitStack() as stack:
            process = stack.enter_context(
                self._jobs.started(
                    self._case, self._folder, self._arguments, self._name, script, SANITIZER=self._sanitizer
                )
            )
            watcher = Watcher(Job(self._folder), process, PATIENCE_S * (4 if self._sanitizer else 1))
            watcher.step(1)
            processes = [process, *(self._join(stack) for _ in range(self._spares))]
            while len(found) < kills and self._run.left_s() > until_s:
                order = order or draw.sample(range(1 if self._sanitizer else 0, stages), stages - bool(self._sanitizer))
                watcher.wait("every stage has its member and its shadow", lambda seen: healed(seen, stages))
                instant = draw.random() if at is None else at
                found.append(strike(watcher, processes, order.pop(), instant, forecast))
                self._run.say(f"loss {len(found)}: {found[-1]}")
                processes.append(self._join(stack))
            self.last = watcher.step(0) + LAST
            self._stop.with_suffix(".new").write_text(str(self.last))
            self._stop.with_suffix(".new").rename(self._stop)
            code = process.wait(max(60.0, self._run.left_s()))
        if code:
            raise JobFailed(f"{self._folder}: exit code {code}\n{Job(self._folder).log()[-3000:]}")
        return found


@experiment("recovery")
@click.option("--kills", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--stages", type=click.IntRange(min=3), default=4, show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--at", type=click.FloatRange(0, 1), help="Share of the iteration that is over. [default: at random]")
@click.option("--sync-every", type=click.IntRange(min=0), help="redundancy.sync_every. [default: auto]")
@click.option("--spares", type=click.IntRange(min=0), default=3, show_default=True, help="Joiners that wait.")
@click.option("--training", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), default="gloo", show_default=True)
@click.option(
    "--sanitizer", is_flag=True, help="The worker of rank 0 runs under compute-sanitizer, where there is one."
)
def main(
    run: Experiment,
    kills: int,
    seed: int,
    stages: int,
    micro_batches: int,
    at: float | None,
    sync_every: int | None,
    spares: int,
    training: str,
    backend: str,
    sanitizer: bool,
) -> None:
    """Lose workers one after the other, and compare with the run without losses.

    With sums every n micro-batches, for instance --micro-batches 32 --sync-every 4 --at 0.75, a loss may cost n passes
    of the lost stage and those in flight.
    """
    if not run.gpu:
        kills, spares = min(kills, 2), min(spares, 1)
    model = Model(2 * stages, 512, 256) if run.gpu else Model(stages, 64, 16, 4, 2)
    jobs, case = Jobs(run, model, micro_batches, backend), Case(TRAININGS[training], stages)
    synced: dict[str, Any] = {} if sync_every is None else {"sync_every": sync_every}
    # Stages computed whole, so that every stage has one member; joiners wait as standbys.
    block: dict[str, Any] = {"redundancy": {"mode": MODE.value, **synced}, "topology": {"blocks": 1}}
    program = (shutil.which("compute-sanitizer") or "") if sanitizer else ""
    if sanitizer and not program:
        run.say("there is no compute-sanitizer on this machine: all workers run without one")
    if program:
        block["membership"] = {"heartbeat_timeout_s": 60, "start_timeout_s": 300}  # it makes a worker slow
    folder, arguments = jobs.prepare(case, "killed", 10**6, block)
    killing = Killing(run, jobs, case, folder, arguments, spares, program)
    forecast = Forecast(stages, micro_batches, MODE, sync_every or 0)
    losses = killing.lose(kills, random.Random(seed), at, forecast, (1 - SHARE) * run.left_s())
    killed = Job(folder)
    content: dict[str, Any] = {
        "sanitizer": program,
        "sync_every": sync_every,
        "kills": [asdict(loss) for loss in losses],
    }
    run.save(**content)
    if len(losses) < kills:
        run.blame(f"{len(losses)} losses instead of {kills}: the time was over")
    if killed.events("replica_mismatch"):
        run.blame("replicas have differed from their stages")
    undisturbed = jobs.block(case, "undisturbed", killing.last, block)
    mine, theirs = losses_of(undisturbed), losses_of(killed)
    differ = [step for step in mine.keys() | theirs.keys() if mine.get(step) != theirs.get(step)]
    content["losses_that_differ"] = sorted(differ)
    content["checkpoints"] = checkpoint_differences(undisturbed.folder, folder)
    if differ or content["checkpoints"]:
        run.blame(f"{len(differ)} losses and of the checkpoints {content['checkpoints']} differ")
    equal = "NO" if run.problems else "yes"
    view = table(
        f"{len(losses)} SIGKILLs, {stages} workers, M={micro_batches}, bit-equal: {equal}", "", "p50", "p95", "max"
    )
    figures = {
        "pause [ms]": [1000 * loss.pause_s for loss in losses],
        "cost [iterations]": [loss.cost for loss in losses],
    }
    figures |= {"backward passes kept": [loss.kept for loss in losses], "redone": [loss.backwards for loss in losses]}
    content["summary"] = {name: summary(values) for name, values in figures.items()}
    for name, values in content["summary"].items():
        view.add_row(escape(name), *(f"{values[key]:.2f}" for key in ("p50", "p95", "max")))
    if sync_every:
        content["most_redone"] = sync_every + stages
        if max(loss.backwards for loss in losses) > content["most_redone"]:
            run.blame(f"more than {content['most_redone']} backward passes were done again")
    run.end(view, steps=killing.last, **content)


if __name__ == "__main__":
    main()
