"""Simulated jobs: which settings they go by, what checkpoints hold and miss, what stock jobs need, what all cost."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bamboo_ds.config import BambooConfig, RedundancyMode, parse_block
from bamboo_ds.job_settings import paths_by_name
from bamboo_ds.observe import events as ev
from bamboo_ds.simulate.bamboo import planned
from bamboo_ds.simulate.baselines import SampleDropping, Stock
from bamboo_ds.simulate.market import CLIMATES, Climate, drawn
from bamboo_ds.simulate.pace import AUTO, OVERHEAD, Pace
from bamboo_ds.simulate.profile import Profile
from bamboo_ds.simulate.run import LIMIT, ON_DEMAND, POLICIES, Simulation
from bamboo_ds.simulate.settings import MODELLED, NEUTRAL, NOT_MODELLED, unmodelled
from bamboo_ds.simulate.terms import Terms
from bamboo_ds.simulate.training import SimulatedOutcome
from bamboo_ds.topology.memory import StateBytes
from bamboo_ds.topology.roles import MOST_BLOCKS
from tests.unit.simulate.test_simulate import FREE, model, nodes, simulate, simulation

pytestmark = pytest.mark.claim("guides/simulating.md")

#: One of four members goes for good, and with it, without replicas, its stage.
FATAL = nodes(4, 3000, (500.0, "remove", "n1"))
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "simulating.md"


def outcome(block: dict[str, object], terms: Terms = FREE, market: object = FATAL) -> SimulatedOutcome:
    """What a job of one pipeline without replicas does, with some more settings."""
    config = parse_block({"redundancy": {"mode": "none"}, **block})
    one = simulation(market, model(pipelines=1), terms, config=config)  # type: ignore[arg-type]
    return one.job("bamboo", market, 0).simulate()  # type: ignore[arg-type]


def saved(done: SimulatedOutcome) -> list[ev.CheckpointSaved]:
    return [event for event in done.events if isinstance(event, ev.CheckpointSaved)]


def restarts(done: SimulatedOutcome) -> list[ev.Restart]:
    return [event for event in done.events if isinstance(event, ev.Restart)]


# -- settings -----------------------------------------------------------------------------------------------


def test_a_fatal_loss_is_a_restart() -> None:
    done = outcome({}, FREE.model_copy(update={"checkpoint_s": 100.0, "restart_s": 30.0}))
    assert len(restarts(done)) == 1 and done.idle is None
    restart = restarts(done)[0]
    newest = [event.step for event in saved(done) if event.time < restart.time][-1]
    assert restart.step == newest > 0 and done.samples > 8 * newest


def test_without_restarts_a_fatal_loss_ends_the_job() -> None:
    terms = FREE.model_copy(update={"checkpoint_s": 100.0})
    done = outcome({"recovery": {"max_restarts": 0}}, terms)
    assert done.idle == "bamboo.recovery.max_restarts = 0: a fatal loss ends the job"
    # What its last checkpoint contains is left.
    assert not restarts(done) and done.samples == 8 * saved(done)[-1].step > 0
    # Its nodes are paid for, and none of them is a member.
    assert done.outside_s == pytest.approx(3 * 2500, abs=1)


def test_a_restart_waits_for_as_many_members_as_it_needs() -> None:
    done = outcome({"recovery": {"min_members": 4}})
    assert done.idle == "3 of bamboo.recovery.min_members = 4 are there" and not restarts(done)
    later = nodes(4, 3000, (500.0, "remove", "n1"), (1500.0, "add", "x"))
    done = outcome({"recovery": {"min_members": 4}}, market=later)
    assert done.idle is None
    assert [(event.time - done.events[0].time).total_seconds() for event in restarts(done)] == pytest.approx([1500])


@pytest.mark.parametrize("policy", ["bamboo:none", "checkpoint-restart", "sample-dropping"])
def test_a_loss_begins_a_restart_anew(policy: str) -> None:
    """Members go at 500 and 520 s; a restart takes 30 s, and its workers are those that live at its end."""
    changes = [(500.0, "remove", "n1"), (520.0, "remove", "n2"), (520.0, "add", "x"), (520.0, "add", "y")]
    market = nodes(4, 1000, *changes)
    terms = FREE.model_copy(update={"checkpoint_s": 100.0, "restart_s": 30.0})
    done = simulation(market, model(pipelines=1), terms).job(policy, market, 0).simulate()
    (restart,) = restarts(done)
    assert (restart.time - done.events[0].time).total_seconds() == pytest.approx(550.0, abs=1e-3)


@pytest.mark.parametrize(("checkpoint_s", "most"), [(1e9, 3), (60.0, None)])
def test_restarts_in_a_row_that_get_nowhere_are_counted(checkpoint_s: float, most: int | None) -> None:
    """Without checkpoints no restart gets beyond the step of the first loss, as there is a loss every 200 s."""
    changes = []
    for number in range(1, 9):
        member = "n1" if number == 1 else f"x{number - 1}"
        changes += [(200.0 * number + 301, "remove", member), (200.0 * number + 301.001, "add", f"x{number}")]
    market = nodes(2, 3000, (0.5, "remove", "n0"), *changes)
    own = {"checkpoint": {"every_s": 0}}
    config = {"recovery": {"max_restarts": 3}, "redundancy": {"mode": "none"}, **own}
    terms = FREE.model_copy(update={"checkpoint_s": checkpoint_s})
    done = simulation(market, model(pipelines=1), terms, config=parse_block(config)).job("bamboo", market, 0).simulate()
    if most is None:
        assert done.idle is None and len(restarts(done)) >= 8
    else:
        # The first restart of all is none in a row of failures.
        assert str(done.idle).startswith(
            f"bamboo.recovery.max_restarts = 3: it was started again {most} times in a row"
        )


def test_training_waits_for_a_checkpoint_that_is_not_asynchronous() -> None:
    terms = FREE.model_copy(update={"checkpoint_s": 200.0, "storage_gb_s": 0.0002})  # 100 MB of state: 160 s
    calm = nodes(4, 3000)
    before, after = (outcome({"checkpoint": {"asynchronous": each}}, terms, calm) for each in (True, False))
    count, seconds = len(saved(after)), saved(after)[0].seconds
    assert seconds > 100 and count >= 5
    lost_s = count * seconds
    assert after.samples / before.samples == pytest.approx(1 - lost_s / 3000, abs=0.03)


def test_members_hold_no_more_than_they_may() -> None:
    """Two layers of a million parameters and 14 to 18 bytes of each: replicas of all stages are too much."""
    market = nodes(4, 1000)

    def shadowed(limit_mb: float | None) -> int:
        config = BambooConfig().overridden({"topology.memory_limit_mb": limit_mb})
        one = simulation(market, model(pipelines=1), config=config)
        done = one.job("bamboo-whole-stages", market, 0).simulate()
        plan = next(event for event in done.events if isinstance(event, ev.PlanWritten))
        count = sum(shadow is not None for shadow in plan.shadows)
        pace = one.pace(RedundancyMode.EAGER_FORWARD, whole=True)
        assert sum(shadow is not None for shadow in planned(pace, 4, config).shadows) == count
        return count

    assert shadowed(None) == shadowed(80) == 4
    assert shadowed(40) == 0


def test_members_that_join_are_given_no_more_than_they_may_hold() -> None:
    market = nodes(2, 2000, (500.0, "add", "x"))

    def most(limit_mb: float | None) -> int:
        config = BambooConfig().overridden({"topology.memory_limit_mb": limit_mb})
        done = simulation(market, model(pipelines=1), config=config).job("bamboo-whole-stages", market, 0).simulate()
        plans = [event for event in done.events if isinstance(event, ev.PlanWritten)]
        assert "x" in plans[-1].members
        return max(plan.owners.count(each) + plan.shadows.count(each) for plan in plans for each in plan.members)

    # Two members own all four roles, of 32 MB each, and would shadow all of them.
    assert most(None) == 4 and most(70.0) == 2


def test_every_setting_is_modelled_or_told_of(tmp_path: Path) -> None:
    assert MODELLED | NEUTRAL | set(NOT_MODELLED) == set(paths_by_name().values())
    guide = GUIDE.read_text()
    assert [path for path in MODELLED if f"`{path}`" not in guide] == []
    block = {
        "redundancy": {"verify_every": 7, "mode": "none"}, "recovery": {"max_restarts": 3},
        "observe": {"timeline": "off"}, "membership": {"fence_s": 30},
    }  # fmt: skip
    assert unmodelled(parse_block(block)) == ["bamboo.redundancy.verify_every", "bamboo.membership.fence_s"]
    assert unmodelled(BambooConfig()) == []
    config, profile = tmp_path / "ds_config.json", tmp_path / "model.json"
    config.write_text(json.dumps({"bamboo": block}))
    profile.write_text(model(pipelines=1).model_dump_json())
    options = ["--profile", str(profile), "--config", str(config)]
    code, said = simulate(tmp_path, *options)
    assert code == 0 and "bamboo.redundancy.verify_every is not modelled: it changes nothing here" in said
    assert "timeline" not in said and "max_restarts" not in said
    code, said = simulate(tmp_path, *options, "--json")
    assert json.loads(said)["unmodelled"] == ["bamboo.redundancy.verify_every", "bamboo.membership.fence_s"]


def test_blocks_are_as_many_as_engines_make() -> None:
    layers = model(layers=4 * (MOST_BLOCKS + 4))
    assert max(Pace(layers, FREE, 1, 4, RedundancyMode.LAZY).layout.blocks) == AUTO == MOST_BLOCKS


def test_no_mode_is_faster_than_none() -> None:
    assert min(OVERHEAD.values()) == OVERHEAD[RedundancyMode.NONE] == OVERHEAD[RedundancyMode.LAZY]


# -- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bamboo", "checkpoint-restart", "sample-dropping"])
def test_a_checkpoint_whose_writers_are_lost_is_none(policy: str) -> None:
    """8 million parameters and 14 bytes of each, by four members at 1 MB/s: 28 s.

    A job of this package does not divide what its roles write: a stage of 4 million parameters takes 56 s.
    """
    terms = FREE.model_copy(update={"storage_gb_s": 0.001, "checkpoint_s": 100.0, "restart_s": 5.0})
    profile, config = model(pipelines=2, stages=2), BambooConfig.model_validate({"membership": {"settle_ms": 0}})

    def done(*changes: tuple[float, str, str]) -> SimulatedOutcome:
        market = nodes(4, 1000, *changes)
        return simulation(market, profile, terms, config=config).job(policy, market, 0).simulate()

    def ends(outcome: SimulatedOutcome) -> list[float]:
        return [round((event.time - outcome.events[0].time).total_seconds(), 3) for event in saved(outcome)]

    calm = done()
    end_s = ends(calm)[0]
    assert saved(calm)[0].seconds == pytest.approx(56 if policy == "bamboo" else 28)
    interrupted = ends(done((end_s - 10, "remove", "n2")))
    assert interrupted and end_s not in interrupted
    # One that is complete before stays.
    assert end_s in ends(done((end_s + 1, "remove", "n2")))


@pytest.mark.parametrize("policy", ["bamboo", "sample-dropping"])
def test_checkpoints_do_not_overlap(policy: str) -> None:
    """Each takes longer than there is between two: training goes at the pace of the storage."""
    terms = FREE.model_copy(update={"storage_gb_s": 0.0001, "checkpoint_s": 60.0})
    market = nodes(4, 4000)
    done = simulation(market, model(pipelines=1), terms).job(policy, market, 0).simulate()
    ends = [(event.time - done.events[0].time).total_seconds() for event in saved(done)]
    seconds = saved(done)[0].seconds
    assert seconds > 200 and len(ends) > 5
    assert all(later - sooner >= seconds - 1e-3 for sooner, later in pairwise(ends))


def test_copies_and_checkpoints_contain_no_gradients() -> None:
    profile = model(pipelines=2, zero=True, precision="bf16")
    state = StateBytes("bf16", profile.optimizer, True, 2)
    market = nodes(2, 500, (100.0, "add", "x"))
    one = simulation(market, profile)
    built = [e for e in one.job("bamboo", market, 0).simulate().events if isinstance(e, ev.ReplicaBuilt)]
    assert built and {event.bytes for event in built} == {round(2e6 * state.copied)}
    # All shards of the optimizer's state are in a checkpoint, and each is loaded and copied by its owner.
    assert [Pace(profile, FREE, count, 4, RedundancyMode.LAZY).saved for count in (1, 2, 4)] == [14, 14, 14]
    # Two members write 8 million times 14 bytes at 1 MB/s.
    slow = FREE.model_copy(update={"storage_gb_s": 0.001, "checkpoint_s": 100.0})
    pair = simulation(nodes(2, 500), model(pipelines=1), slow).job("bamboo", nodes(2, 500), 0).simulate()
    assert saved(pair)[0].seconds == pytest.approx(56)
    stock, terms = Stock(profile, Terms()), Terms()
    assert stock.write_s(4) == pytest.approx(8e6 * 14 / 4 / (terms.storage_gb_s * 1e9))
    assert stock.load_s(2, 4) == pytest.approx(2e6 * state.copied / (terms.storage_gb_s * 1e9))
    assert stock.copy_s(2, 4) == pytest.approx(2e6 * state.copied / (terms.host_gb_s * 1e9))


@pytest.mark.parametrize(
    ("mode", "fatal"), [(RedundancyMode.LAZY, 0), (RedundancyMode.AUTO, 0), (RedundancyMode.EAGER_FORWARD, 1)]
)
def test_a_takeover_needs_no_room_for_parked_replicas(mode: RedundancyMode, fatal: int) -> None:
    """Owner and shadow of a role go at once: owners of its stage in other pipelines have two roles beside a replica."""
    profile = model(pipelines=3, stages=2, micro_batches=6, precision="bf16", optimizer="adam")
    one = StateBytes(profile.precision, profile.optimizer, pipelines=3).of(4 * 10**6).own
    tight = profile.model_copy(update={"memory_bytes": round(2.5 * one)})
    config = parse_block({"redundancy": {"mode": mode.value}})
    still = simulation(nodes(6, 400), tight, config=config).job("bamboo", nodes(6, 400), 0).simulate()
    start = next(event for event in still.events if isinstance(event, ev.PlanWritten))
    pair = start.owners[0], start.shadows[0]
    market = nodes(6, 400, *((200.0, "remove", str(member)) for member in pair))
    done = simulation(market, tight, config=config).job("bamboo", market, 0).simulate()
    lost = {event.member_id for event in done.events if isinstance(event, ev.MemberLost)}
    assert lost == set(pair) and len([event for event in done.events if isinstance(event, ev.Fatal)]) == fatal


def keeping(memory: int, precision: str = "fp32") -> tuple[Profile, BambooConfig]:
    """Four stages, in fp32 of 32 MB with Adam, of which 16 MB can rest, on devices with so much memory.

    A micro-batch keeps 2 MB of each; 4, 3, 2 and 1 of them are under way.
    """
    profile = model(pipelines=1, optimizer="adam", memory=memory, precision=precision)
    layers = tuple(layer.model_copy(update={"kept_bytes": 10**6}) for layer in profile.layers)
    config = BambooConfig().overridden(
        {"topology.memory_limit_mb": memory / 2**20, "redundancy.mode": RedundancyMode.LAZY}
    )
    return profile.model_copy(update={"layers": layers}), config


@pytest.mark.parametrize(("mega", "fatal"), [(149, 0), (102, 0), (95, 1)])
def test_losses_of_members_with_little_memory_end_no_job(mega: int, fatal: int) -> None:
    """All four stages take 148 MB on one member, 100 MB with optimizers at rest, 88 MB with one micro-batch each."""
    profile, config = keeping(mega * 10**6)
    losses = [(510.0 * number, "remove", f"n{number}") for number in (1, 2, 3)]
    market = nodes(4, 3000, *losses)
    done = simulation(market, profile, config=config).job("bamboo", market, 0).simulate()
    assert len([event for event in done.events if isinstance(event, ev.MemberLost)]) == 3
    # Two members with 95 MB have no room for all replicas, but what is left of the job has for one micro-batch each.
    assert len([event for event in done.events if isinstance(event, ev.Fatal)]) == fatal and done.refused == 0
    end = [event for event in done.events if isinstance(event, ev.Step)][-1]
    assert (end.time - done.events[0].time).total_seconds() > 2500, "one member trains on"


def test_the_memory_and_the_time_of_optimizers_at_rest() -> None:
    profile, config = keeping(96 * 10**6)
    slow = FREE.model_copy(update={"host_gb_s": 0.032})
    pace = simulation(nodes(4, 100), profile, slow, config=config).pace(RedundancyMode.LAZY)
    alone = planned(pace, 1, config)
    assert alone.tight == (("m0", 2),) and pace.footprint.fits(alone)
    # Of the optimizers of three stages nothing is on the device, and of each stage two micro-batches are, if it has so
    # many.
    assert pace.footprint.need(alone) == (4 * 32 - 3 * 16 + 2 * (2 + 2 + 2 + 1)) * 10**6
    whole = replace(alone, tight=())
    assert pace.footprint.need(whole) == (4 * 32 + 2 * (4 + 3 + 2 + 1)) * 10**6 and not pace.footprint.fits(whole)
    # Each goes to the device and back at 32 MB/s.
    seconds = [pace.epilogue(plan)[1] for plan in (whole, alone)]
    assert seconds[1] - seconds[0] == pytest.approx(3 * 2 * 16 / 32)
    # With fp16 masters are on the device for the step of one stage at a time.
    halves, config = keeping(96 * 10**6, "fp16")
    pace = simulation(nodes(4, 100), halves, config=config).pace(RedundancyMode.LAZY)
    lean = replace(planned(pace, 1, config), tight=(("m0", 0),))
    state = StateBytes("fp16", "adam")
    assert state.resting == 0 and replace(state, parked=True).resting == 12
    assert pace.footprint.need(lean) == (4 * 2 * state.owner - 3 * 2 * 12 + 2 * 4 + 2 * (4 + 3 + 2 + 1)) * 10**6


# -- stock jobs ---------------------------------------------------------------------------------------------


def test_zero_makes_states_of_stock_jobs_smaller_as_well() -> None:
    plain, sharded = (Stock(model(zero=zero, precision="bf16"), Terms()) for zero in (False, True))
    assert sharded.need(4, 2, 2) < plain.need(4, 2, 2)
    # A job of this package without replicas keeps what stock DeepSpeed's keeps.
    profile = model(zero=True, precision="bf16", pipelines=2)
    config = parse_block({"redundancy": {"mode": "none"}})
    memory = simulation(nodes(8, 100), profile, config=config).memory()
    assert memory.without == pytest.approx(memory.replicas)


def test_pipelines_that_are_dropped_take_their_shards_along() -> None:
    """With ZeRO-1 a pipeline that is left alone keeps more than its members have memory for: a restart waits."""
    profile = model(pipelines=2, stages=2, zero=True, precision="bf16")
    need = [Stock(profile, FREE).need(pipelines, 2, 4) for pipelines in (1, 2)]
    tight = profile.model_copy(update={"memory_bytes": round(sum(need) / 2)})
    assert need[1] < need[0]
    market = nodes(4, 2000, (500.0, "remove", "n1"), (1000.0, "add", "x"))
    done = simulation(market, tight).job("sample-dropping", market, 0).simulate()
    assert [(e.time - done.events[0].time).total_seconds() for e in restarts(done)] == pytest.approx([1000])


def test_a_second_loss_repeats_no_more_than_the_rest() -> None:
    """An iteration of 24 s, with losses 23 s and 23.5 s after its begin, of which each takes 0.15 s to be noticed."""
    terms = FREE.model_copy(update={"detection_s": 0.1, "rebuild_s": 0.05})
    profile = model(layers=2, micro_batches=24, micro_batch=1, stages=2)
    market = nodes(8, 400, (95.0, "remove", "n0"), (95.5, "remove", "n1"))
    for seed in range(20):
        job = SampleDropping(market, Stock(profile, terms), terms, seed, 4, 2)
        done = job.simulate()
        first = next(event for event in done.events if isinstance(event, ev.PlanWritten))
        pairs = [set(first.members[at : at + 2]) for at in range(0, 8, 2)]
        iteration_s = Stock(profile, terms).arrangement(4, 2)
        assert iteration_s is not None
        began_s = 95.0 // iteration_s.seconds * iteration_s.seconds
        steps = [event for event in done.events if isinstance(event, ev.Step)]
        hit = next(s for s in steps if (s.time - done.events[0].time).total_seconds() > 95.5)
        end_s = (hit.time - done.events[0].time).total_seconds()
        assert end_s - began_s == pytest.approx(iteration_s.seconds + 0.3, abs=0.05), seed
        if {"n0", "n1"} not in pairs:
            return
    raise AssertionError("both losses were of one pipeline in all runs")


# -- costs -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", ["bamboo", "bamboo:none", "checkpoint-restart,sample-dropping,on-demand,limit"])
def test_pipelines_of_one_stage(tmp_path: Path, policy: str) -> None:
    options = ["--profile", "bert-large", "--stages", "1", "--pipelines", "4"]
    code, said = simulate(tmp_path, *options, "--policy", policy)
    assert code == 0, said
