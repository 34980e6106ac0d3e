"""``benchmarks/spot.py``: what the market does to a job, what supervisors decide, what it costs, and what is told."""

from __future__ import annotations

import json
import math
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bamboo_ds.chaos.schedule import Change, parse_trace
from bamboo_ds.observe.goodput.lives import Category, Rank
from tests.support.etcd import wait_until

pytestmark = pytest.mark.claim("benchmarks.md")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def spot() -> Iterator[Any]:
    """The modules of the program, which imports them from its own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import spot as program
        from spotting import elastic, hub, market, outcome

        yield SimpleNamespace(program=program, elastic=elastic, hub=hub, market=market, outcome=outcome)
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
    at_s = [change.at_ms / 1000 for change in changes if change.what == "remove"]
    gaps = [after - before for before, after in pairwise([0.0, *at_s])]
    assert 7.5 <= min(gaps) < 8.5 and 11.5 < max(gaps) <= 12.5
    assert spot.market.between_losses_s(faults, 1000.0) == pytest.approx(10.0, rel=0.1)


def test_spares_are_there_before_the_first_loss(spot: Any) -> None:
    """They are the newest nodes, which are not lost; one that is lost is of the job."""
    changes = spot.market.seeded(4, 10.0, 1000.0, 7, spares=2)
    kept, faults = spot.market.market(changes, 4, "replace", 1.0, spares=2)
    assert kept == changes
    assert [(f.at_s, f.kind.value, f.target.name) for f in faults[:2]] == [
        (0.0, "join", "node4"),
        (0.0, "join", "node5"),
    ]
    assert {members for at_s, members in spot.market.members_over_time(faults, 4) if at_s} == {5, 6}
    there: list[str] = []
    for change in changes:
        if change.what == "add":
            there.append(change.node)
        else:
            assert there.index(change.node) < 4
            there.remove(change.node)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--spares", "1"], "--spares: only with --failures: leave it out"),
        (["--mtbf-s", "9"], "--mtbf-s: only with --failures: leave it out"),
        (["--failures", "20", "--compress", "3"], "--compress: --failures has no trace: leave it out"),
        (["--failures", "20", "--system", "torchft"], "torchft: not compared with --failures; choose of bamboo, "),
    ],
)
def test_options_that_mean_nothing_are_refused(spot: Any, options: list[str], expected: str) -> None:
    done = CliRunner().invoke(spot.program.main, options)
    assert done.exit_code == 2 and expected in " ".join(done.output.split()), done.output


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


# -- what bamboo's events tell -------------------------------------------------------------------------------


def told(event: str, at: float, **more: Any) -> dict[str, Any]:
    return {"event": event, "time": datetime.fromtimestamp(at, UTC).isoformat(), **more}


def test_steps_of_events(spot: Any) -> None:
    """One told of by two members, one by nobody, and two that a restart has done again."""
    steps = [(1, 101.0), (2, 102.0), (2, 102.1), (4, 104.0), (3, 113.0), (4, 114.0), (5, 115.0)]
    events = [told("step", at, step=step, seconds=1.0, loss=float(step)) for step, at in steps]
    found = spot.elastic._steps(events, [110.0], 100.0, 32)
    assert [(step.number, step.end, step.loss) for step in found] == [
        (1, 1.0, 1.0), (2, 2.0, 2.0), (3, 3.0, None), (4, 4.0, 4.0), (3, 13.0, 3.0), (4, 14.0, 4.0), (5, 15.0, 5.0),
    ]  # fmt: skip
    assert spot.elastic._steps(events, [], 100.0, 32)[-1].number == 5
    assert len(spot.elastic._steps(events, [], 100.0, 32)) == 5, "without a restart nothing is done again"


def test_pauses_of_events(spot: Any) -> None:
    """The longest of each plan's; from a fatal loss to the first step after the restart."""
    pause = {"epoch": 3, "pause_seconds": 0.2, "detection_seconds": 0.1, "redo_seconds": 0.5}
    events = [
        told("recovered", 110.0, **pause),
        told("recovered", 110.1, **{**pause, "pause_seconds": 0.3}),
        told("reconfigured", 112.0, epoch=4, pause_seconds=0.05),
        told("fatal", 120.0),
        told("step", 120.5, seconds=0.5),
        told("restart", 125.0),
        told("step", 131.0, seconds=1.0),
    ]
    found = [(p.kind, p.at, p.seconds, p.redone) for p in spot.elastic._pauses(events, 100.0)]
    assert found == [
        ("takeover", pytest.approx(9.2), pytest.approx(0.4), 0.5),
        ("reconfiguration", pytest.approx(11.95), 0.05, 0.0),
        ("restart", pytest.approx(20.0), pytest.approx(10.0), 0.0),
    ]


# -- sample dropping -----------------------------------------------------------------------------------------


class Stage:
    """The only stage of a pipeline, which has one weight."""

    def __init__(self, address: str, slot: int, stack: ExitStack) -> None:
        host, _, port = address.rpartition(":")
        self._socket = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        self._stream = stack.enter_context(self._socket.makefile("rb"))
        self._write({"slot": slot, "stage": 0})

    def _write(self, words: dict[str, Any], content: bytes = b"") -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n" + content)

    def gradient(self, step: int, digest: str, value: float) -> None:
        self._write({"step": step, "digest": digest, "bytes": 4}, struct.pack("f", value))

    def state(self, content: bytes) -> None:
        self._write({"bytes": len(content)}, content)

    def answer(self) -> tuple[dict[str, Any], bytes]:
        words = json.loads(self._stream.readline())
        return words, self._stream.read(words.pop("bytes"))


def test_pipelines_train_with_those_that_are_there(spot: Any) -> None:
    """The mean is that of the living ones, weights are compared, and a new one goes on from a living one's state."""
    with ExitStack() as stack:
        hub = spot.hub.Hub(stages=1, every=100, first=2)
        stack.callback(hub.close)
        first, second = Stage(hub.address, 0, stack), Stage(hub.address, 1, stack)
        assert [each.answer() for each in (first, second)] == [({"step": 0}, b"")] * 2
        first.gradient(0, "a", 1.0)
        second.gradient(0, "a", 3.0)
        both = {"pipelines": 2, "state": False}
        assert second.answer() == (both, struct.pack("f", 2.0)) == first.answer()
        assert (hub.checks, hub.problems) == (1, [])
        first.gradient(1, "b", 1.0)
        second.gradient(1, "other", 1.0)
        assert second.answer()[0] == both == first.answer()[0]
        assert (hub.checks, hub.problems) == (2, ["weights of stage 0 differ before step 1"])

        first.gradient(2, "c", 5.0)
        hub.drop(1)
        assert first.answer() == ({"pipelines": 1, "state": False}, struct.pack("f", 5.0))
        third = Stage(hub.address, 2, stack)
        wait_until(lambda: 2 in hub._pipelines and hub._pipelines[2].stages, "the third pipeline is there")
        first.gradient(3, "d", 7.0)
        assert first.answer() == ({"pipelines": 1, "state": True}, struct.pack("f", 7.0))
        first.state(b"weights")
        assert third.answer() == ({"step": 4}, b"weights")
        assert hub.steps == [(1, (0, 1)), (2, (0, 1)), (3, (0,)), (4, (0,))]
