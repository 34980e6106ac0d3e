"""The demo proves what it says, and would notice if it were not so; ready configurations are valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.cli.demo.compare import compare_checkpoints, compare_losses
from bamboo_ds.config import bamboo_config

pytestmark = pytest.mark.claim("quickstart.md")

ROOT = Path(__file__).parents[3]


def _checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    state = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}},
            "param_groups": [{"lr": 0.1}],
        },
        "global_steps": 3,
        "ds_config": {"bamboo": folder.name},
        **changes,
    }
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    torch.save({"weight": torch.zeros(3)}, folder / "layer_00-model_states.pt")
    return folder


def test_comparison_of_equal_checkpoints(tmp_path: Path) -> None:
    results = compare_checkpoints(_checkpoint(tmp_path / "a"), _checkpoint(tmp_path / "b"))
    assert [(r.what, r.equal) for r in results] == [
        ("weights", True),
        ("optimizer state", True),
        ("schedule and counters", True),
    ]


@pytest.mark.parametrize("difference", ["weight", "sign", "moment", "counter", "missing"])
def test_comparison_finds(tmp_path: Path, difference: str) -> None:
    a = _checkpoint(tmp_path / "a")
    moment = torch.ones(4)
    if difference == "moment":
        moment[2] = torch.nextafter(moment[2], torch.tensor(2.0))
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moment}}, "param_groups": [{"lr": 0.1}]}
    b = _checkpoint(tmp_path / "b", optimizer=optimizer, global_steps=4 if difference == "counter" else 3)
    if difference in ("weight", "sign"):
        value = -0.0 if difference == "sign" else 1e-30
        torch.save({"weight": torch.tensor([0.0, 0.0, value])}, b / "layer_00-model_states.pt")
    if difference == "missing":
        (b / "mp_rank_00_model_states.pt").unlink()
    wrong = [result.what for result in compare_checkpoints(a, b) if not result.equal]
    expected = {"weight": "weights", "sign": "weights", "moment": "optimizer state"}
    assert expected.get(difference, "schedule and counters") in wrong


def test_comparison_of_losses(tmp_path: Path) -> None:
    for name, losses in (("a", [2.0, 1.0]), ("b", [2.0, 1.0000000000000002]), ("nan", [2.0, float("nan")])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses-0.json").write_text(json.dumps(losses))
    assert compare_losses(tmp_path / "a", tmp_path / "a", steps=2).equal
    assert not compare_losses(tmp_path / "a", tmp_path / "b", steps=2).equal
    assert not compare_losses(tmp_path / "a", tmp_path / "a", steps=3).equal
    assert not compare_losses(tmp_path / "nan", tmp_path / "nan", steps=2).equal, "no proof of anything"
    (tmp_path / "c").mkdir()
    assert not compare_losses(tmp_path / "a", tmp_path / "c", steps=2).equal


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.name)
def test_ready_configurations_are_valid(path: Path) -> None:
    assert bamboo_config(path) is not None
