"""The advisor: what it tries, that it finds the cheapest, and what it tells."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.advise.advice import Alternative, Ranked, block
from bamboo_ds.advise.alternatives import checkpoint_restart, on_demand
from bamboo_ds.advise.instances import Instance, of_file, of_option
from bamboo_ds.advise.offers import Offer, offered
from bamboo_ds.advise.screen import Screen, checkpoint_s
from bamboo_ds.advise.search import MODES, SHARE, Search
from bamboo_ds.advise.setups import Rejected, Setup, Shape, setups, shapes
from bamboo_ds.advise.verdict import verdict
from bamboo_ds.cli.main import cli
from bamboo_ds.config import BambooConfig, RedundancyMode, bamboo_config
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulate.profile import Layer, Profile
from bamboo_ds.simulate.run import BAMBOO
from bamboo_ds.simulate.terms import Terms

from .test_simulate import model, nodes

pytestmark = pytest.mark.claim("guides/worth-it.md")

#: Of six nodes three are lost, two at once, and come again.
LOSSES = nodes(
    6, 3000, (400.0, "remove", "n1"), (700.0, "add", "a"), (1500.0, "remove", "n4"), (1500.0, "remove", "n0"),
    (2000.0, "add", "b"), (2300.0, "add", "c"),
)  # fmt: skip
#: Of four nodes two are lost, and one comes again.
FEW = nodes(4, 1500, (400.0, "remove", "n1"), (500.0, "add", "a"), (1200.0, "remove", "n2"))
TERMS = Terms(start_s=20, restart_s=60)


def small(memory: int | None = None, **changes: Any) -> Profile:
    layer = Layer(count=4, forward_s=0.1, backward_s=0.2, parameters=10**6)
    return Profile(
        name="small", layers=(layer,), micro_batch=1, global_batch=12, stages=2, memory_bytes=memory, **changes
    )


def offer(instance: Instance | None = None, profile: Profile | None = None) -> Offer:
    own = instance or Instance(name="node", spot=1.0, on_demand=3.0)
    return offered(own, lambda _: FEW, profile or small(), TERMS)


# -- what is tried ------------------------------------------------------------------------------------------


def test_shapes_are_those_that_nodes_layers_and_samples_allow() -> None:
    found = list(shapes("node", small(), LOSSES, None, None))
    allowed = {(s.pipelines, s.stages) for s in found if isinstance(s, Shape)}
    # 12 micro-batches for 1, 2 or 3 pipelines; 4 layers; 6 nodes.
    assert allowed == {(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (1, 4)}
    none = list(shapes("node", small(), LOSSES, 5, 2))
    assert [str(each.what) for each in none if isinstance(each, Rejected)] == ["node: 5 x 2"]
    (few,) = shapes("node", small(), LOSSES, None, 9)
    assert isinstance(few, Rejected) and "4 layers" in few.why
    (bubbles,) = shapes("node", model(micro_batches=4, layers=8), nodes(8, 10), 2, 4)
    assert isinstance(bubbles, Rejected) and "2 micro-batches, fewer than stages" in bubbles.why
    shape = Shape(instance="node", pipelines=1, stages=4)
    tried = list(setups(shape, LOSSES, MODES, ("auto", 1)))
    assert len(tried) == len(set(tried)) == 3 * 2 * 3
    assert {each.spares for each in tried} == {0, 1, 2}, "as far as there are nodes"


def test_instances_scale_times_memory_and_prices() -> None:
    fast = offer(Instance(name="fast", spot=2.0, on_demand=7.0, memory_gib=2, speed=4, network_gb_s=9))
    assert [layer.forward_s for layer in fast.profile.each] == [0.025] * 4
    assert fast.profile.memory_bytes == 2 * 2**30
    assert (fast.terms.spot_price, fast.terms.on_demand_price, fast.terms.network_gb_s) == (2.0, 7.0, 9)
    assert offer().profile == small() and offer().terms.network_gb_s == TERMS.network_gb_s


def test_checkpoints_at_the_interval_of_young_and_daly() -> None:
    here = offer()
    pace = Screen(here, BambooConfig()).pace(Setup(**SHAPE, mode=RedundancyMode.LAZY, blocks="auto", nodes=2))
    terms = here.terms.model_copy(update={"host_gb_s": 28e-3, "storage_gb_s": 1.0})
    # 2 million parameters of a stage, 14 bytes each without gradients: 1 s to host memory.
    copied_s = 2e6 * 14 / 28e6
    assert checkpoint_s(pace, LOSSES, terms) == pytest.approx((2 * copied_s * 3000 / 2) ** 0.5)
    assert checkpoint_s(pace, LOSSES, terms, restarts=0.0) == pytest.approx((2 * copied_s * 3000) ** 0.5)
    slow = terms.model_copy(update={"storage_gb_s": 28e-6})
    assert checkpoint_s(pace, LOSSES, slow) == pytest.approx(1000), "not before the last one is written"


# -- the search ---------------------------------------------------------------------------------------------

SHAPE = {"instance": "node", "pipelines": 1, "stages": 2}


def test_no_setup_is_cheaper_than_the_one_that_is_advised() -> None:
    """All of them simulated, with the checkpoints that the search gives them; it looks at a few."""
    market = FEW
    layer = Layer(count=3, forward_s=0.2, backward_s=0.4, parameters=10**6)
    profile = Profile(name="small", layers=(layer,), micro_batch=1, global_batch=6, stages=2)
    here = offered(Instance(name="node", spot=1.0, on_demand=3.0), lambda _: market, profile, TERMS)
    screen = Screen(here, BambooConfig())
    found: dict[Setup, Any] = {}
    for shape in shapes("node", profile, market, None, None):
        assert isinstance(shape, Shape)
        for setup in setups(shape, market, MODES, ("auto", 1)):
            interval_s = checkpoint_s(screen.pace(setup), market.rented(setup.nodes), here.terms)
            saving = replace(here, terms=here.terms.model_copy(update={"checkpoint_s": interval_s}))
            size = setup.pipelines, setup.stages, setup.nodes
            found[setup] = saving.simulation(setup.config(BambooConfig()), *size).run([BAMBOO])[0].policies[BAMBOO]
    for at_least in (0.0, 1.2):
        advice = Search([here], finalists=5, seeds=1, at_least=at_least).run()
        best = advice.best
        assert best is not None and best.fast_enough and best.samples_per_s >= at_least
        costs = [each.cost_per_million for each in found.values() if each.samples_per_s >= at_least]
        assert len(costs) > 2 * len(advice.ranking)
        assert best.cost_per_million == pytest.approx(min(costs), rel=0.02), at_least
        assert len(advice.ranking) == 5 and len(advice.rejected) == advice.estimated - 5
        assert sum(best.dollars.values()) == pytest.approx(best.cost_per_million, rel=1e-3)


def test_all_setups_save_for_the_restarts_that_they_have() -> None:
    """With two pipelines losses are no restarts: intervals that went by losses would be too short."""
    here = offer()
    here = replace(here, terms=here.terms.model_copy(update={"host_gb_s": 1e-2}))
    search = Search([here], finalists=6, seeds=2, pipelines=2)
    ranking = search.run().ranking
    assert {each.seeds for each in ranking} == {1, 2}
    fewer = 0
    for each in ranking:
        pace, market = Screen(here, BambooConfig()).pace(each.setup), FEW.rented(each.setup.nodes)
        by_losses = search._simulate(each.setup, 1, None)
        assert each.checkpoint_s == pytest.approx(checkpoint_s(pace, market, here.terms, by_losses.restarts))
        fewer += each.seeds == 1 and each.checkpoint_s > by_losses.checkpoint_s
    assert fewer, "of those that are simulated with one seed, too"


def test_what_is_simulated_is_what_is_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound on the memory of members, too."""
    here, simulated = offer(profile=small(memory=2**30)), []
    real = Offer.simulation

    def noted(of: Offer, config: BambooConfig, *size: int) -> Any:
        simulated.append(config)
        return real(of, config, *size)

    monkeypatch.setattr(Offer, "simulation", noted)
    ranking = Search([here], finalists=3, seeds=1, pipelines=1).run().ranking
    pasted = [bamboo_config({"bamboo": block(each.setup, BambooConfig(), here.profile)}) for each in ranking]
    assert {each.topology.memory_limit_mb for each in pasted if each} == {1024}
    assert all(each in simulated for each in pasted)


