"""Jobs with tensor slices: they compute what stock DeepSpeed computes, also when they lose slices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.job.test_checkpoint import assert_same_files
from tests.support.compare import assert_equal, assert_same_states
from tests.support.faults import in_turn, mark
from tests.support.jobs import RunningJob, run_bamboo, run_stock, slow_until, write_config
from tests.support.precisions import BF16_ZERO, FP16_ZERO
from tests.support.sliced_jobs import SLICES, survive, survive_in_turn
from tests.support.surviving import Reference, fault

pytestmark = [pytest.mark.claim("guides/tensor-slices.md"), pytest.mark.integration]

# Ranks 0..3 are (stage, slice) = (0,0), (0,1), (1,0), (1,1). After the loss of a slice of one stage the slice of the
# other stage has both; the other slice can bear a loss of its own.
INSTANTS = [
    (fault(0, 1, "LoadMicroBatch", 1), fault(3, 3, "LoadMicroBatch", 1)),
    (fault(0, 1, "SendActivation", 1), fault(1, 3, "SendActivation", 1)),
    (fault(1, 1, "RecvGrad", 2), fault(0, 3, "RecvGrad", 2)),
    (fault(0, 1, "ReduceGrads"), fault(3, 3, "ReduceGrads")),
    (fault(3, 1, "Commit"), fault(0, 3, "Commit")),
    (fault(2, 1, "StepReplica"), fault(1, 3, "OptimizerStep")),
]


def test_losses_inside_of_layers(tmp_path: Path, reference: Reference) -> None:
    """Both slices lose a member while the others are in a collective of the same pass; with ZeRO as well."""
    result = survive(tmp_path, reference, [fault(3, 1, "~backward", 1), fault(0, 3, "~forward", 2)], **BF16_ZERO)
    assert [event["frc_done"] for event in result.events("step")] == [0] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("faults", INSTANTS, ids=lambda faults: faults[0]["at"])
def test_losses_at_every_instant(tmp_path: Path, reference: Reference, faults: Sequence[dict[str, Any]]) -> None:
    survive(tmp_path, reference, list(faults))


@pytest.mark.exhaustive
def test_two_copies(tmp_path: Path, reference: Reference) -> None:
    # Ranks are stage * 4 + copy * 2 + slice.
    survive(tmp_path, reference, [fault(1, 1, "~backward", 2), fault(6, 2, "ReduceGrads")], pipelines=4)


@pytest.mark.exhaustive
def test_a_slice_of_a_lost_pipeline_goes_on_from_the_other_copy(tmp_path: Path, reference: Reference) -> None:
    """Owner and shadow of slice 1 of copy 0 are lost at the same time."""
    faults = [fault(1, 2, "ForwardPass", 2), fault(5, 2, "ForwardPass", 1)]
    result = survive(tmp_path, reference, faults, pipelines=4, bamboo={"membership": {"settle_ms": 300}})
    assert "goes on from the state of role" in result.output


@pytest.mark.exhaustive
def test_checkpoints(tmp_path: Path, reference: Reference) -> None:
    """Their files are those of stock DeepSpeed, which names slices in them; both load what the other has written."""
    settings, arguments = BF16_ZERO, ("--steps", "4", "--save-every", "2")
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
def test_a_new_member_takes_the_slice(tmp_path: Path, reference: Reference) -> None:
    """Both stages of slice 1 are on one member, until a newcomer takes one; then that one can be lost, too."""
    faults = in_turn(fault(3, 1, "~forward", 1), fault(1, 2, "~backward", 2))
    faults[1]["healed"] = True
    pace = slow_until(tmp_path / mark(faults[1]), 0.1)
    command = ["--stages", "2", *SLICES, *pace, "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}, 4, **BF16_ZERO)) as job:
        job.wait_for("a loss", lambda: len(job.events("member_lost")) == 1)
        job.join()
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        result = job.finish()
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.joined()) == 1
    undisturbed = reference(2, 2, 4, *SLICES, *result.length, **BF16_ZERO)
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
        (("--all-read", "--evaluate-every", "2"), {}),
        (("--evaluate-every", "2", "--norm"), {}),
        (("--training-data", "--checkpoint-activations", "1"), {"gradient_clipping": 0.0}),
        (("--dropout", "0.1"), {}),
        ((), {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}),
    ],
    ids=lambda each: " ".join(each),
)
def test_features(tmp_path: Path, reference: Reference, options: tuple[str, ...], settings: dict[str, Any]) -> None:
    faults = [fault(2, 1, "~forward", 2), fault(1, 3, "~backward", 1)]
    survive(tmp_path, reference, faults, arguments=options, own="--dropout" in options, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "faults"),
    [
        pytest.param(BF16_ZERO, [fault(2, 2, "~backward", 1), fault(1, 3, "ReduceGrads")], id="bf16-zero"),
        pytest.param(FP16_ZERO, [fault(4, 3, "StepReplica")], id="fp16-zero"),
    ],
)
def test_precision_with_two_copies(
    tmp_path: Path, reference: Reference, precision: dict[str, Any], faults: list[dict[str, Any]]
) -> None:
    survive(tmp_path, reference, faults, pipelines=4, **precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [".iteration.division.begin", "ResendActivation", "~forward"])
def test_loss_during_a_recovery(tmp_path: Path, reference: Reference, at: str) -> None:
    """A slice of the other stage follows while the survivors recover, or do their passes again."""
    survive(tmp_path, reference, [fault(3, 2, "~backward", 2), fault(0, 2, at, 3 if at.startswith("~") else None)])


@pytest.mark.exhaustive
def test_losses_during_evaluations(tmp_path: Path, reference: Reference) -> None:
    faults = [fault(3, 2, ".iteration.passes.forward", 1, evaluating=True), fault(2, 4, "._reduce_outputs")]
    survive(tmp_path, reference, faults, arguments=("--steps", "5", "--evaluate-every", "2"))


@pytest.mark.exhaustive
def test_a_slice_falls_silent(tmp_path: Path, reference: Reference) -> None:
    """While it is in a pass, the others wait for it in a collective and are left alone."""
    faults = [fault(3, 1, "~forward", 1, signal="SIGSTOP"), fault(0, 3, "~backward", 2, signal="hang")]
    settings = {"heartbeat_timeout_s": 5, "hang_timeout_s": 8, "start_timeout_s": 60}
    result = survive(tmp_path, reference, faults, bamboo={"membership": settings})
    assert [event["reason"] for event in result.events("member_lost")] == ["heartbeat", "hang"]


@pytest.mark.exhaustive
def test_nobody_left_of_a_slice(tmp_path: Path, reference: Reference) -> None:
    """The job starts again from its newest checkpoint, with two workers on each of the slots that are left."""
    arguments = ("--steps", "6", "--save-every", "1")
    faults = [fault(1, 2, "~forward", 1), fault(3, 4, "~backward", 1)]
    file = write_config(tmp_path, {}, 4)
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
