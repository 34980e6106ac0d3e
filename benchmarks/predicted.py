"""Simulates again what ``spot.py`` has measured, and compares: samples within 5 %, pauses within 20 %.

What the simulation is told of bamboo: the nodes with the times at which they came and went, the shape, and means of the
run itself: a step of the full job and what it consists of (passes, end, the rest is messages), how much longer the
first steps of new owners take, how long a loss, a change of plan, a checkpoint, a start and a restart held the job, and
whether copies arrive where they are offered. What it predicts: which plans follow, how fast each of them is, in how
many steps they follow, what losses interrupt and what is redone, what is lost with restarts, and so the samples. The
recorded run is left in ``--out``. The machine must have no other work.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from common import Job, JobFailed, console, wall
from recorded import PHASES, PolicyResult, RecordedRun, compare, simulation

from bamboo_ds.chaos.schedule import initial_nodes, parse_trace
from bamboo_ds.config import BambooConfig
from bamboo_ds.observe.spans import PASSES, Kind, read_timelines
from bamboo_ds.simulate.bamboo import planned
from bamboo_ds.simulate.baselines import Stock
from bamboo_ds.simulate.market import Market
from bamboo_ds.simulate.pace import Stretch
from bamboo_ds.simulate.profile import Layer, Profile
from bamboo_ds.simulate.run import Simulation
from bamboo_ds.simulate.terms import Terms

#: Parameters of a layer, by which the time of a copy to host memory becomes a bandwidth.
_PARAMETERS = 1000
#: Steps under a plan that are not ordinary yet.
_FIRST = 2
#: Times no farther apart are those of one moment.
_SAME_S = 1e-3
#: So exactly is the time of a message found: a step by two to the power of so many.
_HALVINGS = 16
#: Bandwidth of network and storage: states are small, and pauses are measured as wholes.
_FAST_GB_S = 10.0


@dataclass
class Step:
    """A step of the job. Seconds are those since the begin of the window.

    Attributes:
        epoch: of the plan that it began with.
        begin, end: the first one is there, whether told of or not.
        gap: since the step before, if that is known.
        interrupted: by a loss.
    """

    number: int
    epoch: int
    begin: float
    end: float
    gap: float | None
    interrupted: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


class Recording:
    """What a run of bamboo has left, and means of it.

    Args:
        spot: content of the file of ``spot.py``.
        folder: of the job.
    """

    def __init__(self, spot: dict[str, Any], folder: Path) -> None:
        self.work, self.outcome, self.folder = spot["work"], spot["systems"]["bamboo"], folder
        self.pipelines, self.stages = self.work["shape"]["pipelines"], self.work["shape"]["stages"]
        lines = (folder / "chaos" / "faults.jsonl").read_text().splitlines()
        self.faults = [fault for fault in map(json.loads, lines) if fault["time"] is not None]
        self.faults.sort(key=lambda fault: float(fault["time"]))
        origin = self.faults[0]["time"] - self.faults[0]["begun_s"]
        self.events = [{**event, "at": wall(event) - origin} for event in Job(folder).events()]
        self.losses = [fault["time"] - origin for fault in self.faults if fault["kind"] != "join"]
        self.origin = origin
        self.plans = {e["epoch"]: e for e in self._told("plan") if e["shadows"]}
        self.steps = list(self._read_steps())
        self.epochs: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            self.epochs[step.epoch].append(step)

    def _told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def _read_steps(self) -> Iterable[Step]:
        restarts = [event["at"] for event in self._told("restart")]
        recovered = {event["epoch"] for event in self._told("recovered")}
        last, epoch = None, 0
        for event in self._told("step"):
            begin, end = event["at"] - event["seconds"], event["at"]
            again = last is not None and any(last.end < at <= end for at in restarts)
            if last is not None and event["step"] <= last.number and not again:
                continue  # two members have told of it
            follows = last is not None and event["step"] == last.number + 1 and not again
            interrupted = event["epoch"] in recovered and event["epoch"] != epoch
            yield (
                last := Step(
                    event["step"],
                    self._epoch_before(begin, event["epoch"]) if interrupted else event["epoch"],
                    begin,
                    end,
                    begin - last.end if last is not None and follows else None,
                    interrupted,
                )
            )
            epoch = event["epoch"]

    def _epoch_before(self, begin: float, epoch: int) -> int:
        """The plan with which a step began that ended with ``epoch``, after losses."""
        lost = [e["epoch"] for e in self.plans.values() if e["lost"] and e["at"] >= begin and e["epoch"] <= epoch]
        first = min(lost, default=epoch)
        told = [*self._told("reconfigured"), *self._told("recovered"), *self._told("step")]
        return max((e["epoch"] for e in told if e["epoch"] < first), default=first - 1)

    # -- means ----------------------------------------------------------------------------------------------

    def _ordinary(self, epoch: int) -> list[Step]:
        """Steps of a plan that are neither its first ones nor interrupted."""
        return [step for step in self.epochs[epoch][_FIRST:] if not step.interrupted]

    @cached_property
    def _full(self) -> list[Step]:
        """Ordinary steps of the full job, with all replicas."""
        size = self.pipelines * self.stages
        full = [
            step
            for epoch, plan in self.plans.items()
            if len(set(plan["owners"])) == len(plan["members"]) == size and not plan["lent"] and all(plan["shadows"])
            for step in self._ordinary(epoch)
        ]
        if not full:
            raise JobFailed(f"{self.folder}: there is no undisturbed step of all {size} members")
        return full

    @property
    def step_s(self) -> float:
        """Seconds of an ordinary step of the full job, from the end of the one before."""
        return fmean(step.seconds for step in self._full) + self.gap_s

    @cached_property
    def parts_s(self) -> tuple[float, float, float]:
        """Of such steps, seconds of a forward pass, of a backward pass, and from the last pass to the end."""
        numbers = {step.number for step in self._full}
        spans = [s for each in read_timelines(self.folder / "events.jsonl") for s in each.spans if s.step in numbers]
        passed: dict[int, float] = defaultdict(float)
        ended: dict[int, float] = defaultdict(float)
        for span in spans:
            last = passed if span.kind in PASSES else ended
            last[span.step] = max(last[span.step], span.end)
        if not passed:
            raise JobFailed(f"{self.folder}: no member has recorded the timeline of an undisturbed step")
        forward, backward = (
            fmean(span.end - span.begin for span in spans if span.kind is kind)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        return forward, backward, fmean(ended[number] - at for number, at in passed.items())

    @cached_property
    def gap_s(self) -> float:
        """Seconds between two steps between which nothing happens."""
        return median(step.gap for step in self.steps if step.gap is not None)

    @property
    def first_s(self) -> float:
        """By how much the first steps after owners have changed at a boundary take longer, in all."""
        found, switched = [], {event["epoch"]: event["previous"] for event in self._told("reconfigured")}
        for epoch, steps in self.epochs.items():
            before = self.plans.get(switched.get(epoch, 0))
            if before is None or before["owners"] == self.plans[epoch]["owners"]:
                continue
            if (ordinary := self._ordinary(epoch)) and not any(step.interrupted for step in steps[:_FIRST]):
                usual_s = median(step.seconds for step in ordinary)
                found.append(sum(step.seconds - usual_s for step in steps[:_FIRST]))
        return max(0.0, _mean(found))

    @property
    def switch_s(self) -> float:
        """Seconds between two steps between which the plan changes."""
        switched = {event["epoch"] for event in self._told("reconfigured")}
        first = [steps[0] for epoch, steps in self.epochs.items() if epoch in switched]
        return max(0.0, _mean(step.gap - self.gap_s for step in first if step.gap is not None))

    @property
    def boundary_s(self) -> float:
        """For how long copies are waited for where they are offered, at the end of the first step under a plan.

        They are so small that they arrive meanwhile, or one step later since members look before.
        """
        found: list[float] = []
        for epoch, steps in self.epochs.items():
            built = [event["at"] for event in self._told("replica_built") if event["epoch"] == epoch]
            if built and not steps[0].interrupted:
                found.append(max(built) - steps[0].end)
        return max(0.0, median(found)) if found and median(found) < self.step_s / 2 else 0.0

    @property
    def save_s(self) -> float:
        """Seconds for which a checkpoint holds training."""
        every = self.outcome["more"]["save_every_steps"]
        after = [s for s in self.steps if every and (s.number - 1) % every == 0 and s is not self.epochs[s.epoch][0]]
        return max(0.001, _mean(step.gap - self.gap_s for step in after if step.gap is not None))

    @property
    def loss_s(self) -> tuple[float, float]:
        """Seconds from a loss to the plan without it, and from there to the agreement on how to go on."""
        agreed: dict[int, float] = {}
        for event in self._told("recovered"):
            at = event["at"] - event["redo_seconds"]
            agreed[event["epoch"]] = max(at, agreed.get(event["epoch"], at))
        plans = [plan for plan in self.plans.values() if plan["lost"] and plan["epoch"] in agreed]
        lost = [max((at for at in self.losses if at < plan["at"]), default=plan["at"]) for plan in plans]
        noticed = [plan["at"] - at for plan, at in zip(plans, lost, strict=True)]
        return _mean(noticed), _mean(agreed[plan["epoch"]] - plan["at"] for plan in plans)

    @property
    def restart_s(self) -> float | None:
        """Seconds from a fatal loss to the next step."""
        found = [pause["seconds"] for pause in self.outcome["pauses"] if pause["kind"] == "restart"]
        return _mean(found) if found else None

    @property
    def pause_s(self) -> float | None:
        """By how much interrupted steps took longer than ordinary ones under the plan that they began with."""
        seconds = self.outcome["seconds"]
        hit = [s for s in self.steps if s.interrupted and 0 < s.end <= seconds]
        found = [step.seconds - known for step in hit if (known := self._level(step.epoch)) is not None]
        return _mean(found) if found else None

    def _level(self, epoch: int) -> float | None:
        """Seconds of an ordinary step under a plan, or else under others that divide the work among as many."""

        def known(epoch: int) -> list[float]:
            steps = [step.seconds for step in self._ordinary(epoch)]
            return steps or [step.seconds for step in self.epochs[epoch][-1:] if not step.interrupted]

        def kind(epoch: int) -> tuple[int, int]:
            return len(set(self.plans[epoch]["owners"])), len(self.plans[epoch]["lent"])

        if epoch not in self.plans:
            return None
        own = known(epoch)
        alike = [fmean(found) for other in self.plans if kind(other) == kind(epoch) and (found := known(other))]
        return median(own) if own else fmean(alike) if alike else None

    # -- the recorded run -----------------------------------------------------------------------------------

    def measured(self, spot: dict[str, Any], source: str) -> RecordedRun:
        """All of it. It begins with the first step that counts."""
        seconds, options = self.outcome["seconds"], spot["options"]
        before_s = -min(step["begin"] for step in self.outcome["done"])
        profile = self._profile()
        terms = {
            "network_gb_s": _FAST_GB_S,
            "storage_gb_s": _FAST_GB_S,
            "host_gb_s": _host_gb_s(profile, self.pipelines, self.save_s),
            "checkpoint_s": max(1, self.outcome["more"]["save_every_steps"]) * self.step_s,
            "detection_s": self.loss_s[0],
            "rebuild_s": self.loss_s[1],
            "switch_s": self.switch_s,
            "first_s": self.first_s,
            "boundary_s": self.boundary_s,
            # All others waited for a step's end or for a change of plan besides.
            "start_s": min(self.outcome["starts"], default=0.0),
            "on_demand_price": options["on_demand_price"],
            "spot_price": options["spot_price"],
        }
        terms |= {"restart_s": self.restart_s} if self.restart_s is not None else {}
        blocks = options["blocks"]
        block = {
            "topology": {"blocks": blocks if blocks == "auto" else int(blocks)},
            "membership": {"settle_ms": 0},  # a part of what a loss takes
        }
        terms["message_ms"] = self._message_ms(profile, terms, block)
        return RecordedRun(
            source=source,
            profile=profile,
            pipelines=self.pipelines,
            stages=self.stages,
            seconds=seconds + before_s,
            changes=[*((0.0, "add", node) for node in self._founders()), *self._changes(before_s)],
            terms=Terms(**terms),
            bamboo=block,
            policies={"bamboo": PolicyResult(samples=self.outcome["samples"], pause_s=self.pause_s)},
        )

    def _founders(self) -> list[str]:
        trace = self.folder / "trace.csv"
        return initial_nodes(parse_trace(trace.read_text(), str(trace)), self.pipelines * self.stages)

    def _changes(self, before_s: float) -> Iterable[tuple[float, str, str]]:
        """What really happened, when it did."""
        for fault in self.faults:
            at_s = fault["time"] - self.origin
            if at_s < self.outcome["seconds"]:
                what = "add" if fault["kind"] == "join" else "remove"
                yield at_s + before_s, what, fault["target"].removeprefix("node:")

    def _profile(self) -> Profile:
        """Layers by the passes that were recorded; a step ends with updates, with ZeRO those of replicas, too."""
        work, layers = self.work, self.work["layers"] // self.stages
        zero = "zero_optimization" in work["settings"]
        forward_s, backward_s, end_s = self.parts_s
        return Profile(
            name="emulated",
            source="EMULATED devices, spot.py",
            layers=(
                Layer(
                    count=work["layers"],
                    forward_s=forward_s / layers,
                    backward_s=backward_s / layers,
                    update_s=end_s / layers / (2 if zero else 1),  # replicas take theirs later, but with ZeRO
                    parameters=_PARAMETERS,
                ),
            ),
            micro_batch=work["size"],
            global_batch=work["micro_batches"] * work["size"] * self.pipelines,
            stages=self.stages,
            precision="bf16" if work["settings"].get("bf16") else "fp32",
            zero=zero,
        )

    def _message_ms(self, profile: Profile, terms: dict[str, float], block: dict[str, Any]) -> float:
        """Milliseconds of a message with which a step of the full job takes as long as it did; 0 if it is shorter."""
        config, market = BambooConfig.model_validate(block), Market((), 1.0)
        low, high = 0.0, 1000 * self.step_s
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            now = Terms(**terms, message_ms=middle)
            one = Simulation(lambda _: market, profile, now, config, self.pipelines, self.stages)
            pace = one.pace(config.redundancy.mode)
            longer = Stretch(pace, planned(pace, pace.layout.size, config)).seconds > self.step_s
            low, high = (low, middle) if longer else (middle, high)
        return low


def _host_gb_s(profile: Profile, pipelines: int, saved_s: float) -> float:
    """The bandwidth by which a member's state is copied to host memory in so many seconds."""
    return Stock(profile, Terms()).share(pipelines, profile.stages) / saved_s / 1e9


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _whole_starts(pauses: list[dict[str, Any]]) -> list[float]:
    """Seconds of the restarts that came to train: others end where the next one begins."""
    nexts = [each["at"] for each in pauses[1:]] + [float("inf")]
    pairs = zip(pauses, nexts, strict=True)
    return [each["seconds"] for each, begin in pairs if begin - each["at"] - each["seconds"] > _SAME_S]


