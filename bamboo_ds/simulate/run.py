"""Policies over a market, by seeds, as a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from pydantic import BaseModel, ConfigDict, Field

from ..config import BambooConfig, RedundancyMode
from ..errors import ConfigError
from ..observe.goodput import account
from ..observe.lives import Category
from .bamboo import BambooJob, planned
from .baselines import CheckpointRestart, SampleDropping, Stock
from .market import Market
from .pace import AUTO, Pace, Stretch
from .profile import Profile
from .settings import unmodelled
from .terms import Terms
from .training import Outcome, Training

BAMBOO, WHOLE = "bamboo", "bamboo-whole-stages"
ON_DEMAND, LIMIT = "on-demand", "limit"
POLICIES = (
    BAMBOO,
    *(f"{BAMBOO}:{mode.value}" for mode in RedundancyMode),
    WHOLE,
    "checkpoint-restart",
    "sample-dropping",
    ON_DEMAND,
    LIMIT,
)

#: 97.5th percentiles of Student's distribution by degrees of freedom from 1 on.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Figures(BaseModel):
    """What a policy makes of a market."""

    model_config = ConfigDict(frozen=True)

    samples: float = Field(description="of committed steps, each once")
    samples_per_s: float = Field(description="over the whole time")
    limit_share: float | None = Field(description="samples by those of the limit; null without any")
    goodput: float | None = Field(description="productive share of the members' seconds, as of `bamboo goodput`")
    node_goodput: float | None = Field(description="the same of the seconds of all nodes, members or not")
    lost_s: float = Field(description="member-seconds of work that was lost, see `categories`")
    redone_s: float = Field(description="member-seconds of passes computed again by survivors")
    restarts: float = Field(description="from a checkpoint, or to take nodes in")
    cost_per_million: float | None = Field(description="$ per million samples; null without any")
    pause_s: float = Field(description="mean time that a loss delays the interrupted iteration by, without restarts")
    losses: float
    plans: float = Field(description="changes of plan")
    copied_gb: float = Field(description="states copied between members")
    refused: float = Field(description="plans not used, since members have not the memory for them")
    node_seconds: float = Field(description="of all nodes")
    outside_s: float = Field(description="of these, while a node was no member: starting, or without a place")
    categories: dict[Category, float] = Field(description="member-seconds; with outside_s they are node_seconds")


class PolicyReport(Figures):
    """Means over the seeds; ``range``: 95 % confidence of these means, where there are several."""

    range: dict[str, tuple[float, float]] | None = None
    idle: str | None = Field(None, description="why the job did not train at the end")


class Memory(BaseModel):
    """What a device needs, in bytes, of the full job."""

    device: int | None = Field(description="null: not looked at")
    without: float = Field(description="stock DeepSpeed, the same pipelines and stages")
    replicas: float = Field(description="with replicas of all stages")
    fits: bool = Field(description="with replicas")
    least_members: int | None = Field(description="fewest members on which the job with replicas fits; null: none")


class Report(BaseModel):
    """What ``bamboo simulate --json`` prints."""

    profile: str
    pipelines: int
    stages: int
    micro_batches: int
    seconds: float
    seeds: int
    nodes: tuple[float, int] = Field(description="mean and greatest number of nodes")
    losses: float
    memory: Memory
    unmodelled: list[str] = Field(description="settings other than the default that simulations know nothing of")
    policies: dict[str, PolicyReport]


@dataclass
class Simulation:
    """What is simulated.

    Args:
        market: by seed.
        profile: of the model.
        terms: what is assumed.
        config: settings of the job.
        pipelines, stages: its size; ``None``: the profile's, as many pipelines as there are nodes for on
            average.
        limit: nodes that the job rents at most; ``None``: twice as many as it has roles, which is all that compute.
        reshapes: stock DeepSpeed's checkpoints can be made such of another number of stages; else its jobs have whole
            pipelines of the job's own stages.
    """

    market: Callable[[int], Market]
    profile: Profile
    terms: Terms = field(default_factory=Terms)
    config: BambooConfig = field(default_factory=BambooConfig)
    pipelines: int | None = None
    stages: int | None = None
    limit: int | None = None
    reshapes: bool = True

    def __post_init__(self) -> None:
        self.stages = self.stages or self.profile.stages
        first = self.market(0)
        self.pipelines = (
            self.pipelines
            or self.profile.pipelines
            or self._most(int(first.node_seconds / first.seconds) // self.stages)
        )
        self.stock = Stock(self.profile, self.terms, None if self.reshapes else self.size)
        self._paces: dict[tuple[RedundancyMode, bool], Pace] = {}
        self._planned: dict[int, float] = {}
        self.pace(self.config.redundancy.mode)

    def _most(self, wanted: int) -> int:
        """No more pipelines than have twice as many micro-batches as stages, and a whole number of them."""
        profile, stages = self.profile, self.stages or 1
        whole = profile.global_batch // profile.micro_batch
        able = [d for d in range(1, max(1, min(wanted, whole // (2 * stages))) + 1) if whole % d == 0]
        return able[-1]

    @property
    def size(self) -> tuple[int, int]:
        """Pipelines and stages."""
        assert self.pipelines is not None and self.stages is not None
        return self.pipelines, self.stages

    def pace(self, mode: RedundancyMode, whole: bool = False) -> Pace:
        """Of the job in a mode, with stages that are computed whole or divided as the settings have it."""
        if (mode, whole) not in self._paces:
            setting = self.config.topology.blocks
            blocks = 1 if whole else AUTO if setting == "auto" else setting
            self._paces[mode, whole] = Pace(self.profile, self.terms, *self.size, mode, blocks)
        return self._paces[mode, whole]

    def rented(self, seed: int) -> Market:
        """The nodes that the job rents."""
        pipelines, stages = self.size
        return self.market(seed).rented(self.limit or 2 * pipelines * stages)

    def job(self, policy: str, market: Market, seed: int) -> Training:
        """The job of a policy.

        Raises:
            ConfigError: there is no such policy.
        """
        if policy == "checkpoint-restart":
            return CheckpointRestart(market, self.stock, self.terms, seed)
        if policy == "sample-dropping":
            return SampleDropping(market, self.stock, self.terms, seed, *self.size)
        name, _, mode = policy.partition(":")
        if name not in (BAMBOO, WHOLE) or policy not in POLICIES:
            raise ConfigError(f"--policy {policy}: there is none of this name; there are {', '.join(POLICIES)}")
        config = self.config
        if mode:
            redundancy = config.redundancy.model_copy(update={"mode": RedundancyMode(mode)})
            config = config.model_copy(update={"redundancy": redundancy})
        pace = self.pace(config.redundancy.mode, whole=name == WHOLE)
        return BambooJob(market, pace, self.terms, config, seed)

    def run(self, policies: Sequence[str], seeds: int = 1) -> tuple[Report, dict[str, Outcome]]:
        """The report, and what each policy's job has done with the first seed."""
        for policy in policies:
            if policy not in POLICIES:
                raise ConfigError(f"--policy {policy}: there is none of this name; there are {', '.join(POLICIES)}")
        found: dict[str, list[Figures]] = {policy: [] for policy in policies}
        outcomes: dict[str, Outcome] = {}
        markets = []
        for seed in range(seeds):
            market = self.rented(seed)
            markets.append(market)
            jobs = {policy: self.job(policy, market, seed) for policy in policies if policy not in (ON_DEMAND, LIMIT)}
            done = {policy: job.simulate() for policy, job in jobs.items()}
            speeds = self._speeds(market, jobs.values())
            limit = _limit_samples(market, self.terms.start_s, speeds)
            for policy in policies:
                if policy in done:
                    found[policy].append(self._figures(done[policy], market, limit))
                    outcomes.setdefault(policy, done[policy])
                else:
                    found[policy].append(self._undisturbed(policy, market, limit, speeds))
        pipelines, stages = self.size
        report = Report(
            profile=self.profile.name,
            pipelines=pipelines,
            stages=stages,
            micro_batches=self.profile.micro_batches(pipelines),
            seconds=markets[0].seconds,
            seeds=seeds,
            nodes=(
                fmean(m.node_seconds / m.seconds for m in markets),
                max(n for m in markets for *_, n in m.counts()),
            ),
            losses=fmean(sum(c.what == "remove" for c in m.changes) for m in markets),
            memory=self.memory(),
            unmodelled=unmodelled(self.config),
            policies={
                policy: _mean(each, outcomes[policy].idle if policy in outcomes else None)
                for policy, each in found.items()
            },
        )
        return report, outcomes

    # -- the limit ----------------------------------------------------------------------------------------

    def _speeds(self, market: Market, jobs: Iterable[Training]) -> list[float]:
        """By number of nodes, the samples per second of the fastest job without losses that they allow.

        That is the fastest of stock DeepSpeed's arrangements, of the job that the planner makes of them, without what
        replicas cost, and of all plans of so many members that a simulated job had.
        """
        most = max(count for *_, count in market.counts())
        met: dict[int, float] = {}
        for job in jobs:
            for members, seconds in job.speeds.items():
                met[members] = min(seconds, met.get(members, math.inf))
        counts = {count for *_, count in market.counts(self.terms.start_s)} | {most}
        speeds = [0.0]
        for members in range(1, most + 1):
            found = [speeds[-1]]
            if members in counts:
                stock = self.stock.best(members)
                found += [stock.speed] if stock else []
                found.append(self.profile.global_batch / self._planned_s(members))
            if members in met:
                found.append(self.profile.global_batch / met[members])
            speeds.append(max(found))
        return speeds

    def _planned_s(self, members: int) -> float:
        if members not in self._planned:
            pace = self.pace(self.config.redundancy.mode)
            plan = planned(pace, members, self.config)
            self._planned[members] = Stretch(pace, plan).bare_s if pace.fits(plan) else math.inf
        return self._planned[members]

    def _undisturbed(self, policy: str, market: Market, limit: float, speeds: Sequence[float]) -> Figures:
        node_seconds, price, samples = market.node_seconds, self.terms.spot_price, limit
        if policy == ON_DEMAND:
            most = len(speeds) - 1
            node_seconds, price, samples = (
                most * market.seconds,
                self.terms.on_demand_price,
                speeds[-1] * market.seconds,
            )
        return Figures(
            **_rates(samples, market.seconds, limit, node_seconds, price),
            goodput=1.0,
            node_goodput=1.0,
            **dict.fromkeys(("lost_s", "redone_s", "restarts", "pause_s", "losses"), 0.0),
            **dict.fromkeys(("plans", "copied_gb", "refused", "outside_s"), 0.0),
            node_seconds=node_seconds,
            categories={Category.PRODUCTIVE: node_seconds},
        )

    # -- figures ------------------------------------------------------------------------------------------

    def _figures(self, done: Outcome, market: Market, limit: float) -> Figures:
        report = account(done.events)
        seconds, categories = market.node_seconds, report.categories
        productive = categories[Category.PRODUCTIVE]
        return Figures(
            **_rates(done.samples, market.seconds, limit, seconds, self.terms.spot_price),
            goodput=report.goodput,
            node_goodput=productive / seconds if seconds else None,
            lost_s=categories[Category.WASTED],
            redone_s=categories[Category.REDONE],
            restarts=report.restarts,
            pause_s=fmean(done.pauses) if done.pauses else 0.0,
            losses=report.losses,
            plans=done.facts.get("plans", 0.0),
            copied_gb=done.facts.get("copied_gb", 0.0),
            refused=done.refused,
            node_seconds=seconds,
            outside_s=done.outside_s,
            categories=categories,
        )

    def memory(self) -> Memory:
        """What devices need."""
        pace, (pipelines, stages) = self.pace(self.config.redundancy.mode), self.size

        def need(members: int) -> float:
            return pace.need(planned(pace, members, self.config))

        full, device = need(pipelines * stages), self.profile.memory_bytes
        # With fewer members none needs less.
        low, least = 1, pipelines * stages
        while low < least:
            middle = (low + least) // 2
            if device is None or need(middle) <= device:
                least = middle
            else:
                low = middle + 1
        return Memory(
            device=device,
            without=self.stock.need(pipelines, stages, self.profile.micro_batches(pipelines)),
            replicas=full,
            fits=device is None or full <= device,
            least_members=least if device is None or full <= device else None,
        )


