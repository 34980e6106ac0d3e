"""Checkpoints that a job takes without its script's doing, and what it goes on from after a fatal loss."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.cli.main import cli
from bamboo_ds.config import CheckpointConfig, parse_block
from bamboo_ds.engine.checkpoints.own import OwnCheckpoints
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.stage.commit import Contribution, Form, decode, encode
from bamboo_ds.errors import ConfigError
from bamboo_ds.state.checkpoints import OWN, list_checkpoints, verify
from bamboo_ds.state.intervals import PRIOR_S, SHORTEST_S, LossRate, interval_s
from bamboo_ds.state.own import list_own, own_folder
from bamboo_ds.topology import Layout

from .support.compare import assert_computed
from .support.faults import mark
from .support.jobs import SUPPORT, TRAIN, Result, RunningJob, run_bamboo, slow_until, write_config
from .support.precisions import BF16_ZERO
from .support.savers import Member
from .support.savers import members as members
from .support.surviving import Reference, fault, survive_in_turn
from .test_restart import steps_of

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/settings.md")

# -- how often ------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 1e3), st.floats(60, 1e7))
def test_the_interval_is_that_which_costs_least(pause_s: float, mtbf_s: float) -> None:
    """Of the time that training waits for copies, and of what a loss takes back: half an interval, on average."""

    def cost(every_s: float) -> float:
        return pause_s / every_s + every_s / (2 * mtbf_s)

    found = interval_s(pause_s, 0.0, mtbf_s)
    assert found >= SHORTEST_S
    if found > SHORTEST_S:
        assert found == pytest.approx(math.sqrt(2 * pause_s * mtbf_s))
        assert cost(found) <= min(cost(found * 0.9), cost(found * 1.1))
    else:
        assert cost(SHORTEST_S) <= cost(SHORTEST_S * 1.1), "a longer one would be better"


def test_writing_takes_half_of_the_time_at_most() -> None:
    assert interval_s(0.5, 400.0, 3600.0) == 800.0
    assert interval_s(0.0, 0.0, 3600.0) == SHORTEST_S, "nothing was measured yet"


def test_losses_that_are_seen_count_more_than_what_is_expected_before() -> None:
    assert LossRate().mtbf_s == PRIOR_S
    calm, busy = LossRate().plus(36 * 3600.0, 0), LossRate().plus(3600.0, 30)
    assert calm.mtbf_s == 37 * 3600.0 and busy.mtbf_s == pytest.approx(2 * 3600.0 / 31)
    assert interval_s(2.0, 0.0, busy.mtbf_s) == SHORTEST_S < interval_s(2.0, 0.0, calm.mtbf_s) < 800
    assert busy.plus(0.0, 1) == LossRate(seconds=3600.0, losses=31)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "often", True, None])
def test_an_interval_that_is_none_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'"bamboo\.checkpoint\.every_s" is .*it must be "auto", a number of seconds'):
        parse_block({"checkpoint": {"every_s": value}})


def test_a_place_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r'"bamboo\.checkpoint\.dir" is .*the path of a folder'):
        parse_block({"checkpoint": {"dir": " "}})
    lacking = [CheckpointConfig(every_s=every).lacks_place for every in ("auto", 0, 90)]
    assert lacking == [False, False, True]
    assert not CheckpointConfig(every_s=90, dir="/own").lacks_place


# -- where ----------------------------------------------------------------------------------------------------


def test_the_place_is_where_the_script_saves() -> None:
    history = History()
    history.add("load", {"folder": "/model", "tag": "base", "ours": False})
    assert history.place is None, "the script begins with what others have made there"
    history.add("load", {"folder": "/run", "tag": None, "ours": True})
    assert history.place == "/run"
    history.add("save", {"folder": "/first", "tag": "1", "save_id": "a"})
    history.add("save", {"folder": "/second", "tag": "1", "save_id": "b"})
    history.add("load", {"folder": "/first", "tag": "1", "ours": True})
    assert history.place == "/second"


# -- who says so ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writes", "agreed"), [(False, 7), (True, 0)])
def test_members_take_it_together_or_not_at_all(writes: bool, agreed: int) -> None:
    layout = Layout(1, 2)
    parts = [Contribution({0: [0.5]}, {}, own=7), Contribution({}, {}, writes=writes)]
    total: torch.Tensor = sum(encode(layout, Form(), part) for part in parts)  # type: ignore[assignment]
    assert decode(layout, Form(), total.tolist()).own == agreed


def taker(saves: Any, every_s: Any = 5.0, steps: int = 3) -> Any:
    """What decides on a member that leads in epoch 7, which has seen no losses yet."""
    progress = SimpleNamespace(agreed=SimpleNamespace(own=7), steps=steps, rate=LossRate)
    context = SimpleNamespace(
        settings=SimpleNamespace(checkpoint=CheckpointConfig(every_s=every_s)),
        epoch=SimpleNamespace(plan=SimpleNamespace(epoch=7), leads=True),
        progress=progress,
        recording=SimpleNamespace(span=lambda kind: nullcontext()),
        binding=None,
    )
    saves.begun, saves.written_s, saves.writes = time.monotonic(), 0.0, False
    saves.own_folder = lambda: Path("/own/job")
    return OwnCheckpoints(context, saves)  # type: ignore[arg-type]


def test_one_is_due_when_the_last_one_of_either_kind_is_old_enough() -> None:
    saves: Any = SimpleNamespace()
    own = taker(saves)
    assert own.due() == (0, False)
    saves.begun -= 5.0
    assert own.due() == (7, False)
    saves.writes = True
    assert own.due() == (7, True), "all members hear that this one writes, and none takes part"
    own = taker(saves, every_s="auto")
    saves.begun -= SHORTEST_S - 1
    assert own.due() == (0, False)
    saves.begun -= 1
    assert own.due() == (7, False)
    saves.written_s = 50.0
    assert own.due() == (0, False)
    own = taker(saves, every_s=0)
    saves.begun -= 1e6
    assert own.due() == (0, False)


def test_a_stage_that_cannot_be_copied_ends_the_own_ones_and_not_the_job() -> None:
    told = []

    def collect(*_: Any) -> bool:
        raise TypeError("cannot pickle '_thread.lock' object")

    saves: Any = SimpleNamespace(collect=collect, give_up=lambda *facts: told.append(facts))
    own = taker(saves)
    saves.begun -= 5.0
    assert own.due() == (7, False)
    own.take()
    ((path, step, error),) = told
    assert (path, step, type(error)) == (Path("/own/job/step3"), 3, TypeError)
    assert own.due() == (7, True), "no member takes part any more"


# -- writing --------------------------------------------------------------------------------------------------

ALONE = Layout(1, 1)


def test_two_are_kept_and_no_spares_are_made(members: Callable[..., Member], tmp_path: Path) -> None:
    folder = own_folder(tmp_path, "job")
    member = members(0, folder, keep=1)
    for step in (1, 2, 3):
        member.save(step, layout=ALONE, own=True, latest=False).wait()
    assert sorted(p.name for p in folder.iterdir()) == ["step2", "step3"] and not member.failed
    assert [info.tag for info in list_own(tmp_path)] == ["step2", "step3"] and list_checkpoints(tmp_path) == []


def test_one_of_the_script_s_goes_first(members: Callable[..., Member], tmp_path: Path) -> None:
    """The other member of the first one never writes, so that it would last until its timeout."""
    member = members(0)
    member.begin(1, own=True)
    member.saver.add(0, [])
    member.saver.submit()
    assert member.saver.busy and not member.saver.owes
    member.save(2, layout=ALONE).wait()
    assert [result.step for result in member.complete] == [2]
    assert [(result.step, result.aborted) for result in member.failed] == [(1, True)]


def test_the_end_waits_for_none(members: Callable[..., Member]) -> None:
    member = members(0)
    member.begin(1, own=True)
    member.saver.add(0, [])
    member.saver.submit()
    member.saver.give_way()
    member.wait()
    assert [(result.step, result.aborted) for result in member.failed] == [(1, True)]


def test_the_list_says_whose_they_are(members: Callable[..., Member], tmp_path: Path) -> None:
    members(0, tmp_path).save(1, layout=ALONE).wait()
    members(0, own_folder(tmp_path, "job")).save(2, layout=ALONE, own=True, latest=False).wait()
    told = CliRunner().invoke(cli, ["checkpoints", str(tmp_path)])
    lines = [line for line in told.output.splitlines() if "step" in line]
    assert told.exit_code == 0 and ["(own)" in line for line in lines[-2:]] == [False, True], told.output


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
