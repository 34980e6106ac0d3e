"""What knowing the losses of a spot market beforehand would be worth: SIMULATED, see docs/guides/simulating.md.

Each use of a forecast is bounded first by an oracle, a job of the simulator that is told what is in the trace. Only
where an oracle wins clearly a predictor is worth its code. Predictors know the trace so far; ``--fit``
compares what they may begin with, over a window that is not evaluated.

- When to checkpoint: restarts lose nothing and checkpoints cost nothing; the interval of Young and Daly by the true
  rate of fatal losses; the same by a rate that is estimated as losses come; a short fixed interval.
- Whether a change of plan is worth it: all changes and their copies are free; other values of ``topology.min_gain``.
- Where owners and shadows are: nodes that go at the same time count as one host, so that none shadows another; it is
  known some time before which nodes go, and they are emptied as after a notice; shadows in other zones than owners, by
  ``topology.zones_apart`` or with zones as hosts; shadows of other ages than owners.

Gains are in percent of the samples of the same job without knowledge, over the same nodes. See ``--help``.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
from common import HERE, console, save_json
from rich.table import Table

from bamboo_ds.config import BambooConfig
from bamboo_ds.control.leader.departures import Deadlines
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.records import NoticeRecord
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.simulate.bamboo import BambooJob
from bamboo_ds.simulate.market import CLIMATES, Market, drawn, parse
from bamboo_ds.simulate.pace import Pace
from bamboo_ds.simulate.profile import load
from bamboo_ds.simulate.run import Simulation
from bamboo_ds.simulate.terms import Terms
from bamboo_ds.simulate.training import Checkpoint, Run
from bamboo_ds.topology import Candidate

TRACES = HERE.parent.parent / "shared" / "traces"
_GIB = 2**30


@dataclass(frozen=True)
class Rate:
    """Exponentially weighted rate of events, with one event in ``prior_s`` before the first is seen.

    Attributes:
        prior_s: mean seconds between events, as believed in the beginning.
        memory_s: time constant by which older events, and the belief, are forgotten.
    """

    prior_s: float
    memory_s: float

    def between_s(self, events: Sequence[float], now: float) -> float:
        """Mean seconds between events as estimated at ``now``, of the seconds of ``events`` since the begin."""
        left = math.exp(-now / self.memory_s)
        seen = sum(math.exp(-(now - at) / self.memory_s) for at in events)
        watched = self.memory_s * (1 - left)
        return (self.prior_s + watched) / (1 + seen)


@dataclass(frozen=True)
class Knowledge:
    """What a job is told of its nodes, and what it makes of it.

    Attributes:
        domains: which nodes go together, if told: the planner's hosts.
        ends_s: when nodes go, if told.
        ahead_s: how long before nodes are emptied.
        lossless: restarts lose nothing, since there was a checkpoint that cost nothing.
        interval: seconds between checkpoints by the times of the fatal losses so far and the time; ``None``: fixed.
    """

    domains: Mapping[str, str] = field(default_factory=dict)
    ends_s: Mapping[str, float] = field(default_factory=dict)
    ahead_s: float = 0.0
    lossless: bool = False
    between: Callable[[Sequence[float], float], float] | None = None


class Foresighted(BambooJob):
    """A job of this package that is told something; without knowledge it is the simulator's own."""

    def __init__(
        self, market: Market, pace: Pace, terms: Terms, config: BambooConfig, seed: int, knowledge: Knowledge
    ) -> None:
        self.known, self.fatal = knowledge, list[float]()
        self.lost_roles = 0
        self._deadlines = Deadlines()
        super().__init__(market, pace, terms, config, seed)
        for node, end_s in knowledge.ends_s.items():
            self.env.process(self._expect(node, end_s))

    # -- placement ----------------------------------------------------------------------------------------

    def _register(self, node: str) -> None:
        super()._register(node)
        if node in self.known.domains:
            record = self._records[node]
            self._records[node] = record.model_copy(update={"host": self.known.domains[node]})

    def _expect(self, node: str, end_s: float) -> Run:
        yield self.env.timeout(max(0.0, end_s - self.known.ahead_s - self.env.now))
        if node in self.ready:
            self.tell()
        yield self.env.timeout(max(0.0, (end_s - self.env.now) / 2))
        if node in self.ready:
            self.tell()

    def _leaving(self) -> dict[str, NoticeRecord]:
        now, found = self.env.now, {}
        for node in self.ready:
            left_s = self.known.ends_s.get(node, math.inf) - now
            if left_s <= self.known.ahead_s:
                deadline = {"deadline_s": self.known.ahead_s, "iteration_s": self.iteration_s or None}
                found[node] = NoticeRecord.model_construct(id=node, **deadline)
        return found

    def _view(self) -> View:
        view, notices = super()._view(), self._leaving()
        if not notices:
            return view
        self._deadlines.note(notices, self.env.now)
        members = {
            node: record.model_copy(update={"state": "leaving"}) if node in notices else record
            for node, record in view.members.items()
        }
        return replace(view, members=members, near_deadline=self._deadlines.near(self.env.now))

    def _candidates(self) -> list[Candidate]:
        notices = self._leaving()
        return [replace(each, leaving=each.id in notices) for each in super()._candidates()]

    def _known(self) -> tuple[object, ...]:
        return (*super()._known(), frozenset(self._leaving()), self._deadlines.near(self.env.now))

    # -- checkpoints --------------------------------------------------------------------------------------

    def _restore(self) -> None:
        if self.known.lossless:
            self.saved = Checkpoint(self.step, self.outcome.samples, "oracle")
        super()._restore()

    def _fatal(self, plan: Any, lost: Sequence[str]) -> Run:
        self.fatal.append(self.env.now)
        self.lost_roles += bool(plan.lost_roles)
        self._adapt()
        yield from super()._fatal(plan, lost)

    def _boundary(self) -> Run:
        self._adapt()
        yield from super()._boundary()

    def _adapt(self) -> None:
        """Young 1974, Daly 2006: the first-order optimum; not before the last checkpoint is written."""
        if self.known.between is None:
            return
        optimum = math.sqrt(2 * self._copy_s * self.known.between(self.fatal, self.env.now))
        interval = max(optimum, self._write_s, self.iteration_s)
        self.terms = self.terms.model_copy(update={"checkpoint_s": interval})
        self._checkpoint_due = min(self._checkpoint_due, self.env.now + interval)


