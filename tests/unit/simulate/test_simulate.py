"""The simulator: what it counts, what it must agree with, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from click.testing import CliRunner

from bamboo_ds.chaos.schedule import Change
from bamboo_ds.cli.main import cli
from bamboo_ds.config import BambooConfig, RedundancyMode
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.events import read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.schedule import hosts, timeline
from bamboo_ds.simulate.bamboo import placed
from bamboo_ds.simulate.baselines import Stock
from bamboo_ds.simulate.market import CLIMATES, Climate, Market, drawn, parse
from bamboo_ds.simulate.pace import OVERHEAD, Pace, Stretch
from bamboo_ds.simulate.profile import Layer, Profile, presets
from bamboo_ds.simulate.run import LIMIT, ON_DEMAND, POLICIES, Simulation
from bamboo_ds.simulate.terms import Terms
from bamboo_ds.topology import Candidate, initial_plan, takeover, with_redundancy

pytestmark = pytest.mark.claim("guides/simulating.md")

#: Messages, copies and pauses take no time: what is left can be worked out by hand.
FREE = Terms(
    network_gb_s=1e9, message_ms=0, detection_s=0, rebuild_s=0, switch_s=0, start_s=0, restart_s=0, storage_gb_s=1e9,
    host_gb_s=1e9, checkpoint_s=1e9,
)  # fmt: skip


def model(layers: int = 8, micro_batches: int = 8, memory: int | None = None, **changes: object) -> Profile:
    """A layer takes 1 s forward and 2 s backward, and has a million parameters."""
    layer = Layer(count=layers, forward_s=1.0, backward_s=2.0, parameters=10**6)
    fields = {"micro_batch": 1, "global_batch": micro_batches, "stages": 4, "memory_bytes": memory, **changes}
    return Profile(name="test", layers=(layer,), **fields)


def nodes(count: int, seconds: float, *changes: tuple[float, str, str]) -> Market:
    first = [Change(0.0, "add", f"n{number}") for number in range(count)]
    later = [Change(at_s * 1000, what, node) for at_s, what, node in changes]
    return Market((*first, *later), seconds)


def simulation(market: Market, profile: Profile | None = None, terms: Terms = FREE, **more: object) -> Simulation:
    return Simulation(lambda _: market, profile or model(), terms, **more)


def settings(mode: RedundancyMode = RedundancyMode.LAZY, sync_every: int = 0) -> BambooConfig:
    return BambooConfig.model_validate({"redundancy": {"mode": mode.value, "sync_every": sync_every}})


EVENTFUL = nodes(
    8, 2000, (100.0, "remove", "n1"), (100.0, "remove", "n6"), (350.5, "add", "x"), (500.0, "remove", "n2"),
    (503.0, "remove", "x"), (700.0, "add", "y"), (700.0, "add", "z"), (1100.0, "remove", "n0"), (1400.0, "add", "n0"),
)  # fmt: skip


def test_undisturbed_job_is_that_of_the_closed_form() -> None:
    """P stages of f + b and M micro-batches take (M + P - 1)(f + b) by 1F1B."""
    iteration_s = (8 + 4 - 1) * 2 * 3.0
    bamboo_s = iteration_s * OVERHEAD[RedundancyMode.LAZY]
    seconds = 10 * bamboo_s + 1
    report, _ = simulation(nodes(4, seconds), config=settings()).run(POLICIES)
    for name, each_s in (("bamboo", bamboo_s), ("bamboo-whole-stages", bamboo_s), ("sample-dropping", iteration_s)):
        assert report.policies[name].samples == 80, name
        assert report.policies[name].goodput == pytest.approx(10 * each_s / seconds), name
    # Other divisions of as many members are faster, here 4 pipelines of one stage.
    assert report.policies["checkpoint-restart"].samples == 8 * int(seconds / 48)
    assert report.policies[LIMIT].samples == pytest.approx(8 * seconds / 48)
    assert report.policies[LIMIT].samples == pytest.approx(report.policies[ON_DEMAND].samples)


def test_one_loss_by_hand() -> None:
    """Two stages, two micro-batches; n1 has stage 1, n0 has stage 0 and shadows stage 1::

    n0   F0 F1 . . B0 B0 . B1 B1     n1 is lost after 6.5 s: n0 has done F0 F1 B0, and n1 F0 B0 F1.
    n1   .  F0 B0 B0 F1 B1 B1        n0 does F0 B0 F1 B1 of stage 1 again (6 s), then B1 of its own (2 s).

    With the sums of micro-batch 0 it leaves out F0 and B0 of stage 1, with redundant passes F0 and F1. After 7.5 s it
    has all that stage 1 has to give, and is within B1 of its own. With "auto" there are redundant passes where a device
    has room for two stages of 16 MB, 1 MB for each micro-batch of either, and two sums of gradients of 2 MB.
    """
    lazy, eager, auto = RedundancyMode.LAZY, RedundancyMode.EAGER_FORWARD, RedundancyMode.AUTO
    early = [(6.5, lazy, 0, 8.0), (6.5, eager, 0, 6.0), (6.5, lazy, 1, 5.0), (6.5, eager, 1, 4.0)]
    chosen = [(6.5, auto, 0, 6.0, None), (6.5, auto, 1, 4.0, 40), (6.5, auto, 1, 5.0, 39)]
    late = [(7.5, lazy, 0, 2.0), (7.5, eager, 1, 2.0)]
    for at_s, mode, sync_every, left_s, mega in (*((*each, None) for each in (*early, *late)), *chosen):
        memory = None if mega is None else mega * 10**6
        profile = model(memory=memory, optimizer="adam", layers=2, micro_batches=2, stages=2, pipelines=1)
        layers = tuple(layer.model_copy(update={"kept_bytes": 10**6}) for layer in profile.layers)
        profile = profile.model_copy(update={"layers": layers})
        market = nodes(2, 100, (at_s, "remove", "n1"))
        one = simulation(market, profile, config=settings(mode, sync_every))
        job = one.job("bamboo-whole-stages", market, seed=_seed_with_order(market, ["n0", "n1"]))
        outcome = job.simulate()
        times = one.pace(mode, whole=True).overhead
        # The seconds before the loss are of an iteration that is `overhead` times as long.
        assert outcome.pauses == pytest.approx([at_s + left_s * times - 9 * times], abs=0.2), (mode, sync_every)
        # From then on one member does both stages, 2 x 2 x 3 s.
        assert outcome.samples == 2 * (1 + int((100 - at_s - left_s * times) / (12 * times))), mode
        report = account(outcome.events)
        assert report.losses == 1 and report.restarts == 0
        assert report.categories[Category.WASTED] == pytest.approx(at_s, abs=1e-3)


def test_a_restart_by_hand() -> None:
    """Four pipelines of one stage take 48 s, with a checkpoint after each; three take 72 s for the same samples."""
    market = nodes(4, 1000, (500.0, "remove", "n1"))
    report, outcomes = simulation(market, terms=FREE.model_copy(update={"restart_s": 30.0})).run(["checkpoint-restart"])
    figures = report.policies["checkpoint-restart"]
    assert figures.samples == 8 * (10 + int((1000 - 530) / 72))
    assert (figures.restarts, figures.losses) == (1, 1)
    # What all four had done of the iteration, and 30 s of three of them.
    assert figures.lost_s == pytest.approx(4 * 20)
    assert figures.categories[Category.WAITING] == pytest.approx(3 * 30)
    assert account(outcomes["checkpoint-restart"].events).steps == figures.samples / 8


@pytest.mark.parametrize(
    ("mode", "sync_every", "expected"),
    [
        (RedundancyMode.LAZY, 0, 0.572),
        (RedundancyMode.EAGER_FORWARD, 0, 0.504),
        (RedundancyMode.LAZY, 4, 0.375),
        (RedundancyMode.EAGER_FORWARD, 4, 0.351),
    ],
)
def test_what_a_loss_costs(mode: RedundancyMode, sync_every: int, expected: float) -> None:
    """Mean over victims and instants, in iterations; what is expected comes of another program's list scheduling."""
    profile = model(layers=8, micro_batches=16, stages=8)
    pace = Pace(profile, FREE, 1, 8, mode, 1, sync_every)
    plan = with_redundancy(initial_plan(list("abcdefgh")), pace.layout, True)
    whole = Stretch(pace, plan)
    costs = []
    for lost in plan.members:
        after = takeover(plan, {lost})
        for part in range(12):
            at_s = (part + 0.5) / 12 * whole.seconds
            costs.append((at_s + whole.after(after, at_s).seconds) / whole.seconds - 1)
    assert fmean(costs) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("mb_per_s", "iterations"), [(None, 1), (0.5, 5)])
