"""Checkpoints of a bamboo job: written while it trains, complete or absent, and DeepSpeed's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.state.checkpoints import LOSSES, newest_complete, verify
from tests.support.compare import assert_equal, assert_same_states, differences
from tests.support.faults import in_turn, mark
from tests.support.jobs import DEADLINE_S, Result, environment, run_bamboo, run_stock, slow_until, write_config
from tests.support.precisions import BF16_ZERO, FP16_ZERO
from tests.support.surviving import Reference, fault, survive

pytestmark = [
    pytest.mark.claim(
        "guides/checkpoints.md", "reference/events.md", "reference/guarantees.md", "reference/settings.md"
    ),
    pytest.mark.integration,
]


def contents(folder: Path) -> dict[str, object]:
    """Every file of a checkpoint."""
    files = sorted(f for f in folder.rglob("*.pt"))
    # DeepSpeed stores its configuration object besides tensors; these files are our own tests'.
    return {str(f.relative_to(folder)): torch.load(f, weights_only=False) for f in files}


def without_config(checkpoint: dict[str, object]) -> dict[str, object]:
    for content in checkpoint.values():
        if isinstance(content, dict):
            content.pop("ds_config", None)
    return checkpoint


def assert_same_files(mine: Path, stocks: Path) -> None:
    """A complete checkpoint with the content of stock DeepSpeed's."""
    assert verify(mine) == []
    assert differences(without_config(contents(stocks)), without_config(contents(mine))) == []


def run_with_losses(
    folder: Path, reference: Reference, faults: list[dict[str, Any]], stages: int, **settings: Any
) -> Result:
    """A job that saves at every other step and bears ``faults`` one by one; it ends soon after the last."""
    last = folder / mark(faults[-1])
    saves = ["--stages", str(stages), "--save-every", "2"]
    command = [*saves, *slow_until(last, 0.1), "--faults", json.dumps(in_turn(*faults))]
    result = run_bamboo(folder, stages, command, write_config(folder, {"checkpoint": settings}, 4))
    undisturbed = reference(stages, 1, 4, "--save-every", "2", *result.length)
    assert_equal(result, undisturbed, faults)
    lost = {event["member_id"] for event in result.events("member_lost")}  # others hand roles on, to even them out
    led = [e["from"][:2] for e in result.events("takeover_planned") if e["role"] == [0, 0] and e["from"] in lost]
    assert led == ["m0", f"m{stages - 1}"], "these were to be lost while they led"
    return result


def assert_saved(result: Result, reference: Reference, stages: int, failed: set[int]) -> None:
    """All checkpoints but those of the steps ``failed`` are there, with the content of stock DeepSpeed's."""
    folder, last = result.out / "checkpoints", int(result.length[1])
    steps = {step for step in range(2, last + 1, 2) if step not in failed}
    assert sorted(p.name for p in folder.iterdir()) == sorted(["latest", *(f"step{step}" for step in steps)])
    assert (folder / "latest").read_text() == f"step{max(steps)}"
    undisturbed = reference(stages, 1, 4, "--save-every", "2", *result.length)
    for step in steps:
        assert_same_files(folder / f"step{step}", undisturbed.out / "checkpoints" / f"step{step}")
    assert {e["step"] for e in result.events("checkpoint_saved")} == steps
    assert {e["step"] for e in result.events("checkpoint_failed")} == failed
    losses = json.loads((folder / f"step{max(steps)}" / LOSSES).read_text())
    assert losses == pytest.approx(undisturbed.ranks()[0]["losses"][: max(steps)], rel=1e-6)


#: Stages; who is lost where in a save, one after the other, and whether that checkpoint never appears.
SAVES: dict[str, tuple[int, list[tuple[int, str, bool]]]] = {
    # A follower while it writes, the member that leads the save, and its heir, when all have written their parts.
    "usual": (4, [(1, "@file", True), (0, "._save_checkpoint", False), (3, "@manifest", False)]),
    # A follower, who leads, one with two roles, the heir of the one that led.
    "saving": (
        5,
        [
            (1, "._save_checkpoint", False),
            (0, "._save_checkpoint", False),
            (3, ".save_checkpoint", False),
            (4, ".iteration.commits.agree", False),
        ],
    ),
    "before": (5, [(1, "@file", True), (3, "@part", True), (0, "@file", True), (4, "@manifest", False)]),
    "after": (4, [(0, "@rename", False), (3, "@latest", False)]),
}


