"""Sessions of tests whose jobs run on the work-alike of NCCL, also on the device of tests: ``make exhaustive`` has one.

Where the environment of pytest has the variable of :data:`.groups.SEED`, tests that start jobs are run. Each ends as
skipped where it is about to start one that has nothing for these groups to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .groups import SEED

#: Whether this is such a session.
ON_NCCL = SEED in os.environ
#: Scripts whose models have tied layers.
_TIED = {"train_gpt.py", "train_like_megatron.py", "train_like_neox.py"}
#: Scripts that have several pipelines, or collectives of their own, whatever their options are.
_ALWAYS = {"train_surface.py", "train_with_collectives.py"}
#: Scripts that have such groups in all sessions.
_OWN_GROUPS = {"train_late.py"}
#: Tests that have no place in such a session, and why.
_LEFT_OUT = {
    "test_sliced_jobs.py::test_loss_during_a_recovery[ResendActivation]": (
        "any pass of slices may have been cut off, so that all are done again, and nothing is sent again"
    )
}
#: Scripts and options whose jobs do without the device of tests, and why.
_ON_HOST = {
    "--seed-layers": "stock DeepSpeed, with which they are compared, draws the random numbers of the host",
    "train_like_neox.py": "its model makes tensors on the host",
    "train_like_qlora_pipe.py": "it saves tensors as they are, and those of the device cannot be loaded without it",
    "train_with_collectives.py": "its collectives have tensors of the host, which are gloo's beside a device",
}


def has_jobs(item: pytest.Item) -> bool:
    """Whether a test may start jobs with the means of :mod:`..jobs`, and is not left out."""
    if item.nodeid.rpartition("/")[2] in _LEFT_OUT:
        return False
    names = {*getattr(item, "fixturenames", ()), *dir(getattr(item, "module", None))}
    starts = item.get_closest_marker("integration") is not None
    return starts and not names.isdisjoint(("reference", "run_bamboo", "RunningJob"))


def reduces(world: int, arguments: Sequence[str], script: Path) -> bool:
    """Whether members of a job add up with others: over pipelines, slices or tied stages, or in the script."""
    if script.name in _ALWAYS:
        return True
    if "--stages" not in arguments or script.name in _OWN_GROUPS:
        return False
    stages = int(arguments[arguments.index("--stages") + 1])
    return world > stages or script.name in _TIED


def stays_on_host(arguments: Sequence[str], script: Path) -> bool:
    """Whether a job does without the device of tests."""
    return not _ON_HOST.keys().isdisjoint((script.name, *arguments))


def check(folder: Path) -> None:
    """Workers of a job that has ended have communicated by these groups, and the device of tests has lost no copy."""
    begun = [int(file.read_text()) for file in folder.glob("nccl-*")]
    assert any(count > 4 for count in begun), begun  # all that live, or who computes an end with tied weights
    on_device = [json.loads(file.read_text()) for file in folder.glob("far-*")]
    assert not any(counts["lost"] for counts in on_device), on_device