def test_a_joiner_computes_when_its_copies_are_complete(mb_per_s: float | None, iterations: int) -> None:
    """Boundaries: the plan that admits it is entered and states are offered; copies are complete, it gets its stage.

    Two copies of 14 MB, which contain no gradients, take nearly five iterations of 12 s at half a megabyte a second.
    """
    terms = FREE.model_copy(update={"switch_s": 1.0, "first_s": 5.0})
    config = settings()
    config = config.model_copy(update={"topology": config.topology.model_copy(update={"transfer_mb_per_s": mb_per_s})})
    market = nodes(2, 2000, (100.0, "remove", "n1"), (500.0, "add", "x"))
    profile = model(layers=2, micro_batches=2, stages=2, pipelines=1)
    job = simulation(market, profile, terms, config=config).job("bamboo-whole-stages", market, 0)
    events = job.simulate().events
    admitted, owning = (
        next(event for event in events if isinstance(event, ev.PlanWritten) and "x" in getattr(event, where))
        for where in ("members", "owners")
    )
    steps = [event.seconds for event in events if isinstance(event, ev.Step) and event.epoch == admitted.epoch]
    assert len(steps) == iterations and (owning.time - admitted.time).total_seconds() == pytest.approx(1 + sum(steps))
    # Of these two, only the plan that gives it a stage has a longer first iteration.
    after = [event.seconds for event in events if isinstance(event, ev.Step) and event.epoch == owning.epoch]
    assert max(steps) == pytest.approx(min(steps)) and after[0] == pytest.approx(after[1] + 5)


