"""What scripts assign after ``deepspeed.initialize``, on all copies of a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT
from tests.support.surviving import Reference, fault, survive_in_turn

pytestmark = pytest.mark.claim("reference/guarantees.md")

SCRIPT = SUPPORT / "train_assigning.py"


@pytest.mark.integration
def test_what_is_assigned_at_any_time_survives_losses(tmp_path: Path, reference: Reference) -> None:
    """Before the first step, between two, and when a member has the last stage as well, whose script is lost."""
    result = survive_in_turn(
        tmp_path,
        reference,
        [fault(2, 3, "BackwardPass", 1), fault(1, 5, "BackwardPass", 1)],
        3,
        micro_batches=4,
        bamboo={"redundancy": {"verify_every": 1}},
        script=SCRIPT,
        optimizer=None,
        scheduler=None,
        gradient_clipping=0.0,
    )
    assert result.events("replica_verified") and not result.events("replica_mismatch")
