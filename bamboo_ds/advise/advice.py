"""What comes out of a search, and the block to paste."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..config import BLOCK, BambooConfig
from ..simulate.profile import Profile
from ..simulate.run import PolicyReport
from .setups import Rejected, Setup

_GIB, _MIB = 2**30, 2**20

#: What node-seconds are paid for, beside the categories of members' seconds.
OUTSIDE = "outside"

Range = tuple[float, float] | None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Figures(_Part):
    """What a simulation, or several over seeds, has found; ranges are 95 % confidence of the mean (Student's)."""

    seeds: int
    cost_per_million: float | None = Field(description="$ per million samples; null: there are none")
    cost_range: Range = None
    samples_per_s: float
    samples_per_s_range: Range = None
    goodput: float | None = Field(description="productive share of members' seconds")
    goodput_range: Range = None
    restarts: float = Field(description="from a checkpoint, or to take nodes in")
    losses: float
    refused: float = Field(description="plans that were not used, since members have not the memory for them")
    idle: str | None = Field(None, description="why it did not train at the end")
    dollars: dict[str, float] = Field(description="$ per million samples by what the nodes did for them")

    @staticmethod
    def of(found: PolicyReport, seeds: int) -> dict[str, Any]:
        """The figures of what was simulated over so many seeds, by name."""
        ranges = found.range or {}
        cost = found.cost_per_million
        seconds = {each.value: value for each, value in found.categories.items()} | {OUTSIDE: found.outside_s}
        dollars = {}
        if cost is not None and found.node_seconds:
            dollars = {what: cost * value / found.node_seconds for what, value in seconds.items() if value > 0}
        return {
            "seeds": seeds,
            "cost_per_million": cost,
            "cost_range": ranges.get("cost_per_million"),
            "samples_per_s": found.samples_per_s,
            "samples_per_s_range": ranges.get("samples_per_s"),
            "goodput": found.goodput,
            "goodput_range": ranges.get("goodput"),
            "restarts": found.restarts,
            "losses": found.losses,
            "refused": found.refused,
            "idle": found.idle,
            "dollars": dollars,
        }


class Ranked(Figures):
    """A setup that was simulated."""

    setup: Setup
    fast_enough: bool = Field(description="whether its samples_per_s reach those that are asked for")
    overhead: float = Field(
        description="share by which iterations without losses are longer than without redundancy, with a member for"
        " each role"
    )
    need_gib: float = Field(description="memory of a device with a role, or with a role and a replica")
    least_members: int | None = Field(description="fewest members on which it fits; null: memory is not looked at")
    checkpoint_s: float = Field(description="seconds between checkpoints")
    checkpoint_steps: int = Field(description="the same in steps of the job with a member for each role")
    estimate: float | None = Field(description="$ per million samples that it was taken for before; null: infinite")


class Alternative(Figures):
    """What a user may do without this package."""

    policy: Literal["on-demand", "checkpoint-restart"]
    instance: str
    nodes: int = Field(description="rented; on spot instances at most")
    pipelines: int | None = Field(None, description="null: changes with the nodes")
    stages: int | None = None
    fast_enough: bool


class Verdict(_Part):
    """Whether it is worth it."""

    worth_it: bool | None = Field(description="null: too close to call")
    sentence: str


class Paste(_Part):
    """How to run a job with a setup."""

    members: int = Field(description="-n of bamboo run, or ranks of another launcher")
    joining: int = Field(description="further members that may join")
    num_stages: int
    save_every_steps: int
    ds_config: dict[str, Any] = Field(description="settings of ds_config.json")


class Advice(_Part):
    """What ``bamboo advise --json`` prints."""

    profile: str
    source: str = Field(description="where the profile comes from")
    hours: float
    nodes: dict[str, tuple[float, int]] = Field(description="by instance type, their mean and greatest number")
    losses: dict[str, float] = Field(description="by instance type, share of the nodes that is lost in an hour")
    memory_gib: dict[str, float | None] = Field(description="by instance type, of its device; null: not looked at")
    seeds: int
    at_least: float = Field(description="samples per second that are asked for")
    share: float | None = Field(description="by which share of the fastest setup that follows; null: given")
    estimated: int = Field(description="setups that were estimated")
    ranking: list[Ranked] = Field(description="simulated setups: those that are fast enough first, by cost")
    alternatives: list[Alternative]
    verdict: Verdict
    paste: Paste | None = Field(description="of the first setup; null: there is none")
    rejected: list[Rejected]

    @property
    def best(self) -> Ranked | None:
        """The setup that is advised."""
        first = self.ranking[0] if self.ranking else None
        return first if first is not None and first.cost_per_million is not None else None


def settings_of(setup: Setup, config: BambooConfig, profile: Profile) -> BambooConfig:
    """The settings of a job with ``setup``: members hold no more than their devices, where their memory is known."""
    own = setup.config(config)
    if profile.memory_bytes is None or config.topology.memory_limit_mb is not None:
        return own
    return own.overridden({"topology.memory_limit_mb": (profile.memory_bytes - profile.workspace_bytes) // _MIB})


def block(setup: Setup, config: BambooConfig, profile: Profile) -> dict[str, Any]:
    """The ``"bamboo"`` block of ``setup``: what is not a default of ``config``, and what was chosen.

    Args:
        setup: what was chosen.
        config: the settings that it was chosen for.
        profile: of the model, on the device.
    """
    own = settings_of(setup, config, profile)
    found: dict[str, Any] = own.model_dump(mode="json", exclude_defaults=True)
    found.setdefault("redundancy", {})["mode"] = setup.mode.value
    topology = found.setdefault("topology", {})
    topology["blocks"] = setup.blocks
    if own.topology.memory_limit_mb is not None:
        topology["memory_limit_mb"] = own.topology.memory_limit_mb  # a whole number without a fraction
    return found


def paste(ranked: Ranked, config: BambooConfig, profile: Profile) -> Paste:
    """How to run a job with a setup that was simulated."""
    setup = ranked.setup
    return Paste(
        members=setup.size,
        joining=setup.spares,
        num_stages=setup.stages,
        save_every_steps=ranked.checkpoint_steps,
        ds_config={
            "train_micro_batch_size_per_gpu": profile.micro_batch,
            "gradient_accumulation_steps": profile.micro_batches(setup.pipelines),
            BLOCK: block(setup, config, profile),
        },
    )


def gib(count: float) -> float:
    """Bytes in GiB."""
    return count / _GIB
