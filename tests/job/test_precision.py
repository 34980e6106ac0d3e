"""fp16, bf16 and ZeRO stage 1: an undisturbed job equals stock DeepSpeed, and so does one that loses members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import assert_equal
from tests.support.jobs import RunningJob, slow_until, write_config
from tests.support.precisions import (
    BF16,
    BF16_ZERO,
    BF16_ZERO_BF16,
    FP16,
    FP16_SMALL,
    FP16_STATIC,
    FP16_ZERO,
    FP32_ZERO,
)
from tests.support.surviving import Reference, fault, survive

pytestmark = [
    pytest.mark.claim("guides/exactness.md", "reference/guarantees.md", "reference/limits.md"),
    pytest.mark.integration,
]

STEPS = 6


JOBS: dict[str, Any] = {
    "bf16-zero": (BF16_ZERO, 1, 3, fault(1, 3, "BackwardPass", 2)),
    "bf16-zero-data": (BF16_ZERO, 2, 2, fault(0, 3, "ForwardPass", 1)),
    "bf16-data": (BF16, 2, 2, fault(3, 3, "ReduceGrads")),
    "fp16": (FP16, 1, 3, fault(2, 3, "BackwardPass", 1)),
    "fp16-static-data": (FP16_STATIC, 2, 2, fault(1, 3, "SendReplica")),
    "fp16-zero-data": (FP16_ZERO, 2, 2, fault(2, 3, "StepReplica")),
    "fp32-zero-data": (FP32_ZERO, 2, 2, fault(1, 3, "OptimizerStep")),
    "bf16-zero-bf16-data": (BF16_ZERO_BF16, 2, 2, fault(3, 3, "Commit")),
}


@pytest.mark.parametrize(
    "job", [job if job == "fp16-zero-data" else pytest.param(job, marks=pytest.mark.exhaustive) for job in JOBS]
)
def test_precision(tmp_path: Path, reference: Reference, job: str) -> None:
    """Losses at instants at which gradients, scales, masters or shards of parameters are under way."""
    precision, pipelines, stages, loss = JOBS[job]
    arguments, more = ("--steps", str(STEPS)), {"micro_batches": 4, "checked": True, **precision}
    result = survive(tmp_path, reference, [loss], stages, pipelines, arguments, **more)
    if precision is FP16_ZERO:
        skipped = {role["counters"][2] for role in result.roles().values()}
        assert 0 < min(skipped) < STEPS, "some iterations overflow, some do not"


@pytest.mark.parametrize(
    ("precision", "pipelines", "stages", "lost"),
    [
        pytest.param(
            FP16_SMALL, 1, 3, [(2, 3, "BackwardPass", 1), (0, 7, "OptimizerStep")], marks=pytest.mark.exhaustive
        ),
        (FP16_SMALL, 2, 2, [(3, 3, "SendReplica"), (0, 7, "Commit")]),
        pytest.param(FP16_STATIC, 1, 3, [(1, 3, "StepReplica")], marks=pytest.mark.exhaustive),
    ],
)
def test_fused_fp16(
    tmp_path: Path, reference: Reference, precision: Any, pipelines: int, stages: int, lost: list[Any]
) -> None:
    """What DeepSpeed does on GPUs by default: FusedAdam in its fp16 optimizer with flat masters, and clipping."""
    arguments = ("--steps", "10", "--optimizer", "fused", "--overflow-at", "5")
    more = {"micro_batches": 4, "checked": True, **precision}
    faults = [fault(*each) for each in lost]
    result = survive(tmp_path, reference, faults, stages, pipelines, arguments, **more)
    assert {role["optimizer"] for role in result.roles().values()} == {"FP16_Optimizer"}
    assert {role["counters"][2] for role in result.roles().values()} == {1}, "one stage overflows, and all leave it out"


def test_optimizers_of_roles_that_went_elsewhere_leave_memory(tmp_path: Path, reference: Reference) -> None:
    """ZeRO hooks into the graph, where no garbage collector looks: a replica that is dropped must be let go of."""
    go = tmp_path / "go"
    faults = [fault(1, 2, "BackwardPass", 1)]
    command = ["--stages", "2", *slow_until(go), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}, 4, **FP32_ZERO)) as job:
        job.wait_for("a loss", lambda: len(job.events("member_lost")) == 1)
        job.wait_for("replicas of what it held", lambda: None not in job.plan()["shadows"])
        job.join()
        job.wait_for("each role has an owner of its own", lambda: len(set(job.plan()["owners"])) == 4)
        job.wait_for("and a shadow", lambda: None not in job.plan()["shadows"])
        epoch = job.plan()["epoch"]
        job.wait_for("a step after it", lambda: job.events("step")[-1]["epoch"] >= epoch)
        go.touch()
        result = job.finish()
    held = [
        {(member, rank) for kind in ("owners", "shadows") for rank, member in enumerate(plan[kind]) if member}
        for plan in result.events("plan")
    ]
    dropped = {(member, rank) for member, rank in set.union(*held) - held[-1] if member in dict(held[-1])}
    assert dropped, "nobody has had to drop anything"
    assert_equal(result, reference(2, 2, 4, *result.length, **FP32_ZERO), faults)
    dumps = [*result.ranks().values(), *result.joined()]
    assert [dump["forgotten"] for dump in dumps] == [0] * 4