def test_survivors_do_what_they_can_until_they_hear_of_a_loss() -> None:
    pace = Pace(model(layers=8, micro_batches=8), FREE, 1, 4, RedundancyMode.LAZY, blocks=1)
    plan = with_redundancy(initial_plan(list("abcd")), pace.layout, True)
    whole = Stretch(pace, plan)
    gains = []
    for lost in plan.members:
        after = takeover(plan, {lost})
        for part in range(12):
            at_s = (part + 0.5) / 12 * whole.seconds
            left = [whole.after(after, at_s, at_s + going_s).seconds for going_s in (0.0, 6.0, 1000.0)]
            gains.append(left[0] - left[1])
            assert left[0] >= left[1] - 1e-9 >= left[2] - 2e-9
            # What waits for passes of the lost member is not done, however long it takes.
            assert part >= 6 or left[2] > 6
    assert 0 < fmean(gains) < 6


def _seed_with_order(market: Market, order: list[str]) -> int:
    for seed in range(100):
        shuffled = [change.node for change in market.changes if not change.at_ms]
        Random(seed).shuffle(shuffled)
        if shuffled == order:
            return seed
    raise AssertionError("no seed gives this order")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in (ON_DEMAND, LIMIT)])
def test_every_second_of_every_node_is_accounted_for(policy: str) -> None:
    one = simulation(EVENTFUL, model(pipelines=2), Terms(checkpoint_s=200))
    market = one.rented(0)
    outcome = one.job(policy, market, 3).simulate()
    report = account(outcome.events)
    assert report.seconds + outcome.outside_s == pytest.approx(market.node_seconds, abs=1e-3)
    assert sum(report.categories.values()) == pytest.approx(report.seconds)
    assert report.steps * 8 >= outcome.samples > 0  # of sample dropping some steps have fewer
    # Members lost that were members; x may go before it is one.
    assert 3 <= report.losses <= 5


def test_limits_are_limits() -> None:
    report, _ = simulation(EVENTFUL, model(pipelines=2), Terms()).run(POLICIES)
    limit, on_demand = report.policies[LIMIT], report.policies[ON_DEMAND]
    assert on_demand.samples >= limit.samples > 0
    for name, policy in report.policies.items():
        assert policy.samples <= on_demand.samples, name
        assert name == ON_DEMAND or (policy.limit_share is not None and 0 < policy.limit_share <= 1), name
    seconds, price = on_demand.node_seconds, Terms().on_demand_price
    assert on_demand.cost_per_million == pytest.approx(seconds / 3600 * price / on_demand.samples * 1e6)
    assert report.policies["bamboo"].samples > report.policies["bamboo-whole-stages"].samples


