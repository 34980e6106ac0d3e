"""Jobs with tensor slices: they compute what stock DeepSpeed computes, also when they lose slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .support.compare import assert_equal, assert_same_states
from .support.faults import in_turn, mark
from .support.jobs import RunningJob, run_bamboo, run_stock, slow_until, write_config
from .support.precisions import BF16, BF16_ZERO, FP16_ZERO, FP32_ZERO
from .support.sliced_jobs import SLICES, survive, survive_in_turn
from .support.surviving import Reference, fault
from .test_checkpoint import assert_same_files

pytestmark = [pytest.mark.claim("guides/tensor-slices.md"), pytest.mark.integration]

# Ranks 0..3 are (stage, slice) = (0,0), (0,1), (1,0), (1,1). After the loss of a slice of one stage the slice of the
# other stage has both; the other slice can bear a loss of its own.
INSTANTS: list[tuple[str, int | None, tuple[int, int]]] = [
    ("LoadMicroBatch", 1, (0, 3)),
    ("ForwardPass", 2, (1, 2)),
    ("SendActivation", 1, (0, 1)),
    ("RecvActivation", 3, (3, 2)),
    ("BackwardPass", 1, (2, 1)),
    ("SendGrad", 0, (3, 2)),
    ("RecvGrad", 2, (1, 0)),
    ("ReduceGrads", None, (0, 3)),
    ("SendReplica", None, (1, 2)),
    ("RecvReplica", None, (2, 3)),
    ("Commit", None, (3, 0)),
    ("OptimizerStep", None, (0, 1)),
    ("StepReplica", None, (2, 1)),
    ("~forward", 2, (1, 2)),
    ("~backward", 2, (0, 3)),
]


def test_losses_inside_of_layers(tmp_path: Path, reference: Reference) -> None:
    """Both slices lose a member while the others are in a collective of the same pass."""
    result = survive(tmp_path, reference, [fault(3, 1, "~backward", 1), fault(0, 3, "~forward", 2)])
    assert [event["frc_done"] for event in result.events("step")] == [0] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize(("at", "micro_batch", "victims"), INSTANTS)
def test_losses_at_every_instant(
    tmp_path: Path, reference: Reference, at: str, micro_batch: int | None, victims: tuple[int, int]
) -> None:
    faults = [fault(rank, 1 + 2 * i, at, micro_batch) for i, rank in enumerate(victims)]
    if at in ("SendReplica", "RecvReplica", "StepReplica"):
        faults[1]["at"] = "ReduceGrads" if at == "SendReplica" else "OptimizerStep"
    survive(tmp_path, reference, faults)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("at", "micro_batch"), [("ForwardPass", 1), ("~backward", 2), ("ReduceGrads", None), ("Commit", None)]
)
def test_two_copies(tmp_path: Path, reference: Reference, at: str, micro_batch: int | None) -> None:
    # Ranks are stage * 4 + copy * 2 + slice.
    survive(tmp_path, reference, [fault(1, 1, at, micro_batch), fault(6, 2, at, micro_batch)], pipelines=4)


@pytest.mark.exhaustive
def test_a_slice_of_a_lost_pipeline_goes_on_from_the_other_copy(tmp_path: Path, reference: Reference) -> None:
    """Owner and shadow of slice 1 of copy 0 are lost at the same time."""
    faults = [fault(1, 2, "ForwardPass", 2), fault(5, 2, "ForwardPass", 1)]
    result = survive(tmp_path, reference, faults, pipelines=4, bamboo={"membership": {"settle_ms": 300}})
    assert "goes on from the state of role" in result.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, BF16_ZERO], ids=["fp32", "bf16-zero"])
def test_checkpoints(tmp_path: Path, reference: Reference, settings: dict[str, Any]) -> None:
    """Their files are those of stock DeepSpeed, which names slices in them; both load what the other has written."""
    arguments = ("--steps", "4", "--save-every", "2")
    faults = [fault(3, 1, "~backward", 1), fault(0, 3, "._save_checkpoint")]
    faults[1]["step"] = 4  # the second save
    survive(tmp_path, reference, faults, arguments=arguments, **settings)
    undisturbed = reference(2, 2, 4, *SLICES, *arguments, **settings).out / "checkpoints"
    for step in ("step2", "step4"):
        assert_same_files(tmp_path / "checkpoints" / step, undisturbed / step)
    theirs, mine = tmp_path / "stock", tmp_path / "ours"
    for folder in (theirs, mine):
        folder.mkdir()
    command = ["--stages", "2", *SLICES, "--steps", "3", "--tag", "step4", "--load"]
    saved = str(tmp_path / "checkpoints")
    stock = run_stock(theirs, 4, [*command, saved], write_config(theirs, None, 4, **settings))
    assert stock.exit_code == 0, stock.output[-4000:]
    ours = run_bamboo(mine, 4, [*command, str(undisturbed)], write_config(mine, {}, 4, **settings))
    assert_equal(ours, stock, [])


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, BF16_ZERO], ids=["fp32", "bf16-zero"])
def test_a_new_member_takes_the_slice(tmp_path: Path, reference: Reference, settings: dict[str, Any]) -> None:
    """Both stages of slice 1 are on one member, until a newcomer takes one; then that one can be lost, too."""
    faults = in_turn(fault(3, 1, "~forward", 1), fault(1, 2, "~backward", 2))
    faults[1]["healed"] = True
    pace = slow_until(tmp_path / mark(faults[1]), 0.1)
    command = ["--stages", "2", *SLICES, *pace, "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}, 4, **settings)) as job:
        job.wait_for("a loss", lambda: len(job.events("member_lost")) == 1)
        job.join()
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        result = job.finish()
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.joined()) == 1
    undisturbed = reference(2, 2, 4, *SLICES, *result.length, **settings)
    assert result.faults() == sorted(map(mark, faults))
    plain, found = undisturbed.ranks()[0]["losses"], [*result.ranks().values(), *result.joined()]
    assert len(found) == 3 and all(dump["losses"] == plain for dump in found)
    assert_same_states(result, undisturbed)


@pytest.mark.exhaustive
def test_three_stages_heal(tmp_path: Path, reference: Reference) -> None:
    faults = [fault(3, 1, "~forward", 1), fault(4, 3, "~backward", 2)]
    survive_in_turn(tmp_path, reference, faults, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--all-read",), {}),
        (("--all-read", "--evaluate-every", "2"), {}),
        (("--evaluate-every", "2"), {}),
        (("--training-data",), {}),
        (("--norm",), {}),
        (("--checkpoint-activations", "1"), {}),
        (("--dropout", "0.1"), {}),
        ((), {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}),
        ((), {"gradient_clipping": 0.0}),
    ],
    ids=lambda each: " ".join(each),
)
def test_features(tmp_path: Path, reference: Reference, options: tuple[str, ...], settings: dict[str, Any]) -> None:
    faults = [fault(2, 1, "~forward", 2), fault(1, 3, "~backward", 1)]
    survive(tmp_path, reference, faults, arguments=options, own="--dropout" in options, **settings)


@pytest.mark.parametrize(
    ("precision", "pipelines", "faults"),
    [
        pytest.param(BF16_ZERO, 2, [fault(2, 2, "~backward", 1), fault(1, 3, "ReduceGrads")], id="bf16-zero"),
        pytest.param(BF16_ZERO, 4, [fault(2, 2, "~backward", 1)], id="bf16-zero-data", marks=pytest.mark.exhaustive),
        pytest.param(BF16, 4, [fault(7, 2, "SendReplica")], id="bf16-data", marks=pytest.mark.exhaustive),
        pytest.param(FP16_ZERO, 4, [fault(4, 3, "StepReplica")], id="fp16-zero-data", marks=pytest.mark.exhaustive),
        pytest.param(FP32_ZERO, 4, [fault(1, 2, "OptimizerStep")], id="fp32-zero-data", marks=pytest.mark.exhaustive),
    ],
)
def test_precision(
    tmp_path: Path, reference: Reference, precision: dict[str, Any], pipelines: int, faults: list[dict[str, Any]]
) -> None:
    survive(tmp_path, reference, faults, pipelines=pipelines, **precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [".recovery.roles.follow", ".iteration.division.begin", "ResendActivation", "~forward"])
def test_loss_during_a_recovery(tmp_path: Path, reference: Reference, at: str) -> None:
    """A slice of the other stage follows while the survivors recover, or do their passes again."""
    survive(tmp_path, reference, [fault(3, 2, "~backward", 2), fault(0, 2, at, 3 if at.startswith("~") else None)])


@pytest.mark.exhaustive
def test_losses_during_evaluations(tmp_path: Path, reference: Reference) -> None:
    faults = [fault(3, 2, ".iteration.passes.forward", 1, evaluating=True), fault(2, 4, "._reduce_outputs")]
    survive(tmp_path, reference, faults, arguments=("--steps", "5", "--evaluate-every", "2"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("signal", "settings"),
    [("SIGSTOP", {"heartbeat_timeout_s": 5, "start_timeout_s": 60}), ("hang", {"hang_timeout_s": 6})],
    ids=["stops", "hangs"],
)
def test_a_slice_falls_silent(tmp_path: Path, reference: Reference, signal: str, settings: dict[str, Any]) -> None:
    """While it is in a pass, the others wait for it in a collective and are left alone."""
    faults = [fault(3, 1, "~forward", 1, signal=signal), fault(0, 3, "~backward", 2, signal=signal)]
    result = survive(tmp_path, reference, faults, bamboo={"membership": settings})
    reason = "hang" if signal == "hang" else "heartbeat"
    assert [event["reason"] for event in result.events("member_lost")] == [reason] * 2


@pytest.mark.exhaustive
def test_nobody_left_of_a_slice(tmp_path: Path, reference: Reference) -> None:
    """The job starts again from its newest checkpoint, with two workers on each of the slots that are left."""
    arguments = ("--steps", "6", "--save-every", "1")
    faults = [fault(1, 2, "~forward", 1), fault(3, 4, "~backward", 1)]
    file = write_config(tmp_path, {"checkpoint": {"asynchronous": False}}, 4)
    command = ["--stages", "2", *SLICES, *arguments, "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 4, command, file)
    assert result.exit_code == 0, result.output[-4000:]
    assert result.faults() == sorted(map(mark, faults))
    (event,) = result.events("fatal")
    assert event["stages"] == [[1, 0], [1, 1]]
    undisturbed = reference(2, 2, 4, *SLICES, *arguments)
    assert set(result.ranks()) == {0, 1, 2, 3}
    assert all(dump["losses"] == undisturbed.ranks()[0]["losses"] for dump in result.ranks().values())
    assert_same_states(result, undisturbed)
