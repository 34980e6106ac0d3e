"""Whole runs of ``benchmarks/spot.py`` on emulated devices, recorded, against simulations of them.

The files are those that ``benchmarks/predicted.py`` leaves; they are made again by the commands in docs/benchmarks.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from bamboo_ds.simulate.measured import PHASES, Row, compare, load, simulation

pytestmark = pytest.mark.claim("guides/simulating.md")

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@cache
def rows(path: Path) -> dict[tuple[str, str], Row]:
    """What was measured and is predicted, by policy and figure."""
    measured = load(path)
    report, _ = simulation(measured).run(list(measured.policies), PHASES)
    return {(row.policy, row.what): row for row in compare(measured, report)}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_hold_losses_and_joins(path: Path) -> None:
    """A run that nothing happens in proves nothing."""
    changes = load(path).changes
    assert sum(what == "remove" for _, what, _ in changes) >= 3
    assert sum(what == "add" and at_s > 0 for at_s, what, _ in changes) >= 3


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_samples_and_pauses_are_predicted(path: Path) -> None:
    """Samples within 5 %, pauses within 20 %."""
    found = rows(path)
    # Of restarts the pauses are told.
    assert {what for policy, what in found} == {"samples"} | ({"pause_s"} if ("bamboo", "samples") in found else set())
    assert all(row.holds for row in found.values()), [str(row) for row in found.values()]


def test_three_configurations_are_recorded() -> None:
    runs = [run for run in map(load, RECORDED) if "bamboo" in run.policies]
    assert len({(str(run.bamboo["topology"]["blocks"]), run.profile.zero) for run in runs}) == 3
