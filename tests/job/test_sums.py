"""Sums in the middle of iterations: jobs whose losses go on from them compute what undisturbed ones compute.

Which sums those are: :mod:`tests.unit.schedule.test_resume`; losses at every cut:
:mod:`tests.model.test_takeover_cuts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import sliced_jobs
from tests.support.gpt_jobs import TRAIN_GPT
from tests.support.jobs import Result
from tests.support.precisions import BF16_ZERO, FP16, FP16_ZERO, FP32_ZERO
from tests.support.recorded import check_recorded
from tests.support.surviving import Reference, fault, survive
from tests.unit.engine.test_sums import Case, of

pytestmark = pytest.mark.claim("README.md", "guides/exactness.md", "reference/guarantees.md", "reference/settings.md")

CHECKPOINTS = ("--checkpoint-activations", "1", "--layers", "8", "--dropout", "0.2")


def late(rank: int, step: int, micro_batch: int = 4) -> dict[str, Any]:
    return fault(rank, step, "BackwardPass", micro_batch)


#: A worker is killed before its backward pass of micro-batch 4 of 0 .. 5, and has sent the sums of 4 then.
JOBS = {
    "lazy": Case([late(3, 1), late(1, 3, 3)], 6),
    "eager": Case([late(0, 1), late(2, 3, 5)], 7, "eager-frc-lazy-brc"),
    "eager-every-2": Case([late(2, 1, 5), fault(0, 3, "ForwardPass", 5)], 4, "eager-frc-lazy-brc", 2),
    "eager-brc": Case([late(2, 1), late(0, 3)], 7, "eager-frc-eager-brc"),
    # The recovery from the second loss is told, whose newest sums may have been on their way.
    "two-in-one-iteration": Case([late(3, 2), late(1, 2)], 3),
    "two-pipelines": Case([late(1, 1), late(2, 3)], 6, stages=2, pipelines=2),
    "tied": Case([late(3, 1), late(1, 3)], 6, script=TRAIN_GPT),
    "checkpoints": Case([late(3, 1), late(1, 3)], 6, options=CHECKPOINTS, own=True, script=TRAIN_GPT),
    "buffers-and-numbers": Case([late(3, 1), late(1, 3)], 6, options=("--norm", "--count-passes")),
    "frozen-eager": Case([late(1, 3)], 0, "eager-frc-lazy-brc", options=("--freeze-at", "3")),
    "fp16": of(FP16, late(2, 3), pipelines=1, stages=3),
    "bf16-zero": of(BF16_ZERO, late(1, 2), pipelines=1, stages=3),
    "bf16-zero-data": of(BF16_ZERO, late(3, 2)),
    "fp16-zero-data": of(FP16_ZERO, late(2, 3)),
    "fp32-zero-data": of(FP32_ZERO, late(1, 2)),
}
ALWAYS = ("two-in-one-iteration", "buffers-and-numbers", "fp16-zero-data")


def check_kept(result: Result, at_least: int) -> None:
    """The sums of lost workers were gone on from."""
    kept = [event["backwards_kept"] for event in result.events("recovered")]
    assert sum(kept) >= at_least, kept


@pytest.mark.integration
@pytest.mark.parametrize(
    "job", [job if job in ALWAYS else pytest.param(job, marks=pytest.mark.exhaustive) for job in JOBS]
)
def test_jobs(tmp_path: Path, reference: Reference, job: str) -> None:
    case = JOBS[job]
    result = survive(
        tmp_path,
        reference,
        case.faults,
        case.stages,
        case.pipelines,
        case.options,
        case.own,
        bamboo=case.block,
        script=case.script,
        **case.config,
    )
    check_kept(result, case.kept)
    steps = {fault["step"] + 1 for fault in case.faults}
    if len(steps) == len(case.faults):
        check_recorded(tmp_path / "events.jsonl", 6, steps)


@pytest.mark.exhaustive
@pytest.mark.integration
def test_slices_go_back_to_the_same_sums(tmp_path: Path, reference: Reference) -> None:
    """One slice is lost before a backward pass, then one within another: the others have begun those."""
    faults = [fault(3, 1, "BackwardPass", 3), fault(0, 3, "~backward", 3)]
    bamboo = Case([], 0).block
    result = sliced_jobs.survive(tmp_path, reference, faults, bamboo=bamboo)
    check_kept(result, 4)
