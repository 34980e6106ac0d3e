"""``bamboo demo``: train, kill two stages, and prove that nothing of it shows in the result."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from ...chaos.processes import dead, worker_of
from ...launchers import jobs
from ...observe.events import Event, MemberJoined, PlanWritten, Step
from ...observe.story import Story
from ...observe.view import LossDetail
from ...observe.words import counted, duration
from ...processes import adopt_orphans
from ..options import read_job
from .jobs import DemoJob, ended_by_signals, start_bamboo, start_stock

STAGES = 4
SCRIPT = Path(__file__).with_name("train.py")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 8,
    # DeepSpeed's own Adam would be compiled first.
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5}},
    "gradient_clipping": 1.0,
    "steps_per_print": 1_000_000,
}
#: Share of the shortest iteration so far after which a kill happens: the last one may have waited for copies.
_MIDDLE = 0.5
#: Every how many steps one is told.
_TOLD_EVERY = 5
#: Differences that a failed comparison shows.
_SHOWN = 3


@dataclass
class PlannedKill:
    """One kill: planned, then done.

    Attributes:
        stage: the stage whose owner is killed.
        step: the iteration in whose middle it happens.
        survivors: how many members go on afterwards.
        member, process: the victim.
        due: time, in seconds since 1970, at which it happens.
        sent: whether the signal was sent.
    """

    stage: int
    step: int
    survivors: int
    member: str = ""
    process: psutil.Process | None = None
    due: float | None = None
    sent: bool = False

    def problems(self, came: LossDetail | None) -> list[str]:
        """The reasons why this was no SIGKILL within an iteration that the others survived; empty if it was."""
        if not self.sent:
            return ["the signal was never sent"]
        if came is None:
            return ["the leader did not notice it"]
        found = []
        how = [(each.reason, each.detail) for each in came.loss.members if each.id == self.member]
        if how != [("signal", "SIGKILL")]:
            found.append(f"the leader did not notice a SIGKILL but {how}")
        if len(came.survivors) != self.survivors:
            found.append(f"{len(came.survivors)} of {self.survivors} survivors report a recovery")
        odd = sorted({each.mode for each in came.survivors} - {"resume"})
        if odd:
            found.append(f"not in the middle of an iteration: resumed by {', '.join(odd)}")
        if self.process is None or not dead(self.process):
            found.append("it lives")
        return found


@dataclass(frozen=True)
class Proof:
    """A row of the verdict; good if it has no ``problems``."""

    what: str
    measure: str
    problems: list[str]


class Course:
    """Prints the demo's course, line by line."""

    def __init__(self, steps: int) -> None:
        self._steps, self._begin = steps, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._begin

    def say(self, text: str) -> None:
        """Prints a line."""
        click.echo(f"[{self.seconds:5.1f} s] {text}")

    def step(self, step: int, loss: float, remark: str = "") -> None:
        """A step is done; the first, the last and some between are told."""
        if step % _TOLD_EVERY == 0 or step in (1, self._steps):
            self.say(f"  step {step}/{self._steps}   loss {loss:.6f}   {remark}")


