"""Seeded kills at random instants of an iteration, over all stages of a small real model.

A kill is a SIGKILL of a worker from outside. Each job takes two: since a takeover does not make new replicas, the
second one strikes a stage that is not adjacent to the first. See ``--help``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
from common import (
    PATIENCE_S,
    WORKERS,
    Job,
    JobFailed,
    Watcher,
    bamboo_job,
    console,
    fresh,
    new_figure,
    run_stock,
    save_figure,
    save_json,
    summary,
    verdict,
    versions,
    wall,
    write_config,
)
from rich.markup import escape
from rich.table import Table

STAGES, MICRO_BATCHES, BATCH, WIDTH = 4, 8, 16, 256
#: Steps of a job, and the steps after which its kills come.
STEPS, KILL_AFTER = 40, ((6, 10), (20, 25))


@dataclass(frozen=True)
class Kill:
    """One kill and what it cost; times are seconds since the SIGKILL unless said otherwise.

    Attributes:
        stage: first stage of the killed worker.
        after_step: committed steps when its instant was chosen.
        delay_s: from the notice of that step to the kill.
        planned_s: until the leader had written the new plan.
        known_s: until every survivor had left what it waited for (by survivor).
        rebuilt_s: until the last survivor had rebuilt its groups and agreed on how to go on.
        finished_s: until the interrupted iteration was finished on the last survivor: the whole pause.
        redo_s: part of it after the rebuilding: redone and remaining passes, commit and step (longest).
        delay_of_training_s: by how much later the following steps came, against this job's median iteration.
        forwards, backwards: passes computed again.
        mode: how the iteration was resumed.
    """

    job: int
    stage: int
    after_step: int
    delay_s: float
    planned_s: float
    known_s: list[float]
    rebuilt_s: float
    finished_s: float
    redo_s: float
    delay_of_training_s: float
    forwards: int
    backwards: int
    mode: str


#: Columns of the summary: name, value of one kill, limit in seconds of the 95th percentile.
FIGURES: tuple[tuple[str, Callable[[Kill], float], float | None], ...] = (
    ("plan written", lambda k: k.planned_s, None),
    ("known to every survivor", lambda k: max(k.known_s), 0.3),
    ("agreed and rebuilt", lambda k: k.rebuilt_s, 0.5),
    ("redone and remaining work", lambda k: k.redo_s, None),
    ("whole pause", lambda k: k.finished_s, None),
    ("whole pause - redone work", lambda k: k.finished_s - k.redo_s, 0.7),
    ("delay of training", lambda k: k.delay_of_training_s, None),
)


@dataclass(frozen=True)
class Worker:
    """A member's id and the process id of its worker."""

    id: str
    pid: int


