"""Which GPU a worker gets, and what carries its tensors. No GPU is needed, and none is used."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from bamboo_ds.comm import inner, nccl
from bamboo_ds.comm.inner import GLOO, NCCL, kind_for, use_for_cuda
from bamboo_ds.config import BambooConfig
from bamboo_ds.control.agent.command import local_rank
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.worker.channel import WorkerChannel
from bamboo_ds.worker.job import Job

from .support.settings import agent

pytestmark = pytest.mark.claim("reference/limits.md", "reference/settings.md")

CUDA = torch.device("cuda")


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
    assert local_rank(agent(slot=slot, home=home), environ, tmp_path / "gpus") == expected


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


def test_the_setting_holds_from_the_first_group_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job knows it before its script can have a group of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(inner, "_cuda_kind", NCCL)
    block = BambooConfig.model_validate({"comm": {"cuda_backend": "gloo"}})
    here, there = socket.socketpair()
    with here, there:
        channel = WorkerChannel(
            there, member="a", job="j", rank=0, world_size=1, address="127.0.0.1", settings=JobSettings(open=True)
        )
        job = Job(channel, block, timedelta(seconds=1))
        try:
            assert kind_for(CUDA) == GLOO
            job.settings = BambooConfig()
            assert kind_for(CUDA) == NCCL, "a block that initialize gets first"
        finally:
            job.session.close()


def test_torch_leaves_losses_to_the_epoch() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "false", "PATH": "/bin"}
    assert nccl.prepare(environ) == []
    assert environ.pop("TORCH_NCCL_ENABLE_MONITORING") == "false" and environ.pop("PATH") == "/bin"
    assert environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_what_the_user_has_set_stays_and_is_told(name: str, value: str) -> None:
    environ = {name: value}
    (told,) = nccl.prepare(environ)
    assert told.startswith(f"{name}={value}: ") and environ[name] == value
    assert nccl.prepare({"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "600"}) == []


def test_torch_knows_the_names() -> None:
    """Those of its header; the two about communicators that are not there yet are in its sources alone."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    known = header.read_text()
    for setting in nccl.SETTINGS:
        if not setting.name.startswith(("TORCH_NCCL_USE_COMM", "TORCH_NCCL_NONBLOCKING")):
            for name in (setting.name, *setting.old):
                assert f'"{name}"' in known


def test_the_manual_has_what_workers_set() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/settings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `TORCH_NCCL_")]
    assert rows == [f"| `{setting.name}` | {setting.value} | {setting.why} |" for setting in nccl.SETTINGS]
