"""Speed of a job that has lost members, or gained some, on emulated devices: are the rest as fast as they can be?

One job per row of members: it trains, loses members one after the other (SIGKILL), and is measured whenever all
redundancy is restored and the work divided anew. Its losses must be those of an undisturbed job, to the last bit. See
``--help``.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from common import (
    WORKERS,
    Job,
    JobFailed,
    Watcher,
    bamboo_job,
    console,
    fresh,
    join,
    new_figure,
    run_bamboo,
    save_figure,
    save_json,
    write_config,
)
from recovery import members as workers_of
from rich.table import Table

from bamboo_ds.schedule import Hosts, timeline
from bamboo_ds.topology import Layout, Role

TITLE = "Members lost and gained (EMULATED devices)"
CAPTION = (
    "emulated: layers hold their device without using the CPU; efficiency: time of the full job x its members / (time x"
    " members); best: the same by list scheduling for the most even division of all layers; share: of that"
)


@dataclass
class Figures:
    """A job with so many members; ``best`` is the efficiency that list scheduling gives for the most even division.

    One of them takes ``straggler`` times as long as the others, the first and the last layer ``ends`` times as long.
    """

    pipelines: int
    stages: int
    layers: int
    micro_batches: int
    blocks: str
    members: int
    seconds: float
    efficiency: float
    best: float
    speed: float
    straggler: float = 1.0
    ends: float = 1.0
    settling_iterations: int | None = None

    @property
    def share(self) -> float:
        """What of the best is reached."""
        return self.efficiency / self.best


@dataclass(frozen=True)
class Shape:
    """What is trained; times are those of a layer, in seconds."""

    pipelines: int
    stages: int
    layers: int
    micro_batches: int
    forward_s: float
    backward_s: float
    ends: float = 1.0

    @property
    def costs(self) -> list[float]:
        """How many times as long as most every layer of a pipeline takes."""
        count = self.stages * self.layers
        return [self.ends if layer in (0, count - 1) else 1.0 for layer in range(count)]

    @property
    def even(self) -> Shape:
        """The same work in layers that take equally long."""
        mean = sum(self.costs) / len(self.costs)
        return replace(self, forward_s=self.forward_s * mean, backward_s=self.backward_s * mean, ends=1.0)

    @property
    def size(self) -> int:
        """Members at the start."""
        return self.pipelines * self.stages

    def best_s(self, members: int, slow: dict[int, float] | None = None) -> float:
        """Time of an iteration with the layers of all pipelines dealt evenly to ``members``, neighbours together.

        From the first layer to the last one of a pipeline, and through the next one from its first layer on or from its
        last one, whichever is faster; members that have more come first or last.

        Args:
            members: number of members.
            slow: how many times as long some of them take.
        """
        costs, slow = self.costs, slow or {}
        count = len(costs)
        layout, speeds = Layout(self.pipelines, count), [slow.get(member, 1.0) for member in range(members)]
        found = []
        for turns, late in itertools.product((False, True), repeat=2):
            line = [
                Role(d, count - 1 - layer if turns and d % 2 else layer)
                for d in range(self.pipelines)
                for layer in range(count)
            ]
            owner = _dealt(line[::-1] if late else line, costs, speeds[::-1] if late else speeds)
            numbers = {role: members - 1 - member if late else member for role, member in owner.items()}
            found.append(self._makespan(layout, [numbers[role] for role in layout.roles], speeds))
        return min(found)

    def _makespan(self, layout: Layout, owners: list[int], speeds: list[float]) -> float:
        hosts: Hosts = tuple((f"m{member}",) for member in owners)
        times = {role: self.costs[role.stage] * speeds[owners[layout.rank(role)]] for role in layout.roles}
        lasting = {"F": self.forward_s, "B": self.backward_s}
        played = timeline(
            layout,
            hosts,
            self.micro_batches,
            lambda role, kind, begin, end, member: times[role] * lasting[kind],
            ratio=(self.forward_s, self.backward_s),
        )
        return played.seconds


def _dealt(line: list[Role], costs: list[float], speeds: list[float]) -> dict[Role, int]:
    """The layers in ``line`` dealt to members in their order, so that the slowest one has as little as possible.

    Of several such divisions the one whose members have most alike, by the sum of squares.
    """
    sums = [0.0, *itertools.accumulate(costs[role.stage] for role in line)]
    # For the members so far, by how many layers they have: the slowest one, the sum of squares, and where each begins.
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())] + [(math.inf, 0.0, ())] * len(line)
    for speed in speeds:
        best = [
            min(
                (max(slowest, load), squares + load**2, (*begins, begin))
                for begin, (slowest, squares, begins) in enumerate(best[: end + 1])
                for load in [(sums[end] - sums[begin]) * speed]
            )
            for end in range(len(line) + 1)
        ]
    bounds = [*best[-1][2], len(line)]
    return {role: m for m, (begin, end) in enumerate(itertools.pairwise(bounds)) for role in line[begin:end]}


class Run:
    """One job, whose members come and go.

    Args:
        shape: what is trained.
        blocks: the setting ``topology.blocks``.
        folder: for its files.
        iterations: that are measured each time.
    """

    def __init__(self, shape: Shape, blocks: str, folder: Path, iterations: int) -> None:
        self.shape, self._blocks, self._iterations = shape, blocks, iterations
        self._folder = fresh(folder)
        self._joiners: list[subprocess.Popen[bytes]] = []
        self.rows: list[Figures] = []

    def measure(self, members: list[int], straggler: float, seed: int, even_s: float | None = None) -> float:
        """Bring the job to each number of ``members`` in turn, and measure it there.

        Before that, if ``straggler`` is not 1, measure it with one member that takes so many times as long, and once
        more without.

        Args:
            members: numbers of members.
            straggler: how many times as long one takes for a while.
            seed: of who is lost.
            even_s: time of the full job if its layers were equal; ``None``: they are.

        Returns:
            Seconds of an iteration of the full job.
        """
        shape, folder = self.shape, self._folder
        stop = folder / "stop"
        arguments = self._arguments(folder, 100000, shape.forward_s, shape.backward_s)
        arguments += ["--stop-file", str(stop), "--ends", str(shape.ends), "--slow-file", str(folder / "slow")]
        name, script, chosen = f"degraded-{os.getpid()}", WORKERS / "emulated.py", random.Random(seed)
        with bamboo_job(folder, shape.size, script, arguments, job=name) as process:
            watcher = Watcher(Job(folder), process)
            try:
                watcher.step(6 if shape.ends == 1 else 12)
                full = measured = self._seconds(watcher, shape.size)
                if even_s is not None:
                    full = even_s
                    self._add(full, shape.size, measured, _settled(watcher))
                if straggler != 1:
                    self._measure_straggler(watcher, full, straggler, chosen)
                for count in members:
                    before = watcher.step(0)
                    while len(alive := self._alive(watcher)) > count:
                        self._kill(watcher, chosen.choice(alive))
                        self._settle(watcher, len(alive) - 1)
                    while len(self._alive(watcher)) < count:
                        self._join(name, script, arguments, watcher)
                    settled = self._settle(watcher, count)
                    # Costs are known a few iterations later.
                    watcher.step(settled + 6)
                    settled = self._settle(watcher, count)
                    self._add(full, count, self._seconds(watcher, count), settled - before)
                last = watcher.step(0) + 3
                stop.with_suffix(".new").write_text(str(last))
                stop.with_suffix(".new").rename(stop)
                code = process.wait(120)
            finally:
                for joiner in self._joiners:
                    if joiner.poll() is None:
                        joiner.terminate()
                        joiner.wait(30)
        if code:
            raise JobFailed(f"{folder}: exit code {code}\n{Job(folder).log()[-3000:]}")
        self._compare(last)
        return measured

    def _arguments(self, folder: Path, steps: int, forward_s: float, backward_s: float) -> list[str]:
        shape, topology = self.shape, {"blocks": self._blocks if self._blocks == "auto" else int(self._blocks)}
        config = write_config(folder, shape.micro_batches, {"topology": topology})
        arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(shape.stages)]
        arguments += ["--layers", str(shape.layers), "--steps", str(steps)]
        return [*arguments, "--forward-s", str(forward_s), "--backward-s", str(backward_s)]

    def _compare(self, steps: int) -> None:
        """Losses of every worker at the end, those of joiners included, with the undisturbed job's."""
        calm = fresh(self._folder.with_name(f"{self._folder.name}-undisturbed"))
        arguments = self._arguments(calm, steps, 0.0, 0.0)
        undisturbed = run_bamboo(calm, self.shape.size, WORKERS / "emulated.py", arguments, 120 + steps).results()
        expected, found = undisturbed[0]["losses"], Job(self._folder).results()
        if len(expected) != steps or not found or any(each["losses"] != expected for each in found.values()):
            raise JobFailed(f"{self._folder}: losses differ from those in {calm}")
        console.print(f"  {steps} losses of {len(found)} workers are bit-equal to the undisturbed job's")

    def _measure_straggler(self, watcher: Watcher, full: float, times: float, chosen: random.Random) -> None:
        """One member takes so many times as long for a while."""
        workers = workers_of(watcher.process)
        victim = workers[chosen.choice(sorted(workers))]
        for factor in (times, 1.0):
            (self._folder / "slow").write_text(f"{victim.pid} {factor}")
            before = watcher.step(0)
            watcher.step(before + 12)
            stage, pipeline = divmod(_newest(watcher.seen)["owners"].index(victim.id), self.shape.pipelines)
            slow = {pipeline * self.shape.stages + stage: factor}
            settled = _settled(watcher) - before
            self._add(full, self.shape.size, self._seconds(watcher, self.shape.size), settled, slow)

    def _alive(self, watcher: Watcher) -> list[str]:
        return _computing(_newest(watcher.job.events()))

    def _kill(self, watcher: Watcher, member: str) -> None:
        processes = [watcher.process, *self._joiners]
        workers = [worker for process in processes for worker in workers_of(process).values()]
        victim = next(worker for worker in workers if worker.id == member)
        os.kill(victim.pid, signal.SIGKILL)

        def lost(seen: list[dict[str, Any]]) -> bool:
            return any(e["event"] == "member_lost" and e["member_id"] == member for e in seen)

        watcher.wait(f"the loss of {member}", lost)

    def _join(self, name: str, script: Path, arguments: list[str], watcher: Watcher) -> None:
        before = len(self._alive(watcher))
        self._joiners.append(join(self._folder, len(self._joiners), name, script, arguments))
        watcher.wait("the joiner", lambda seen: len(_computing(_newest(seen))) > before)

    def _settle(self, watcher: Watcher, count: int) -> int:
        """Wait until the newest plan is the last one for a while; returns the step in which it has begun."""
        epoch = 0

        def quiet(seen: list[dict[str, Any]]) -> bool:
            plan = _newest(seen)
            steps = [e for e in seen if e["event"] == "step" and e["epoch"] == plan["epoch"]]
            nonlocal epoch
            epoch = plan["epoch"]
            shadowed = all(plan["shadows"]) or count == 1
            return len(_computing(plan)) == count and shadowed and len(steps) >= 3

        seen = watcher.wait(f"{count} members with replicas of all stages", quiet)
        return min(e["step"] for e in seen if e["event"] == "step" and e["epoch"] == epoch)

    def _seconds(self, watcher: Watcher, count: int) -> float:
        first = watcher.step(0) + 1
        watcher.step(first + self._iterations)
        steps = [e for e in watcher.job.events("step") if first <= e["step"] < first + self._iterations]
        if len(_computing(_newest(watcher.seen))) != count:
            raise JobFailed(f"{self._folder}: members have changed while {count} were measured")
        return median(e["seconds"] for e in steps)

    def _add(
        self, full: float, count: int, seconds: float, settling: int, slow: dict[int, float] | None = None
    ) -> None:
        """``full`` is the time of the full job, or of one whose layers are equal; ``slow`` as in ``Shape.best_s``."""
        shape, factor = self.shape, max((slow or {}).values(), default=1.0)
        speeds = count - 1 + 1 / factor
        efficiency = full * shape.size / (speeds * seconds)
        best = shape.even.best_s(shape.size) * shape.size / (speeds * shape.best_s(count, slow))
        row = Figures(
            *(shape.pipelines, shape.stages, shape.layers, shape.micro_batches, self._blocks, count, seconds),
            *(efficiency, best, full / seconds, factor, shape.ends, settling),
        )
        self.rows.append(row)
        console.print(
            f"  D={row.pipelines} P={row.stages} M={row.micro_batches} blocks={row.blocks} ends={row.ends:g}: "
            f"{count} members{f', one takes {factor:g} times as long' if factor != 1 else ''}: "
            f"{seconds:.3f} s, efficiency {efficiency:.3f} (best {best:.3f}), speed {row.speed:.3f}"
        )


