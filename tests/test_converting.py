"""Other numbers of stages and pipelines: checkpoints are converted by DeepSpeed, or refused with the cure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bamboo_ds.cli.main import cli
from bamboo_ds.engine.joining.loading import Loader
from bamboo_ds.errors import ConfigError
from bamboo_ds.state.checkpoints import MANIFEST, CheckpointError, Status, list_checkpoints
from bamboo_ds.state.converting import check_layers, choose, convert, tied, whole
from bamboo_ds.state.own import own_folder
from bamboo_ds.state.universal import SETTING, Files, Loading, check_loadable
from bamboo_ds.topology import Layout

from .support.compare import assert_equal, assert_same_states, differences
from .support.gpt_jobs import TRAIN_GPT
from .support.jobs import DEADLINE_S, TRAIN, bamboo_command, environment, run_bamboo, run_stock, write_config
from .support.precisions import BF16_ZERO, FP16_SMALL, FP32_ZERO
from .support.surviving import Reference, fault
from .test_checkpoint import contents, without_config
from .test_resuming import save

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/cli.md")

#: Of a job of four micro-batches for each of two pipelines.
BATCHES = 8
ADAMW = {"zero_allow_untested_optimizer": True}


def converted(folder: Path, into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What ``bamboo checkpoints convert`` has done."""
    command = [sys.executable, bamboo_command(), "checkpoints", "convert", str(folder), "--into", str(into), *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


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
@pytest.mark.parametrize(
    "name",
    [each if each == "tied-fp32" else pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES],
)
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


# -- what is refused ------------------------------------------------------------------------------------------


def fragment(elements: int) -> Any:
    """A part of a parameter in the flat state of a shard."""
    return SimpleNamespace(start=0, numel=elements)


def write(folder: Path, **changes: Any) -> Path:
    """DeepSpeed's files of a small checkpoint of two stages and two pipelines, as far as they are looked at."""
    folder.mkdir(parents=True)
    moments = {"step": 3, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    shard = {"base_optimizer_state": {"state": {0: moments}}} | changes.pop("shard", {})
    layers = changes.pop("layers", {0: ["weight"], 1: ["weight"], 2: ["weight"]})
    for number, keys in layers.items():
        torch.save({key: torch.ones(2) for key in keys}, folder / f"layer_{number:02d}-model_states.pt")
    names = changes.pop("names", [["0.weight", "1.weight"], ["2.weight"]])
    for stage in range(2):
        shapes = [dict.fromkeys(names[stage], torch.Size([2]))]
        torch.save({"param_shapes": shapes}, folder / f"mp_rank_{stage:02d}_model_states.pt")
        for copy in range(2):
            mapping = changes.get("mapping", {}).get((copy, stage), dict.fromkeys(names[stage], 1))
            mapping = {name: fragment(elements) for name, elements in mapping.items()}
            state = {"optimizer_state_dict": shard | {"param_slice_mappings": [mapping]}}
            torch.save(state, folder / f"zero_pp_rank_{copy}_mp_rank_{stage:02d}_optim_states.pt")
    return folder


def refusal(folder: Path) -> str:
    """Why the checkpoint ``step1`` in ``folder`` is not converted; nothing is left of the attempt."""
    with pytest.raises(CheckpointError) as error:
        convert(choose(folder, "step1"), folder / "made")
    assert not (folder / "made").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": {0: ["weight", "mask"], 1: ["weight"], 2: ["weight"]}}, r"^0\.mask of .* buffers.*--allow-missing"),
        ({"shard": {"base_optimizer_state": {"state": {}}}}, "has not taken a step .* convert a later checkpoint"),
        ({"shard": {"base_optimizer_state": {"state": {0: {"momentum_buffer": 1}}}}}, "keeps momentum_buffer"),
        (
            {"shard": {"base_optimizer_state": {"state": {0: dict.fromkeys(("exp_avg", "exp_avg_sq", "max"), 1)}}}},
            "keeps exp_avg, exp_avg_sq, max for each",
        ),
        ({"shard": {"base_optimizer_state": []}}, "elastic_checkpoint: switch that off"),
        ({"layers": {}}, "is no checkpoint of a pipeline"),
    ],
)
def test_what_would_be_left_out_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """DeepSpeed's converter says nothing of it, or fails in its own code."""
    write(tmp_path / "step1", **changes)
    with pytest.raises(AssertionError, match="(?s)" + says):
        raise AssertionError(refusal(tmp_path))


def write_shards(folder: Path, mapping: dict[tuple[int, int], dict[str, Any]], moments: float = 1.0) -> None:
    """Give the shards (by copy and stage) these parts of parameters; moments are the weights and ``moments`` more."""
    for (copy, stage), parts in mapping.items():
        where, at = {}, 0
        for name, part in parts.items():
            where[name] = SimpleNamespace(start=at, numel=len(part))
            at += len(part)
        flat = torch.cat(list(parts.values()))
        kept = {"step": 3, "exp_avg": flat + moments, "exp_avg_sq": flat + 2 * moments}
        base = {"state": {0: kept}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat], "group_paddings": [0]}
        state |= {"partition_count": [2], "param_slice_mappings": [where]}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{copy}_mp_rank_{stage:02d}_optim_states.pt")


