"""The sweep of the simulator: what it tries, that it finds the cheapest, and what it tells."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli.main import cli
from bamboo_ds.config import BambooConfig, RedundancyMode, bamboo_config
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulate.instances import Instance, of_option, offered
from bamboo_ds.simulate.market import Nodes
from bamboo_ds.simulate.profile import Layer, Profile
from bamboo_ds.simulate.results import Ranked, Setup, block, verdict
from bamboo_ds.simulate.run import PolicyReport, Simulation
from bamboo_ds.simulate.sweep import MODES, SHARE, SWEPT, Sweep, arrangements, swept_policies
from bamboo_ds.simulate.terms import Terms
from tests.unit.simulate.test_simulate import model, nodes, simulate

#: Of four nodes two are lost, and one comes again.
FEW = nodes(4, 1500, (400.0, "remove", "n1"), (500.0, "add", "a"), (1200.0, "remove", "n2"))
TERMS = Terms(start_s=20, restart_s=60)
OWN = [policy for policy in SWEPT if policy.startswith("bamboo")]


def small(memory: int | None = None, **changes: Any) -> Profile:
    layer = Layer(count=4, forward_s=0.1, backward_s=0.2, parameters=10**6)
    fields = {"micro_batch": 1, "global_batch": 12, "stages": 2, "memory_bytes": memory, **changes}
    return Profile(**{"name": "small", "layers": (layer,), **fields})


def offer(instance: Instance | None = None, profile: Profile | None = None, terms: Terms = TERMS) -> Simulation:
    own = instance or Instance(name="node", spot=1.0, on_demand=3.0)
    return offered(own, lambda _: FEW, profile or small(), terms, BambooConfig())


def sweep(*types: Simulation, **wanted: Any) -> Sweep:
    return Sweep({f"node{number or ''}": each for number, each in enumerate(types)}, **{"seeds": 1, **wanted})


# -- what is tried ------------------------------------------------------------------------------------------


def test_arrangements_are_those_that_nodes_layers_and_samples_allow() -> None:
    # 12 micro-batches for 1, 2 or 3 pipelines; 4 layers; 6 nodes.
    assert sorted(arrangements(small(), 6, None, None)) == [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2)]
    for pipelines, stages in ((5, 2), (None, 9)):
        with pytest.raises(
            ConfigError, match="--pipelines, --stages: no job has these: there are 6 roles at most and 4"
        ):
            arrangements(small(), 6, pipelines, stages)
    with pytest.raises(ConfigError, match="4 micro-batches evenly, of which each has no fewer than stages"):
        arrangements(model(micro_batches=4, layers=8), 8, 2, 4)
    assert swept_policies(["limit", "on-demand", "bamboo"]) == [*OWN, "on-demand"]
    with pytest.raises(ConfigError, match="--policy bamboo-whole-stages: a sweep does not try it; it tries bamboo, "):
        swept_policies(["bamboo-whole-stages"])


def test_instances_scale_times_memory_and_prices() -> None:
    fast = offer(Instance(name="fast", spot=2.0, on_demand=7.0, memory_gib=2, speed=4, network_gb_s=9))
    assert [layer.forward_s for layer in fast.profile.each] == [0.025] * 4
    assert fast.profile.memory_bytes == 2 * 2**30
    assert (fast.terms.spot_price, fast.terms.on_demand_price, fast.terms.network_gb_s) == (2.0, 7.0, 9)
    assert offer().profile == small() and offer().terms.network_gb_s == TERMS.network_gb_s
    one = of_option("p3.2xlarge, spot=0.918, on-demand=3.06, memory-gib=16, climate=ec2-p3, nodes=32")
    assert one == Instance(name="p3.2xlarge", spot=0.918, on_demand=3.06, memory_gib=16, climate="ec2-p3", nodes=32)
    asked = Nodes(trace="t.csv", rate=0.2, seconds=60)
    assert one.own(asked) == Nodes(climate="ec2-p3", nodes=32, rate=0.2, seconds=60)
    assert one.model_copy(update={"trace": "o.csv", "climate": None, "nodes": None}).own(asked) == Nodes(
        trace="o.csv", seconds=60
    )


# -- the search ---------------------------------------------------------------------------------------------


def test_no_setup_is_cheaper_than_the_one_that_is_found() -> None:
    """All of them simulated, with checkpoints for their losses; the sweep looks at some."""
    layer = Layer(count=3, forward_s=0.2, backward_s=0.4, parameters=10**6)
    here = offer(profile=small(layers=(layer,), global_batch=6))
    every: dict[Setup, PolicyReport] = {}
    alone = sweep(here)
    for pipelines, stages in arrangements(here.profile, 6, None, None):
        least = min(4, pipelines * stages)
        for policy in OWN:
            for blocks, count in [("auto", n) for n in range(least, 5)] + [(1, least)]:
                size = {"pipelines": pipelines, "stages": stages, "nodes": count}
                setup = Setup(policy=policy, instance="node", blocks=blocks, **size)
                every[setup] = alone._job(setup).saving(alone._interval_s(setup, 2.0)).alone(policy)
    for at_least in (0.0, 1.2):
        swept = sweep(here, at_least=at_least).run()
        best = swept.ranking[0]
        assert best.fast_enough and best.figures.samples_per_s >= at_least
        costs = [each.cost_per_million for each in every.values() if each.samples_per_s >= at_least]
        assert best.cost == pytest.approx(min(cost for cost in costs if cost), rel=0.02), at_least
        assert swept.worth_it is not None and not swept.unfit


def test_all_setups_save_for_the_restarts_that_they_have() -> None:
    """By Young and Daly: with two pipelines losses are no restarts, so intervals by losses would be too short."""
    here = offer(terms=TERMS.model_copy(update={"host_gb_s": 28e-3}))
    found = sweep(here, seeds=2, pipelines=1)
    # 2 million parameters of a stage, 14 bytes each without gradients: 1 s to host memory.
    setup = Setup(policy="bamboo:none", instance="node", pipelines=1, stages=2, blocks=1, nodes=4)
    losses = found._interval_s(setup, None)
    assert losses == pytest.approx((2 * 1.0 * 1500 / FEW.losses) ** 0.5)
    assert found._interval_s(setup, 0.0) == pytest.approx((2 * 1.0 * 1500) ** 0.5)
    ranking = found.run().ranking
    assert {each.seeds for each in ranking} == {1, 2}
    for each in ranking:
        job, policy = found._job(each.setup), each.setup.policy
        at_first = job.saving(found._interval_s(each.setup, None)).alone(policy)
        assert each.checkpoint_s == found._interval_s(each.setup, at_first.restarts)
        assert each.figures == job.saving(each.checkpoint_s).alone(policy, each.seeds)
        assert each.checkpoint_steps == max(1, round(each.checkpoint_s / found._iteration_s(each.setup)))
    fixed = sweep(here, pipelines=1, checkpoint_s=77.0).run()
    assert {each.checkpoint_s for each in fixed.ranking} == {77.0}


def test_the_fastest_setup_says_what_is_fast_enough() -> None:
    swept = sweep(offer(), seeds=2, pipelines=2).run()
    fastest = max(each.figures.samples_per_s for each in swept.ranking)
    assert swept.at_least == pytest.approx(SHARE * fastest) and swept.share == SHARE
    ranks = [(not e.fast_enough, e.cost if e.fast_enough else -e.figures.samples_per_s) for e in swept.ranking]
    assert ranks == sorted(ranks)
    assert {each.setup.mode for each in swept.ranking} == set(MODES)
    # The best of each policy has all seeds, and with them a range.
    firsts = {each.setup.policy: each for each in reversed([*swept.ranking, *swept.alternatives])}
    assert set(firsts) == set(SWEPT) and all(each.seeds == 2 for each in firsts.values())
    assert all("cost_per_million" in (each.figures.range or {}) for each in firsts.values() if each.setup.blocks)


def test_alternatives_are_as_good_as_they_can_be() -> None:
    """Of all numbers of nodes: neither is compared with a job that rents more than it needs."""
    here = offer()
    every = [
        here.but(limit=limit).run(["checkpoint-restart"])[0].policies["checkpoint-restart"] for limit in range(1, 5)
    ]
    stock = [each for count in range(1, 5) if (each := here.stock.best(count)) is not None]
    outcomes = set()
    for at_least in (0.0, 5.0, 12.0):
        swept = sweep(here, at_least=at_least, policies=["checkpoint-restart", "on-demand"]).run()
        found = {each.setup.policy: each for each in swept.alternatives}
        restart, demand = found["checkpoint-restart"], found["on-demand"]
        able = [each.cost_per_million for each in every if each.samples_per_s >= at_least]
        fastest = max(every, key=lambda each: each.samples_per_s).cost_per_million
        assert (restart.fast_enough, restart.cost) == (bool(able), min(able) if able else fastest)
        costs = [each.size / 3600 * 3.0 / each.speed * 1e6 for each in stock if each.speed >= at_least]
        assert demand.fast_enough == bool(costs)
        assert not costs or demand.cost == pytest.approx(min(costs))
        outcomes |= {restart.fast_enough, demand.fast_enough}
        assert swept.worth_it is False and swept.paste is None
    assert outcomes == {True, False}


def test_the_cheaper_instance_type_is_chosen() -> None:
    """Twice as fast for less than twice the price; without enough memory it is none."""
    types = [Instance(name="node", spot=1.0, on_demand=3.0), Instance(name="new", spot=1.5, on_demand=4.0, speed=2.0)]
    swept = sweep(*map(offer, types), at_least=0).run()
    assert swept.ranking[0].setup.instance == "node1" and swept.paste is not None
    assert {each.setup.instance for each in swept.ranking} == {"node", "node1"}
    types[1] = types[1].model_copy(update={"memory_gib": 0.01})
    swept = sweep(*map(offer, types), at_least=0, policies=OWN).run()
    assert swept.ranking[0].setup.instance == "node"
    assert swept.unfit and all(what.startswith("node1") and need > 0.01 for what, need in swept.unfit.items())


def test_what_does_not_fit_is_told_with_the_memory_that_it_needs() -> None:
    """A stage of two layers takes 32 MB, and as much for a replica."""
    swept = sweep(offer(profile=small(memory=60 * 10**6)), pipelines=1, stages=2).run()
    assert {each.setup.mode for each in swept.ranking} == {RedundancyMode.NONE}
    assert swept.unfit == {f"node: 1 x 2, {mode.value}": pytest.approx(64e6 / 2**30) for mode in MODES[1:]}
    none = sweep(offer(profile=small(memory=10**6)), seeds=1).run()
    assert not none.ranking and none.paste is None and none.worth_it is False
    assert "no setup fits; the least is node: 1 x 4, none, which needs a device with 0.0 GiB" in none.verdict


# -- the block ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", ["auto", 1])
def test_the_block_is_one_of_the_product_s(mode: RedundancyMode, blocks: Any) -> None:
    """Its own parser takes it, and makes the settings of it that were simulated."""
    base = BambooConfig.model_validate({"membership": {"lease_ttl_s": 9}, "redundancy": {"verify_every": 7}})
    size = {"pipelines": 1, "stages": 2, "nodes": 4}
    setup = Setup(policy=f"bamboo:{mode.value}", instance="node", blocks=blocks, **size)
    for profile, limit in ((small(), None), (small(memory=3 * 2**30, workspace_bytes=2**30), 2 * 2**30)):
        whole = offered(Instance(name="node", spot=1, on_demand=3), lambda _: FEW, profile, TERMS, base)
        parsed = bamboo_config({"bamboo": json.loads(json.dumps(block(setup, base, profile)))})
        assert parsed == Sweep({"node": whole})._job(setup).config and parsed is not None
        assert (parsed.redundancy.mode, parsed.redundancy.verify_every, parsed.topology.blocks) == (mode, 7, blocks)
        assert parsed.topology.memory_limit == limit, "what passes need is kept free"


# -- the verdict --------------------------------------------------------------------------------------------


def ranked(policy: str, cost: float | None, fast_enough: bool = True, spread: float | None = 0.1) -> Ranked:
    names = [name for name, field in PolicyReport.model_fields.items() if field.is_required()]
    figures = {**dict.fromkeys(names, 0), "categories": {}, "samples_per_s": 100.0, "cost_per_million": cost}
    if cost and spread:
        figures["range"] = {"cost_per_million": (cost - spread, cost + spread)}
    setup = Setup(policy=policy, instance="node", pipelines=1, stages=2, nodes=2)
    return Ranked(setup=setup, seeds=3, fast_enough=fast_enough, figures=PolicyReport(**figures))


@pytest.mark.parametrize(
    ("best", "demand", "restart", "slow", "worth_it", "begins"),
    [
        (1.0, 3.0, 2.0, False, True, "Yes: checkpoint-restart on spot instances costs 2.00 times as much"),
        (1.0, 1.5, 2.0, False, True, "Yes: stock DeepSpeed on demand costs 1.50 times as much"),
        (2.0, 3.0, 1.6, False, False, "No: checkpoint-restart on spot instances costs less, by a factor of 1.25"),
        (3.0, 2.0, 2.5, False, False, "No: stock DeepSpeed on demand costs less, by a factor of 1.50"),
        (1.0, 3.0, 1.15, False, None, "Too close to call: the ranges of checkpoint-restart on spot instances overlap"),
        # A range that overlaps decides nothing where another alternative is clearly cheaper.
        (2.0, 1.0, 2.05, False, False, "No: stock DeepSpeed on demand costs less, by a factor of 2.00"),
        (2.0, 1.95, 1.0, False, False, "No: checkpoint-restart on spot instances costs less, by a factor of 2.00"),
        (2.0, 1.85, 1.82, False, False, "No: stock DeepSpeed on demand costs less, by a factor of 1.08"),
        (2.0, 1.95, 2.05, False, None, "Too close to call: the ranges of stock DeepSpeed on demand and checkpoint-re"),
        # What is too slow is no alternative.
        (2.0, 3.0, 1.0, True, True, "Yes: stock DeepSpeed on demand costs 1.50 times as much"),
    ],
)
def test_the_verdict(
    best: float, demand: float, restart: float, slow: bool, worth_it: bool | None, begins: str
) -> None:
    others = [ranked("on-demand", demand, spread=None), ranked("checkpoint-restart", restart, not slow)]
    others.sort(key=lambda each: (not each.fast_enough, each.cost))
    found, sentence = verdict(ranked("bamboo:none", best), others, {})
    assert found is worth_it and sentence.startswith(begins)
    assert f"{best:.2f} $" in sentence and f"{demand:.2f} $" in sentence
    assert ("too slow with 100 samples/s" in sentence) == slow


def test_the_verdict_where_nothing_is_good() -> None:
    slow = verdict(ranked("bamboo:none", 1.0, fast_enough=False), [ranked("on-demand", 3.0)], {})
    assert slow[0] is False and slow[1].startswith("No: no setup is as fast as was asked for")
    assert verdict(None, [], {}) == (False, "No: no setup trains on these nodes")
    some = ranked("bamboo:lazy-frc-lazy-brc", 1.0, spread=None)
    assert "(some of 3 seeds have trained nothing: no range)" in verdict(some, [], {})[1]
    alone = verdict(some, [ranked("on-demand", 3.0, fast_enough=False), ranked("checkpoint-restart", None)], {})
    assert alone[0] is True and "nothing else is as fast" in alone[1]
    assert "checkpoint-restart on spot instances trains nothing at all" in alone[1]


# -- the command --------------------------------------------------------------------------------------------

TRACE = "0,4\n300,3\n400,4\n1200,4\n"


def test_the_table_and_what_simulate_says_of_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is printed simulates the first setup to the very figures of the table."""
    monkeypatch.setenv("COLUMNS", "250")  # pytest-xdist has one of its own
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(small(memory=2**30).model_dump_json())
    Path("mine.json").write_text(json.dumps({"bamboo": {"membership": {"lease_ttl_s": 30}}}))
    instance = "a,spot=0.5,on-demand=2,speed=2"
    options = ["--sweep", "--profile", "model.json", "--config", "mine.json", "--seeds", "2", "--detection-s", "2"]
    options += ["--instance", "b,spot=5,on-demand=9", "--instance", instance]
    code, said = simulate(tmp_path, *options, "--json", trace=TRACE)
    assert code == 0
    swept = json.loads(said[said.index("{") :])
    best = swept["ranking"][0]
    assert best["setup"]["instance"] == "a" and swept["unmodelled"] == ["bamboo.membership.lease_ttl_s"]
    code, said = simulate(tmp_path, *options, trace=TRACE)
    assert code == 0 and f"{best['figures']['cost_per_million']:,.2f} ±" in said
    assert swept["verdict"] in said and "Simulated, not measured" in said
    assert "bamboo.membership.lease_ttl_s is not modelled" in said
    pasted = json.loads(said[said.index("{\n") : said.index("\n}\n") + 2])
    assert pasted == swept["paste"]["ds_config"] and bamboo_config(pasted) is not None
    Path("ds_config.json").write_text(json.dumps(pasted))
    (again,) = [line for line in said.splitlines() if line.startswith("bamboo simulate")]
    done = CliRunner().invoke(cli, [*shlex.split(again)[1:], "--policy", "bamboo", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["policies"]["bamboo"]
    for name in ("cost_per_million", "samples_per_s", "goodput", "restarts"):
        assert figures[name] == pytest.approx(best["figures"][name], rel=1e-9), name


GPT, A = ["--profile", "gpt-2"], "a,spot=1,on-demand=2"


@pytest.mark.parametrize(
    ("options", "trace", "expected"),
    [
        ([*GPT, "--instance", "a,spot=1"], TRACE, "--instance 'a,spot=1': on_demand: Field required"),
        ([*GPT, "--instance", "a,price=1"], TRACE, "'price=1' is none of spot, on-demand, memory-gib"),
        ([*GPT, "--instance", "a,spot=x,on-demand=2"], TRACE, "spot x: Input should be a valid number"),
        ([*GPT, "--instance", A, "--instance", A], TRACE, "a is there more than once"),
        ([*GPT, "--instance", f"{A},trace=no.csv"], None, "there is no trace no.csv: No such file"),
        ([*GPT, "--instance", f"{A},trace=x,rate=1"], TRACE, "--instance a: a trace has its own nodes: leave out"),
        ([*GPT, "--instance", f"{A},climate=x,nodes=9"], None, "there is no climate 'x'; there are bamboo-10"),
        ([*GPT, "--instance", A, "--spot-price", "1"], TRACE, "--spot-price: --instance has prices of its own"),
        ([*GPT, "--instance", f"{A},rate=0.1"], TRACE, "--rate: only for a --climate"),
        ([*GPT, "--instance", f"{A},trace={__file__}"], TRACE, "--trace: every --instance has its own trace"),
        ([*GPT, "--instance", f"{A},climate=ec2-p3,nodes=9", "--nodes", "8"], None, "--nodes: every --instance has"),
        ([*GPT, "--sweep", "--pipelines", "3"], TRACE, "--pipelines, --stages: no job has these: there are 6 roles"),
        ([*GPT, "--sweep", "--events", "e.jsonl"], TRACE, "--events: those of one job, and a --sweep tries many"),
        ([*GPT, "--at-least", "3"], TRACE, "several --instance, and --at-least: only with --sweep"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], trace: str | None, expected: str) -> None:
    code, said = simulate(tmp_path, *options, trace=trace)
    assert code == 2 and expected in said, said
