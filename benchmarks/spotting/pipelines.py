"""Whole pipelines of stock DeepSpeed that train with each other as long as they are there: sample dropping.

A pipeline that loses a node is gone; its nodes that are left, and those that come, make a new one as soon as they are
enough. Meanwhile its samples are left out: the step is the mean over the others'. Where no pipeline is left the next
one goes on from a checkpoint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import JobFailed, fresh, write_config

from bamboo_ds.chaos.faults import Fault
from bamboo_ds.observe.goodput.lives import Category, Rank

from .crew import LOOK_S, Clock, Gang, lines, wait_for
from .hub import Hub
from .market import Work
from .outcome import Book, Done, Outcome, Pause
from .restarts import WARM_UP

#: Seconds between two looks at files.
_FILES_S = 0.2


@dataclass
class _Pipeline(Gang):
    """A start of a pipeline.

    Attributes:
        slot: which of the job's pipelines it is.
        lost_at: when its slot had become empty before, ``None`` at the begin.
    """

    slot: int = 0
    lost_at: float | None = None
    ended_at: float = 0.0

    @property
    def journal(self) -> list[dict[str, Any]]:
        """What its first rank has told."""
        return lines(self.folder / "journal.jsonl")


@dataclass
class Pipelines:
    """The supervisor. Use it once.

    Args:
        work: what is trained.
        folder: for all files.
        founders: names of the nodes of the begin.
        faults: of the market.
        start: starts a gang's processes, given the gang, its slot and the arguments that all systems share.
        gone: called with the slot of a pipeline that is gone, after its processes have ended.
    """

    work: Work
    folder: Path
    founders: Sequence[str]
    faults: Sequence[Fault]
    start: Callable[[Gang, int, list[str]], None]
    gone: Callable[[int], None]
    every: int
    starts: list[_Pipeline] = field(default_factory=list, init=False)
    _running: dict[int, _Pipeline] = field(default_factory=dict, init=False)
    _alive: list[str] = field(default_factory=list, init=False)
    _book: Book = field(default_factory=Book, init=False)
    _empty_since: dict[int, float] = field(default_factory=dict, init=False)

    def run(self, outcome: Outcome, seconds: float | None, steps: int | None) -> None:
        """Run through the window, of ``seconds`` or until ``steps`` steps after its begin; fills ``outcome``."""
        fresh(self.folder)
        self._clock = Clock(self.faults, outcome.faults)
        self._alive = list(self.founders)
        try:
            self._fill()
            first = self._warm_up()
            self._clock.start()
            look_at = 0.0
            while seconds is None or self._clock.now < seconds:
                self._turn(outcome, float("inf") if seconds is None else seconds)
                time.sleep(LOOK_S)
                if seconds is None and time.monotonic() >= look_at:
                    look_at = time.monotonic() + _FILES_S
                    if self._newest() >= first + (steps or 0):
                        break
            outcome.seconds = self._clock.now if seconds is None else seconds
        finally:
            for pipeline in list(self._running.values()):
                self._end(pipeline)
        self._tell(outcome, first)

    # -- while it runs --------------------------------------------------------------------------------------

    def _newest(self) -> int:
        running = self._running.values()
        return max((line["step"] for p in running for line in p.journal if line["what"] == "step"), default=0)

    def _warm_up(self) -> int:
        everyone = list(self._running.values())
        least = max(WARM_UP, self.every)
        for each in everyone:
            wait_for("the first steps", lambda each=each: _count(each) >= least, each, self.work.start_s)  # type: ignore[misc]
            for node in each.nodes:
                self._book.begin(node, each.began)
        return self._newest()

    def _turn(self, outcome: Outcome, until_s: float) -> None:
        for what, node in self._clock.due(until_s):
            if what == "join":
                self._alive.append(node)
                self._book.begin(node, time.time())
                outcome.joins += 1
                continue
            self._alive.remove(node)
            self._book.end(node, time.time())
            outcome.losses += 1
            for pipeline in self._running.values():
                if node in pipeline.nodes:
                    pipeline.kill([node])
        for pipeline in list(self._running.values()):
            if ended := pipeline.ended():
                if all(node in self._alive for node in pipeline.nodes):
                    raise JobFailed(f"workers ended by themselves: {ended}\n{pipeline.log()}")
                self._end(pipeline)
        self._fill()

    def _end(self, pipeline: _Pipeline) -> None:
        pipeline.ended_at = time.time()
        pipeline.end()
        self.gone(pipeline.slot)
        del self._running[pipeline.slot]
        self._empty_since[pipeline.slot] = pipeline.ended_at

    def _fill(self) -> None:
        """Start the pipelines that there are nodes for."""
        shape = self.work.shape
        for slot in range(shape.pipelines):
            busy = {node for pipeline in self._running.values() for node in pipeline.nodes}
            free = [node for node in self._alive if node not in busy]
            if slot in self._running or len(free) < shape.stages:
                continue
            folder = self.folder / f"start-{len(self.starts)}"
            nodes = tuple(free[: shape.stages])
            pipeline = _Pipeline(folder, nodes, slot=slot, lost_at=self._empty_since.get(slot))
            folder.mkdir(parents=True)
            settings = {"train_micro_batch_size_per_gpu": self.work.size, **self.work.settings}
            config = write_config(folder, self.work.micro_batches, None, **settings)
            arguments = ["--out", str(folder), "--stages", str(shape.stages), *self.work.arguments]
            arguments += ["--slot", str(slot), "--deepspeed_config", str(config)]
            self.starts.append(pipeline)
            self._running[slot] = pipeline
            self.start(pipeline, slot, arguments)

    # -- afterwards -----------------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome, first: int) -> None:
        """Everything that the journals tell. A step counts with the pipelines that took part in it."""
        begin = self._clock.begin
        assert begin is not None
        journals = [[line for line in p.journal if line["what"] != "ready"] for p in self.starts]
        newest: dict[tuple[int, int], float] = {}
        for pipeline, journal in zip(self.starts, journals, strict=True):
            for line in journal:
                if line["what"] == "step":
                    key = line["step"], pipeline.slot
                    newest[key] = max(newest.get(key, 0.0), line["at"])
        for pipeline, journal in zip(self.starts, journals, strict=True):
            lives = [self._book.lives[node] for node in pipeline.nodes]
            started = journal[0]["begin"] if journal else pipeline.ended_at
            for life in lives:
                life.label(pipeline.began, started, Rank.STOPPED, Category.WAITING)
            if pipeline.lost_at is not None:
                outcome.restarts += 1
                outcome.pauses.append(Pause(pipeline.lost_at - begin, started - pipeline.lost_at, "pipeline"))
                if journal:
                    outcome.starts.append(started - pipeline.began)
            for line in journal:
                kept = line["what"] == "step" and newest[line["step"], pipeline.slot] == line["at"]
                for life in lives:
                    category = Category.PRODUCTIVE if kept else Category.WASTED
                    life.label(line["begin"], line["at"], Rank.STEP, category)
            if journal:
                for life in lives:
                    life.label(journal[-1]["at"], pipeline.ended_at, Rank.GAP, Category.WASTED)
        for node, life in self._book.lives.items():
            self._label_free(node, life, begin)
        outcome.done = self._steps(journals, begin, first, outcome.seconds)
        outcome.goodput = self._book.add(begin, begin + outcome.seconds)
        outcome.count_members(self.work.shape.size)
        outcome.more = {
            "save_every_steps": self.every,
            "pipelines": [[p.began - begin, p.ended_at - begin, p.slot, list(p.nodes)] for p in self.starts],
        }

    def _label_free(self, node: str, life: Any, begin: float) -> None:
        """Where the node is in no pipeline it stands by."""
        spans = sorted((p.began, p.ended_at) for p in self.starts if node in p.nodes)
        at = life.begin
        for start, end in [*spans, (float("inf"), float("inf"))]:
            life.label(at, min(start, begin + 1e9), Rank.IDLE, Category.STANDBY)
            at = end

    def _steps(self, journals: Sequence[list[dict[str, Any]]], begin: float, first: int, seconds: float) -> list[Done]:
        """Steps in the order in which they were done, with the samples of all pipelines that took part."""
        work = self.work
        share = work.micro_batches * work.size
        told = sorted((line for journal in journals for line in journal), key=lambda line: float(line["at"]))
        found: list[Done] = []
        groups: list[list[dict[str, Any]]] = []
        for line in told:
            if line["what"] != "step":
                continue
            group = next((g for g in groups[-3:] if g[0]["step"] == line["step"] and _fits(g, line)), None)
            if group is None:
                groups.append([line])
            else:
                group.append(line)
        for group in groups:
            end = max(line["at"] for line in group) - begin
            if group[0]["step"] <= first or not 0 < end <= seconds:
                continue
            count = max(line["pipelines"] for line in group)
            # A pipeline that was lost between the agreement and its line has told no loss.
            loss = sum(line["loss"] for line in group) / len(group) if len(group) == count else None
            start = min(line["begin"] for line in group) - begin
            samples = count * share
            found.append(Done(group[0]["step"], start, end, samples, loss, work.samples - samples))
        return found


def _fits(group: Sequence[dict[str, Any]], line: dict[str, Any]) -> bool:
    return line["slot"] not in {other["slot"] for other in group} and len(group) < group[0]["pipelines"]


def _count(pipeline: _Pipeline) -> int:
    return Counter(line["what"] for line in pipeline.journal)["step"]


def sample_dropping(work: Work, folder: Path, founders: Sequence[str], faults: Sequence[Fault], every: int,
                    outcome: Outcome, seconds: float | None, steps: int | None) -> Hub:  # fmt: skip
    """Run it with the pipelines that meet at a :class:`~.hub.Hub`, which is returned when it is over."""
    hub = Hub(work.shape.stages, max(1, every), work.shape.pipelines)

    def start(gang: Gang, slot: int, arguments: list[str]) -> None:
        gang.start("whole.py", [*arguments, "--hub", hub.address])

    try:
        Pipelines(work, folder, founders, faults, start, hub.drop, every).run(outcome, seconds, steps)
    finally:
        hub.close()
    return hub
