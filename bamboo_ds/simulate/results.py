"""The results of a sweep: the setups, whether one is worth it, and the block to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ..config import BLOCK, BambooConfig, RedundancyMode
from .profile import Profile
from .run import BAMBOO, DROPPING, ON_DEMAND, RESTARTING, PolicyReport

#: The policies that a job of this package is compared with.
OTHERS = {
    ON_DEMAND: "stock DeepSpeed on demand",
    RESTARTING: "checkpoint-restart on spot instances",
    DROPPING: "sample dropping on spot instances",
}

Blocks = Literal["auto"] | int


class Arranged(NamedTuple):
    """Pipelines and stages on an instance type."""

    instance: str
    pipelines: int
    stages: int

    @property
    def size(self) -> int:
        """Members that it needs for each to have one role."""
        return self.pipelines * self.stages

    def __str__(self) -> str:
        return f"{self.instance}: {self.pipelines} x {self.stages}"


class _OfSweep(BaseModel):
    model_config = ConfigDict(frozen=True)


class Setup(_OfSweep):
    """The setup of a job."""

    policy: str = Field(description="one of `bamboo simulate`; of this package with its redundancy.mode")
    instance: str
    pipelines: int | None = Field(None, description="null: changes with the nodes")
    stages: int | None = None
    blocks: Blocks | None = Field(None, description="topology.blocks; null: of another policy")
    nodes: int = Field(description="rented at most")

    @property
    def arranged(self) -> Arranged:
        """Its pipelines and stages; 0 of both where they change."""
        return Arranged(self.instance, self.pipelines or 0, self.stages or 0)

    @property
    def members(self) -> int:
        """The number of nodes that can own a role."""
        return min(self.nodes, self.arranged.size)

    @property
    def spares(self) -> int:
        """Nodes that are rented beyond the number of roles, where there are so many; negative: fewer than roles."""
        return self.nodes - self.arranged.size

    @property
    def mode(self) -> RedundancyMode | None:
        """``redundancy.mode``; ``None``: of another policy."""
        name, _, mode = self.policy.partition(":")
        return RedundancyMode(mode) if name == BAMBOO else None

    def config(self, base: BambooConfig) -> BambooConfig:
        """The settings of ``base`` with those of this setup."""
        own = {"redundancy.mode": self.mode, "topology.blocks": self.blocks}
        return base if self.mode is None else base.overridden(own)

    def __str__(self) -> str:
        arranged = f", {self.pipelines} x {self.stages}" if self.pipelines else ""
        divided = "" if self.blocks is None else f", blocks {self.blocks}"
        return f"{self.policy} on {self.instance}{arranged}{divided}, {self.nodes} nodes"


class Ranked(_OfSweep):
    """A setup that was simulated."""

    setup: Setup
    seeds: int
    fast_enough: bool = Field(True, description="whether its samples_per_s reach those that are asked for")
    figures: PolicyReport
    overhead: float | None = Field(
        None,
        description="share by which iterations without losses are longer than without redundancy, with as many members"
        " as can own a role",
    )
    need_gib: float | None = Field(
        None, description="memory of a device with its roles, and with its replicas if there are any"
    )
    checkpoint_s: float | None = Field(None, description="seconds between checkpoints, where the sweep has chosen them")
    checkpoint_steps: int | None = Field(None, description="the same in steps of that job")

    @property
    def cost(self) -> float | None:
        """$ per million samples."""
        return self.figures.cost_per_million

    @property
    def costs(self) -> tuple[float, float]:
        """The 95 % confidence of the cost; one without a range is a range of its own."""
        return (self.figures.range or {}).get("cost_per_million") or (self.cost or 0.0,) * 2


class Rented(_OfSweep):
    """The nodes of an instance type."""

    mean: float
    most: int
    lost: float = Field(description="share of the nodes that is lost in an hour")
    memory_gib: float | None = Field(description="of its device; null: not looked at")


class Paste(_OfSweep):
    """The options and the block of a setup's job."""

    members: int = Field(description="-n of bamboo run, --start of bamboo join")
    ranks: int = Field(description="--ranks of both, if that is more; ranks of another launcher")
    joining: int = Field(description="further members that may join")
    num_stages: int
    save_every_steps: int
    ds_config: dict[str, Any] = Field(description="settings of ds_config.json")


class Swept(_OfSweep):
    """The output of ``bamboo simulate --sweep --json``."""

    profile: str
    hours: float
    rented: dict[str, Rented] = Field(description="by instance type")
    seeds: int
    at_least: float = Field(description="samples per second that are asked for")
    share: float | None = Field(description="by which share of the fastest setup that follows; null: given")
    simulated: int = Field(description="setups that were simulated")
    ranking: list[Ranked] = Field(description="of this package: those that are fast enough first, by cost")
    alternatives: list[Ranked] = Field(description="the best of each other policy, in the same order")
    worth_it: bool | None = Field(description="null: too close to call")
    verdict: str
    paste: Paste | None = Field(description="of the first setup, or null")
    unfit: dict[str, float] = Field(description="GiB of a device that setups would need which do not fit")
    unmodelled: list[str] = Field(description="settings other than the default that simulations know nothing of")


