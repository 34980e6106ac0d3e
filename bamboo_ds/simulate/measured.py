"""Predictions against what jobs have done: a recorded run is simulated again, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..chaos.schedule import Change
from ..config import BambooConfig
from ..errors import ConfigError
from .market import Market
from .profile import Profile
from .run import Report, Simulation
from .terms import Terms

#: Share by which samples, and pauses, may differ.
SAMPLES, PAUSES = 0.05, 0.20


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Done(_Part):
    """What a job has done under a policy."""

    samples: float = Field(ge=0, description="of committed steps")
    pause_s: float | None = Field(None, ge=0, description="mean delay of an interrupted iteration; null: not measured")


class Measured(_Part):
    """A recorded run: the nodes, what was trained, and what came of it."""

    source: str = Field("", description="command and commit")
    profile: Profile
    pipelines: int = Field(ge=1)
    stages: int = Field(ge=1)
    seconds: float = Field(gt=0, description="how long it was watched")
    changes: list[tuple[float, Literal["add", "remove"], str]] = Field(description="seconds, what, node")
    terms: Terms = Field(default_factory=Terms, description="pauses, start times and bandwidths as measured there")
    bamboo: dict[str, Any] = Field(default={}, description='the "bamboo" block')
    policies: dict[str, Done] = Field(min_length=1)

    @property
    def market(self) -> Market:
        """The nodes."""
        changes = tuple(Change(at_s * 1000, what, node) for at_s, what, node in self.changes)
        return Market(changes, self.seconds)


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


def load(path: Path) -> Measured:
    """The recorded run in a file; raises :class:`ConfigError` if it is none."""
    try:
        return Measured.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"])) or "file"
        raise ConfigError(f"--measured {path}: {where}: {fault['msg']}") from error


def simulation(measured: Measured) -> Simulation:
    """The simulation of the recorded run."""
    config = BambooConfig.model_validate(measured.bamboo)
    market, size = measured.market, (measured.pipelines, measured.stages)
    return Simulation(lambda _: market, measured.profile, measured.terms, config, *size)


def compare(measured: Measured, report: Report) -> Sequence[Row]:
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
