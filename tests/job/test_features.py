"""What a job may use besides plain layers, while it loses two of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.surviving import Reference, fault, survive

pytestmark = [
    pytest.mark.claim("guides/exactness.md", "reference/guarantees.md", "reference/limits.md"),
    pytest.mark.integration,
]


@pytest.mark.parametrize(
    ("victims", "arguments", "own", "config"),
    [
        pytest.param(
            (0, 2),
            ("--model", "tuple", "--optimizer", "client-adamw"),
            False,
            # It begins with the learning rate that it finds.
            {
                "optimizer": None,
                "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}},
            },
            id="tuples-and-client-adamw-and-cosine",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (3, 1),
            ("--model", "loss", "--norm", "--optimizer", "client-sgd"),
            False,
            {"optimizer": None, "scheduler": None},
            id="own-loss-and-buffers-and-client-sgd",
        ),
        pytest.param(
            (0, 2),
            ("--compile", "--cache"),
            False,
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},
            id="compiled-and-late-buffers-and-warmup",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (3, 1),
            ("--dropout", "0.2", "--checkpoint-activations", "1"),
            True,
            {},
            id="checkpointed-dropout",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (3, 1),
            ("--checkpoint-activations", "1", "--instances", "--training-data"),
            False,
            {"pipeline": {"use_reentrant": False}, "gradient_clipping": 0.0},
            id="non-reentrant-and-instances-and-dataset-and-no-clipping",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_features(
    tmp_path: Path,
    reference: Reference,
    victims: tuple[int, ...],
    arguments: tuple[str, ...],
    own: bool,
    config: dict[str, Any],
) -> None:
    """The first steps pass their check; an end of the pipeline is lost, then a stage within it."""
    faults = [fault(rank, 3 + i, "BackwardPass", 1) for i, rank in enumerate(victims)]
    result = survive(tmp_path, reference, faults, micro_batches=4, arguments=arguments, own=own, checked=True, **config)
    assert {dump["compiled"] for dump in result.ranks().values()} == {"--compile" in arguments}