def test_the_fastest_setup_says_what_is_fast_enough() -> None:
    advice = Search([offer()], finalists=4, seeds=2, pipelines=2).run()
    fastest = max(each.samples_per_s for each in advice.ranking)
    assert advice.at_least == pytest.approx(SHARE * fastest) and advice.share == SHARE
    ranks = [(not e.fast_enough, e.cost_per_million if e.fast_enough else -e.samples_per_s) for e in advice.ranking]
    assert ranks == sorted(ranks)
    assert all(each.seeds == 2 and each.cost_range is not None for each in advice.ranking[:3])
    assert {RedundancyMode.NONE, RedundancyMode.LAZY} <= {each.setup.mode for each in advice.ranking}
    assert {each.policy for each in advice.alternatives} == {"on-demand", "checkpoint-restart"}


def test_alternatives_are_as_good_as_they_can_be() -> None:
    """Of all numbers of nodes: neither is compared with a job that rents more than it needs."""
    here, config = offer(), BambooConfig()
    every = []
    for limit in range(1, here.most + 1):
        report, _ = here.simulation(config, 1, 2, limit).run(["checkpoint-restart"])
        every.append(report.policies["checkpoint-restart"])
    stock = [each for count in range(1, here.most + 1) if (each := here.stock.best(count)) is not None]
    outcomes = set()
    for at_least in (0.0, 5.0, 12.0):
        demand = on_demand(here, at_least)
        restart = checkpoint_restart(here, config, (1, 2), [3], 1, at_least)
        assert demand is not None and restart is not None
        able = [each.cost_per_million for each in every if each.samples_per_s >= at_least]
        fastest = max(every, key=lambda each: each.samples_per_s).cost_per_million
        assert (restart.fast_enough, restart.cost_per_million) == (bool(able), min(able) if able else fastest)
        costs = [each.size / 3600 * 3.0 / each.speed * 1e6 for each in stock if each.speed >= at_least]
        assert demand.fast_enough == bool(costs)
        assert not costs or demand.cost_per_million == pytest.approx(min(costs))
        outcomes |= {restart.fast_enough, demand.fast_enough}
    assert outcomes == {True, False}


