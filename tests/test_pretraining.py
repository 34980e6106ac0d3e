"""The GPT as Megatron-DeepSpeed trains it, all at once.

Two pipelines of four stages, half precision, ZeRO stage 1, tied embeddings, activation checkpointing, dropout; stages
are divided among the members that are left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .support.faults import in_turn
from .support.gpt_jobs import TRAIN_GPT, survive_in_turn
from .support.jobs import RunningJob, slow_until, write_config
from .support.precisions import BF16_ZERO, FP16_ZERO
from .support.surviving import Reference, fault
from .test_elastic import assert_same

pytestmark = pytest.mark.claim("guides/even-shares.md", "guides/exactness.md", "reference/guarantees.md")

#: Ranks 0..7 are (pipeline, stage) = (0, 0), (1, 0), (0, 1), ..., (1, 3): of every stage a different instruction's.
FAULTS = (
    (0, "ForwardPass", 2),
    (3, "BackwardPass", 1),
    (4, "OptimizerStep", None),
    (7, "ReduceTiedGrads", None),
)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("precision", "arguments", "own", "blocks"),
    [
        # With seeds of the layers' own stock DeepSpeed draws the same masks.
        pytest.param(BF16_ZERO, ("--seed-layers",), False, "auto", id="bf16"),
        pytest.param(FP16_ZERO, (), True, 1, id="fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_every_stage_is_lost(
    tmp_path: Path, reference: Reference, precision: dict[str, Any], arguments: tuple[str, ...], own: bool, blocks: Any
) -> None:
    """One after the other, each when the job has recovered from the one before. Those left divide the stages."""
    faults = [fault(rank, 2 + 2 * n, at, micro_batch) for n, (rank, at, micro_batch) in enumerate(FAULTS)]
    options = ("--dropout", "0.1", "--checkpoint-activations", "1", "--layers", "8", *arguments)
    block = {"redundancy": {"verify_every": 2, "check_exact": 2}, "topology": {"blocks": blocks}}
    result = survive_in_turn(tmp_path, reference, faults, 4, 2, options, own, bamboo=block, **precision)
    (event,) = result.events("exact_checked")
    assert (event["step"], event["steps"], event["stages"]) == (2, 2, 8)
    assert any(plan["lent"] for plan in result.events("plan")) == (blocks == "auto")


def helpers(plan: dict[str, Any]) -> set[str]:
    """The members that compute parts of others' stages."""
    return {plan["shadows"][rank] for rank, _, _ in plan["lent"]}


@pytest.mark.integration
@pytest.mark.exhaustive
def test_two_are_lost_and_three_join(tmp_path: Path, reference: Reference) -> None:
    """One more than there were at the start. Stages are divided after the losses, and after the joins."""
    go = tmp_path / "go"
    faults = in_turn(fault(1, 3, "BackwardPass", 1), fault(2, 5, "ForwardPass", 2))
    options = ("--dropout", "0.1", "--checkpoint-activations", "1", "--layers", "8", "--seed-layers")
    block = {"redundancy": {"verify_every": 2, "check_exact": 2}, "topology": {"blocks": "auto"}}
    config = write_config(tmp_path, block, 4, **BF16_ZERO)
    command = ["--stages", "4", *options, *slow_until(go, 0.1), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, config, TRAIN_GPT) as job:
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        job.wait_for("two divide stages", lambda: len(job.plan()["members"]) == 2 and bool(job.plan()["lent"]))
        for count in (3, 4, 5):
            job.join()
            job.wait_for("it is admitted", lambda count=count: len(job.plan()["members"]) == count)  # type: ignore[misc]
        job.wait_for("all compute", lambda: {*job.plan()["owners"], *helpers(job.plan())} == {*job.plan()["members"]})
        epoch = job.plan()["epoch"]
        job.wait_for("steps", lambda: sum(e["epoch"] >= epoch for e in job.events("step")) > 3)
        go.touch()
        result = job.finish()
    undisturbed = reference(4, 1, 4, *options, *result.length, script=TRAIN_GPT, **BF16_ZERO)
    assert_same(result, undisturbed, faults, joined=3)
    assert not result.events("replica_mismatch")
