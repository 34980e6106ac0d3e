"""Checkpoints that a job takes without its script's doing, and what it goes on from after a fatal loss."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.state.checkpoints import OWN, list_checkpoints, verify
from bamboo_ds.state.own import list_own
from tests.job.test_restart import steps_of
from tests.support.compare import assert_computed
from tests.support.faults import mark
from tests.support.jobs import SUPPORT, TRAIN, Result, RunningJob, run_bamboo, slow_until, write_config
from tests.support.precisions import BF16_ZERO
from tests.support.savers import members as members
from tests.support.surviving import Reference, fault, survive_in_turn

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/settings.md")


# -- jobs -----------------------------------------------------------------------------------------------------


SAVED_ONCE = ("--save-every", "20", "--save-until", "20")


def saved(job: RunningJob | Result, own: bool = True) -> list[int]:
    """Steps of the job's own complete checkpoints, or of its script's."""
    return [event["step"] for event in job.events("checkpoint_saved") if event["own"] == own]


def lose_a_stage(
    folder: Path,
    victims: tuple[int, ...],
    arguments: tuple[str, ...] = (),
    *,
    after: int = 0,
    stages: int = 4,
    pipelines: int = 1,
    checkpoint: dict[str, Any] | None = None,
    script: Path = TRAIN,
    **config: Any,
) -> Result:
    """A job in which all holders of a stage are killed some steps after a checkpoint of its own; it ends soon after.

    The checkpoint is of a step behind ``after``, and no script may save anything later: how far a job goes on before
    the losses come depends on the load of the machine.
    """
    struck = folder / "struck"
    file = write_config(folder, {"checkpoint": {"every_s": 0.7, **(checkpoint or {})}}, 4, **config)
    command = ["--stages", str(stages), *arguments, *slow_until(struck, 0.2)]
    with RunningJob(folder, stages * pipelines, command, file, script) as job:
        job.wait_for("the first step", lambda: bool(job.events("step")))
        workers = {m["slot"]: m["pid"] for m in job.status()["members"]}
        job.wait_for("a checkpoint of its own", lambda: max(saved(job), default=0) > after)
        known = saved(job)[-1]
        job.wait_for("some steps more", lambda: job.events("step")[-1]["step"] >= known + 2)
        for how in (signal.SIGSTOP, signal.SIGKILL):  # none helps to heal the job before it is killed itself
            for slot in victims:
                os.kill(workers[slot], how)
        job.wait_for("the restart", lambda: bool(job.events("restart")))
        struck.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-5000:]
    (restart,) = result.events("restart")
    first, second = steps_of(result.events())
    assert OWN in restart["checkpoint"]
    assert known < second[0] <= first[-1] + 1, (known, first, second)
    assert second[0] - 1 > max(saved(result, own=False), default=0) or second[0] - 1 in saved(result)
    return result


@pytest.mark.integration
@pytest.mark.exhaustive
def test_a_loss_takes_back_some_steps_only(tmp_path: Path, reference: Reference) -> None:
    """A plain loop, which replays all; its scheduler and layers count. The script's own checkpoints are as ever."""
    arguments = ("--dropout", "0.1", *SAVED_ONCE, "--count-samples", "--count-passes")
    result = lose_a_stage(tmp_path, (1, 2), arguments, checkpoint={"keep": 1})
    undisturbed = reference(4, 1, 4, *arguments, *result.length, own=True)
    assert_computed(result, undisturbed)
    folder = tmp_path / "checkpoints"
    (newest,) = list_checkpoints(folder)
    assert newest.latest and newest.step == max(saved(result, own=False)) and verify(newest.path) == []
    own = list_own(folder)
    assert len(own) <= 2 and all(info.own and not info.reasons for info in own)


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_script_that_resumes_gets_its_own_checkpoint_first(tmp_path: Path, reference: Reference) -> None:
    """It replays from there to the newest one, which is the job's."""
    arguments = ("--dropout", "0.1", *SAVED_ONCE, "--resume")
    result = lose_a_stage(tmp_path, (1, 2), arguments, after=20)
    assert_computed(result, reference(4, 1, 4, *arguments, *result.length, own=True))
    assert {len(dump["losses"]) for dump in result.ranks().values()} == {int(result.length[1]) - 20}


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        pytest.param((), {}, id="fp32"),
        pytest.param((), BF16_ZERO, id="bf16-zero"),
        pytest.param(("--slices", "2"), {}, id="slices"),
    ],
)
def test_two_pipelines_and_a_place_of_their_own(
    tmp_path: Path, reference: Reference, arguments: tuple[str, ...], precision: dict[str, Any]
) -> None:
    """Two thirds of the workers are killed, and the script never saves. Of slices there is one pipeline."""
    place = {"dir": str(tmp_path / "own")}
    result = lose_a_stage(tmp_path, (0, 1, 2, 3), arguments, stages=3, pipelines=2, checkpoint=place, **precision)
    assert_computed(result, reference(3, 2, 4, *arguments, *result.length, own=True, **precision))
    assert not (tmp_path / "checkpoints").exists() and len(list_own(tmp_path / "own")) <= 2


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize("script", ["train_like_megatron", "train_script_state"])
def test_scripts_of_others_compute_the_same(tmp_path: Path, reference: Reference, script: str) -> None:
    """They evaluate, and set rates and weights; what is done again is the same, too."""
    file = SUPPORT / f"{script}.py"
    result = lose_a_stage(tmp_path, (1, 2), checkpoint={"dir": str(tmp_path / "own")}, script=file)
    undisturbed = reference(4, 1, 4, *result.length, own=True, script=file)
    told = [{(event["step"], event["loss"]) for event in run.events("step")} for run in (result, undisturbed)]
    assert told[0] == told[1]