def test_the_cheaper_instance_type_is_chosen() -> None:
    """Twice as fast for less than twice the price; without enough memory it is none."""
    types = [Instance(name="old", spot=1.0, on_demand=3.0), Instance(name="new", spot=1.5, on_demand=4.0, speed=2.0)]
    advice = Search([offer(each) for each in types], finalists=4, seeds=1, at_least=0).run()
    best = advice.best
    assert best is not None and best.setup.instance == "new"
    assert {each.setup.instance for each in advice.ranking} == {"old", "new"}
    types[1] = types[1].model_copy(update={"memory_gib": 0.01})
    advice = Search([offer(each) for each in types], finalists=4, seeds=1, at_least=0).run()
    assert advice.best is not None and advice.best.setup.instance == "old"
    assert all(each.need_gib and each.need_gib > 0.01 for each in advice.rejected if each.what.startswith("new"))


def test_what_does_not_fit_is_told_with_the_memory_that_it_needs() -> None:
    """A stage of two layers takes 32 MB, and as much for a replica."""
    advice = Search([offer(profile=small(memory=60 * 10**6))], seeds=1, finalists=3, pipelines=1, stages=2).run()
    assert {each.setup.mode for each in advice.ranking} == {RedundancyMode.NONE}
    needs = {each.what: each.need_gib for each in advice.rejected if each.need_gib}
    assert needs == {f"node: 1 x 2, {mode.value}": pytest.approx(64e6 / 2**30) for mode in MODES[1:]}
    none = Search([offer(profile=small(memory=10**6))], seeds=1).run()
    assert not none.ranking and none.paste is None and not none.alternatives[1:]
    assert none.verdict.worth_it is False
    assert "no setup fits; the least is node: 1 x 4, none, which needs a device with 0.0 GiB" in none.verdict.sentence


# -- the block ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", ["auto", 1])
def test_the_block_is_one_of_the_product_s(mode: RedundancyMode, blocks: Any) -> None:
    """Its own parser takes it, and makes the settings of it that were simulated."""
    base = BambooConfig.model_validate({"membership": {"lease_ttl_s": 9}, "redundancy": {"verify_every": 7}})
    setup = Setup(**SHAPE, mode=mode, blocks=blocks, nodes=4)
    parsed = bamboo_config({"bamboo": json.loads(json.dumps(block(setup, base, small())))})
    assert parsed == setup.config(base)
    assert parsed is not None
    assert (parsed.redundancy.mode, parsed.redundancy.verify_every, parsed.topology.blocks) == (mode, 7, blocks)
    limited = bamboo_config({"bamboo": block(setup, base, small(memory=3 * 2**30, workspace_bytes=2**30))})
    assert limited is not None and limited.topology.memory_limit == 2 * 2**30, "what passes need is kept free"


