"""Checkpoint and restart with stock DeepSpeed, as good as it can be made; without losses: on-demand.

- Checkpoints are copied to host memory and written while training goes on, at the interval of Young and Daly.
- After a loss the job goes on at once with whole pipelines of the members at hand, in the shape that is fastest; from
  another shape's checkpoint by DeepSpeed's universal one, which is only made then.
- For more members it starts again when that is regained before the next loss is due, right after a checkpoint.
- A node's process is forked from one that has made its imports. The supervisor knows of a loss at once.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from common import JobFailed, environment, fresh, write_config

from bamboo_ds.chaos.faults import Fault
from bamboo_ds.observe.goodput.lives import Category, Rank
from tests.support.processes import Process, start

from .crew import LOOK_S, PATIENCE_S, Clock, Gang, lines, wait_for
from .market import Shape, Work, best_shape, larger_pays
from .outcome import Book, Done, Outcome, Pause

#: Steps before the window begins, at least.
WARM_UP = 4
#: Steps until which checkpoints are made in the warm-up of a job that measures what they cost.
MEASURED_SAVES = 8
#: Seconds between two looks at files.
_FILES_S = 0.2


@dataclass
class Generation(Gang):
    """A start of the job.

    Attributes:
        shape: what it runs as.
        loaded: the step that it goes on from.
        why: what it was started for.
    """

    shape: Shape = field(default_factory=lambda: Shape(1, 1))
    loaded: int = 0
    why: str = ""
    ended_at: float = 0.0

    @property
    def journal(self) -> list[dict[str, Any]]:
        """What its first rank has told."""
        return lines(self.folder / "journal.jsonl")

    def newest(self) -> tuple[int, Path] | None:
        """Step and folder of its newest complete checkpoint."""
        found = []
        for folder in (self.folder / "checkpoints").glob("step*"):
            if folder.name.endswith("_universal"):
                continue
            if all((folder / f"done-{rank}").exists() for rank in range(self.shape.size)):
                found.append((int(folder.name.removeprefix("step")), folder))
        return max(found, default=None)


@dataclass
class _Checkpoint:
    step: int
    folder: Path
    shape: Shape


@dataclass
class Restarts:
    """The supervisor of the job. Use it once.

    Args:
        work: what is trained.
        folder: for all files.
        founders: names of the nodes of the begin.
        faults: of the market.
        every: steps between two checkpoints; 0: none but those of the warm-up.
        until_loss_s: mean seconds between two losses, which the supervisor is told.
    """

    work: Work
    folder: Path
    founders: Sequence[str]
    faults: Sequence[Fault]
    every: int
    until_loss_s: float
    generations: list[Generation] = field(default_factory=list, init=False)
    _alive: list[str] = field(default_factory=list, init=False)
    _book: Book = field(default_factory=Book, init=False)
    _converting: Process | None = field(default=None, init=False)
    _pending: tuple[Shape, str] | None = field(default=None, init=False)
    _checkpoint: _Checkpoint | None = field(default=None, init=False)
    _lost_at: float = field(default=0.0, init=False)
    _files_at: float = field(default=0.0, init=False)
    _journal_at: float = field(default=0.0, init=False)
    _conversions: list[float] = field(default_factory=list, init=False)

    def run(self, outcome: Outcome, seconds: float | None, steps: int | None) -> None:
        """Run through the window, of ``seconds`` or until ``steps`` steps after its begin; fills ``outcome``."""
        fresh(self.folder)
        self._clock = Clock(self.faults, outcome.faults)
        self._alive = list(self.founders)
        try:
            self._start(self.work.shape, "begin")
            first = self._warm_up()
            self._clock.start()
            last = None if steps is None else first + steps
            while not self._over(seconds, last):
                self._turn(outcome, float("inf") if seconds is None else seconds)
                time.sleep(LOOK_S)
            outcome.seconds = self._end_of(last) if seconds is None else seconds
        finally:
            self._stop()
        self._tell(outcome, first)

    @property
    def losses(self) -> dict[int, float]:
        """By step, as they were computed last."""
        return {x["step"]: x["loss"] for each in self.generations for x in each.journal if x["what"] == "step"}

    # -- while it runs --------------------------------------------------------------------------------------

    @property
    def _current(self) -> Generation | None:
        """The generation that runs or starts."""
        newest = self.generations[-1] if self.generations else None
        return newest if newest is not None and not newest.ended_at else None

    def _warm_up(self) -> int:
        """Wait for the first steps, and for the first checkpoint; returns the number of the newest step."""
        generation = self.generations[0]
        least = max(WARM_UP, MEASURED_SAVES + 2 if not self.every else 0)

        def warm() -> bool:
            count = sum(line["what"] == "step" for line in generation.journal)
            return count >= least and (not self.every or generation.newest() is not None)

        wait_for("the first steps", warm, generation, self.work.start_s)
        for node in generation.nodes:
            self._book.begin(node, generation.began)
        self._note_checkpoint(generation)
        return max(line["step"] for line in generation.journal if line["what"] == "step")

    def _over(self, seconds: float | None, last: int | None) -> bool:
        if seconds is not None:
            return self._clock.now >= seconds
        current, now = self._current, time.monotonic()
        if current is None or now < self._journal_at:
            return False
        self._journal_at = now + _FILES_S
        return any(line["what"] == "step" and line["step"] >= (last or 0) for line in current.journal)

    def _end_of(self, step: int | None) -> float:
        """Seconds from the window's begin to the end of a step of the generation that runs."""
        assert self._current is not None and self._clock.begin is not None
        told = (line for line in self._current.journal if line["what"] == "step")
        return next(line["at"] for line in told if line["step"] == step) - self._clock.begin

    def _turn(self, outcome: Outcome, until_s: float) -> None:
        """Do what is due, and what follows."""
        current = self._current
        for what, node in self._clock.due(until_s):
            if what == "join":
                self._alive.append(node)
                self._book.begin(node, time.time())
                outcome.joins += 1
            else:
                self._alive.remove(node)
                self._book.end(node, time.time())
                outcome.losses += 1
                if current is not None and node in current.nodes:
                    current.kill([node])
        if current is not None:
            ended = current.ended()
            if ended:
                self._end(current, ended)
                self._begin("loss")
            elif time.monotonic() >= self._files_at:
                self._files_at = time.monotonic() + _FILES_S
                if self._note_checkpoint(current) and self._grows(current):
                    self._end(current, [])
                    self._begin("growth")
        elif self._converting is not None:
            self._continue()
        elif self._alive:
            self._begin("members")

    def _note_checkpoint(self, generation: Generation) -> bool:
        """Whether a new checkpoint is complete."""
        newest = generation.newest()
        if newest is None or (self._checkpoint is not None and newest[0] <= self._checkpoint.step):
            return False
        self._checkpoint = _Checkpoint(*newest, generation.shape)
        return True

    def _grows(self, current: Generation) -> bool:
        """Whether a restart with all members at hand pays."""
        best = best_shape(self.work, len(self._alive))
        if best is None or self.work.step_s(best) >= self.work.step_s(current.shape):
            return False
        times = [
            next(line["begin"] for line in after.journal if line["what"] == "step") - before.ended_at
            for before, after in pairwise(self.generations)
            if any(line["what"] == "step" for line in after.journal)
        ]
        now_s, then_s = self.work.step_s(current.shape), self.work.step_s(best)
        return larger_pays(now_s, then_s, mean(times) if times else 0.0, self.until_loss_s)

    def _end(self, generation: Generation, ended: Sequence[str]) -> None:
        """All of its processes end."""
        self._lost_at = time.time()
        lost = [node for node in ended if node not in self._alive]
        if ended and not lost and not any(node not in self._alive for node in generation.nodes):
            raise JobFailed(f"workers ended by themselves: {ended}\n{generation.log()}")
        generation.end()
        generation.ended_at = self._lost_at
        self._note_checkpoint(generation)

    def _begin(self, why: str) -> None:
        """Start with the members at hand, from the newest checkpoint."""
        shape = best_shape(self.work, len(self._alive))
        if shape is None:
            return
        checkpoint = self._checkpoint
        if checkpoint is not None and checkpoint.shape != shape and self.work.reshapes:
            target = checkpoint.folder.with_name(checkpoint.folder.name + "_universal")
            self._pending = shape, why
            if not (target / "done").exists():
                shutil.rmtree(target, ignore_errors=True)
                command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
                command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
                command += [f"--input_folder={checkpoint.folder}", f"--output_folder={target}"]
                with open(self.folder / "universal.txt", "ab") as log:
                    self._converting = start(command, environment(), log.fileno(), stock=True)
                self._conversion_began = time.time()
                return
        self._start(shape, why)

    def _continue(self) -> None:
        """Go on when the universal checkpoint is there."""
        assert self._converting is not None and self._pending is not None and self._checkpoint is not None
        code = self._converting.poll()
        if code is None:
            return
        self._converting = None
        if code != 0:
            raise JobFailed(f"the universal checkpoint failed: {(self.folder / 'universal.txt').read_text()[-3000:]}")
        self._conversions.append(time.time() - self._conversion_began)
        (self._checkpoint.folder.with_name(self._checkpoint.folder.name + "_universal") / "done").touch()
        self._begin(self._pending[1])  # members may have changed meanwhile

    def _start(self, shape: Shape, why: str) -> None:
        folder = self.folder / f"start-{len(self.generations)}"
        checkpoint, settings = self._checkpoint, dict(self.work.settings)
        arguments = ["--out", str(folder), "--stages", str(shape.stages), *self.work.arguments]
        if self.every:
            arguments += ["--save-every", str(self.every)]
        else:
            arguments += ["--save-every", "2", "--save-until", str(MEASURED_SAVES)]
        if checkpoint is not None:
            load = checkpoint.folder
            if checkpoint.shape != shape and self.work.reshapes:
                settings["checkpoint"] = {"load_universal": True}
                load = load.with_name(load.name + "_universal")
            arguments += ["--load", str(load)]
        folder.mkdir(parents=True)
        micro_batches = self.work.global_micro_batches // shape.pipelines
        config = write_config(folder, micro_batches, None, train_micro_batch_size_per_gpu=self.work.size, **settings)
        generation = Generation(
            folder,
            tuple(self._alive[: shape.size]),
            shape=shape,
            loaded=checkpoint.step if checkpoint is not None else 0,
            why=why,
        )
        self.generations.append(generation)
        generation.start("spotted.py", [*arguments, "--deepspeed_config", str(config)])

    def _stop(self) -> None:
        current = self._current
        if current is not None:
            current.end()
            current.ended_at = time.time()
        if self._converting is not None:
            self._converting.kill()
            self._converting.wait(PATIENCE_S)

    # -- afterwards -----------------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome, first: int) -> None:
        """Everything that the journals tell."""
        begin = self._clock.begin
        assert begin is not None
        newest: dict[int, int] = {}
        journals = [generation.journal for generation in self.generations]
        for number, journal in enumerate(journals):
            newest |= {line["step"]: number for line in journal if line["what"] == "step"}
        stopped = 0.0
        for number, (generation, journal) in enumerate(zip(self.generations, journals, strict=True)):
            steps = [line for line in journal if line["what"] == "step"]
            started = steps[0]["begin"] if steps else generation.ended_at
            lives = [self._book.lives[node] for node in generation.nodes]
            others = [life for node, life in self._book.lives.items() if node not in generation.nodes]
            if number:
                self._add_start(outcome, generation, stopped, started, bool(steps))
                for life in lives:
                    life.label(stopped, started, Rank.STOPPED, Category.WAITING)
            for life in others:
                life.label(started, generation.ended_at, Rank.IDLE, Category.STANDBY)
            for line in steps:
                category = Category.PRODUCTIVE if newest[line["step"]] == number else Category.WASTED
                for life in lives:
                    life.label(line["begin"], line["at"], Rank.STEP, category)
                if line["at"] > begin and line["step"] > first and line["at"] - begin <= outcome.seconds:
                    outcome.done.append(
                        Done(line["step"], line["begin"] - begin, line["at"] - begin, self.work.samples, line["loss"])
                    )
            for line in (line for line in journal if line["what"] == "save"):
                for life in lives:
                    life.label(line["at"] - line["seconds"], line["at"], Rank.STEP, Category.CHECKPOINT)
            if steps:
                for life in lives:
                    life.label(steps[-1]["at"], generation.ended_at, Rank.GAP, Category.WASTED)
            outcome.saves += [line["seconds"] for line in journal if line["what"] == "save"]
            outcome.saved += self._seconds_to_complete(generation, journal)
            stopped = generation.ended_at
        self._account(outcome, begin)

    def _add_start(
        self, outcome: Outcome, generation: Generation, stopped: float, started: float, trained: bool
    ) -> None:
        begin = self._clock.begin or 0.0
        outcome.restarts += 1
        outcome.pauses.append(Pause(stopped - begin, started - stopped, generation.why))
        if trained:
            outcome.starts.append(started - generation.began)

    def _seconds_to_complete(self, generation: Generation, journal: Sequence[dict[str, Any]]) -> list[float]:
        """From the end of the copy of each checkpoint to its completion."""
        copied = {line["step"]: line["at"] for line in journal if line["what"] == "save"}
        found = []
        for step, at in copied.items():
            files = [
                generation.folder / "checkpoints" / f"step{step}" / f"done-{r}" for r in range(generation.shape.size)
            ]
            if all(file.exists() for file in files):
                found.append(max(file.stat().st_mtime for file in files) - at)
        return found

    def _account(self, outcome: Outcome, begin: float) -> None:
        outcome.goodput = self._book.add(begin, begin + outcome.seconds)
        outcome.count_members(self.work.shape.size)
        outcome.more = {
            "save_every_steps": self.every,
            "shapes": [[g.began - begin, str(g.shape), g.why, g.loaded] for g in self.generations],
            "conversion_s": self._conversions,
        }