def _rates(samples: float, seconds: float, limit: float, node_seconds: float, price: float) -> dict[str, float | None]:
    return {
        "samples": samples,
        "samples_per_s": samples / seconds,
        "limit_share": samples / limit if limit else None,
        "cost_per_million": node_seconds / 3600 * price / samples * 1e6 if samples else None,
    }


def _limit_samples(market: Market, start_s: float, speeds: Sequence[float]) -> float:
    return sum((end - begin) * speeds[count] for begin, end, count in market.counts(start_s))


def _mean(each: Sequence[Figures], idle: str | None) -> PolicyReport:
    values: dict[str, object] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for name in Figures.model_fields:
        if name == "categories":
            keys = dict.fromkeys(key for figures in each for key in figures.categories)
            values[name] = {key: fmean(figures.categories.get(key, 0.0) for figures in each) for key in keys}
            continue
        known = [value for figures in each if (value := getattr(figures, name)) is not None]
        values[name] = fmean(known) if known else None
        if len(known) > 1:
            times = _STUDENT[min(len(known) - 1, len(_STUDENT)) - 1]
            half = times * stdev(known) / math.sqrt(len(known))
            ranges[name] = fmean(known) - half, fmean(known) + half
    return PolicyReport.model_validate({**values, "range": ranges or None, "idle": idle})
