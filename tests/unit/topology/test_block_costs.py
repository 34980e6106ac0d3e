"""Measured costs: what members measure, and what the planner makes of it."""

from __future__ import annotations

from random import Random
from statistics import median_low

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.engine.iteration.block_times import BlockTimes
from bamboo_ds.topology import BlockCosts, BlockSeconds, Layout, Role, settled

pytestmark = pytest.mark.claim("guides/even-shares.md")

LAYOUT = Layout(1, 3, blocks=(2, 2, 2))


def costs_of(
    previous: BlockCosts | None, rows: dict[str, list[BlockSeconds]], iteration_s: float, layout: Layout = LAYOUT
) -> BlockCosts | None:
    """Where all compute that have told anything."""
    return settled(previous, layout, rows, rows.keys(), iteration_s)


def told(stage: int, *latest: float, least: float = 1.0) -> list[BlockSeconds]:
    return [BlockSeconds(stage, block, min(least, each), each) for block, each in enumerate(latest)]


def test_who_is_slow_and_what_is_dear() -> None:
    """A block that has never taken less is dear; a member that takes longer than somebody has once taken is slow."""
    costs = costs_of(None, {"a": told(0, 1, 1), "b": told(1, 3, 3), "c": told(2, 1, 4, least=4)}, 10)
    assert costs == BlockCosts(((1, 1), (1, 1), (1, 4)), (("b", 3.0),))
    assert costs.part(2, 0, 2) == 5 and costs.slow("b") == 3 and costs.slow("a") == 1
    # The dear block turns out to be dear for its member only.
    shared = {"a": told(0, 1, 1), "c": told(2, 1, 4, least=4), "d": [BlockSeconds(2, 1, 1, 1)]}
    costs = costs_of(None, shared, 10)
    assert costs is not None and costs.seconds[2] == (1, 1) and costs.slowness == (("c", 2.5),)


def test_what_is_not_known_is_as_usual() -> None:
    assert costs_of(None, {}, 0) is None and costs_of(None, {"a": []}, 1) is None
    assert costs_of(None, {"a": told(0, 1, 1)}, 1, Layout(1, 3)) is None
    costs = costs_of(None, {"a": told(0, 1, 1), "b": [BlockSeconds(1, 0, 0.5, 0.5)]}, 1)
    assert costs == BlockCosts(((1, 1), (0.5, 0.5), (0.85, 0.85)))
    # Members that are lost leave what they knew.
    assert costs_of(costs, {"c": told(2, 1, 1)}, 1) == BlockCosts(((1, 1), (0.5, 0.5), (1, 1)))


def test_what_scatters_changes_nothing() -> None:
    before = BlockCosts(((1, 1),) * 3, (("b", 3.0),))
    rows = {"a": told(0, 1, 1.2), "b": told(1, 3.5, 3.6), "c": told(2, 1.1, 0.9, least=0.9)}
    costs = costs_of(before, rows, 10)
    assert costs is not None and costs.slowness == (("b", 3.0),)
    # Nothing changes before all have told, but for standbys.
    waits = {**rows, "b": [BlockSeconds(1, 0, 0.5), BlockSeconds(1, 1, 0.5)]}
    assert costs_of(before, waits, 10) == before and settled(before, LAYOUT, {}, "abc", 10) == before
    waits["c"] = told(2, 1, 1)
    stood_by = settled(before, LAYOUT, waits, "ac", 10)
    assert stood_by is not None and stood_by.slowness == (("b", 3.0),) and stood_by.seconds[1] == (0.5, 0.5)
    gone = costs_of(before, {**rows, "b": told(1, 1.1, 1.1)}, 10)
    assert gone is not None and not gone.slowness


def test_blocks_that_are_alike_cost_the_same() -> None:
    """Whatever scatters: divisions and orders decide between them by rules."""
    random = Random(1)
    for _ in range(20):
        rows = {}
        for stage, dear in enumerate((4, 1, 1)):
            found = [random.uniform(0.0119, 0.0121) * dear, random.uniform(0.0119, 0.0121)]
            rows[f"m{stage}"] = told(stage, *found)
        costs = costs_of(None, rows, 0.1)
        assert costs is not None
        ((first, second), *others) = costs.seconds
        assert {second, *others[0], *others[1]} == {second} and first / second == pytest.approx(4, rel=0.02)


def test_passes_that_are_little_of_an_iteration_count_as_equal() -> None:
    rows = {"a": told(0, 1, 1), "b": told(1, 2, 2), "c": told(2, 1, 1)}
    costs = costs_of(None, rows, 13)
    assert costs is not None
    assert costs_of(None, rows, 14) is None and costs_of(costs, rows, 14) is not None
    assert costs_of(costs, rows, 21) is None


def iteration(times: BlockTimes, forwards: list[float], backward: float, count: int = 4) -> bool:
    """Blocks from number 1 on of one role."""
    for _ in range(count):
        for block, seconds in enumerate(forwards, start=1):
            times.forward(Role(0, 2), block, seconds)
        times.backward(Role(0, 2), 1, 1 + len(forwards), backward)
    return times.end_iteration(1.0)


def test_what_a_member_measures() -> None:
    times = BlockTimes(True)
    assert not any(iteration(times, [9.0, 9.0], 9.0) for _ in range(1))  # the first iteration
    found = [iteration(times, [1.0, 3.0], 8.0) for _ in range(5)]
    assert found == [False] * 4 + [True]
    assert times.told() == (BlockSeconds(2, 1, 12, 12), BlockSeconds(2, 2, 36, 36)) and times.iteration_s == 1
    assert not iteration(times, [1.0, 3.1], 8.0)
    # An odd one changes nothing, three slow ones do.
    assert [iteration(times, [3.0, 9.0], 24.0) for _ in range(3)] == [False, False, True]
    assert times.told() == (BlockSeconds(2, 1, 12, 36), BlockSeconds(2, 2, 36, 108))
    # What is computed elsewhere is not forgotten.
    assert iteration(times, [1.0], 2.0)
    assert times.told()[1] == BlockSeconds(2, 2, 36, None)
    # With another plan it is measured anew.
    times.enter(2)
    assert [iteration(times, [1.0], 2.0) for _ in range(5)] == [True] * 4 + [True]
    assert times.told()[0] == BlockSeconds(2, 1, 12, 12)


@settings(max_examples=50)
@given(st.integers(2, 6), st.integers(0, 2**32))
def test_the_true_costs_are_found(stages: int, seed: int) -> None:
    """Where every block has been computed by a member that is not slow, by whomever it is computed now."""
    random = Random(seed)
    layout = Layout(1, stages, blocks=(3,) * stages)
    true = [[random.uniform(1, 5) for _ in range(3)] for _ in range(stages)]
    slow = {f"m{stage}": random.uniform(2, 5) for stage in range(stages) if random.random() < 0.3}
    if 2 * len(slow) >= stages:
        return
    rows = {}
    for stage in range(stages):
        member = f"m{stage}"
        mine = [(stage, block) for block in range(3)] + [((stage + 1) % stages, 0)]
        rows[member] = [
            BlockSeconds(*each, true[each[0]][each[1]], true[each[0]][each[1]] * slow.get(member, 1)) for each in mine
        ]
    costs = costs_of(None, rows, 1.0, layout)
    assert costs is not None
    usual = median_low(second for seconds in true for second in seconds)
    for stage, seconds in enumerate(true):
        for found, second in zip(costs.seconds[stage], seconds, strict=True):
            assert abs(found - second) <= 0.026 * usual
    assert costs.slowness == tuple((member, float(f"{times:.3g}")) for member, times in sorted(slow.items()))