class Disturbed:
    """The run with kills: its model, what is told of it, and when to kill."""

    def __init__(self, name: str, course: Course, kills: list[PlannedKill], losses: list[float]) -> None:
        self._name = name
        self._course = course
        self.kills = kills
        self._reference = losses
        self._processes: dict[str, psutil.Process] = {}  # workers, by member
        self._story = Story()
        self.steps: list[Step] = []

    def on_event(self, event: Event) -> None:
        """Takes one event in."""
        for line in self._story.tell(event):
            self._course.say(f"  {line.text}")
        if isinstance(event, MemberJoined) and len(self._story.job.members) == STAGES:
            self._find_processes()
        elif isinstance(event, PlanWritten) and event.shadows:
            for kill in self.kills:
                if not kill.sent:
                    kill.member = event.owners[kill.stage]
                    kill.process = self._processes.get(kill.member)
        elif isinstance(event, Step):
            self._stepped(event)

    def tick(self) -> None:
        """Kills if it is time."""
        for kill in self.kills:
            if kill.due is not None and not kill.sent and time.time() >= kill.due:
                self._kill(kill)

    def _find_processes(self) -> None:
        """Asks the running job for the processes of all members.

        They have just been started, so that it does not matter how long it takes: nobody trains yet.
        """
        for member in read_job(jobs.locate(self._name, None)).members.values():
            self._processes[member.id] = worker_of(member)

    def _stepped(self, event: Step) -> None:
        self.steps.append(event)
        for kill in self.kills:
            if event.step == kill.step - 1:
                kill.due = event.time.timestamp() + _MIDDLE * self._shortest()
        equal = sum(step.loss == loss for step, loss in zip(self.steps, self._reference, strict=False))
        remark = f"{event.seconds * 1000:.0f} ms   {equal}/{len(self.steps)} losses equal the undisturbed run's"
        self._course.step(event.step, event.loss if event.loss is not None else float("nan"), remark)

    def _shortest(self) -> float:
        """Seconds of the shortest iteration so far."""
        return min(step.seconds for step in self.steps)

    def _kill(self, kill: PlannedKill) -> None:
        if kill.process is None or dead(kill.process):
            kill.due = None  # training was over before: nothing is proven
            return
        kill.process.kill()
        kill.sent = True
        shortest = self._shortest() * 1000
        where = f"about {_MIDDLE * shortest:.0f} ms into iteration {kill.step} (the shortest took {shortest:.0f} ms)"
        name = self._story.job.name(kill.member)
        self._course.say(f"  SIGKILL for {name}, owner of stage {kill.stage}, {where}")

    def _loss(self, kill: PlannedKill) -> LossDetail | None:
        """The events' account of the loss that a kill has caused, if any."""
        losses = self._story.job.losses
        numbers = [loss.number for loss in losses.views if kill.member in {each.id for each in loss.members}]
        return losses.detail(numbers[0]) if kill.sent and numbers else None

    def judge(self, steps: int) -> list[Proof]:
        """Whether the run went as it should."""
        rows = []
        for kill in self.kills:
            came = self._loss(kill)
            at = came.loss.step if came is not None and came.loss.step is not None else kill.step
            survived = "" if came is None else f"; {len(came.survivors)} survivors went on"
            if came is not None and came.loss.pause_seconds is not None:
                redone = came.loss.forwards_redone + came.loss.backwards_redone
                survived += (
                    f" after {duration(came.loss.pause_seconds)}, {counted(redone, 'pass', 'passes')} done again"
                )
            what = f"stage {kill.stage} killed in the middle of iteration {at}"
            pid = kill.process.pid if kill.process else None
            rows.append(Proof(what, f"SIGKILL, pid {pid}{survived}", kill.problems(came)))
        seen = [event.step for event in self.steps]
        missing = [] if seen == list(range(1, steps + 1)) else [f"steps reported: {seen}"]
        rows.append(Proof("every step done once", f"{len(seen)} steps", missing))
        return rows


