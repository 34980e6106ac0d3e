"""Predictions against what jobs have done: a recorded run is simulated again, and compared.

What a loss costs depends on the part of an iteration that it interrupts. Where the simulated job is a little faster or
slower than the real one, that is soon another part. So a run is simulated some times, each time with losses and joins
another part of an iteration later, and means are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from bamboo_ds.chaos.schedule import Change, parse_trace
from bamboo_ds.config import parse_block
from bamboo_ds.simulate.given import Given, checked
from bamboo_ds.simulate.market import Market
from bamboo_ds.simulate.profile import Profile
from bamboo_ds.simulate.run import Report, Simulation
from bamboo_ds.simulate.terms import Terms

#: Share by which samples, and pauses, may differ.
SAMPLES, PAUSES = 0.05, 0.20
#: Simulations of a recorded run.
PHASES = 4
#: What comes after the begin does not come with it.
_SOON_S = 0.001


class PolicyResult(Given):
    """What a job has done under a policy."""

    samples: float = Field(ge=0, description="of committed steps")
    pause_s: float | None = Field(None, ge=0, description="mean delay of an interrupted iteration; null: not measured")


class RecordedRun(Given):
    """A recorded run: the nodes, what was trained, and what came of it."""

    source: str = Field("", description="command and commit")
    profile: Profile
    pipelines: int = Field(ge=1)
    stages: int = Field(ge=1)
    seconds: float = Field(gt=0, description="how long it was watched")
    changes: list[tuple[float, Literal["add", "remove"], str]] = Field(description="seconds, what, node")
    terms: Terms = Field(default_factory=Terms, description="pauses, start times and bandwidths as measured there")
    reshapes: bool = Field(True, description="checkpoints can be made such of another number of stages")
    bamboo: dict[str, Any] = Field(default={}, description='the "bamboo" block')
    policies: dict[str, PolicyResult] = Field(min_length=1)

    def market(self, phase: int) -> Market:
        """The nodes; those of the begin are members in their order. What follows comes half a step later at most."""
        passes_s = sum(layer.forward_s + layer.backward_s for layer in self.profile.each) / self.stages
        step_s = passes_s * (self.profile.micro_batches(self.pipelines) + self.stages - 1)  # by 1F1B
        later_s = step_s * ((phase + 0.5) / PHASES - 0.5)
        first = [Change(0.0, what, node) for at_s, what, node in self.changes if not at_s]
        others = [(max(_SOON_S, at_s + later_s), what, node) for at_s, what, node in self.changes if at_s]
        later = [Change(at_s * 1000, what, node) for at_s, what, node in others if at_s < self.seconds]
        return Market((*first, *later), self.seconds, ordered=True)


class Row(BaseModel):
    """One figure of a policy."""

    policy: str
    what: str
    measured: float
    predicted: float
    error: float = Field(description="predicted by measured, less 1")
    holds: bool

    def __str__(self) -> str:
        found = f"{self.policy}: {self.what} measured {self.measured:.4g}, predicted {self.predicted:.4g}"
        return f"{found} ({self.error:+.1%}){'' if self.holds else ' TOO FAR'}"


def load(path: Path) -> RecordedRun:
    """The recorded run in a file; raises :class:`ConfigError` if it is none."""
    found = checked(str(path), lambda: RecordedRun.model_validate_json(path.read_bytes()))
    # Checked as the lines of a trace are.
    lines = [f"{at_s * 1000},{what},{node}" for at_s, what, node in found.changes]
    parse_trace("\n".join(lines), f"{path}: changes")
    return found


def simulation(measured: RecordedRun) -> Simulation:
    """The simulation of the recorded run, for :data:`PHASES` seeds."""
    config = parse_block(measured.bamboo)
    size = measured.pipelines, measured.stages
    every = len(measured.changes)  # nodes that were there were rented
    terms, reshapes = measured.terms, measured.reshapes
    return Simulation(measured.market, measured.profile, terms, config, *size, every, reshapes)


def compare(measured: RecordedRun, report: Report) -> Sequence[Row]:
    """The predictions of ``report`` beside what was measured."""
    rows = []
    for name, done in measured.policies.items():
        predicted = report.policies[name]
        pairs = [("samples", done.samples, predicted.samples, SAMPLES)]
        if done.pause_s is not None:
            pairs.append(("pause_s", done.pause_s, predicted.pause_s, PAUSES))
        for what, one, other, bound in pairs:
            error = other / one - 1 if one else float(other != 0)
            holds = abs(error) <= bound
            rows.append(Row(policy=name, what=what, measured=one, predicted=other, error=error, holds=holds))
    return rows