def _newest(seen: list[dict[str, Any]]) -> dict[str, Any]:
    return [event for event in seen if event["event"] == "plan"][-1]


def _computing(plan: dict[str, Any]) -> list[str]:
    """The members that own or shadow stages; others only draw batches."""
    return sorted({*plan["owners"], *filter(None, plan["shadows"])}.intersection(plan["members"]))


def _settled(watcher: Watcher) -> int:
    """The first step of the newest plan."""
    epoch = _newest(watcher.seen)["epoch"]
    return min(e["step"] for e in watcher.seen if e["event"] == "step" and e["epoch"] == epoch)


def table(rows: list[Figures]) -> Table:
    """The figures for people."""
    result = Table(title=TITLE, caption=CAPTION)
    for column in (
        "D",
        "P",
        "layers",
        "M",
        "blocks",
        "members",
        "straggler",
        "ends",
        "seconds",
        "speed",
        "efficiency",
        "best",
        "share",
        "settled",
    ):
        result.add_column(column, justify="right")
    for row in rows:
        numbers = (row.pipelines, row.stages, row.layers, row.micro_batches, row.blocks, row.members)
        numbers += (f"{row.straggler:g}", f"{row.ends:g}")
        shown = (
            f"{row.seconds:.3f}",
            f"{row.speed:.2f}",
            f"{row.efficiency:.3f}",
            f"{row.best:.3f}",
            f"{row.share:.2f}",
        )
        result.add_row(*map(str, numbers), *shown, f"{row.settling_iterations}")
    return result


