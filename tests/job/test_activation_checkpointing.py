"""Activation checkpointing: recomputed and redundant passes draw the owner's random numbers, wherever they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt_jobs import survive
from tests.support.surviving import Reference, fault

pytestmark = pytest.mark.claim("reference/guarantees.md", "reference/settings.md")


CONTIGUOUS = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}
ON_CPU = {"partition_activations": True, "cpu_checkpointing": True}
OTHER = {"use_reentrant": False}


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("victims", "arguments", "own", "config"),
    [
        ((3, 1), ("--dropout", "0.2", "--checkpointable", "LayerNorm"), True, {"activation_checkpointing": CONTIGUOUS}),
        ((0, 2), ("--dropout", "0.2", "--seed-layers"), False, {}),
        ((3, 1), ("--dropout", "0.2"), True, {"pipeline": OTHER}),
        ((3, 1), (), False, {"pipeline": OTHER, "activation_checkpointing": ON_CPU}),
    ],
    ids=["dropout-contiguous", "dropout-seeded-layers", "dropout-non-reentrant", "non-reentrant-partitioned-cpu"],
)
def test_losses_in_the_middle_of_backward(
    tmp_path: Path,
    reference: Reference,
    victims: tuple[int, int],
    arguments: tuple[str, ...],
    own: bool,
    config: dict[str, Any],
) -> None:
    """An end of the pipeline, then a stage within it; as stock DeepSpeed where nothing is random but by its seeds."""
    faults = [fault(rank, 1 + 2 * i, "BackwardPass", 2 - i) for i, rank in enumerate(victims)]
    options = ("--steps", "5", "--checkpoint-activations", "1", "--layers", "8", *arguments)
    survive(tmp_path, reference, faults, 4, 1, options, own, **config)
