"""``bamboo``: a real job of ``bamboo run``, to which ``bamboo chaos --trace`` does what the market does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import WORKERS, Job, JobFailed, Watcher, ending, environment, fresh, wall, write_config

from bamboo_ds.chaos.schedule import Change
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.events import read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.observe.tail import EventTail
from tests.support.processes import Process, start

from .crew import PATIENCE_S
from .market import Work, trace_text
from .outcome import Done, Outcome, Pause
from .restarts import WARM_UP

#: Seconds between two looks at a job that must not be disturbed.
_LOOK_S = 0.1
#: Steps that a job still does after its last one has been named: all members must have seen it by then.
_NOTICE_STEPS = 3
#: Seconds for the job to do them, which may have to restart first.
_END_S = 300.0
#: Seconds without etcd after which workers commit nothing: as few as may be.
_FENCE_S = 10.0


@dataclass
class Elastic:
    """The job.

    Args:
        work: what is trained.
        folder: for all files.
        changes: of the market.
        compress: how many times faster than the trace.
        every: steps between two checkpoints, from which a fatal loss restarts; 0: none.
        limit: members of the job at most.
        spare_holders: losses wait until the job can bear them.
        blocks: the setting ``topology.blocks``.
    """

    work: Work
    folder: Path
    changes: Sequence[Change]
    compress: float
    every: int
    limit: int
    spare_holders: bool
    blocks: str

    def run(self, outcome: Outcome, seconds: float | None, steps: int | None) -> dict[int, float]:
        """Run through the window, of ``seconds`` or until ``steps`` steps after its begin; fills ``outcome``.

        Returns:
            The loss of each step, as workers that came to the end have seen it.
        """
        folder = fresh(self.folder)
        trace, stop, name = folder / "trace.csv", folder / "stop", f"spot-{os.getpid()}"
        trace.write_text(trace_text(self.changes))
        slots = self.work.shape.size
        with _warm_job(folder, slots, self._arguments(folder, stop), name) as process:
            watcher = Watcher(Job(folder), process, PATIENCE_S + self.work.start_s)  # type: ignore[arg-type]
            watcher.step(WARM_UP)
            if self.every:
                watcher.wait("a checkpoint", lambda seen: any(e["event"] == "checkpoint_saved" for e in seen))
            command = [
                sys.executable,
                str(Path(__file__).with_name("warm_chaos.py")),
                "chaos",
                "--job",
                name,
                "--trace",
                str(trace),
            ]
            command += ["--compress", str(self.compress), "--limit", str(self.limit), "--out", str(folder / "chaos")]
            command += ["--spare-holders" if self.spare_holders else "--no-spare-holders"]
            with open(folder / "chaos.txt", "wb") as log:
                chaos = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
            try:
                last = self._attend(process, chaos, seconds, steps)
                stop.with_suffix(".new").write_text(str(last))
                stop.with_suffix(".new").rename(stop)
                chaos.wait(_END_S)
                code = process.wait(_END_S)
            except subprocess.TimeoutExpired as error:
                raise JobFailed(f"{folder}: the job did not end\n{Job(folder).log()[-3000:]}") from error
            finally:
                if chaos.poll() is None:
                    chaos.terminate()
                    chaos.wait(60)
        if code:
            raise JobFailed(f"{folder}: exit code {code}\n{Job(folder).log()[-3000:]}")
        begin = _begin(folder)
        if begin is None:
            raise JobFailed(f"{folder}: bamboo chaos has done nothing\n{(folder / 'chaos.txt').read_text()[-3000:]}")
        self._tell(outcome, begin, seconds, steps)
        return self._losses()

    def _arguments(self, folder: Path, stop: Path) -> list[str]:
        block: dict[str, Any] = {"topology": {"blocks": self.blocks if self.blocks == "auto" else int(self.blocks)}}
        block["checkpoint"] = {"keep": 2, "asynchronous": True}
        # The default waits for minutes that are compressed here, when a fatal loss is followed by silence.
        block["membership"] = {"fence_s": _FENCE_S}
        settings = {"train_micro_batch_size_per_gpu": self.work.size, **self.work.settings}
        config = write_config(folder, self.work.micro_batches, block, **settings)
        arguments = ["--elastic", "--deepspeed_config", str(config), "--out", str(folder), "--stop-file", str(stop)]
        arguments += ["--stages", str(self.work.shape.stages), *self.work.arguments]
        return [*arguments, "--steps", "100000", "--save-every", str(self.every)]

    def _attend(self, process: Process, chaos: subprocess.Popen[bytes], seconds: float | None,
                steps: int | None) -> int:  # fmt: skip
        """Wait for the end of the window; returns the step after which the job is to end."""
        job, journal, begun = Job(self.folder), self.folder / "chaos" / "faults.jsonl", time.monotonic()
        tail, newest, first = EventTail(self.folder / "events.jsonl"), 0, 0
        while process.poll() is None and chaos.poll() is None:
            time.sleep(_LOOK_S)
            begin = _begin(self.folder)
            if begin is None and journal.exists():
                begin = journal.stat().st_ctime
            if begin is None:
                if time.monotonic() - begun > PATIENCE_S:
                    break
                continue
            if seconds is not None and time.time() < begin + seconds:
                continue
            for event in (event for _, event in tail.read() if isinstance(event, ev.Step)):
                newest = max(newest, event.step)
                if event.time.timestamp() <= begin:
                    first = newest
            if steps is None or newest >= first + steps:
                return newest + _NOTICE_STEPS
        text = (self.folder / "chaos.txt").read_text()
        raise JobFailed(f"{self.folder}: the job or its chaos ended early\n{job.log()[-3000:]}\n{text[-3000:]}")

    # -- afterwards -----------------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome, begin: float, seconds: float | None, steps: int | None) -> None:
        """Everything that events and the journal of faults tell."""
        events = Job(self.folder).events()
        told = [e for e in events if e["event"] == "step"]
        first = max((e["step"] for e in told if wall(e) <= begin), default=0)
        if seconds is None:
            seconds = min(wall(e) for e in told if e["step"] >= first + (steps or 0)) - begin
        outcome.seconds = seconds
        restarts = [wall(e) for e in events if e["event"] == "restart"]
        outcome.restarts = sum(begin <= at <= begin + seconds for at in restarts)
        done = _steps(told, restarts, begin, self.work.samples)
        outcome.done = [d for d in done if d.number > first and d.end <= seconds]
        outcome.pauses = [p for p in _pauses(events, begin) if 0 <= p.at <= seconds]
        outcome.saved = [e["seconds"] for e in events if e["event"] == "checkpoint_saved"]
        self._tell_faults(outcome, begin)
        self._account(outcome, begin)
        told_by_chaos = self.folder / "chaos" / "report.json"
        if not told_by_chaos.exists():
            text = (self.folder / "chaos.txt").read_text()
            raise JobFailed(f"{self.folder}: bamboo chaos has ended without a report\n{text[-3000:]}")
        report = json.loads(told_by_chaos.read_text())
        outcome.notes += [f"bamboo chaos: {problem.splitlines()[0]}" for problem in report["problems"]]
        plans = [e for e in events if e["event"] == "plan"]
        outcome.more = {
            "save_every_steps": self.every,
            "plans": len(plans),
            "plans_with_divided_stages": sum(bool(plan["lent"]) for plan in plans),
            "effects": report["effects"],
        }

    def _tell_faults(self, outcome: Outcome, begin: float) -> None:
        points = [(0.0, self.work.shape.size)]
        for line in sorted(_records(self.folder), key=lambda line: line["begun_s"]):
            joins, happened = line["kind"] == "join", line["time"] is not None
            at = line["time"] - begin if happened else line["begun_s"]
            outcome.faults.append(
                {
                    "planned_s": line["planned_s"],
                    "done_s": at,
                    "kind": "join" if joins else "lose",
                    "node": line["target"].removeprefix("node:"),
                    "outcome": line["outcome"],
                }
            )
            if happened and 0 <= at <= outcome.seconds:
                points.append((at, points[-1][1] + (1 if joins else -1)))
                outcome.joins += joins
                outcome.losses += not joins
                if joins and line["confirmed"] and line["seconds"] is not None:
                    outcome.starts.append(line["seconds"])
        outcome.changes = points
        lost = [f for f in outcome.faults if f["kind"] == "lose" and f["planned_s"] <= outcome.seconds]
        done = [f for f in lost if f["outcome"] == "injected"]
        late = max((f["done_s"] - f["planned_s"] for f in done), default=0.0)
        outcome.notes.append(
            f"losses came up to {late:.1f} s late, where who was to die had not registered or had no worker, and "
            f"{len(lost) - len(done)} of {len(lost)} did not come at all"
        )

    def _account(self, outcome: Outcome, begin: float) -> None:
        """``bamboo goodput`` of the window. What a node does before it registers is its start."""
        events = list(read_events(str(self.folder / "events.jsonl")))
        origin, end = events[0].time.timestamp(), begin + outcome.seconds
        categories = dict.fromkeys(Category, 0.0)
        for intervals in account(events).intervals.values():
            for each in intervals:
                overlap = min(origin + each.end, end) - max(origin + each.begin, begin)
                categories[each.category] += max(0.0, overlap)
        categories[Category.INITIALIZATION] += max(0.0, outcome.node_seconds - sum(categories.values()))
        outcome.goodput = categories

    def _losses(self) -> dict[int, float]:
        """By step, of the workers that came to the end."""
        found: dict[int, float] = {}
        for file in self.folder.glob("result-*.json"):
            for step, loss in enumerate(json.loads(file.read_text())["losses"], 1):
                if found.setdefault(step, loss) != loss:
                    raise JobFailed(f"{file}: the loss of step {step} is not that of another worker")
        return found


@contextmanager
def _warm_job(folder: Path, slots: int, arguments: Sequence[str], name: str) -> Iterator[Process]:
    """``bamboo run`` whose agents and workers are forked from a process that has made their imports."""
    command = [sys.executable, "-m", "bamboo_ds.cli.main", "run", "-n", str(slots), "--job", name]
    command += ["--events", str(folder / "events.jsonl"), str(WORKERS / "spotted.py"), *arguments]
    env = {**environment(), "BAMBOO_LOGS": str(folder / "logs")}
    with open(folder / "log.txt", "wb") as log:
        process = start(command, env, log.fileno())
    with ending(process):
        yield process


def _records(folder: Path) -> list[dict[str, Any]]:
    """Complete lines of the journal of faults."""
    path = folder / "chaos" / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _begin(folder: Path) -> float | None:
    """When the schedule of faults began, in seconds since 1970, once one is told of."""
    return next((line["time"] - line["begun_s"] for line in _records(folder) if line["time"] is not None), None)


def _steps(told: Sequence[Mapping[str, Any]], restarts: Sequence[float], begin: float, samples: int) -> list[Done]:
    """All steps that were computed. Two members may tell of one, and nobody of one whose teller was lost just then."""
    found: list[Done] = []
    for event in told:
        end = wall(dict(event)) - begin
        before = found[-1] if found else None
        again = before is not None and any(before.end < at - begin <= end for at in restarts)
        if before is not None and not again:
            if event["step"] <= before.number:
                continue
            for number in range(before.number + 1, event["step"]):
                found.append(Done(number, before.end, end - event["seconds"], samples, None))
        found.append(Done(event["step"], end - event["seconds"], end, samples, event["loss"]))
    return found


def _pauses(events: Sequence[dict[str, Any]], begin: float) -> list[Pause]:
    """The longest of each change of plan, and from each fatal loss to the next step."""
    found: list[Pause] = []
    kinds: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
        ("recovered", "takeover", lambda e: e["pause_seconds"] + (e["detection_seconds"] or 0.0)),
        ("reconfigured", "reconfiguration", lambda e: e["pause_seconds"]),
    )
    for name, kind, length in kinds:
        epochs: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event["event"] == name:
                epochs[event["epoch"]].append(event)
        for each in epochs.values():
            longest = max(each, key=length)
            redone = max(e.get("redo_seconds", 0.0) for e in each)
            at = wall(longest) - longest.get("redo_seconds", 0.0) - length(longest) - begin
            found.append(Pause(at, length(longest), kind, redone))
    for number, fatal in enumerate(events):
        if fatal["event"] == "fatal":
            later = events[number:]
            restart = next((n for n, e in enumerate(later) if e["event"] == "restart"), len(later))
            step = next((e for e in later[restart:] if e["event"] == "step"), None)
            if step is not None:
                found.append(Pause(wall(fatal) - begin, wall(step) - step["seconds"] - wall(fatal), "restart"))
    return sorted(found, key=lambda pause: pause.at)