def plot(rows: list[Figures], path: Path) -> None:
    """Efficiency over members."""
    figure, axis = new_figure(figsize=(7, 4.5))
    for key in dict.fromkeys((row.pipelines, row.stages, row.micro_batches, row.blocks) for row in rows):
        mine = [row for row in rows if (row.pipelines, row.stages, row.micro_batches, row.blocks) == key]
        label = f"D={key[0]} P={key[1]} M={key[2]} blocks={key[3]}"
        (line,) = axis.plot([row.members for row in mine], [row.efficiency for row in mine], "o-", label=label)
        axis.plot([row.members for row in mine], [row.best for row in mine], ":", color=line.get_color(), linewidth=0.8)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlabel("members")
    axis.set_ylabel("efficiency (dotted: best division)")
    axis.set_title(TITLE, fontsize=9)
    axis.legend(fontsize=7)
    save_figure(figure, path)


@click.command()
@click.option("--pipelines", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--stages", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=3, show_default=True, help="Of each stage.")
@click.option("--micro-batches", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--members", type=int, multiple=True, default=(7, 6, 5, 4), show_default=True, help="To be measured.")
@click.option("--blocks", multiple=True, default=("auto",), show_default=True, help="topology.blocks; 1: whole stages.")
@click.option("--straggler", type=float, default=1.0, help="One member takes so many times as long for a while.")
@click.option("--ends", type=float, default=1.0, help="The first and last layer take so many times as long as others.")
@click.option("--iterations", type=click.IntRange(min=1), default=5, show_default=True, help="Counted ones.")
@click.option("--forward-ms", type=float, default=10.0, show_default=True, help="Of a layer.")
@click.option("--backward-ms", type=float, default=20.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Of who is lost.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(
    pipelines: int,
    stages: int,
    layers: int,
    micro_batches: int,
    members: tuple[int, ...],
    blocks: tuple[str, ...],
    straggler: float,
    ends: float,
    iterations: int,
    forward_ms: float,
    backward_ms: float,
    seed: int,
    out: Path,
) -> None:
    """Measure how fast jobs are that have lost or gained members, on EMULATED devices."""
    shape = Shape(pipelines, stages, layers, micro_batches, forward_ms / 1000, backward_ms / 1000, ends)
    out = out.resolve()
    rows: list[Figures] = []
    for each in blocks:
        folder, even_s = out / "jobs" / f"degraded-{pipelines}-{stages}-{micro_batches}-{each}", None
        if ends != 1:
            even_s = Run(shape.even, each, folder.with_name(f"{folder.name}-even"), iterations).measure([], 1.0, seed)
        run = Run(shape, each, folder, iterations)
        run.measure(list(members), straggler, seed, even_s)
        rows += run.rows
    console.print(table(rows))
    content = {"title": TITLE, "emulated": True, "seed": seed, "forward_ms": forward_ms, "backward_ms": backward_ms}
    name = f"degraded-{pipelines}x{stages}-{micro_batches}"
    save_json(out / f"{name}.json", {**content, "rows": [{**asdict(row), "share": row.share} for row in rows]})
    plot(rows, out / f"{name}.png")


if __name__ == "__main__":
    main()
