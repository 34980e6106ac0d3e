"""Jobs on the work-alike of NCCL: what reduces over pipelines, slices and stages, undisturbed and with losses.

They compute what stock DeepSpeed does over gloo: with two ranks a sum has one order. With three it has that of ranks,
whichever a group has of its own. ``make exhaustive`` repeats the jobs with seeds, on the device of tests as well, and
runs those of other tests on both: see :mod:`.support.nccl.session`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.job import test_elastic, test_own_checkpoints, test_precision
from tests.support import far_device, gpt_jobs, sliced_jobs
from tests.support.nccl import session
from tests.support.nccl.groups import SEED
from tests.support.precisions import BF16, BF16_ZERO, FP16, FP32_ZERO
from tests.support.surviving import Reference, fault, survive

pytestmark = [pytest.mark.claim("reference/limits.md"), pytest.mark.integration]

Job = Callable[[Path, Reference], Any]
LOSS = fault(3, 2, "BackwardPass", 1)
#: Owners of a stage are about to gather the shards that they have stepped.
GATHER = ".iteration.replication.exchange_shards"


def two_pipelines(*faults: dict[str, Any], **config: Any) -> Job:
    return lambda folder, reference: survive(folder, reference, [*faults], 2, 2, micro_batches=4, **config)


def tied(*faults: dict[str, Any]) -> Job:
    return lambda folder, reference: gpt_jobs.survive(folder, reference, [*faults], 4)


def sliced(*faults: dict[str, Any]) -> Job:
    return lambda folder, reference: sliced_jobs.survive(folder, reference, [*faults])


#: Those that are repeated with seeds.
JOBS: dict[str, Job] = {
    "undisturbed": two_pipelines(),
    "fp32": two_pipelines(LOSS),
    "two": two_pipelines(fault(0, 1, "ReduceGrads"), fault(3, 3, "Commit")),
    "zero": two_pipelines(LOSS, **FP32_ZERO),
    "bf16-zero": two_pipelines(fault(2, 2, "OptimizerStep"), **BF16_ZERO),
    "tied": tied(fault(3, 1, "ReduceTiedGrads")),
    "sliced-pass": sliced(fault(3, 1, "~backward", 1)),
    "sliced-reduction": sliced(fault(0, 2, "ReduceGrads")),
}
#: The others; some are tests of other modules.
FURTHER: dict[str, Job] = {
    "joins": test_precision.test_optimizers_of_roles_that_went_elsewhere_leave_memory,
    "three": lambda folder, reference: test_elastic.test_three_pipelines_on_the_members_of_two(folder, reference, {}),
    "zero-gather": two_pipelines(fault(1, 2, GATHER, pause=0.5), fault(2, 4, GATHER), **FP32_ZERO),
    "bf16-zero-undisturbed": two_pipelines(**BF16_ZERO),
    "bf16": two_pipelines(LOSS, **BF16),
    "fp16": two_pipelines(LOSS, **FP16),
    "bf16-zero-first": two_pipelines(fault(1, 1, "ForwardPass", 0), **BF16_ZERO),
    "tied-first": tied(fault(0, 2, "BackwardPass", 2)),
    "restarts": lambda folder, reference: test_own_checkpoints.test_two_pipelines_and_a_place_of_their_own(
        folder, reference, (), {}
    ),
}
SEEDS = range(3)
#: What ``make test`` runs; with the second seed on the device of tests as well.
USUAL = [("two", 0), ("sliced-pass", 1)]
CASES = [*USUAL, *((job, seed) for job in JOBS for seed in SEEDS if (job, seed) not in USUAL)]
CASES += [(job, 0) for job in FURTHER if job not in dict(USUAL)]


@pytest.mark.parametrize(
    ("job", "seed"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES],
)
def test_jobs(tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, job: str, seed: int) -> None:
    """All but the first seed also draw how late copies of a device are."""
    monkeypatch.setenv(SEED, str(seed))
    on_device = seed > 0 and far_device.compiler() is not None
    if on_device:
        far_device.library()  # no job waits for a compiler
        monkeypatch.setenv(far_device.SEED, str(seed))
    (JOBS | FURTHER)[job](tmp_path, reference)
    session.check(tmp_path)
    assert on_device == any(tmp_path.glob("far-*"))