def restarted(spot: dict[str, Any], folder: Path, source: str) -> RecordedRun:
    """The recorded run of checkpoint-restart.

    Its restarts and checkpoints take what they took on average, those aside that a further loss began anew; what is
    predicted is how many checkpoints there are, and what is lost since the last one.

    Args:
        spot: content of the file of ``spot.py``.
        folder: of the job of bamboo, which has the trace.
        source: where it comes from.
    """
    work, outcome = spot["work"], spot["systems"]["checkpoint-restart"]
    pipelines, stages = work["shape"]["pipelines"], work["shape"]["stages"]
    step_s = fmean(step["end"] - step["begin"] for step in outcome["done"])
    before_s = -min(step["begin"] for step in outcome["done"])

    def made(times: float) -> Profile:
        forward_s = work["layer_s"] * times
        layer = Layer(count=work["layers"], forward_s=forward_s, backward_s=2 * forward_s, parameters=_PARAMETERS)
        batch = work["micro_batches"] * work["size"] * pipelines
        return Profile(
            name="emulated", source="EMULATED devices, spot.py", layers=(layer,), micro_batch=work["size"],
            global_batch=batch, stages=stages, precision="fp32",
        )  # fmt: skip

    terms = Terms(
        network_gb_s=_FAST_GB_S,
        storage_gb_s=_FAST_GB_S,
        host_gb_s=_host_gb_s(made(1.0), pipelines, fmean(outcome["saves"])),
        detection_s=0.0,
        restart_s=fmean(_whole_starts(outcome["pauses"])),
        start_s=0.0,  # a node's process is forked with the others
    )
    now = [Stock(made(times), terms).arrangement(pipelines, stages) for times in (1.0, 2.0)]
    one, two = (each.seconds for each in now if each is not None)
    trace = folder / "trace.csv"
    founders = initial_nodes(parse_trace(trace.read_text(), str(trace)), pipelines * stages)
    changes = [
        (fault["done_s"] + before_s, "add" if fault["kind"] == "join" else "remove", fault["node"])
        for fault in outcome["faults"]
        if fault["done_s"] < outcome["seconds"]
    ]
    return RecordedRun(
        source=source,
        profile=made(1 + (step_s - one) / (two - one)),
        pipelines=pipelines,
        stages=stages,
        seconds=outcome["seconds"] + before_s,
        changes=[*((0.0, "add", node) for node in founders), *changes],
        terms=terms,
        reshapes=work["reshapes"],
        policies={"checkpoint-restart": PolicyResult(samples=outcome["samples"])},
    )


def folder_of(spot: Path) -> Path:
    """Of the job of bamboo, beside the file of ``spot.py``."""
    return spot.parent / "jobs" / "spot" / "bamboo"


@click.command()
@click.argument("spot", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="For the recorded run.  [default: beside it]"
)
@click.option("--system", type=click.Choice(["bamboo", "checkpoint-restart"]), default="bamboo", show_default=True)
def main(spot: Path, out: Path | None, system: str) -> None:
    """Compare the run of SPOT, a JSON file of spot.py that has its jobs beside it, with a simulation of it."""
    content = json.loads(spot.read_text())
    source = f"benchmarks/spot.py: {content['what'][0]}; {content['machine']['time']}"
    if system == "bamboo":
        run = Recording(content, folder_of(spot)).measured(content, source)
    else:
        run = restarted(content, folder_of(spot), source)
    path = out or spot.with_name(f"{spot.stem}-recorded.json")
    path.write_text(run.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    console.print(f"[dim]{path}[/dim]")
    rows = compare(run, simulation(run).run([system], PHASES)[0])
    for row in rows:
        console.print(str(row), highlight=False)
    if not all(row.holds for row in rows):
        raise JobFailed("a prediction is too far from what was measured")


if __name__ == "__main__":
    main()