@pytest.mark.integration
def test_one_that_a_loss_hits_never_gets_complete(tmp_path: Path, reference: Reference) -> None:
    """Members are killed before they copy their role, while they write it, and before the manifest."""
    faults = [fault(1, 2, ".saves.collect"), fault(3, 2, "@file"), fault(0, 2, "@manifest")]
    place = {"checkpoint": {"every_s": 0.01, "dir": str(tmp_path / "own")}}
    result = survive_in_turn(tmp_path, reference, faults, stages=4, micro_batches=4, bamboo=place)
    failed = {event["step"]: event for event in result.events("checkpoint_failed")}
    assert all(event["own"] and "were lost before" in event["reason"] for event in failed.values()), failed
    hit = int((tmp_path / mark(faults[1])).read_text()[4:])
    assert hit in failed and hit not in saved(result)
    assert saved(result)[-1] > max(failed), "the next ones get complete"
    assert all(not info.reasons for info in list_own(tmp_path / "own"))


@pytest.mark.integration
def test_without_a_place_none_is_taken_and_that_is_said(tmp_path: Path) -> None:
    command = ["--stages", "2", "--steps", "4"]
    result = run_bamboo(tmp_path, 2, command, write_config(tmp_path, {"checkpoint": {"every_s": 0.01}}, 4))
    assert result.exit_code == 0, result.output[-4000:]
    assert not saved(result) and not list(tmp_path.rglob(OWN))
    assert result.output.count("there is no place for them; give one with bamboo.checkpoint.dir") == 1


@pytest.mark.integration
def test_at_the_end_none_is_left_that_the_script_s_last_one_contains(tmp_path: Path) -> None:
    command = ["--stages", "2", "--steps", "20", "--save-every", "20", "--pause-s", "0.02"]
    place = {"every_s": 0.001, "dir": str(tmp_path / "own")}
    result = run_bamboo(tmp_path, 2, command, write_config(tmp_path, {"checkpoint": place}, 4))
    assert result.exit_code == 0, result.output[-4000:]
    assert saved(result), "some were taken"
    assert saved(result, own=False) == [20] and not list_own(tmp_path / "own")