# -- the verdict --------------------------------------------------------------------------------------------

FIGURES: dict[str, Any] = {
    "seeds": 3, "goodput": 0.9, "restarts": 0, "losses": 5, "refused": 0, "dollars": {}, "samples_per_s": 100.0
}  # fmt: skip


def ranked(cost: float | None, spread: float = 0.1, fast_enough: bool = True) -> Ranked:
    setup = Setup(**SHAPE, mode=RedundancyMode.LAZY, blocks="auto", nodes=2)
    own = {"overhead": 0.02, "need_gib": 3.0, "least_members": 1, "checkpoint_s": 60, "checkpoint_steps": 5}
    given = {"cost_per_million": cost, "cost_range": cost and (cost - spread, cost + spread)}
    return Ranked(setup=setup, fast_enough=fast_enough, estimate=cost, **own, **given, **FIGURES)


def other(policy: str, cost: float, fast_enough: bool = True) -> Alternative:
    given = {"cost_per_million": cost, "cost_range": (cost - 0.1, cost + 0.1) if policy != "on-demand" else None}
    return Alternative(policy=policy, instance="node", nodes=4, fast_enough=fast_enough, **given, **FIGURES)  # type: ignore[arg-type]


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
        (2.0, 3.0, 1.0, True, True, "Yes: stock DeepSpeed on demand costs 1.50 times as much"),
    ],
)
def test_the_verdict(
    best: float, demand: float, restart: float, slow: bool, worth_it: bool | None, begins: str
) -> None:
    found = verdict(ranked(best), [other("on-demand", demand), other("checkpoint-restart", restart, not slow)], [])
    assert found.worth_it is worth_it and found.sentence.startswith(begins)
    assert f"{best:.2f} $" in found.sentence and f"{demand:.2f} $" in found.sentence
    assert ("too slow with 100 samples/s" in found.sentence) == slow


def test_the_verdict_where_nothing_is_good() -> None:
    slow = verdict(ranked(1.0, fast_enough=False), [other("on-demand", 3.0)], [])
    assert slow.worth_it is False and slow.sentence.startswith("No: no setup is as fast as was asked for")
    none = verdict(None, [], [Rejected(what="a: 1 x 2", why="it is too dear")])
    assert (none.worth_it, none.sentence) == (False, "No: no setup trains on these nodes: a: 1 x 2: it is too dear")
    some = ranked(1.0).model_copy(update={"cost_range": None})
    assert "(some of 3 seeds have trained nothing: no range)" in verdict(some, [], []).sentence
    alone = verdict(ranked(1.0), [other("on-demand", 3.0, fast_enough=False)], [])
    assert alone.worth_it is True and "nothing else is as fast" in alone.sentence
    assert "checkpoint-restart on spot instances trains nothing at all" in alone.sentence


# -- the command --------------------------------------------------------------------------------------------

TRACE = "0,4\n300,3\n400,4\n1200,4\n"


