"""The check of a job's first steps: what passes it, what it finds, and that a job goes on as if it were not there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli.demo import train as demo_train
from tests.support.faults import mark
from tests.support.jobs import SUPPORT, RunningJob, run_bamboo, write_config
from tests.support.sliced_jobs import SLICES
from tests.support.surviving import Reference, fault, survive

pytestmark = pytest.mark.claim("guides/exactness.md")

ROOT = Path(__file__).parents[2]
INEXACT = SUPPORT / "train_inexact.py"
CHECK = {"redundancy": {"check_exact": 3}}


def inexact(folder: Path, reaction: str, *culprits: str, faults: Sequence[dict[str, Any]] = (), steps: int = 4) -> Any:
    block = {"redundancy": {"check_exact": 3, "on_mismatch": reaction}}
    config = write_config(folder, block, 4, optimizer=None, scheduler=None)
    stages = len(culprits)
    options = ["--stages", str(stages), "--culprits", ",".join(culprits), "--steps", str(steps)]
    return run_bamboo(folder, stages, [*options, "--faults", json.dumps(faults)], config, INEXACT)


# -- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_demo_passes_with_a_ready_configuration(tmp_path: Path) -> None:
    config, script = ROOT / "configs" / "pipeline_tuned.json", Path(demo_train.__file__)
    with RunningJob(tmp_path, 4, ["--steps", "4"], config, script, options=["--check-exact", "3"]) as job:
        result = job.finish()
    assert result.exit_code == 0, result.output[-4000:]
    (event,) = result.events("exact_checked")
    assert (event["step"], event["steps"], event["stages"], event["not_rehearsed"]) == (3, 3, 4, [])
    said = "bamboo: the first 3 steps are exact: 4 stages computed again by their shadows in 1 of them"
    assert result.output.count(said) == 1 and f"{event['tensors']} tensors" in result.output
    assert not result.events("exact_mismatch")


@pytest.mark.integration
def test_each_culprit_is_named(tmp_path: Path) -> None:
    """One in each stage; none hides another, since a shadow computes from what the owner has been given."""
    result = inexact(tmp_path, "warn", "data", "backward", "global", "list")
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.events("step")) == 4
    found: dict[int, tuple[int, str, str]] = {}
    for event in result.events("exact_mismatch"):
        found.setdefault(event["role"][1], (event["step"], event["found"], event["tensors"][0]))
    assert found[0][:2] == (2, "replica") and found[0][2].startswith("parameter 0.linear.weight (by up to 0.0")
    assert found[1] == (2, "rehearsal", "gradient that layer 4 (Rounded) gives back in micro-batch 0")
    assert found[2] == (2, "rehearsal", "output of layer 7 (Counted) in micro-batch 0")
    assert found[3] == (2, "rehearsal", "output of layer 10 (Listed) in micro-batch 0")
    assert "step 3, stage 3 of pipeline 0: its shadow computes something else than its owner" in result.output
    assert "the check of the first 3 steps has found differences" in result.output
    assert not result.events("exact_checked")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("culprits", "steps", "named"),
    [
        (("generator", "time"), 2, r"step 3, .* output of layer (1 \(Noisy\)|4 \(Timed\)) in micro-batch 0"),
        (("step", "step"), 1, r"step 1, .* its replica is not .* parameter [03]\.linear\.weight \(by up to 0\.001\)"),
    ],
    ids=["passes", "steps"],
)
def test_a_difference_ends_the_job(tmp_path: Path, culprits: tuple[str, ...], steps: int, named: str) -> None:
    """What passes differ in is found before the step."""
    result = inexact(tmp_path, "stop", *culprits)
    assert result.exit_code == 1
    assert re.search(f"Inexact: the check of the first steps: {named}", result.output), result.output[-4000:]
    assert len(result.events("step")) == steps


@pytest.mark.integration
def test_a_loss_in_a_rehearsal(tmp_path: Path, reference: Reference) -> None:
    """Its shadow goes on from what it has rehearsed; the check begins again and has a result in the end."""
    faults = [fault(1, 2, "ResendGrad", 1)]  # nothing is sent again but in a rehearsal, or after a loss
    result = survive(tmp_path, reference, faults, 3, arguments=("--steps", "16"), bamboo=CHECK)
    (event,) = result.events("exact_checked")
    first = event["step"] - 2
    assert first > 3 and f"bamboo: steps {first} to {event['step']} are exact" in result.output
    assert not result.events("exact_mismatch")


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize(
    ("step", "culprits"),
    [
        pytest.param(0, ("global",) * 3, id="first"),
        pytest.param(1, ("global",) * 3, id="second"),
        pytest.param(1, ("none", "global", "none", "none"), id="one-stage"),
    ],
)
def test_a_loss_before_the_check_is_over_hides_nothing(tmp_path: Path, step: int, culprits: tuple[str, ...]) -> None:
    """What was taken over without the count of the script is computed otherwise; the check that begins again tells."""
    faults = [fault(1, step, "OptimizerStep")]
    result = inexact(tmp_path, "stop", *culprits, faults=faults, steps=30)
    assert result.exit_code == 1 and (tmp_path / mark(faults[0])).exists()
    named = (
        rf"Inexact: .*\(a member was lost in step {step + 2}, before the check was over: .*output of layer \d \(Counted"
    )
    assert re.search(named, result.output), result.output[-4000:]
    assert len(result.events("step")) < 30


@pytest.mark.exhaustive
@pytest.mark.integration
def test_where_nobody_is_left_to_check_it_is_told(tmp_path: Path) -> None:
    faults = [fault(1, 1, "OptimizerStep")]
    result = inexact(tmp_path, "stop", "global", "global", faults=faults, steps=6)
    assert result.exit_code == 0, result.output[-4000:]
    assert (tmp_path / mark(faults[0])).exists() and not result.events("exact_checked")
    assert result.output.count("nobody is left to check with: whether this script keeps something that replicas") == 1


@pytest.mark.exhaustive
@pytest.mark.integration
def test_tensor_slices_are_not_rehearsed_and_it_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path, CHECK, 2)
    result = run_bamboo(tmp_path, 4, ["--stages", "2", *SLICES, "--steps", "3"], config)
    assert result.exit_code == 0, result.output[-4000:]
    (event,) = result.events("exact_checked")
    assert event["stages"] == 0 and len(event["not_rehearsed"]) == 4 and event["tensors"] > 100
    assert "Not rehearsed (tensor slices): stage 0 of pipeline 0" in result.output
