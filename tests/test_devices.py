"""Which GPU a worker gets, and what carries its tensors. No GPU is needed, and none is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bamboo_ds.comm import inner
from bamboo_ds.comm.inner import GLOO, NCCL, kind_for, use_for_cuda
from bamboo_ds.control.agent.command import local_rank
from bamboo_ds.control.settings import AgentSettings, parse_arguments

CUDA = torch.device("cuda")


def settings(slot: int, home: int | None = None) -> AgentSettings:
    options = [f"--slot={slot}", "--world-size=4", "--job=j", "--store=http://127.0.0.1:1", "--parent-pid=1"]
    return parse_arguments([*options, *([f"--home={home}"] if home is not None else []), "--", "true"])


@pytest.mark.parametrize(
    ("slot", "home", "visible", "driver", "expected"),
    [
        (3, None, None, 0, 3),
        (3, None, None, 4, 3),
        (3, None, None, 1, 0),
        (3, None, "0,2", 4, 1),
        (3, None, "", 4, 3),
        (3, None, "-1", 4, 3),
        (6, 3, None, 4, 3),
        (7, 3, None, 4, 3),
        (7, 3, None, 0, 3),
    ],
)
def test_local_ranks(
    tmp_path: Path, slot: int, home: int | None, visible: str | None, driver: int, expected: int
) -> None:
    for gpu in range(driver):
        (tmp_path / "gpus" / str(gpu)).mkdir(parents=True)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_rank(settings(slot, home), environ, tmp_path / "gpus") == expected


@pytest.mark.parametrize(
    ("gpus", "nccl", "chosen", "expected"),
    [(True, True, NCCL, NCCL), (True, True, GLOO, GLOO), (True, False, NCCL, GLOO), (False, True, NCCL, GLOO)],
)
def test_kinds(monkeypatch: pytest.MonkeyPatch, gpus: bool, nccl: bool, chosen: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(inner, "_cuda_kind", NCCL)  # put back afterwards
    use_for_cuda(chosen)
    assert kind_for(CUDA) == expected
    assert kind_for(torch.device("cpu")) == GLOO