# -- what is simulated ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A preset, pipelines (``None``: as many as there are nodes for), and whether each role's state is only its own.

    With ZeRO-1 each role of a stage has optimizer states of its own, so only its shadow can stand in for its owner. The
    simulator counts the bytes of states as without.
    """

    name: str
    profile: str
    pipelines: int | None = None
    sharded: bool = False


JOBS = (
    Job("gpt-2, one pipeline", "gpt-2", 1),
    Job("gpt-2, ZeRO-1", "gpt-2", sharded=True),
    Job("gpt-2", "gpt-2"),
    Job("gpt-3-2.7b, ZeRO-1", "gpt-3-2.7b", sharded=True),
)


@dataclass(frozen=True)
class Nodes:
    """Nodes by seed. With a trace a seed draws only which of the first nodes computes what."""

    name: str
    market: Callable[[int], Market]
    drawn: bool = False


def every_market(traces: Path, nodes: int, hours: float) -> dict[str, Nodes]:
    """The first half of EC2's trace, by which predictors are fitted, and what they are evaluated on."""

    def trace(stem: str) -> Market:
        path = traces / f"{stem}.csv"
        return parse(path.read_text(), str(path), 0)

    ec2 = trace("ec2-p3-us-east-12h")
    half = ec2.seconds / 2
    found = [Nodes("ec2, first half", lambda _: ec2.window(0, half))]
    found.append(Nodes("ec2, second half", lambda _: ec2.window(half, None)))
    for stem in ("parcae-p3-high-availability-high-preemption-1h", "parcae-p3-low-availability-low-preemption-1h"):
        market = trace(stem)
        found.append(Nodes("-".join(stem.split("-")[:3]), lambda _, m=market: m))
    for name in ("ec2-p3", "bamboo-33", "bamboo-10"):
        found.append(Nodes(f"climate {name}", lambda s, n=name: drawn(CLIMATES[n], nodes, hours * 3600, s), True))
    return {each.name: each for each in found}


def ends_of(market: Market) -> dict[str, float]:
    """When nodes go, of those that do."""
    return {node: at_s for at_s, _, go in market.moments for node in go}


def births_of(market: Market) -> dict[str, float]:
    """When nodes come."""
    return {node: at_s for at_s, come, _ in market.moments for node in come}


