"""Estimates: how fast a setup is on the nodes that there mostly are, and what losses take of that.

They decide what is simulated, and nothing else. Speeds are those of the planner's plans for so many members; what
losses cost is taken by rule of thumb: more than half of an iteration (``docs/guides/simulating.md``) where somebody
holds the state, a restart where nobody does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..config import BambooConfig, RedundancyMode
from ..simulate.bamboo import planned
from ..simulate.baselines import young_daly_s
from ..simulate.market import Market
from ..simulate.pace import AUTO, Pace, Stretch
from ..simulate.terms import Terms
from ..topology import Plan
from .offers import Offer
from .setups import Blocks, Setup, Shape

#: Share of an iteration that a loss costs where there are replicas.
_LOSS = 0.6
#: Quantiles of the number of nodes, over time, at which speeds are looked at.
_QUANTILES = (1 / 6, 1 / 2, 5 / 6)


@dataclass(frozen=True)
class Estimate:
    """What a setup may come to, without a simulation.

    Attributes:
        samples_per_s: over the whole time.
        cost_per_million: $ per million samples; infinite without any.
    """

    samples_per_s: float
    cost_per_million: float


class Screen:
    """Estimates of setups on one instance type.

    Args:
        offer: the instance type.
        config: settings that setups do not say otherwise.
    """

    def __init__(self, offer: Offer, config: BambooConfig) -> None:
        self._offer, self._config = offer, config
        self._market = offer.market(0)
        self._pace = lru_cache(maxsize=None)(self._make_pace)
        self._iteration = lru_cache(maxsize=None)(self._iteration_s)
        self._rented = lru_cache(maxsize=None)(self._market.rented)

    def _make_pace(self, pipelines: int, stages: int, mode: RedundancyMode, blocks: Blocks) -> Pace:
        most = AUTO if blocks == "auto" else blocks
        return Pace(self._offer.profile, self._offer.terms, pipelines, stages, mode, most)

    def pace(self, setup: Setup) -> Pace:
        """The speed of a job with ``setup``."""
        return self._pace(setup.pipelines, setup.stages, setup.mode, setup.blocks)

    def plan(self, setup: Setup, members: int) -> Plan:
        """What the planner makes of so many members."""
        return planned(self.pace(setup), members, setup.config(self._config))

    def need(self, shape: Shape, mode: RedundancyMode) -> float:
        """Bytes of a device if each member has one role."""
        setup = Setup(**shape.model_dump(), mode=mode, blocks=1, nodes=shape.size)
        return self.pace(setup).need(self.plan(setup, setup.size))

    def overhead(self, setup: Setup) -> float:
        """By which share iterations without losses are longer than without redundancy, with a member for each role."""
        stretch = Stretch(self.pace(setup), self.plan(setup, setup.size))
        return stretch.seconds / stretch.bare_s - 1

    def _iteration_s(self, pipelines: int, stages: int, mode: RedundancyMode, blocks: Blocks, members: int) -> float:
        shape = {"instance": self._offer.instance.name, "pipelines": pipelines, "stages": stages}
        setup = Setup(**shape, mode=mode, blocks=blocks, nodes=members)
        pace, plan = self.pace(setup), self.plan(setup, members)
        return Stretch(pace, plan).seconds if pace.fits(plan) else float("inf")

    def iteration_s(self, setup: Setup, members: int) -> float:
        """Seconds of an iteration of so many members; infinite where it does not fit."""
        if not members:
            return float("inf")
        return self._iteration(setup.pipelines, setup.stages, setup.mode, setup.blocks, members)

    def estimate(self, setup: Setup) -> Estimate:
        """What ``setup`` may come to."""
        market, terms = self._rented(setup.nodes), self._offer.terms
        counts = _quantiles(market, terms.start_s)
        times = [self.iteration_s(setup, count) for count in counts]
        speed = sum(self._offer.profile.global_batch / each for each in times) / len(times)
        usable = max(0.0, 1 - market.losses * self._loss_s(setup, min(times)) / market.seconds)
        samples_per_s = speed * usable
        dollars = market.node_seconds / 3600 * terms.spot_price
        samples = samples_per_s * market.seconds
        return Estimate(samples_per_s, dollars / samples * 1e6 if samples else float("inf"))

    def _loss_s(self, setup: Setup, iteration_s: float) -> float:
        terms = self._offer.terms
        if setup.mode.replicas:
            return terms.detection_s + terms.rebuild_s + _LOSS * iteration_s
        if setup.pipelines > 1:  # the same stage of another pipeline is taken over, and all of it is computed again
            return terms.detection_s + terms.rebuild_s + iteration_s
        return terms.restart_s + checkpoint_s(self.pace(setup), self._market, terms) / 2


def _quantiles(market: Market, start_s: float) -> list[int]:
    """Numbers of nodes at :data:`_QUANTILES` of the time."""
    counts = sorted((count, end - begin) for begin, end, count in market.counts(start_s))
    found, passed, left = [], 0.0, [share * market.seconds for share in _QUANTILES]
    for count, seconds in counts:
        passed += seconds
        while left and passed >= left[0] - 1e-9:
            found.append(count)
            left.pop(0)
    return found or [0]


def checkpoint_s(pace: Pace, market: Market, terms: Terms, restarts: float | None = None) -> float:
    """Seconds between checkpoints by Young and Daly, not before the last one is written.

    Args:
        pace: of the job.
        market: its nodes.
        terms: what is assumed.
        restarts: from checkpoints, as a simulation has found; ``None``: as many as losses.
    """
    state = max(pace.parameters) * pace.state.copied
    between_s = market.seconds / max(1.0, market.losses if restarts is None else restarts)
    optimum = young_daly_s(state / (terms.host_gb_s * 1e9), between_s)
    return max(optimum, state / (terms.storage_gb_s * 1e9))
