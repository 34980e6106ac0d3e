"""What a system has made of the market, in one form for all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bamboo_ds.observe.goodput.lives import Category, Life

from .market import cost_per_million, member_seconds


@dataclass(frozen=True)
class Done:
    """A step that was computed; times in seconds since the begin of the window.

    Attributes:
        number: counts the steps of the job; one that is done again from a checkpoint is there twice.
        samples: that it trained.
        dropped: samples of the full batch that it left out.
        loss: mean loss of what it trained.
    """

    number: int
    begin: float
    end: float
    samples: int
    loss: float | None
    dropped: int = 0


@dataclass(frozen=True)
class Pause:
    """Seconds without training, for one cause, from ``at`` on.

    Attributes:
        kind: ``takeover``, ``admission``, ``healing``, ``restart``, ``reconfiguration``.
        redone: seconds in which work was done again, after the pause.
    """

    at: float
    seconds: float
    kind: str
    redone: float = 0.0


@dataclass(frozen=True)
class Proof:
    """Whether a system's result is what it claims.

    Attributes:
        claim: in words.
        holds: whether it was found to be so.
        compared: steps whose losses were compared with the undisturbed run's.
        equal: how many of them were the same to the last bit.
        largest: largest relative difference.
        detail: what else was found.
    """

    claim: str
    holds: bool
    compared: int
    equal: int
    largest: float | None
    detail: str = ""


@dataclass
class Outcome:
    """A system after its window; times in seconds since the window's begin.

    Attributes:
        seconds: how long the window was.
        done: steps in the order in which they were computed.
        changes: (seconds, members alive from then on).
        goodput: member-seconds by category.
        pauses: in order.
        starts: seconds from the start of a node's processes to their first part in training.
        saves: seconds for which checkpoints held training, and ``saved`` seconds until they were complete.
        steps_target: of a run that ends with a step.
        faults: what was done to the system when: seconds planned, seconds done, kind, node, outcome.
        failed: why the system could not be measured, if so.
    """

    system: str
    title: str
    price: float
    seconds: float = 0.0
    done: list[Done] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    goodput: dict[Category, float] = field(default_factory=dict)
    pauses: list[Pause] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    restarts: int = 0
    losses: int = 0
    joins: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    proof: Proof | None = None
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    def count_members(self, size: int) -> None:
        """Make :attr:`changes` of the faults, which begin with ``size`` members."""
        self.changes = [(0.0, size)]
        for fault in self.faults:
            self.changes.append((fault["done_s"], self.changes[-1][1] + (1 if fault["kind"] == "join" else -1)))

    @property
    def kept(self) -> list[Done]:
        """Steps that were not done again later, in order of their numbers."""
        last = {step.number: step for step in self.done}
        return [last[number] for number in sorted(last)]

    @property
    def samples(self) -> int:
        """Samples trained, each once."""
        return sum(step.samples for step in self.kept)

    @property
    def samples_per_s(self) -> float:
        """Over the whole window."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def redone(self) -> int:
        """Samples that were trained once more, since a checkpoint was older."""
        return sum(step.samples for step in self.done) - self.samples

    @property
    def dropped(self) -> int:
        """Samples that were left out for good."""
        return sum(step.dropped for step in self.kept)

    @property
    def node_seconds(self) -> float:
        """Seconds of nodes alive, which are paid for."""
        return member_seconds(self.changes, self.seconds)

    @property
    def cost(self) -> float:
        """Of a million samples."""
        return cost_per_million(self.node_seconds, self.price, self.samples)

    def limit_share(self, full_rate: float, members: int) -> float:
        """Share of the samples that all of its live members make at the undisturbed job's speed.

        Args:
            full_rate: samples per second of the undisturbed job, of ``members`` members.
        """
        limit = full_rate / members * self.node_seconds
        return self.samples / limit if limit else math.nan


def prove(claim: str, kept: Sequence[Done], undisturbed: Mapping[int, float], tolerance: float, detail: str = "",
          holds: bool = True) -> Proof:  # fmt: skip
    """Compare losses with those of the undisturbed run, which must have all of their steps, by the step's number.

    Args:
        tolerance: largest relative difference that the claim allows; 0: none.
        holds: what else the claim needs.
    """
    pairs = [(s.loss, undisturbed[s.number]) for s in kept if s.loss is not None and s.number in undisturbed]
    worst = max((abs(a - b) / abs(b) for a, b in pairs), default=None)
    equal = sum(a == b for a, b in pairs)
    numbers = [step.number for step in kept]
    whole = bool(numbers) and numbers == list(range(numbers[0], numbers[-1] + 1))
    if not whole:
        detail = f"{detail}; steps are missing".lstrip("; ")
    alone = sum(number not in undisturbed for number in numbers)
    if alone:
        detail = f"{detail}; the undisturbed run has not done {alone} of the steps".lstrip("; ")
    # No maximum is that of what is no number.
    right = worst is not None and worst <= tolerance and all(math.isfinite(a - b) for a, b in pairs)
    return Proof(claim, holds and whole and right and not alone, len(pairs), equal, worst, detail)


class Book:
    """Accounts for the seconds of the nodes of a system that does not write bamboo's events.

    The categories and the rule that each moment belongs to one are those of ``bamboo goodput``.
    """

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}

    def begin(self, node: str, at: float) -> None:
        """The node is there."""
        self.lives[node] = Life(node, at)

    def end(self, node: str, at: float) -> None:
        """The node is gone."""
        self.lives[node].close(at)

    def add(self, begin: float, end: float) -> dict[Category, float]:
        """Member-seconds by category within [``begin``, ``end``); lives that go on end there."""
        categories = dict.fromkeys(Category, 0.0)
        for life in self.lives.values():
            life.close(max(life.begin, end))
            for each in life.cut():
                categories[each.category] += max(0.0, min(each.end, end) - max(each.begin, begin))
        return categories