A, ONES, ZEROS = "tied_modules.a.weight", torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([ONES, ONES], [ONES, ONES], None),
        ([ONES, ONES], [ZEROS, ZEROS], None),  # the second one is not trained
        ([ZEROS, ZEROS], [ONES, ONES], "is not the same on stages 0 and 1"),
        ([ONES, ONES], [ONES, 2 * ONES], "is not the same on stages 0 and 1"),
        ([ONES, torch.ones(0)], [torch.ones(1), torch.ones(1)], None),
    ],
    ids=["same", "untrained", "only the second is trained", "other values", "sharded differently"],
)
def test_of_tied_layers_the_first_stage_has_what_counts(
    tmp_path: Path, first: list[torch.Tensor], second: list[torch.Tensor], says: str | None
) -> None:
    """Parameters of a tied layer that are not tied themselves may be trained on one stage only."""
    folder = write(tmp_path / "step1", names=[[A], [A]], layers={0: ["weight"], 1: ["weight"]})
    write_shards(folder, {(0, 0): {A: first[0]}, (1, 0): {A: first[1]}, (0, 1): {A: second[0]}, (1, 1): {A: second[1]}},
                 moments=0.0)  # fmt: skip
    if says is None:
        assert tied(folder, Files.in_folder(folder)) == [A]
    else:
        assert says in refusal(tmp_path)


def test_a_frozen_layer_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """Its parameter has the same name, and another value."""
    folder = write(tmp_path / "step1", names=[[A], [A]], layers={0: ["weight"]})
    (tmp_path / "zero" / A).mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, tmp_path / "zero" / A / "fp32.pt")
    files = Files.in_folder(folder)
    check_layers(folder, files, tmp_path)
    torch.save({"weight": torch.full((2,), 3.0)}, folder / "layer_01-model_states.pt")
    files = Files.in_folder(folder)
    check_layers(folder, files)
    with pytest.raises(CheckpointError, match=r"^1\.weight of .* are frozen parameters"):
        check_layers(folder, files, tmp_path)


def test_ties_that_leave_the_first_stage_out(tmp_path: Path) -> None:
    """DeepSpeed's converter writes the parts of both stages into the same files."""
    folder = write(tmp_path / "step1", names=[["0.weight"], [A]])
    shapes = {"param_shapes": [{A: torch.Size([2])}]}
    torch.save(shapes, folder / "mp_rank_02_model_states.pt")
    both = {(copy, stage): {A: torch.ones(1)} for copy in range(2) for stage in (1, 2)}
    write_shards(folder, both)
    assert tied(folder, Files.in_folder(folder)) == []
    write_shards(folder, both | {(0, 2): {A: torch.ones(2)}, (1, 2): {A: torch.ones(0)}})
    assert "have sharded it differently" in refusal(tmp_path)


@pytest.mark.parametrize("lost", ["zero_pp_rank_1_mp_rank_01_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_files_that_are_missing(tmp_path: Path, lost: str) -> None:
    """Stock DeepSpeed's checkpoint has no manifest that would tell."""
    (write(tmp_path / "step1") / lost).unlink()
    assert "is not complete: there are only" in refusal(tmp_path)


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "step1", files={"mp_rank_00_model_states.pt": {"size": 3, "crc32": 5}})
    (tmp_path / "step1" / "mp_rank_00_model_states.pt").write_text("abc")
    assert "is damaged: mp_rank_00_model_states.pt: has CRC-32" in refusal(tmp_path)
    (tmp_path / "step1" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="there is no checkpoint 'step2'"):
        choose(tmp_path, "step2")


def test_slices_need_the_scripts_word(tmp_path: Path) -> None:
    folder = write(tmp_path / "step1", layers={})
    for number in range(3):
        for part in range(2):
            torch.save({}, folder / f"layer_{number:02d}-model_{part:02d}-model_states.pt")
    assert "the script must save 'universal_checkpoint_info'" in refusal(tmp_path)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"universal_checkpoint_info": {}}, file)
    assert whole(choose(tmp_path, "step1")).slices == 2


def test_without_zero_the_cure_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "step1")
    for file in folder.glob("zero_*"):
        file.unlink()
    told = refusal(tmp_path)
    assert "load_module_only=True" in told and '"zero_optimization": {"stage": 1}' in told


def test_the_target_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "step1")
    (tmp_path / "made" / "step1_universal").mkdir(parents=True)
    done = CliRunner().invoke(cli, ["checkpoints", "convert", str(tmp_path), "--into", str(tmp_path / "made")])
    assert isinstance(done.exception, ConfigError) and "exists already" in str(done.exception)


