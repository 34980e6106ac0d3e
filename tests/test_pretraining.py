"""The GPT as Megatron-DeepSpeed trains it, all at once.

Two pipelines of four stages, half precision, ZeRO stage 1, tied embeddings, activation checkpointing, dropout; stages
are divided among the members that are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .support.gpt_jobs import survive_in_turn
from .support.precisions import BF16_ZERO, FP16_ZERO
from .support.surviving import Reference, fault

pytestmark = pytest.mark.claim("guides/even-shares.md", "guides/exactness.md", "reference/guarantees.md")

#: Ranks 0..7 are (pipeline, stage) = (0, 0), (1, 0), (0, 1), ..., (1, 3): of every stage a different instruction's.
FAULTS = (
    (0, "ForwardPass", 2),
    (3, "BackwardPass", 1),
    (4, "OptimizerStep", None),
    (7, "ReduceTiedGrads", None),
)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("precision", "arguments", "own"),
    [
        # With seeds of the layers' own stock DeepSpeed draws the same masks.
        pytest.param(BF16_ZERO, ("--seed-layers",), False, id="bf16"),
        pytest.param(FP16_ZERO, (), True, id="fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_every_stage_is_lost(
    tmp_path: Path, reference: Reference, precision: dict[str, Any], arguments: tuple[str, ...], own: bool
) -> None:
    """One after the other, each when the job has recovered from the one before. Those left divide the stages."""
    faults = [fault(rank, 2 + 2 * n, at, micro_batch) for n, (rank, at, micro_batch) in enumerate(FAULTS)]
    options = ("--dropout", "0.1", "--checkpoint-activations", "1", "--layers", "8", *arguments)
    block = {"redundancy": {"verify_every": 2, "check_exact": 2}, "topology": {"blocks": "auto"}}
    result = survive_in_turn(tmp_path, reference, faults, 4, 2, options, own, bamboo=block, **precision)
    (event,) = result.events("exact_checked")
    assert (event["step"], event["steps"], event["stages"]) == (2, 2, 8)
    assert any(plan["lent"] for plan in result.events("plan"))