def members(process: subprocess.Popen[bytes]) -> dict[int, Worker]:
    """Workers of a running job by the ranks with which they began, of whatever version of the project."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        env = child.environ()
        parent = child.parent()
        if "RANK" in env and "BAMBOO_MEMBER" in env and parent and "bamboo_ds.control.agent" in parent.cmdline():
            found[int(env["RANK"])] = Worker(env["BAMBOO_MEMBER"], child.pid)
    return found


def strike(watcher: Watcher, victim: Worker, stage: int, number: int, draw: random.Random) -> Kill:
    """Kill ``victim`` at a random instant of an iteration, and account for it."""
    window = KILL_AFTER[len([e for e in watcher.seen if e["event"] == "member_lost"])]
    after = watcher.step(draw.randint(*window))
    typical = median(e["seconds"] for e in watcher.seen if e["event"] == "step" and e["step"] > 1)
    epoch = max(e["epoch"] for e in watcher.seen if e["event"] == "plan")
    delay = draw.random() * typical
    time.sleep(delay)
    at = time.time()
    os.kill(victim.pid, signal.SIGKILL)

    def new(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        return [e for e in events if e["event"] == kind and e["epoch"] > epoch]

    def recovered(events: list[dict[str, Any]]) -> bool:
        plans = new(events, "plan")
        return bool(plans) and len({e["member"] for e in new(events, "recovered")}) == len(plans[-1]["members"])

    events = watcher.wait(f"recovery from the kill of {victim.id}", recovered)
    plan, ends = new(events, "plan")[0], new(events, "recovered")
    if plan["lost"] != [victim.id]:
        raise JobFailed(f"{victim.id} was killed, the plan lost {plan['lost']}")
    noticed = [wall(e) - e["redo_seconds"] - e["pause_seconds"] - at for e in ends]
    return Kill(
        job=number,
        stage=stage,
        after_step=after,
        delay_s=delay,
        planned_s=wall(plan) - at,
        known_s=noticed,
        rebuilt_s=max(wall(e) - e["redo_seconds"] - at for e in ends),
        finished_s=max(wall(e) - at for e in ends),
        redo_s=max(e["redo_seconds"] for e in ends),
        delay_of_training_s=0.0,
        forwards=max(e["forwards_redone"] for e in ends),
        backwards=max(e["backwards_redone"] for e in ends),
        mode=ends[0]["mode"],
    )


def delays(kills: list[Kill], events: list[dict[str, Any]]) -> list[Kill]:
    """The kills with the delay of training: the interrupted steps against the median of all others."""
    steps = {e["step"]: wall(e) for e in events if e["event"] == "step"}
    interrupted = {e["step"] for e in events if e["event"] == "recovered"}
    normal = median(steps[s] - steps[s - 1] for s in steps if s - 1 in steps and not {s, s - 1} & interrupted)
    found = []
    for kill in kills:
        later = min((s for s in interrupted if s > kill.after_step), default=kill.after_step + 1)
        taken = steps[later] - steps[kill.after_step]
        found.append(replace(kill, delay_of_training_s=taken - normal * (later - kill.after_step)))
    return found


def folder_of(out: Path, number: int, checkout: Path | None) -> Path:
    """Where a job leaves its losses."""
    return out / "jobs" / f"kills-{number}{'' if checkout is None else f'-{checkout.name}'}"


def kill_job(
    out: Path, number: int, first: int, kills: int, draw: random.Random, arguments: list[str], checkout: Path | None
) -> list[Kill]:
    """One job with one or two kills."""
    folder = fresh(folder_of(out, number, checkout))
    config = write_config(folder, MICRO_BATCHES, {}, train_micro_batch_size_per_gpu=BATCH)
    options = ["--deepspeed_config", str(config), "--out", str(folder), *arguments]
    done = []
    with bamboo_job(folder, STAGES, WORKERS / "small.py", options, checkout=checkout) as process:
        watcher = Watcher(Job(folder), process)
        watcher.step(1)
        living = members(process)
        for turn in range(kills):
            stage = (first + 2 * turn) % STAGES
            done.append(strike(watcher, living[stage], stage, number, draw))
            last = done[-1]
            console.print(
                f"  job {number}: stage {last.stage} killed {last.delay_s * 1000:.0f} ms after step {last.after_step}: "
                f"known {max(last.known_s) * 1000:.0f}, rebuilt {last.rebuilt_s * 1000:.0f}, "
                f"pause {last.finished_s * 1000:.0f} ms ({last.mode}, {last.forwards} F {last.backwards} B redone)"
            )
        code = process.wait(PATIENCE_S)
    if code:
        raise JobFailed(f"{folder}: exit code {code}\n{Job(folder).log()[-3000:]}")
    return delays(done, Job(folder).events())


def table(kills: list[Kill], normal_s: float) -> tuple[Table, list[dict[str, Any]]]:
    """The summary, for people and for JSON."""
    view = Table(title=f"{len(kills)} kills, {STAGES} workers (real CPU model, iteration {normal_s * 1000:.0f} ms)")
    for column in ("since the SIGKILL [ms]", "p50", "p95", "max", "limit p95", ""):
        view.add_column(escape(column), justify="left" if column in ("", "since the SIGKILL [ms]") else "right")
    rows = []
    for name, value, limit in FIGURES:
        figures = summary([value(kill) for kill in kills])
        reached = None if limit is None else figures["p95"] <= limit
        rows.append({"name": name, **figures, "limit": limit, "reached": reached})
        shown = [f"{figures[key] * 1000:.0f}" for key in ("p50", "p95", "max")]
        view.add_row(name, *shown, "" if limit is None else f"{limit * 1000:.0f}", verdict(reached))
    return view, rows


def against_table(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> Table:
    """Ratios of two summaries."""
    view = Table(title=f"this checkout / {name}, {STAGES} workers, the same kills in turn")
    for column in ("since the SIGKILL", "p50", "p95", "max"):
        view.add_column(escape(column), justify="right" if column.startswith(("p", "m")) else "left")
    for own, other in zip(mine, theirs, strict=True):
        view.add_row(own["name"], *(f"{own[key] / other[key]:.2f}" for key in ("p50", "p95", "max")))
    return view


def plot(kills: list[Kill], path: Path) -> None:
    """One bar per kill, divided into its phases."""
    figure, axis = new_figure(figsize=(3 + 0.35 * len(kills), 4.5))
    kills = sorted(kills, key=lambda k: k.finished_s)
    marks = [
        [0.0] * len(kills),
        [max(k.known_s) for k in kills],
        [k.rebuilt_s for k in kills],
        [k.finished_s for k in kills],
    ]
    for index, label in enumerate(("until every survivor knows", "agree and rebuild", "redo and finish the iteration")):
        heights = [(b - a) * 1000 for a, b in zip(marks[index], marks[index + 1], strict=True)]
        axis.bar(range(len(kills)), heights, bottom=[a * 1000 for a in marks[index]], label=label)
    axis.set_xticks(range(len(kills)), [f"stage {k.stage}" for k in kills], rotation=90, fontsize=7)
    axis.set_ylabel("ms since the SIGKILL")
    axis.set_title(f"Kills at random instants, {STAGES} workers on {len(os.sched_getaffinity(0))} CPUs", fontsize=9)
    axis.legend(fontsize=7)
    save_figure(figure, path)


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--quick", is_flag=True, help="Two kills.")
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout of the project, whose jobs take turns with this one's and have the same kills.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(kills: int, seed: int, quick: bool, against: Path | None, out: Path) -> None:
    """Kill workers at random instants and measure how long training pauses."""
    out, kills = out.resolve(), 2 if quick else kills
    draw = random.Random(seed)
    arguments = ["--stages", str(STAGES), "--steps", str(STEPS), "--width", str(WIDTH)]
    folder = fresh(out / "jobs" / "undisturbed")
    config = write_config(folder, MICRO_BATCHES, None, train_micro_batch_size_per_gpu=BATCH)
    options = ["--deepspeed_config", str(config), "--out", str(folder), *arguments]
    undisturbed = run_stock(folder, STAGES, WORKERS / "small.py", options, 180).results()[0]
    done: dict[Path | None, list[Kill]] = {checkout: [] for checkout in versions(against)}
    wrong: list[bool] = []
    stages: list[int] = []
    while len(done[None]) < kills:
        if not stages:
            stages = draw.sample(range(STAGES), STAGES)
        number, first, wanted, instants = len(wrong), stages.pop(), min(2, kills - len(done[None])), draw.random()
        for checkout, found in done.items():
            found += kill_job(out, number, first, wanted, random.Random(instants), arguments, checkout)
            results = Job(folder_of(out, number, checkout)).results().values()
            differs = not results or any(r["losses"] != undisturbed["losses"] for r in results)
            if checkout is None:
                wrong.append(differs)
            elif differs:
                console.print(f"[red]losses of job {number} of {checkout} differ from the undisturbed run[/red]")
    normal_s = median(undisturbed["seconds"][3:])
    view, rows = table(done[None], normal_s)
    console.print(view)
    console.print(f"losses bit-equal to the undisturbed run: {wrong.count(False)} of {len(wrong)} jobs")
    content = {"title": "recovery", "seed": seed, "undisturbed_iteration_s": normal_s, "summary": rows}
    for checkout, found in done.items():
        if checkout is not None:
            view, theirs = table(found, normal_s)
            view.title = f"{checkout}: {view.title}"
            console.print(view, against_table(rows, theirs, checkout.name))
            content["against"] = {"checkout": str(checkout), "summary": theirs, "kills": [asdict(k) for k in found]}
    own = [asdict(kill) for kill in done[None]]
    save_json(out / "recovery.json", {**content, "jobs_that_differ": sum(wrong), "kills": own})
    plot(done[None], out / "recovery.png")
    if any(wrong):
        raise JobFailed(f"losses of jobs {[i for i, w in enumerate(wrong) if w]} differ from the undisturbed run")


if __name__ == "__main__":
    main()
