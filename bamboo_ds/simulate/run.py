"""Policies over a market, by seeds, as a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..config import BambooConfig, RedundancyMode
from ..errors import ConfigError
from ..observe.goodput import account
from ..observe.goodput.lives import Category
from .bamboo import BambooJob, planned
from .baselines import CheckpointRestart, SampleDropping, Stock
from .market import Market
from .pace import AUTO, Pace, Stretch
from .profile import Profile
from .settings import unmodelled
from .terms import Terms
from .training import SimulatedOutcome, SimulatedTraining

BAMBOO, WHOLE = "bamboo", "bamboo-whole-stages"
RESTARTING, DROPPING = "checkpoint-restart", "sample-dropping"
ON_DEMAND, LIMIT = "on-demand", "limit"
POLICIES = (
    BAMBOO,
    *(f"{BAMBOO}:{mode.value}" for mode in RedundancyMode),
    WHOLE,
    RESTARTING,
    DROPPING,
    ON_DEMAND,
    LIMIT,
)

#: 97.5th percentiles of Student's distribution by degrees of freedom from 1 on.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Figures(BaseModel):
    """The figures of a policy on a market."""

    model_config = ConfigDict(frozen=True)

    nodes: float = Field(description="rented, on average")
    samples: float = Field(description="of committed steps, each once")
    samples_per_s: float = Field(description="over the whole time")
    limit_share: float | None = Field(description="samples by the limit of the rented nodes; null without any")
    goodput: float | None = Field(description="productive share of the members' seconds, as of `bamboo goodput`")
    node_goodput: float | None = Field(description="the same of the seconds of all nodes, members or not")
    lost_s: float = Field(description="member-seconds of work that was lost, see `categories`")
    redone_s: float = Field(description="member-seconds of passes computed again by survivors")
    restarts: float = Field(description="from a checkpoint, or to take nodes in")
    cost_per_million: float | None = Field(description="$ per million samples; null without any. Over seeds: $ of all")
    pause_s: float = Field(description="mean time that a loss delays the interrupted iteration by, without restarts")
    losses: float
    plans: float = Field(description="changes of plan")
    copied_gb: float = Field(description="states copied between members")
    refused: float = Field(description="plans not used, since members have not the memory for them")
    node_seconds: float = Field(description="of all nodes")
    outside_s: float = Field(description="of these, while a node was no member: starting, or without a place")
    categories: dict[Category, float] = Field(description="member-seconds; with outside_s they are node_seconds")


class PolicyReport(Figures):
    """Means over the seeds, costs those of all samples; ``range``: their 95 % confidence, where all seeds have them."""

    range: dict[str, tuple[float, float]] | None = None
    idle: str | None = Field(None, description="why the job did not train at the end, and in how many of the seeds")


class Memory(BaseModel):
    """The memory of a device, in bytes, in the full job."""

    mode: RedundancyMode = Field(description="redundancy.mode of the settings; there are no replicas in none")
    device: int | None = Field(description="null: not looked at")
    without: float = Field(description="stock DeepSpeed, the same pipelines and stages")
    replicas: float = Field(description="in this mode, with replicas of all stages where it has any")
    fits: bool = Field(description="in this mode")
    least_members: int | None = Field(description="fewest members on which the job fits in this mode; null: none")


class Report(BaseModel):
    """The output of ``bamboo simulate --json``."""

    profile: str
    pipelines: int
    stages: int
    micro_batches: int
    seconds: float
    seeds: int
    nodes: tuple[float, int] = Field(description="mean and greatest number of nodes, of the policy that rents most")
    losses: float = Field(description="of these nodes")
    memory: Memory
    unmodelled: list[str] = Field(description="settings other than the default that simulations know nothing of")
    policies: dict[str, PolicyReport]


@dataclass
class Simulation:
    """A simulation: its nodes, its model and its assumptions.

    Args:
        market: by seed.
        profile: of the model.
        terms: what is assumed.
        config: settings of the job.
        pipelines, stages: its size; ``None``: the profile's, as many pipelines as there are nodes for on
            average.
        limit: nodes that a job rents at most; ``None``: as many as its policy can use, see :meth:`usable`.
        reshapes: stock DeepSpeed's checkpoints can be made such of another number of stages; else its jobs have whole
            pipelines of the job's own stages.
        known: stock DeepSpeed on the same devices, with the arrangements that it has found.
    """

    market: Callable[[int], Market]
    profile: Profile
    terms: Terms = field(default_factory=Terms)
    config: BambooConfig = field(default_factory=BambooConfig)
    pipelines: int | None = None
    stages: int | None = None
    limit: int | None = None
    reshapes: bool = True
    known: Stock | None = None

    def __post_init__(self) -> None:
        self.stages = self.stages or self.profile.stages
        first = self.market(0)
        self.pipelines = (
            self.pipelines
            or self.profile.pipelines
            or self._most(int(first.node_seconds / first.seconds) // self.stages)
        )
        self.stock = self.known or Stock(self.profile, self.terms, None if self.reshapes else self.size)
        self._paces: dict[tuple[RedundancyMode, bool], Pace] = {}
        self._stretches: dict[int, Stretch | None] = {}
        self.pace(self.config.redundancy.mode)

    def but(self, **changes: Any) -> Simulation:
        """The same, on the same devices, but for these fields."""
        return replace(self, **changes, known=self.stock)

    def saving(self, checkpoint_s: float | None) -> Simulation:
        """The same with so many seconds between checkpoints; ``None``: as it is."""
        return (
            self
            if checkpoint_s is None
            else self.but(terms=self.terms.model_copy(update={"checkpoint_s": checkpoint_s}))
        )

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
        """The pace of the job in a mode, with stages whole or divided as the settings have it."""
        if (mode, whole) not in self._paces:
            setting = self.config.topology.blocks
            blocks = 1 if whole else AUTO if setting == "auto" else setting
            self._paces[mode, whole] = Pace(
                *(self.profile, self.terms, *self.size, mode, blocks),
                sync_every=self.config.redundancy.sync_every,
                parked=self.config.overridden({"redundancy.mode": mode}).redundancy.parks,
            )
        return self._paces[mode, whole]

    def rented(self, seed: int, policy: str = BAMBOO) -> Market:
        """The nodes that the job of a policy rents."""
        market = self.market(seed)
        return market.rented(self.limit or self.usable(policy, market.most))

    def usable(self, policy: str, most: int) -> int:
        """Nodes that the job of a policy can use, of ``most``.

        Stock DeepSpeed's job is the cheapest that is as fast as any on the nodes that this package's job can use.
        """
        pipelines, stages = self.size
        roles = pipelines * stages
        if policy == DROPPING:
            return roles
        if policy not in (RESTARTING, ON_DEMAND, LIMIT):
            return 2 * roles  # a role has an owner and a shadow
        own, fastest = self.stock.best(min(most, 2 * roles)), self.stock.best(most)
        wanted = max(own.speed if own else 0.0, self.profile.global_batch / self._planned_s(most)) if most else 0.0
        found = [each for each in map(self.stock.best, range(1, most + 1)) if each is not None]
        enough = [each for each in found if each.speed >= wanted]
        best = min(enough, key=lambda each: each.size / each.speed) if enough else fastest
        stock = best.size if best else most
        return max(stock, 2 * roles) if policy == LIMIT else stock

    def job(self, policy: str, market: Market, seed: int) -> SimulatedTraining:
        """The job of a policy, one that is simulated: not on-demand, nor limit."""
        if policy == RESTARTING:
            return CheckpointRestart(market, self.stock, self.terms, seed)
        if policy == DROPPING:
            return SampleDropping(market, self.stock, self.terms, seed, *self.size)
        name, _, mode = policy.partition(":")
        config = self.config.overridden({"redundancy.mode": RedundancyMode(mode)}) if mode else self.config
        pace = self.pace(config.redundancy.mode, whole=name == WHOLE)
        return BambooJob(market, pace, self.terms, config, seed)

    def run(self, policies: Sequence[str], seeds: int = 1) -> tuple[Report, dict[str, SimulatedOutcome]]:
        """The report, and what each policy's job has done with the first seed."""
        for policy in policies:
            if policy not in POLICIES:
                raise ConfigError(f"--policy {policy}: there is none of this name; there are {', '.join(POLICIES)}")
        found: dict[str, list[Figures]] = {policy: [] for policy in policies}
        outcomes: dict[str, SimulatedOutcome] = {}
        idle: dict[str, list[str]] = {policy: [] for policy in policies}
        markets = []
        for seed in range(seeds):
            rented = {policy: self.rented(seed, policy) for policy in policies}
            markets.append(max(rented.values(), key=lambda market: market.node_seconds))
            jobs = {p: self.job(p, market, seed) for p, market in rented.items() if p not in (ON_DEMAND, LIMIT)}
            done = {policy: job.simulate() for policy, job in jobs.items()}
            speeds = self._speeds(rented.values(), jobs.values())
            for policy, market in rented.items():
                limit = _limit_samples(market, self.terms.start_s, speeds)
                if policy in done:
                    found[policy].append(self._figures(done[policy], market, limit))
                    outcomes.setdefault(policy, done[policy])
                    idle[policy] += [why] if (why := done[policy].idle) else []
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
                max(market.most for market in markets),
            ),
            losses=fmean(sum(c.what == "remove" for c in m.changes) for m in markets),
            memory=self.memory(),
            unmodelled=unmodelled(self.config),
            policies={policy: _mean(each, self._price(policy), idle[policy]) for policy, each in found.items()},
        )
        return report, outcomes

    def alone(self, policy: str, seeds: int = 1) -> PolicyReport:
        """The figures of one policy's job, without the limit, for which the planner takes long.

        Args:
            policy: one that is simulated: not on-demand, nor limit.
            seeds: how many.
        """
        markets = [self.rented(seed, policy) for seed in range(seeds)]
        done = [self.job(policy, market, seed).simulate() for seed, market in enumerate(markets)]
        figures = [self._figures(each, market, 0.0) for each, market in zip(done, markets, strict=True)]
        return _mean(figures, self._price(policy), [each.idle for each in done if each.idle])

    def on_demand(self, nodes: int) -> PolicyReport:
        """The figures of the fastest job of stock DeepSpeed on so many nodes on demand, where one fits on them."""
        best, seconds, price = self.stock.best(nodes), self.market(0).seconds, self.terms.on_demand_price
        assert best is not None
        return _mean([_steady(best.speed * seconds, seconds, 0.0, best.size * seconds, price)], price, [])

    # -- the limit ----------------------------------------------------------------------------------------

    def _speeds(self, markets: Collection[Market], jobs: Iterable[SimulatedTraining]) -> list[float]:
        """The samples per second of the fastest job without losses, by number of nodes.

        That is the fastest of stock DeepSpeed's arrangements, of the job that the planner makes of them, without what
        replicas cost, and of all plans of so many members that a simulated job had.
        """
        most = max(market.most for market in markets)
        met: dict[int, float] = {}
        for job in jobs:
            for members, seconds in job.speeds.items():
                met[members] = min(seconds, met.get(members, math.inf))
        counts = {count for market in markets for *_, count in market.counts(self.terms.start_s)}
        counts |= {market.most for market in markets}
        speeds = [0.0]
        for members in range(1, most + 1):
            found = [speeds[-1]]
            if stock := self.stock.best(members):
                found.append(stock.speed)
            if members in counts:
                found.append(self.profile.global_batch / self._planned_s(members))
            if members in met:
                found.append(self.profile.global_batch / met[members])
            speeds.append(max(found))
        return speeds

    def stretch(self, members: int) -> Stretch | None:
        """An iteration of this package's job by the planner's plan of so many members; ``None``: it does not fit."""
        if members not in self._stretches:
            pace = self.pace(self.config.redundancy.mode)
            plan = planned(pace, members, self.config) if members else None
            self._stretches[members] = Stretch(pace, plan) if plan is not None and pace.footprint.fits(plan) else None
        return self._stretches[members]

    def _planned_s(self, members: int) -> float:
        stretch = self.stretch(min(members, self.usable(BAMBOO, members)))
        return math.inf if stretch is None else stretch.bare_s

    def _undisturbed(self, policy: str, market: Market, limit: float, speeds: Sequence[float]) -> Figures:
        node_seconds, samples = market.node_seconds, limit
        if policy == ON_DEMAND:
            # The fewest nodes that are as fast as all of them.
            speed = speeds[market.most]
            node_seconds, samples = speeds.index(speed) * market.seconds, speed * market.seconds
        return _steady(samples, market.seconds, limit, node_seconds, self._price(policy))

    def _price(self, policy: str) -> float:
        return self.terms.on_demand_price if policy == ON_DEMAND else self.terms.spot_price

    # -- figures ------------------------------------------------------------------------------------------

    def _figures(self, done: SimulatedOutcome, market: Market, limit: float) -> Figures:
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
            plans=done.plans,
            copied_gb=done.copied_gb,
            refused=done.refused,
            node_seconds=seconds,
            outside_s=done.outside_s,
            categories=categories,
        )

    def need(self, members: int) -> float:
        """Bytes of a device, of the planner's plan of so many members."""
        pace = self.pace(self.config.redundancy.mode)
        return pace.footprint.need(planned(pace, members, self.config))

    def memory(self) -> Memory:
        """The memory that devices need."""
        pipelines, stages = self.size
        full, device = self.need(pipelines * stages), self.profile.memory_bytes
        # With fewer members none needs less.
        low, least = 1, pipelines * stages
        while low < least:
            middle = (low + least) // 2
            if device is None or self.need(middle) <= device:
                least = middle
            else:
                low = middle + 1
        return Memory(
            mode=self.config.redundancy.mode,
            device=device,
            without=self.stock.need(pipelines, stages, self.profile.micro_batches(pipelines)),
            replicas=full,
            fits=device is None or full <= device,
            least_members=least if device is None or full <= device else None,
        )