def run(tmp_path: Path, *options: str, trace: str | None = TRACE) -> tuple[int, str]:
    arguments = ["advise", *options]
    if trace is not None:
        file = tmp_path / "trace.csv"
        file.write_text(trace)
        arguments[1:1] = ["--trace", str(file)]
    result = CliRunner().invoke(cli, arguments)
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_the_table_and_what_simulate_says_of_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is printed simulates the advised job to the very figures of the table."""
    monkeypatch.setenv("COLUMNS", "250")  # pytest-xdist has one of its own
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(small(memory=2**30).model_dump_json())
    options = [
        "--profile",
        "model.json",
        "--finalists",
        "3",
        "--seeds",
        "2",
        "--detection-s",
        "2",
        "--spot-price",
        "0.5",
    ]
    code, said = run(tmp_path, *options, "--json")
    assert code == 0
    advice = json.loads(said)
    best = advice["ranking"][0]
    assert advice["paste"]["ds_config"]["bamboo"]["redundancy"]["mode"] == best["setup"]["mode"]
    code, said = run(tmp_path, *options, "--explain")
    assert code == 0 and f"{best['cost_per_million']:,.2f} ±" in said
    assert advice["verdict"]["sentence"] in said and "Simulated, not measured" in said
    assert "What a million samples pay for:" in said and "Not simulated:" in said
    pasted = json.loads(said[said.index("{\n") : said.index("\n}\n") + 2])
    assert pasted == advice["paste"]["ds_config"] and bamboo_config(pasted) is not None
    Path("ds_config.json").write_text(json.dumps(pasted))
    (again,) = [line for line in said.splitlines() if line.startswith("bamboo simulate")]
    done = CliRunner().invoke(cli, [*shlex.split(again)[1:], "--policy", "bamboo", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["policies"]["bamboo"]
    for name in ("cost_per_million", "samples_per_s", "goodput", "restarts"):
        assert figures[name] == pytest.approx(best[name], rel=1e-9), name


INSTANCE = "a,spot=1,on-demand=2"


@pytest.mark.parametrize(
    ("options", "trace", "expected"),
    [
        ([], TRACE, "--profile is missing: name a preset or a file"),
        (["--profile", "gpt-2"], None, "give one of --trace and --climate"),
        (["--profile", "gpt-2", "--instance", "a,spot=1"], TRACE, "--instance 'a,spot=1': on_demand: Field required"),
        (["--profile", "gpt-2", "--instance", "a,price=1"], TRACE, "'price=1' is none of spot, on-demand, memory-gib"),
        (["--profile", "gpt-2", "--instance", "a,spot=x,on-demand=2"], TRACE, "spot: Input should be a valid number"),
        (["--profile", "gpt-2", "--instance", INSTANCE, "--instance", INSTANCE], TRACE, "a is there more than once"),
        (
            ["--profile", "gpt-2", "--instance", f"{INSTANCE},trace=no.csv"],
            TRACE,
            "instance a: there is no trace no.csv",
        ),
        (
            ["--profile", "gpt-2", "--instance", f"{INSTANCE},trace=x,rate=1"],
            TRACE,
            "leave out climate, rate and nodes",
        ),
        (["--profile", "gpt-2", "--instance", f"{INSTANCE},climate=x"], TRACE, "there is no climate 'x'; there are"),
        (["--profile", "gpt-2", "--instance", INSTANCE, "--spot-price", "1"], TRACE, "have prices of their own"),
        (
            ["--profile", "gpt-2", "--instance", f"{INSTANCE},rate=0.1"],
            TRACE,
            "instance a: rate and nodes are those of a climate, and --trace has its own: leave them out",
        ),
        (["--instance", f"{INSTANCE},trace={__file__}"], TRACE, "--trace: every instance type has its own trace"),
        (["--instance", f"{INSTANCE},trace={__file__}", "--rate", "1"], None, "--rate: every instance type has its"),
        (["--instance", f"{INSTANCE},climate=ec2-p3,nodes=9", "--nodes", "8"], None, "--nodes: every instance type"),
        (["--profile", "gpt-2", "--hours", "2"], TRACE, "--hours: only for a --climate"),
        (["--profile", "gpt-2", "-n", "4"], TRACE, "--workers: only for a SCRIPT; name one, or leave it out"),
        (["--profile", "gpt-2", "train.py"], TRACE, "--profile gpt-2 and the script train.py: give one of them"),
        (["train.py"], TRACE, "-n is missing: how many local workers train.py is measured with"),
        (["-n", "4", "train.py"], TRACE, "there is no script 'train.py'"),
        (
            ["-n", "4", "--write-profile", "no/x.json", "train.py"],
            TRACE,
            "--write-profile no/x.json: there is no folder",
        ),
        (["--profile", "gpt-2", "--pipelines", "3"], TRACE, "--pipelines, --stages: node: 3 x 2: there are 4 nodes"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], trace: str | None, expected: str) -> None:
    code, said = run(tmp_path, *options, trace=trace)
    assert code == 2 and expected in said, said


def test_instance_types_of_options_and_files(tmp_path: Path) -> None:
    one = of_option("p3.2xlarge, spot=0.918, on-demand=3.06, memory-gib=16, climate=ec2-p3, nodes=32")
    assert one == Instance(name="p3.2xlarge", spot=0.918, on_demand=3.06, memory_gib=16, climate="ec2-p3", nodes=32)
    file = tmp_path / "types.json"
    file.write_text('[ // prices of today\n {"name": "a", "spot": 1, "on_demand": 2, "source": "a price list"} ]')
    assert of_file(file) == [Instance(name="a", spot=1, on_demand=2, source="a price list")]
    for text, expected in (("{", "cannot be read"), ("[]", "write a list"), ('["a"]', "number 1: write an object")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            of_file(file)