def test_which_one_is_chosen(tmp_path: Path) -> None:
    """The one that ``latest`` names, or else the newest; one of the job's own by its tag, or in its folder."""
    for serial, tag in enumerate(("step3", "step5"), 1):
        save(tmp_path, tag, serial=serial, step=int(tag[4:]))
    own = own_folder(tmp_path, "job")
    save(own, "step7", step=7)
    save(own, "step5", step=5)
    assert choose(tmp_path, None).tag == "step5"
    (tmp_path / "latest").write_text("step3")
    assert choose(tmp_path, None).tag == "step3"
    assert choose(tmp_path / "step5", None).tag == "step5"
    assert choose(tmp_path, "step7").own and not choose(tmp_path, "step5").own
    assert choose(own, None).tag == "step7" and choose(own, "step5").own
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CheckpointError, match="there are no checkpoints"):
        choose(tmp_path / "nothing", None)


# -- what is loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "state", "loads"),
    [
        (Layout(2, 2), True, True),
        (Layout(1, 2), True, False),
        (Layout(2, 4), True, False),
        (Layout(2, 4), False, True),
        (Layout(1, 1), False, True),
    ],
)
def test_what_fits_is_loaded(tmp_path: Path, layout: Layout, state: bool, loads: bool) -> None:
    write(tmp_path / "step1")

    def check(tag: str | None = "step1") -> None:
        check_loadable(str(tmp_path), tag, layout, Loading(universal=False, zero=True, state=state))

    check(None)  # DeepSpeed finds no `latest`, and says so
    if loads:
        check()
        return
    with pytest.raises(CheckpointError, match=rf"convert {tmp_path} --tag step1 --into FOLDER"):
        check()
    (tmp_path / "latest").write_text("step1")
    with pytest.raises(CheckpointError, match=rf"convert {tmp_path} --into FOLDER"):
        check(None)


def test_kinds_of_checkpoints_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "step1")

    def check(folder: str, tag: str | None, layout: Layout, universal: bool) -> None:
        check_loadable(folder, tag, layout, Loading(universal, zero=True))

    with pytest.raises(CheckpointError, match="is no universal checkpoint: leave that line out"):
        check(str(tmp_path), "step1", Layout(2, 2), universal=True)
    (tmp_path / "latest").write_text("step1")
    with pytest.raises(CheckpointError, match="step1 is no universal checkpoint"):
        check(str(tmp_path), None, Layout(2, 2), universal=True)
    (tmp_path / "u" / "zero").mkdir(parents=True)
    (tmp_path / "u" / "zero" / "optimizer_state.pt").touch()
    check(str(tmp_path), "u", Layout(3, 2), universal=True)
    with pytest.raises(CheckpointError, match=r"u is a universal checkpoint: .*load_universal"):
        check(str(tmp_path), "u", Layout(2, 2), universal=False)


def test_plain_state_of_other_stages_is_never_loaded(tmp_path: Path) -> None:
    """DeepSpeed would give the first stage's optimizer state to all."""
    folder = write(tmp_path / "step1")
    for file in folder.glob("zero_*"):
        file.unlink()
    plain, zero = (Loading(universal=False, zero=each) for each in (False, True))
    check_loadable(str(tmp_path), "step1", Layout(5, 2), plain)
    check_loadable(str(tmp_path), "step1", Layout(1, 3), zero)  # which loads the weights alone
    with pytest.raises(CheckpointError, match="Without ZeRO DeepSpeed cannot convert"):
        check_loadable(str(tmp_path), "step1", Layout(1, 3), plain)


@pytest.mark.parametrize("refusing", [("m0", "m1"), ("m1",)], ids=["all", "one"])
def test_one_member_tells_why_no_member_loads(
    tmp_path: Path, refusing: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Before any of them ends. Also those raise it whose own files fit."""
    write(tmp_path / "step1")
    met: list[str] = []
    for member in ("m0", "m1"):
        layout = Layout(1, 2) if member in refusing else Layout(2, 2)
        told = {each: "why" * (each in refusing) for each in ("m0", "m1")}
        transport = SimpleNamespace(
            exchange=lambda own, told=told, member=member: {**told, member: own and "why"},
            barrier=lambda member=member: met.extend([member, *caplog.messages]),
        )
        epoch = SimpleNamespace(member=member, transport=transport)
        context: Any = SimpleNamespace(epoch=epoch, layout=layout)
        nothing: Any = None
        with pytest.raises(CheckpointError, match=r"^why$") as error:
            Loader(context, nothing, nothing)._check(str(tmp_path), "step1", Loading(universal=False, zero=True))
        assert error.value.told_by == refusing[0]
        assert met == [member, *(["why"] if member == refusing[0] else [])]
        met.clear()
        caplog.clear()


def test_the_list_is_still_there(tmp_path: Path) -> None:
    save(tmp_path, "step1")
    for words in ([str(tmp_path)], ["--verify", str(tmp_path)], ["list", str(tmp_path)]):
        done = CliRunner().invoke(cli, ["checkpoints", *words, "--json"])
        assert done.exit_code == 0 and '"step1"' in done.output
    assert list_checkpoints(tmp_path)[0].status is Status.COMPLETE
