"""From all setups to few that are simulated, over several seeds.

::

    shapes of all instance types          that do not fit into a device's memory are left out, with what they need
      estimated in one mode               the best shapes
        x modes x blocks x spare nodes    estimated again: the finalists, among them the best of each mode and type
          simulated with one seed         checkpoints at the interval of Young and Daly for the losses,
          simulated again                 for the restarts that there were: only now setups are ranked
            the best, with all seeds      at the same intervals
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

from ..config import BambooConfig, RedundancyMode
from ..errors import ConfigError
from ..simulate.run import BAMBOO
from .advice import Advice, Alternative, Figures, Ranked, gib, paste, settings_of
from .alternatives import by_cost, checkpoint_restart, on_demand
from .offers import Offer
from .screen import Estimate, Screen, checkpoint_s
from .setups import MODES, Blocks, Rejected, Setup, Shape, setups, shapes
from .verdict import verdict

#: Share of the fastest setup's speed that others have to reach where nothing else is asked for.
SHARE = 0.8
#: Shapes that are looked at in all modes: of all instance types together, and of each.
_SHAPES, _OF_EACH = 6, 2
#: Setups that are simulated with all seeds.
_THOROUGHLY = 3


@dataclass(eq=False)
class Search:
    """The search for the setup of lowest cost per sample.

    Args:
        offers: instance types.
        config: settings that are not chosen here.
        pipelines, stages: the only ones that are wanted; ``None``: any.
        modes: that are tried.
        blocks: values of ``topology.blocks`` that are tried.
        finalists: setups that are simulated.
        seeds: of the best ones.
        at_least: samples per second; ``None``: :data:`SHARE` of those of the fastest setup.
        tell: is told how far the search is.
    """

    offers: Sequence[Offer]
    config: BambooConfig = field(default_factory=BambooConfig)
    pipelines: int | None = None
    stages: int | None = None
    modes: Sequence[RedundancyMode] = MODES
    blocks: Sequence[Blocks] = ("auto", 1)
    finalists: int = 8
    seeds: int = 3
    at_least: float | None = None
    tell: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._offers = {offer.instance.name: offer for offer in self.offers}
        self._screens = {name: Screen(offer, self.config) for name, offer in self._offers.items()}
        self._rejected: list[Rejected] = []
        self._estimates: dict[Setup, Estimate] = {}

    def run(self) -> Advice:
        """Search.

        Raises:
            ConfigError: the only pipelines or stages that are wanted are those of no job.
        """
        fitting = [each for offer in self.offers for each in self._fitting(offer)]
        if not fitting and (self.pipelines or self.stages) and all(each.need_gib is None for each in self._rejected):
            raise ConfigError("--pipelines, --stages: " + "; ".join(f"{r.what}: {r.why}" for r in self._rejected))
        chosen = self._chosen(fitting)
        self.tell(f"{len(self._estimates)} setups estimated; simulating {len(chosen)} of them")
        ranking = self._simulated(chosen)
        at_least = self._wanted([each.samples_per_s for each in ranking])
        alternatives = self._alternatives(ranking, at_least)
        best = ranking[0] if ranking and ranking[0].cost_per_million is not None else None
        seeds = range(self.seeds)
        markets = {name: [offer.market(seed) for seed in seeds] for name, offer in self._offers.items()}
        first = next(iter(self._offers.values()))
        return Advice(
            profile=first.profile.name,
            source=first.profile.source,
            hours=max(each[0].seconds for each in markets.values()) / 3600,
            nodes={
                name: (fmean(m.node_seconds / m.seconds for m in each), self._offers[name].most)
                for name, each in markets.items()
            },
            losses={
                name: sum(c.what == "remove" for m in each for c in m.changes)
                / sum(m.node_seconds / 3600 for m in each)
                for name, each in markets.items()
            },
            memory_gib={
                name: None if offer.profile.memory_bytes is None else gib(offer.profile.memory_bytes)
                for name, offer in self._offers.items()
            },
            seeds=self.seeds,
            at_least=at_least,
            share=SHARE if self.at_least is None else None,
            estimated=len(self._estimates),
            ranking=ranking,
            alternatives=alternatives,
            verdict=verdict(best, alternatives, self._rejected),
            paste=paste(best, self.config, self._offers[best.setup.instance].profile) if best is not None else None,
            rejected=self._rejected,
        )

    # -- what fits ----------------------------------------------------------------------------------------

    def _fitting(self, offer: Offer) -> list[tuple[Shape, list[RedundancyMode]]]:
        """Shapes on an instance type, with the modes that fit into its device's memory."""
        name, profile = offer.instance.name, offer.profile
        found = []
        for shape in shapes(name, profile, offer.market(0), self.pipelines, self.stages):
            if isinstance(shape, Rejected):
                self._rejected.append(shape)
                continue
            able = []
            for mode in self.modes:
                need = self._screens[name].need(shape, mode)
                if profile.memory_bytes is None or need <= profile.memory_bytes:
                    able.append(mode)
                    continue
                why = f"a device needs {gib(need):.1f} GiB and has {gib(profile.memory_bytes):.1f}"
                self._rejected.append(Rejected(what=f"{shape}, {mode.value}", why=why, need_gib=gib(need)))
            if able:
                found.append((shape, able))
        return found

    # -- estimates ----------------------------------------------------------------------------------------

    def _chosen(self, fitting: Sequence[tuple[Shape, list[RedundancyMode]]]) -> list[Setup]:
        """The finalists."""
        best: dict[Shape, Setup] = {}
        for shape, modes in fitting:
            tried = self._of(shape, modes[-1:], self.blocks[:1])
            best[shape] = min(tried, key=self._order(tried))
        order = self._order(best.values())
        ranked = sorted(best, key=lambda shape: order(best[shape]))
        kept = ranked[:_SHAPES]
        for name in self._offers:
            kept += [shape for shape in ranked if shape.instance == name and shape not in kept][:_OF_EACH]
        # Where no speed is asked for the fastest says what is fast enough.
        kept += sorted(set(ranked) - set(kept), key=lambda shape: -self._speed(best[shape]))[:1]
        able = dict(fitting)
        every = [each for shape in kept for each in self._of(shape, able[shape], self.blocks)]
        order = self._order(every)
        every.sort(key=order)
        chosen = list(dict.fromkeys(chain(every[:1], _firsts(every), sorted(every, key=lambda e: -self._speed(e))[:1])))
        # Of a shape that is good in one mode others are as well: they say little.
        chosen += [each for each in every if each not in chosen and each.shape not in {c.shape for c in chosen}]
        chosen += [each for each in every if each not in chosen]
        final, others = chosen[: self.finalists], chosen[self.finalists :]
        others += [setup for shape, setup in best.items() if shape not in kept]
        for setup in others:
            found = self._estimates[setup]
            cost = found.cost_per_million if found.cost_per_million < float("inf") else None
            told = {"what": str(setup), "shape": str(setup.shape), "why": "estimated behind those that were simulated"}
            self._rejected.append(Rejected(**told, cost_per_million=cost, samples_per_s=found.samples_per_s))
        return final

    def _of(self, shape: Shape, modes: Iterable[RedundancyMode], blocks: Iterable[Blocks]) -> list[Setup]:
        found = list(setups(shape, self._offers[shape.instance].market(0), modes, blocks))
        for setup in found:
            if setup not in self._estimates:
                self._estimates[setup] = self._screens[shape.instance].estimate(setup)
        return found

    def _speed(self, setup: Setup) -> float:
        return self._estimates[setup].samples_per_s

    def _order(self, among: Iterable[Setup]) -> Callable[[Setup], tuple[bool, float]]:
        wanted = self._wanted([self._speed(setup) for setup in among])

        def order(setup: Setup) -> tuple[bool, float]:
            slow = self._speed(setup) < wanted
            return slow, -self._speed(setup) if slow else self._estimates[setup].cost_per_million

        return order

    def _wanted(self, speeds: Sequence[float]) -> float:
        return SHARE * max(speeds, default=0.0) if self.at_least is None else self.at_least

    # -- simulations --------------------------------------------------------------------------------------

    def _simulated(self, chosen: Sequence[Setup]) -> list[Ranked]:
        """The finalists in their order; the first ones with all seeds."""
        found: dict[Setup, Ranked] = {}
        restarts: dict[Setup, float] = {}
        thorough: set[Setup] = set(chosen if self.seeds == 1 else ())
        for setup in chosen:
            self.tell(f"simulating {setup}")
            restarts[setup] = self._simulate(setup, 1, None).restarts
            found[setup] = self._simulate(setup, 1, restarts[setup])
        while True:
            wanted = self._wanted([each.samples_per_s for each in found.values()])
            ranking = [each.model_copy(update={"fast_enough": each.samples_per_s >= wanted}) for each in found.values()]
            ranking.sort(key=_rank)
            left = [each for each in ranking[:_THOROUGHLY] if each.setup not in thorough]
            if not left:
                return ranking
            for each in left:
                self.tell(f"simulating {each.setup} with {self.seeds} seeds")
                thorough.add(each.setup)
                found[each.setup] = self._simulate(each.setup, self.seeds, restarts[each.setup])

    def _simulate(self, setup: Setup, seeds: int, restarts: float | None) -> Ranked:
        """``setup``, simulated; ``restarts``: for which checkpoints are to be made, if known."""
        offer, screen = self._offers[setup.instance], self._screens[setup.instance]
        pace = screen.pace(setup)
        interval_s = checkpoint_s(pace, offer.market(0).rented(setup.nodes), offer.terms, restarts)
        full_s = screen.iteration_s(setup, setup.size)
        if full_s < float("inf"):
            interval_s = max(interval_s, full_s)
        steps = max(1, round(interval_s / full_s))
        saving = replace(offer, terms=offer.terms.model_copy(update={"checkpoint_s": interval_s}))
        size = setup.pipelines, setup.stages, setup.nodes
        report, _ = saving.simulation(settings_of(setup, self.config, offer.profile), *size).run([BAMBOO], seeds)
        estimate = self._estimates[setup].cost_per_million
        return Ranked(
            setup=setup,
            fast_enough=True,
            overhead=screen.overhead(setup),
            need_gib=gib(report.memory.replicas),
            least_members=report.memory.least_members,
            checkpoint_s=interval_s,
            checkpoint_steps=steps,
            estimate=estimate if estimate < float("inf") else None,
            **Figures.of(report.policies[BAMBOO], seeds),
        )

    def _alternatives(self, ranking: Sequence[Ranked], at_least: float) -> list[Alternative]:
        """What there is besides: on each instance type, the best first."""
        found: list[Alternative | None] = []
        for name, offer in self._offers.items():
            self.tell(f"simulating the alternatives on {name}")
            mine = [each.setup for each in ranking if each.setup.instance == name]
            found.append(on_demand(offer, at_least))
            size = (mine[0].pipelines, mine[0].stages) if mine else (1, 1)
            nodes = {each.nodes for each in mine}
            found.append(checkpoint_restart(offer, self.config, size, nodes, self.seeds, at_least))
        return sorted((each for each in found if each is not None), key=by_cost)


def _firsts(every: Sequence[Setup]) -> list[Setup]:
    """The first of each instance type, of each mode, and of each way to divide stages."""
    kinds: tuple[Callable[[Setup], object], ...] = (lambda e: e.instance, lambda e: e.mode, lambda e: e.blocks)
    found: list[Setup] = []
    for kind in kinds:
        by_kind: dict[object, Setup] = {}
        for each in every:
            by_kind.setdefault(kind(each), each)
        found += by_kind.values()
    return found


def _rank(each: Ranked) -> tuple[bool, bool, float]:
    """Those that are fast enough by cost, the others by speed, and what trained nothing at the end."""
    if each.cost_per_million is None:
        return True, True, 0.0
    return False, not each.fast_enough, each.cost_per_million if each.fast_enough else -each.samples_per_s