def _rates(samples: float, seconds: float, limit: float, node_seconds: float, price: float) -> dict[str, float | None]:
    return {
        "nodes": node_seconds / seconds,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "limit_share": samples / limit if limit else None,
        "cost_per_million": _cost(samples, node_seconds, price),
    }


def _steady(samples: float, seconds: float, limit: float, node_seconds: float, price: float) -> Figures:
    """The figures of a job that loses nothing."""
    return Figures(
        **_rates(samples, seconds, limit, node_seconds, price),
        goodput=1.0,
        node_goodput=1.0,
        **dict.fromkeys(("lost_s", "redone_s", "restarts", "pause_s", "losses"), 0.0),
        **dict.fromkeys(("plans", "copied_gb", "refused", "outside_s"), 0.0),
        node_seconds=node_seconds,
        categories={Category.PRODUCTIVE: node_seconds},
    )


def _cost(samples: float, node_seconds: float, price: float) -> float | None:
    """$ per million samples."""
    return node_seconds / 3600 * price / samples * 1e6 if samples else None


def _limit_samples(market: Market, start_s: float, speeds: Sequence[float]) -> float:
    return sum((end - begin) * speeds[count] for begin, end, count in market.counts(start_s))


def _mean(each: Sequence[Figures], price: float, idle: Sequence[str]) -> PolicyReport:
    """The means over all seeds; ``idle``: why jobs did not train at the end, of the seeds that have a reason."""
    values: dict[str, object] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for name in Figures.model_fields:
        if name == "categories":
            keys = dict.fromkeys(key for figures in each for key in figures.categories)
            values[name] = {key: fmean(figures.categories.get(key, 0.0) for figures in each) for key in keys}
            continue
        known = [value for figures in each if (value := getattr(figures, name)) is not None]
        values[name] = fmean(known) if known else None
        if name == "cost_per_million":
            # What a seed without any sample costs is paid, too. The range is that of a ratio of means (delta method).
            samples = fmean(figures.samples for figures in each)
            cost = _cost(samples, fmean(figures.node_seconds for figures in each), price)
            values[name] = cost
            if cost is not None:
                paid = [(f.samples / samples, own) for f in each if (own := f.cost_per_million) is not None]
                known = [cost + share * (own - cost) for share, own in paid]
        if len(known) == len(each) > 1:
            times = _STUDENT[min(len(known) - 1, len(_STUDENT)) - 1]
            half = times * stdev(known) / math.sqrt(len(known))
            ranges[name] = fmean(known) - half, fmean(known) + half
    why = idle[0] if idle else None
    if why and len(each) > 1:
        why += f" (in {len(idle)} of {len(each)} seeds)"
    return PolicyReport.model_validate({**values, "range": ranges or None, "idle": why})
