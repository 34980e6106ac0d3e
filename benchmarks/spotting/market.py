"""What happens on the market, and what follows from it by arithmetic alone. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import click

from bamboo_ds.chaos.faults import Fault, FaultKind
from bamboo_ds.chaos.schedule import Change, by_trace

#: How nodes of a trace become members of a job that has fewer.
Choice = Literal["replace", "scale"]


@dataclass(frozen=True)
class Shape:
    """Pipelines and stages of a job."""

    pipelines: int
    stages: int

    @property
    def size(self) -> int:
        """Members that compute."""
        return self.pipelines * self.stages

    def __str__(self) -> str:
        return f"{self.pipelines}x{self.stages}"


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        shape: of the full job.
        layers: of a pipeline.
        micro_batches: of a pipeline of the full job, per step.
        size: samples of a micro-batch.
        layer_s: seconds of a layer's forward pass; the backward pass takes twice as long.
        start_s: emulated seconds of a process's start, besides what it takes here.
        settings: of DeepSpeed.
        reshapes: whether checkpoints of one number of stages can be made such of another.
    """

    shape: Shape
    layers: int
    micro_batches: int
    size: int
    layer_s: float
    start_s: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    reshapes: bool = True

    @property
    def global_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.shape.pipelines * self.micro_batches

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.global_micro_batches * self.size

    @property
    def arguments(self) -> list[str]:
        """Those of every worker."""
        words = {
            "layers": self.layers,
            "layer-s": self.layer_s,
            "shares": self.shape.pipelines,
            "start-s": self.start_s,
        }
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]

    def step_s(self, shape: Shape) -> float:
        """Seconds of a step of the same samples with ``shape``, by 1F1B without messages; infinite if impossible."""
        if self.global_micro_batches % shape.pipelines or shape.stages > self.layers:
            return math.inf
        longest = math.ceil(self.layers / shape.stages) * 3 * self.layer_s
        return (self.global_micro_batches // shape.pipelines + shape.stages - 1) * longest


def best_shape(work: Work, members: int) -> Shape | None:
    """The fastest whole pipelines of ``members`` members at most; ``None`` if there are none.

    Of equally fast ones that with as many pipelines as the full job, then that of fewest members.
    """
    shapes = [
        Shape(pipelines, stages)
        for pipelines in range(1, min(members, work.shape.pipelines) + 1)
        for stages in range(1, members // pipelines + 1)
        if (work.reshapes or stages == work.shape.stages) and work.step_s(Shape(pipelines, stages)) < math.inf
    ]
    return min(shapes, key=lambda s: (work.step_s(s), s.pipelines != work.shape.pipelines, s.size), default=None)


def young_daly_s(save_s: float, between_losses_s: float) -> float:
    """Seconds of work between two checkpoints that lose least (Young 1974, Daly 2006): first order, sqrt(2 C M).

    Args:
        save_s: C, for which a checkpoint holds training.
        between_losses_s: M, mean time between two losses.
    """
    if math.isinf(between_losses_s):
        return math.inf
    return math.sqrt(2 * save_s * between_losses_s)


def save_every(save_s: float, between_losses_s: float, step_s: float) -> int:
    """Steps between two checkpoints, by :func:`young_daly_s`; 0: never."""
    interval = young_daly_s(save_s, between_losses_s)
    return 0 if math.isinf(interval) else max(1, round(interval / step_s))


def larger_pays(now_s: float, then_s: float, restart_s: float, until_loss_s: float) -> bool:
    """Whether a restart for more members is regained before the next loss is due.

    Args:
        now_s: seconds of a step as it is.
        then_s: seconds of a step after the restart.
        restart_s: seconds without training for it.
        until_loss_s: expected seconds to the next loss.
    """
    return (until_loss_s - restart_s) / then_s > until_loss_s / now_s


# -- the trace --------------------------------------------------------------------------------------------


def window(changes: Sequence[Change], begin_s: float, end_s: float) -> list[Change]:
    """The part of a trace in [``begin_s``, ``end_s``), from 0 on; nodes that are there already come at its begin.

    Raises:
        click.BadParameter: nothing changes in it.
    """
    there: dict[str, None] = {}
    later: list[Change] = []
    for change in changes:
        at_s = (change.at_ms - changes[0].at_ms) / 1000
        if at_s >= end_s:
            break
        if at_s > begin_s:
            later.append(Change((at_s - begin_s) * 1000, change.what, change.node))
        elif change.what == "add":
            there[change.node] = None
        else:
            del there[change.node]
    if not any(change.what == "remove" for change in later):
        raise click.BadParameter(f"no node is lost from {begin_s:g} to {end_s:g} s of the trace")
    return [*(Change(0.0, "add", node) for node in there), *later]


def scaled(changes: Sequence[Change], slots: int) -> list[Change]:
    """Every n-th node of a :func:`window` only, so that ``slots`` nodes are there at the begin.

    Nodes count in the order in which they come; the others are left out with all that happens to them.
    """
    nodes = [change.node for change in changes if change.what == "add"]
    first = sum(change.what == "add" and change.at_ms == 0 for change in changes)
    share = slots / max(first, slots)
    kept = {node for n, node in enumerate(nodes) if math.floor((n + 1) * share) > math.floor(n * share)}
    return [change for change in changes if change.node in kept]


def market(changes: Sequence[Change], slots: int, mapping: Choice, compress: float,
           spares: int = 0) -> tuple[list[Change], list[Fault]]:  # fmt: skip
    """The changes of a :func:`window` that matter to a job of ``slots`` members, and what it does to the job when.

    Args:
        changes: of a window.
        slots: members of the full job, which it has at the begin.
        mapping: ``replace``: as ``bamboo chaos --trace --limit`` does, ``slots`` nodes are in the job, further ones
            wait to take the place of one that goes; ``scale``: every n-th node only, so that the share of the nodes of
            the begin that live is about the trace's.
        compress: how many times faster than the trace.
        spares: nodes beyond the full job's that are in it as well, as far as there are any; they join at once.

    Raises:
        click.BadParameter: the window begins with fewer nodes than the job has members.
    """
    if mapping == "scale":
        changes = scaled(changes, slots)
    first = sum(change.at_ms == 0 for change in changes)
    if first < slots:
        raise click.BadParameter(f"the window begins with {first} nodes, and the job has {slots} members")
    return list(changes), by_trace(changes, slots, slots + spares, compress)


def trace_text(changes: Sequence[Change]) -> str:
    """Lines ``ms,add|remove,node``, as :func:`~bamboo_ds.chaos.schedule.parse_trace` reads them."""
    return "".join(f"{change.at_ms:.3f},{change.what},{change.node}\n" for change in changes)


def seeded(slots: int, between_losses_s: float, seconds: float, seed: int, spares: int = 0) -> list[Change]:
    """Random losses, each of one of the nodes that are there longest, and replaced at once.

    Clockwork's published comparison (2026) has a failure every 2700 to 4500 s. A longer one begins as a shorter one
    does.

    Args:
        slots: nodes of the job.
        between_losses_s: mean seconds between two losses; all from three quarters to five quarters of it are alike.
        seconds: up to when.
        seed: of everything that is drawn.
        spares: nodes beyond those, the newest, which are not lost.
    """
    draw = random.Random(seed)
    nodes = [f"node{n}" for n in range(slots + spares)]
    changes = [Change(0.0, "add", node) for node in nodes]
    at_s = 0.0
    while (at_s := at_s + between_losses_s * draw.uniform(0.75, 1.25)) < seconds:
        gone, new = nodes.pop(draw.randrange(slots)), f"node{len(changes)}"
        changes += [Change(at_s * 1000, "remove", gone), Change(at_s * 1000, "add", new)]
        nodes.append(new)
    return changes


def members_over_time(faults: Sequence[Fault], slots: int) -> list[tuple[float, int]]:
    """(seconds, members that live from then on), from 0 on."""
    points, members = [(0.0, slots)], slots
    for fault in faults:
        members += 1 if fault.kind is FaultKind.JOIN else -1
        points.append((fault.at_s, members))
    return points


def member_seconds(points: Sequence[tuple[float, int]], seconds: float) -> float:
    """What :func:`members_over_time` gives, summed up over ``seconds``."""
    total = 0.0
    for (begin, members), end in zip(points, [*(at for at, _ in points[1:]), seconds], strict=True):
        total += members * max(0.0, min(end, seconds) - min(begin, seconds))
    return total


def between_losses_s(faults: Sequence[Fault], seconds: float) -> float:
    """Mean seconds between two losses; infinite if there are none. Those of one instant count once."""
    instants = {fault.at_s for fault in faults if fault.kind is FaultKind.KILL_AGENT and fault.at_s < seconds}
    return seconds / len(instants) if instants else math.inf


def cost_per_million(node_seconds: float, price_per_hour: float, samples: float) -> float:
    """Price of a million samples, in the unit of ``price_per_hour``; infinite for none."""
    return node_seconds / 3600 * price_per_hour / samples * 1e6 if samples else math.inf
