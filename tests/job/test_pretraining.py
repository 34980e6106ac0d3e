"""The GPT as Megatron-DeepSpeed trains it, all at once.

Two pipelines, half precision, ZeRO stage 1, tied embeddings, activation checkpointing, dropout; stages are divided
among the members that are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt_jobs import survive_in_turn
from tests.support.precisions import BF16_ZERO, FP16_ZERO
from tests.support.surviving import Reference, fault

pytestmark = pytest.mark.claim("guides/even-shares.md", "guides/exactness.md", "reference/guarantees.md")

#: Ranks 0..3 are (pipeline, stage) = (0, 0), (1, 0), (0, 1), (1, 1).
FAULTS = ((0, "ForwardPass", 2), (3, "ReduceTiedGrads", None))
#: Ranks 0..7, of four stages, likewise: of every stage a different instruction's.
ALL_FAULTS = (
    (0, "ForwardPass", 2),
    (3, "BackwardPass", 1),
    (4, "OptimizerStep", None),
    (7, "ReduceTiedGrads", None),
)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("stages", "losses", "precision", "arguments", "own"),
    [
        # With seeds of the layers' own stock DeepSpeed draws the same masks.
        pytest.param(2, FAULTS, BF16_ZERO, ("--seed-layers",), False, id="bf16"),
        pytest.param(4, ALL_FAULTS, FP16_ZERO, (), True, id="fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_every_stage_is_lost(
    tmp_path: Path,
    reference: Reference,
    stages: int,
    losses: tuple[tuple[int, str, int | None], ...],
    precision: dict[str, Any],
    arguments: tuple[str, ...],
    own: bool,
) -> None:
    """One after the other, each when the job has recovered from the one before. Those left divide the stages."""
    faults = [fault(rank, 2 + 2 * n, at, micro_batch) for n, (rank, at, micro_batch) in enumerate(losses)]
    options = ("--dropout", "0.1", "--checkpoint-activations", "1", "--layers", str(2 * stages), *arguments)
    block = {"redundancy": {"verify_every": 2, "check_exact": 2}, "topology": {"blocks": "auto"}}
    result = survive_in_turn(tmp_path, reference, faults, stages, 2, options, own, bamboo=block, **precision)
    (event,) = result.events("exact_checked")
    assert (event["step"], event["steps"], event["stages"]) == (2, 2, 2 * stages)
    assert any(plan["lent"] for plan in result.events("plan"))