def test_seeds_draw_and_equal_ones_draw_alike() -> None:
    def run(seeds: int) -> str:
        climate = replace(CLIMATES["bamboo-33"], hourly=2.0)
        one = Simulation(lambda seed: drawn(climate, 4, 3000, seed), model(layers=4), Terms(), pipelines=1)
        return one.run(["bamboo", "checkpoint-restart"], seeds)[0].model_dump_json()

    several = run(2)
    assert several == run(2)
    assert run(1) != several
    ranges = json.loads(several)["policies"]["bamboo"]["range"]
    assert ranges["samples"][0] < ranges["samples"][1]


# -- speed and memory ---------------------------------------------------------------------------------------

#: docs/benchmarks.md, "Members lost and gained": members, measured speed against the full job of 8 members.
DEGRADED = {16: {7: 0.88, 6: 0.82, 5: 0.74, 4: 0.64}, 32: {7: 0.80, 6: 0.76, 5: 0.66, 4: 0.55}}
WHOLE = {7: 0.77 * 7 / 8, 6: 0.85 * 6 / 8, 5: 1.02 * 5 / 8, 4: 1.24 * 4 / 8}


def speeds(micro_batches: int, divided: bool) -> dict[int, float]:
    """Speeds of 8 stages of 3 layers after losses, against the full job; means of some orders of losses."""
    layer = Layer(count=24, forward_s=0.01, backward_s=0.02)
    profile = Profile(name="emulated", layers=(layer,), micro_batch=1, global_batch=micro_batches, stages=8)
    found: dict[int, list[float]] = {}
    for seed in range(3):
        losses = [(200.0 * n, "remove", f"n{n}") for n in range(1, 5)]
        market = nodes(8, 1000, *losses)
        one = simulation(market, profile, Terms(checkpoint_s=1e9), pipelines=1)
        job = one.job("bamboo" if divided else "bamboo-whole-stages", market, seed)
        job.simulate()
        for members, seconds in job.speeds.items():
            found.setdefault(members, []).append(job.speeds[8] / seconds)
    return {members: fmean(each) for members, each in found.items()}


@pytest.mark.parametrize(
    ("micro_batches", "divided", "measured"), [(16, True, DEGRADED[16]), (32, True, DEGRADED[32]), (16, False, WHOLE)]
)
def test_speeds_are_those_of_jobs(micro_batches: int, divided: bool, measured: dict[int, float]) -> None:
    """Within 6 % of each, and 4 % on average: each is one run on 2 cores, with one order of losses."""
    predicted = speeds(micro_batches, divided)
    errors = {members: predicted[members] / speed - 1 for members, speed in measured.items()}
    assert max(map(abs, errors.values())) < 0.06, errors
    assert fmean(map(abs, errors.values())) < 0.04, errors


def test_groups_of_pipelines_are_played_like_all_at_once() -> None:
    profile = model(layers=12, micro_batches=24)
    pace = Pace(profile, Terms(message_ms=0), 3, 4, RedundancyMode.EAGER_FORWARD)
    members = [Candidate(f"m{n}", n, f"m{n}", script_rank=n) for n in range(10)]
    plan = placed(pace, members, BambooConfig())
    progress = Stretch(pace, plan).progress
    groups = pace.groups(plan, progress)
    assert sorted(d for group in groups for d in group.pipelines) == [0, 1, 2]
    free = max(pace.played(group).seconds for group in groups)
    for count in (0, 1):  # micro-batches under way; 0: as many as 1F1B has
        tight = replace(plan, tight=tuple((member, count) for member in plan.members))
        together = timeline(
            pace.layout,
            hosts(plan, progress),
            pace.micro_batches,
            pace.pass_s,
            progress,
            pace.costs,
            tight=tight.tight,
        )
        longest = max(pace.played(group).seconds for group in pace.groups(tight, progress))
        assert longest == pytest.approx(together.seconds) and (longest > 1.5 * free) == (count > 0)


def test_what_does_not_fit_is_not_used() -> None:
    fits = simulation(nodes(4, 1000), model(memory=10**9), Terms()).run(["bamboo"])[0]
    assert fits.memory.fits and fits.memory.least_members == 1 and fits.policies["bamboo"].samples
    # 2 layers of a million parameters: 32 MB of state for a stage, as much for a replica.
    eager = settings(RedundancyMode.EAGER_FORWARD)
    small = model(memory=40 * 10**6)
    tight = simulation(nodes(4, 1000), small, Terms(), config=eager).run(["bamboo", "checkpoint-restart"])[0]
    assert not tight.memory.fits and tight.memory.without <= 40e6 < tight.memory.replicas
    assert tight.policies["bamboo"].samples == 0 and "do not fit" in str(tight.policies["bamboo"].idle)
    assert tight.policies["checkpoint-restart"].samples
    # Replicas of all stages fit on four members, and not on three: they go on without what does not fit.
    market, larger = nodes(4, 2000, (500.0, "remove", "n2")), model(memory=70 * 10**6)
    some = simulation(market, larger, Terms(), config=eager).run(["bamboo"])[0]
    assert some.memory.fits and some.memory.least_members == 4
    assert some.policies["bamboo"].refused and some.policies["bamboo"].samples


