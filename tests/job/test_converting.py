"""Other numbers of stages and pipelines: checkpoints are converted by DeepSpeed, or refused with the cure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.state.checkpoints import Status
from bamboo_ds.state.converting import choose, convert, tied
from bamboo_ds.state.own import own_folder
from bamboo_ds.state.universal import SETTING, Files
from tests.job.test_checkpoint import contents, without_config
from tests.support.compare import assert_equal, assert_same_states, differences
from tests.support.gpt_jobs import TRAIN_GPT
from tests.support.jobs import DEADLINE_S, TRAIN, environment, run_bamboo, run_stock, write_config
from tests.support.precisions import BF16_ZERO, FP16_SMALL, FP32_ZERO
from tests.support.surviving import Reference, fault
from tests.unit.state.test_converting import A, converted, write, write_shards

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/cli.md")

#: Of a job of four micro-batches for each of two pipelines.
BATCHES = 8
ADAMW = {"zero_allow_untested_optimizer": True}


def stocks_way(checkpoint: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """What DeepSpeed's converter has done by itself."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--input_folder", str(checkpoint)]
    command += ["--output_folder", str(into / f"{checkpoint.name}_universal")]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def files_of(folder: Path) -> dict[str, object]:
    """Every file, without what ``bamboo checkpoints convert`` tells DeepSpeed's converter in them."""
    found = without_config(contents(folder))
    for content in found.values():
        if isinstance(content, dict):
            content.pop("universal_checkpoint_info", None)
    return found


@dataclass(frozen=True)
class Case:
    """A job whose checkpoint is converted: stages and pipelines before and after, and DeepSpeed's settings."""

    before: tuple[int, int]
    after: tuple[int, int]
    settings: dict[str, Any]
    script: Path = TRAIN_GPT
    own: bool = False

    @property
    def model(self) -> list[str]:
        """Equal numbers of layers, whatever the stages."""
        return ["--layers", "8" if self.script == TRAIN else "4"]


CASES = {
    "tied-bf16": Case((4, 1), (2, 2), BF16_ZERO),
    "tied-fp16": Case((2, 2), (4, 1), FP16_SMALL | FP32_ZERO),
    "tied-fp32": Case((4, 1), (2, 1), FP32_ZERO),
    "own": Case((2, 2), (4, 1), BF16_ZERO, TRAIN, own=True),
}


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_other_stages_go_on_alike(tmp_path: Path, reference: Reference, name: str) -> None:
    """A job that has lost a member, and saved: its checkpoint is converted to what stock's is, and goes on alike.

    The job that goes on loses a member as well. In its pipelines each role brings only its own shard of the parameters
    up to date when it loads.
    """
    case = CASES[name]
    (stages, pipelines), settings = case.before, case.settings | ADAMW
    micro_batches = BATCHES // pipelines
    first, mine, theirs, stock, ours = (tmp_path / each for each in ("first", "mine", "theirs", "stock", "ours"))
    for folder in (first, theirs, stock, ours):
        folder.mkdir()
    saves = (*case.model, "--steps", "6") if case.own else (*case.model, "--steps", "4", "--save-every", "4")
    block = {"checkpoint": {"dir": str(first / "checkpoints"), "every_s": 0.01}} if case.own else None
    every = (*case.model, "--steps", "6", "--save-every", "1") if case.own else (*saves, "--describe")
    undisturbed = reference(stages, pipelines, micro_batches, *every, script=case.script, **settings)
    faults = [fault(1, 1, "ForwardPass")]
    command = ["--stages", str(stages), *saves, "--faults", json.dumps(faults)]
    command += ["--slow-until", str(first / "never"), "--slow-s", "0.5"] if case.own else []  # time to write
    config = write_config(first, block or {}, micro_batches, **settings)
    lossy = run_bamboo(first, stages * pipelines, command, config, case.script)
    assert_equal(lossy, undisturbed, faults)
    saved = first / "checkpoints"
    saved = own_folder(saved, next(path.name for path in (saved / ".bamboo-own").iterdir())) if case.own else saved
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    source = choose(saved, None)
    assert source.status is Status.COMPLETE and source.own is case.own and (source.step or 0) > 1, "after the loss"

    done = converted(saved, mine)
    assert done.returncode == 0, done.stderr
    assert SETTING in done.stdout and ("client_state" in done.stderr) is case.own
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in mine.iterdir()) == ["latest_universal", f"{source.tag}_universal"]
    done = stocks_way(undisturbed.out / "checkpoints" / f"step{source.step}", theirs)
    assert done.returncode == 0, done.stderr
    tag = f"step{source.step}_universal"
    differing = differences(files_of(theirs / tag), files_of(mine / f"{source.tag}_universal"))
    assert all(line.startswith("/mp_rank_") and case.own for line in differing), differing[:10]

    stages, pipelines = case.after
    length = ["--steps", "4", "--skip", str(source.step)] if case.script == TRAIN else ["--steps", "8"]
    command = ["--stages", str(stages), *case.model, *length]
    settings |= {"checkpoint": {"load_universal": True}}
    micro_batches = BATCHES // pipelines
    plain = write_config(stock, None, micro_batches, **settings)
    undisturbed = run_stock(stock, stages * pipelines, [*command, "--load", str(theirs)], plain, case.script)
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    config = write_config(ours, {}, micro_batches, **settings)
    command += ["--load", str(mine), "--faults", json.dumps(faults)]
    result = run_bamboo(ours, stages * pipelines, command, config, case.script)
    assert_equal(result, undisturbed, faults)
    assert all(len(dump["losses"]) == 4 for dump in result.ranks().values())