def settings_of(setup: Setup, config: BambooConfig, profile: Profile) -> BambooConfig:
    """The settings of a job with ``setup``: members hold no more than their devices, where their memory is known."""
    own = setup.config(config)
    if profile.memory_bytes is None or config.topology.memory_limit_mb is not None:
        return own
    return own.overridden({"topology.memory_limit_mb": (profile.memory_bytes - profile.workspace_bytes) // 2**20})


def block(setup: Setup, config: BambooConfig, profile: Profile) -> dict[str, Any]:
    """The ``"bamboo"`` block of ``setup``: what is not a default of ``config``, and what was chosen."""
    own = settings_of(setup, config, profile)
    found: dict[str, Any] = own.model_dump(mode="json", exclude_defaults=True)
    found.setdefault("redundancy", {})["mode"] = own.redundancy.mode.value
    topology = found.setdefault("topology", {})
    topology["blocks"] = setup.blocks
    if own.topology.memory_limit_mb is not None:
        topology["memory_limit_mb"] = own.topology.memory_limit_mb  # a whole number without a fraction
    return found


def paste(ranked: Ranked, config: BambooConfig, profile: Profile) -> Paste:
    """The options and the block of the job of a setup that was simulated."""
    setup = ranked.setup
    assert setup.pipelines is not None and setup.stages is not None
    settings = {
        "train_micro_batch_size_per_gpu": profile.micro_batch,
        "gradient_accumulation_steps": profile.micro_batches(setup.pipelines),
        BLOCK: block(setup, config, profile),
    }
    return Paste(
        members=setup.members,
        ranks=setup.arranged.size,
        joining=max(0, setup.spares),
        num_stages=setup.stages,
        save_every_steps=ranked.checkpoint_steps or 1,
        ds_config=settings,
    )


def verdict(best: Ranked | None, alternatives: Sequence[Ranked], unfit: Mapping[str, float]) -> tuple[bool | None, str]:
    """Whether ``best`` is worth it (``None``: too close to call), and a sentence with the figures that say so.

    Args:
        best: the first setup; ``None``: no setup trains.
        alternatives: the best of the other policies, by rank.
        unfit: GiB that setups would need which do not fit.
    """
    if best is None or best.cost is None:
        least = min(unfit.items(), key=lambda each: each[1], default=None)
        if least is None:
            return False, "No: no setup trains on these nodes"
        return False, f"No: no setup fits; the least is {least[0]}, which needs a device with {least[1]:.1f} GiB"
    own = best.cost
    figures = f"a million samples cost {own:,.2f} $ on {best.setup.instance}{_within(best)}"
    for each in alternatives:
        figures += f"; {OTHERS[each.setup.policy]} {_told(each)}"
    if not best.fast_enough:
        fastest = f"the fastest does {best.figures.samples_per_s:.3g} samples/s"
        return False, f"No: no setup is as fast as was asked for; {fastest}; {figures}"
    # What is too slow is no alternative.
    able = [(each.cost, OTHERS[each.setup.policy], each) for each in alternatives if each.fast_enough and each.cost]
    if not able:
        return True, f"Yes: nothing else is as fast as was asked for: {figures}"
    close = [name for _, name, each in able if best.costs[0] <= each.costs[1] and each.costs[0] <= best.costs[1]]
    for cost, name, _ in able:
        if cost < own and name not in close:
            return False, f"No: {name} costs less, by a factor of {own / cost:.2f}: {figures}"
    if close:
        sentence = f"Too close to call: the ranges of {' and '.join(close)} overlap with that of the best setup"
        return None, f"{sentence}, which more --seeds may part: {figures}"
    cost, name, _ = able[0]
    return True, f"Yes: {name} costs {cost / own:.2f} times as much: {figures}"


def _told(each: Ranked) -> str:
    if each.cost is None:
        return "trains nothing at all"
    slow = "" if each.fast_enough else f", too slow with {each.figures.samples_per_s:.3g} samples/s"
    return f"costs {each.cost:,.2f} $ on {each.setup.instance}{slow}"


def _within(best: Ranked) -> str:
    replicas = "" if best.setup.mode and best.setup.mode.replicas else ", without replicas"
    if "cost_per_million" in (best.figures.range or {}):
        return f"{replicas} ({best.costs[0]:,.2f} to {best.costs[1]:,.2f})"
    why = "of one seed" if best.seeds == 1 else f"some of {best.seeds} seeds have trained nothing"
    return f"{replicas} ({why}: no range)"
