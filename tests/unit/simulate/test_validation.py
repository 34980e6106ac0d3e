"""Whole runs of ``benchmarks/spot.py`` on emulated devices, recorded, against simulations of them.

The files are those that ``benchmarks/predicted.py`` leaves; they are made again by the commands in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import ConfigError
from tests.unit.benchmarks.test_spot import BENCHMARKS
from tests.unit.simulate.test_simulate import model

pytestmark = pytest.mark.claim("guides/simulating.md")

RECORDED = sorted((Path(__file__).parents[2] / "recorded").glob("*.json"))


@pytest.fixture(scope="module")
def recorded() -> Iterator[Any]:
    """The module of the benchmarks."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import recorded as module

        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


def rows(recorded: Any, path: Path) -> tuple[Any, list[Any]]:
    """The report of a simulation, and what was measured beside what is predicted."""
    run = recorded.load(path)
    report, _ = recorded.simulation(run).run(list(run.policies), recorded.PHASES)
    return report, recorded.compare(run, report)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_hold_losses_and_joins(recorded: Any, path: Path) -> None:
    """A run that nothing happens in proves nothing."""
    changes = recorded.load(path).changes
    assert sum(what == "remove" for _, what, _ in changes) >= 3
    assert sum(what == "add" and at_s > 0 for at_s, what, _ in changes) >= 3


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_samples_and_pauses_are_predicted(recorded: Any, path: Path) -> None:
    """Samples within 5 %, pauses within 20 %."""
    report, found = rows(recorded, path)
    # Of restarts the pauses are told.
    own = report.policies.get("bamboo")
    told = {"samples"} if own is None or own.restarts else {"samples", "pause_s"}
    assert {row.what for row in found} == told
    assert all(row.holds for row in found), [str(row) for row in found]


def test_losses_of_owner_and_shadow_are_predicted_to_be_fatal(recorded: Any) -> None:
    report, _ = rows(recorded, next(path for path in RECORDED if path.stem == "fatal-losses"))
    assert report.policies["bamboo"].restarts == 3


def test_three_configurations_are_recorded(recorded: Any) -> None:
    runs = [run for run in map(recorded.load, RECORDED) if "bamboo" in run.policies]
    assert len({(str(run.bamboo["topology"]["blocks"]), run.profile.zero) for run in runs}) == 3


def of_a_run(tmp_path: Path, **changes: object) -> Path:
    """The file of a run of an hour with a loss."""
    content = {
        "profile": model(pipelines=1).model_dump(mode="json"), "pipelines": 1, "stages": 4, "seconds": 3600,
        "changes": [(0, "add", f"n{n}") for n in range(4)] + [(1000, "remove", "n1")],
        "terms": {"detection_s": 0.1}, "policies": {"bamboo": {"samples": 1000, "pause_s": 1.0}},
    }  # fmt: skip
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({**content, **changes}))
    return file


def test_what_was_measured_is_compared_with_the_report(recorded: Any, tmp_path: Path) -> None:
    report, found = rows(recorded, of_a_run(tmp_path))
    predicted = {row.what: row.predicted for row in found}
    assert predicted["samples"] == report.policies["bamboo"].samples
    assert any("TOO FAR" in str(row) for row in found)
    _, found = rows(recorded, of_a_run(tmp_path, policies={"bamboo": predicted}))
    assert [str(row).endswith("(+0.0%)") for row in found] == [True, True]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"changes": [(0, "add", "a"), (9, "remove", "zz")]}, "changes:2: zz is not there"),
        ({"changes": [(0, "add", "a"), (9, "add", "b"), (8, "add", "c")]}, "changes:3: 8000 ms is before the line"),
        ({"bamboo": {"redundancy": {"mode": "no"}}}, "redundancy.mode"),
        ({"seconds": 0}, "recorded.json: seconds 0: Input should be greater than 0"),
    ],
)
def test_a_recorded_run_that_cannot_be_is_refused(
    recorded: Any, tmp_path: Path, wrong: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        recorded.simulation(recorded.load(of_a_run(tmp_path, **wrong)))
    assert expected in str(refused.value)
