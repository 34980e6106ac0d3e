"""What idle time takes off the critical path: steps of replicas, before anything counts on them, and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.test_takeover_cuts import simulated
from tests.support.precisions import BF16, FP16
from tests.support.surviving import Reference, fault, survive

__all__ = ["simulated"]

pytestmark = pytest.mark.claim("reference/guarantees.md")


PRECISIONS: dict[str, Any] = {
    "fp32": (1, 3, {}),
    "two pipelines": (2, 2, {}),
    "fp16": (1, 3, FP16),
    "bf16": (1, 3, BF16),
}


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize("job", PRECISIONS)
def test_a_worker_is_lost_between_commit_and_pending_step(
    tmp_path: Path, reference: Reference, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines, stages, precision = PRECISIONS[job]
    monkeypatch.setenv("BAMBOO_LOG_LEVEL", "INFO")
    # Shadows are idle in iterations only; the first four evaluations compare replicas. What the lost stage computes
    # comes from its shadow, which so is in the evaluation as well.
    loss = fault(1 if pipelines == 1 else 3, 10, ".iteration.passes.forward", 1, evaluating=True)
    arguments = "--steps", "12", "--evaluate-every", "2"
    result = survive(tmp_path, reference, [loss], stages, pipelines, arguments, micro_batches=4, **precision)
    assert result.output.count("has yet to take the step of the last iteration") == 1, result.output[-4000:]
    assert result.events("replica_verified") and not result.events("replica_mismatch")
