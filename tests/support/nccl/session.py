"""Sessions of tests whose jobs run on the work-alike of NCCL, also on the device of tests: ``make exhaustive`` has one.

Where the environment of pytest has the variable of :data:`.groups.SEED`, what compares jobs with undisturbed ones is
run, and ends as skipped where it is about to start a job that has nothing for these groups to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from .groups import SEED

#: Whether this is such a session.
ON_NCCL = SEED in os.environ
#: Scripts whose models have tied layers.
_TIED = {"train_gpt.py", "train_like_megatron.py", "train_like_neox.py", "train_further_engines.py"}
#: Options of scripts whose jobs stay on the host in such a session, and why.
_ON_HOST = {"--seed-layers": "they draw what stock DeepSpeed draws, which has the host's random numbers"}


def stays_on_host(arguments: Sequence[str]) -> bool:
    """Whether a job has one of these options."""
    return not _ON_HOST.keys().isdisjoint(arguments)


def reduces(world: int, arguments: Sequence[str], config: Path, script: Path) -> bool:
    """Whether members of a job add gradients up with others: over pipelines, slices or tied stages, or by ZeRO."""
    if "--stages" not in arguments:
        return False
    stages = int(arguments[arguments.index("--stages") + 1])
    return world > stages or script.name in _TIED or "zero_optimization" in json.loads(config.read_text())


def check(folder: Path) -> None:
    """Workers of a job that has ended have communicated by these groups, and the device of tests has lost no copy."""
    begun = [int(file.read_text()) for file in folder.glob("nccl-*")]
    assert any(count > 4 for count in begun), begun  # all that live, or who computes an end with tied weights
    on_device = [json.loads(file.read_text()) for file in folder.glob("far-*")]
    assert not any(counts["lost"] for counts in on_device), on_device