def together(market: Market, within_s: float) -> dict[str, str]:
    """Nodes that go no more than ``within_s`` after one another: one domain."""
    found, last, number = {}, -math.inf, 0
    for node, at_s in sorted(ends_of(market).items(), key=lambda each: each[1]):
        number += at_s > last + within_s
        last = at_s
        found[node] = f"end {number}"
    return found


def of_one_age(market: Market) -> dict[str, str]:
    """Nodes that came at the same time: one domain. Those of the begin came at different times, which are unknown."""
    return {node: f"begin {at_s:.0f}" for node, at_s in births_of(market).items() if at_s}


# -- variants -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A job with knowledge, settings or terms of its own.

    Attributes:
        use: of the forecast.
        oracle: whether it knows what only the rest of the trace tells.
        knowledge: of a market, and of what the job without knowledge has made of it.
    """

    use: str
    name: str
    oracle: bool = False
    knowledge: Callable[[Market, Done], Knowledge] = lambda market, base: Knowledge()
    terms: Mapping[str, float] = field(default_factory=dict)
    topology: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What a job has done with one seed."""

    samples: float
    fatal: int
    lost_roles: int
    shares: Mapping[str, float]
    plans: float
    copied_gb: float
    losses: int
    seconds: float
    node_seconds: float


def variants(rate: Rate, fixed_s: float) -> list[Variant]:
    """All variants.

    Args:
        rate: what an estimate of the rate of fatal losses begins with.
        fixed_s: a short fixed interval of checkpoints.
    """
    when, whether, where = "checkpoint", "change of plan", "placement"
    free = {"switch_s": 0.0, "network_gb_s": 1e6, "message_ms": 0.0}

    def zones(market: Market, base: Done) -> Knowledge:
        return Knowledge(domains=market.zones)

    return [
        Variant(when, "no loss, no cost", True, lambda m, b: Knowledge(lossless=True), {"checkpoint_s": 1e9}),
        Variant(when, "nor a pause", True, lambda m, b: Knowledge(lossless=True),
                {"checkpoint_s": 1e9, "restart_s": 0.0, "storage_gb_s": 1e6}),
        Variant(when, "Young/Daly, true rate", True,
                lambda m, b: Knowledge(between=lambda *_: b.seconds / max(1, b.fatal))),
        Variant(when, "Young/Daly, estimated", False, lambda m, b: Knowledge(between=rate.between_s)),
        Variant(when, "fixed, short", False, terms={"checkpoint_s": fixed_s}),
        Variant(whether, "free", True, terms=free, topology={"transfer_mb_per_s": None}),
        *(Variant(whether, f"min_gain {g:g}", topology={"min_gain": g}) for g in (0.02, 0.1, 0.2)),
        Variant(where, "together", True, lambda m, b: Knowledge(domains=together(m, 0.0))),
        Variant(where, "told 2 min before", True, lambda m, b: Knowledge(ends_s=ends_of(m), ahead_s=120.0)),
        Variant(where, "told 10 min before", True, lambda m, b: Knowledge(ends_s=ends_of(m), ahead_s=600.0)),
        Variant(where, "zones_apart", topology={"zones_apart": True}),
        Variant(where, "zones as hosts", False, zones),
        Variant(where, "ages apart", False, lambda m, b: Knowledge(domains=of_one_age(m))),
    ]  # fmt: skip


