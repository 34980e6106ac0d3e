"""Losses at every instruction, of every stage: the job goes on and computes what the undisturbed one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.observe.spans import Kind
from tests.support.jobs import slow_rank
from tests.support.recorded import check_recorded
from tests.support.surviving import STEPS, Reference, fault, survive

pytestmark = [
    pytest.mark.claim(
        "README.md", "guides/timelines.md", "reference/events.md", "reference/guarantees.md", "reference/settings.md"
    ),
    pytest.mark.integration,
]


Loss = tuple[int, int, str, int | None]
#: Modes of redundancy, with two losses each: rank, step, instruction, micro-batch. The second victim is no neighbour of
#: the first, since redundancy does not heal.
MODES: list[tuple[dict[str, Any], Loss, Loss]] = [
    ({}, (1, 0, "ForwardPass", 3), (3, 3, "Commit", None)),
    ({"mode": "lazy-frc-lazy-brc"}, (2, 1, "BackwardPass", 5), (0, 3, "ReduceGrads", None)),
    ({"mode": "eager-frc-eager-brc", "verify_every": 1}, (1, 1, "StepReplica", None), (3, 3, "SendGrad", 2)),
]
#: With those above every instruction of an even and of an odd stage, where both execute it.
INSTRUCTIONS: list[tuple[Loss, Loss]] = [
    ((0, 1, "LoadMicroBatch", 2), (2, 3, "SendGrad", 3)),
    ((3, 1, "LoadMicroBatch", 4), (1, 3, "RecvGrad", 0)),
    ((0, 1, "SendActivation", 1), (2, 3, "RecvActivation", 4)),
    ((1, 1, "SendActivation", 5), (3, 3, "RecvActivation", 0)),
    ((0, 1, "ForwardPass", 0), (2, 3, "Commit", None)),
    ((2, 1, "RecvGrad", 3), (0, 3, "OptimizerStep", None)),
    ((1, 1, "ReduceGrads", None), (3, 3, "BackwardPass", 0)),
    # After the first takeover the second victim has neither a shadow to send to nor a replica.
    ((2, 1, "SendReplica", None), (0, 3, "BackwardPass", 0)),
    ((3, 1, "SendReplica", None), (1, 3, "OptimizerStep", None)),
    ((0, 1, "RecvReplica", None), (2, 3, "ForwardPass", 0)),
    ((3, 1, "RecvReplica", None), (1, 3, "BackwardPass", 1)),
    ((2, 1, "StepReplica", None), (0, 3, "SendActivation", 2)),
]


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [*MODES, *(pytest.param({}, *losses, marks=pytest.mark.exhaustive) for losses in INSTRUCTIONS)],
    ids=lambda each: "-".join(map(str, each.values() if isinstance(each, dict) else each[::2])),
)
def test_losses_at_instructions(
    tmp_path: Path, reference: Reference, settings: dict[str, Any], first: Loss, second: Loss
) -> None:
    """Also in the first iteration: nothing has been measured yet, and no optimizer has a state."""
    faults = [fault(rank, step, at, micro_batch) for rank, step, at, micro_batch in (first, second)]
    result = survive(tmp_path, reference, faults, bamboo={"redundancy": {"verify_every": 2, **settings}})
    done = [event["frc_done"] for event in result.events("step")]
    if settings.get("mode") == "lazy-frc-lazy-brc":
        assert done == [0] * STEPS
    timelines = check_recorded(tmp_path / "events.jsonl", 6, steps={fault["step"] + 1 for fault in faults})
    for each in faults:
        (victim,) = (found for found in timelines if found.head.rank == each["rank"])
        assert victim.spans[-1].step == each["step"] + 1, "what a killed worker did last is recorded, too"
    told = [line for line in result.output.splitlines() if line.startswith("[bamboo] ")]
    for left, each in zip((3, 2), faults, strict=True):
        (line,) = (line for line in told if f"worker m{each['rank']} on host " in line)
        assert "died (SIGKILL); stage " in line and f"{left} of " in line, line
    (summary,) = (number for number, line in enumerate(told) if line.startswith("[bamboo] exit code 0 after "))
    assert told[summary + 1].startswith("[bamboo] losses: 2; longest pause ")
    assert len(told[summary:]) == 4 and told[-1].startswith("[bamboo] goodput: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "first", "most"),
    [
        ({}, (2, 3, "BackwardPass", 3), 18),
        ({"mode": "eager-frc-eager-brc", "verify_every": 1}, (2, 3, "SendReplica", None), 18),
        # Memory for three passes of a stage. The others are left for the takeover.
        ({"memory_budget_mb": 0.002}, (2, 3, "BackwardPass", 3), 9),
    ],
    ids=["forwards", "backwards", "little memory"],
)
def test_losses_of_a_stage_that_has_been_computed_redundantly(
    tmp_path: Path, reference: Reference, settings: dict[str, Any], first: Loss, most: int
) -> None:
    """The stage is slow, so that the others wait for it and compute redundantly meanwhile: three stages, this included.

    Without sums, which make such passes needless.
    """
    faults = [fault(*first), fault(0, 4, "ForwardPass", 4, stage=0)]
    bamboo = {"redundancy": {"verify_every": 2, "sync_every": 0, **settings}, "topology": {"blocks": 1}}
    result = survive(tmp_path, reference, faults, bamboo=bamboo, pace=slow_rank(tmp_path, 2))
    assert 0 < result.events("step")[2]["frc_done"] <= most
    timelines = check_recorded(tmp_path / "events.jsonl", 6, steps={4, 5})
    spans = [span for each in timelines for span in each.spans if span.kind is Kind.REDUNDANT_FORWARD]
    assert (4, (0, 2)) in {(span.step, span.role) for span in spans}


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("eager-frc-lazy-brc", "ReduceGrads", "Commit"),
        # Each of the owners of a stage is left alone with it.
        ("none", "BackwardPass", "ReduceGrads"),
        pytest.param("eager-frc-lazy-brc", "SendReplica", "OptimizerStep", marks=pytest.mark.exhaustive),
        pytest.param("none", "Commit", "OptimizerStep", marks=pytest.mark.exhaustive),
    ],
)
def test_two_pipelines(tmp_path: Path, reference: Reference, mode: str, first: str, second: str) -> None:
    """Without replicas another pipeline has the stage."""
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    ranks = (2, 1) if mode == "none" else (0, 3)
    faults = [
        fault(rank, step, at, 2 if at.endswith("Pass") else None)
        for rank, step, at in zip(ranks, (1, 2), (first, second), strict=True)
    ]
    survive(tmp_path, reference, faults, 2, 2, micro_batches=4, bamboo={"redundancy": {"mode": mode}})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stages", "pipelines", "victims"),
    [
        (1, 4, (0, 3)),
        (2, 1, (0,)),
        (8, 1, (0, 2, 4, 6)),
        (4, 2, (0, 3, 4, 7)),
        (2, 4, (0, 3, 5, 6)),
    ],
)
def test_shapes(tmp_path: Path, reference: Reference, stages: int, pipelines: int, victims: tuple[int, ...]) -> None:
    faults = [fault(rank, 1 + i % 3, ("BackwardPass", "ForwardPass")[i % 2], 2) for i, rank in enumerate(victims)]
    # With more than two pipelines the mean of their losses depends on the order of a sum, which DeepSpeed leaves to
    # the collective: bit-equal to our own run, and to DeepSpeed's within rounding.
    own = pipelines > 2
    result = survive(tmp_path, reference, faults, stages, pipelines, micro_batches=4, own=own)
    if own:
        stock = reference(stages, pipelines, 4, "--steps", str(STEPS))
        for dump in result.ranks().values():
            assert dump["losses"] == pytest.approx(stock.ranks()[0]["losses"], rel=1e-6)
        for role, state in stock.roles().items():
            for mine, theirs in zip(result.roles()[role]["parameters"], state["parameters"], strict=True):
                assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
