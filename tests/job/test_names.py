"""Attributes of a script's tensors and layers may have any name: this package calls no method of theirs by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT
from tests.support.surviving import Reference, fault, survive_in_turn

pytestmark = pytest.mark.claim("contributing.md", "reference/guarantees.md")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_job_whose_attributes_have_all_names(tmp_path: Path, reference: Reference) -> None:
    """With sums after every micro-batch, checkpoints, and replicas that are built while it trains."""
    faults = [fault(1, 4, "BackwardPass", 2), fault(0, 6, "ForwardPass", 1), fault(3, 8, "BackwardPass", 0)]
    result = survive_in_turn(
        tmp_path,
        reference,
        faults,
        arguments=("--save-at", "3"),
        micro_batches=4,
        bamboo={"redundancy": {"verify_every": 1, "sync_every": 1, "check_exact": 3}},
        script=SUPPORT / "train_named.py",
    )
    assert result.events("exact_checked") and result.events("replica_verified")
