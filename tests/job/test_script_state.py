"""State that a script keeps in places of its own, and what it changes itself, on all copies of a stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import EXIT_FATAL_LOSS
from tests.support.jobs import SUPPORT, run_bamboo, write_config
from tests.support.surviving import Reference, fault, survive, survive_in_turn

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/guarantees.md")

SCRIPT = SUPPORT / "train_script_state.py"
#: The script's own optimizer has one rule per group, which norms of all gradients would mix up.
CONFIG: dict[str, Any] = {"optimizer": None, "scheduler": None, "gradient_clipping": 0.0}


@pytest.mark.integration
def test_all_copies_follow(tmp_path: Path, reference: Reference) -> None:
    """The second loss is survived by a copy that was made in mid-run. Parameters are named by what goes into them.

    Both losses come when an evaluation has just changed what layers keep, or does so.
    """
    faults = [fault(1, 4, ".iteration.passes.forward", 1, evaluating=True), fault(2, 5, "BackwardPass", 1)]
    result = survive_in_turn(
        tmp_path,
        reference,
        faults,
        3,
        arguments=("--change-at", "0", "1", "--evaluate-at", "4", "5"),
        own=True,
        micro_batches=4,
        bamboo={"redundancy": {"verify_every": 1, "check_exact": 4}},
        script=SCRIPT,
        **CONFIG,
    )
    assert result.events("replica_verified") and not result.events("replica_mismatch")
    assert "the script has changed" in result.output  # of the second time
    assert [event["stages"] for event in result.events("exact_checked")] == [3]
    assert "Not rehearsed in steps before which the script had changed it: stage 0 of pipeline 0, " in result.output


@pytest.mark.integration
@pytest.mark.parametrize(
    ("change", "changers", "message"),
    [
        (3, [0, 1, 2], "FatalLoss: no living member holds what the script has just changed in stage 1 of pipeline 0"),
        pytest.param(
            3,
            [1],
            "FatalLoss: no living member holds what the script has just changed in stage 1 of pipeline 0",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4,
            [0, 1, 2],
            r"FatalLoss: no living member holds the script that changes \d.linear.bias and the like in stage 1",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["just-before-a-loss", "of-one-stage-alone", "after-a-loss"],
)
def test_a_change_that_a_lost_stage_lacks(tmp_path: Path, change: int, changers: list[int], message: str) -> None:
    file = write_config(tmp_path, {"recovery": {"max_restarts": 0}}, 4, **CONFIG)
    faults = [fault(1, 3, "BackwardPass", 1)]
    command = ["--stages", "3", "--steps", "8", "--change-at", str(change), "--faults", json.dumps(faults)]
    command += ["--changers", *map(str, changers)]
    result = run_bamboo(tmp_path, 3, command, file, SCRIPT)
    assert len(result.faults()) == 1
    assert result.exit_code == EXIT_FATAL_LOSS, result.output[-4000:]
    # The member that tells of steps may be ended, for another one's error, before it has told of the last one.
    assert change - (change == 4) <= len(result.events("step")) <= change
    assert re.search(message, result.output), result.output[-4000:]


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_stage_that_no_script_changes_is_taken_over(tmp_path: Path, reference: Reference) -> None:
    """Another one is changed before every step, also after the loss."""
    arguments = ("--changers", "0", "--change-at", "1", "2", "3", "4")
    result = survive(
        tmp_path,
        reference,
        [fault(1, 3, "BackwardPass", 1)],
        3,
        arguments=arguments,
        own=True,
        micro_batches=4,
        script=SCRIPT,
        **CONFIG,
    )
    assert result.events("recovered")
