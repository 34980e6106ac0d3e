"""Shards of partitioned optimizers after a step: owners of a stage gather them, others get them over channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.test_takeover_cuts import simulated
from tests.support.precisions import BF16_ZERO, FP32_ZERO
from tests.support.surviving import Reference, fault, survive, survive_in_turn

__all__ = ["simulated"]

pytestmark = pytest.mark.claim("state.md", "reference/guarantees.md")

#: Between the optimizer step and the exchange of shards.
STEPPED = ".iteration.replication.exchange_shards"
#: Meanwhile the others have begun to gather.
WAITED_FOR = {"pause": 0.5}


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize(
    ("faults", "config"),
    [
        pytest.param([fault(2, 1, STEPPED), fault(1, 3, STEPPED, **WAITED_FOR)], FP32_ZERO, id="two"),
        pytest.param([fault(3, 2, ".iteration.replication.step")], BF16_ZERO, id="before a replica's step"),
    ],
)
def test_jobs(tmp_path: Path, reference: Reference, faults: list[Any], config: dict[str, Any]) -> None:
    """A member is lost after its step, when nobody has its shard: others are in the gather by then, or are not."""
    result = survive(tmp_path, reference, faults, 2, 2, micro_batches=4, **config)
    assert result.events("replica_verified") and not result.events("replica_mismatch")


@pytest.mark.integration
@pytest.mark.exhaustive
def test_losses_until_one_member_has_several_roles_of_a_stage(tmp_path: Path, reference: Reference) -> None:
    """Healing comes between; what is left of four members are two, and then one."""
    faults = [fault(1, 2, STEPPED, **WAITED_FOR), fault(2, 5, STEPPED), fault(3, 8, STEPPED)]
    result = survive_in_turn(tmp_path, reference, faults, 2, 2, micro_batches=4, **BF16_ZERO)
    assert result.events("replica_verified") and not result.events("replica_mismatch")
    assert len(set(result.events("plan")[-1]["owners"])) == 1
