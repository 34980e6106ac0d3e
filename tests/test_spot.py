"""The arithmetic of ``benchmarks/spot.py``: what the market does to a job, what supervisors decide, what it costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from bamboo_ds.chaos.schedule import Change, parse_trace
from bamboo_ds.observe.lives import Category, Rank

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def spot() -> Iterator[Any]:
    """The pure modules, which programs import from their own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from spotting import market, outcome

        yield SimpleNamespace(market=market, outcome=outcome)
    finally:
        sys.path.remove(str(BENCHMARKS))


def work(spot: Any, layers: int = 16, micro_batches: int = 8) -> Any:
    return spot.market.Work(spot.market.Shape(2, 4), layers, micro_batches, 2, 0.005)


def test_the_interval_of_young_and_daly(spot: Any) -> None:
    """The loss per second, C / T + T / 2M, is least there."""
    best = spot.market.young_daly_s(0.5, 100.0)
    assert best == pytest.approx(10.0)

    def loss(interval: float) -> float:
        return 0.5 / interval + interval / 200.0

    assert loss(best) < min(loss(best * 0.9), loss(best * 1.1))
    assert spot.market.save_every(0.5, 100.0, 0.7) == 14
    assert spot.market.save_every(0.001, 1.0, 5.0) == 1
    assert spot.market.save_every(0.5, math.inf, 0.7) == 0


@pytest.mark.parametrize(
    ("members", "shape"),
    [(0, None), (1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 2)), (6, (2, 3)), (7, (2, 3)), (8, (2, 4))],
)
def test_the_fastest_whole_pipelines(spot: Any, members: int, shape: tuple[int, int] | None) -> None:
    found = spot.market.best_shape(work(spot), members)
    assert (None if found is None else (found.pipelines, found.stages)) == shape


def test_of_equally_fast_pipelines_as_many_as_before(spot: Any) -> None:
    """Results are the same to the last bit then."""
    job, shape = work(spot, layers=3), spot.market.Shape
    assert job.step_s(shape(2, 2)) == job.step_s(shape(1, 3))
    assert spot.market.best_shape(job, 4) == shape(2, 2)


def test_without_other_shapes_of_a_checkpoint_only_whole_pipelines_go_on(spot: Any) -> None:
    fixed = replace(work(spot), reshapes=False)
    shapes = [spot.market.best_shape(fixed, members) for members in (3, 4, 7, 8)]
    assert [shape and (shape.pipelines, shape.stages) for shape in shapes] == [None, (1, 4), (1, 4), (2, 4)]


def test_a_step_by_1f1b(spot: Any) -> None:
    job, shape = work(spot), spot.market.Shape
    assert job.step_s(shape(2, 4)) == pytest.approx((8 + 3) * 4 * 0.015)
    assert job.step_s(shape(1, 3)) == pytest.approx((16 + 2) * 6 * 0.015)
    assert job.step_s(shape(1, 17)) == math.inf
    assert work(spot, micro_batches=1).step_s(shape(3, 1)) == math.inf


def test_a_restart_for_more_members_pays_if_there_is_time(spot: Any) -> None:
    pays = spot.market.larger_pays
    assert pays(now_s=1.0, then_s=0.5, restart_s=4.0, until_loss_s=9.0)
    assert not pays(now_s=1.0, then_s=0.5, restart_s=5.0, until_loss_s=9.0)
    assert not pays(now_s=1.0, then_s=0.5, restart_s=4.0, until_loss_s=3.0)


TRACE = parse_trace(
    "0,add,a\n0,add,b\n0,add,c\n0,add,d\n1000,remove,b\n2000,add,e\n3000,remove,a\n4000,remove,c\n5000,add,f\n", "trace"
)


def test_a_window_begins_with_the_nodes_that_are_there(spot: Any) -> None:
    found = spot.market.window(TRACE, 2.0, 5.0)
    assert found == [
        *(Change(0.0, "add", node) for node in "acde"),
        Change(1000.0, "remove", "a"),
        Change(2000.0, "remove", "c"),
    ]
    with pytest.raises(click.BadParameter, match="no node is lost"):
        spot.market.window(TRACE, 4.5, 6.0)


def test_further_nodes_replace_those_that_go(spot: Any) -> None:
    changes = spot.market.window(TRACE, 0.0, 6.0)
    kept, faults = spot.market.market(changes, 2, "replace", 10.0)
    assert kept == changes
    assert [(f.at_s, f.kind.value, f.target.name) for f in faults] == [
        (0.1, "kill_agent", "b"),
        (0.1, "join", "c"),
        (0.3, "kill_agent", "a"),
        (0.3, "join", "d"),
        (0.4, "kill_agent", "c"),
        (0.4, "join", "e"),
    ]
    with pytest.raises(click.BadParameter, match="begins with 4 nodes, and the job has 5"):
        spot.market.market(changes, 5, "replace", 10.0)


