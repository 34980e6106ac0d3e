"""The end of an epoch while code of the script runs inside an operation: the results are those of stock DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT
from tests.support.surviving import Reference, fault, survive_in_turn

pytestmark = [pytest.mark.claim("state.md", "guides/scripts.md", "reference/guarantees.md"), pytest.mark.integration]

SCRIPT = SUPPORT / "train_interrupted.py"
MICRO_BATCHES = 4
#: By place: how many times in a step a process of the rank that is there comes to it.
CALLS = {
    **dict.fromkeys(("iterator", "batch_fn", "loss"), MICRO_BATCHES),
    **dict.fromkeys(("eval iterator", "eval batch_fn", "eval loss"), MICRO_BATCHES),
    **dict.fromkeys(("layer", "backward", "hook", "eval layer"), 2 * MICRO_BATCHES),
    **dict.fromkeys(("optimizer", "scheduler", "visit"), 1),
}
#: The rank whose process is there, the places, and the ranks that are lost meanwhile.
JOBS = [
    (3, ("batch_fn", "loss", "eval iterator"), (0, 1, 2)),
    (0, ("iterator", "optimizer", "visit"), (2, 3, 1)),
    # In whose place the others go on, where these are, is the same as above.
    (2, ("hook", "scheduler", "eval layer"), (1, 0, 3)),
    (1, ("layer", "backward", "layer"), (3, 0, 2)),
    (0, ("eval batch_fn", "visit", "iterator"), (2, 3, 1)),
    (3, ("loss", "eval loss", "batch_fn"), (2, 1, 0)),
]


@pytest.mark.parametrize(
    ("by", "places", "lost"),
    [pytest.param(*job, marks=[pytest.mark.exhaustive] * (number > 0)) for number, job in enumerate(JOBS)],
)
def test_the_epoch_ends_in_code_of_the_script(
    tmp_path: Path, reference: Reference, by: int, places: tuple[str, ...], lost: tuple[int, ...]
) -> None:
    """In the first, a middle and the last of the calls in an operation; one loss after the other."""
    calls = [CALLS[place] for place in places]
    counts = 0, calls[1] // 2, calls[2] - 1
    faults = [
        fault(rank, 2 + 2 * number, place, count, by=by)
        for number, (rank, place, count) in enumerate(zip(lost, places, counts, strict=True))
    ]
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
