"""Other numbers of stages and pipelines: checkpoints are converted by DeepSpeed, or refused with the cure."""

from __future__ import annotations

import subprocess
import sys
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
from bamboo_ds.state.universal import Files, Loading, check_loadable
from bamboo_ds.topology import Layout
from tests.support.jobs import DEADLINE_S, bamboo_command, environment
from tests.unit.state.test_resuming import save

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/cli.md")


def converted(folder: Path, into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What ``bamboo checkpoints convert`` has done."""
    command = [sys.executable, bamboo_command(), "checkpoints", "convert", str(folder), "--into", str(into), *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


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
        agreement = SimpleNamespace(
            exchange=lambda own, told=told, member=member: {**told, member: own and "why"},
            barrier=lambda member=member: met.extend([member, *caplog.messages]),
        )
        epoch = SimpleNamespace(member=member, agreement=agreement)
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
