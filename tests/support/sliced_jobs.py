"""Jobs with two tensor slices, each of which has a pipeline of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from . import surviving
from .jobs import Result
from .surviving import Reference

SLICES = ("--slices", "2")


def survive(
    folder: Path,
    reference: Reference,
    faults: list[dict[str, Any]],
    stages: int = 2,
    *,
    pipelines: int = 2,
    arguments: tuple[str, ...] = (),
    **more: Any,
) -> Result:
    """As :func:`tests.support.surviving.survive`; there is a pipeline for each slice of each copy of the model."""
    options = (*SLICES, *arguments)
    return surviving.survive(folder, reference, faults, stages, pipelines, options, micro_batches=4, **more)


survive_in_turn = partial(survive, healing=True)
