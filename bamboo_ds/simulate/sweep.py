"""The sweep of ``bamboo simulate --sweep``: every policy in its best arrangement, and which is the cheapest.

::

    arrangements on all instance types     by the closed form of stock pipelines; those that do not fit into a device's
      the best and the fastest             memory are told, with what they need
        simulated in each mode             with one seed, checkpoints at the interval of Young and Daly for the restarts
          the best of each mode varied     with whole stages, with spare nodes
      sample dropping alike; checkpoint-restart with several numbers of nodes; on demand by the closed form
        the best of each policy            simulated with all seeds, at the same interval
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from ..config import RedundancyMode
from ..errors import ConfigError
from ..state.intervals import young_daly_s
from .profile import GIB, Profile
from .results import Arranged, Ranked, Rented, Setup, Swept, paste, settings_of, verdict
from .run import BAMBOO, DROPPING, LIMIT, ON_DEMAND, RESTARTING, Simulation
from .settings import unmodelled

#: Modes that are tried. Eager backward passes are simulated as eager forward passes, and take more memory.
MODES = (RedundancyMode.NONE, RedundancyMode.LAZY, RedundancyMode.EAGER_FORWARD)
#: Policies that are tried.
SWEPT = (*(f"{BAMBOO}:{mode.value}" for mode in MODES), RESTARTING, DROPPING, ON_DEMAND)
#: Share of the fastest setup's speed that others have to reach where nothing else is asked for.
SHARE = 0.8
#: Numbers of stages that are tried: all small ones, then fewer and fewer.
_STAGES = (*range(2, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
#: Arrangements of each policy that are simulated: so many that are fast enough, so many at most.
_ARRANGED, _MOST = 4, 7
#: By the closed form arrangements may be slower than is asked for, by this share.
_SLACK = 0.9
#: Members that are rented beyond those that the roles need, as a share of these. More than one cannot compute.
_SPARES = (0.25, 1.0)
#: Roles of a job of this package are at most so many times the nodes: a job with fewer members than roles evens out
#: what is left to do, and one with more needs blocks to do so.
_ROLES = 1.5
#: Of all nodes so many shares are tried as what checkpoint-restart rents at most.
_SHARES = 8


@dataclass(eq=False)
class Sweep:
    """The search for the setup of lowest cost per sample.

    Args:
        types: what is simulated, by instance type, on as many nodes as there are; all of one model and configuration.
        policies: that are tried, of :data:`SWEPT`.
        pipelines, stages: the only ones that are wanted; ``None``: any.
        seeds: of the best of each policy.
        at_least: samples per second; ``None``: :data:`SHARE` of those of the fastest setup.
        checkpoint_s: seconds between checkpoints; ``None``: chosen.
        tell: is told how far the sweep is.
    """

    types: Mapping[str, Simulation]
    policies: Sequence[str] = SWEPT
    pipelines: int | None = None
    stages: int | None = None
    seeds: int = 3
    at_least: float | None = None
    checkpoint_s: float | None = None
    tell: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._found: dict[Setup, Ranked] = {}
        self._unfit: dict[str, float] = {}
        self._job = lru_cache(maxsize=None)(self._job_of)

    def run(self) -> Swept:
        """Carries the search out.

        Raises:
            ConfigError: the only pipelines or stages that are wanted are those of no job.
        """
        arranged = self._arranged()
        for policy in self.policies:
            if policy in (RESTARTING, ON_DEMAND):
                for setup in self._stock(policy):
                    self._simulate(setup, 1)
            else:
                self._climb(policy, arranged[policy])
        while left := [each for each in self._firsts().values() if each.seeds < self.seeds]:
            for each in left:
                self._simulate(each.setup, self.seeds)
        ranking, firsts = self._ranking(), self._firsts()
        own = [each for each in ranking if each.setup.mode]
        others = [each for each in firsts.values() if not each.setup.mode]
        best = own[0] if own and own[0].cost is not None else None
        whole = next(iter(self.types.values()))
        worth_it, sentence = verdict(best, others, self._unfit)
        return Swept(
            profile=whole.profile.name,
            hours=max(each.market(0).seconds for each in self.types.values()) / 3600,
            rented={name: self._rented(each) for name, each in self.types.items()},
            seeds=self.seeds,
            at_least=self._wanted(),
            share=SHARE if self.at_least is None else None,
            simulated=len(self._found),
            ranking=own,
            alternatives=others,
            worth_it=worth_it,
            verdict=sentence,
            paste=None if best is None else paste(best, whole.config, self.types[best.setup.instance].profile),
            unfit=self._unfit,
            unmodelled=unmodelled(whole.config),
        )

    def _rented(self, whole: Simulation) -> Rented:
        markets, memory = [whole.market(seed) for seed in range(self.seeds)], whole.profile.memory_bytes
        hours = sum(market.node_seconds for market in markets) / 3600
        return Rented(
            mean=fmean(market.node_seconds / market.seconds for market in markets),
            most=markets[0].most,
            lost=sum(change.what == "remove" for market in markets for change in market.changes) / hours,
            memory_gib=None if memory is None else memory / GIB,
        )

    # -- what is best -------------------------------------------------------------------------------------

    def _least(self, speeds: Iterable[float]) -> float:
        """Samples per second that are asked for, where these are what there is."""
        return SHARE * max(speeds, default=0.0) if self.at_least is None else self.at_least

    def _wanted(self) -> float:
        return self._least(each.figures.samples_per_s for each in self._found.values() if each.setup.mode)

    def _ranking(self) -> list[Ranked]:
        """All that was simulated, by rank."""
        wanted = self._wanted()
        every = [(each, each.figures.samples_per_s >= wanted) for each in self._found.values()]
        found = [each.model_copy(update={"fast_enough": enough}) for each, enough in every]
        return sorted(found, key=lambda each: _rank(each.figures.samples_per_s, each.cost, wanted))

    def _firsts(self) -> dict[str, Ranked]:
        """The best of each policy, by rank."""
        found: dict[str, Ranked] = {}
        for each in self._ranking():
            found.setdefault(each.setup.policy, each)
        return found

    # -- what is tried ------------------------------------------------------------------------------------

    def _arranged(self) -> dict[str, list[Arranged]]:
        """The arrangements by policy, in the order in which they are simulated: the fastest, then by cost.

        By the closed form of stock pipelines, on as many of the nodes that there are as each can use.
        """
        speeds: dict[Arranged, tuple[float, float | None]] = {}
        for name, whole in self.types.items():
            market = whole.market(0)
            most = math.floor(_ROLES * market.most)
            for pipelines, stages in arrangements(whole.profile, most, self.pipelines, self.stages):
                stock, arranged = whole.stock.arrangement(pipelines, stages), Arranged(name, pipelines, stages)
                share = market.rented(arranged.size).node_seconds / market.seconds / arranged.size
                price = arranged.size * whole.terms.spot_price
                speeds[arranged] = (stock.speed * share, price / stock.speed) if stock else (0.0, None)
        wanted = _SLACK * self._least(speed for speed, _ in speeds.values())
        ranked = sorted(speeds, key=lambda each: _rank(*speeds[each], wanted))
        found = {}
        for policy in self.policies:
            able = [each for each in ranked if self._fits(policy, each)]
            # Where no speed is asked for the fastest says what is fast enough.
            fastest = sorted(able, key=lambda each: speeds[each][0])[-1:]
            of_types = {each.instance: each for each in reversed(able)}.values()
            found[policy] = list(dict.fromkeys([*fastest, *of_types, *able]))
        return found

    def _fits(self, policy: str, arranged: Arranged) -> bool:
        """Whether devices have the memory, with as many members as can have a role; jobs of other policies need a
        node for each, and tell it themselves.
        """
        whole = self.types[arranged.instance]
        setup = Setup(policy=policy, blocks=1, nodes=self._nodes(arranged), **arranged._asdict())
        if setup.mode is None:
            return setup.nodes == arranged.size
        if whole.profile.memory_bytes is None:
            return True
        need = self._need(setup)
        if need > whole.profile.memory_bytes:
            self._unfit[f"{arranged}, {setup.mode.value}"] = need / GIB
        return need <= whole.profile.memory_bytes

    def _need(self, setup: Setup) -> float:
        """Bytes of a device with its roles, and its replicas if there are any, which it is not bounded by."""
        whole, arranged = self.types[setup.instance], setup.arranged
        size = {"pipelines": arranged.pipelines, "stages": arranged.stages}
        return whole.but(config=setup.config(whole.config), **size).need(setup.members)

    def _nodes(self, arranged: Arranged) -> int:
        """The number of nodes that can have a role."""
        return min(arranged.size, self.types[arranged.instance].market(0).most)

    def _climb(self, policy: str, among: Sequence[Arranged]) -> None:
        """Simulates arrangements in a policy, then the best of them with whole stages, and with spare nodes."""
        blocks = None if policy == DROPPING else "auto"
        for arranged in among[:_MOST]:
            if sum(each.fast_enough for each in self._ranking() if each.setup.policy == policy) >= _ARRANGED:
                break
            nodes = self._nodes(arranged)
            self._simulate(Setup(policy=policy, blocks=blocks, nodes=nodes, **arranged._asdict()), 1)
        if blocks is not None and among:
            self._simulate(self._firsts()[policy].setup.model_copy(update={"blocks": 1}), 1)
        for share in _SPARES if among else ():
            best = self._firsts()[policy].setup
            nodes = min(self.types[best.instance].market(0).most, round(best.arranged.size * (1 + share)))
            self._simulate(best.model_copy(update={"nodes": nodes}), 1)

    def _stock(self, policy: str) -> Iterator[Setup]:
        """Jobs of stock DeepSpeed, which takes the fastest arrangement of the nodes by itself."""
        for name, whole in self.types.items():
            most = whole.market(0).most
            if policy == RESTARTING:
                own = {each.nodes for each in self._found if each.instance == name}
                for nodes in sorted({round(most * share / _SHARES) for share in range(1, _SHARES + 1)} - {0} | own):
                    yield Setup(policy=policy, instance=name, nodes=nodes)
            else:
                found = {best.size: best for n in range(1, most + 1) if (best := whole.stock.best(n)) is not None}
                for nodes, best in found.items():
                    size = {"pipelines": best.pipelines, "stages": best.stages}
                    yield Setup(policy=policy, instance=name, nodes=nodes, **size)

    # -- simulations --------------------------------------------------------------------------------------

    def _simulate(self, setup: Setup, seeds: int) -> None:
        """Finds what ``setup`` comes to; with one seed at first, which says at which interval checkpoints are made."""
        known = self._found.get(setup)
        if known is not None and known.seeds >= seeds:
            return
        self.tell(f"simulating {setup}" + (f" with {seeds} seeds" if seeds > 1 else ""))
        if setup.policy == ON_DEMAND:
            figures = self.types[setup.instance].on_demand(setup.nodes)
            self._found[setup] = Ranked(setup=setup, seeds=self.seeds, figures=figures)
            return
        job = self._job(setup)
        if known is not None:
            figures = job.saving(known.checkpoint_s).alone(setup.policy, seeds)
            self._found[setup] = known.model_copy(update={"seeds": seeds, "figures": figures})
        elif setup.policy == RESTARTING:
            self._found[setup] = Ranked(setup=setup, seeds=seeds, figures=job.alone(setup.policy))
        else:
            interval_s = self._interval_s(setup, None)
            figures = job.saving(interval_s).alone(setup.policy)
            if (right_s := self._interval_s(setup, figures.restarts)) != interval_s:
                interval_s, figures = right_s, job.saving(right_s).alone(setup.policy)
            stretch = job.stretch(setup.members) if setup.mode else None
            self._found[setup] = Ranked(
                setup=setup,
                seeds=1,
                figures=figures,
                overhead=None if stretch is None else stretch.seconds / stretch.bare_s - 1,
                need_gib=self._need(setup) / GIB if setup.mode else None,
                checkpoint_s=interval_s,
                checkpoint_steps=max(1, round(interval_s / self._iteration_s(setup))),
            )

    def _job_of(self, setup: Setup) -> Simulation:
        whole = self.types[setup.instance]
        config = settings_of(setup, whole.config, whole.profile)
        return whole.but(config=config, pipelines=setup.pipelines or 1, stages=setup.stages or 1, limit=setup.nodes)

    def _iteration_s(self, setup: Setup) -> float:
        """Seconds of an iteration of as many members as can own a role; infinite where that does not fit."""
        if setup.mode is None:
            stock = self.types[setup.instance].stock.arrangement(*setup.arranged[1:])
            return math.inf if stock is None else stock.seconds
        stretch = self._job(setup).stretch(setup.members)
        return math.inf if stretch is None else stretch.seconds

    def _interval_s(self, setup: Setup, restarts: float | None) -> float:
        """Seconds between checkpoints by Young and Daly; not before the last one is written, or an iteration is done.

        Args:
            setup: of the job.
            restarts: from checkpoints, as a simulation has found; ``None``: as many as losses where nobody else holds a
                lost state, else none.
        """
        if self.checkpoint_s is not None:
            return self.checkpoint_s
        stock, market, size = self.types[setup.instance].stock, self._job(setup).rented(0), setup.arranged[1:]
        held = setup.arranged.pipelines > 1 or (setup.mode is not None and setup.mode.replicas)
        count = restarts if restarts is not None else 0 if held else market.losses
        optimum_s = young_daly_s(stock.copy_s(*size), market.seconds / max(1.0, count))
        iteration_s = self._iteration_s(setup)
        return max(optimum_s, stock.load_s(*size), iteration_s if iteration_s < math.inf else 0.0)


def swept_policies(names: Iterable[str]) -> list[str]:
    """The policies of a sweep, of those of ``--policy``: three modes of this package, and no limit.

    Raises:
        ConfigError: a sweep does not try one of these.
    """
    found: list[str] = []
    for name in names:
        found += [each for each in SWEPT if name in (each, each.partition(":")[0])]
        if name not in (BAMBOO, LIMIT, *SWEPT):
            raise ConfigError(f"--policy {name}: a sweep does not try it; it tries {', '.join((BAMBOO, *SWEPT))}")
    return sorted(set(found), key=SWEPT.index)


def arrangements(profile: Profile, most: int, pipelines: int | None, stages: int | None) -> list[tuple[int, int]]:
    """Pipelines and stages that so many roles, the layers and the samples allow.

    Args:
        profile: of the model.
        most: roles.
        pipelines, stages: the only ones that are wanted; ``None``: any.

    Raises:
        ConfigError: those that are wanted are not allowed.
    """
    layers, whole = len(profile.each), profile.global_batch // profile.micro_batch
    found = [
        (copies, count)
        for count in (sorted({*_STAGES, profile.stages}) if stages is None else [stages])
        for copies in (range(1, most // count + 1) if pipelines is None else [pipelines])
        if 2 <= count <= layers and copies * count <= most
        # A pipeline of fewer micro-batches than stages idles most of the time.
        if profile.global_batch % (profile.micro_batch * copies) == 0 and whole // copies >= count
    ]
    if not found and (pipelines or stages):
        raise ConfigError(
            f"--pipelines, --stages: no job has these: there are {most} roles at most and {layers} layers, and"
            f" pipelines share {whole} micro-batches evenly, of which each has no fewer than stages"
        )
    return found


def _rank(samples_per_s: float, cost: float | None, wanted: float) -> tuple[bool, bool, float]:
    """The rank of a setup: fast enough ones by cost, the others by speed, and last what trains nothing."""
    slow = samples_per_s < wanted
    return (True, True, 0.0) if cost is None else (False, slow, -samples_per_s if slow else cost)