def test_every_other_node_keeps_the_share_that_lives(spot: Any) -> None:
    kept, faults = spot.market.market(spot.market.window(TRACE, 0.0, 6.0), 2, "scale", 1.0)
    assert [change.node for change in kept if change.what == "add"] == ["b", "d", "f"]
    points = spot.market.members_over_time(faults, 2)
    assert points == [(0.0, 2), (1.0, 1), (5.0, 2)]
    assert spot.market.member_seconds(points, 6.0) == pytest.approx(2 + 4 + 2)
    assert spot.market.member_seconds(points, 0.5) == pytest.approx(1.0)


def test_the_written_trace_is_the_market(spot: Any) -> None:
    changes = spot.market.window(TRACE, 0.5, 6.0)
    assert parse_trace(spot.market.trace_text(changes), "written") == changes


def test_seeded_losses_are_replaced_at_once(spot: Any) -> None:
    changes = spot.market.seeded(4, 10.0, 1000.0, 7)
    assert changes[: len(changes) // 2] == spot.market.seeded(4, 10.0, 2000.0, 7)[: len(changes) // 2]
    _, faults = spot.market.market(changes, 4, "replace", 1.0)
    assert {members for _, members in spot.market.members_over_time(faults, 4)} == {3, 4}
    assert 60 <= sum(change.what == "remove" for change in changes) <= 140
    assert spot.market.between_losses_s(faults, 1000.0) == pytest.approx(10.0, rel=0.4)


def test_only_living_nodes_cost(spot: Any) -> None:
    assert spot.market.cost_per_million(7200.0, 3.0, 1000) == pytest.approx(6000.0)
    assert spot.market.cost_per_million(7200.0, 3.0, 0) == math.inf


def outcome_of(spot: Any, numbers: list[int], losses: list[float | None]) -> Any:
    done = [
        spot.outcome.Done(number, i, i + 1.0, 32, loss)
        for i, (number, loss) in enumerate(zip(numbers, losses, strict=True))
    ]
    return spot.outcome.Outcome("x", "x", 1.0, seconds=10.0, done=done, changes=[(0.0, 4), (5.0, 2)])


def test_steps_done_again_count_once(spot: Any) -> None:
    found = outcome_of(spot, [5, 6, 7, 6, 7, 8], [0.5, 0.4, 0.9, 0.4, 0.3, 0.2])
    assert [step.loss for step in found.kept] == [0.5, 0.4, 0.3, 0.2]
    assert (found.samples, found.redone, found.samples_per_s) == (128, 64, 12.8)
    assert found.node_seconds == 30.0
    assert found.limit_share(full_rate=16.0, members=4) == pytest.approx(128 / (16 * 30 / 4))


@pytest.mark.parametrize(
    ("numbers", "losses", "tolerance", "holds"),
    [
        ([1, 2, 3], [0.5, 0.25, 0.125], 0.0, True),
        ([1, 2, 3], [0.5, None, 0.125], 0.0, True),
        ([1, 2, 3], [0.5, 0.2500001, 0.125], 0.0, False),
        ([1, 2, 3], [0.5, 0.2500001, 0.125], 1e-4, True),
        ([1, 3], [0.5, 0.125], 0.0, False),
        ([], [], 0.0, False),
    ],
)
def test_what_a_proof_finds(spot: Any, numbers: list[int], losses: list[Any], tolerance: float, holds: bool) -> None:
    kept = outcome_of(spot, numbers, losses).kept
    assert spot.outcome.prove("it", kept, {1: 0.5, 2: 0.25, 3: 0.125}, tolerance).holds is holds


def test_steps_that_the_undisturbed_run_has_not_done_prove_nothing(spot: Any) -> None:
    kept = outcome_of(spot, [1, 2, 3], [0.5, 0.25, 0.125]).kept
    found = spot.outcome.prove("it", kept, {1: 0.5, 2: 0.25}, 0.0)
    assert not found.holds
    assert found.detail == "the undisturbed run has not done 1 of the steps"


def test_member_seconds_by_category(spot: Any) -> None:
    book = spot.outcome.Book()
    book.begin("a", 90.0)
    book.begin("b", 104.0)
    book.lives["a"].label(95.0, 103.0, Rank.STEP, Category.PRODUCTIVE)
    book.lives["b"].label(104.0, 120.0, Rank.IDLE, Category.STANDBY)
    book.end("a", 106.0)
    found = {category: seconds for category, seconds in book.add(100.0, 110.0).items() if seconds}
    assert found == {Category.PRODUCTIVE: 3.0, Category.OTHER: 3.0, Category.STANDBY: 6.0}