@pytest.mark.parametrize(
    "case", ["usual", *(pytest.param(case, marks=pytest.mark.exhaustive) for case in SAVES if case != "usual")]
)
def test_losses_while_saving(tmp_path: Path, reference: Reference, case: str) -> None:
    """Where the script saves, the others save again, the roles that they have taken over included.

    While it is written, training goes on. What everybody has written is completed by another member; else it never
    appears.
    """
    stages, places = SAVES[case]
    faults, waits = [fault(rank, 2, at) for rank, at, _ in places], case == "saving"
    result = run_with_losses(tmp_path, reference, faults, stages, asynchronous=not waits)
    struck = [((tmp_path / mark(each)).read_text(), fails) for each, (_, _, fails) in zip(faults, places, strict=True)]
    tags = [tag for tag, _ in struck if tag]
    assert len(set(tags)) == len(tags) == sum(at[0] == "@" for _, at, _ in places)
    assert_saved(result, reference, stages, {int(tag[4:]) for tag, fails in struck if fails})
    if waits:
        for dump in result.ranks().values():
            assert dump["present"] == [True] * (int(result.length[1]) // 2)


@pytest.mark.exhaustive
def test_killed_while_all_wait(tmp_path: Path, reference: Reference) -> None:
    """``save_checkpoint`` returns when the checkpoint is there, also if it has to be written twice."""
    arguments = ("--steps", "4", "--save-every", "2")
    undisturbed = reference(3, 1, 4, *arguments)
    faults = [fault(0, 2, "@file")]
    config = write_config(tmp_path, {"checkpoint": {"keep": 1}}, 4)
    result = run_bamboo(tmp_path, 3, ["--stages", "3", *arguments, "--faults", json.dumps(faults)], config)
    assert_equal(result, undisturbed, faults)
    assert all(dump["present"] == [True, True] for dump in result.ranks().values())
    assert [(e["step"], e["waited"]) for e in result.events("checkpoint_saved")] == [(2, True), (4, True)]
    assert not result.events("checkpoint_failed")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step4"]


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
            id="layers-by-both",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(BF16_ZERO, id="bf16-zero"),
        pytest.param(FP16_ZERO, id="fp16-zero", marks=pytest.mark.exhaustive),
    ],
)
def test_roles_on_few_members(tmp_path: Path, reference: Reference, layers: dict[str, Any]) -> None:
    """Two pipelines that both write, on fewer and fewer members; stock DeepSpeed goes on from it."""
    undisturbed = reference(2, 2, 4, "--steps", "6", "--save-every", "2", **layers)
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    faults = [fault(0, 1, "BackwardPass"), fault(3, 3, "ForwardPass")]
    folders = {name: tmp_path / name for name in ("first", "second")}
    for folder in folders.values():
        folder.mkdir()
    # The losses must not hit what is still being written.
    config = write_config(folders["first"], {}, 4, **layers)
    command = ["--stages", "2", "--steps", "4", "--save-every", "2", "--faults", json.dumps(faults)]
    first = run_bamboo(folders["first"], 4, command, config)
    assert first.exit_code == 0 and len(first.faults()) == 2, first.output[-4000:]
    saved, theirs = folders["first"] / "checkpoints", undisturbed.out / "checkpoints"
    for tag in ("step2", "step4"):
        assert_same_files(saved / tag, theirs / tag)
    newest = newest_complete(saved, checksums=True)
    assert newest is not None and newest.tag == "step4" and newest.latest
    config = write_config(folders["second"], None, 4, **layers)
    command = ["--stages", "2", "--steps", "2", "--load", str(saved), "--skip", "4"]
    second = run_stock(folders["second"], 4, command, config)
    assert second.exit_code == 0, second.output[-4000:]
    assert second.ranks()[0]["losses"] == undisturbed.ranks()[0]["losses"][4:]
    assert_same_states(second, undisturbed)


@pytest.mark.exhaustive
def test_back_to_a_checkpoint(tmp_path: Path, reference: Reference) -> None:
    """A script goes back to the checkpoint that is still being written, when its roles have other owners already."""
    arguments = ("--steps", "6", "--save-every", "3", "--reload-at", "4")
    undisturbed = reference(3, 1, 4, *arguments)
    faults = [fault(1, 1, "ForwardPass")]
    command = ["--stages", "3", *arguments, "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 3, command, write_config(tmp_path, {"checkpoint": {"keep": 1}}, 4))
    assert_equal(result, undisturbed, faults)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step6"]


@pytest.mark.exhaustive
def test_universal_checkpoints(tmp_path: Path, reference: Reference) -> None:
    """DeepSpeed converts them for other topologies; stock and jobs that lose a member go on from them alike.

    With two pipelines each role brings only its own shard of the parameters up to date when it loads.

    One of the jobs starts again, from a checkpoint of its own.
    """
    saved, stock, ours, restarted = (tmp_path / name for name in ("saved", "stock", "ours", "restarted"))
    for folder in (saved, stock, ours, restarted):
        folder.mkdir()
    faults = [fault(1, 1, "ForwardPass")]
    arguments = ("--steps", "4", "--save-every", "4")  # the warm-up begins with learning rate 0
    survive(saved, reference, faults, 2, 1, arguments, micro_batches=8, **BF16_ZERO)
    checkpoints = saved / "checkpoints"
    whole = reference(2, 1, 8, *arguments, **BF16_ZERO)
    assert_same_files(checkpoints / "step4", whole.out / "checkpoints" / "step4")
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = [f"--input_folder={checkpoints / 'step4'}", f"--output_folder={checkpoints / 'step4_universal'}"]
    subprocess.run([*convert, *folders], env=environment(), check=True, timeout=DEADLINE_S)

    settings = {**BF16_ZERO, "checkpoint": {"load_universal": True}}
    command = ["--stages", "2", "--steps", "4", "--save-every", "2", "--load", str(checkpoints)]
    undisturbed = run_stock(stock, 4, command, write_config(stock, None, 4, **settings))
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    for folder, mode, step in ((ours, "eager-frc-lazy-brc", 1), (restarted, "none", 3)):
        faults = [fault(1, step, "ForwardPass")]
        block = {"redundancy": {"mode": mode}}
        config = write_config(folder, block, 4, **settings)
        result = run_bamboo(folder, 4, [*command, "--faults", json.dumps(faults)], config)
        events = [e for kind in ("step", "checkpoint_saved", "recovered", "restart") for e in result.events(kind)]
        assert {event["global_step"] - event["step"] for event in events} == {4}
        assert {event["step"] for event in result.events("checkpoint_saved")} == {2, 4}
        if mode != "none":
            assert_equal(result, undisturbed, faults)
            continue
        assert result.exit_code == 0, result.output[-4000:]
        (event,) = result.events("restart")
        assert event["checkpoint"] == str(folder / "checkpoints" / "step2")
        assert result.faults() == [mark(f) for f in faults]
        for survivor in result.ranks().values():
            assert survivor["losses"] == undisturbed.ranks()[0]["losses"]
        assert_same_states(result, undisturbed)