class Bench:
    """Runs jobs over the nodes of a market."""

    def __init__(self, nodes: Nodes, job: Job, memory_gib: float, checkpoint_s: float) -> None:
        profile = load(job.profile).model_copy(update={"memory_bytes": round(memory_gib * _GIB) or None})
        self.nodes, self.job = nodes, job
        terms = Terms(checkpoint_s=checkpoint_s)
        self.simulation = Simulation(nodes.market, profile, terms, pipelines=job.pipelines)

    def _pace(self) -> Pace:
        pace = self.simulation.pace(self.simulation.config.redundancy.mode)
        if self.job.sharded and not pace.layout.sharded:
            pace.layout = replace(pace.layout, sharded=True)
        return pace

    def done(self, market: Market, seed: int, variant: Variant, base: Done | None) -> Done:
        """What the job of a variant does."""
        terms = self.simulation.terms.model_copy(update=dict(variant.terms))
        config = self.simulation.config
        topology = config.topology.model_copy(update={"zones_apart": False, **variant.topology})
        config = config.model_copy(update={"topology": topology})
        knowledge = Knowledge() if base is None else variant.knowledge(market, base)
        job = Foresighted(market, self._pace(), terms, config, seed, knowledge)
        outcome = job.simulate()
        categories = account(outcome.events).categories
        whole = sum(categories.values()) or 1.0
        return Done(
            samples=outcome.samples,
            fatal=len(job.fatal),
            lost_roles=job.lost_roles,
            shares={category.value: seconds / whole for category, seconds in categories.items() if seconds},
            plans=outcome.plans,
            copied_gb=outcome.copied_gb,
            losses=sum(isinstance(event, ev.MemberLost) for event in outcome.events),
            seconds=market.seconds,
            node_seconds=market.node_seconds,
        )

    def row(self, seeds: int, chosen: Sequence[Variant]) -> dict[str, Any]:
        """Means of the job without knowledge, and by variant its gains in percent, with their 95 % confidence."""
        begin = time.process_time()
        bases: list[Done] = []
        gains: dict[str, list[float]] = defaultdict(list)
        others: dict[str, list[Done]] = defaultdict(list)
        for seed in range(seeds):
            market = self.simulation.rented(seed)
            base = self.done(market, seed, Variant("", ""), None)
            bases.append(base)
            for variant in chosen:
                if variant.name.startswith("zones") and not market.zones:
                    continue
                done = self.done(market, seed, variant, base)
                others[variant.name].append(done)
                gains[variant.name].append(100 * (done.samples / base.samples - 1))
        return {
            "market": self.nodes.name,
            "job": self.job.name,
            "size": self.simulation.size,
            "seeds": seeds,
            "base": _means(bases),
            "gains": {name: _spread(each) for name, each in gains.items()},
            "variants": {name: _means(each) for name, each in others.items()},
            "cpu_s": time.process_time() - begin,
        }


def _means(each: Sequence[Done]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in Done.__dataclass_fields__:
        if name != "shares":
            found[name] = fmean(getattr(done, name) for done in each)
    kinds = dict.fromkeys(kind for done in each for kind in done.shares)
    return {**found, "shares": {kind: fmean(done.shares.get(kind, 0.0) for done in each) for kind in kinds}}


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and the standard error of it."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


# -- predictability -------------------------------------------------------------------------------------


def predictability(market: Market) -> dict[str, float | None]:
    """How much ages and common beginnings tell of which nodes go.

    ``older``: probability that a node that goes is older than one that stays; 0.5: ages tell nothing. Nodes of the
    begin, whose ages are unknown, are left out. ``siblings``: of pairs that go at the same time, how many times as many
    came at the same time as of all pairs that live then.
    """
    births: dict[str, float] = {}
    older: list[float] = []
    came, expected = 0, 0.0
    for at_s, come, go in market.moments:
        for node in go:
            stay = [birth for other, birth in births.items() if other not in go and birth]
            if births[node] and stay:
                older.append(fmean((b > births[node]) + (b == births[node]) / 2 for b in stay))
        aged = [births[node] for node in go if births[node]]
        pairs, alive = list(combinations(aged, 2)), list(combinations([b for b in births.values() if b], 2))
        came += sum(one == other for one, other in pairs)
        if alive:
            expected += len(pairs) * fmean(one == other for one, other in alive)
        for node in go:
            del births[node]
        births.update(dict.fromkeys(come, at_s))
    return {
        "older": fmean(older) if older else None,
        "siblings": came / expected if expected else None,
        "moments": float(market.losses),
        "nodes": float(len(ends_of(market))),
    }


# -- output ---------------------------------------------------------------------------------------------


def tables(rows: Sequence[Mapping[str, Any]], chosen: Sequence[Variant]) -> Iterator[Table]:
    """The jobs without knowledge, and the gains by use."""
    title = "SIMULATED, without knowledge: means, and shares of the members' seconds"
    columns = "nodes", "job", "size", "losses", "fatal", "lost", "redone", "waiting", "plans", "GB copied"
    table = Table(*columns, title=title)
    for row in rows:
        base, shares = row["base"], row["base"]["shares"]
        kinds = (Category.WASTED, Category.REDONE, Category.WAITING)
        cells = [f"{100 * shares.get(kind.value, 0.0):.1f} %" for kind in kinds]
        counts = [f"{base[name]:.1f}" for name in ("losses", "fatal")]
        size = "x".join(map(str, row["size"]))
        table.add_row(
            row["market"], row["job"], size, *counts, *cells, f"{base['plans']:.0f}", f"{base['copied_gb']:.0f}"
        )
    yield table
    for use in dict.fromkeys(variant.use for variant in chosen):
        mine = [variant for variant in chosen if variant.use == use]
        names = [f"{'ORACLE: ' if variant.oracle else ''}{variant.name}" for variant in mine]
        table = Table("nodes", "job", *names, title=f"{use}: gain in % of samples ± standard error of the mean")
        for row in rows:
            cells = []
            for variant in mine:
                gain = row["gains"].get(variant.name)
                cells.append("" if gain is None else f"{gain[0]:+.2f} ± {gain[1]:.2f}")
            table.add_row(row["market"], row["job"], *cells)
        yield table


def fit(bench: Sequence[Bench], seeds: int) -> dict[str, Any]:
    """Mean gains of fixed intervals and of rates to begin with."""
    found: dict[str, list[float]] = defaultdict(list)
    tried = [Variant("", f"every {s} s", terms={"checkpoint_s": s}) for s in (30, 60, 120, 240, 480, 900)]
    for hours, memory in product((0.5, 2), (2, 8)):
        rate, name = Rate(hours * 3600, memory * 3600), f"one in {hours:g} h, forgotten in {memory} h"
        tried.append(Variant("", name, knowledge=lambda m, b, r=rate: Knowledge(between=r.between_s)))
    for each in bench:
        row = each.row(seeds, tried)
        for name, (gain, _) in row["gains"].items():
            found[name].append(gain)
        console.print(
            f"{each.job.name}: {row['base']['fatal']:.1f} fatal, {row['cpu_s']:.0f} s of CPU time", highlight=False
        )
    table = Table("by", "mean gain in %")
    for name, gains in found.items():
        table.add_row(name, f"{fmean(gains):+.3f}")
    console.print(table)
    return {name: fmean(gains) for name, gains in found.items()}


#: First guesses: one fatal loss in two hours, forgotten in four, and two minutes. ``--fit`` compares them with others.
GUESS, SHORT_S = Rate(2 * 3600.0, 4 * 3600.0), 120.0


@click.command()
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), default=TRACES,
              show_default=True, help="Folder of the traces of EC2 and of Parcae.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(min=1), default=32, show_default=True, help="Wanted, in climates.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=12.0, show_default=True,
              help="Of climates.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--checkpoint-s", type=click.FloatRange(min=0, min_open=True), default=Terms().checkpoint_s,
              show_default=True, help="Between checkpoints of the job without knowledge.")  # fmt: skip
