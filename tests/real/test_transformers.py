"""A pipeline of layers of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.jobs import Result
from ..support.surviving import fault, survive_in_turn

pytestmark = pytest.mark.claim("guides/scripts.md")

SCRIPT = Path(__file__).with_name("train_llama.py")


@pytest.mark.tools("transformers")
@pytest.mark.parametrize("lost", [(0, 2), (1,)])
def test_llama(tmp_path: Path, reference: Callable[..., Result], lost: tuple[int, ...]) -> None:
    """A small Llama in 3 stages: each of them is lost, after the first one or alone."""
    faults = [fault(rank, 2 + 2 * n, "BackwardPass", 1) for n, rank in enumerate(lost)]
    brought = {"optimizer": None, "scheduler": None}
    survive_in_turn(tmp_path, reference, faults, 3, micro_batches=4, script=SCRIPT, **brought)