@pytest.mark.integration
def test_tied_weights_that_stages_have_sharded_differently(tmp_path: Path) -> None:
    """DeepSpeed's converter mixes their parts up unless it is told of them; and it counts files of layers."""
    weights, other = torch.arange(6.0), torch.zeros(4)
    names, sizes = [[A], ["2.weight", A]], {A: 6, "2.weight": 4}
    folder = write(tmp_path / "step1", names=names, layers={0: ["weight"], 2: ["weight"]})
    parts = {(0, 0): {A: weights[:3]}, (1, 0): {A: weights[3:]}}
    write_shards(folder, parts | {(0, 1): {"2.weight": other, A: weights[:1]}, (1, 1): {A: weights[1:]}})
    for stage in range(2):
        shapes = [{name: torch.Size([sizes[name]]) for name in names[stage]}]
        dimensions = {"pp_degree": 2, "tp_degree": 1}
        content = {"param_shapes": shapes, "checkpoint_parallel_dimensions": dimensions, "module": None}
        torch.save(content, folder / f"mp_rank_{stage:02d}_model_states.pt")
    torch.save({"weight": weights}, folder / "layer_00-model_states.pt")
    assert tied(folder, Files.in_folder(folder)) == [A]
    assert stocks_way(folder, tmp_path).returncode != 0
    made = convert(choose(tmp_path, "step1"), tmp_path / "mine").path
    told = torch.load(made / "mp_rank_00_model_states.pt", weights_only=False)["universal_checkpoint_info"]
    assert told["pipeline_replicated_parameter_patterns"] == [rf"{re.escape(A)}$"], "whoever comes last does not win"
    for kind, more in (("fp32", 0), ("exp_avg", 1), ("exp_avg_sq", 2)):
        found = torch.load(made / "zero" / A / f"{kind}.pt", weights_only=False)["param"]
        assert torch.equal(found, weights + more)


@pytest.mark.integration
def test_a_job_with_other_stages_says_what_to_do(tmp_path: Path, reference: Reference) -> None:
    """Before its first step, where stock DeepSpeed loads wrong state or fails in its own code; one rank says why."""
    arguments = ("--layers", "4", "--steps", "4", "--save-every", "4", "--describe")
    saved = reference(4, 1, 8, *arguments, script=TRAIN_GPT, **BF16_ZERO, **ADAMW).out / "checkpoints"
    config = write_config(tmp_path, {}, 8, **BF16_ZERO, **ADAMW)
    command = ["--stages", "2", *arguments, "--load", str(saved)]
    result = run_bamboo(tmp_path, 2, command, config, TRAIN_GPT)
    assert result.exit_code != 0 and not result.events("step")
    why = "is of a job of 4 stages x 1 pipeline, and this one has 2 stages x 1 pipeline"
    lines = [line for line in result.output.splitlines() if why in line]
    assert len([line for line in lines if not line.startswith("[bamboo]")]) == 1
    assert len([line for line in lines if line.startswith("[bamboo] first failure: worker")]) == 1
    assert f"bamboo checkpoints convert {saved} --into FOLDER" in result.output
    assert re.search(r"bamboo_ds: CheckpointError: m0-\w+ tells why$", result.output, re.MULTILINE)
    assert "bamboo_ds/engine" not in result.output


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "pipelines", "only"), [(4, 1, True), (2, 2, False)], ids=["weights", "pipelines"])
def test_without_zero(tmp_path: Path, reference: Reference, stages: int, pipelines: int, only: bool) -> None:
    """Weights alone fit other stages, all state other numbers of pipelines: as with stock DeepSpeed."""
    saved = reference(2, 1, 8, "--layers", "4", "--steps", "2", "--save-every", "2", script=TRAIN_GPT).out
    command = ["--stages", str(stages), "--layers", "4", "--steps", "4", "--load", str(saved / "checkpoints")]
    command += ["--weights-only"] if only else []
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir()
    ours.mkdir()
    size, micro_batches = stages * pipelines, BATCHES // pipelines
    undisturbed = run_stock(stock, size, command, write_config(stock, None, micro_batches), TRAIN_GPT)
    result = run_bamboo(ours, size, command, write_config(ours, {}, micro_batches), TRAIN_GPT)
    assert undisturbed.exit_code == result.exit_code == 0, result.output[-4000:]
    assert result.ranks()[0]["losses"] == undisturbed.ranks()[0]["losses"]
    assert_same_states(result, undisturbed)
