"""What policies rent of a market, what its nodes cost over seeds, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bamboo_ds.simulate.market import CLIMATES, Climate, drawn
from bamboo_ds.simulate.run import LIMIT, ON_DEMAND, POLICIES, Simulation
from bamboo_ds.simulate.terms import Terms

from .test_simulate import FREE, model, nodes, simulate, simulation

pytestmark = pytest.mark.claim("guides/simulating.md")


@pytest.mark.parametrize("climate", [CLIMATES["bamboo-33"], CLIMATES["ec2-p3"], Climate(2.0, 6.0, 2, None, 3600.0)])
@pytest.mark.parametrize("nodes", [4, 8, 32, 100])
def test_living_nodes_are_lost_at_the_rate_of_the_climate(climate: Climate, nodes: int) -> None:
    """Also of so few that a bulk takes all of a zone, and while some have not been replaced.

    Losses in bulks vary more than single ones: their mean is off by ``sqrt(2 bulk / losses)`` as a rule.
    """
    markets = [drawn(climate, nodes, 48 * 3600, seed) for seed in range(60)]
    lost = sum(change.what == "remove" for market in markets for change in market.changes)
    expected = climate.hourly * sum(market.node_seconds for market in markets) / 3600
    assert lost == pytest.approx(expected, rel=3 * (2 * climate.bulk / lost) ** 0.5)
    bulk = lost / sum(market.losses for market in markets)
    assert bulk <= climate.bulk * 1.05 and (nodes < 100 or bulk >= climate.bulk * 0.9)


@pytest.mark.parametrize(("pipelines", "stages", "bamboo", "stock"), [(1, 2, 4, 4), (4, 3, 20, 12)])
def test_each_policy_rents_what_it_can_use(pipelines: int, stages: int, bamboo: int, stock: int) -> None:
    """Of 20 nodes; 12 micro-batches are done by 12 pipelines at most. ``--limit`` holds for all policies."""
    market, size = nodes(20, 2000, (30.0, "remove", "n1")), {"stages": stages, "pipelines": pipelines}
    # With one stage each stock DeepSpeed's pipelines have no bubble: there is no use in more nodes than pipelines.
    one = simulation(market, model(layers=3, micro_batches=12, **size), Terms(start_s=0))
    report, _ = one.run(POLICIES)
    wanted = {"sample-dropping": pipelines * stages, "checkpoint-restart": stock, ON_DEMAND: stock}
    for name, policy in report.policies.items():
        assert policy.nodes == pytest.approx(wanted.get(name, bamboo), abs=1), name
        assert name == ON_DEMAND or (policy.limit_share is not None and policy.limit_share <= 1), name
        price = one.terms.on_demand_price if name == ON_DEMAND else one.terms.spot_price
        dollars = policy.node_seconds / 3600 * price
        assert policy.cost_per_million == pytest.approx(dollars / policy.samples * 1e6), name
    assert report.nodes[1] == bamboo
    # Nodes have no place only while the job starts again; the limit is that of as few nodes.
    dropping = report.policies["sample-dropping"]
    assert dropping.outside_s < 0.1 * dropping.node_seconds
    assert dropping.limit_share is not None and dropping.limit_share > 0.5
    limited, _ = simulation(market, one.profile, Terms(start_s=0), limit=3).run(["bamboo", "checkpoint-restart", LIMIT])
    assert {policy.nodes for policy in limited.policies.values()} == {3}


def test_seeds_that_train_nothing_are_paid_for() -> None:
    """The model does not fit on the single node of one of three seeds."""
    markets = [nodes(4, 1000), nodes(1, 1000), nodes(4, 2000, (1900.0, "add", "x"))]
    each = [simulation(market, model(memory=40 * 10**6)).run(["checkpoint-restart"])[0] for market in markets]
    alone = [report.policies["checkpoint-restart"] for report in each]
    assert [bool(figures.samples) for figures in alone] == [True, False, True] and alone[1].cost_per_million is None
    one = Simulation(lambda seed: markets[seed], model(memory=40 * 10**6), FREE, pipelines=1)
    found = one.run(["checkpoint-restart"], 3)[0].policies["checkpoint-restart"]
    dollars = sum(figures.node_seconds for figures in alone) / 3600 * FREE.spot_price
    assert found.cost_per_million == pytest.approx(dollars / sum(figures.samples for figures in alone) * 1e6)
    assert found.range is not None and "samples" in found.range and "cost_per_million" not in found.range
    assert found.idle == "the states of its stages do not fit on the members that there are (in 1 of 3 seeds)"
    # Where all have trained the range is about that figure.
    markets[1] = nodes(4, 1500)
    found = one.run(["checkpoint-restart"], 3)[0].policies["checkpoint-restart"]
    assert found.range is not None and found.idle is None
    assert sum(found.range["cost_per_million"]) / 2 == pytest.approx(found.cost_per_million)


def test_without_replicas_nothing_is_said_of_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    profile, config = tmp_path / "model.json", tmp_path / "ds_config.json"
    profile.write_text(model(memory=10**9, pipelines=1).model_dump_json())
    for mode, expected in (("none", "the job FITS into 0.9 GiB"), ("lazy-frc-lazy-brc", "replicas FIT into 0.9 GiB")):
        config.write_text(json.dumps({"bamboo": {"redundancy": {"mode": mode}}}))
        code, said = simulate(tmp_path, "--profile", str(profile), "--config", str(config), "--policy", "bamboo")
        assert code == 0 and expected in said, said
        assert ("with replicas" in said) == (mode != "none")


def test_this_package_has_no_pipelines_of_one_stage(tmp_path: Path) -> None:
    options = ["--profile", "bert-large", "--stages", "1", "--pipelines", "4"]
    code, said = simulate(tmp_path, *options, "--policy", "limit,bamboo:none")
    assert code == 2 and said.startswith("--policy bamboo:none: a pipeline of this package has two stages or more")
    assert simulate(tmp_path, *options, "--policy", "checkpoint-restart,sample-dropping,on-demand,limit")[0] == 0
