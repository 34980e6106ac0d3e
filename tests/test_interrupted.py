"""The end of an epoch while code of the script runs inside an operation: the results are those of stock DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.jobs import SUPPORT
from .support.surviving import Reference, fault, survive_in_turn

pytestmark = [pytest.mark.claim("state.md", "guides/scripts.md", "reference/guarantees.md"), pytest.mark.integration]

SCRIPT = SUPPORT / "train_interrupted.py"
MICRO_BATCHES = 4
#: By place: the rank whose process is there, how many times in a step, and the ranks that are lost meanwhile.
PLACES = {
    "iterator": (0, MICRO_BATCHES, (2, 3, 1)),
    "batch_fn": (3, MICRO_BATCHES, (0, 1, 2)),
    "layer": (1, 2 * MICRO_BATCHES, (3, 0, 2)),
    "backward": (1, 2 * MICRO_BATCHES, (3, 2, 0)),
    "hook": (2, 2 * MICRO_BATCHES, (1, 0, 3)),
    "loss": (3, MICRO_BATCHES, (2, 1, 0)),
    "optimizer": (0, 1, (1, 3, 2)),
    "scheduler": (2, 1, (3, 1, 0)),
    "eval iterator": (3, MICRO_BATCHES, (1, 0, 2)),
    "eval batch_fn": (0, MICRO_BATCHES, (2, 3, 1)),
    "eval layer": (2, 2 * MICRO_BATCHES, (0, 3, 1)),
    "eval loss": (3, MICRO_BATCHES, (0, 2, 1)),
    "visit": (0, 1, (2, 1, 3)),
}


#: These differ from the others in who goes on after the place; the first three are rank 3's, in one job.
FEW = [("batch_fn", "loss", "eval iterator"), ("visit",) * 3]


@pytest.mark.parametrize(
    "places",
    [*FEW, *(pytest.param((place,) * 3, marks=pytest.mark.exhaustive) for place in PLACES if place != "visit")],
    ids=lambda places: "-".join(dict.fromkeys(places)),
)
def test_the_epoch_ends_in_code_of_the_script(
    tmp_path: Path, reference: Reference, places: tuple[str, str, str]
) -> None:
    """In the first, a middle and the last of its calls in an operation; one loss after the other."""
    faults = []
    for number, (place, lost) in enumerate(zip(places, PLACES[places[0]][2], strict=True)):
        by, calls, _ = PLACES[place]
        faults.append(fault(lost, 2 + 2 * number, place, (0, calls // 2, calls - 1)[number], by=by))
    survive_in_turn(
        tmp_path,
        reference,
        faults,
        micro_batches=MICRO_BATCHES,
        script=SCRIPT,
        optimizer=None,
        scheduler=None,
        gradient_clipping=0.0,
    )