# -- input --------------------------------------------------------------------------------------------------


def test_both_formats_of_traces() -> None:
    named = parse("# a trace\n1000,add,a\n1000,add,b\n3000,remove,a\n4000,add,a\n9000,remove,b\n", "t", 0)
    assert named.seconds == 8 and named.counts()[0] == (0.0, 2.0, 2) and named.losses == 2
    assert list(named.moments)[1:] == [(2.0, [], ["a"]), (3.0, ["a.2"], []), (8.0, [], ["b"])]
    counted = parse("time,count\n0,3\n60,1\n90,2\n120,2\n", "t", 0)
    assert counted.seconds == 120 and counted.node_seconds == 3 * 60 + 30 + 60
    assert counted.counts() == [(0.0, 60.0, 3), (60.0, 90.0, 1), (90.0, 120.0, 2)]
    gone = {tuple(parse("0,3\n60,1\n", "t", seed).changes) for seed in range(9)}
    assert len(gone) > 1 and parse("0,3\n60,1\n", "t", 5) == parse("0,3\n60,1\n", "t", 5)


def test_windows_of_a_trace() -> None:
    part = EVENTFUL.window(400, 350)
    assert part.counts()[0] == (0.0, 100.0, 7) and part.seconds == 350
    assert [(c.at_ms, c.what, c.node) for c in part.changes[7:]] == [
        (100000, "remove", "n2"), (103000, "remove", "x"), (300000, "add", "y"), (300000, "add", "z")
    ]  # fmt: skip
    assert part.compressed(10).changes[7].at_ms == 10000 and part.compressed(10).seconds == 35
    # A job that wants five nodes takes another one for each that goes.
    rented = EVENTFUL.rented(5)
    assert rented.counts()[0][2] == 5 and all(count <= 5 for *_, count in rented.counts())
    assert rented.node_seconds < EVENTFUL.node_seconds
    with pytest.raises(ConfigError, match="--from-s 3000 is not within the trace, which lasts 2000 s"):
        EVENTFUL.window(3000, None)
    with pytest.raises(ConfigError, match="--seconds 700: the nodes are known for 600 s from --from-s 1400 on"):
        EVENTFUL.window(1400, 700)


def test_drawn_nodes() -> None:
    market = drawn(Climate(0.5, 2.0, 3, None, 600.0), 100, 24 * 3600, 1)
    lost = sum(change.what == "remove" for change in market.changes)
    assert lost / (market.node_seconds / 3600) == pytest.approx(0.5, rel=0.2)
    assert lost / market.losses == pytest.approx(2.0, rel=0.2)
    for at_s, _, gone in market.moments:
        assert len({market.zones[node] for node in gone}) <= 1, at_s
    assert len({market.zones[change.node] for change in market.changes if change.what == "remove"}) == 3
    short = drawn(Climate(0.0, 1.0, 1, 2.0, 0.0), 10, 24 * 3600, 1)
    assert 110 <= sum(change.what == "remove" for change in short.changes) <= 120
    assert all(count == 10 for *_, count in short.counts() if count)


def test_presets_are_the_models_of_their_names() -> None:
    billions = {name: round(profile.parameters / 1e9, 2) for name, profile in presets().items()}
    # Embedding and output layer count apart, as they are on different stages.
    assert billions == {"bert-large": 0.37, "gpt-2": 1.64, "gpt-3-2.7b": 2.78, "gpt-3-6.7b": 6.86}
    for profile in presets().values():
        assert profile.source and "ASSUMED" in profile.device
        assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_stock_pipelines_are_those_of_the_closed_form() -> None:
    stock = Stock(model(layers=4), FREE)
    for stages, micro_batches in ((2, 8), (4, 64), (1, 8)):
        found = stock.arrangement(1, stages, micro_batches)
        assert found is not None and found.seconds == pytest.approx((micro_batches + stages - 1) * 12 / stages)
    best = stock.best(5)
    assert best is not None and best.size <= 5


TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n900000,remove,b\n1800000,add,e\n3600000,remove,c\n"


def simulate(tmp_path: Path, *options: str, trace: str | None = TRACE) -> tuple[int, str]:
    arguments = ["simulate", *options]
    if trace is not None:
        file = tmp_path / "trace.csv"
        file.write_text(trace)
        arguments += ["--trace", str(file)]
    result = CliRunner().invoke(cli, arguments)
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


CLIMATE = ["--climate", "ec2-p3", "--nodes", "9", "--profile", "gpt-2"]


@pytest.mark.parametrize(
    ("options", "trace", "expected"),
    [
        (["--profile", "gpt-5"], TRACE, "--profile gpt-5: there is no such preset or file; did you mean gpt-2?"),
        ([], TRACE, "--profile is missing: name a preset or a file"),
        (["--profile", "gpt-2", "--policy", "bambo"], TRACE, "--policy bambo: there is none of this name; there are"),
        (["--profile", "gpt-2", "--policy", "limit,limit"], TRACE, "--policy 'limit,limit': name at least one, and"),
        (["--profile", "gpt-2"], "0,add,a\n5,gone,a\n", "trace.csv:2: expected ms,add|remove,node"),
        (["--profile", "gpt-2"], "0,3\nx,4\n", "trace.csv:2: expected seconds,count and found 'x,4'"),
        (["--profile", "gpt-2"], "0,3\n5,-4\n", "trace.csv:2: '5,-4': seconds are in order and from 0 on"),
        (["--profile", "gpt-2", "--spot-price", "-1"], TRACE, "--spot-price -1.0: Input should be greater than or"),
        (["--profile", "gpt-2", "--compress", "0"], TRACE, "--compress 0.0: Input should be greater than 0"),
        (["--profile", "gpt-2", "--rate", "2"], TRACE, "--rate: only for a --climate; --limit bounds the nodes"),
        (["--profile", "gpt-2", "--hours", "2", "--nodes", "9"], TRACE, "--nodes, --hours: only for a --climate"),
        (["--profile", "gpt-2", "--seconds", "3601"], TRACE, "--seconds 3601: the nodes are known for 3600 s"),
        (["--profile", "gpt-2", "--climate", "ec2-p3"], None, "--climate needs --nodes: how many are wanted"),
        (["--profile", "gpt-2"], None, "give one of --trace and --climate"),
        (["--profile", "gpt-2", "--stages", "99"], TRACE, "--stages 99: profile gpt-2 has 50 layers; choose fewer"),
        (["--profile", "gpt-2", "--pipelines", "3"], TRACE, "3 pipelines: choose --pipelines, or another global_batch"),
        ([*CLIMATE, "--bulk", "0"], None, "--bulk 0.0: Input should be greater than or equal to 1"),
        ([*CLIMATE, "--bulk", "inf"], None, "--bulk inf: Input should be a finite number"),
        ([*CLIMATE, "--hours", "inf"], None, "--hours inf: Input should be a finite number"),
        ([*CLIMATE, "--replaced-s", "inf"], None, "--replaced-s inf: Input should be a finite number"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], trace: str | None, expected: str) -> None:
    code, said = simulate(tmp_path, *options, trace=trace)
    assert code == 2 and expected in said, said


def test_the_command_prints_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # pytest-xdist has one of its own
    profile = tmp_path / "model.json"
    profile.write_text(model(pipelines=1).model_dump_json())
    events = tmp_path / "events.jsonl"
    options = ["--profile", str(profile), "--policy", ",".join(POLICIES), "--events", str(events)]
    code, said = simulate(tmp_path, *options, "--json")
    assert code == 0
    policies = json.loads(said)["policies"]
    wanted = {"samples", "samples_per_s", "limit_share", "goodput", "lost_s", "redone_s", "restarts"}
    assert set(policies) == set(POLICIES)
    assert all(wanted | {"cost_per_million"} <= set(figures) for figures in policies.values())
    # The events are those of the product: what reads jobs' events reads these.
    report = account(read_events(events))
    assert report.goodput == pytest.approx(policies["bamboo"]["goodput"], abs=1e-6)
    code, said = simulate(tmp_path, *options)
    assert code == 0 and "replicas" in said and all(name in said for name in POLICIES)


def test_without_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(ConfigError, match=r"pip install 'bamboo_ds\[simulate\]'"):
        simulation(EVENTFUL).job("bamboo", EVENTFUL, 0)
