"""Checkpoints of a bamboo job: complete or absent, and DeepSpeed's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .support.compare import assert_equal, differences
from .support.jobs import Result, run_bamboo, run_stock, write_config

pytestmark = pytest.mark.integration
Reference = Callable[..., Result]


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


@pytest.mark.parametrize(("rank", "at"), [(1, "._save_checkpoint"), (0, "._save_checkpoint"), (2, ".save_checkpoint")])
def test_loss_while_saving(tmp_path: Path, reference: Reference, rank: int, at: str) -> None:
    arguments = ("--steps", "4", "--save-every", "2")
    undisturbed = reference(3, 1, 4, *arguments)
    faults = [{"rank": rank, "step": 2, "at": at, "micro_batch": None}]
    command = ["--stages", "3", *arguments, "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 3, command, write_config(tmp_path, {}, 4))
    assert_equal(result, undisturbed, faults)
    mine, theirs = tmp_path / "checkpoints", undisturbed.out / "checkpoints"
    assert (mine / "latest").read_text() == (theirs / "latest").read_text() == "step4"
    assert sorted(p.name for p in mine.iterdir()) == ["latest", "step2", "step4"]
    for tag in ("step2", "step4"):
        ours = without_config(contents(mine / tag))
        stock = without_config(contents(theirs / tag))
        assert differences(stock, ours) == []


@pytest.mark.parametrize("direction", ["stock-to-bamboo", "bamboo-to-stock"])
def test_checkpoints_are_deepspeeds(tmp_path: Path, direction: str) -> None:
    runs = {"stock": run_stock, "bamboo": run_bamboo}
    first, second = direction.split("-to-")
    folders = {name: tmp_path / name for name in ("whole", "first", "second")}
    for folder in folders.values():
        folder.mkdir()

    def run(kind: str, folder: Path, *arguments: str) -> Result:
        config = write_config(folder, {} if kind == "bamboo" else None, 4)
        result = runs[kind](folder, 2, ["--stages", "2", *arguments], config)
        assert result.exit_code == 0, result.output[-4000:]
        return result

    whole = run("stock", folders["whole"], "--steps", "4")
    run(first, folders["first"], "--steps", "2", "--save-every", "2")
    load = str(folders["first"] / "checkpoints")
    resumed = run(second, folders["second"], "--steps", "2", "--load", load, "--skip", "2")
    assert resumed.ranks()[0]["losses"] == whole.ranks()[0]["losses"][2:]
    assert differences(whole.roles(), resumed.roles()) == []
    roles = whole.roles()
    for role, state in resumed.replicas().items():
        assert differences(roles[role], state) == []
    assert bool(resumed.replicas()) == (second == "bamboo")