def _environment(folder: Path) -> dict[str, str]:
    """CPU only: four workers of a demo have no GPU each; one thread each, nothing compiled."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def _undisturbed(folder: Path, script: Path, steps: int, course: Course, check: Callable[[], None]) -> list[float]:
    """Trains as stock DeepSpeed; returns the losses."""
    course.say(f"1/3  stock DeepSpeed: {STAGES} pipeline stages, nobody disturbs")
    config = folder / "ds_config.json"
    config.write_text(json.dumps(CONFIG, indent=2))

    def on_line(line: str) -> None:
        words = line.split()
        if len(words) == 4 and (words[0], words[2]) == ("step", "loss"):
            course.step(int(words[1]), float(words[3]))

    with DemoJob("the undisturbed run", folder, on_line) as job:
        start_stock(job, STAGES, script, _arguments(folder, config, steps), _environment(folder))
        job.serve(check)
    losses: list[float] = json.loads((folder / "losses-0.json").read_text())
    return losses


def _disturbed(
    folder: Path, script: Path, steps: int, course: Course, check: Callable[[], None], losses: list[float]
) -> list[Proof]:
    """Trains the same under ``bamboo run`` and kills; returns what happened."""
    course.say("2/3  the same script under `bamboo run`; two workers will be killed")
    config = folder / "ds_config.json"
    config.write_text(json.dumps({**CONFIG, "bamboo": {}}, indent=2))
    # Not neighbours: the stages of a lost member's shadow stay without replica (see the README).
    kills = [PlannedKill(2, steps // 3 + 1, STAGES - 1), PlannedKill(0, 2 * steps // 3 + 1, STAGES - 2)]
    run = Disturbed(f"demo-{os.getpid()}", course, kills, losses)

    def tick() -> None:
        check()
        run.tick()

    with DemoJob("the run with kills", folder, lambda line: None) as job:
        events = job.follow(run.on_event)
        arguments = _arguments(folder, config, steps)
        start_bamboo(job, run._name, STAGES, script, arguments, _environment(folder), events)
        job.serve(tick)
    return run.judge(steps)


def _arguments(folder: Path, config: Path, steps: int) -> list[str]:
    options = ["--deepspeed_config", str(config), "--out", str(folder)]
    return [*options, "--stages", str(STAGES), "--steps", str(steps)]


def _compared(stock: Path, bamboo: Path, steps: int) -> list[Proof]:
    """The comparison of both runs' results, bit for bit."""
    from .compare import compare_checkpoints, compare_losses  # loads torch

    rows = []
    for result in (compare_losses(stock, bamboo, steps), *compare_checkpoints(stock / "final", bamboo / "final")):
        size = f", {result.size / 1e6:.1f} MB" if result.size else ""
        problems = result.differences or ([] if result.equal else ["nothing to compare"])
        rows.append(Proof(f"{result.what}: bit-equal", f"{result.values} values{size}", problems))
    return rows


def _verdict(findings: list[Proof], seconds: float) -> Table:
    table = Table(title=f"verdict after {seconds:.0f} s", title_justify="left")
    for column in ("what", "measure", "result"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.what, finding.measure, "[red]NO" if finding.problems else "[green]yes")
    return table


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(min=6), default=30, show_default=True, help="Iterations of each run.")
def demo(steps: int) -> None:
    """Train a small GPT twice, kill two of four stages in the second run, and compare the results.

    Exits with 0 only if both kills happened in the middle of an iteration and losses, weights and optimizer state of
    both runs are bit-equal; else with 1.
    """
    adopt_orphans()
    course = Course(steps)
    with ended_by_signals() as check, tempfile.TemporaryDirectory(prefix="bamboo-demo-") as folder:
        root = Path(folder)
        stock, bamboo = root / "stock", root / "bamboo"
        stock.mkdir()
        bamboo.mkdir()
        script = Path(shutil.copy(SCRIPT, root / "train.py"))
        losses = _undisturbed(stock, script, steps, course, check)
        findings = _disturbed(bamboo, script, steps, course, check, losses)
        course.say("3/3  comparing losses and checkpoints of both runs")
        findings += _compared(stock, bamboo, steps)
        check()
    Console().print(_verdict(findings, course.seconds))
    failed = [finding for finding in findings if finding.problems]
    for finding in failed:
        more = len(finding.problems) - _SHOWN
        lines = [*finding.problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        click.echo("\n    ".join([f"bamboo demo: NOT proven: {finding.what}:", *lines]), err=True)
    if failed:
        sys.exit(1)
    click.echo("Two of four workers were killed, and the result is bit for bit that of the undisturbed run.")