@click.option(
    "--memory-gib", type=click.FloatRange(min=0), default=32.0, show_default=True, help="Of a device; 0: any."
)
@click.option("--market", "markets", multiple=True, help="Only these.")
@click.option("--job", "jobs", multiple=True, help="Only these.")
@click.option("--use", "uses", multiple=True, help="Only these.")
@click.option(
    "--fit", "fitting", is_flag=True, help="Find what predictors begin with, on the first half of EC2's trace."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(
    traces: Path, nodes: int, hours: float, seeds: int, checkpoint_s: float, memory_gib: float,
    markets: tuple[str, ...], jobs: tuple[str, ...], uses: tuple[str, ...], fitting: bool, out: Path,
) -> None:  # fmt: skip
    """SIMULATE what knowing losses beforehand is worth."""
    known = every_market(traces, nodes, hours)
    mine = [job for job in JOBS if not jobs or job.name in jobs]
    first, *rest = known
    if fitting:
        save_json(
            out / "fit.json",
            {"simulated": True, **fit([Bench(known[first], job, memory_gib, checkpoint_s) for job in mine], seeds)},
        )
        return
    chosen = [variant for variant in variants(GUESS, SHORT_S) if not uses or variant.use in uses]
    rows = []
    for name in markets or rest:
        for job in mine:
            rows.append(Bench(known[name], job, memory_gib, checkpoint_s).row(seeds, chosen))
            gains = {key: round(gain[0], 2) for key, gain in rows[-1]["gains"].items()}
            console.print(f"{name}, {job.name}: {rows[-1]['cpu_s']:.0f} s of CPU time, {gains}", highlight=False)
    for table in tables(rows, chosen):
        console.print(table)
    told = {name: predictability(each.market(0)) for name, each in known.items() if not each.drawn}
    for name, each in told.items():
        console.print(f"{name}: {each}", highlight=False)
    save_json(
        out / "forecast.json", {"simulated": True, "checkpoint_s": checkpoint_s, "rows": rows, "predictability": told}
    )


if __name__ == "__main__":
    main()
