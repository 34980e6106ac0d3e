"""Jobs that lose workers at exact places and are compared with undisturbed ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from .compare import assert_equal
from .faults import in_turn, mark
from .jobs import TRAIN, Reference, Result, run_bamboo, slow_until, write_config

STEPS = 5


def fault(rank: int, step: int, at: str, micro_batch: int | None = None, **more: Any) -> dict[str, Any]:
    """See :mod:`.faults`."""
    return {"rank": rank, "step": step, "at": at, "micro_batch": micro_batch, **more}


def survive(
    folder: Path,
    reference: Reference,
    faults: list[dict[str, Any]],
    stages: int = 4,
    pipelines: int = 1,
    arguments: tuple[str, ...] = (),
    own: bool = False,
    *,
    micro_batches: int = 6,
    bamboo: dict[str, Any] | None = None,
    script: Path = TRAIN,
    healing: bool = False,
    checked: bool = False,
    pace: tuple[str, ...] = (),
    **config: Any,
) -> Result:
    """Run ``script`` with ``faults`` and compare with the undisturbed run: stock DeepSpeed's, or ours with ``own``.

    With ``healing`` each fault waits until redundancy has healed, and the job ends soon after the last one. With
    ``checked`` the first steps are checked as they are by default; the faults strike after them. ``pace`` are arguments
    that only make passes longer: the undisturbed run has none of them.
    """
    if healing:
        faults = in_turn(*faults)
        pace = (*pace, *slow_until(folder / mark(faults[-1]), 0.1))
    elif "--steps" not in arguments:
        arguments = ("--steps", str(STEPS), *arguments)
    block = {"redundancy": {"verify_every": 2, **({"check_exact": None} if checked else {})}, **(bamboo or {})}
    file = write_config(folder, block, micro_batches, **config)
    command = ["--stages", str(stages), *arguments, *pace, "--faults", json.dumps(faults)]
    result = run_bamboo(folder, stages * pipelines, command, file, script)
    assert result.exit_code == 0, result.output[-4000:]
    assert not checked or len(result.events("exact_checked")) == 1, result.output[-4000:]
    length = result.length if healing else ()
    undisturbed = reference(stages, pipelines, micro_batches, *arguments, *length, own=own, script=script, **config)
    assert_equal(result, undisturbed, faults)
    return result


#: :func:`survive` with losses one after the other.
survive_in_turn = partial(survive, healing=True)
