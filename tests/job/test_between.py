"""What scripts keep where no copy of a stage gets it, and do to their stages between two steps: followed, or told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SUPPORT, Result, run_bamboo, write_config
from tests.support.surviving import Reference, fault, survive

pytestmark = pytest.mark.claim("state.md", "guides/exactness.md", "guides/scripts.md", "reference/guarantees.md")

SCRIPT = SUPPORT / "train_between.py"
CONFIG: dict[str, Any] = {"optimizer": None, "scheduler": None, "gradient_clipping": 0.0}
CHECKED = {"redundancy": {"check_exact": None}}


def run(folder: Path, way: str, *more: str, bamboo: dict[str, Any] | None = None, stages: int = 3) -> Result:
    config = write_config(folder, CHECKED if bamboo is None else bamboo, 4, **CONFIG)
    options = ["--stages", str(stages), "--steps", "8", "--way", way, *more]
    return run_bamboo(folder, stages, options, config, SCRIPT)


# -- what is kept beside the state ----------------------------------------------------------------------------


NAMED = {
    "by-id": (1, r"Inexact: .* step 2, .* its replica is not what its owner has: parameter \d\.weight"),
    "gathering": (2, r"Inexact: .* step 3, .* lacks .*: attribute 'statistics' of the optimizer \(Gathering\)"),
    "queued": (0, r"UnsupportedError: optimizer Queued keeps in its state .*\['history'\] is a deque"),
}
NAMED_AS_WELL = {
    "lookahead": (2, r"Inexact: .* step 3, .* made after the first step lacks .* 'slow' of the optimizer \(Lookah"),
    "wrapping": (0, r"UnsupportedError: optimizer Wrapping has never called the constructor of torch"),
}


@pytest.mark.integration
@pytest.mark.parametrize("way", [*NAMED, *(pytest.param(way, marks=pytest.mark.exhaustive) for way in NAMED_AS_WELL)])
def test_what_does_not_travel_is_named_in_the_first_steps(tmp_path: Path, way: str) -> None:
    """Before any loss, and with exit code 1: no restart could do better."""
    steps, named = (NAMED | NAMED_AS_WELL)[way]
    result = run(tmp_path, way, stages=2)
    assert result.exit_code == 1
    assert any(re.search(named, line) for line in result.output.splitlines()), result.output[-4000:]
    assert len(result.events("step")) <= steps + 1 and not result.events("restart")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_what_layers_gather_is_told_and_no_error(tmp_path: Path) -> None:
    """Their results are compared; a list of what was seen makes no difference."""
    result = run(tmp_path, "listing", stages=2)
    assert result.exit_code == 0, result.output[-4000:]
    assert re.search("do not get has changed: .*attribute 'seen' of layer", result.output), result.output[-4000:]
    assert result.events("exact_checked")


# -- weights for evaluations ----------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(
    "how", ["data", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("copy", "state"))]
)
def test_weights_that_are_exchanged_for_evaluations_are_refused_in_the_first(tmp_path: Path, how: str) -> None:
    result = run(tmp_path, f"ema-{how}", "--evaluate-every", "4", stages=2)
    assert result.exit_code == 1 and len(result.events("step")) == 4
    assert "UnsupportedError: the script evaluates with weights that it has put into stage 0" in result.output
    assert "bamboo_ds.evaluating_with(engine, 'ema')" in result.output and not result.events("restart")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_no_evaluation_is_of_a_mixture(tmp_path: Path) -> None:
    """Where a difference is to be told alone, the evaluation after a loss ends the job and gives no number."""
    block = {"redundancy": {"on_mismatch": "warn", "check_exact": 0}}
    faults = [fault(1, 5, "BackwardPass", 1)]
    result = run(tmp_path, "ema-data", "--evaluate-every", "4", "--faults", json.dumps(faults), bamboo=block)
    assert len(result.faults()) == 1 and result.exit_code == 1
    assert "no process does so for the stages of ranks 1, which are lost: the evaluation would be one of a mixture" in (
        result.output
    )
    assert "No copy of a stage has them" in result.output, "it is told in the first evaluation"
    assert len(result.events("step")) == 8 and not result.events("restart")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_nor_is_one_of_two_stages_that_a_loss_interrupts(tmp_path: Path) -> None:
    """The survivor has no replica of its own stage any more, and goes by what it has seen before the loss."""
    block = {"redundancy": {"on_mismatch": "warn", "check_exact": 0}}
    faults = [fault(1, 4, ".iteration.passes.forward", 1, evaluating=True)]
    arguments = ("--evaluate-every", "4", "--faults", json.dumps(faults))
    result = run(tmp_path, "ema-data", *arguments, bamboo=block, stages=2)
    assert len(result.faults()) == 1 and result.exit_code == 1
    assert "which are lost: the evaluation would be one of a mixture" in result.output
    assert len(result.events("step")) == 4


@pytest.mark.exhaustive
@pytest.mark.integration
def test_changes_that_travel_are_evaluated_with(tmp_path: Path, reference: Reference) -> None:
    """A script that clamps its weights after each step; in this job nobody is lost."""
    arguments = ("--steps", "8", "--way", "clamp", "--evaluate-every", "2")
    survive(tmp_path, reference, [], 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


@pytest.mark.integration
def test_evaluations_with_what_the_optimizer_keeps(tmp_path: Path, reference: Reference) -> None:
    """Losses before an evaluation and in the middle of one; the numbers are those of stock DeepSpeed."""
    faults = [fault(1, 2, "BackwardPass", 1), fault(2, 6, ".iteration.passes.forward", 1, evaluating=True)]
    arguments = ("--steps", "8", "--way", "averaging", "--evaluate-every", "2")
    survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


# -- freezing -------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_what_is_frozen_for_each_stage_is_frozen_on_all_copies(tmp_path: Path, reference: Reference) -> None:
    """After a loss, and before one that hits the iteration in which it takes effect."""
    faults = [fault(1, 2, "BackwardPass", 1), fault(0, 5, "BackwardPass", 2)]
    arguments = ("--steps", "8", "--way", "freeze-visit", "--freeze-at", "5")
    survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


@pytest.mark.exhaustive
@pytest.mark.integration
def test_what_is_frozen_for_each_stage_stays_so_after_a_restart(tmp_path: Path, reference: Reference) -> None:
    """The restart goes on from a checkpoint behind it, so that the function is not called again."""
    arguments = ("--freeze-at", "3", "--save-at", "4")
    faults = [fault(rank, 6, "BackwardPass", 1) for rank in (0, 1)]
    result = run(tmp_path, "freeze-visit", *arguments, "--faults", json.dumps(faults), bamboo={})
    assert len(result.faults()) == 2 and result.exit_code == 0, result.output[-4000:]
    (restart,) = result.events("restart")
    assert restart["step"] > 3, "it goes on from behind the freezing"
    undisturbed = reference(3, 1, 4, "--steps", "8", "--way", "freeze-visit", *arguments, script=SCRIPT, **CONFIG)
    found = [each["losses"] for each in (*result.ranks().values(), *result.joined())]
    assert found and all(each == undisturbed.ranks()[0]["losses"] for each in found)


@pytest.mark.integration
@pytest.mark.parametrize("loss", [pytest.param(2, marks=pytest.mark.exhaustive), 6])
def test_freezing_is_told_and_after_a_loss_starts_again(tmp_path: Path, reference: Reference, loss: int) -> None:
    """Replicas follow what is frozen before a loss; after it a worker for each rank is needed: a restart has one."""
    arguments = ("--steps", "8", "--way", "freeze", "--freeze-at", "4")
    faults = [fault(1, loss, "BackwardPass", 1)]
    if loss > 4:
        result = survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)
        assert "the script has frozen parameters of its stage between two calls" in result.output
        return
    result = run(tmp_path, *arguments[3:4], *arguments[4:], "--faults", json.dumps(faults), bamboo={})
    assert len(result.faults()) == 1 and result.exit_code == 0, result.output[-4000:]
    assert len(result.events("restart")) == 1
    assert "no process runs as rank 1 now. What its script would do to its own stage between two calls" in result.output
    undisturbed = reference(3, 1, 4, *arguments, script=SCRIPT, **CONFIG)
    found = [each["losses"] for each in (*result.ranks().values(), *result.joined())]
    assert found and all(each == undisturbed.ranks()[0]["losses"] for each in found)
